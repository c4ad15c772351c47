"""An agent of OpenAI's client alone. Arguments: stream, retry."""

import json
import sys

import openai
from calculator import MODEL, PROMPT, evaluate

FUNCTION = {
    "name": "calculator",
    "description": "Evaluate an arithmetic expression.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}
# With `retry` the first request takes longer than the client waits: it sends it again.
client = openai.OpenAI(timeout=0.5 if "retry" in sys.argv else 30.0, max_retries=3)
messages = [{"role": "user", "content": PROMPT}]


def ask():
    options = {
        "model": MODEL,
        "messages": messages,
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    if "stream" not in sys.argv:
        return (
            client.chat.completions.create(**options)
            .choices[0]
            .message.model_dump(exclude_none=True)
        )
    message = {"role": "assistant", "content": ""}
    with client.chat.completions.stream(**options) as stream:
        for event in stream:
            if event.type == "content.delta":
                message["content"] += event.delta
    final = stream.get_final_completion().choices[0].message.model_dump(exclude_none=True)
    assert (final.get("content") or "") == message["content"]
    for call in final.get("tool_calls", ()):
        call["function"].pop("parsed_arguments", None)
        call.pop("index", None)
    final.pop("parsed", None)
    return final


while True:
    message = ask()
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        result = evaluate(json.loads(call["function"]["arguments"])["expression"])
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
print(message["content"])
