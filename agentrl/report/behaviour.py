"""What the policy did in each stored episode, as numbers that are derived from its turns.

The store has turns and messages as JSON. Diagnoses compare thousands of episodes, so they use this
table, which is made once.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from agentrl.store import TrajectoryStore, calls_of, parse_json

BEHAVIOUR_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("split", pa.string()),
        ("group", pa.int32()),
        ("sample_id", pa.string()),
        ("episode_id", pa.string()),
        ("agent_name", pa.string()),
        ("data_source", pa.string()),
        ("prompt", pa.string()),
        ("reward", pa.float64()),
        ("masked", pa.bool_()),
        ("stop_reason", pa.string()),
        ("has_tools", pa.bool_()),
        ("turns", pa.int32()),
        ("tool_calls", pa.int32()),
        ("failed_calls", pa.int32()),
        ("repeated_calls", pa.int32()),
        ("failed_turn", pa.int32()),
        ("repeated_turn", pa.int32()),
        ("sampled_tokens", pa.int32()),
        ("answer", pa.string()),
        ("ground_truth", pa.string()),
        ("right", pa.bool_()),
        ("started", pa.float64()),
        ("seconds", pa.float64()),
        ("queue_seconds", pa.float64()),
        ("generate_seconds", pa.float64()),
        ("tool_seconds", pa.float64()),
        ("reward_seconds", pa.float64()),
        ("interaction_seconds", pa.float64()),
        ("open_seconds", pa.float64()),
        ("tool_times", pa.list_(pa.float64())),
        ("broken_tools", pa.list_(pa.string())),
        ("working_tools", pa.list_(pa.string())),
    ]
)
"""The columns of `Run.behaviour`.

