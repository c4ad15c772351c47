"""Agent loops: the code that plays an episode. A row's `agent_name` chooses one."""

from agentrl.agent_loops.episode import Episode
from agentrl.agent_loops.loops import AgentLoop, agent_loop, react, single_turn, tool_agent

__all__ = ["AgentLoop", "Episode", "agent_loop", "react", "single_turn", "tool_agent"]
