"""The dialects of the gateway, each with a client that keeps its history as chat completions do.

So the same agent can be played in each dialect. To add one, add a class to `WIRES`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from agentrl.gateway.dialects import ChatCompletions, Dialect, Messages, Responses

History = Sequence[dict[str, Any]]


class ChatWire:
    """Chat completions."""

    dialect: ClassVar[Dialect] = ChatCompletions()

    def output_format(self, schema: Any) -> dict[str, Any]:
        """Return the field of a request that states the schema of the answer."""
        schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        return {"response_format": schema}

    def body(self, history: History, tools: Sequence[Any] = (), **fields: Any) -> bytes:
        """Return the body of a request. `fields`: max_tokens, stop, stream."""
        tools_field = {"tools": tools} if tools else {}
        return json.dumps({"messages": history, **tools_field, **fields}).encode()

    def message(self, answer: bytes) -> dict[str, Any]:
        """Return the message of an answer in the form of chat completions."""
        return json.loads(answer)["choices"][0]["message"]

    def streamed(self, events: Iterable[bytes]) -> dict[str, Any]:
        """Return the message of a stream in the form of chat completions."""
        message: dict[str, Any] = {"content": None}
        for event in [*events][:-1]:
            for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
                for name, value in choice["delta"].items():
                    if name == "tool_calls":
                        calls = [{k: v for k, v in c.items() if k != "index"} for c in value]
                        message[name] = [*message.get(name, []), *calls]
                    else:
                        message[name] = (message.get(name) or "") + value
        if not message["content"] and "tool_calls" in message:
            message["content"] = None
        return message


class MessagesWire:
    """Anthropic's Messages API."""

    dialect: ClassVar[Dialect] = Messages()

    def output_format(self, schema: Any) -> dict[str, Any]:
        """Return the field of a request that states the schema of the answer."""
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}

    def body(self, history: History, tools: Sequence[Any] = (), **fields: Any) -> bytes:
        """Return the body of a request. `fields`: max_tokens, stop, stream."""
        data: dict[str, Any] = {"max_tokens": 10**6, "thinking": {"type": "enabled"}, **fields}
        if "stop" in data:
            data["stop_sequences"] = data.pop("stop")
        if tools:
            data["tools"] = [
                {"input_schema" if k == "parameters" else k: v for k, v in t["function"].items()}
                for t in tools
            ]
        if len(history) > 1 and history[0]["role"] == "system" and history[0]["content"]:
            data["system"] = [{"type": "text", "text": history[0]["content"]}]
            history = history[1:]
        data["messages"] = messages = []
        for message in history:
            role, blocks = message["role"], self._blocks(message)
            has_results = messages and messages[-1]["content"][-1:] and (
                messages[-1]["content"][-1]["type"] == "tool_result")  # fmt: skip
            if role in ("user", "tool") and has_results:
                messages[-1]["content"] += blocks
            else:
                messages.append({"role": "user" if role == "tool" else role, "content": blocks})
        return json.dumps(data).encode()

    def _parts(self, content: Any) -> list[dict[str, Any]]:
        """Return a text, or a list of texts and images, as blocks."""
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        blocks = []
        for part in content:
            if part["type"] == "image_url":
                head, _, data = part["image_url"]["url"].partition(";base64,")
                source = {"type": "base64", "media_type": head.removeprefix("data:"), "data": data}
                part = {"type": "image", "source": source}
            blocks.append(part)
        return blocks

    def _blocks(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        text = message["content"]
        if message["role"] == "tool":
            return [{"type": "tool_result", "tool_use_id": message["tool_call_id"],
                     "content": self._parts(text)}]  # fmt: skip
        blocks = []
        if message.get("reasoning_content"):
            thought = message["reasoning_content"]
            blocks.append({"type": "thinking", "thinking": thought, "signature": "s"})
        if text or (message["role"] != "assistant"):
            blocks += self._parts(text or "")
        for call in message.get("tool_calls", ()):
            function = call["function"]
            blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"],
                           "input": json.loads(function["arguments"])})  # fmt: skip
        return blocks

    def message(self, answer: bytes) -> dict[str, Any]:
        """Return the message of an answer in the form of chat completions."""
        content = json.loads(answer)["content"]
        texts = [b["text"] for b in content if b["type"] == "text"]
        calls = [
            {"id": b["id"], "type": "function", "function": {
                "name": b["name"], "arguments": json.dumps(b["input"], ensure_ascii=False)}}
            for b in content if b["type"] == "tool_use"
        ]  # fmt: skip
        thoughts = [b["thinking"] for b in content if b["type"] == "thinking"]
        message: dict[str, Any] = {"role": "assistant", "content": texts[0] if texts else None}
        if thoughts:
            message["reasoning_content"] = thoughts[0]
        return message | ({"tool_calls": calls} if calls else {})

    def streamed(self, events: Iterable[bytes]) -> dict[str, Any]:
        """Return the message of a stream in the form of chat completions."""
        content: list[dict[str, Any]] = []
        for event in events:
            kind, data = event.decode().split("\n")[:2]
            fields = json.loads(data.removeprefix("data: "))
            assert kind == f"event: {fields['type']}"
            if fields["type"] == "content_block_start":
                assert fields["index"] == len(content)
                content.append(fields["content_block"])
            elif fields["type"] == "content_block_delta":
                delta = dict(fields["delta"])
                delta.pop("type")
                ((name, value),) = delta.items()
                if name == "partial_json":
                    assert content[-1]["input"] == {}
                    content[-1]["input"] = json.loads(value)
                else:
                    content[-1][name] += value
        return self.message(json.dumps({"content": content}).encode())


