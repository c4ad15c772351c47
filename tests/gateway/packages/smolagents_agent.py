"""smolagents. It writes earlier calls into the text of the history, in its own words."""

from calculator import MODEL, PROMPT, evaluate
from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: the expression
    """
    return evaluate(expression)


print(ToolCallingAgent([calculator], OpenAIServerModel(MODEL), max_steps=4).run(PROMPT))
