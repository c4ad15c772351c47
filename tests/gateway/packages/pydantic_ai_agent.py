"""pydantic-ai. With the argument `trim`, it keeps only the last messages of its history."""

import sys

from calculator import MODEL, PROMPT, evaluate
from pydantic_ai import Agent
from pydantic_ai.capabilities import ProcessHistory
from pydantic_ai.models.openai import OpenAIChatModel


def trim(messages):
    return [messages[0], *messages[-2:]] if len(messages) > 4 else messages


agent = Agent(
    OpenAIChatModel(MODEL),
    instructions="You calculate.",
    capabilities=[ProcessHistory(trim)] if "trim" in sys.argv else [],
)
agent.tool_plain(name="calculator")(evaluate)
print(agent.run_sync(PROMPT).output)
