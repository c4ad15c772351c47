"""The data types of rollouts: one frozen type for each stage.

    Sample ─► Episode ─► Trajectory ─► Scored ─► Group ─► (trainer) Batch

A later stage that adds data returns a new type. The only mutable type, `Episode`, is in
`agentrl.agent_loops.episode`. This module uses the standard library and the types of images alone,
so that every module may import it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Literal, SupportsFloat, TypeVar, get_args

from agentrl.images import PLACE, Image, RowImage, describe_image

T = TypeVar("T")

Role = Literal["system", "user", "assistant", "tool"]
_ROLES: tuple[str, ...] = get_args(Role)


def token_array(values: Sequence[int] = ()) -> array[int]:
    """Return token ids, masks or versions as a compact array.

    Comparing 16,000 ids takes 5 us; with a list it takes 152 us.
    """
    return array("i", values)


def short_array(values: Sequence[int] = ()) -> array[int]:
    """Return numbers of experts as a compact array of int16."""
    return array("h", values)


def float_array(values: Sequence[float] = ()) -> array[float]:
    """Return log-probabilities as a compact array of float32."""
    return array("f", values)


_SHARED = frozenset({str, int, float, bool, type(None)})
"""The types of values that copies share."""


def copy_value(value: T) -> T:
    """Return a value that user code may change: it shares no mapping or list with `value`.

    Values that have a hash are shared: they do not change, or are one object on purpose (a client,
    a model). Plain values are copied several times as fast as by `copy.deepcopy`.
    """
    kind: Any = type(value)
    items: Any = value
    if kind is dict or kind is MappingProxyType:
        items = {k: v if type(v) in _SHARED else copy_value(v) for k, v in items.items()}
    elif kind is array:
        items = items[:]
    elif kind is list or kind is tuple:
        items = kind([v if type(v) in _SHARED else copy_value(v) for v in items])
    elif kind not in _SHARED:
        try:
            hash(value)
        except TypeError:
            if kind.__module__ != __name__:
                return deepcopy(value)
            return replace(items, **{n: copy_value(getattr(value, n)) for n in kind.__slots__})
    return items


def as_number(value: Any) -> float:
    """Return `value` as a float (also a NumPy or torch scalar); NaN if it is not a number."""
    try:
        return float(value) if isinstance(value, SupportsFloat) else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def join_parts(parts: Sequence[str | Image]) -> tuple[str, tuple[Image, ...]]:
    """Return the content of a message from its texts and images, and the images.

    A `PLACE` in a text beside images is replaced by U+FFFD, so that it is none.
    """
    images = tuple([part for part in parts if isinstance(part, Image)])
    texts = [
        PLACE if isinstance(part, Image) else part.replace(PLACE, "\ufffd") if images else part
        for part in parts
    ]
    return "".join(texts), images


def check_places(content: str, images: Sequence[Image]) -> None:
    """Raise `ValueError` if a content has not one `PLACE` for each of its images."""
    if content.count(PLACE) != len(images):
        raise ValueError(
            f"the content has {content.count(PLACE)} places of images (U+FFFC) for"
            f" {len(images)} images. Use Message.of(role, text, image, ...)"
        )


def show_images(content: str, images: Sequence[Image]) -> str:
    """Return a content for people, with `[image 84x56 3fa9c04e]` at the `PLACE` of each image."""
    texts = content.split(PLACE) if images else [content]
    shown = [*map(describe_image, images[: len(texts) - 1]), ""]
    return "".join([text + image for text, image in zip_longest(texts, shown, fillvalue="")])


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call as the model wrote it.

    Example: `ToolCall("calculator", {"expression": "3*4"})`. A malformed call keeps its raw text
    for the error message that the model reads: `ToolCall("", '{"name": calc', error="not JSON:
    ...")`.

    Attributes:
        name: the name of the function; "" if it cannot be read.
        arguments: a JSON object; the raw text if it is not a JSON object, and then `error` says
            why.
        error: why the call is malformed; "" if it is well-formed.
        id: the id that the model gave the call, in formats that have one.
        span: start and end in the text of its turn, in characters; None if the parser reports none.
    """

    name: str
    arguments: dict[str, Any] | str
    error: str = ""
    id: str = ""
    span: tuple[int, int] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool call, as the model reads it.

    A tool may return a `ToolResult` to add a reward: `ToolResult("opened", reward=0.5)`.

    Attributes:
        content: the text that the model reads. A tool may set it to any JSON value.
        ok: false if the call failed.
        reward: the "tool" reward of the turn (`reward.tool_weight`); None: no reward.
        error: "", or the kind of error: unknown_tool, bad_call, schema, tool_error, timeout, crash.
        seconds: how long the call took.
        images: the images in the content, in which each has a `PLACE` (`agentrl.images`).
    """

    content: str
    ok: bool = True
    reward: float | None = None
    error: str = ""
    seconds: float = 0.0
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Example: `Message("user", "What is 3*4?")`.

    Attributes:
        role: system, user, assistant or tool.
        content: the text. An assistant message contains its tool calls as the model wrote them.
        tool_calls: the calls in an assistant message, parsed from its content.
        tool_call_id: in a tool message, the id of the call that it answers; "" if there is none.
        images: the images in the content, in which each has a `PLACE` (U+FFFC); see `of`. Without
            images, this character is text.

    Raises:
        ValueError: the role is unknown, an assistant message has images, or the content has not
            one `PLACE` for each image.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    images: tuple[Image, ...] = ()

    def __post_init__(self):
        if self.role not in _ROLES:
            raise ValueError(f"unknown role {self.role!r}. Roles: {', '.join(_ROLES)}")
        if self.images:
            if self.role == "assistant":
                raise ValueError("an assistant message has images; the policy writes text alone")
            check_places(self.content, self.images)

    @classmethod
    def of(cls, role: Role, *parts: str | Image, tool_call_id: str = "") -> Message:
        """Return a message of texts and images.

        Example: `Message.of("user", Image.of("plot.png", Path()), "How many bars are there?")`.

        Args:
            role: as in `Message`; not assistant, if there is an image.
            parts: the texts and images, in order.
            tool_call_id: as in `Message`.
        """
        content, images = join_parts(parts)
        return cls(role, content, tool_call_id=tool_call_id, images=images)

    @property
    def shown(self) -> str:
        """The content for people: `show_images` of it."""
        return show_images(self.content, self.images)

    def as_dict(self) -> dict[str, str]:
        """Return role and content as a dictionary; tool calls are part of the content."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True)
