"""A starter environment: a tool, an interaction, a reward and an agent loop. Change anything.

Everything here registers under a name; the rows of train.jsonl and val.jsonl say which
of it they use.
"""

from agentrl import Interaction, Message, Reply, ToolError, agent_loop, interaction, reward, tool


# A tool is a plain function. Its schema comes from the signature and the docstring; the model reads
# what it returns, and the text of a ToolError.
@tool
def calculator(expression: str) -> str:
    """Compute one operation.

    Args:
        expression: two whole numbers and + - or * between them, for example "3*4"
    """
    for symbol, operation in (("+", int.__add__), ("*", int.__mul__), ("-", int.__sub__)):
        left, found, right = expression.replace(" ", "").partition(symbol)
        if found and left.isdigit() and right.isdigit():
            return str(operation(int(left), int(right)))
    raise ToolError("give two whole numbers with + - or * between them")


# A class is a tool with a state of its own in every episode; its public methods are what the model
# calls. `reward` (once, at the end) and `close` (always) are optional. Name it in a row's `tools`.
@tool
class Notebook:
    """Lines that stay for the rest of the episode."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, line: str) -> str:
        """Write down a line."""
        self.lines.append(line)
        return f"line {len(self.lines)}"

    def read(self) -> str:
        """Read all lines."""
        return "\n".join(self.lines)


# An interaction plays the user. One object per episode; its arguments are the row's
# interaction_kwargs. None, or done=True, ends the talk.
@interaction("coach")
class Coach(Interaction):
    """Says once that an answer is wrong."""

    def __init__(self, ground_truth: str) -> None:
        self.ground_truth = ground_truth
        self.said = False

    async def respond(self, messages) -> Reply | None:
        """Hear the last answer."""
        right = messages[-1].content.strip().endswith(f"#### {self.ground_truth}")
        if right or self.said:
            return Reply("", score=float(right), done=True)
        self.said = True
        return Reply("Check it.")


# A reward sees the whole trajectory: messages, final_text, turns, stop_reason, the sample.
@reward("exact")
def exact(trajectory) -> float:
    """1 where the last message ends in the right answer."""
    answer = f"#### {trajectory.sample.ground_truth}"
    return float(trajectory.final_text.strip().endswith(answer))


# A loop is how an episode is played; a row chooses it by agent_name. `tool_agent` needs no code.
@agent_loop("self_check", uses_interaction=False)
async def self_check(ep) -> None:
    """Answer with tools, then look again."""
    while (await ep.generate()).tool_calls:
        await ep.call_tools()
    ep.observe(Message("user", "Check it."))
    await ep.generate()
