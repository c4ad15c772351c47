"""Anthropic's Messages API (`POST /v1/messages`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import orjson

from agentrl.gateway.dialects.base import (
    Dialect,
    event,
    is_name,
    read_limit,
    read_list,
    read_message,
    read_name,
    read_object,
    read_output_format,
    read_stops,
    tool_schema,
    write_json,
    wrong,
)
from agentrl.gateway.memory import AnswerMemory
from agentrl.gateway.requests import Answer, ChatCall, ChatMessage, ChatRequest, Refusal


class Messages(Dialect):
    """Anthropic's Messages API (`POST /v1/messages`)."""

    path = "/messages"
    count_path = "/messages/count_tokens"
    ping = event(b'{"type":"ping"}', "ping")

    REFUSED: ClassVar[Mapping[str, str]] = {
        "mcp_servers": "let the agent connect to them, and send their tools in `tools`",
        "container": "the policy has no container",
    }
    IGNORED = ("temperature", "top_p", "top_k", "thinking", "context_management")
    ERRORS: ClassVar[Mapping[int, str]] = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        529: "overloaded_error",
    }
    """The types of errors, by their status."""

    def _read(self, data: dict[str, Any], memory: AnswerMemory) -> ChatRequest:
        names = ("output_config", "tool_choice", "thinking")
        output, choice, thinking = (read_object(data, name) for name in names)
        ignored = []
        if output.get("effort") is not None:
            ignored.append("effort")
        if choice.get("type", "auto") != "auto":
            ignored.append("tool_choice")
        if choice.get("disable_parallel_tool_use"):
            ignored.append("parallel_tool_calls")
        # `output_format` is the older name.
        form = data.get("output_format") or output.get("format")
        return ChatRequest(
            messages=tuple(_read_messages(data)),
            max_tokens=read_limit(data, "max_tokens"),
            stop=read_stops(data.get("stop_sequences"), "stop_sequences"),
            shows_thinking=thinking.get("type", "disabled") != "disabled",
            ignored=tuple(ignored),
            output_format=read_output_format(form, "output_config.format"),
        )

    def _read_tool(self, tool: Any, where: str) -> Iterator[Mapping[str, Any]]:
        kind = (tool.get("type") or "custom") if isinstance(tool, dict) else None
        if kind != "custom":
            expected = "a tool that the agent runs, with name and input_schema"
            raise wrong(where, kind or tool, expected, "tools")
        yield tool_schema(tool, where, "input_schema")

    def write(self, answer: Answer, request: ChatRequest) -> bytes:
        content: list[dict[str, Any]] = [*_blocks(answer, request)]
        for block in content:
            if "input" in block:
                block["input"] = orjson.Fragment(block["input"])
        return orjson.dumps(_message(answer, request) | _end(answer) | {"content": content})

    def events(self, answer: Answer, request: ChatRequest) -> Iterator[bytes]:
        message = _message(answer, request)
        message["usage"]["output_tokens"] = 0
        yield _event("message_start", message=message)
        for i, block in enumerate(_blocks(answer, request)):
            streamed = {k: v for k, v in block.items() if k not in ("type", "id", "name")}
            empty = {name: {} if name == "input" else "" for name in streamed}
            yield _event("content_block_start", index=i, content_block=block | empty)
            for name, value in streamed.items():
                kind, field = ("input_json", "partial_json") if name == "input" else (name, name)
                delta = {"type": f"{kind}_delta", field: value}
                yield _event("content_block_delta", index=i, delta=delta)
            yield _event("content_block_stop", index=i)
        yield _event("message_delta", delta=_end(answer), usage=_usage(answer))
        yield _event("message_stop")

    def error(self, refusal: Refusal) -> bytes:
        others = "invalid_request_error" if refusal.status < 500 else "api_error"
        kind = self.ERRORS.get(refusal.status, others)
        message = str(refusal)
        if refusal.code == "template" and ", system" in message:
            # Claude Code recognizes this and sends its system messages in another way.
            message += "; the role 'system' is not supported there, only the field `system`"
        error = {"type": kind, "message": message, "details": {"error_code": refusal.code}}
        return orjson.dumps({"type": "error", "error": error})

    def error_event(self, refusal: Refusal) -> bytes:
        return event(self.error(refusal), "error")

    def write_count(self, tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": tokens})


# -- requests -------------------------------------------------------------------------------------


def _read_messages(data: Mapping[str, Any]) -> Iterator[ChatMessage]:
    """Yield the system prompt and the messages of a request."""
    if data.get("system"):
        yield read_message("system", data["system"], "system", "system")
    for i, message in enumerate(read_list(data, "messages", "message")):
        yield from _read_message(message, f"messages[{i}]")


def _read_message(message: Any, where: str) -> Iterator[ChatMessage]:
    """Yield the messages for one of the API: the results of tools come before the text."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise wrong(f"{where}.role", role, "one of user, assistant, system", "messages")
    content, where = message.get("content"), f"{where}.content"
    blocks = content if isinstance(content, list) else []
    texts, thoughts, calls, results = [], [], [], []
    for block in blocks:
        match role, block.get("type") if isinstance(block, dict) else None:
            case "user", "tool_result":
                content, call_id = block.get("content") or "", read_name(block.get("tool_use_id"))
                results.append(read_message("tool", content, where, "messages", call_id=call_id))
            case "assistant", "tool_use":
                calls.append(_read_call(block, where))
            case "assistant", "thinking" | "redacted_thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case _:
                texts.append(block)
    yield from results
    if texts or not results:
        yield read_message(
            role,
            texts if blocks else content,
            where,
            "messages",
            calls=tuple(calls),
            reasoning="\n".join(filter(None, thoughts)),
        )


def _read_call(block: Mapping[str, Any], where: str) -> ChatCall:
    arguments = block.get("input") or {}
    if not is_name(block.get("name")) or not isinstance(arguments, dict):
        raise wrong(where, block, "a tool_use block with name and an object as input", "messages")
    write_json(arguments, where, "messages")  # It may be nested too deeply.
    # In the form of the session, so that a turn that comes back is the same.
    written = json.dumps(arguments, ensure_ascii=False)
    return ChatCall(read_name(block.get("id")), block["name"], written)


# -- answers --------------------------------------------------------------------------------------


def _message(answer: Answer, request: ChatRequest) -> dict[str, Any]:
    """Return the message of an answer without its content and its end."""
    return {
        "id": f"msg_{answer.id.removeprefix('chatcmpl-')}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(answer),
    }


def _blocks(answer: Answer, request: ChatRequest) -> Iterator[dict[str, str]]:
    """Yield the blocks of an answer. The input of a call is the text of a JSON object."""
    if answer.reasoning and request.shows_thinking:
        yield {"type": "thinking", "thinking": answer.reasoning, "signature": answer.id}
    if answer.text or not answer.calls:  # Many clients read the text of a block without a test.
        yield {"type": "text", "text": answer.text}
    for call in answer.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}


def _end(answer: Answer) -> dict[str, str | None]:
    reason = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
    is_stopped = answer.stop and answer.finish_reason == "stop"
    return {
        "stop_reason": "stop_sequence" if is_stopped else reason[answer.finish_reason],
        "stop_sequence": answer.stop if is_stopped else None,
    }


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.completion_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return event(orjson.dumps({"type": kind, **fields}), kind)
