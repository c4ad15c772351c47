"""openai-agents. It uses the Responses API by default; one line chooses chat completions.

With the argument `responses` it uses the Responses API. With `handoff`, it hands the conversation
over to another agent, whose answer has a type. With `two`, the agent has two further agents as
tools, which run at the same time. With `returns`, the policy reads that a tool does not exist.
"""

import asyncio
import sys

from agents import (
    Agent,
    RunConfig,
    Runner,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)
from calculator import MODEL, PROMPT, evaluate
from pydantic import BaseModel


class Result(BaseModel):
    value: int


if "responses" not in sys.argv:
    set_default_openai_api("chat_completions")
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
behaviour = "return_error_to_model" if "returns" in sys.argv else "raise_error"
config = RunConfig(tool_not_found_behavior=behaviour)
print(asyncio.run(Runner.run(agent, PROMPT, run_config=config)).final_output)
