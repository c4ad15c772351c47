"""Number puzzles that take a few lines of Python in the sandbox.

    python examples/number_puzzles/env.py data/puzzles.jsonl --rows 256 --seed 1 --difficulty 2

The difficulty is the kind of program: 1 sums with one loop, 2 searches with a function, 3 does two
searches and combines them, with the tool `python_session`, which keeps variables.
"""

from __future__ import annotations

import argparse
import json
import random
from functools import cache
from typing import Any, NamedTuple

from agentrl import reward
from agentrl.data import write_rows
from agentrl.registry import load_file

load_file("shelf:python")
load_file("shelf:python_session")

PROMPT = "{question}\nUse the tool. End with only the number after ####, for example: #### 12"


@reward("number_puzzles")
def number_puzzles(trajectory) -> float:
    """Return 1 if the last line of the last message is #### and the right number."""
    lines = trajectory.final_text.strip().splitlines()
    return float(bool(lines) and lines[-1].strip() == f"#### {trajectory.sample.ground_truth}")


class Puzzle(NamedTuple):
    """A question, its answer, and programs that find the answer, one per call."""

    question: str
    answer: int
    programs: tuple[str, ...]


@cache
def is_prime(n: int) -> bool:
    """Return whether n is prime."""
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


@cache
def halvings(n: int) -> int:
    """Return the steps from n to 1, if even numbers are halved and odd ones become 3 n + 1."""
    if n == 1:
        return 0
    return 1 + halvings(3 * n + 1 if n % 2 else n // 2)


def loop_puzzle(rng: random.Random) -> Puzzle:
    """Return a puzzle that takes one loop over digits or multiples."""
    if rng.random() < 0.5:
        base, power = rng.randint(3, 29), rng.randint(40, 120)
        return Puzzle(
            f"What is the sum of the decimal digits of {base} to the power of {power}?",
            sum(map(int, str(base**power))),
            (f"sum(int(d) for d in str({base} ** {power}))",),
        )
    a, b, end = rng.randint(3, 9), rng.randint(11, 19), rng.randint(2000, 9000)
    return Puzzle(
        f"What is the sum of the integers from 1 to {end} that are divisible by {a} or {b}?",
        sum(n for n in range(1, end + 1) if not n % a or not n % b),
        (f"print(sum(n for n in range(1, {end} + 1) if not n % {a} or not n % {b}))",),
    )


def search_puzzle(rng: random.Random) -> Puzzle:
    """Return a puzzle that takes a function and a search over its values."""
    low = rng.randint(1000, 5000)
    high = low + rng.randint(500, 2000)
    if rng.random() < 0.5:
        return Puzzle(
            f"How many primes are there from {low} to {high}?",
            sum(map(is_prime, range(low, high + 1))),
            (
                "def is_prime(n):\n    return all(n % d for d in range(2, int(n ** 0.5) + 1))\n\n"
                f"sum(map(is_prime, range({low}, {high} + 1)))",
            ),
        )
    return Puzzle(
        "An even number n becomes n / 2 and an odd number n becomes 3 n + 1, until it is 1. Which"
        f" number from {low} to {high} takes the most steps (the smallest, if there are several)?",
        max(range(low, high + 1), key=halvings),
        (
            "def steps(n):\n    count = 0\n    while n != 1:\n        n = 3 * n + 1 if n % 2 else n"
            " // 2\n        count += 1\n    return count\n\n"
            f"print(max(range({low}, {high} + 1), key=steps))",
        ),
    )


def double_puzzle(rng: random.Random) -> Puzzle:
    """Return a puzzle with two searches whose results are multiplied."""
    first, second = search_puzzle(rng), search_puzzle(rng)
    modulus = rng.choice((9973, 10007, 65537))
    return Puzzle(
        f"Let a be the answer to this: {first.question}\nLet b be the answer to this:"
        f" {second.question}\nWhat is the remainder of a times b divided by {modulus}?",
        first.answer * second.answer % modulus,
        (
            _assign("a", first.programs[0]),
            _assign("b", second.programs[0]),
            f"a * b % {modulus}",
        ),
    )


def _assign(name: str, program: str) -> str:
    """Return the program, changed so that it assigns its last value to a variable."""
    *before, last = program.splitlines()
    value = last.removeprefix("print(").removesuffix(")") if last.startswith("print(") else last
    return "\n".join([*before, f"{name} = {value}"])


PUZZLES = {1: loop_puzzle, 2: search_puzzle, 3: double_puzzle}


def rows(count: int, seed: int, difficulty: int = 2) -> list[dict[str, Any]]:
    """Return the rows of a dataset."""
    rng = random.Random(seed)
    dataset = []
    for _ in range(count):
        puzzle = PUZZLES[difficulty](rng)
        dataset.append(
            {
                "prompt": [{"role": "user", "content": PROMPT.format(question=puzzle.question)}],
                "agent_name": "tool_agent",
                "data_source": "examples/number_puzzles",
                "tools": ["python_session" if difficulty == 3 else "python"],
                "ground_truth": str(puzzle.answer),
                "programs": list(puzzle.programs),
            }
        )
    return dataset


def gold(row: dict[str, Any]) -> list[str]:
    """Return the turns of a policy that is right."""
    return [*(_call("python", {"code": p}) for p in row["programs"]), f"#### {row['ground_truth']}"]


def _call(name: str, arguments: dict[str, Any]) -> str:
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


def main() -> None:
    """Write rows to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output", help="a .jsonl or .parquet file")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--difficulty", type=int, default=2, choices=sorted(PUZZLES))
    args = parser.parse_args()
    write_rows(args.output, rows(args.rows, args.seed, args.difficulty))


if __name__ == "__main__":
    main()
