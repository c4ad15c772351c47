"""One question, one answer."""

from __future__ import annotations

from agentrl.agent_loops.base import agent_loop
from agentrl.agent_loops.episode import Episode


@agent_loop("single_turn", uses_tools=False, uses_interaction=False)
async def single_turn(ep: Episode) -> None:
    """Generate once."""
    await ep.generate()
