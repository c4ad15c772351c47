"""langgraph, as `langchain.agents` builds it. With `summarize`, it compacts its history.

With `returns`, the policy reads the errors that tools raise.
"""

import sys

from calculator import MODEL, PROMPT, evaluate
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware, ToolErrorMiddleware
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model=MODEL)
middleware = []
if "summarize" in sys.argv:
    middleware = [
        SummarizationMiddleware(model=model, trigger=("messages", 4), keep=("messages", 2))
    ]
if "returns" in sys.argv:
    middleware = [ToolErrorMiddleware(lambda error, request: f"Error: {error}")]


@tool
def divide(a: int, b: int) -> str:
    """Divide a number by another one."""
    return str(a / b)


agent = create_agent(
    model,
    [tool("calculator")(evaluate), divide],
    system_prompt="You calculate.",
    middleware=middleware,
)
print(agent.invoke({"messages": [("user", PROMPT)]})["messages"][-1].content)
