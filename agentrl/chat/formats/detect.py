"""Detect the format of tool calls that a chat template teaches, and open its parser.

Most templates render the calls of earlier turns, so a call is rendered and passed to each parser.
The format of a template that does not render calls is recognized by marks in its source. If no
parser reads the format, rows with tools are refused, because their calls would never run.
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

# Formats without a parser here: name, the text that begins a call, the name of SGLang's parser.
_OTHERS: tuple[tuple[str, str, str], ...] = (
    ("Kimi K3", "<|open|>call", "kimi_k3"),
    ("MiniMax M3", "]<]minimax[>[", "minimax-m3"),
    ("MiniCPM 5", '<function name="', "minicpm5"),
    ("Solar", "<|tool_call:begin|>", ""),
    ("Functionary", "<function=", ""),
)


def render_probe_calls(template: ChatTemplate) -> list[str]:
    """Render turns that call the tool `probe`, in every form that a chat template may need.

    Returns:
        Each turn as the model writes it, without its closing token; none if the template does not
        render calls.
    """
    prompt = template.render.attempt([_QUESTION], [PROBE_TOOL])
    if prompt is None:
        return []
    turns: list[str] = []
    opening = template.thinking.opening(template.encoder.encode_trusted(prompt))
    for turn in probe_turns(_CALLS):
        if not turn.get("tool_calls"):
            continue
        with suppress(TemplateError):
            end_of_turn, _ = template.probe.end_of_turn([_QUESTION, turn])
            rendered = template.render([_QUESTION, turn], [PROBE_TOOL], as_prompt=False)
            if end_of_turn in rendered:
                start = template.encoder.shared_length(prompt, rendered)
                text = rendered[start : rendered.rindex(end_of_turn) + len(end_of_turn)]
                # If the prompt begins a thought, an earlier turn may or may not contain its end.
                turns += [opening + text, text]
    return list(dict.fromkeys(turns))


def shows_tools(template: ChatTemplate) -> bool:
    """Return whether a prompt changes with the tools that are passed to the chat template."""
    with_tool = template.render.attempt([_QUESTION], [PROBE_TOOL])
    # If the template refuses the tools, the first prompt with tools reports this error.
    return with_tool is None or with_tool != template.render.attempt([_QUESTION])


def is_rendered_call(calls: Sequence[ToolCall]) -> bool:
    """Return whether these calls are exactly the call that `render_probe_calls` renders."""
    return [(c.name, c.arguments, c.error) for c in calls] == [("probe", {"x": PROBE_ARGUMENT}, "")]


def can_read_calls(name: str, rendered: Iterable[str]) -> bool:
    """Return whether the parser of a format reads one of the `render_probe_calls` turns."""
    parse = parser_of(name)
    return any(is_rendered_call(parse(text, [PROBE_TOOL])) for text in rendered)


def detect_format(template: ChatTemplate) -> str:
    """Return the key in `FORMATS` of the format that a chat template teaches.

    If several parsers can read the rendered call, the result is the first format with a mark in the
    template, or else the first format. "" if no parser can read the call.
    """
    source = template_source(template.tokenizer)
    if (
        "functools[" in source
    ):  # the model must write this format, even if earlier calls are rendered differently
        return "phi4_mini"
    rendered = render_probe_calls(template)
    source = "\n".join([source, *rendered])
    formats_with_mark = [name for name, format in FORMATS.items() if format.is_in(source)]
    if not rendered:
        return next(iter(formats_with_mark), "")
    readable = [name for name in FORMATS if can_read_calls(name, rendered)]
    return next((name for name in readable if name in formats_with_mark), next(iter(readable), ""))


def explain_unknown_format(template: ChatTemplate) -> str:
    """Return why no parser reads the calls of a chat template, and what to do."""
    rendered = render_probe_calls(template)
    source = rendered[0] if rendered else template_source(template.tokenizer)
    name, _, sglang = next((f for f in _OTHERS if f[1] in source), ("", "", ""))
    format = f"the format of {name}" if name else "an unknown format"
    if rendered:
        text = " ".join(rendered[0].replace(PROBE_ARGUMENT, "1").replace(PROBE_TEXT, "").split())
        finding = f"the chat template renders tool calls in {format}: {text[:160]!r}"
    elif name:
        finding = f"the chat template teaches {format}"
    else:
        finding = "the chat template neither renders tool calls nor describes their format"
    return (
        f"{finding}. agentrl reads: {', '.join(sorted(FORMATS))}. Set rollout.tool_format to one of"
        f" these if the prompts teach it, or to sglang:{sglang or 'NAME'} for one of SGLang's"
        " parsers, or set agent_name=react in the rows, which shows tools and results as text. For"
        " models with ChatML's tokens, `agentrl check template MODEL --with-tools hermes` writes a"
        " template that shows tools"
    )


Calls = list[ToolCall]
Reader = Callable[[str, Sequence[Mapping[str, Any]]], Calls | Awaitable[Calls]]
"""Returns the calls in the text of one turn, with the schemas of the tools in its prompt."""


def open_reader(name: str, template: ChatTemplate, python: str = "") -> Reader:
    """Return the reader of a format.

    Args:
        name: "auto" for the format that the chat template teaches, a key of `FORMATS`,
            `sglang:NAME` or `hf`.
        template: the policy's chat template.
        python: for `sglang:NAME`, the Python of an environment with sglang (`rollout.python`). It
            is used if sglang is not installed in this environment.

    Returns:
        The reader. With "auto" and a template in an unknown format, it raises `TemplateError` at
        the first turn whose prompt shows tools.

    Raises:
        UserError: if the parser is not installed or not known.
    """
    if name == "auto":
        name = detect_format(template)
        if not name:
            return _make_refusing_reader(explain_unknown_format(template))
    if name == "hf" or name.startswith("sglang:"):
        return ForeignParser(name, template.tokenizer, python=python)
    if name not in FORMATS:
        raise UserError(
            f"no tool format {name!r}.{did_you_mean(name, FORMATS)} Formats: auto,"
            f" {', '.join(sorted(FORMATS))}, sglang:NAME, hf"
        )
    return parser_of(name)


def _make_refusing_reader(why: str) -> Reader:
    def read(text: str, schemas: Sequence[Mapping[str, Any]]) -> Calls:
        if schemas:
            raise TemplateError(why)
        return []

    return read
