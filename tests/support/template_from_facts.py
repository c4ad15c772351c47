"""Builds a chat template from facts about a model family.

A fact is a text that the template writes, with slots in braces: `{content}` of a message, `{name}`
and `{arguments}` of a call, `{tool}` of a schema. All other braces are literal.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

from support.any_template import tokenizer_for
from transformers import PreTrainedTokenizerFast

Shown = Literal["", "always", "never", "after the last user", "in the last turn"]
"""The turns that are shown with their thoughts; "" if the template has no thoughts."""

_SHOWN = {
    "always": "true",
    "never": "false",
    "after the last user": "loop.index0 > at.user",
    "in the last turn": "loop.last",
}
# How the template writes the content None, which a turn with calls may have.
_CONTENT_OF_CALLS = {
    "": "m.content or ''",
    "None": "m.content|string",
    "refused": "'' + m.content",
}
_SLOT = re.compile(r"\{([a-z]+)(?::(\d))?\}")
# The Jinja expression of each slot, for a message `m`, a call `c`, a parameter `key` and `value`, a
# schema `t`.
_SLOTS = {
    "thought": "thought",
    "name": "c.function.name",
    "arguments": "c.function.arguments|tojson",
    "verbatim": "(c.function.arguments if c.function.arguments is string"
    " else c.function.arguments|tojson)",
    "function": "c.function|tojson",
    "parameters": "parameters(c)",
    "id": "c.id",
    "number": "(loop.index0|string)",
    "key": "key",
    "value": "(value if value is string else value|tojson)",
    "tool": "t|tojson",
    "schema": "t.function|tojson",
    "tools": "listed",
    "list": "tools|tojson",
    "json": "m.content|tojson",
    "of": "m.tool_call_id",
    "caller": "m.name",
}


@dataclass(frozen=True)
class TemplateFacts:
    """The texts and rules of a family's chat template.

    Attributes:
        name: the public name of the family.
        user: a user message.
        assistant: the text that begins an assistant turn.
        end: the text that ends it.
        eos: the token that ends a turn, or else the tokenizer's EOS.
        bos: the tokenizer's BOS, if the template writes one in the patterns.
        start: the text that begins the conversation; it may contain the list of tools.
        tokens: further control tokens that do not look like control tokens.
        system: the system block, with the system text and the list of tools (`{tools}`) where they
            stand; "" if a system message is dropped, None if it is refused.
        system_text: the system text in it, if there is one.
        default: the system text of a conversation without a system message.
        default_with_tools: the same if tools are shown; None if it is `default`.
        always: the system block is also written without text and tools.
        system_in: the user message that contains the system text instead, by `with_system`.
        with_system: a user message with the system text (`{system}`).
        prompt: the end of a prompt; None if it is `assistant`.
        prompt_after_results: the same after results of tools.
        assistant_after_results: the text that begins an assistant turn after results of tools.
        text: the text of an assistant turn, if it has one.
        end_last: the text that ends the last turn of the conversation, if it differs.
        skips_empty_turns: a turn without a text is not written.
        always_prompts: the prompt's end is also written without `add_generation_prompt`.
        tools: the list of tools (`{tools}`, or `{list}` as one JSON list); "" if there is none.
        tool: one of them (`{tool}`, or `{schema}` without its type; `:4` indents the JSON).
            JSON also replaces other formats of published templates.
        between_tools: the text between two of them.
        tools_at: the place of the list, if it is not in the system block.
        before_tools: the text between the system text and the list.
        calls: the texts before all calls, of a call, between calls and after all calls;
            or only that of a call; None if they are dropped.
        parameter: a parameter of a call, for `{parameters}`.
        between_parameters: the text between parameters.
        text_and_calls: the text between content and calls; None if calls replace the content.
        content_of_calls: how the content None of a turn with calls is written.
        end_after_calls: the text that ends a turn with calls, if it differs.
        results: the same four texts as in `calls`, for results that follow each other.
        end_of_last_results: the text that ends them if nothing follows, if it differs.
        counts_system: after a system message, the template looks for the neighbors of a result one
            message too early.
        refuses_results: a message of a tool is refused.
        thoughts: which turns show their thoughts.
        thought: a thought.
        reads: whether the template takes a thought from a key of the message, from tags in its
            text, or from both; "raw": the text is shown with its tags.
        key: the name of that key.
        strips_gap: the empty lines between a thought in tags and the text are dropped.
        no_thought: the text instead of a thought, if the turn has none.
        hidden_thought: the text instead of a thought that is not shown.
        trims: the roles whose texts are trimmed ("start of assistant", "end of system": on that
            side only; "calls": texts before calls).
        alternates: users and assistants must take turns; messages of tools count or do not.
    """

    name: str
    user: str
    assistant: str
    end: str
    eos: str = "</s>"
    bos: str = "<s>"
    start: str = ""
    tokens: tuple[str, ...] = ()
    system: str | None = ""
    system_text: str = "{content}"
    default: str = ""
    default_with_tools: str | None = None
    always: bool = False
    system_in: Literal["", "first user", "last user"] = ""
    with_system: str = ""
    prompt: str | None = None
    prompt_after_results: str | None = None
    assistant_after_results: str | None = None
    text: str = "{content}"
    end_last: str | None = None
    skips_empty_turns: bool = False
    always_prompts: bool = False
    tools: str = ""
    tool: str = "\n{tool}"
    between_tools: str = ""
    tools_at: Literal["", "before", "after", "last user"] = ""
    before_tools: str = ""
    calls: str | tuple[str, str, str, str] | None = None
    parameter: str = ""
    between_parameters: str = ""
    text_and_calls: str | None = ""
    content_of_calls: Literal["", "None", "refused"] = ""
    end_after_calls: str | None = None
    results: str | tuple[str, str, str, str] | None = None
    end_of_last_results: str | None = None
    counts_system: bool = False
    refuses_results: bool = False
    thoughts: Shown = ""
    thought: str = "<think>\n{thought}\n</think>\n\n"
    reads: Literal["key", "tags", "both", "raw"] = "both"
    key: str = "reasoning_content"
    strips_gap: bool = True
    no_thought: str = ""
    hidden_thought: str = ""
    trims: tuple[str, ...] = ()
    alternates: Literal["", "all", "all but tools"] = ""


def tokenizer_from_facts(facts: TemplateFacts) -> PreTrainedTokenizerFast:
    """Return a small tokenizer with the chat template that these facts describe."""
    return tokenizer_for(template_from_facts(facts), facts.tokens, facts.bos, facts.eos)


def template_from_facts(facts: TemplateFacts) -> str:
    """Return the chat template (Jinja) that these facts describe."""
    return "\n".join(
        line
        for line in (
            _head(facts),
            *_alternation(facts),
            _write(facts.start),
            _system(facts),
            "{%- for m in messages -%}",
            _user(facts),
            _assistant(facts),
            _results(facts),
            "{%- endif -%}",
            "{%- endfor -%}",
            _prompt(facts),
        )
        if line
    )


def _write(pattern: str, **slots: str) -> str:
    """Return the Jinja that writes a pattern, with each slot replaced by its expression."""
    parts, at = [], 0
    known = {**_SLOTS, **slots}
    for slot in _SLOT.finditer(pattern):
        if slot[1] not in known:
            continue
        parts += [_quoted(pattern[at : slot.start()]), known[slot[1]]]
        if slot[2]:
            parts[-1] = parts[-1].replace("|tojson", f"|tojson(indent={slot[2]})")
        at = slot.end()
    parts.append(_quoted(pattern[at:]))
    parts = [part for part in parts if part != '""']
    return "{{- " + " + ".join(f"({p})" if "|" in p else p for p in parts) + " -}}" if parts else ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _if(*branches: tuple[str, str]) -> str:
    """Return branches as one statement; the condition "" stands for all other cases."""
    out = ""
    for i, (condition, body) in enumerate(branches):
        out += f"{{%- {'el' * (i > 0)}if {condition} -%}}" if condition else "{%- else -%}"
        out += body
    return out + "{%- endif -%}"


def _content(facts: TemplateFacts, role: str) -> str:
    return "m.content" + _trim(facts, role)


def _trim(facts: TemplateFacts, role: str) -> str:
    """Return the method that trims a role's texts, or ""."""
    ways = {f"{role}": ".strip()", f"start of {role}": ".lstrip()", f"end of {role}": ".rstrip()"}
    return next((way for where, way in ways.items() if where in facts.trims), "")