class Sample:
    """A dataset row: the prompt, the agent loop that plays it, and how to score the answer.

    `load_samples` makes it from a file; docs/data.md describes the columns.

    Attributes:
        id: unique in its file.
        prompt: the first messages.
        agent_name: the agent loop.
        data_source: chooses the grader if `reward.function` is not set.
        ground_truth: the right answer, for rewards and graders. The model does not see it.
        tools: names of the tools that the model may call.
        tools_kwargs: for each tool, the arguments of its constructor (`create_kwargs`).
        interaction: the name of the interaction; "" if the row has none.
        interaction_kwargs: the arguments of the interaction's constructor.
        extra: the row's `extra_info`, without the entries that other fields contain.
        row: the index of the row in its file. Random seeds and error messages use it.
        environment: the name of the environment; "" if the row has none. If it has one, `tools` and
            `tools_kwargs` contain it and its arguments (`environment_kwargs`), and nothing else.
    """

    id: str
    prompt: tuple[Message, ...]
    agent_name: str = "single_turn"
    data_source: str = ""
    ground_truth: Any = None
    tools: tuple[str, ...] = ()
    tools_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    interaction: str = ""
    interaction_kwargs: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    row: int = 0
    environment: str = ""

    @property
    def environment_kwargs(self) -> Mapping[str, Any]:
        """The arguments of the environment's constructor."""
        return self.tools_kwargs.get(self.environment, {}).get("create_kwargs", {})

    def find_non_json(self, *names: str) -> Iterator[tuple[str, Any]]:
        """Yield the values that JSON does not restore, with their paths, such as `extra.when`.

        These are dates, tuples, bytes, infinities, integers of more than 64 bits, mappings with
        keys that are not texts, and the like.

        Args:
            names: the fields to search; by default those that may have any values.
        """
        every = ("ground_truth", "extra", "tools_kwargs", "interaction_kwargs")
        for name in names or every:
            if name == "tools_kwargs" and self.environment:
                name = "environment_kwargs"
            yield from _find_non_json(getattr(self, name), name)


def _find_non_json(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str):
                yield from _find_non_json(item, f"{path}.{key}")
            else:
                yield f"{path}.{key}", {key: item}
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _find_non_json(item, f"{path}[{index}]")
    elif not (
        value is None
        or isinstance(value, str)
        or (isinstance(value, int) and -(2**63) <= value < 2**64)
        or (isinstance(value, float) and math.isfinite(value))
    ):
        yield path, value


