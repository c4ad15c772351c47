r"""Warn about rows that show the right answer to the model: from them it learns to copy.

The prompt and the descriptions of the tools are searched for the row's ground truth, alone and in
the forms that graders read (`#### 12`, `\boxed{12}`). A ground truth of a few characters occurs in
many questions by chance, so it counts only in such a form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from agentrl.answers import plain_number, without_signs
from agentrl.trajectory import Sample

FORMS = ("#### {}", "\\boxed{{{}}}", "\\fbox{{{}}}", "Answer: {}", "<answer>{}</answer>")
"""The forms of an answer that graders read."""
SHORT = 4
"""A ground truth with fewer characters counts only in one of the forms."""
PLAIN_SHARE = 0.2
"""Warn if more than this share of rows contains the ground truth alone: some questions name it."""
FORM_SHARE = 0.05
"""Warn if more than this share of rows contains it in such a form: few-shot examples may, too."""


def find_leaks(
    samples: Sequence[Sample], tool_texts: Callable[[Sample], str], file: str = ""
) -> Iterator[str]:
    """Yield a warning for each kind of leak in these rows.

    Args:
        samples: the rows of a file.
        tool_texts: returns the texts that describe a row's tools to the model.
        file: the name of the file, for the messages.
    """
    truths = [(s, truth) for s in samples if (truth := _truth(s))]
    sources: tuple[tuple[str, Callable[[Sample], str]], ...] = (
        ("the prompt", lambda s: "\n".join(m.content for m in s.prompt)),
        ("the descriptions of the tools", tool_texts),
    )
    where = f"{file}: " if file else ""
    for source, read in sources:
        as_answer, plain = [], []
        for sample, truth in truths:
            text = without_signs(read(sample))
            if truth not in text:
                continue
            form = next((f.format(truth) for f in FORMS if _occurs(f.format(truth), text)), "")
            if form:
                as_answer.append((sample, form))
            elif len(truth) >= SHORT and _occurs(truth, text):
                plain.append((sample, truth))
        if len(as_answer) > FORM_SHARE * len(truths):
            sample, form = as_answer[0]
            yield (
                f"{where}{source} of {_share(as_answer, truths)} (first: row {sample.row}) contains"
                f" the right answer in a form that graders read, {form!r:.80}: a model gets the"
                " reward by copying it"
            )
        elif len(plain) > PLAIN_SHARE * len(truths):
            sample, truth = plain[0]
            yield (
                f"{where}{source} of {_share(plain, truths)} (first: row {sample.row}) contains"
                f" the row's ground truth, {truth!r:.80}. Check whether this is intended"
            )


def _truth(sample: Sample) -> str:
    """Return the ground truth as text; "" if it is not a text of one line or a number."""
    truth = sample.ground_truth
    if isinstance(truth, bool) or not isinstance(truth, (str, int, float)):
        return ""
    text = plain_number(truth)
    return "" if "\n" in text else text


def _occurs(phrase: str, text: str) -> bool:
    """Return whether a phrase occurs in the text, and not as a part of longer words."""
    if phrase not in text:
        return False
    before = r"(?<![\w.])" if phrase[:1].isalnum() else ""
    after = r"(?!\w|\.\d)" if phrase[-1:].isalnum() else ""
    return re.search(before + re.escape(phrase) + after, text) is not None


def _share(leaks: Sequence[object], rows: Sequence[object]) -> str:
    return f"{len(leaks)} of {len(rows)} rows" if len(rows) > 1 else "the row"