def _run(patterns: str | tuple[str, str, str, str]) -> tuple[str, str, str, str]:
    return ("", patterns, "", "") if isinstance(patterns, str) else patterns


def _head(facts: TemplateFacts) -> str:
    """Return the Jinja that sets the system text, the list of tools and the last user's index."""
    system = "messages[0].content" + _trim(facts, "system")
    default = _quoted(facts.default)
    if facts.default_with_tools is not None:
        default = f"({_quoted(facts.default_with_tools)} if tools else {default})"
    first = "{%- set every = messages -%}" * facts.counts_system
    first += "{%- if messages[0].role == 'system' -%}"
    if facts.system is None:
        first += "{{- raise_exception('a system message is refused') -}}"
    first += f"{{%- set system = {system} -%}}{{%- set messages = messages[1:] -%}}"
    lines = [
        first + f"{{%- else -%}}{{%- set system = {default} -%}}{{%- endif -%}}",
        "{%- set at = namespace(user=-1, count=0) -%}{%- for m in messages -%}"
        "{%- if m.role == 'user' -%}{%- set at.user = loop.index0 -%}{%- endif -%}"
        "{%- endfor -%}",
    ]
    if "{tools}" in facts.tools + facts.start:
        between = _if(("not loop.last", _write(facts.between_tools)))
        lines.append(
            "{%- set listed -%}{%- for t in tools or [] -%}"
            + _write(facts.tool)
            + between * bool(facts.between_tools)
            + "{%- endfor -%}{%- endset -%}"
        )
    if facts.parameter:
        between = _if(("not loop.last", _write(facts.between_parameters)))
        lines.append(
            "{%- macro parameters(c) -%}{%- for key, value in c.function.arguments.items() -%}"
            + _write(facts.parameter)
            + between * bool(facts.between_parameters)
            + "{%- endfor -%}{%- endmacro -%}"
        )
    return "\n".join(lines)


