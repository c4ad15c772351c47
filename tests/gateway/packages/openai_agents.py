"""openai-agents. It uses the Responses API by default; one line chooses chat completions.

With the argument `two`, the agent has two further agents as tools, which run at the same time.
"""

import asyncio
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from calculator import MODEL, PROMPT, evaluate

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
agent = Agent(name="solver", instructions="You calculate.", tools=tools, model=MODEL)
print(asyncio.run(Runner.run(agent, PROMPT)).final_output)
