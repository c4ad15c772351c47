"""Writes the rollouts of a recorded run as verl dumps them with `trainer.rollout_data_dir`.

The format is the one of `RayPPOTrainer._dump_generations`: `FOLDER/STEP.jsonl` with one line per
rollout, which verl's `scripts/rollout_viewer.py` shows. A run of agentrl stores more than these
files contain, so they are written on demand.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from agentrl.data.images import PLACE_IN_TEXT
from agentrl.errors import UserError
from agentrl.images import show_row
from agentrl.report import Run
from agentrl.store import StoredRollout


def dump_rollouts(run: Run, folder: Path, split: str = "train") -> int:
    """Write one file for each step and return the number of files. Existing files are replaced.

    A line has verl's keys `input`, `output` (both without special tokens), `gts`, `score` and
    `step`, the numbers that the grader returned, and the episode id as `request_id`. If a rollout
    has several segments, each has one line; `segment` is its index.

    A rollout with images also has `images`: their files, relative to the folder, in the order of
    the texts `<image>` in `input` and `output`.

    Args:
        run: the run.
        folder: the folder to write to.
        split: "train" as for `trainer.rollout_data_dir`, or "val" as for
            `trainer.validation_data_dir`; also "evicted", "baseline" and "greedy".

    Raises:
        UserError: there is no rollout of this split, or a file cannot be written or read.
    """
    count = 0
    for step, rollouts in groupby(run.rollouts(split), key=lambda stored: stored.step):
        lines, images = [], {}
        for stored in rollouts:
            lines += _lines(run, stored, images)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, data in images.items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(data)
            (folder / f"{step}.jsonl").write_text(
                "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines),
                encoding="utf-8",
            )
        except OSError as e:
            raise UserError(f"cannot write to {folder}: {e}") from e
        count += 1
    if not count:
        raise UserError(f"{run.folder} has no trajectories of the split {split!r}")
    return count


def _lines(run: Run, stored: StoredRollout, images: dict[str, bytes]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a rollout, and add its images to `images` by the names of their files."""
    scored, trajectory = stored.scored, stored.scored.trajectory
    decode = partial(run.tokenizer.decode, skip_special_tokens=True)
    for i, segment in enumerate(trajectory.segments):
        rest = deque(segment.images)
        prompt, response = (
            show_row(ids, rest, decode, lambda _: PLACE_IN_TEXT)
            for ids in (segment.prompt_ids, segment.response_ids)
        )
        line = {
            "input": prompt,
            "output": response,
            "gts": trajectory.sample.ground_truth,
            "score": scored.reward,
            "step": stored.step,
        }
        if stored.split in ("val", "greedy"):  # verl's validation names the score twice
            line["reward"] = scored.reward
        line |= scored.metrics
        line["request_id"] = trajectory.episode_id
        if len(trajectory.segments) > 1:
            line["segment"] = i
        if segment.images:
            line["images"] = [f"images/{image.key}.png" for image in segment.images]
            images |= {f"images/{image.key}.png": image.data for image in segment.images}
        yield line