def _alternation(facts: TemplateFacts) -> list[str]:
    if not facts.alternates:
        return []
    counts = "true" if facts.alternates == "all" else "m.role != 'tool' and not m.tool_calls"
    wrong = "{{- raise_exception('users and assistants must take turns') -}}"
    return [
        "{%- for m in messages -%}"
        + _if(
            (
                counts,
                _if(("(m.role == 'user') != (at.count % 2 == 0)", wrong))
                + "{%- set at.count = at.count + 1 -%}",
            )
        )
        + "{%- endfor -%}"
    ]


def _system(facts: TemplateFacts) -> str:
    """Return the system block and the list of tools."""
    tools = _if(("tools", _write(facts.tools))) if facts.tools else ""
    block = ""
    if facts.system:
        gap = _if(("system and tools", _write(facts.before_tools))) * bool(facts.before_tools)
        text = _if(("system", _write(facts.system_text, content="system")))
        inside = "{tools}" in facts.system
        for part in re.split(r"(\{content\}|\{tools\})", facts.system):
            block += {"{content}": text, "{tools}": gap + tools}.get(part) or _write(part)
        if not facts.always:
            block = _if(("system or tools" if inside else "system", block))
    return {"before": tools + block, "after": block + tools}.get(facts.tools_at, block)


def _user(facts: TemplateFacts) -> str:
    content = _content(facts, "user")
    body = _write(facts.user, content=content)
    if facts.system_in:
        condition = "loop.first" if facts.system_in == "first user" else "loop.last"
        rest = content.replace(".strip", ".rstrip")
        both = _write(facts.with_system, content=rest, system="system")
        body = _if((f"system and {condition}", both), ("", body))
    if facts.tools and facts.tools_at == "last user":
        body = _if(("tools and loop.index0 == at.user", _write(facts.tools))) + body
    return "{%- if m.role == 'user' -%}" + body