class ResponsesWire:
    """OpenAI's Responses API.

    Args:
        has_ids: False for a client that does not repeat the ids of items.
    """

    dialect: ClassVar[Dialect] = Responses()

    def __init__(self, has_ids: bool = True):
        self._has_ids = has_ids

    def output_format(self, schema: Any) -> dict[str, Any]:
        """Return the field of a request that states the schema of the answer."""
        return {"text": {"format": {"type": "json_schema", "name": "answer", "schema": schema}}}

    def body(self, history: History, tools: Sequence[Any] = (), **fields: Any) -> bytes:
        """Return the body of a request. An assistant message may have the `id` of its answer."""
        if "max_tokens" in fields:
            fields["max_output_tokens"] = fields.pop("max_tokens")
        if tools:
            fields["tools"] = [{"type": "function", **tool["function"]} for tool in tools]
        items = [item for message in history for item in self._items(message)]
        return json.dumps({"input": items, **fields}).encode()

    def _items(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        role, content = message["role"], message.get("content")
        if isinstance(content, list):
            content = [
                {"type": "input_image", "image_url": part["image_url"]["url"]}
                if part["type"] == "image_url"
                else {"type": "input_text", "text": part["text"]}
                for part in content
            ]
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
            function = {name: call["function"][name] for name in ("name", "arguments")}
            items.append({"type": "function_call", "call_id": call["id"], **function})
        for item in items:
            prefix = item.pop("id", "fc_")
            if self._has_ids and message.get("id"):
                item["id"] = prefix + message["id"]
        return items

    def message(self, answer: bytes) -> dict[str, Any]:
        """Return the message of an answer in the form of chat completions, with its `id`."""
        response = json.loads(answer)
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

    def streamed(self, events: Iterable[bytes]) -> dict[str, Any]:
        """Return the message of a stream in the form of chat completions."""
        items, texts, fields = [], [], {}
        for event in events:
            kind, data = event.decode().split("\n")[:2]
            fields = json.loads(data.removeprefix("data: "))
            assert kind == f"event: {fields['type']}"
            if fields["type"] == "response.output_item.added":
                assert fields["output_index"] == len(texts)
                texts.append("")
            elif fields["type"].endswith(".delta"):
                texts[fields["output_index"]] += fields["delta"]
            elif fields["type"] == "response.output_item.done":
                items.append(fields["item"])
        assert items == fields["response"]["output"]
        for item, text in zip(items, texts, strict=True):
            parts = item.get("summary") or item.get("content") or [{"text": item["arguments"]}]
            assert [part["text"] for part in parts] == [text]
        return self.message(json.dumps(fields["response"]).encode())


WIRES = {
    "chat_completions": ChatWire(),
    "messages": MessagesWire(),
    "responses": ResponsesWire(),
}
