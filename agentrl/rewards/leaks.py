r"""Warn about rows that show the right answer to the model: from them it learns to copy.

The prompt and the descriptions of the tools are searched for the row's ground truth, alone and in
the forms that graders read (`#### 12`, `\boxed{12}`). A ground truth of a few characters occurs in
many questions by chance, so it counts only in such a form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

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


class _Leaks:
    """The rows whose ground truth occurs in one kind of text."""

    def __init__(self) -> None:
        self.in_form: list[tuple[int, str]] = []
        """The rows that contain it in a form that graders read, each with this text."""
        self.plain: list[tuple[int, str]] = []
        """The rows that contain it alone."""

    def add(self, row: int, truth: str, text: str) -> None:
        """Count a row, if the truth occurs in the text."""
        if truth not in text:
            return
        form = next((f.format(truth) for f in FORMS if _occurs(f.format(truth), text)), "")
        if form:
            self.in_form.append((row, form))
        elif len(truth) >= SHORT and _occurs(truth, text):
            self.plain.append((row, truth))


def find_leaks(
    samples: Iterable[Sample], tool_texts: Callable[[Sample], str], file: str = "", first: int = 0
) -> Iterator[str]:
    """Yield a warning for each kind of leak in these rows.

    Args:
        samples: the rows of a file.
        tool_texts: returns the texts that describe a row's tools to the model.
        file: the name of the file, for the messages.
        first: the index of the file's first row.
    """
    in_prompts, in_tools, truths = _Leaks(), _Leaks(), 0
    for sample in samples:
        if truth := _truth(sample):
            truths += 1
            row = sample.row - first
            prompt = "\n".join(m.content for m in sample.prompt)
            in_prompts.add(row, truth, without_signs(prompt))
            in_tools.add(row, truth, without_signs(tool_texts(sample)))
    where = f"{file}: " if file else ""
    for source, leaks in (("the prompt", in_prompts), ("the descriptions of the tools", in_tools)):
        if len(leaks.in_form) > FORM_SHARE * truths:
            row, form = leaks.in_form[0]
            yield (
                f"{where}{source} of {_share(len(leaks.in_form), truths)} (first: row {row})"
                f" contains the right answer in a form that graders read, {form!r:.80}: a model"
                " gets the reward by copying it"
            )
        elif len(leaks.plain) > PLAIN_SHARE * truths:
            row, truth = leaks.plain[0]
            yield (
                f"{where}{source} of {_share(len(leaks.plain), truths)} (first: row {row}) contains"
                f" the row's ground truth, {truth!r:.80}. Check whether this is intended"
            )


def shows_answer(sample: Sample, text: str, *, alone: bool = True) -> bool:
    """Return whether a text contains a row's ground truth.

    Args:
        sample: the row.
        text: what the model sees.
        alone: also count it outside of a form that graders read, if it is not short.
    """
    found = _Leaks()
    if truth := _truth(sample):
        found.add(sample.row, truth, without_signs(text))
    return bool(found.in_form or (alone and found.plain))


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


def _share(leaks: int, rows: int) -> str:
    return f"{leaks} of {rows} rows" if rows > 1 else "the row"