`prompt` is the last message of the prompt and `answer` the last one of the policy, of each the last
`MAX_TEXT` characters. `right` is true if the answer ends with the ground truth (`ends_with_truth`),
and null if the ground truth is not a text or a number. `repeated_calls` counts calls that an
earlier call of the same conversation equals in name, arguments and result, or that failed as that
one did. `failed_turn` and `repeated_turn` are the indexes of the first turns with such calls, null
if there is none.
`generate_seconds` and `tool_seconds` are sums over turns. `queue_seconds`, `reward_seconds`,
`interaction_seconds` and `open_seconds` are sums over spans. `tool_times` are the starts and ends
of tool calls and interactions, in seconds since `started`. `broken_tools` has the name of the tool
for each call that crashed or timed out, `working_tools` the names of the tools that answered a
call."""

MAX_TEXT = 2000
"""The characters of a text that are kept: a long run has hundreds of thousands of episodes."""

WAITS = ("tools", "interaction")
"""The spans in which an episode waits for something else than the engine and its reward."""

_COPIED = (
    *("step", "split", "group", "sample_id", "episode_id", "agent_name", "data_source"),
    *("reward", "masked", "stop_reason", "started", "seconds"),
)
_PARSED = ("turns", "messages", "sample", "spans", "ground_truth")


def read_behaviour(store: TrajectoryStore, is_wanted: Callable[[int], bool]) -> pa.Table:
    """Return one row per stored episode with the columns of `BEHAVIOUR_SCHEMA`.

    Args:
        store: the trajectories of a run.
        is_wanted: chooses steps.

    Raises:
        DataError: a file is damaged; the message names the file, and the row and column of a cell.
    """
    tables = [BEHAVIOUR_SCHEMA.empty_table()]
    for path, step, _ in store.files():
        if is_wanted(step):
            tables.append(_read_file(store, path))
    return pa.concat_tables(tables)


def _read_file(store: TrajectoryStore, path: Path) -> pa.Table:
    episodes = store.read_file(path)
    columns: dict[str, Any] = {name: episodes.column(name) for name in _COPIED}
    texts = (episodes.column(name).to_pylist() for name in _PARSED)
    rows = []
    for index, cells in enumerate(zip(*texts, strict=True)):
        with store.row_of(path, index):
            rows.append(_derive(*cells))
    names = [name for name in BEHAVIOUR_SCHEMA.names if name not in columns]
    for name in names:
        columns[name] = pa.array([row[name] for row in rows], BEHAVIOUR_SCHEMA.field(name).type)
    return pa.table([columns[n] for n in BEHAVIOUR_SCHEMA.names], BEHAVIOUR_SCHEMA.names).cast(
        BEHAVIOUR_SCHEMA
    )


def _derive(*cells: str) -> dict:
    turns, messages, sample, spans, truth = map(parse_json, cells)  # as in `_PARSED`
    seconds: Counter[str] = Counter()
    for span in spans:
        seconds[span["name"]] += span["end"] - span["start"]
    calls = [(call["name"], result["error"]) for _, call, result in calls_of(turns)]
    failed = [i for i, turn in enumerate(turns) for r in turn["tool_results"] if not r["ok"]]
    repeated = _find_repeated(turns)
    answer = _answer(turns, messages)[-MAX_TEXT:]
    truth = str(truth)[-MAX_TEXT:] if isinstance(truth, str | int | float) else None
    return {
        "prompt": sample["prompt"][-1]["content"][-MAX_TEXT:] if sample["prompt"] else "",
        "has_tools": bool(sample["tools"]),
        "turns": len(turns),
        "tool_calls": len(calls),
        "failed_calls": len(failed),
        "repeated_calls": len(repeated),
        "failed_turn": failed[0] if failed else None,
        "repeated_turn": repeated[0] if repeated else None,
        "sampled_tokens": sum(turn["end"] - turn["start"] for turn in turns),
        "answer": answer,
        "ground_truth": truth,
        "right": ends_with_truth(answer, truth) if truth else None,
        "queue_seconds": seconds["queue"],
        "generate_seconds": sum(turn["generate_seconds"] for turn in turns),
        "tool_seconds": sum(turn["tool_seconds"] for turn in turns),
        "reward_seconds": seconds["reward"],
        "interaction_seconds": seconds["interaction"],
        "open_seconds": seconds["open"],
        "tool_times": [
            time for s in spans if s["name"] in WAITS for time in (s["start"], s["end"])
        ],
        "broken_tools": [name for name, error in calls if error in ("crash", "timeout")],
        "working_tools": sorted({name for name, error in calls if error in ("", "tool_error")}),
    }


def _find_repeated(turns: Sequence[dict]) -> list[int]:
    """Return the turn of each call that repeats an earlier one of its conversation.

    Both have the same name and arguments; and the same result, or both failed.
    """
    if sum(len(turn["tool_results"]) for turn in turns) < 2:
        return []
    seen: set[tuple[int, bytes]] = set()
    repeated = []
    for index, call, result in calls_of(turns):
        # Errors may contain a time or an id; a call that fails again is the same.
        answer = [result["content"], result.get("images")] if result["ok"] else None
        content = (call["name"], call["arguments"], answer)
        key = turns[index]["thread"], orjson.dumps(content, option=orjson.OPT_SORT_KEYS)
        if key in seen:
            repeated.append(index)
        seen.add(key)
    return repeated


def ends_with_truth(answer: str, truth: str) -> bool:
    """Return whether the last number of an answer, or the end of its text, is the ground truth."""
    with suppress(ValueError):
        value = float(truth.replace(",", ""))
        numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", answer)
        return bool(numbers) and math.isclose(float(numbers[-1].replace(",", "")), value)
    words, wanted = (re.findall(r"\w+", text.lower()) for text in (answer, truth))
    return bool(wanted) and words[-len(wanted) :] == wanted


def _answer(turns: Sequence[dict], messages: Sequence[dict]) -> str:
    """Return the policy's last message in the main conversation; see `Trajectory.final_text`."""
    own = [turn["message_index"] for turn in turns if turn["thread"] == 0]
    return messages[own[-1]]["content"] if own else ""
