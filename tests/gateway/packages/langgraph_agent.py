"""langgraph, as `langchain.agents` builds it. With `summarize`, it compacts its history.

With `returns`, the policy reads the errors that tools raise. With `stream`, answers are streamed;
with `helper`, each call of the calculator is answered by another agent; with `retry`, the client
waits too briefly.
"""

import sys

from calculator import HELPER, MODEL, PROMPT, SECONDS, evaluate
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware, ToolErrorMiddleware
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model=MODEL, timeout=SECONDS)
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


calculator = tool("calculator")(evaluate)
helper = create_agent(model, [calculator])


def texts(answerer, prompt):
    state = {"messages": [("user", prompt)]}
    if "stream" not in sys.argv:
        return answerer.invoke(state)["messages"][-1].content
    parts = answerer.stream(state, stream_mode="messages")
    return "".join(part.content for part, _ in parts if part.type == "AIMessageChunk")


def ask(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    return texts(helper, HELPER.format(expression))


agent = create_agent(
    model,
    [tool("calculator")(ask) if "helper" in sys.argv else calculator, divide],
    system_prompt="You calculate.",
    middleware=middleware,
)
print(texts(agent, PROMPT))
