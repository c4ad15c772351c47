"""An agent of OpenAI's client with the Responses API. Arguments: stream, previous, parse, retry.

With `previous` it sends only new items, and the id of the response before. With `parse` the answer
has a type.
"""

import json
import sys

import openai
from calculator import MODEL, PROMPT, evaluate
from pydantic import BaseModel

FUNCTION = {
    "type": "function",
    "name": "calculator",
    "description": "Evaluate an arithmetic expression.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
        "additionalProperties": False,
    },
}


class Result(BaseModel):
    value: int


# With `retry` the first request takes longer than the client waits: it sends it again.
client = openai.OpenAI(timeout=0.5 if "retry" in sys.argv else 30.0, max_retries=3)


def ask(items, previous):
    options = {
        "model": MODEL,
        "instructions": "You calculate.",
        "input": items,
        "tools": [FUNCTION],
        "include": ["reasoning.encrypted_content"],
    }
    if previous:
        options["previous_response_id"] = previous
    if "parse" in sys.argv:
        return client.responses.parse(text_format=Result, **options)
    if "stream" not in sys.argv:
        return client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        response = stream.get_final_response()
    assert response.output_text == text
    return response


items, previous = [{"role": "user", "content": PROMPT}], None
while True:
    response = ask(items, previous)
    if "previous" in sys.argv:
        items, previous = [], response.id
    else:
        items += response.output
    calls = [item for item in response.output if item.type == "function_call"]
    if not calls:
        break
    for call in calls:
        result = evaluate(json.loads(call.arguments)["expression"])
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
print(response.output_text)
if "parse" in sys.argv:
    assert response.output_parsed == Result(value=12)
