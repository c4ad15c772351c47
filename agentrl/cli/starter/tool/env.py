"""A starter environment: two tools, an interaction, a reward and an agent loop. Change anything.

Everything here is registered under a name. The rows of train.jsonl and val.jsonl refer to these
names.
"""

from agentrl import Interaction, Message, Reply, ToolError, agent_loop, interaction, reward, tool


# A tool is a plain function. Its schema comes from the signature and the docstring. The model reads
# the returned text, or the text of a ToolError.
@tool
def calculator(expression: str) -> str:
    """Compute one operation.

    Args:
        expression: two whole numbers and + - or * between them, for example "3*4"
    """
    for symbol, operation in (("+", int.__add__), ("*", int.__mul__), ("-", int.__sub__)):
        left, operator, right = expression.replace(" ", "").partition(symbol)
        if operator and left.isdigit() and right.isdigit():
            return str(operation(int(left), int(right)))
    raise ToolError("expression must be two whole numbers with +, - or * between them")


# A class is a tool with its own state in every episode. The model calls its public methods.
# `reward` (called once, at the end) and `close` (always called) are optional. Add the tool's name
# to a row's `tools`.
@tool
class Notebook:
    """Notes that are kept until the end of the episode."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, line: str) -> str:
        """Add a line to the notes."""
        self.lines.append(line)
        return f"line {len(self.lines)}"

    def read(self) -> str:
        """Return all lines of the notes."""
        return "\n".join(self.lines)


# An interaction plays the user. There is one object per episode; its arguments are the row's
# interaction_kwargs. None, or a reply with done=True, ends the conversation.
@interaction("coach")
class Coach(Interaction):
    """Asks once to check a wrong answer."""

    def __init__(self, ground_truth: str) -> None:
        self.ground_truth = ground_truth
        self.has_asked = False

    async def respond(self, messages) -> Reply | None:
        """Reply to the last answer."""
        right = messages[-1].content.strip().endswith(f"#### {self.ground_truth}")
        if right or self.has_asked:
            return Reply("", score=float(right), done=True)
        self.has_asked = True
        return Reply("Check it.")


# A reward sees the whole trajectory: messages, final_text, turns, stop_reason, the sample.
@reward("exact")
def exact(trajectory) -> float:
    """Return 1 if the last message ends with the right answer, else 0."""
    answer = f"#### {trajectory.sample.ground_truth}"
    return float(trajectory.final_text.strip().endswith(answer))


# An agent loop decides what happens between turns. A row chooses it by agent_name. The shipped loop
# `tool_agent` needs no code.
@agent_loop("self_check", uses_interaction=False)
async def self_check(ep) -> None:
    """Answer with tools, then check the answer."""
    while (await ep.generate()).tool_calls:
        await ep.call_tools()
    ep.observe(Message("user", "Check it."))
    await ep.generate()
