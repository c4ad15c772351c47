"""pydantic-ai. With the argument `trim`, it keeps only the last messages of its history.

With `stream`, answers are streamed; with `helper`, each call of the tool is answered by another
agent; with `retry`, the client waits too briefly.
"""

import asyncio
import sys

from calculator import HELPER, MODEL, PROMPT, SECONDS, evaluate
from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.capabilities import ProcessHistory
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def trim(messages):
    return [messages[0], *messages[-2:]] if len(messages) > 4 else messages


model = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=AsyncOpenAI(timeout=SECONDS)))
helper = Agent(model)
helper.tool_plain(name="calculator")(evaluate)
agent = Agent(
    model,
    instructions="You calculate.",
    capabilities=[ProcessHistory(trim)] if "trim" in sys.argv else [],
)


async def ask(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    return (await helper.run(HELPER.format(expression))).output


agent.tool_plain(name="calculator")(ask if "helper" in sys.argv else evaluate)


async def main():
    if "stream" not in sys.argv:
        return (await agent.run(PROMPT)).output
    async with agent.run_stream(PROMPT) as run:
        return await run.get_output()


print(asyncio.run(main()))
