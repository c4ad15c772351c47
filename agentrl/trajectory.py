"""The nouns: what an episode is made of, one frozen type per stage.

    Sample ─► Episode ─► Trajectory ─► Scored ─► Group ─► (trainer) Batch

A later stage that adds data returns a new type. The only mutable one, `Episode`, lives in
`agentrl.agent_loops.episode`. Standard library only: everything may import this module.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Role = Literal["system", "user", "assistant", "tool"]
_ROLES: tuple[str, ...] = get_args(Role)


def token_array(values: Sequence[int] = ()) -> array[int]:
    """Token ids, masks and versions as a compact array (16 k ids compare in 5 us; a list, 152)."""
    return array("i", values)


def float_array(values: Sequence[float] = ()) -> array[float]:
    """Log-probabilities as a compact array of float32."""
    return array("f", values)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call as the model wrote it.

    Example: `ToolCall("calculator", {"expression": "3*4"})`, or, for text that is not a call,
    `ToolCall("", '{"name": calc', error="not JSON: ...")`: the raw text stays, so that the model
    can be told.
    """

    name: str
    arguments: dict[str, Any] | str
    """A JSON object, or the raw text where `error` says why it is not one."""
    error: str = ""
    id: str = ""
    span: tuple[int, int] | None = field(default=None, compare=False)
    """Where it stands in its turn's text, in characters; None where its parser does not tell."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A call's answer, as the model reads it.

    Tools may return one to add a reward; the content of theirs may be anything JSON holds.
    """

    content: str
    ok: bool = True
    reward: float | None = None
    error: str = ""
    """"" or a class of failure: unknown_tool, bad_call, schema, tool_error, timeout, crash."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Example: `Message("user", "What is 3*4?")`.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""

    def __post_init__(self):
        if self.role not in _ROLES:
            raise ValueError(f"no role {self.role!r}: a message is of {', '.join(_ROLES)}")

    def as_dict(self) -> dict[str, str]:
        """The message as chat templates hold it; an assistant's calls stay in its text."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True)
class Sample:
    """A dataset row: what to ask, with which loop, and how to judge the answer."""

    id: str
    prompt: tuple[Message, ...]
    agent_name: str = "single_turn"
    data_source: str = ""
    ground_truth: Any = None
    tools: tuple[str, ...] = ()
    """Names of the tools this row may call."""
    tools_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Per tool, the arguments of its constructor (`create_kwargs`)."""
    interaction: str = ""
    interaction_kwargs: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The row's `extra_info`, less what the fields above hold."""
    row: int = 0
    """Position in its file: keys the random numbers, and error messages."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What the engine sampled for one turn. All sequences have one entry per sampled token."""

    token_ids: array[int]
    logprobs: array[float]
    """log_softmax(logits / temperature) over the full vocabulary, at the sampled token."""
    versions: array[int]
    """Policy version that sampled each token."""
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    """How many prompt tokens the engine saw: the episode checks it against its own count."""
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """One token row. The four response arrays have equal length.

    Example, with prompt P, two sampled turns A and one tool result E between them::

        prompt_ids    = P
        response_ids  = A0 + E0 + A1
        response_mask = 1s + 0s + 1s       # 1 exactly where the policy sampled
        logprobs      = lA0 + 0s + lA1
        versions      = vA0 + -1s + vA1
    """

    prompt_ids: array[int]
    response_ids: array[int]
    response_mask: array[int]
    logprobs: array[float]
    versions: array[int]

    def __post_init__(self):
        lengths = {len(self.response_ids), len(self.response_mask), len(self.logprobs)}
        if lengths != {len(self.versions)}:
            raise ValueError(f"a segment's streams differ in length: {sorted(lengths)}")


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn: where its tokens lie, and what it earned."""

    segment: int
    start: int
    end: int
    """Response tokens [start, end) of the segment."""
    finish_reason: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_results: tuple[ToolResult, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    """By source: "turn" (interaction, `ep.reward`) and "tool"."""
    generate_seconds: float = 0.0
    tool_seconds: float = 0.0
    thread: int = 0
    """0: the agent loop's own conversation; n: the n-th that it spawned."""
    prompt_tokens: int = 0
    """How many tokens the engine was given, all of the row so far."""
    cached_tokens: int = 0
    """How many of them it had computed before."""
    penalties: tuple[tuple[int, int, float], ...] = ()
    """Calls that failed at a price (`tools.penalties`): response tokens [start, end), and it."""
    message_index: int = -1
    """Index of its message in `Trajectory.messages`; -1 in files that older versions wrote."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One rollout, finished and not yet scored."""

    sample: Sample
    episode_id: str
    """Unique per attempt: a retry is another episode."""
    rollout: int
    """Which of the sample's n rollouts this is."""
    segments: tuple[Segment, ...]
    """One, unless the loop edited its history, spawned others, or stripped earlier thinking."""
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    """All that was said, in the order in which it was, also in spawned conversations."""
    sampling: Mapping[str, Any]
    stop_reason: str
    """done, or the spent budget: turn_tokens, trajectory_tokens, turns, tool_calls, time."""
    tool_reward: float = 0.0
    """What class tools' `reward()` returned at the end, summed."""
    seconds: float = 0.0
    control_token_attempts: int = 0
    """Control tokens that prompts, tools and interactions spelled out; none became one."""

    @property
    def assistant_text(self) -> str:
        """All that the assistant wrote, turns joined by newlines: never tool or user text."""
        return "\n".join(m.content for m in self.answers)

    @property
    def final_text(self) -> str:
        """The assistant's last message, or "" where it said nothing; not what it spawned."""
        own = [a for a, t in zip(self.answers, self.turns, strict=True) if t.thread == 0]
        return own[-1].content if own else ""

    @property
    def answers(self) -> tuple[Message, ...]:
        """The assistant messages that the policy sampled, one a turn, in the order of `turns`.

        Other assistant messages (few-shot examples) are not among them. Files of older versions do
        not store the index of a turn's message: there, the last assistant messages are taken.
        """
        if all(turn.message_index >= 0 for turn in self.turns):
            return tuple(self.messages[turn.message_index] for turn in self.turns)
        written = tuple(m for m in self.messages if m.role == "assistant")
        return written[len(written) - len(self.turns) :]

    @property
    def played(self) -> tuple[Message, ...]:
        """The messages from the policy's first on: what its loop opened with is not among them."""
        start = self.turns[0].message_index if self.turns else len(self.sample.prompt)
        return self.messages[start if start >= 0 else len(self.sample.prompt) :]

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the policy sampled: the sum of the masks."""
        return sum(sum(s.response_mask) for s in self.segments)

    def turn_rewards(self, source: str) -> float:
        """The sum over turns of one reward source."""
        return sum(t.rewards.get(source, 0.0) for t in self.turns)


@dataclass(frozen=True, slots=True)
class Scored:
    """A trajectory with its rewards by source and the weighted total that trains."""

    trajectory: Trajectory
    rewards: Mapping[str, float]
    """outcome, turn, tool: unweighted; and overlong, a penalty, where there is one."""
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other numbers a grader returned (`acc`, ...)."""
    masked: bool = False
    """Left out of the loss and of its group's baseline: its budget's policy is "mask"."""


@dataclass(frozen=True, slots=True)
class Group:
    """The scored rollouts of one sample that survived, and how many were dropped."""

    sample: Sample
    scored: tuple[Scored, ...]
    dropped: int = 0
    greedy: Scored | None = None
    """One rollout more, at temperature 0, where it was asked for: a baseline, never trained on."""
