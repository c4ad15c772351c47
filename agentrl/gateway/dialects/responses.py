"""OpenAI's Responses API (`POST /v1/responses`).

An answer is a list of items: its thinking, its text and its calls. Requests repeat these items, and
`_join_items` makes one message of those of an answer again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, ClassVar

import orjson

from agentrl.gateway.dialects.base import (
    ROLES,
    Dialect,
    event,
    is_name,
    openai_error,
    read_limit,
    read_list,
    read_message,
    read_name,
    read_object,
    read_output_format,
    read_text,
    tool_schema,
    write_json,
    wrong,
)
from agentrl.gateway.memory import AnswerMemory
from agentrl.gateway.requests import Answer, ChatCall, ChatMessage, ChatRequest, Refusal

ITEM_ID = re.compile(r"(?:resp|rs|msg|fc|call)_([0-9a-f]{16})_(\d{1,9})(?:_\d{1,9})?")
"""The ids of answers, of their items and of their calls."""
THINKING, TEXT, CALL = range(3)
"""The kinds of items of an answer, in their order."""

STREAMED: Mapping[str, tuple[str, str, str, Mapping[str, int]]] = {
    "reasoning": (
        "summary", "reasoning_summary_text", "reasoning_summary_part", {"summary_index": 0}
    ),
    "message": ("content", "output_text", "content_part", {"content_index": 0}),
    "function_call": ("arguments", "function_call_arguments", "", {}),
}  # fmt: skip
"""For each type of items: the field of its text or of its part, the names of the events of both,
and fields of these events."""


class Responses(Dialect):
    """OpenAI's Responses API (`POST /v1/responses`)."""

    path = "/responses"

    REFUSED: ClassVar[Mapping[str, str]] = {
        "background": "an episode does not outlive its requests",
        "conversation": "use `previous_response_id`, or send the whole conversation",
        "prompt": "there are no stored prompts: send `instructions` and `input`",
        "context_management": "shorten the conversation in the agent",
        "top_logprobs": "answers contain no logprobs; the trajectory does",
    }
    IGNORED = ("temperature", "top_p", "max_tool_calls")
    USUAL: ClassVar[Mapping[str, Any]] = {
        "tool_choice": "auto", "parallel_tool_calls": True, "truncation": "disabled",
    }  # fmt: skip

    def _read(self, data: dict[str, Any], memory: AnswerMemory) -> ChatRequest:
        fields = {k: v for k, v in data.items() if k != "input" and v is not None}
        write_json(fields, "the request", "")
        include, instructions = fields.setdefault("include", []), fields.get("instructions", "")
        if not isinstance(include, list):
            raise wrong("include", include, "a list", "include")
        if not isinstance(instructions, str):
            raise wrong("instructions", instructions, "a text", "instructions")
        # As in OpenAI's API, the instructions of an earlier request do not apply to this one.
        system = [ChatMessage("system", instructions)] if instructions else []
        previous = fields.get("previous_response_id")
        earlier = _recall(previous, memory, "previous_response_id") if previous else []
        conversation = (*earlier, *_read_input(data.get("input"), memory))
        text = read_object(data, "text")
        nested = (("reasoning", "effort"), ("text", "verbosity"))
        ignored = [f"{outer}.{name}" for outer, name in nested
                   if read_object(data, outer).get(name)]  # fmt: skip
        return ChatRequest(
            messages=(*system, *conversation),
            max_tokens=read_limit(data, "max_output_tokens"),
            ignored=tuple(ignored),
            output_format=read_output_format(text.get("format"), "text.format"),
            kept=None if data.get("store") is False else conversation,
            fields=fields,
        )

    def _read_tool(self, tool: Any, where: str) -> Iterator[Mapping[str, Any]]:
        if isinstance(tool, dict) and tool.get("type") == "namespace":
            for i, inner in enumerate(read_list(tool, "tools", "tool")):
                yield _read_function(inner, f"{where}.tools[{i}]", tool.get("name"))
        else:
            yield _read_function(tool, where)

    def write(self, answer: Answer, request: ChatRequest) -> bytes:
        return orjson.dumps(self._response(answer, request, _items(answer, request)))

    def events(self, answer: Answer, request: ChatRequest) -> Iterator[bytes]:
        numbers, items = count(), _items(answer, request)

        def made(kind: str, **fields: Any) -> bytes:
            data = {"type": f"response.{kind}", "sequence_number": next(numbers), **fields}
            return event(orjson.dumps(data), data["type"])

        ended = self._response(answer, request, items)
        started = {**ended, "status": "in_progress", "output": [], "usage": None,
                   "incomplete_details": None}  # fmt: skip
        yield made("created", response=started)
        yield made("in_progress", response=started)
        for i, item in enumerate(items):
            yield from _item_events(item, i, made)
        yield made(ended["status"], response=ended)

    def error_event(self, refusal: Refusal) -> bytes:
        # OpenAI's client raises an error only if there is a field `error`.
        error = openai_error(refusal)
        data = {**error, "type": "error", "sequence_number": 0, "error": error}
        return event(orjson.dumps(data), "error")

    def _response(
        self, answer: Answer, request: ChatRequest, items: Sequence[Any]
    ) -> dict[str, Any]:
        cached = {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0}
        usage = {
            "input_tokens": answer.prompt_tokens, "input_tokens_details": cached,
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},  # They are not counted.
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        }  # fmt: skip
        is_cut = answer.finish_reason == "length"
        return {
            **self.USUAL, "tools": [], **request.fields,
            "id": f"resp_{_tag(answer)}", "object": "response", "created_at": int(time.time()),
            "model": request.model, "status": _status(answer), "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": items, "usage": usage,
        }  # fmt: skip


