"""Find the data that a run lacks because an older version of agentrl recorded it."""

from __future__ import annotations

from agentrl.report.run import Run

_COLUMNS = {
    "spans": "what the time of an episode was spent on (no timeline)",
    "group": "the numbers of groups",
    "drop_causes": "why rollouts were dropped",
}


def find_lacking(run: Run) -> list[str]:
    """Return descriptions of the data that a run lacks, so that its pages cannot show them.

    Raises:
        DataError: a file is damaged.
    """
    files = run.store.files()
    if not files:
        return []
    lacking = set(_COLUMNS)
    for path, _, _ in (files[0], files[-1]):
        lacking -= set(run.store.read_columns(path, list(_COLUMNS)).column_names)
    texts = [text for name, text in _COLUMNS.items() if name in lacking]
    is_training = any(split == "train" for _, _, split in files)
    if is_training and not run.store.learned.is_dir():
        texts.append("what a step learned from (advantages, the trainer's logprobs, clips)")
    if not any((run.folder / name / "tokenizer.json").is_file() for name in ("tokenizer", "model")):
        texts.append("the tokenizer (tokens are shown as ids)")
    return texts
