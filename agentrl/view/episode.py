"""One stored episode as plain data: its messages, its turns with their tool calls, its tokens.

A number that the run did not record is None, never 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from tokenizers import Tokenizer

from agentrl.errors import DataError
from agentrl.images import describe_image
from agentrl.report.run import Run
from agentrl.store import LEARNED
from agentrl.trajectory import Trajectory, Turn

pc: Any = pyarrow.compute  # its functions are made at run time, unknown to type checkers


QUANTITIES = ("logprob", "gap", "advantage", "clipped", "entropy", "version")
"""The numbers of `EpisodeView.segments` by which tokens can be coloured."""


class EpisodeView:
    """A stored episode with what the update learned from it.

    Args:
        run: the run.
        episode_id: the id of the episode.
        step: its step, which is faster to read; None: it is searched.

    Raises:
        DataError: there is no such episode, or a file is damaged.
    """

    def __init__(self, run: Run, episode_id: str, step: int | None = None):
        self.run = run
        self.stored = run.store.read_episode(episode_id, step)

    @property
    def trajectory(self) -> Trajectory:
        """The trajectory of the episode."""
        return self.stored.scored.trajectory

    @cached_property
    def segments(self) -> Sequence[Mapping[str, np.ndarray]]:
        """For each segment the numbers of its response tokens; NaN where one is unknown.

        `token_id`, `mask`, `logprob`, `version`, those of `agentrl.store.LEARNED` (in the singular)
        and `gap`: `old_logprob - logprob`, trainer against engine, in nats.
        """
        learned = self._read_learned()
        return [
            _describe_tokens(segment, learned.get(index, {}))
            for index, segment in enumerate(self.trajectory.segments)
        ]

    def _read_learned(self) -> dict[int, dict[str, pa.Array]]:
        if self.stored.split != "train":
            return {}
        table = self.run.store.read_learned(self.stored.step)
        table = table.filter(pc.equal(table["episode_id"], self.trajectory.episode_id))
        return {
            table["segment"][row].as_py(): {name: table[name][row].values for name in LEARNED}
            for row in range(len(table))
        }

    def describe(self) -> dict[str, Any]:
        """Return the episode without its tokens, as data for JSON."""
        stored, scored, t = self.stored, self.stored.scored, self.trajectory
        turn_of = {index: turn for turn, index in enumerate(u.message_index for u in t.turns)}
        return {
            "episode": t.episode_id,
            "step": stored.step,
            "split": stored.split,
            "group": stored.group,
            "rollout": t.rollout,
            "sample": t.sample.id,
            "agent": t.sample.agent_name,
            "source": t.sample.data_source,
            "ground_truth": json.dumps(t.sample.ground_truth, ensure_ascii=False),
            "reward": scored.reward,
            "rewards": dict(scored.rewards),
            "metrics": dict(scored.metrics),
            "masked": scored.masked,
            "stop": t.stop_reason,
            "seconds": t.seconds,
            "started": t.started,
            "spans": [asdict(span) for span in t.spans],
            "segments": [
                {
                    "prompt": len(s.prompt_ids),
                    "response": len(s.response_ids),
                    "ranges": {name: _range(numbers[name]) for name in QUANTITIES},
                }
                for s, numbers in zip(t.segments, self.segments, strict=True)
            ],
            "messages": [
                {
                    "role": m.role,
                    "content": m.content,
                    "images": [{"key": x.key, "text": describe_image(x)} for x in m.images],
                    "turn": turn_of.get(i),
                }
                for i, m in enumerate(t.messages)
            ],
            "turns": [self._describe_turn(turn) for turn in t.turns],
        }

    def _describe_turn(self, turn: Turn) -> dict[str, Any]:
        tokens = {n: v[turn.start : turn.end] for n, v in self.segments[turn.segment].items()}
        gap, advantage = tokens["gap"], tokens["advantage"]
        known_gaps = np.flatnonzero(~np.isnan(gap))
        largest = known_gaps[np.abs(gap[known_gaps]).argmax()] if len(known_gaps) else None
        clipped = tokens["clipped"][~np.isnan(tokens["clipped"])]
        return {
            "segment": turn.segment,
            "start": turn.start,
            "end": turn.end,
            "thread": turn.thread,
            "finish_reason": turn.finish_reason,
            "rewards": dict(turn.rewards),
            "generate_seconds": turn.generate_seconds,
            "tool_seconds": turn.tool_seconds,
            "advantage": float(np.nanmean(advantage)) if (~np.isnan(advantage)).any() else None,
            "largest_gap": None if largest is None else float(gap[largest]),
            "largest_gap_at": None if largest is None else turn.start + int(largest),
            "clipped": int((clipped > 0).sum()) if len(clipped) else None,
            "calls": _describe_calls(turn),
        }

    def tokens(self, segment: int, start: int, end: int) -> dict[str, list[Any]]:
        """Return the columns of some response tokens of a segment: one list for each number.

        The columns are those of `segments`, and `text`: None if the run has no tokenizer.

        Raises:
            DataError: the episode has no such segment.
        """
        if not 0 <= segment < len(self.segments):
            raise DataError(
                f"episode {self.trajectory.episode_id!r} has no segment {segment}; it has"
                f" {len(self.segments)}, counted from 0"
            )
        chosen = {n: v[max(0, start) : max(0, end)] for n, v in self.segments[segment].items()}
        columns: dict[str, list[Any]] = {
            n: [None if x != x else x for x in v.tolist()] for n, v in chosen.items()
        }
        tokenizer = read_tokenizer(self.run.folder)
        columns["text"] = [tokenizer and decode(tokenizer, t) for t in columns["token_id"]]
        return columns


def decode(tokenizer: Tokenizer, token: Any) -> str:
    """Return the text of a token."""
    return tokenizer.decode([token], skip_special_tokens=False)


@lru_cache(8)
def read_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a run's folder; None if it has none."""
    # Not with transformers, whose import takes longer than everything else here.
    path = folder / "tokenizer/tokenizer.json"
    return Tokenizer.from_file(str(path)) if path.is_file() else None