@dataclass(frozen=True, slots=True)
class Generation:
    """The output of the engine for one turn. All arrays have one entry for each sampled token.

    Attributes:
        token_ids: the sampled tokens.
        logprobs: log_softmax(logits / temperature) over the full vocabulary, at the sampled token.
            See `kept_ids`.
        versions: the policy version that sampled each token.
        finish_reason: "length" if the limit of tokens ended the turn. "abort" occurs only within
            an engine, for a part of a turn.
        prompt_tokens: the number of prompt tokens that the engine reports. The episode checks it.
        cached_tokens: the number of prompt tokens that were in the engine's prefix cache.
        kept_ids: with `Sampling.returns_kept`, the tokens that `top_p` and `top_k` keep for each
            sampled token, one after another. `logprobs` are then over these tokens alone.
        kept_counts: how many of `kept_ids` belong to each sampled token; empty if the engine does
            not return them.
        experts: with `Sampling.experts_from`, the experts that the engine chose for each token from
            that one on, without the last sampled token, which was not an input yet. Empty if the
            engine does not return them.
        experts_width: how many of `experts` belong to a token: those of layer 0, of layer 1, ...
    """

    token_ids: array[int]
    logprobs: array[float]
    versions: array[int]
    finish_reason: Literal["stop", "length", "abort"]
    prompt_tokens: int
    cached_tokens: int = 0
    kept_ids: array[int] = field(default_factory=token_array)
    kept_counts: array[int] = field(default_factory=token_array)
    experts: array[int] = field(default_factory=short_array)
    experts_width: int = 0

    def first(self, n: int) -> Generation:
        """Return a copy with the first `n` tokens only."""
        counts = self.kept_counts[:n]
        dropped = max(0, len(self.token_ids) - n)
        return replace(
            self,
            token_ids=self.token_ids[:n],
            logprobs=self.logprobs[:n],
            versions=self.versions[:n],
            kept_ids=self.kept_ids[: sum(counts)],
            kept_counts=counts,
            experts=self.experts[: len(self.experts) - dropped * self.experts_width],
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """One row of tokens. The four response arrays have equal length.

    Example, with prompt P, two sampled turns A and one tool result E between them::

        prompt_ids    = P
        response_ids  = A0 + E0 + A1
        response_mask = 1s + 0s + 1s       # 1 exactly where the policy sampled
        logprobs      = lA0 + 0s + lA1
        versions      = vA0 + -1s + vA1

    Attributes:
        prompt_ids: the tokens before the first sampled one.
        response_ids: all tokens after the prompt.
        response_mask: 1 where the policy sampled the token, else 0.
        logprobs: those of the sampled tokens, as in `Generation`; 0 elsewhere.
        versions: the policy versions that sampled the tokens; -1 elsewhere.
        kept_ids: the tokens that `rollout.top_p` and `rollout.top_k` kept for each sampled token,
            as in `Generation`.
        kept_counts: how many of `kept_ids` belong to each response token: 0 for observed tokens,
            and for tokens that were sampled from all. Empty if all counts are 0.
        experts: with `rollout.router_replay`, the experts that the engine chose for each token of
            prompt and response but the last one, as in `Generation`; else empty.
        images: the images of prompt and response, in order. Each has `RowImage.tokens` placeholder
            tokens in a row, which have mask 0.

    Raises:
        ValueError: the response arrays differ in length, the counts are not those of `kept_ids`, or
            tokens have different numbers of experts.
    """

    prompt_ids: array[int]
    response_ids: array[int]
    response_mask: array[int]
    logprobs: array[float]
    versions: array[int]
    kept_ids: array[int] = field(default_factory=token_array)
    kept_counts: array[int] = field(default_factory=token_array)
    experts: array[int] = field(default_factory=short_array)
    images: tuple[RowImage, ...] = ()

    def __post_init__(self):
        lengths = {len(self.response_ids), len(self.response_mask), len(self.logprobs)}
        lengths.add(len(self.kept_counts) or len(self.response_ids))
        if lengths != {len(self.versions)}:
            raise ValueError(f"the arrays of a segment differ in length: {sorted(lengths)}")
        if sum(self.kept_counts) != len(self.kept_ids):
            raise ValueError(
                f"a segment has {len(self.kept_ids)} kept tokens, but counts of"
                f" {sum(self.kept_counts)}"
            )
        inputs = len(self.prompt_ids) + len(self.response_ids) - 1
        if self.experts and len(self.experts) % inputs:
            raise ValueError(f"a segment has {len(self.experts)} experts for {inputs} tokens")


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn: the position of its tokens, and its rewards.

    Attributes:
        segment: the index of its segment in `Trajectory.segments`.
        start: the turn is response tokens [start, end) of the segment.
        end: see `start`.
        finish_reason: why sampling ended: "stop" or "length".
        tool_calls: the calls that the turn contains.
        tool_results: their results, in the same order; empty if they were not run.
        rewards: rewards by source: "turn" (from the interaction, the environment's replies or
            `ep.reward`), "tool", and "scores" (from a reward that returned `Scores`).
        generate_seconds: the time of the engine.
        tool_seconds: the time of the tool calls.
        thread: the conversation: 0 is the agent loop's own, n is the n-th that it spawned. (Of an
            external agent, 0 is the conversation with the last turn.)
        prompt_tokens: the number of tokens in the engine's prompt: the whole row up to this turn.
        cached_tokens: the number of prompt tokens that were in the engine's prefix cache.
        penalties: for each failed call with a penalty (`tools.penalties`): (start, end, penalty),
            where the call is response tokens [start, end).
        message_index: the index of the turn's message in `Trajectory.messages`; -1: the last one.
    """

    segment: int
    start: int
    end: int
    finish_reason: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_results: tuple[ToolResult, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    generate_seconds: float = 0.0
    tool_seconds: float = 0.0
    thread: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    penalties: tuple[tuple[int, int, float], ...] = ()
    message_index: int = -1


@dataclass(frozen=True, slots=True)
class Span:
    """A time that an episode spent on one thing.

    Spans of several conversations may overlap. What lies between spans is the agent loop itself.

    Attributes:
        name: "open" (the tools were opened), "queue" (waited for a free connection, or for the
            engine to answer another conversation), "generate", "tools" (all calls of a turn),
            "interaction" or "reward".
        start: in seconds since the start of the episode (`Trajectory.started`).
        end: see `start`.
        thread: the conversation, as in `Turn`.
    """

    name: str
    start: float
    end: float
    thread: int = 0


@dataclass(frozen=True, slots=True)
class Scores:
    """The result of a reward: the outcome of an episode, scores of its turns, and metrics.

        @reward("steps")
        def steps(trajectory):
            right = [float("=" in answer.content) for answer in trajectory.answers]
            return Scores(outcome=right[-1], turns=dict(enumerate(right)))

    Attributes:
        outcome: the reward of the whole episode.
        turns: scores of turns, by the index of the turn in `Trajectory.turns`. A turn without one
            has none. They are added to the turn rewards (`reward.turn_weight`).
        metrics: other numbers, by the names of metrics. Those that are not finite are left out.
        answer: the answer that was scored, as text, for maj@k: `answer` of the metrics, or verl's
            `pred`. None: the reward returns none.

    Raises:
        ValueError: the outcome or a score is not a finite number, or an index is not an integer of
            0 or more.
    """

    outcome: float
    turns: Mapping[int, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None

    def __post_init__(self):
        if not isinstance(self.turns, Mapping):
            raise ValueError(
                f"Scores: turns={self.turns!r:.60} must be a mapping from indices of turns to"
                " scores. Of a list: dict(enumerate(scores))"
            )
        for name, value in {"outcome": self.outcome, **self.turns}.items():
            if not math.isfinite(as_number(value)):
                where = "outcome" if name == "outcome" else f"turns[{name!r}]"
                raise ValueError(
                    f"Scores: {where} is {value!r} ({type(value).__name__}), not a finite number"
                )
        for index in self.turns:
            if not isinstance(index, int) or isinstance(index, bool) or index < 0:
                raise ValueError(f"Scores: turns has the key {index!r}, not the index of a turn")
        answer = self.metrics.get("answer", self.metrics.get("pred"))
        if self.answer is None and answer is not None:
            object.__setattr__(self, "answer", str(answer))
        numbers = {str(k): as_number(v) for k, v in self.metrics.items() if k != "answer"}
        object.__setattr__(self, "outcome", as_number(self.outcome))
        object.__setattr__(self, "turns", {i: as_number(v) for i, v in self.turns.items()})
        finite = {k: v for k, v in numbers.items() if math.isfinite(v)}
        object.__setattr__(self, "metrics", finite)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished rollout that is not scored yet: what a reward gets.

        @reward("exact")
        def exact(trajectory):
            return float(trajectory.final_text.strip() == trajectory.sample.ground_truth)

    Attributes:
        sample: the dataset row.
        episode_id: unique for each attempt: a retry of the rollout has a new id.
        rollout: the index of this rollout among the sample's n rollouts.
        segments: the rows of tokens (`Segment`). There is one, unless the loop edited the history
            or spawned conversations, or thinking was stripped.
        turns: the assistant turns (`Turn`), with their tool calls, results and rewards.
        messages: all messages in the order of time, also from spawned conversations.
        sampling: the sampling parameters, such as the temperature.
        stop_reason: `done`, or the exhausted budget: `turn_tokens`, `trajectory_tokens`, `turns`,
            `tool_calls` or `time`, or `agent_error` (`agent.on_error=zero`).
        tool_reward: the sum of the values that the class tools' `reward()` returned at the end.
        seconds: how long the attempt took, without opening the tools and without the reward.
        control_token_attempts: how often prompts, tools and interactions contained the text of a
            control token. Such text is never encoded as a control token.
        started: when the attempt started, in seconds since 1970 (`time.time()`).
        spans: what the time was spent on, in the order of the ends.
        scores: the outcome, scores of turns and metrics, if the row's environment or the agent
            itself (`agent.reward`) reports them. None: a reward function computes them. They are
            not stored with the trajectory, but with its rewards.
        counts: what a loop counted, by the names of metrics; not stored.
        error: why the user's agent failed, if `stop_reason` is `agent_error`.
    """

    sample: Sample
    episode_id: str
    rollout: int
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    sampling: Mapping[str, Any]
    stop_reason: str
    tool_reward: float = 0.0
    seconds: float = 0.0
    control_token_attempts: int = 0
    started: float = 0.0
    spans: tuple[Span, ...] = ()
    scores: Scores | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    error: str = ""

    @property
    def assistant_text(self) -> str:
        """The text of all assistant turns, joined by newlines, without tool and user text."""
        return "\n".join(m.content for m in self.answers)

    @property
    def final_text(self) -> str:
        """The last assistant message of the main conversation, or "" if there is none."""
        own = [a for a, t in zip(self.answers, self.turns, strict=True) if t.thread == 0]
        return own[-1].content if own else ""

    @property
    def answers(self) -> tuple[Message, ...]:
        """The assistant messages that the policy sampled, one for each turn in `turns`.

        They do not include other assistant messages, such as few-shot examples.
        """
        return tuple(self.messages[turn.message_index] for turn in self.turns)

    @property
    def response_messages(self) -> tuple[Message, ...]:
        """The messages from the policy's first message on, without the loop's opening messages."""
        start = self.turns[0].message_index if self.turns else len(self.sample.prompt)
        return self.messages[start:]

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens that the policy sampled: the sum of the masks."""
        return sum(sum(s.response_mask) for s in self.segments)

    @property
    def ended(self) -> float:
        """When the attempt and its reward ended, in seconds since 1970."""
        return self.started + max([self.seconds, *(span.end for span in self.spans)])

    def turn_rewards(self, source: str) -> float:
        """Return the sum of one reward source over all turns.

        Args:
            source: "turn", "tool" or "scores", see `Turn.rewards`.
        """
        return sum(t.rewards.get(source, 0.0) for t in self.turns)


@dataclass(frozen=True, slots=True)
class Scored:
    """A trajectory with its rewards by source, and with their weighted sum.

    Attributes:
        trajectory: the finished rollout.
        rewards: the unweighted rewards by source: outcome, turn, tool, and overlong if it is
            configured.
        reward: the weighted sum, which training uses.
        metrics: other numbers that the reward function returned, such as `acc`.
        masked: true if the trajectory is excluded from the loss and from its group's baseline
            (budget policy "mask").
        answer: the answer that was scored, as in `Scores`.
    """

    trajectory: Trajectory
    rewards: Mapping[str, float]
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    masked: bool = False
    answer: str | None = None

    def summary(self) -> dict[str, Any]:
        """Return the ids of the episode, its reward and its stop reason."""
        return {
            "episode_id": self.trajectory.episode_id,
            "sample_id": self.trajectory.sample.id,
            "rollout": self.trajectory.rollout,
            "agent_name": self.trajectory.sample.agent_name,
            "reward": float(self.reward),
            "stop_reason": self.trajectory.stop_reason,
        }


@dataclass(frozen=True, slots=True)
class Group:
    """The scored rollouts of one sample, without those that were dropped.

    Attributes:
        sample: the dataset row.
        scored: the rollouts.
        dropped: the number of rollouts that were dropped.
        greedy: an additional rollout at temperature 0, for estimators that use its reward as a
            baseline. The policy is never trained on it.
        drop_causes: why the rollouts were dropped: the type and the message of each exception.
    """

    sample: Sample
    scored: tuple[Scored, ...]
    dropped: int = 0
    greedy: Scored | None = None
    drop_causes: tuple[str, ...] = ()
