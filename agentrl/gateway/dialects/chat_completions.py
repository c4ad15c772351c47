"""OpenAI's chat completions (`POST /v1/chat/completions`)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import orjson

from agentrl.gateway.dialects.base import (
    ROLES,
    Dialect,
    event,
    is_name,
    read_limit,
    read_list,
    read_message,
    read_name,
    read_output_format,
    read_stops,
    tool_schema,
    write_json,
    wrong,
)
from agentrl.gateway.memory import AnswerMemory
from agentrl.gateway.requests import Answer, ChatCall, ChatMessage, ChatRequest, Refusal
from agentrl.trajectory import Role


class ChatCompletions(Dialect):
    """OpenAI's chat completions (`POST /v1/chat/completions`)."""

    path = "/chat/completions"

    ROLES: ClassVar[Mapping[str, Role]] = {**ROLES, "tool": "tool"}
    REFUSED: ClassVar[Mapping[str, str]] = {
        "logit_bias": "it would train the policy on tokens of another distribution",
        "functions": "use `tools`",
        "function_call": "use `tools`",
        "audio": "the policy writes text only",
        "modalities": "the policy writes text only",
        "web_search_options": "the policy has no web search of its own",
        "logprobs": "answers contain no logprobs; the trajectory does",
        "top_logprobs": "answers contain no logprobs; the trajectory does",
        "prediction": "predicted outputs are not supported",
    }
    IGNORED = (
        "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
        "repetition_penalty", "seed", "reasoning_effort", "verbosity", "chat_template_kwargs",
    )  # fmt: skip

    USUAL: ClassVar[Mapping[str, Any]] = {"tool_choice": "auto", "parallel_tool_calls": True}

    def _read(self, data: dict[str, Any], memory: AnswerMemory) -> ChatRequest:
        if data.get("n") not in (None, 1):
            why = f"n={data['n']!r} is not supported: send a request for each answer"
            raise Refusal(400, "unsupported", why, "n")
        messages = read_list(data, "messages", "message")
        options = data.get("stream_options") or {}
        return ChatRequest(
            messages=tuple(self._message(m, i) for i, m in enumerate(messages)),
            max_tokens=read_limit(data, "max_completion_tokens", "max_tokens"),
            stop=read_stops(data.get("stop"), "stop"),
            stream_usage=bool(isinstance(options, dict) and options.get("include_usage")),
            output_format=read_output_format(data.get("response_format"), "response_format"),
        )

    def _read_tool(self, tool: Any, where: str) -> Iterator[Mapping[str, Any]]:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            expected = '{"type": "function", "function": {...}}; other types are not supported'
            raise wrong(where, tool, expected, "tools")
        yield tool_schema(function, f"{where}.function")

    def write(self, answer: Answer, request: ChatRequest) -> bytes:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [_call(call) for call in answer.calls]
        elif not answer.text:
            message["content"] = ""
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
        }
        body = _head(answer, request, "chat.completion")
        return orjson.dumps(body | {"choices": [choice], "usage": _usage(answer)})

    def events(self, answer: Answer, request: ChatRequest) -> Iterator[bytes]:
        head = _head(answer, request, "chat.completion.chunk")

        def chunk(delta: Mapping[str, Any], finish_reason: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
            usage = {"usage": None} if request.stream_usage else {}
            return event(orjson.dumps(head | {"choices": [choice]} | usage))

        yield chunk({"role": "assistant", "content": ""})
        if answer.reasoning:
            yield chunk({"reasoning_content": answer.reasoning})
        if answer.text:
            yield chunk({"content": answer.text})
        for i, call in enumerate(answer.calls):
            yield chunk({"tool_calls": [{"index": i, **_call(call)}]})
        yield chunk({}, answer.finish_reason)
        if request.stream_usage:
            yield event(orjson.dumps(head | {"choices": [], "usage": _usage(answer)}))
        yield event(b"[DONE]")

    def _message(self, message: Any, i: int) -> ChatMessage:
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise wrong(where, message, "an object with role and content", "messages")
        name = message.get("role")
        role = self.ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            choices = ", ".join(self.ROLES)
            raise wrong(f"{where}.role", message.get("role"), f"one of {choices}", "messages")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise wrong(f"{where}.tool_calls", calls, "a list", "messages")
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        return read_message(
            role,
            message.get("content") or "",
            f"{where}.content",
            "messages",
            calls=tuple(
                _read_call(call, f"{where}.tool_calls[{j}]") for j, call in enumerate(calls)
            ),
            call_id=read_name(message.get("tool_call_id")),
            reasoning=reasoning if isinstance(reasoning, str) else "",
        )


def _read_call(call: Any, where: str) -> ChatCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not is_name(function.get("name")):
        raise wrong(where, call, "a call of a function, with its name", "messages")
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = write_json(arguments, f"{where}.function.arguments", "messages")
    return ChatCall(read_name(call.get("id")), function["name"], arguments)


def _call(call: ChatCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _head(answer: Answer, request: ChatRequest, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": int(time.time()), "model": request.model}


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
