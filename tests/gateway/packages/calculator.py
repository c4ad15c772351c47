"""What the agents of this folder have in common: the row and a calculator."""

import ast
import json
import operator
import os
import sys

PROMPT = json.loads(os.environ["AGENTRL_SAMPLE"])["prompt"][0]["content"]
MODEL = os.environ["OPENAI_MODEL"]
SECONDS = 0.6 if "retry" in sys.argv else 30.0
"""How long the client of a framework waits. If that is too short, it sends the request again."""
HELPER = "You are a helper. How much is {}?"
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def evaluate(expression: str) -> str:
    """Evaluate an arithmetic expression; a policy that learns writes others, too."""

    def value(node):
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        return node.value

    try:
        return str(value(ast.parse(expression, mode="eval").body))
    except Exception as e:
        return f"Error: {e}"
