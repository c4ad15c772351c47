"""Agent loops: how an episode is played. A row's `agent_name` chooses one."""

from agentrl.agent_loops.base import AgentLoop, agent_loop
from agentrl.agent_loops.episode import Episode
from agentrl.agent_loops.react import react
from agentrl.agent_loops.single_turn import single_turn
from agentrl.agent_loops.tool_agent import tool_agent

__all__ = ["AgentLoop", "Episode", "agent_loop", "react", "single_turn", "tool_agent"]