def _assistant(facts: TemplateFacts) -> str:
    out = "{%- elif m.role == 'assistant' -%}"
    head = _write(facts.assistant)
    if facts.assistant_after_results is not None:
        behind = "loop.index0 > 0 and messages[loop.index0 - 1].role == 'tool'"
        head = _if((behind, _write(facts.assistant_after_results)), ("", head))
    end = _write(facts.end)
    if facts.end_last is not None:
        end = _if(("loop.last", _write(facts.end_last)), ("", end))
    if facts.calls is None and not facts.thoughts:
        if facts.skips_empty_turns:
            out = out.replace(" -%}", " and m.content -%}")
        content = _content(facts, "assistant")
        if facts.assistant_after_results is facts.end_last is None:
            return out + _write(facts.assistant + facts.text + facts.end, content=content)
        return out + head + _write(facts.text, content=f"'' + {content}") + end
    out += f"{{%- set text = {_CONTENT_OF_CALLS[facts.content_of_calls]} -%}}"
    if facts.thoughts:
        shown = _SHOWN[facts.thoughts]
        cut = "{%- set text = m.content.split('</think>')[-1]"
        cut += ".lstrip('\\n')" * facts.strips_gap + " -%}"
        if facts.reads == "raw":
            out += _if((f"not ({shown})", cut)) + head
        else:
            value = f"m.{facts.key} or ''" if facts.reads != "tags" else "''"
            out += f"{{%- set thought = {value} -%}}"
            tagged = (
                "{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n')"
                " -%}" + cut
            )
            if facts.reads != "key":
                out += _if(("not thought and '</think>' in text", tagged))
            out += head
            out += _if(
                (f"({shown}) and thought", _write(facts.thought)),
                (shown, _write(facts.no_thought)),
                ("", _write(facts.hidden_thought)),
            )
    else:
        out += head
    if trim := _trim(facts, "assistant"):
        out += f"{{%- set text = text{trim} -%}}"
    if "calls" in facts.trims:
        out += "{%- if m.tool_calls -%}{%- set text = text.strip() -%}{%- endif -%}"
    spoken = "m.content" if facts.reads == "raw" else "text"
    text = _if((spoken, _write(facts.text, content="text")))
    if facts.calls is None:
        return out + text + end
    first, call, between, last = _run(facts.calls)
    calls = _write(first) + "{%- for c in m.tool_calls -%}" + _write(call)
    calls += _if(("not loop.last", _write(between))) * bool(between)
    calls += "{%- endfor -%}" + _write(last)
    if facts.end_after_calls is not None:
        end = _if(("m.tool_calls", _write(facts.end_after_calls)), ("", end))
    if facts.text_and_calls is None:
        return out + _if(("m.tool_calls", calls), ("", text)) + end
    gap = _if((spoken, _write(facts.text_and_calls))) * bool(facts.text_and_calls)
    return out + text + _if(("m.tool_calls", gap + calls)) + end


def _results(facts: TemplateFacts) -> str:
    if facts.refuses_results:
        refusal = "{{- raise_exception('a message of a tool is refused') -}}"
        return "{%- elif m.role == 'tool' -%}" + refusal
    if facts.results is None:
        return ""
    first, result, between, last = _run(facts.results)
    end = _write(last)
    if facts.end_of_last_results is not None:
        end = _if(("loop.last", _write(facts.end_of_last_results)), ("", end))
    among = "every" if facts.counts_system else "messages"
    follows = f"not loop.last and {among}[loop.index0 + 1].role == 'tool'"
    begins = f"loop.first or {among}[loop.index0 - 1].role != 'tool'"
    return (
        "{%- elif m.role == 'tool' -%}"
        + _if((begins, _write(first))) * bool(first)
        + _write(result, content=_content(facts, "tool"))
        + _if((follows, _write(between)), ("", end)) * bool(between or end)
    )


def _prompt(facts: TemplateFacts) -> str:
    prompt = _write(facts.assistant if facts.prompt is None else facts.prompt)
    if facts.prompt_after_results is not None:
        behind = _write(facts.prompt_after_results)
        prompt = _if(("messages[-1].role == 'tool'", behind), ("", prompt))
    if facts.always_prompts or not prompt:
        return prompt
    return _if(("add_generation_prompt", prompt))
