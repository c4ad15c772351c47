"""openai-agents. It uses the Responses API by default; one line chooses chat completions.

With the argument `responses` it uses the Responses API. With `handoff`, it hands the conversation
over to another agent, whose answer has a type. With `two`, the agent has two further agents as
tools, which run at the same time. With `returns`, the policy reads that a tool does not exist.
With `stream`, answers are streamed; with `trim`, requests have the last messages of the history
only; with `retry`, the client waits too briefly.
"""

import asyncio
import sys

from agents import (
    Agent,
    RunConfig,
    Runner,
    function_tool,
    set_default_openai_api,
    set_default_openai_client,
    set_tracing_disabled,
)
from agents.run import ModelInputData
from calculator import MODEL, PROMPT, SECONDS, evaluate
from openai import AsyncOpenAI
from pydantic import BaseModel


class Result(BaseModel):
    value: int


if "responses" not in sys.argv:
    set_default_openai_api("chat_completions")
set_default_openai_client(AsyncOpenAI(timeout=SECONDS))
set_tracing_disabled(True)
calculator = function_tool(evaluate, name_override="calculator")
tools = [calculator]
if "two" in sys.argv:
    tools = [
        Agent(name=name, instructions=f"You are {name}.", tools=[calculator], model=MODEL).as_tool(
            tool_name=name, tool_description=f"Ask {name}."
        )
        for name in ("ada", "bob")
    ]
handoffs = []
if "handoff" in sys.argv:
    instructions = "You check the result."
    handoffs = [Agent(name="checker", instructions=instructions, model=MODEL, output_type=Result)]
agent = Agent(
    name="solver", instructions="You calculate.", tools=tools, model=MODEL, handoffs=handoffs
)


def trim(data):
    items = data.model_data.input
    kept = [items[0], *items[-2:]] if len(items) > 4 else items
    return ModelInputData(input=kept, instructions=data.model_data.instructions)


behaviour = "return_error_to_model" if "returns" in sys.argv else "raise_error"
config = RunConfig(
    tool_not_found_behavior=behaviour,
    call_model_input_filter=trim if "trim" in sys.argv else None,
)


async def main():
    if "stream" not in sys.argv:
        return (await Runner.run(agent, PROMPT, run_config=config)).final_output
    result = Runner.run_streamed(agent, PROMPT, run_config=config)
    async for _ in result.stream_events():
        pass
    return result.final_output


print(asyncio.run(main()))
