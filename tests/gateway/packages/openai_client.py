"""An agent of OpenAI's client alone. Arguments: stream, retry, and those of plain_agent."""

import json
import sys

import openai
from calculator import MODEL
from plain_agent import play

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


def ask(messages):
    options = {
        "model": MODEL,
        "messages": messages,
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    if "stream" in sys.argv:
        text = ""
        with client.chat.completions.stream(**options) as stream:
            for event in stream:
                if event.type == "content.delta":
                    text += event.delta
        message = stream.get_final_completion().choices[0].message.model_dump(exclude_none=True)
        assert (message.get("content") or "") == text
        for call in message.get("tool_calls", ()):
            call["function"].pop("parsed_arguments", None)
            call.pop("index", None)
        message.pop("parsed", None)
    else:
        completion = client.chat.completions.create(**options)
        message = completion.choices[0].message.model_dump(exclude_none=True)
    calls = [
        (call["id"], json.loads(call["function"]["arguments"])["expression"])
        for call in message.get("tool_calls", ())
    ]
    return [message], calls, message.get("content")


def write_results(results):
    return [{"role": "tool", "tool_call_id": id, "content": result} for id, result in results]


print(play(ask, write_results))
