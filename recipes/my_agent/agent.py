"""An agent with a calculator. It uses OpenAI's client and knows nothing of agentrl.

python recipes/my_agent/agent.py              one question, at OPENAI_BASE_URL
agent.python=recipes/my_agent/agent.py:run    many episodes at once, in the process of the run
"""

import ast
import asyncio
import json
import operator
import os

import openai

EXPRESSION = 'numbers, + - * / // % ** and parentheses, for example "3 * (4 + 5)"'
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"description": EXPRESSION, "type": "string"}},
            "required": ["expression"],
            "additionalProperties": False,
        },
    },
}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression):
    """Return the value of sums, differences and products of numbers."""

    def value(node):
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        return int(node.value)

    return str(value(ast.parse(expression, mode="eval").body))


def run_call(call):
    """Return the message with the result of a call."""
    try:
        result = calculate(**json.loads(call.function.arguments))
    except Exception as error:  # The model reads its mistake and can correct it.
        result = f"Error: {error!r}"
    return {"role": "tool", "tool_call_id": call.id, "content": result}


async def answer(sample, base_url, api_key, model):
    """Return the answer to a question: the messages of `sample["prompt"]`."""
    messages = list(sample["prompt"])
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            completion = await client.chat.completions.create(
                model=model, messages=messages, tools=[CALCULATOR]
            )
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return message.content
            messages += [run_call(call) for call in message.tool_calls]


async def run(sample, base_url, api_key, model):
    """Answer a question without printing, for `agent.python`."""
    await answer(sample, base_url, api_key, model)


if __name__ == "__main__":
    variables = [os.environ[f"OPENAI_{name}"] for name in ("BASE_URL", "API_KEY", "MODEL")]
    print(asyncio.run(answer(json.loads(os.environ["AGENTRL_SAMPLE"]), *variables)))
