"""The APIs of the gateway: they translate JSON to `ChatRequest`, and `Answer` to JSON or events.

A new API is a new subclass of `Dialect`. No other module knows the JSON of an API.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import orjson

from agentrl.gateway.requests import MODEL, Answer, ChatCall, ChatMessage, ChatRequest, Refusal
from agentrl.trajectory import Role

RETRIES = "x-stainless-retry-count"
"""The header in which OpenAI's clients count how often they send a request again."""


class Dialect(ABC):
    """An API for chats, as the JSON of its requests and responses."""

    path: ClassVar[str]
    """The path of its requests, below the base URL."""

    @abstractmethod
    def read(self, body: bytes, headers: Mapping[str, str]) -> ChatRequest:
        """Return a request.

        Raises:
            Refusal: the request is wrong, or asks for something that is not supported.
        """

    @abstractmethod
    def write(self, answer: Answer, request: ChatRequest) -> bytes:
        """Return an answer as the body of a response."""

    @abstractmethod
    def events(self, answer: Answer, request: ChatRequest) -> Iterator[bytes]:
        """Yield an answer as server-sent events."""

    @abstractmethod
    def error(self, refusal: Refusal) -> bytes:
        """Return an error as the body of a response."""

    def error_event(self, refusal: Refusal) -> bytes:
        """Return an error as an event, for a response whose headers are sent already."""
        return _event(self.error(refusal))


class ChatCompletions(Dialect):
    """OpenAI's chat completions (`POST /v1/chat/completions`)."""

    path = "/chat/completions"

    ROLES: ClassVar[Mapping[str, Role]] = {
        "system": "system",
        "developer": "system",
        "user": "user",
        "assistant": "assistant",
        "tool": "tool",
    }
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
    """Fields that are refused, with the reason. To ignore them would mislead the client."""
    IGNORED: ClassVar[tuple[str, ...]] = (
        "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
        "repetition_penalty", "seed", "reasoning_effort", "verbosity", "chat_template_kwargs",
    )  # fmt: skip
    """Fields that are ignored and counted, because the run decides their values."""

    def read(self, body: bytes, headers: Mapping[str, str]) -> ChatRequest:
        try:
            data = orjson.loads(body)
        except orjson.JSONDecodeError as e:
            raise Refusal(400, "not_json", f"the body is not JSON: {e}") from None
        if not isinstance(data, dict):
            raise _wrong("body", data, "a JSON object", "")
        for name, why in self.REFUSED.items():
            if data.get(name) not in (None, False, [], {}, ["text"]):
                raise Refusal(400, "unsupported", f"{name} is not supported: {why}", name)
        if data.get("n") not in (None, 1):
            why = f"n={data['n']!r} is not supported: send a request for each answer"
            raise Refusal(400, "unsupported", why, "n")
        if data.get("stream") not in (None, False, True):
            raise _wrong("stream", data["stream"], "true or false", "stream")
        if (data.get("response_format") or {"type": "text"}) != {"type": "text"}:
            why = "constrained sampling would train the policy on tokens of another distribution"
            raise Refusal(
                400, "unsupported", f"response_format is not supported: {why}", "response_format"
            )
        messages = data.get("messages")
        if not isinstance(messages, list) or not messages:
            raise _wrong("messages", messages, "a list with at least one message", "messages")
        ignored = [name for name in self.IGNORED if data.get(name) is not None]
        if data.get("tool_choice") not in (None, "auto"):
            ignored.append("tool_choice")
        if data.get("parallel_tool_calls") is False:
            ignored.append("parallel_tool_calls")
        stop = data.get("stop") or []
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
            raise _wrong("stop", stop, "a text or a list of texts", "stop")
        options = data.get("stream_options") or {}
        return ChatRequest(
            messages=tuple(self._message(m, i) for i, m in enumerate(messages)),
            tools=self._tools(data.get("tools") or []),
            model=str(data.get("model") or MODEL),
            max_tokens=_max_tokens(data),
            stop=tuple(stops),
            stream=bool(data.get("stream")),
            stream_usage=bool(isinstance(options, dict) and options.get("include_usage")),
            is_retry=headers.get(RETRIES, "0") not in ("", "0"),
            sampling=_sampling(data),
            ignored=tuple(ignored),
            body=body,
        )

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
            return _event(orjson.dumps(head | {"choices": [choice]} | usage))

        yield chunk({"role": "assistant", "content": ""})
        if answer.reasoning:
            yield chunk({"reasoning_content": answer.reasoning})
        if answer.text:
            yield chunk({"content": answer.text})
        for i, call in enumerate(answer.calls):
            yield chunk({"tool_calls": [{"index": i, **_call(call)}]})
        yield chunk({}, answer.finish_reason)
        if request.stream_usage:
            yield _event(orjson.dumps(head | {"choices": [], "usage": _usage(answer)}))
        yield _event(b"[DONE]")

    def error(self, refusal: Refusal) -> bytes:
        kind = "invalid_request_error" if refusal.status < 500 else "server_error"
        error = {
            "message": str(refusal),
            "type": kind,
            "param": refusal.field or None,
            "code": refusal.code,
        }
        return orjson.dumps({"error": error})

    def _message(self, message: Any, i: int) -> ChatMessage:
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise _wrong(where, message, "an object with role and content", "messages")
        name = message.get("role")
        role = self.ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            choices = ", ".join(self.ROLES)
            raise _wrong(f"{where}.role", message.get("role"), f"one of {choices}", "messages")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise _wrong(f"{where}.tool_calls", calls, "a list", "messages")
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        return ChatMessage(
            role,
            _text(message.get("content"), where),
            tuple(_read_call(call, f"{where}.tool_calls[{j}]") for j, call in enumerate(calls)),
            call_id=str(message.get("tool_call_id") or ""),
            reasoning=reasoning if isinstance(reasoning, str) else "",
        )

    def _tools(self, tools: Any) -> Sequence[Mapping[str, Any]]:
        if not isinstance(tools, list):
            raise _wrong("tools", tools, "a list", "tools")
        return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
