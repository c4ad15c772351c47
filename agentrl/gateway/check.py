"""Play a user's agent against a scripted policy, and report what would train.

No model is needed: the policy calls each tool that the agent offers once, with arguments made from
the tool's schema, and then answers with a text. One call is malformed. Further episodes play the
mistakes that a policy makes. So mistakes of the agent are found within seconds, before they waste
training: history that changes, tools that change, unsupported fields, crashes.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import orjson

from agentrl.agent_loops import Episode
from agentrl.agent_loops.attempt import Runtime
from agentrl.agent_loops.play import play_episode
from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.engine.base import Sampler, Sampling
from agentrl.engine.scripted import scripted_generation
from agentrl.errors import AgentRLError
from agentrl.gateway.agent import open_session
from agentrl.gateway.requests import Answer, ChatRequest, Refusal
from agentrl.gateway.session import RequestMatch, Session
from agentrl.images import RowImage
from agentrl.plural import plural
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Generation, Sample, ToolCall, Trajectory, token_array

CALLS_PER_TURN = 2
"""The largest number of tools that one turn of the scripted policy calls."""
MAX_TOOLS = 6
"""The largest number of different tools that the scripted policy calls."""
ANSWER = "The answer is 42."
"""The text of the last turn of the scripted policy."""
MAX_KINDS = 3
"""The largest number of different refusals, and of different lost episodes, in a report."""

ADVICE = {
    "system message changed": "Put what changes into a later message, such as the user's.",
    "user message changed": "Send earlier messages again as they were.",
    "tool message changed": "Send the results of tools again as they were.",
    "assistant message changed": "Send the policy's turns again as they were answered, with the ids"
    " of their calls.",
    "the conversation goes on from another answer than its last": "Nothing is lost: each answer"
    " trains. If the agent needs one of several, it costs a row for each.",
    "messages were removed": "Keep the history, or accept a new row of tokens at each compaction.",
    "the tools changed": "Send the same tools in each request of a conversation.",
    "an earlier request was sent again": "If it is a retry, send the header"
    " x-stainless-retry-count; otherwise each request is a sample of its own.",
}
"""The advice for each cause of a new row of tokens."""

MISTAKES = ("an unknown tool", "bad arguments", "a tool that raises")
"""The mistakes of a policy that the scripted policy plays, each in an episode of its own. A tool is
likely to raise at the number 0, and at a text that is neither a name nor an expression."""
UNKNOWN_TOOL = {"name": "no_such_tool", "parameters": {"properties": {"query": {}}}}
FIX = (
    "Catch the error in the agent (try/except), and return it to the policy as the result of the"
    " call: docs/agents.md, Mistakes of the policy"
)

_request: ContextVar[ChatRequest] = ContextVar("request")
"""The request that the scripted policy answers."""


@dataclass(slots=True)
class CheckedEpisode:
    """An episode of the check.

    Attributes:
        events: how its requests were matched.
        refusals: the errors that requests got as their answers.
        ignored: the fields that the run decides, with the number of requests.
        trajectory: the trajectory that would train; None if the episode was lost.
        loss: why the episode was lost, or got the reward 0 (`agent.on_error=zero`); "" if neither.
    """

    events: list[RequestMatch]
    refusals: list[Refusal]
    ignored: Counter[str]
    trajectory: Trajectory | None = None
    loss: str = ""

    @property
    def fix(self) -> str:
        """The advice for a lost episode."""
        if "ModuleNotFoundError" in self.loss and not self.events:
            return "Install its package for the Python that agent.command runs"
        if not self.events:
            return "Use OPENAI_BASE_URL and OPENAI_API_KEY (or ANTHROPIC_...): docs/agents.md"
        is_late = self.trajectory and self.trajectory.stop_reason == "time"
        return "End the agent after its last answer, or raise --timeout" if is_late else FIX


@dataclass(slots=True)
class CheckReport:
    """The result of a check.

    Attributes:
        played: the episodes, with the budgets of the config.
        over_budget: an episode whose second turn is refused, to test whether the agent ends; None
            if no agent requested a second turn.
        mistakes: the episodes of `MISTAKES`; empty if the agent has no tools, or an episode without
            a mistake was lost.
    """

    played: list[CheckedEpisode] = field(default_factory=list)
    mistakes: dict[str, CheckedEpisode] = field(default_factory=dict)
    over_budget: CheckedEpisode | None = None

    @property
    def is_clean(self) -> bool:
        """True if each conversation is one row of tokens, and no request or episode was lost."""
        return not any(self._problems())

    def lines(self) -> Iterator[str]:
        """Yield the report as text."""
        events = [event for p in self.played for event in p.events]
        kinds = Counter(event.kind for event in events)
        shares = ", ".join(
            f"{number} {kind} = {number / len(events):.0%}" for kind, number in kinds.most_common()
        )
        yield f"{plural(len(self.played), 'episode')}: {plural(len(events), 'request')} ({shares})"
        trajectories = [p.trajectory for p in self.played if p.trajectory]
        turns = sum(len(t.turns) for t in trajectories)
        segments = [s for t in trajectories for s in t.segments]
        if segments:
            sampled = sum(t.sampled_tokens for t in trajectories)
            later = (s for t in trajectories for s in t.segments[1:])
            repeated = sum(len(s.prompt_ids) for s in later)
            yield (
                f"would train: {plural(turns, 'turn')} in {plural(len(segments), 'row')} of tokens"
                f" ({turns / len(segments):.1f} turns per row); {sampled} sampled tokens, each"
                f" once; {repeated} tokens of prompts of further rows"
            )
        ignored = sum((p.ignored for p in self.played), Counter[str]())
        del ignored["volatile"]  # the events show it
        for name, number in ignored.most_common():
            yield f"decided by the run, not by the agent: {name} ({plural(number, 'request')})"
        for event in {e.cause: e for e in events if e.kind == "realigned"}.values():
            yield f"realigned, which costs nothing: {event.cause}"
            yield from _examples([event])
        if kinds["spawn"]:
            yield f"further conversations (sub-agents train as well): {kinds['spawn']}"
        problems = list(self._problems())
        yield from problems
        yield (
            "the agent trains cleanly: each conversation is one row of tokens"
            if not problems
            else f"{plural(len(problems), 'problem')}: see above"
        )

    def _problems(self) -> Iterator[str]:
        events = [event for p in self.played for event in p.events if event.kind == "branch"]
        for cause, number in Counter(event.cause for event in events).most_common():
            yield "\n".join(
                [
                    f"problem: a new row of tokens began {plural(number, 'time')}: {cause}",
                    *_examples([e for e in events if e.cause == cause]),
                    f"  {ADVICE.get(cause, 'Send the conversation as it was.')}",
                ]
            )
        refusals = Counter((r.status, r.code, str(r)) for p in self.played for r in p.refusals)
        for (status, _, text), number in refusals.most_common(MAX_KINDS):
            yield f"problem: {plural(number, 'request')} refused ({status}): {text}"
        losses = Counter((p.loss, p.fix) for p in self.played if p.loss)
        for (loss, fix), number in losses.most_common(MAX_KINDS):
            yield f"problem: {plural(number, 'episode')} {loss}\n  {fix}"
        for mistake, p in self.mistakes.items():
            if p.loss:
                yield f"problem: {mistake}: episode {p.loss}\n  {p.fix}"
        refusals_over_budget = self.over_budget.refusals if self.over_budget else []
        after = [r for r in refusals_over_budget if r.code == "episode_over"]
        # Each conversation may have had a request on its way when the episode ended.
        opened = [sum(e.kind in ("first", "spawn") for e in p.events) for p in self.played]
        if (late := len(after) - max(opened, default=1)) > 0:
            yield (
                f"problem: {plural(late, 'request')} after the episode was over (400"
                " episode_over), in an episode of the check with rollout.max_turns=1. End the agent"
                " at this error; it is killed after 5 s"
            )
        elif self.over_budget and self.over_budget.loss:
            yield f"problem: after the episode was over (400 episode_over): {self.over_budget.loss}"


async def check_agent_against_script(
    config: Config, template: ChatTemplate, samples: Sequence[Sample], rollouts: int = 2
) -> CheckReport:
    """Play episodes of an agent against the scripted policy.

    Args:
        config: the config, of which the sections `agent` and `rollout` matter.
        template: the policy's chat template.
        samples: the rows.
        rollouts: the number of episodes of each row.
    """
    report = CheckReport()
    plays = [(sample, k) for sample in samples for k in range(rollouts)]
    report.played = [*await asyncio.gather(
        *(_play(config, template, sample, f"check-{sample.row}-{k}", k) for sample, k in plays)
    )]  # fmt: skip
    if any(p.trajectory and len(p.trajectory.turns) > 1 for p in report.played):
        limited = config.with_values("rollout", max_turns=1)
        report.over_budget = await _play(limited, template, samples[0], "check-over", 0)
    has_tools = any(t.tool_calls for p in report.played if p.trajectory for t in p.trajectory.turns)
    if has_tools and not any(p.loss for p in report.played):
        played = await asyncio.gather(
            *(_play(config, template, samples[0], f"check-{m}", 0, m) for m in MISTAKES)
        )
        report.mistakes = dict(zip(MISTAKES, played, strict=True))
    return report


async def _play(
    config: Config,
    template: ChatTemplate,
    sample: Sample,
    episode_id: str,
    k: int,
    mistake: str = "",
) -> CheckedEpisode:
    policy = ScriptedPolicy(template, mistake)
    runtime = policy.runtime = Runtime(policy, template, LocalToolbox(), config)
    sessions: list[Session] = []

    def open_checked(ep: Episode) -> Session:
        sessions.append(_CheckedSession(ep))
        return sessions[0]

    open_session.set(open_checked)
    try:
        trajectory = await play_episode(
            runtime, sample, episode_id=episode_id, rollout=k, sampling=Sampling(), seed=0
        )
        loss = trajectory.error and f"with reward 0 (agent.on_error=zero): {trajectory.error}"
        if trajectory.stop_reason == "time":
            loss = f"lost: the agent had not ended after {config.rollout.timeout_s:g} s"
    except AgentRLError as e:
        trajectory, loss = None, f"lost: {e}"
    finally:
        runtime.close()
    if not sessions:
        return CheckedEpisode([], [], Counter(), trajectory, loss)
    (session,) = sessions
    return CheckedEpisode(session.events, session.refusals, session.counts, trajectory, loss)


class ScriptedPolicy(Sampler):
    """A policy that calls each tool once, and then answers with a text.

    Its first turn with calls also contains a malformed call.

    Attributes:
        runtime: the runtime that it samples for.
    """

    max_length = 10**6
    runtime: Runtime

    def __init__(self, template: ChatTemplate, mistake: str = ""):
        """Create the policy.

        Args:
            template: the chat template.
            mistake: the one of `MISTAKES` that it makes; "": it only writes a malformed call.
        """
        self._template, self._mistake = template, mistake

    async def generate(
        self,
        prompt_ids: array[int],
        sampling: Sampling,
        *,
        episode_id: str,
        seed: int,
        deadline: float,
        images: Sequence[RowImage] = (),
    ) -> Generation:
        """Return the tokens of the next turn, as the chat template writes it."""
        request = _request.get()
        content, calls = next_turn(request, self._mistake)
        turn = token_array([*self._thought(), *self._template.foreign_turn(content, calls)])
        is_first = not any(message.calls for message in request.messages)
        if calls and is_first and not self._mistake:
            turn += await self._malformed_call(turn, calls, request.tools)
        return scripted_generation([*turn, sampling.stop_ids[0]], prompt_ids, sampling)

    def begin(self, episode_id: str, *, awaited: bool = True) -> None: ...

    def end(self, episode_id: str) -> None: ...

    async def _malformed_call(
        self, turn: array[int], calls: Sequence[ToolCall], schemas: Sequence[Any]
    ) -> array[int]:
        """Return the tokens of a malformed call that may follow a turn with well-formed calls.

        They are those of a well-formed call without one token. If no such tokens leave the other
        calls as they are, there are none.
        """
        whole = self._template.foreign_turn("", calls[:1])
        for i in reversed(range(len(whole))):
            broken = whole[:i] + whole[i + 1 :]
            text = self._template.decode(turn + broken)
            parsed = await self.runtime.parse_calls(text, schemas)
            names = [(c.name, c.arguments) for c in parsed if not c.error]
            if names == [(c.name, c.arguments) for c in calls] and len(parsed) == len(calls) + 1:
                return broken
        return token_array()

    def _thought(self) -> array[int]:
        """Return a thought, if the template has a token for it."""
        thinking, encoder = self._template.thinking, self._template.encoder
        begin = thinking.begin.strip()
        if encoder.control_tokens_in(begin) != [begin] or thinking.new_turn_prefix:
            return token_array()
        return encoder.encode_trusted(f"{thinking.begin}I think.\n{thinking.end}{thinking.gap}")


def next_turn(request: ChatRequest, mistake: str = "") -> tuple[str, list[ToolCall]]:
    """Return the text and the calls of the scripted policy's next turn.

    Args:
        request: the request.
        mistake: one of `MISTAKES`, or "".
    """
    called = {call.name for message in request.messages for call in message.calls}
    functions = [tool["function"] for tool in request.tools]
    if functions and mistake == "an unknown tool":
        functions = [UNKNOWN_TOOL]
    uncalled = [f for f in functions[:MAX_TOOLS] if f["name"] not in called][:CALLS_PER_TURN]
    if not uncalled:
        form = request.output_format
        return orjson.dumps(example_of(orjson.loads(form.schema))).decode() if form else ANSWER, []
    leaves = {"text": "1/0 (", "number": 0} if mistake == "a tool that raises" else {}
    calls = [ToolCall(f["name"], example_of(f["parameters"], **leaves)) for f in uncalled]
    if mistake == "bad arguments":
        calls = [ToolCall(call.name, {"no_such_argument": 1}) for call in calls]
    return "Let me see.", calls


def example_of(
    schema: Mapping[str, Any],
    text: str = "1+1",
    number: float = 1.5,
    choose: Callable[[Sequence[Any]], Any] = lambda choices: choices[0],
    types: Mapping[str, Any] | None = None,
) -> Any:
    """Return a value that a JSON schema accepts, if the schema uses common keywords only.

    Args:
        schema: the schema.
        text: the value of a text.
        number: the value of a number; an integer is at most that.
        choose: chooses one of several values or schemas.
        types: the schemas that a `$ref` may name; None: those in `$defs`.
    """
    types = dict(schema.get("$defs", {}) if types is None else types)
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        # A type in itself has no example: only an optional value contains it.
        rest = {other: inner for other, inner in types.items() if other != name}
        return example_of(types.get(name, {"const": None}), text, number, choose, rest)
    if "const" in schema:
        return schema["const"]
    for key in ("enum", "examples"):
        if schema.get(key):
            return choose(schema[key])
    if "default" in schema:
        return schema["default"]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return example_of(choose(schema[key]), text, number, choose, types)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties", {})
        required = schema.get("required", properties)
        return {
            name: example_of(properties.get(name, {}), text, number, choose, types)
            for name in required
        }
    if kind == "array":
        items = schema.get("items")
        return [example_of(items, text, number, choose, types)] if items else []
    integer = min(
        max(int(number), schema.get("minimum", int(number))), schema.get("maximum", 10**9)
    )
    booleans = choose([True, False])
    return {"integer": integer, "number": number, "boolean": booleans}.get(kind, text)


class _CheckedSession(Session):
    """A session that shows its requests to the scripted policy."""

    async def _sample(self, request: ChatRequest) -> Answer:
        _request.set(request)
        return await super()._sample(request)


def _examples(events: Sequence[RequestMatch]) -> Iterator[str]:
    """Yield the first difference among some events, as lines of text."""
    shown = dict.fromkeys((e.index, e.before, e.after) for e in events if e.before or e.after)
    for index, before, after in [*shown][:1]:
        where = f"message {index}" if index >= 0 else "tools"
        yield f"  {where} was  {before!r}"
        yield f"  {' ' * len(where)} now  {after!r}"
