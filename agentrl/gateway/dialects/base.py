"""`Dialect`: an API of the gateway, and what the APIs share."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar, cast

import orjson

from agentrl.gateway.memory import AnswerMemory
from agentrl.gateway.output_format import OutputFormat
from agentrl.gateway.requests import MODEL, Answer, ChatMessage, ChatRequest, Refusal
from agentrl.images import Image, ImageError
from agentrl.trajectory import Role, join_parts

RETRIES = "x-stainless-retry-count"
"""The header in which OpenAI's and Anthropic's clients count how often they repeat a request."""
ROLES: Mapping[str, Role] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
}  # fmt: skip
"""The roles of messages in OpenAI's APIs."""


class Dialect(ABC):
    """An API for chats, as the JSON of its requests and responses."""

    path: ClassVar[str]
    """The path of its requests, below the base URL."""
    count_path: ClassVar[str] = ""
    """The path of requests that count the tokens of a prompt; "" if the API has none."""
    ping: ClassVar[bytes] = b": ping\n\n"
    """What keeps a stream open that waits for its answer."""
    REFUSED: ClassVar[Mapping[str, str]]
    """Fields that are refused, with the reason. To ignore them would mislead the client."""
    IGNORED: ClassVar[Sequence[str]]
    """Fields that are ignored and counted, because the run decides their values."""
    USUAL: ClassVar[Mapping[str, Any]] = {}
    """Fields that are ignored and counted if they have other values."""

    def read(self, body: bytes, headers: Mapping[str, str], memory: AnswerMemory) -> ChatRequest:
        """Return a request.

        Args:
            body: the body of the HTTP request.
            headers: its headers.
            memory: the answers that it may name by their ids.

        Raises:
            Refusal: the request is wrong, or asks for something that is not supported.
        """
        data = load(body)
        # Codex changes the order of keys if it repeats a request. Deep nesting cannot be written.
        with suppress(orjson.JSONEncodeError):
            body = orjson.dumps(data, option=orjson.OPT_SORT_KEYS)
        for name, why in self.REFUSED.items():
            if data.get(name) not in (None, False, [], {}, ["text"]):
                raise Refusal(400, "unsupported", f"{name} is not supported: {why}", name)
        tools = data.get("tools") or []
        if not isinstance(tools, list):
            raise wrong("tools", tools, "a list", "tools")
        request = self._read(data, memory)
        ignored = [name for name in self.IGNORED if data.get(name) is not None]
        ignored += [n for n, usual in self.USUAL.items() if data.get(n) not in (None, usual)]
        return replace(
            request,
            tools=[t for i, tool in enumerate(tools) for t in self._read_tool(tool, f"tools[{i}]")],
            model=read_name(data.get("model")) or MODEL,
            stream=bool(data.get("stream")),
            is_retry=headers.get(RETRIES, "0") not in ("", "0"),
            sampling=read_sampling(data),
            ignored=(*ignored, *request.ignored),
            body=body,
        )

    @abstractmethod
    def _read(self, data: dict[str, Any], memory: AnswerMemory) -> ChatRequest:
        """Return the parts of a request that each API names differently."""

    @abstractmethod
    def _read_tool(self, tool: Any, where: str) -> Iterator[Mapping[str, Any]]:
        """Yield the schemas of tools in the form that chat templates expect.

        Args:
            tool: an element of the field `tools`.
            where: its place in the request.
        """

    @abstractmethod
    def write(self, answer: Answer, request: ChatRequest) -> bytes:
        """Return an answer as the body of a response."""

    @abstractmethod
    def events(self, answer: Answer, request: ChatRequest) -> Iterator[bytes]:
        """Yield an answer as server-sent events."""

    def error(self, refusal: Refusal) -> bytes:
        """Return an error as the body of a response; OpenAI's APIs have the same form."""
        return orjson.dumps({"error": openai_error(refusal)})

    def error_event(self, refusal: Refusal) -> bytes:
        """Return an error as an event, for a response whose headers are sent already."""
        return event(self.error(refusal))

    def write_count(self, tokens: int) -> bytes:
        """Return the number of tokens of a prompt as the body of a response to `count_path`."""
        raise NotImplementedError(f"{type(self).__name__} counts no tokens")


