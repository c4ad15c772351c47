"""A small run on disk whose episodes are known one by one, and one whose texts are hostile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pyarrow as pa

from agentrl.images import Image, RowImage
from agentrl.store import LEARNED, LEARNED_SCHEMA, TrajectoryStore
from agentrl.trajectory import (
    Group,
    Message,
    Sample,
    Scored,
    Segment,
    Span,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    float_array,
    token_array,
)

HOSTILE = (
    "<script>window.ran=1</script><img src=x onerror='window.ran=1'>"
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \u202eevil\u202c \x00 \x9b2J \r ../../x"
)


SAMPLE = Sample("row0", (Message("user", "2+2?"),), "tool_agent", "quiz", "4")


def play(
    step: int,
    group: int,
    rollout: int,
    *,
    reward: float = 1.0,
    calls: tuple[tuple[str, str], ...] = (),
    stop: str = "done",
    text: str = "four",
    source: str = "quiz",
    name: str = "",
    masked: bool = False,
) -> Scored:
    """Return a rollout of one turn; `calls` has the tool and the kind of error of each call.

    Rollout r of a group starts r seconds after the first and takes 2 s: it waits half a second,
    generates for 1 s, and calls its tools for the rest.
    """
    turn = Turn(
        segment=0,
        start=0,
        end=2,
        finish_reason="stop",
        tool_calls=tuple(ToolCall(tool, {"q": text, "name": "decoy"}) for tool, _ in calls),
        tool_results=tuple(ToolResult("r", ok=not e, error=e, seconds=0.5) for _, e in calls),
        message_index=1,
    )
    trajectory = Trajectory(
        sample=Sample(f"row{group}", (Message("user", "2+2?"),), "tool_agent", source, "4"),
        episode_id=name or f"e{step}-{group}-{rollout}",
        rollout=rollout,
        segments=(
            Segment(
                token_array([5]),
                token_array([1, 2, 3]),
                token_array([1, 1, 0]),
                float_array([-0.5, -0.25, 0.0]),
                token_array([step - 1, step - 1, -1]),
            ),
        ),
        turns=(turn,),
        messages=(Message("user", "2+2?"), Message("assistant", text), Message("tool", "r")),
        sampling={"temperature": 1.0},
        stop_reason=stop,
        seconds=1.5,
        started=1000.0 + rollout,
        spans=(Span("queue", 0.0, 0.5), Span("generate", 0.5, 1.5), Span("tools", 1.5, 2.0)),
    )
    return Scored(trajectory, {"outcome": reward}, reward, masked=masked)


def play_with_images(*images: Image, name: str = "seen") -> Scored:
    """Return a rollout with an image in its prompt, and the others in the result of its tool."""
    played = play(1, 0, 0, name=name, calls=(("zoom", ""),)).trajectory
    first, *others = images
    prompt = (Message.of("user", "How many in ", first, "?"),)
    tool = Message.of("tool", "cut: ", *others)
    [turn] = played.turns
    result = ToolResult(tool.content, images=tool.images)
    rows = tuple(RowImage(i.data, 56, 28, 2, 99, i.key) for i in images)
    segment = Segment(
        token_array([5, 99, 99, 6]),
        token_array([1, 2, *[99, 99] * len(others), 3]),
        token_array([1, 1, *[0] * (2 * len(others) + 1)]),
        float_array([-0.5, -0.25, *[0.0] * (2 * len(others) + 1)]),
        token_array([0, 0, *[-1] * (2 * len(others) + 1)]),
        images=rows,
    )
    trajectory = replace(
        played,
        sample=replace(played.sample, prompt=prompt),
        segments=(segment,),
        turns=(replace(turn, tool_results=(result,)),),
        messages=(*prompt, played.messages[1], tool),
    )
    return Scored(trajectory, {"outcome": 1.0}, 1.0)


def write_run(folder: Path) -> Path:
    """Write a run of two training steps and a validation, and return its folder."""
    store = TrajectoryStore(folder / "trajectories")
    first = [
        [
            play(1, 0, 0, calls=(("search", ""), ("search", "timeout")), reward=0.25),
            play(1, 0, 1, calls=(("search", ""), ("calc", "timeout")), stop="turns", reward=0.5),
        ],
        [play(1, 1, 0, text='a "quoted" Word', source="other"), play(1, 1, 1, reward=-1.0)],
    ]
    second = [[play(2, 0, 0, text=HOSTILE, name="../../x"), play(2, 0, 1, calls=(("calc", ""),))]]
    for step, groups in ((1, first), (2, second)):
        causes = ("EngineError: http://engine is down",) * (step == 2)
        found = [Group(g[0].trajectory.sample, tuple(g), step - 1, None, causes) for g in groups]
        store.write(step, found)
    store.write(2, [Group(Sample("v", ()), (play(2, 0, 0, name="v2"),))], "val")
    known = {
        "old_logprobs": [-0.5, -1.25, None],
        "advantages": [0.0, 2.0, None],
        "clipped": [0, 1, None],
    }
    rows = [{"episode_id": "e2-0-1", "segment": 0} | {n: known.get(n, [None] * 3) for n in LEARNED}]
    store.write_learned(2, pa.Table.from_pylist(rows, LEARNED_SCHEMA))
    lines = [{"step": s, "data": {"critic/score/mean": s / 2}} for s in (1, 2)]
    (folder / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(x) + b"\n" for x in lines))
    return folder
