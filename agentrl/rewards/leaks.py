r"""Whether a model is told its answers: a reward that can be had by copying teaches copying.

Looked for in what the model reads before it says anything, its prompt and the descriptions of its
tools: the row's ground truth, and the same in the form that a grader looks for (`#### 12`,
`\boxed{12}`). A ground truth of a few characters stands in many a question by chance, so it only
counts in such a form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from agentrl.answers import plain_number, without_signs
from agentrl.trajectory import Sample

FORMS = ("#### {}", "\\boxed{{{}}}", "\\fbox{{{}}}", "Answer: {}", "<answer>{}</answer>")
"""What graders read answers from."""
SHORT = 4
"""A ground truth with fewer characters says nothing where it stands alone."""
PLAIN_SHARE = 0.2
"""Of rows in which it stands as it is: questions name things that may be the answer."""
FORM_SHARE = 0.05
"""Of rows in which it stands as an answer: a few-shot example may happen to have the same one."""


def leaks(
    samples: Sequence[Sample], shown: Callable[[Sample], str], file: str = ""
) -> Iterator[str]:
    """What to warn of in these rows, a message for each kind of leak.

    Args:
        samples: the rows of a file.
        shown: what a row's model reads of its tools.
        file: its name, for the messages.
    """
    truths = [(s, truth) for s in samples if (truth := _truth(s))]
    places: tuple[tuple[str, Callable[[Sample], str]], ...] = (
        ("the prompt", lambda s: "\n".join(m.content for m in s.prompt)),
        ("the descriptions of the tools", shown),
    )
    where = f"{file}: " if file else ""
    for place, read in places:
        as_answer, plain = [], []
        for sample, truth in truths:
            text = without_signs(read(sample))
            if truth not in text:
                continue
            form = next((f.format(truth) for f in FORMS if _stands(f.format(truth), text)), "")
            if form:
                as_answer.append((sample, form))
            elif len(truth) >= SHORT and _stands(truth, text):
                plain.append((sample, truth))
        if len(as_answer) > FORM_SHARE * len(truths):
            sample, form = as_answer[0]
            yield (
                f"{where}{place} of {_share(as_answer, truths)} (first: row {sample.row}) has the"
                f" right answer in the form that graders look for, {form!r:.80}: a model earns the"
                " reward by copying it"
            )
        elif len(plain) > PLAIN_SHARE * len(truths):
            sample, truth = plain[0]
            yield (
                f"{where}{place} of {_share(plain, truths)} (first: row {sample.row}) has the"
                f" row's own ground truth, {truth!r:.80}: is that meant?"
            )


def _truth(sample: Sample) -> str:
    """The ground truth as text; nothing where it is none of one line."""
    truth = sample.ground_truth
    if isinstance(truth, bool) or not isinstance(truth, (str, int, float)):
        return ""
    text = plain_number(truth)
    return "" if "\n" in text else text


def _stands(words: str, text: str) -> bool:
    """Whether the words stand in the text, and not within longer ones."""
    if words not in text:
        return False
    before = r"(?<![\w.])" if words[:1].isalnum() else ""
    after = r"(?!\w|\.\d)" if words[-1:].isalnum() else ""
    return re.search(before + re.escape(words) + after, text) is not None


def _share(found: Sequence[object], rows: Sequence[object]) -> str:
    return f"{len(found)} of {len(rows)} rows" if len(rows) > 1 else "the row"
