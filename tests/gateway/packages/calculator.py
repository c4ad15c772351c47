"""What the agents of this folder have in common: the row and a calculator."""

import ast
import json
import operator
import os

PROMPT = json.loads(os.environ["AGENTRL_SAMPLE"])["prompt"][0]["content"]
MODEL = os.environ["OPENAI_MODEL"]
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
