"""The child process of `adapters.py`, which runs another project's parser.

Parent and child exchange JSON messages over standard input, which is a socket (`ChildProcess`). The
child exits when the socket is closed. If the parent dies while the child parses, the kernel kills
the child.

The parser may be installed in an environment without agentrl, with an older Python. So this file is
run by its path, and imports nothing from agentrl.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import socket
import sys
from collections.abc import Callable
from typing import Any

THINK_START, THINK_END = "<think>", "</think>"

Parse = Callable[[str, list[dict[str, Any]]], tuple[list[dict[str, Any]], str]]
"""Returns the calls (`name`, `arguments`, `id`) in a text, and a message about calls that seem to
be lost or ""."""


class ParserError(Exception):
    """The parser is not known, or cannot be used with this tokenizer or environment."""


def main() -> None:
    """Load the parser that the first message names, then answer each further message."""
    with socket.socket(fileno=os.dup(0)) as connection, connection.makefile("rwb") as channel:
        # Foreign code must not read protocol messages from standard input.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        parse: Parse | None = None
        while size := channel.read(4):
            request = json.loads(channel.read(int.from_bytes(size, "little")))
            if parse is None:
                try:
                    parse = _load(request)
                    answer = {}
                except Exception as e:
                    error = str(e) if isinstance(e, ParserError) else f"{type(e).__name__}: {e}"
                    answer = {"user_error": error}
            else:
                answer = _answer(parse, **request)
            message = json.dumps(answer).encode()
            channel.write(len(message).to_bytes(4, "little") + message)
            channel.flush()
    os._exit(0)  # without waiting for threads of the parser


def _answer(parse: Parse, text: str, schemas: list[dict[str, Any]]) -> dict[str, Any]:
    answer_text, thought = _split(text)
    try:
        calls, lost = parse(answer_text, schemas)
        if thought and not calls and not lost and any(parse(thought, schemas)):
            lost = f"the call is inside a {THINK_START} block that is never closed"
        # The parent parses the arguments strictly, so they are sent as text.
        for call in calls:
            if not isinstance(call["arguments"], str):
                call["arguments"] = json.dumps(call["arguments"])
    except (Exception, SystemExit) as e:
        return {"error": f"{type(e).__name__}: {e}"[:300]}
    return {"calls": calls, "lost": lost}


def _split(text: str) -> tuple[str, str]:
    """Return the text of a turn without its thoughts, and the thought that is not closed or ""."""
    end, begin = text.find(THINK_END), text.find(THINK_START)
    if end >= 0 and not 0 <= begin < end:  # the thought began in the prompt
        text = text[end + len(THINK_END) :]
    answer_text, *others = text.split(THINK_START)
    thoughts = [part.partition(THINK_END) for part in others]
    answer_text += "".join(after for _, _, after in thoughts)
    return answer_text, next((thought for thought, closed, _ in thoughts if not closed), "")


def _load(hello: dict[str, Any]) -> Parse:
    if hello["kind"] == "sglang":
        return _sglang(hello["name"])
    return _transformers(hello["attribute"], hello["template"])


def _sglang(name: str) -> Parse:
    try:
        from sglang.srt.entrypoints.openai.protocol import Tool  # type: ignore[import-not-found]
        from sglang.srt.function_call.function_call_parser import (  # type: ignore[import-not-found]
            FunctionCallParser,
        )
    except Exception as e:
        why = f"{type(e).__name__}: {e}"
        raise ParserError(f"{sys.executable} cannot import SGLang's parsers: {why}") from e

    choices = sorted(FunctionCallParser.ToolCallParserEnum)
    if name not in choices:
        raise ParserError(f"sglang has no parser {name!r}; it has: {', '.join(choices)}")

    def parse(text: str, schemas: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        parser = FunctionCallParser([Tool.model_validate(s) for s in schemas], name)
        items = parser.parse_non_stream(text)[1]
        calls = [{"name": c.name, "arguments": c.parameters, "id": ""} for c in items]
        # SGLang silently drops calls of unknown tools and calls with invalid JSON.
        call_count = max(
            text.count(parser.detector.bot_token) if parser.detector.bot_token else 0,
            int(parser.detector.has_tool_call(text)),
        )
        lost = (
            f"{call_count - len(calls)} of {call_count} calls not understood, or to an unknown tool"
        )
        return calls, lost if call_count > len(calls) else ""

    return parse


def _transformers(attribute: str, template: dict[str, Any]) -> Parse:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    setattr(tokenizer, attribute, template)
    parameters = inspect.signature(tokenizer.parse_response).parameters
    # Older versions of transformers have schemas, newer ones templates.
    known = "response_template" if "prefix" in parameters else "response_schema"
    if attribute != known:
        raise ParserError(
            f"this version of transformers reads `tokenizer.{known}`, but the tokenizer has"
            f" `{attribute}`"
        )
    if attribute == "response_template":
        tokenizer.get_response_parser(prefix="")  # raises if the template is invalid

    def parse(text: str, schemas: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        options = {"prefix": "", "tools": schemas}
        message = tokenizer.parse_response(
            text, **{k: options[k] for k in options if k in parameters}
        )
        calls = [_call_from_message(call) for call in message.get("tool_calls") or []]
        lost = "the call was not understood"
        return calls, lost if not calls and _begins_call(template, text) else ""

    return parse


def _call_from_message(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return {"name": "", "arguments": json.dumps(call), "id": ""}
    arguments = function.get("arguments", {})
    return {"name": function.get("name"), "arguments": arguments, "id": call.get("id", "")}


def _begins_call(template: dict[str, Any], text: str) -> bool:
    """Return whether the text contains the tag that begins a call in a response template."""
    field = template.get("fields", {}).get("tool_calls", {})
    tags = field.get("open", [])
    if any(tag in text for tag in ([tags] if isinstance(tags, str) else tags)):
        return True
    return bool(field.get("open_pattern") and re.search(field["open_pattern"], text))


if __name__ == "__main__":
    main()