# -- requests -------------------------------------------------------------------------------------


_Item = tuple[int, Any, ChatMessage]
"""An item of a request: its kind as an item of an answer, its id, and a message of it alone."""


def _read_input(items: Any, memory: AnswerMemory) -> Sequence[ChatMessage]:
    """Return the messages of the field `input`: a text, or a list of items."""
    if isinstance(items, str):
        return [ChatMessage("user", items)]
    if not isinstance(items, list) or not items:
        raise wrong("input", items, "a text or a list with at least one item", "input")
    return _join_items([_item(item, f"input[{i}]", memory) for i, item in enumerate(items)])


def _join_items(items: Sequence[_Item]) -> list[ChatMessage]:
    """Return the messages of items.

    Items of an assistant that follow each other are of one answer if their ids say so. If one of
    them has no id of this API, they are if they are in the order of an answer. Results between
    calls of one answer do not separate them, if the ids are of this API.
    """
    messages: list[ChatMessage] = []
    turn, origin, last = -1, "", CALL  # the assistant message that may go on; -1: none
    for kind, id, message in items:
        if message.role == "assistant":
            source = _answer_id(id)
            is_next = turn == len(messages) - 1 >= 0 and (kind > last or kind == last != TEXT)
            if turn >= 0 and (source == origin if source and origin else is_next):
                known, origin = messages[turn], origin or source
                messages[turn] = ChatMessage(
                    "assistant",
                    known.text + message.text,
                    known.calls + message.calls,
                    reasoning=known.reasoning + message.reasoning,
                )
            else:
                turn, origin = len(messages), source
                messages.append(message)
            last = kind
        else:
            messages.append(message)
            turn = turn if message.role == "tool" else -1
    return messages


def _item(item: Any, where: str, memory: AnswerMemory) -> _Item:
    """Read an item.

    Raises:
        Refusal: it is wrong, or its type is not supported.
    """
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "item_reference":
        return _referenced(item.get("id"), memory)
    if kind == "reasoning":
        # Thinking that another model has encrypted is not read.
        name = "content" if item.get("content") else "summary"
        thought = read_text(item.get(name) or "", f"{where}.{name}", "input")
        return THINKING, item.get("id"), ChatMessage("assistant", "", reasoning=thought)
    called = _full_name(item.get("namespace"), item.get("name")) if kind == "function_call" else ""
    if is_name(called):
        arguments = item.get("arguments") or "{}"
        if not isinstance(arguments, str):
            arguments = write_json(arguments, f"{where}.arguments", "input")
        call = ChatCall(read_name(item.get("call_id")), called, arguments)
        id = call.id if _answer_id(call.id) else item.get("id")
        return CALL, id, ChatMessage("assistant", "", (call,))
    if kind == "function_call_output":
        output, call_id = item.get("output") or "", read_name(item.get("call_id"))
        read = read_message("tool", output, f"{where}.output", "input", call_id=call_id)
        return CALL, "", read
    name = item.get("role") if kind == "message" else None
    if not isinstance(name, str) or name not in ROLES:
        roles = ", ".join(ROLES)
        expected = f"a message of role {roles}, or of type function_call (with a name)"
        raise wrong(where, item, f"{expected}, function_call_output or reasoning", "input")
    content = item.get("content") or ""
    return TEXT, item.get("id"), read_message(ROLES[name], content, f"{where}.content", "input")


