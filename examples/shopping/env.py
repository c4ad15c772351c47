"""Shopping: what some things cost together, worked out with the calculator.

    python examples/shopping/env.py data/shopping.jsonl --rows 512 --seed 1 --difficulty 2

The difficulty is how many different things are bought. Two columns are for `agentrl sft`: `gold` is
right; `trace` is right in one row of four, and else forgets the last thing, takes a wrong operator
or guesses, so that reinforcement learning has something to do.
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
    """1 where the last line of the last message is the right sum behind ####, and nothing else."""
    lines = trajectory.final_text.strip().splitlines()
    return float(bool(lines) and lines[-1].strip() == f"#### {trajectory.sample.ground_truth}")


def rows(count: int, seed: int, difficulty: int = 2) -> list[dict[str, Any]]:
    """Rows of a dataset; no question comes twice."""
    rng = random.Random(seed)
    made: dict[str, dict[str, Any]] = {}
    while len(made) < count:
        items = rng.sample(ITEMS, difficulty)
        bought = [(rng.randint(2, 9), item, rng.randint(2, 9)) for item in items]
        listed = ", ".join(f"{n} {item} for {price} coins each" for n, item, price in bought)
        question = f"{rng.choice(NAMES)} buys {listed}. How many coins in all?"
        made[question] = {
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
    return list(made.values())


def gold(row: dict[str, Any]) -> list[str]:
    """What a policy that is right says, turn by turn."""
    return [m["content"] for m in row["gold"] if m["role"] == "assistant"]


def conversation(
    bought: list[tuple[int, str, int]], sign: str = "*", answer: str = ""
) -> list[dict[str, str]]:
    """Multiply for each thing, add it to what there was, and answer."""
    said: list[dict[str, str]] = []

    def compute(a: int, operator: str, b: int) -> int:
        value = {"*": a * b, "+": a + b, "-": a - b}[operator]
        arguments = json.dumps({"expression": f"{a}{operator}{b}"})
        call = f'<tool_call>\n{{"name": "calculator", "arguments": {arguments}}}\n</tool_call>'
        said.append({"role": "assistant", "content": call})
        said.append({"role": "tool", "content": str(value)})
        return value

    total = 0
    for i, (n, _, price) in enumerate(bought):
        cost = compute(n, sign, price)
        total = compute(total, "+", cost) if i else cost
    return [*said, {"role": "assistant", "content": f"#### {answer or total}"}]


def habit(bought: list[tuple[int, str, int]], rng: random.Random) -> list[dict[str, str]]:
    """A conversation of a policy that has much to learn."""
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
    given = parser.parse_args()
    write_rows(given.output, rows(given.rows, given.seed, given.difficulty))


if __name__ == "__main__":
    main()