"""The names of tools that are accepted."""


def _tool(tool: Any, where: str) -> Mapping[str, Any]:
    """Return a tool's schema in the form that chat templates expect."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        expected = '{"type": "function", "function": {...}}; other types are not supported'
        raise _wrong(where, tool, expected, "tools")
    if not _is_name(name := function.get("name")):
        raise _wrong(f"{where}.function.name", name, "a name", "tools")
    description = function.get("description") or ""
    if not isinstance(description, str):
        raise _wrong(f"{where}.function.description", description, "a text", "tools")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise _wrong(f"{where}.function.parameters", parameters, "a JSON schema", "tools")
    schema = {"name": name, "description": description, "parameters": parameters}
    checked = {"type": "function", "function": schema}
    _write([checked], where, "tools")
    return checked


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(NAME.fullmatch(name))


def _write(value: Any, where: str, field: str) -> str:
    """Return a value as JSON.

    Raises:
        Refusal: it is nested more deeply than JSON is written here.
    """
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as e:
        raise Refusal(400, "invalid", f"{where} cannot be written: {e}", field) from None


def _read_call(call: Any, where: str) -> ChatCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not _is_name(function.get("name")):
        raise _wrong(where, call, "a call of a function, with its name", "messages")
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = _write(arguments, f"{where}.function.arguments", "messages")
    return ChatCall(str(call.get("id") or ""), function["name"], arguments)


def _text(content: Any, where: str) -> str:
    """Return the text of a message's content: a text, or a list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(f"{where}.content", content, "a text or a list of parts", "messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise _wrong(f"{where}.content", part, "parts of type text: the policy reads no images"
                         " or files", "messages")  # fmt: skip
        texts.append(part[kind])
    return "\n".join(texts)


def _sampling(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of a request."""
    limits = {"temperature": (0, 10), "top_p": (0, 1), "top_k": (0, 2**31)}
    sampling = {}
    for name, (low, high) in limits.items():
        value = data.get(name)
        if value is None or (name == "top_k" and value == -1):
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (name == "top_p" and value == 0):
            raise _wrong(name, value, f"a number from {low} to {high}", name)
        sampling[name] = int(value) if name == "top_k" else float(value)
    return sampling


def _max_tokens(data: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = data.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise _wrong(name, value, "a whole number of at least 1", name)
            return value
    return None


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


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _wrong(where: str, value: Any, expected: str, field: str) -> Refusal:
    try:
        shown = f"{value!r:.200}"
    except RecursionError:
        shown = "a deeply nested value"
    return cast(Refusal, Refusal(400, "invalid", f"{where} must be {expected}, not {shown}", field))


DIALECTS: tuple[Dialect, ...] = (ChatCompletions(),)
