"""A loop whose turns have rewards, and a reward whose metric `right` is without them."""

from pathlib import Path

from agentrl import agent_loop, reward
from agentrl.registry import load_file

answer = load_file(str(Path(__file__).parents[1] / "calculator/env.py")).answer


@agent_loop("right_call", uses_interaction=False)
async def right_call(ep):
    """Play as `tool_agent`. The first turn with a call whose result is the ground truth earns 1."""
    is_right = False
    while (await ep.generate()).tool_calls:
        results = await ep.call_tools()
        if not is_right and any(r.ok and r.content == ep.sample.ground_truth for r in results):
            is_right = True
            ep.reward(1.0)


@reward("right_answer")
def right_answer(trajectory):
    """Return the reward `answer`, also as the metric `right`, to which turns add nothing."""
    return {"score": answer(trajectory), "right": answer(trajectory)}
