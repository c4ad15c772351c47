"""Which format of tool calls a chat template teaches its model, and how a run reads them.

Most templates write the calls of earlier turns, so a call is rendered, and each parser reads it. A
template that leaves calls out is known by marks in its text. A format that no parser reads has no
name here: rows that show tools are refused then, for their calls would never run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from agentrl.chat.formats import FORMATS, parser_of
from agentrl.chat.formats.adapters import ForeignParser
from agentrl.chat.template import ChatTemplate
from agentrl.chat.tokenizer import template_source
from agentrl.chat.turn_delta import PROBE_ARGUMENT, PROBE_TEXT, PROBE_TOOL, probe_turns
from agentrl.errors import TemplateError, UserError
from agentrl.registry import did_you_mean
from agentrl.trajectory import ToolCall

_CALLS = [("probe", "000000000")]
_QUESTION = {"role": "user", "content": "How much is 3*4?"}

# Formats that have no parser here: what begins a call in them, and what SGLang calls its parser.
_OTHERS: tuple[tuple[str, str, str], ...] = (
    ("Kimi K3", "<|open|>call", "kimi_k3"),
    ("MiniMax M3", "]<]minimax[>[", "minimax-m3"),
    ("MiniCPM 5", '<function name="', "minicpm5"),
    ("Solar", "<|tool_call:begin|>", ""),
    ("Functionary", "<function=", ""),
)


def render_probe_calls(template: ChatTemplate) -> list[str]:
    """Render turns that call the tool `probe`, in every way in which a chat template takes a call.

    Returns:
        Each turn as the model writes it, without the token that ends it; none where the template
        does not write calls.
    """
    prompt = template.render.attempt([_QUESTION], [PROBE_TOOL])
    if prompt is None:
        return []
    found: list[str] = []
    opened = template.thinking.opening(template.encoder.encode_template_text(prompt))
    for turn in probe_turns(_CALLS):
        if not turn.get("tool_calls"):
            continue
        with suppress(TemplateError):
            own, _ = template.probe.own_end([_QUESTION, turn])
            shown = template.render([_QUESTION, turn], [PROBE_TOOL], add_generation_prompt=False)
            if own in shown:
                start = template.encoder.shared_length(prompt, shown)
                text = shown[start : shown.rindex(own) + len(own)]
                # Where the prompt opens a thought, earlier turns have its end or not.
                found += [opened + text, text]
    return list(dict.fromkeys(found))


def shows_tools(template: ChatTemplate) -> bool:
    """Return whether a prompt changes with the tools that the chat template is given."""
    with_tool = template.render.attempt([_QUESTION], [PROBE_TOOL])
    # What the template refuses is reported where it is rendered.
    return with_tool is None or with_tool != template.render.attempt([_QUESTION])


def is_rendered_call(calls: Sequence[ToolCall]) -> bool:
    """Return whether these calls are the one that `render_probe_calls` writes, and no other."""
    return [(c.name, c.arguments, c.error) for c in calls] == [("probe", {"x": PROBE_ARGUMENT}, "")]


def can_read_calls(name: str, rendered: Iterable[str]) -> bool:
    """Return whether the parser of a format reads one of the turns of `render_probe_calls`."""
    parse = parser_of(name)
    return any(is_rendered_call(parse(text, [PROBE_TOOL])) for text in rendered)


def detect_format(template: ChatTemplate) -> str:
    """Return the key in `FORMATS` of the format that a chat template teaches.

    Of several formats whose parsers read the rendered call, one whose mark stands in the template
    is taken, or else the first in `FORMATS`. "" if no parser reads the call.
    """
    source = template_source(template.tokenizer)
    if "functools[" in source:  # it asks for this, and may show earlier calls in another way
        return "phi4_mini"
    rendered = render_probe_calls(template)
    source = "\n".join([source, *rendered])
    marked = [name for name, format in FORMATS.items() if format.stands_in(source)]
    if not rendered:
        return next(iter(marked), "")
    reading = [name for name in FORMATS if can_read_calls(name, rendered)]
    return next((name for name in reading if name in marked), next(iter(reading), ""))


def explain_unknown_format(template: ChatTemplate) -> str:
    """Return why no parser reads the calls of a chat template, and what to do."""
    rendered = render_probe_calls(template)
    source = rendered[0] if rendered else template_source(template.tokenizer)
    name, _, sglang = next((f for f in _OTHERS if f[1] in source), ("", "", ""))
    format = f"the format of {name}" if name else "an unknown format"
    if rendered:
        text = " ".join(rendered[0].replace(PROBE_ARGUMENT, "1").replace(PROBE_TEXT, "").split())
        what = f"the chat template writes tool calls in {format}: {text[:160]!r}"
    elif name:
        what = f"the chat template teaches {format}"
    else:
        what = "the chat template neither writes tool calls nor shows a format of them"
    return (
        f"{what}. agentrl reads: {', '.join(sorted(FORMATS))}. Set rollout.tool_format to one of"
        f" these if the prompts teach it, or to sglang:{sglang or 'NAME'} for a parser of SGLang's,"
        " or play the rows with agent_name=react, which shows tools and results as text"
    )


Calls = list[ToolCall]
Reader = Callable[[str, Sequence[Mapping[str, Any]]], Calls | Awaitable[Calls]]
"""The text of one turn and the tools it was shown, to its calls."""


def open_reader(name: str, template: ChatTemplate, python: str = "") -> Reader:
    """The reader of a format.

    Args:
        name: "auto" for the format that the chat template teaches, a key of `FORMATS`,
            `sglang:NAME` or `hf`.
        template: the policy's.
        python: the Python that has sglang, for `sglang:NAME` if this one has not
            (`rollout.python`).

    Returns:
        The reader. With "auto" and a template whose format is not read, it raises TemplateError
        at the first turn that was shown tools.

    Raises:
        UserError: a parser that is not installed or not known.
    """
    if name == "auto":
        name = detect_format(template)
        if not name:
            return _refuse(explain_unknown_format(template))
    if name == "hf" or name.startswith("sglang:"):
        return ForeignParser(name, template.tokenizer, python=python)
    if name not in FORMATS:
        raise UserError(
            f"no tool format {name!r}.{did_you_mean(name, FORMATS)} Formats: auto,"
            f" {', '.join(sorted(FORMATS))}, sglang:NAME, hf"
        )
    return parser_of(name)


def _refuse(why: str) -> Reader:
    def read(text: str, schemas: Sequence[Mapping[str, Any]]) -> Calls:
        if schemas:
            raise TemplateError(why)
        return []

    return read
