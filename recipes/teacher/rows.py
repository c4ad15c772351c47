"""Write the rows and the conversations to imitate: products of two digits and one digit.

    python recipes/teacher/rows.py

The rows are split by the two numbers. Both orders of a training pair are training rows. The
conversations have training pairs, too: every other one is right at once, the others after the hint.
"""

import random
from pathlib import Path

from agentrl.data import write_rows
from agentrl.registry import load_file

VALIDATION, CHATS = 200, 72
Teacher = load_file(str(Path(__file__).with_name("env.py"))).Teacher
PRODUCT = "Solve the following multiplication: {} * {}. Give only the result as your final answer."


def make_row(a, b):
    """Return the row of the product of two numbers."""
    return {
        "prompt": PRODUCT.format(a, b),
        "agent_name": "tool_agent",
        "interaction": "teacher",
        "interaction_kwargs": {"a": a, "b": b},
        "ground_truth": str(a * b),
    }


def make_chat(a, b, has_hint, rng):
    """Return a conversation about a product. A wrong answer is not imitated."""
    messages = [{"role": "user", "content": PRODUCT.format(a, b)}]
    if has_hint:
        wrong = str(a * b + rng.choice([-20, -10, -2, 1, 10, 100]))
        messages += [
            {"role": "assistant", "content": wrong, "train": False},
            {"role": "user", "content": Teacher(a, b).reply},
        ]
    return {"messages": [*messages, {"role": "assistant", "content": str(a * b)}]}


def write(folder):
    """Write the files into a folder."""
    rng = random.Random(0)
    pairs = [(a, b) for a in range(11, 100) for b in range(2, 10) if a % 10 and a * b <= 400]
    rng.shuffle(pairs)
    train = [row for a, b in pairs[VALIDATION:] for row in ((a, b), (b, a))]
    write_rows(folder / "val.jsonl", [make_row(*pair) for pair in pairs[:VALIDATION]])
    write_rows(folder / "train.jsonl", [make_row(*pair) for pair in train])
    chats = [make_chat(*pair, i % 2 == 1, rng) for i, pair in enumerate(train[:CHATS])]
    write_rows(folder / "chats.jsonl", chats)


if __name__ == "__main__":
    write(Path(__file__).parent)
