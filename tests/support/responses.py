"""Conversations of chat completions, as the Responses API writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def to_request(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    has_ids: bool = True,
    **fields: Any,
) -> dict[str, Any]:
    """Return a request.

    Args:
        messages: messages of chat completions. An assistant message may have the `id` that
            `to_message` gave it.
        tools: tools of chat completions.
        has_ids: False for a client that does not repeat the ids of items.
        fields: further fields of a request of chat completions.
    """
    fields = dict(fields)
    if "max_tokens" in fields:
        fields["max_output_tokens"] = fields.pop("max_tokens")
    items = [item for message in messages for item in _items(message, has_ids)]
    functions = [{"type": "function", **tool["function"]} for tool in tools]
    return {"input": items, **({"tools": functions} if functions else {}), **fields}


def to_message(response: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response as a message of chat completions."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    message["id"] = response["id"].removeprefix("resp_")
    for item in response["output"]:
        if item["type"] == "reasoning":
            message["reasoning_content"] = item["summary"][0]["text"]
        elif item["type"] == "message":
            message["content"] = item["content"][0]["text"]
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
    return message


def _items(message: Mapping[str, Any], has_ids: bool) -> list[dict[str, Any]]:
    role, content = message["role"], message.get("content")
    if role == "tool":
        output = {"call_id": message.get("tool_call_id", ""), "output": content}
        return [{"type": "function_call_output", **output}]
    if role != "assistant":
        return [{"role": role, "content": content}]
    items: list[dict[str, Any]] = []
    calls = message.get("tool_calls") or ()
    if message.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": message["reasoning_content"]}]
        items.append({"type": "reasoning", "id": "rs_", "summary": summary})
    if content or not calls:
        items.append({"type": "message", "id": "msg_", "role": role, "content": content or ""})
    for call in calls:
        function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        items.append({"type": "function_call", "call_id": call["id"], **function})
    for item in items:
        prefix = item.pop("id", "fc_")
        if has_ids and message.get("id"):
            item["id"] = prefix + message["id"]
    return items
