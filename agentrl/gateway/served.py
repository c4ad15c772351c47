"""Compare the answers of a served policy with an evaluation.

The conversations of the evaluation are sent to the API turn by turn: the prompt of the row, the
answers of the API, and between them the messages that followed in the evaluation, such as the
results of tools. At temperature 0 the API must give the same answers. Otherwise the server shows
the policy other tokens than training did (chat template, tools, earlier turns), or parses its
answers in another way.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl import registry
from agentrl.agent_loops.attempt import Runtime
from agentrl.chat.images import openai_message
from agentrl.gateway.serve import Gateway
from agentrl.gateway.session import cut_around_difference
from agentrl.gateway.stateless import StatelessSession, without_budgets
from agentrl.http import HttpClient
from agentrl.plural import plural
from agentrl.trajectory import Message, Trajectory, Turn
from agentrl.workers import run_all

ANSWER_SECONDS = 3600.0
"""The longest wait for an answer: all requests are sent at once."""


@dataclass(frozen=True, slots=True)
class AnswerDifference:
    """A turn in which the API answered something else.

    Attributes:
        row: the id of the row.
        turn: the number of the turn, from 1.
        expected: the answer of the evaluation, around the first difference.
        served: that of the API.
        expected_tokens: the number of prompt tokens in the evaluation.
        served_tokens: that of the API; 0 if it refused the request.
    """

    row: str
    turn: int
    expected: str
    served: str
    expected_tokens: int
    served_tokens: int


@dataclass(frozen=True, slots=True)
class RowComparison:
    """The comparison of one row.

    Attributes:
        turns: the number of turns that were compared.
        difference: the first difference, which ends the comparison; None if there is none.
        left_out: why the other turns were not compared; "" if all were.
    """

    turns: int = 0
    difference: AnswerDifference | None = None
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class ServedComparison:
    """The comparison of all rows."""

    rows: Sequence[RowComparison]

    @property
    def is_equal(self) -> bool:
        """True if turns were compared and no answer differs."""
        return any(r.turns for r in self.rows) and not any(r.difference for r in self.rows)

    def lines(self) -> Iterator[str]:
        """Yield the comparison as text."""
        differences = [r.difference for r in self.rows if r.difference]
        turns = sum(r.turns for r in self.rows)
        compared = sum(r.turns > 0 for r in self.rows)
        for d in differences:
            yield f"row {d.row}, turn {d.turn}: the answers differ"
            yield f"  eval    {d.expected!r}"
            yield f"  served  {d.served!r}"
            if d.served_tokens and d.served_tokens != d.expected_tokens:
                yield (
                    f"  the served prompt has {plural(d.served_tokens, 'token')}, that of the"
                    f" evaluation {d.expected_tokens}"
                )
        for why, number in Counter(r.left_out for r in self.rows if r.left_out).items():
            yield f"not compared in {plural(number, 'row')}: {why}"
        yield (
            f"{compared - len(differences)} of {plural(compared, 'row')} equal"
            f" ({plural(turns, 'turn')} compared)"
        )


async def compare_served(runtime: Runtime, trajectories: Sequence[Trajectory]) -> ServedComparison:
    """Serve the policy as `agentrl serve` does, and compare its answers with greedy episodes.

    Args:
        runtime: the runtime of the episodes.
        trajectories: episodes that were played at temperature 0 with the same policy.

    Raises:
        Infrastructure: the engine failed.
    """
    serving = replace(runtime, config=without_budgets(runtime.config))
    try:
        session = StatelessSession(serving, runtime.config.rollout.temperature)
        async with Gateway().session(session) as (url, key), HttpClient(url, token=key) as client:
            rows = await run_all([_compare_row(runtime, t, client) for t in trajectories])
    finally:
        serving.close()
    return ServedComparison(rows)


async def _compare_row(runtime: Runtime, t: Trajectory, client: HttpClient) -> RowComparison:
    loop, rollout = registry.agent_loops.get(t.sample.agent_name), runtime.config.rollout
    if not loop.awaited:
        return RowComparison(left_out="their agents are clients of the API themselves")
    is_one_row = len(t.segments) == 1 or rollout.history_thinking == "strip"
    if not is_one_row or any(turn.thread for turn in t.turns):
        return RowComparison(left_out="their loop edits the history or has several conversations")
    if not t.turns:
        return RowComparison(left_out="a budget ended their episode before the first turn")
    _, schemas = loop.opening(t.sample, runtime.toolbox.schemas(t.sample.tools))
    messages: list[Any] = [openai_message(m) for m in t.messages[: t.turns[0].message_index]]
    for i, turn in enumerate(t.turns):
        body = {
            "messages": messages,
            "temperature": 0,
            # A text that ended the turn, as in ReAct, is known to the loop alone.
            "max_tokens": rollout.max_turn_tokens if _has_ended(runtime, t, turn) else _size(turn),
            **({"tools": schemas} if schemas else {}),
        }
        deadline = time.monotonic() + ANSWER_SECONDS
        status, answer = await client.request_json(
            "POST", "/chat/completions", body, deadline=deadline
        )
        expected = await _expected_message(runtime, t, turn, schemas)
        served = answer["choices"][0]["message"] if status == 200 else None
        if served is None or _comparable(served) != _comparable(expected):
            shown = _text_of(served) if served else f"refused ({status}): {answer}"
            before, after = cut_around_difference(_text_of(expected), shown)
            tokens = answer["usage"]["prompt_tokens"] if served else 0
            difference = AnswerDifference(
                t.sample.id, i + 1, before, after, turn.prompt_tokens, tokens
            )
            return RowComparison(i + 1, difference)
        if i + 1 == len(t.turns):
            break
        given = iter([call["id"] for call in served.get("tool_calls", ())])
        ids = iter(["" if call.error else next(given, "") for call in turn.tool_calls])
        following = t.messages[turn.message_index + 1 : t.turns[i + 1].message_index]
        messages += [served, *(_as_json(m, ids) for m in following)]
    return RowComparison(len(t.turns))


def _size(turn: Turn) -> int:
    return turn.end - turn.start


def _has_ended(runtime: Runtime, t: Trajectory, turn: Turn) -> bool:
    """Return whether the policy ended a turn itself."""
    last = t.segments[turn.segment].response_ids[turn.end - 1]
    return turn.finish_reason == "stop" and last in runtime.template.stop_ids


def _as_json(message: Message, ids: Iterator[str]) -> dict[str, Any]:
    """Return a message of the evaluation as a client sends it.

    Args:
        message: a message that follows a turn.
        ids: the ids of the turn's calls whose results have not been sent; "" for malformed calls.
    """
    if message.role != "tool":
        return openai_message(message)
    return {**openai_message(message), "tool_call_id": next(ids, "")}


async def _expected_message(
    runtime: Runtime, t: Trajectory, turn: Turn, schemas: Sequence[Any]
) -> dict[str, Any]:
    """Return a turn of the evaluation as the API would answer it."""
    template, segment = runtime.template, t.segments[turn.segment]
    text = t.messages[turn.message_index].content
    prompt = segment.prompt_ids + segment.response_ids[: turn.start]
    opening = template.thinking.opening(prompt)
    calls = await runtime.parse_calls(opening + text, schemas)
    # The spans of the turn's own calls are those in its text. ReAct has a parser of its own.
    calls = turn.tool_calls if [*calls] == [*turn.tool_calls] else calls
    calls = [call for call in calls if not call.error]
    reasoning, visible = template.split_thinking(prompt[-16:], text, calls)
    functions = [
        {"name": c.name, "arguments": json.dumps(c.arguments, ensure_ascii=False)} for c in calls
    ]
    return {
        "content": visible.strip(),
        "reasoning_content": reasoning,
        "tool_calls": [{"function": function} for function in functions],
    }


def _comparable(message: Mapping[str, Any]) -> tuple[str, str, list[Any]]:
    """Return the parts of a message that are compared: all but the ids of its calls."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return message["content"] or "", message.get("reasoning_content") or "", functions


def _text_of(message: Mapping[str, Any]) -> str:
    content, reasoning, functions = _comparable(message)
    calls = [f"{f['name']}({f['arguments']})" for f in functions]
    return "\n".join(part for part in (reasoning, content, *calls) if part)
