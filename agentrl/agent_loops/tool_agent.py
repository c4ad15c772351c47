"""Call tools, talk to the interaction, until there is nothing left to say."""

from __future__ import annotations

from agentrl.agent_loops.base import agent_loop
from agentrl.agent_loops.episode import Episode


@agent_loop("tool_agent")
async def tool_agent(ep: Episode) -> None:
    """Generate; run what was called; else hear the interaction; else end."""
    while True:
        turn = await ep.generate()
        if turn.tool_calls:
            await ep.call_tools()
        elif not await ep.interact():
            return