def load(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request's body.

    Raises:
        Refusal: it is none.
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as e:
        raise Refusal(400, "not_json", f"the body is not JSON: {e}") from None
    if not isinstance(data, dict):
        raise wrong("body", data, "a JSON object", "")
    if data.get("stream") not in (None, False, True):
        raise wrong("stream", data["stream"], "true or false", "stream")
    return data


def read_list(data: Mapping[str, Any], field: str, element: str) -> list[Any]:
    """Return a list of at least one element."""
    value = data.get(field)
    if not isinstance(value, list) or not value:
        raise wrong(field, value, f"a list with at least one {element}", field)
    return value


def read_object(data: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Return an object; an empty one if there is none."""
    value = data.get(field) or {}
    if not isinstance(value, dict):
        raise wrong(field, value, "an object", field)
    return value


def read_stops(stop: Any, field: str) -> tuple[str, ...]:
    """Return the texts that end an answer: a text, or a list of texts."""
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise wrong(field, stop, "a text or a list of texts", field)
    return tuple(stops)


def read_limit(data: Mapping[str, Any], *names: str) -> int | None:
    """Return the largest number of tokens of an answer, from the first of these fields."""
    for name in names:
        value = data.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise wrong(name, value, "a whole number of at least 1", name)
            return value
    return None


def read_name(value: Any) -> str:
    """Return a name or an id; "" if there is none."""
    return str(value) if isinstance(value, str | int) else ""


def read_text(content: Any, where: str, field: str) -> str:
    """Return a text, or the texts of a list of parts, joined with newlines."""
    return read_message("assistant", content, where, field).text


def read_message(role: Role, content: Any, where: str, field: str, **others: Any) -> ChatMessage:
    """Return a message of a text, or of a list of texts and images.

    Texts that follow each other are joined with newlines.

    Args:
        role: its role. A message of the assistant has no images.
        content: the text, or the list.
        where: its place in the request.
        field: the field of the request.
        others: the other attributes of the message.
    """
    if isinstance(content, str):
        return ChatMessage(role, content, **others)
    if not isinstance(content, list):
        raise wrong(where, content, "a text or a list of parts", field)
    parts = [_read_part(part, where, field) for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return ChatMessage(role, "\n".join(texts), **others)
    if role == "assistant":
        raise wrong(where, "an image", "a text: the policy writes no images", field)
    joined: list[str | Image] = []
    for part in parts:
        if joined and isinstance(joined[-1], str) and isinstance(part, str):
            joined.append("\n")
        joined.append(part)
    text, images = join_parts(joined)
    return ChatMessage(role, text, images=images, **others)


def _read_part(part: Any, where: str, field: str) -> str | Image:
    """Return the text or the image of a part."""
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(TEXTS[kind]) if isinstance(kind, str) and kind in TEXTS else None
    if isinstance(text, str):
        return text
    match part:
        case {"type": "image", "source": {"type": "base64", "data": str(data)}}:
            url = f"data:;base64,{data}"
        case (
            {"type": "image_url", "image_url": {"url": str(url)}}
            | {"type": "input_image", "image_url": str(url)}
            | {"type": "image", "source": {"type": "url", "url": str(url)}}
        ):
            pass
        case {"type": "image" | "image_url" | "input_image"}:
            url = ""
        case _:
            expected = "parts of type text or image: files and results of server tools are not read"
            raise wrong(where, kind or part, expected, field)
    if not url.startswith("data:"):
        expected = "an image in base64 or as a data URL (data:image/png;base64,...)"
        raise wrong(where, part, f"{expected}: the gateway fetches no files", field)
    try:
        return Image.of(url)
    except ImageError as e:
        raise Refusal(400, "image", f"{where}: {e}", field) from None


TEXTS = {
    "text": "text", "input_text": "text", "output_text": "text", "summary_text": "text",
    "reasoning_text": "text", "refusal": "refusal", "tool_reference": "tool_name",
}  # fmt: skip
"""The types of parts that are texts, and the fields of the texts."""


def read_output_format(form: Any, field: str) -> OutputFormat | None:
    """Return the form that the text of an answer must have; None if it may have any.

    Args:
        form: an object of type text, json_object or json_schema. The schema is in it, or in its
            `json_schema`.
        field: its field in the request.
    """
    kind = form.get("type") if isinstance(form, dict) else None
    if form is None or kind == "text":
        return None
    wanted = form.get("json_schema", form) if kind == "json_schema" else {"schema": JSON_OBJECT}
    schema = wanted.get("schema") if isinstance(wanted, dict) else None
    if kind not in ("json_object", "json_schema") or not isinstance(schema, dict):
        raise wrong(field, form, "of type text, json_object, or json_schema with a schema", field)
    try:
        return OutputFormat(write_json(schema, field, field))
    except (ValueError, RecursionError) as e:
        raise Refusal(400, "invalid", f"{field}: the schema is refused: {e}", field) from None


JSON_OBJECT = {"type": "object"}
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
"""The names of tools that are accepted."""


def tool_schema(function: Any, where: str, parameters: str = "parameters") -> Mapping[str, Any]:
    """Return a tool's schema in the form that chat templates expect.

    Args:
        function: an object with `name`, `description` and the JSON schema of its parameters.
        where: the place of the object in the request.
        parameters: the field of the JSON schema.
    """
    if not is_name(name := function.get("name")):
        raise wrong(f"{where}.name", name, "a name", "tools")
    description = function.get("description") or ""
    if not isinstance(description, str):
        raise wrong(f"{where}.description", description, "a text", "tools")
    schema = function.get(parameters) or {"type": "object", "properties": {}}
    if not isinstance(schema, dict):
        raise wrong(f"{where}.{parameters}", schema, "a JSON schema", "tools")
    checked = {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }
    write_json([checked], where, "tools")
    return checked


def is_name(name: Any) -> bool:
    """Return whether a value is the name of a tool."""
    return isinstance(name, str) and bool(NAME.fullmatch(name))


def write_json(value: Any, where: str, field: str) -> str:
    """Return a value as JSON.

    Raises:
        Refusal: it is nested more deeply than JSON is written here.
    """
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as e:
        raise Refusal(400, "invalid", f"{where} cannot be written: {e}", field) from None


def read_sampling(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of a request."""
    limits = {"temperature": (0, 10), "top_p": (0, 1), "top_k": (0, 2**31)}
    sampling = {}
    for name, (low, high) in limits.items():
        value = data.get(name)
        if value is None or (name == "top_k" and value == -1):
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (name == "top_p" and value == 0):
            raise wrong(name, value, f"a number from {low} to {high}", name)
        sampling[name] = int(value) if name == "top_k" else float(value)
    return sampling


def wrong(where: str, value: Any, expected: str, field: str) -> Refusal:
    """Return the refusal of a value that is not as expected."""
    try:
        shown = f"{value!r:.200}"
    except RecursionError:
        shown = "a deeply nested value"
    return cast(Refusal, Refusal(400, "invalid", f"{where} must be {expected}, not {shown}", field))


def openai_error(refusal: Refusal) -> dict[str, Any]:
    """Return an error as OpenAI's APIs describe it."""
    return {
        "message": str(refusal),
        "type": "invalid_request_error" if refusal.status < 500 else "server_error",
        "param": refusal.field or None,
        "code": refusal.code,
    }


def event(data: bytes, name: str = "") -> bytes:
    """Return data as a server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"
