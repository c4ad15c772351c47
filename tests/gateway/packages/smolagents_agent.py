"""smolagents. It writes earlier calls into the text of the history, in its own words.

With the argument `stream`, answers are streamed; with `helper`, it has another agent; with `retry`,
the client waits too briefly.
"""

import sys

from calculator import MODEL, PROMPT, SECONDS, evaluate
from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: the expression
    """
    return evaluate(expression)


model = OpenAIServerModel(MODEL, client_kwargs={"timeout": SECONDS})
options = {"max_steps": 4, "stream_outputs": "stream" in sys.argv}
helper = ToolCallingAgent([calculator], model, name="helper", description="It helps.", **options)
own = {"tools": [], "managed_agents": [helper]} if "helper" in sys.argv else {"tools": [calculator]}
print(ToolCallingAgent(model=model, **own, **options).run(PROMPT))