def _read_function(tool: Any, where: str, namespace: Any = "") -> Mapping[str, Any]:
    """Return the schema of a function; see `Dialect._read_tool`."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        expected = "'function' (the policy calls functions, and the agent runs them)"
        raise wrong(f"{where}.type", kind, expected, "tools")
    return tool_schema(tool | {"name": _full_name(namespace, tool.get("name"))}, where)


def _full_name(namespace: Any, name: Any) -> Any:
    """Return the name of a function in the prompt and the calls of the policy."""
    return f"{namespace}__{name}" if namespace and is_name(name) else name


def _referenced(id: Any, memory: AnswerMemory) -> _Item:
    """Return the item of an earlier answer with this id."""
    answer = _recall(id, memory, "input")[-1]
    if id.startswith("rs_"):
        return THINKING, id, ChatMessage("assistant", "", reasoning=answer.reasoning)
    if id.startswith("msg_"):
        return TEXT, id, ChatMessage("assistant", answer.text)
    calls = tuple(call for i, call in enumerate(answer.calls) if id.endswith(f"_{i}"))
    return CALL, id, ChatMessage("assistant", "", calls)


def _recall(id: Any, memory: AnswerMemory, field: str) -> Sequence[ChatMessage]:
    """Return the conversation that ends with the answer of this id, or of an item with this id."""
    known = memory.find(_answer_id(id))
    if known is None:
        expected = "the id of an answer that this session keeps: `store` must not be false"
        error = wrong(field, id, expected, field)
        error.code = "previous_response_not_found"
        raise error
    return known


def _answer_id(id: Any) -> str:
    """Return the `Answer.id` of an answer, item or call with this id; "" if it is not ours."""
    match = ITEM_ID.fullmatch(id) if isinstance(id, str) else None
    return f"chatcmpl-{match[1]}-{match[2]}" if match else ""


# -- answers --------------------------------------------------------------------------------------


def _tag(answer: Answer) -> str:
    """Return the part that the ids of an answer and of its items share."""
    return answer.id.removeprefix("chatcmpl-").replace("-", "_")


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"


def _items(answer: Answer, request: ChatRequest) -> list[dict[str, Any]]:
    """Return the items of an answer."""
    items, tag = [], _tag(answer)
    if answer.reasoning:
        summary = [{"type": "summary_text", "text": answer.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{tag}", "summary": summary})
        if "reasoning.encrypted_content" in request.fields["include"]:
            items[0]["encrypted_content"] = tag  # The summary contains the thinking.
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": f"msg_{tag}", "role": "assistant",
                      "status": _status(answer), "content": [part]})  # fmt: skip
    names = {
        _full_name(space, inner["name"]): {"name": inner["name"], "namespace": space}
        for tool in request.fields.get("tools") or ()
        if tool["type"] == "namespace" and (space := tool.get("name"))
        for inner in tool["tools"]
    }
    for i, call in enumerate(answer.calls):
        name = names.get(call.name, {"name": call.name})
        items.append({"type": "function_call", "id": f"fc_{tag}_{i}", "call_id": call.id,
                      "arguments": call.arguments, "status": "completed", **name})  # fmt: skip
    return items


def _item_events(item: dict[str, Any], index: int, made: Callable[..., bytes]) -> Iterator[bytes]:
    """Yield the events of an item.

    Args:
        item: the item.
        index: its index in the answer.
        made: makes an event of its type and fields.
    """
    holder, name, part_name, place = STREAMED[item["type"]]
    at = {"item_id": item["id"], "output_index": index, **place}
    extra = {"logprobs": []} if name == "output_text" else {}
    part = item[holder][0] if part_name else {}
    text = part["text"] if part else item[holder]
    started = {**item, holder: item[holder][:0]}
    if "status" in item:
        started["status"] = "in_progress"
    yield made("output_item.added", output_index=index, item=started)
    if part:
        yield made(f"{part_name}.added", **at, part={**part, "text": ""})
    if text:
        yield made(f"{name}.delta", **at, **extra, delta=text)
    yield made(f"{name}.done", **at, **extra, **{"text" if part else holder: text})
    if part:
        yield made(f"{part_name}.done", **at, part=part)
    yield made("output_item.done", output_index=index, item=item)
