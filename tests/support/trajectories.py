"""Trajectories made of messages, for the tests of rewards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentrl.trajectory import (
    Message,
    Sample,
    Segment,
    Trajectory,
    Turn,
    float_array,
    token_array,
)

PROMPT = (Message("system", "Answer with ####."), Message("user", "What is 3*4?"))


def row(**fields: Any) -> Sample:
    known = {"id": "r7", "prompt": PROMPT, "data_source": "openai/gsm8k", "ground_truth": "12"}
    return Sample(**{**known, **fields})


def turn(**fields: Any) -> Turn:
    return Turn(segment=0, start=0, end=1, finish_reason="stop", **fields)


def _is_answer(message: tuple[str, str] | Message) -> bool:
    return (message.role if isinstance(message, Message) else message[0]) == "assistant"


def make_trajectory(
    *messages: tuple[str, str] | Message,
    sample: Sample | None = None,
    turns: tuple[Turn, ...] = (),
    stop_reason: str = "done",
    tool_reward: float = 0.0,
) -> Trajectory:
    """Return a trajectory with these messages after the prompt.

    A message is a `Message` or a pair (role, content). Without `turns` there is one plain turn for
    each message of the assistant.
    """
    sample = sample or row()
    answers = [len(sample.prompt) + i for i, m in enumerate(messages) if _is_answer(m)]
    turns = turns or tuple(turn() for _ in answers)
    turns = tuple(
        t if t.message_index >= 0 else replace(t, message_index=index)
        for t, index in zip(turns, answers[len(answers) - len(turns) :], strict=True)
    )
    replies = [m if isinstance(m, Message) else Message(*m) for m in messages]  # type: ignore[arg-type]
    return Trajectory(
        sample=sample,
        episode_id="e",
        rollout=0,
        segments=(
            Segment(token_array(), token_array(), token_array(), float_array(), token_array()),
        ),
        turns=turns,
        messages=(*sample.prompt, *replies),
        sampling={},
        stop_reason=stop_reason,
        tool_reward=tool_reward,
    )
