"""An agent of OpenAI's client with the Responses API.

Arguments: stream, previous, parse, retry, and those of plain_agent. With `previous` it sends only
new items, and the id of the response before. With `parse` the answer has a type.
"""

import json
import sys

import openai
from calculator import MODEL
from plain_agent import play
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


previous = {}


def send(items):
    options = {
        "model": MODEL,
        "instructions": "You calculate.",
        "input": items,
        "tools": [FUNCTION],
        "include": ["reasoning.encrypted_content"],
    }
    if "parse" in sys.argv:
        return client.responses.parse(text_format=Result, **options)
    if "previous" in sys.argv:
        # The last items are the results of calls.
        first = 1 + max(
            (i for i, item in enumerate(items) if not isinstance(item, dict)), default=-1
        )
        options["input"] = items[first:]
        response = client.responses.create(**options, **previous)
        previous["previous_response_id"] = response.id
        return response
    if "stream" not in sys.argv:
        return client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        response = stream.get_final_response()
    assert response.output_text == text
    return response


def ask(items):
    response = send(items)
    calls = [
        (item.call_id, json.loads(item.arguments)["expression"])
        for item in response.output
        if item.type == "function_call"
    ]
    if "parse" in sys.argv and not calls:
        assert response.output_parsed == Result(value=12)
    return response.output, calls, response.output_text


def write_results(results):
    return [
        {"type": "function_call_output", "call_id": id, "output": result} for id, result in results
    ]


print(play(ask, write_results))
