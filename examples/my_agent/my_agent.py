"""An agent with a calculator that knows nothing of agentrl: it talks to an OpenAI-style API.

python my_agent.py             one question, at OPENAI_BASE_URL
agent.python=my_agent.py:run   many episodes at once, in the process of the run
"""

from __future__ import annotations

import ast
import asyncio
import json
import operator
import os

import httpx

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "such as 3 * (4 + 5)"}},
            "required": ["expression"],
        },
    },
}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression: str) -> str:
    def value(node):
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        return node.value

    try:
        return str(value(ast.parse(expression, mode="eval").body))
    except Exception as e:
        return f"Error: {e}"


async def run(sample: dict, base_url: str, api_key: str, model: str) -> None:
    messages = list(sample["prompt"])
    headers = {"authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(headers=headers, timeout=300) as client:
        while True:
            body = {"model": model, "messages": messages, "tools": [CALCULATOR]}
            response = await client.post(f"{base_url}/chat/completions", json=body)
            if response.is_error:  # the episode is over
                return
            message = response.json()["choices"][0]["message"]
            messages.append(message)
            for call in message.get("tool_calls", ()):
                expression = json.loads(call["function"]["arguments"]).get("expression", "")
                result = calculate(str(expression))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if not message.get("tool_calls"):
                print(message["content"])
                return


if __name__ == "__main__":
    variables = (os.environ[name] for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL"))
    asyncio.run(run(json.loads(os.environ["AGENTRL_SAMPLE"]), *variables))