def largest_gaps(run: Run, step: int, n: int = 1) -> list[dict[str, Any]]:
    """Return the tokens of a training step whose logprobs differ most, trainer against engine.

    Args:
        run: the run.
        step: the step.
        n: the number of tokens.

    Returns:
        `episode`, `segment`, `position`, `token_id`, `gap` (`old_logprob - logprob`, in nats) and
        `text` (None without a tokenizer) of each; empty if the run has no logprobs of the trainer
        for the step.
    """
    tokens = Run(run.folder, [step]).tokens
    gap = pc.subtract(tokens["old_logprob"], tokens["logprob"])
    table = pa.table(
        {
            "episode": tokens["episode_id"],
            "segment": tokens["segment"],
            "position": tokens["position"],
            "token_id": tokens["token_id"],
            "gap": gap,
            "size": pc.abs(gap),
        }
    ).filter(pc.is_valid(gap))
    chosen = pc.select_k_unstable(table, n, [("size", "descending")])
    rows = table.take(chosen).drop_columns("size").to_pylist()
    tokenizer = read_tokenizer(run.folder)
    return [row | {"text": tokenizer and decode(tokenizer, row["token_id"])} for row in rows]


def _describe_tokens(segment: Any, learned: Mapping[str, pa.Array]) -> dict[str, np.ndarray]:
    mask = np.array(segment.response_mask, np.int32)
    sampled = mask == 1
    numbers = {
        "token_id": np.array(segment.response_ids, np.int32),
        "mask": mask,
        "logprob": np.where(sampled, np.array(segment.logprobs, np.float32), np.nan),
        "version": np.where(sampled, np.array(segment.versions, np.float64), np.nan),
    }
    for name in LEARNED:
        unknown = np.full(len(mask), np.nan)
        values = learned.get(name)
        numbers[name.removesuffix("s")] = (
            unknown if values is None else values.cast(pa.float64()).to_numpy(False)
        )
    return numbers | {"gap": np.where(sampled, numbers["old_logprob"] - numbers["logprob"], np.nan)}


def _range(values: np.ndarray) -> list[float] | None:
    """Return the smallest and the largest known value; None if none is known."""
    known = values[~np.isnan(values)]
    return [float(known.min()), float(known.max())] if len(known) else None


def _describe_calls(turn: Turn) -> list[dict[str, Any]]:
    """Return the tool calls; `ok` is None for calls that were not run."""
    results = [*turn.tool_results, *[None] * (len(turn.tool_calls) - len(turn.tool_results))]
    return [
        {
            "name": call.name,
            "arguments": call.arguments
            if isinstance(call.arguments, str)
            else json.dumps(call.arguments, ensure_ascii=False),
            "malformed": call.error,
            "ok": result and result.ok,
            "error": result and result.error,
            "seconds": result and result.seconds,
            "reward": result and result.reward,
        }
        for call, result in zip(turn.tool_calls, results, strict=False)
    ]
