"""Shopping: compute the total price of several things with the calculator.

    python examples/shopping/env.py data/shopping.jsonl --rows 512 --seed 1 --difficulty 2

The difficulty is the number of different things. Two columns are for `agentrl sft`: `gold` is
right; `trace` is right in one of four rows, and otherwise omits the last thing, uses a wrong
operator or guesses, so that reinforcement learning can improve it.
"""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

from agentrl import reward
from agentrl.data import write_rows
from agentrl.registry import load_file

load_file("shelf:calculator")

NAMES = ("Ann", "Tom", "Max", "Eva", "Ben", "Mia", "Leo", "Zoe", "Kim", "Sam", "Lea", "Jan")
ITEMS = ("apples", "pears", "nuts", "pens", "cards", "eggs", "plums", "stamps", "books")
SYSTEM = "Use the tools. Answer with ####."
GOLD_SHARE = 0.25


@reward("shopping")
def shopping(trajectory) -> float:
    """Return 1 if the last line of the last message is #### and the right sum."""
    lines = trajectory.final_text.strip().splitlines()
    return float(bool(lines) and lines[-1].strip() == f"#### {trajectory.sample.ground_truth}")


def rows(count: int, seed: int, difficulty: int = 2) -> list[dict[str, Any]]:
    """Return the rows of a dataset; all questions are different."""
    rng = random.Random(seed)
    rows_by_question: dict[str, dict[str, Any]] = {}
    while len(rows_by_question) < count:
        items = rng.sample(ITEMS, difficulty)
        bought = [(rng.randint(2, 9), item, rng.randint(2, 9)) for item in items]
        listed = ", ".join(f"{n} {item} for {price} coins each" for n, item, price in bought)
        question = f"{rng.choice(NAMES)} buys {listed}. How many coins in all?"
        rows_by_question[question] = {
            "prompt": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": question},
            ],
            "agent_name": "tool_agent",
            "data_source": "examples/shopping",
            "tools": ["calculator"],
            "ground_truth": str(sum(n * price for n, _, price in bought)),
            "bought": bought,
            "gold": conversation(bought),
            "trace": habit(bought, rng),
        }
    return list(rows_by_question.values())


def gold(row: dict[str, Any]) -> list[str]:
    """Return the turns of a policy that is right."""
    return [m["content"] for m in row["gold"] if m["role"] == "assistant"]


def conversation(
    bought: list[tuple[int, str, int]], sign: str = "*", answer: str = ""
) -> list[dict[str, str]]:
    """Return a conversation that multiplies for each thing, adds up, and answers."""
    messages: list[dict[str, str]] = []

    def compute(a: int, operator: str, b: int) -> int:
        value = {"*": a * b, "+": a + b, "-": a - b}[operator]
        arguments = json.dumps({"expression": f"{a}{operator}{b}"})
        call = f'<tool_call>\n{{"name": "calculator", "arguments": {arguments}}}\n</tool_call>'
        messages.append({"role": "assistant", "content": call})
        messages.append({"role": "tool", "content": str(value)})
        return value

    total = 0
    for i, (n, _, price) in enumerate(bought):
        cost = compute(n, sign, price)
        total = compute(total, "+", cost) if i else cost
    return [*messages, {"role": "assistant", "content": f"#### {answer or total}"}]


def habit(bought: list[tuple[int, str, int]], rng: random.Random) -> list[dict[str, str]]:
    """Return a conversation of a policy that is often wrong."""
    if rng.random() < GOLD_SHARE:
        return conversation(bought)
    match rng.randrange(3):
        case 0:
            return conversation(bought[:-1] or bought, sign="*" if bought[1:] else "+")
        case 1:
            return conversation(bought, sign=rng.choice("+-"))
        case _:
            return conversation([], answer=str(rng.randint(4, 99)))


def main() -> None:
    """Write rows to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output", help="a .jsonl or .parquet file")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--difficulty", type=int, default=2, choices=range(1, len(ITEMS) + 1))
    args = parser.parse_args()
    write_rows(args.output, rows(args.rows, args.seed, args.difficulty))


if __name__ == "__main__":
    main()
