"""Compares the row of a conversation with the conversation that the chat template renders."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from support.families import TOOLS

from agentrl.chat import ChatTemplate
from agentrl.errors import TemplateError
from agentrl.trajectory import Message, ToolCall

KINDS = {
    "text": (True, False, 0),
    "thought, text": (True, True, 0),
    "call": (False, False, 1),
    "text, call": (True, False, 1),
    "thought, call": (False, True, 1),
    "thought, text, call": (True, True, 1),
    "two calls": (False, False, 2),
}
"""The kinds of turns: whether a turn has a text, whether it has a thought, its number of calls."""


@dataclass
class Conversation:
    """A conversation as dicts for the chat template, and as the messages of an episode."""

    dicts: list[dict[str, Any]]
    messages: list[Message]
    sampled: dict[int, list[int]] = field(default_factory=dict)


def spellings(text: str, thought: str, calls: list[tuple[str, dict, str]]) -> Iterator[dict]:
    """Yield a turn as the different dicts that templates take.

    A thought is a key of its own or tags in the content; arguments are an object or its JSON text.
    """
    contents: list[str | None] = [text] if text else ["", None]
    for content, as_text, in_tags in itertools.product(contents, (False, True), (False, True)):
        turn: dict[str, Any] = {"role": "assistant", "content": content}
        if thought and in_tags:
            turn["content"] = f"<think>\n{thought}\n</think>\n\n{content or ''}"
        elif thought:
            turn |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thought)
        elif in_tags:
            continue
        if calls:
            turn["tool_calls"] = [
                {
                    "id": id,
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(a) if as_text else a},
                }
                for name, a, id in calls
            ]
        elif as_text:
            continue
        yield turn


def add_turn(template: ChatTemplate, talk: Conversation, kind: str, n: int, tools: list) -> str:
    """Append a sampled turn of this kind. Return why the template cannot render it, or ""."""
    has_text, thinks, count = KINDS[kind]
    text, thought = f"Answer {n}." * has_text, f"hmm {n}" * thinks
    calls = [("calculator", {"expression": f"{n}*{i}"}, f"call{n}{i:04}") for i in range(count)]
    prompt = template.render(talk.dicts, tools)
    for turn in spellings(text, thought, calls):
        try:
            whole = template.render([*talk.dicts, turn], tools, as_prompt=False)
        except TemplateError:
            continue
        rest = whole.removeprefix(prompt)
        wanted = [text, thought, *(a["expression"] for _, a, _ in calls)]
        if whole.startswith(prompt) and all(want in rest for want in wanted):
            break
    else:
        return "not written"
    ids = list(template.encoder.encode_trusted(rest))
    end = next((i for i, id in enumerate(ids) if id in template.stop_ids), len(ids))
    if any(want in template.decode(ids[end + 1 :]) for want in wanted if want):
        return "ends inside"
    if end == len(ids):  # the next role's token ends it, whichever this is
        ids = list(template.encoder.encode_trusted(rest.rstrip("\n")))
        ids += [template.close_id] * (template.closes or not calls)
    talk.sampled[len(talk.dicts)] = ids[: end + 1]
    talk.dicts.append(turn)
    called = tuple(ToolCall(name, a, id=id) for name, a, id in calls)
    talk.messages.append(Message("assistant", text, called))
    return ""


def add_replies(talk: Conversation, then: str, n: int) -> None:
    """Append what follows the last turn: results of its calls, a user message, or both."""
    for call in talk.messages[-1].tool_calls if "tool" in then else ():
        result = {"role": "tool", "content": f"R{n}", "name": call.name, "tool_call_id": call.id}
        talk.dicts.append(result)
        talk.messages.append(Message("tool", f"R{n}", tool_call_id=call.id))
    if "user" in then:
        talk.dicts.append({"role": "user", "content": f"Go on {n}."})
        talk.messages.append(Message("user", f"Go on {n}."))


def outcome(template: ChatTemplate, tools: list, system: bool, steps: Any) -> str:
    """Return "same", "other KIND", or why the conversation cannot be rendered or encoded.

    "same": the decoded row is the rendered conversation. "other KIND": it differs after a turn of
    this kind.
    """
    talk = Conversation([], [])
    for role, text in [("system", "Be brief.")] * system + [("user", "How much is 3*4?")]:
        talk.dicts.append({"role": role, "content": text})
        talk.messages.append(Message(role, text))  # pyright: ignore[reportArgumentType]
    for n, (kind, then) in enumerate(steps):
        try:
            if why := add_turn(template, talk, kind, n, tools):
                return f"{why} {kind}"
            add_replies(talk, then, n)
            want = template.render(talk.dicts, tools)
        except TemplateError:
            return "refused by the template"
        rows = []
        for strip in (False, True):
            try:
                ids = template.conversation(talk.messages, tools, talk.sampled, strip=strip)
            except TemplateError:
                return f"refused {then}"
            rows.append(template.decode(ids))
        if want not in rows:
            return f"other {kind}"
    return "same"


def outcomes(template: ChatTemplate) -> Counter[str]:
    """Count the outcomes of all conversations of two turns, by outcome."""
    counts: Counter[str] = Counter()
    for system, tools in itertools.product((False, True), ([], TOOLS)):
        steps = [
            (kind, then)
            for kind, (_, _, calls) in KINDS.items()
            for then in (("tool", "tool+user") if calls else ("user",))
            if tools or not calls
        ]
        for pair in itertools.product(steps, repeat=2):
            counts[outcome(template, tools, system, pair)] += 1
    return counts


SPACED = """
{{- bos_token -}}
{%- if tools -%}
    {{- '<|header_start|>system<|header_end|>' + tools | tojson + '<|eot|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|header_start|>' + message.role + '<|header_end|>\\n\\n' -}}
    {{- message.content or '' -}}
    {%- for call in message.tool_calls or () -%}
        {{- '{"name": "' + call.function.name + '", "parameters": ' -}}
        {{- call.function.arguments | tojson + '}' -}}
    {%- endfor -%}
    {{- CLOSE -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|header_start|>assistant<|header_end|>\\n\\n' -}}
{%- endif -%}
"""
"""White space before the token that closes a turn, as Apriel's and some Llama 4 templates write."""


CLOSE = {
    "always": "'\\n<|eot|>'",
    "then more": "'\\n<|eot|>\\n'",
    "not at the end": "'' if loop.last and message.role == 'assistant' else '\\n<|eot|>'",
}
