"""Log detective: find the cause of failures with a shell in a folder of logs.

    python examples/log_detective/env.py data/logs.jsonl --rows 256 --seed 1 --difficulty 2

Every row has its own logs, of three services that forward requests. The difficulty is the
kind of question: 1 counts lines of one file, 2 compares users over all files, 3 follows requests
from one file into another.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from typing import Any, NamedTuple

from agentrl import reward
from agentrl.data import write_rows
from agentrl.registry import load_file

load_file("shelf:shell")

SERVICES = ("gate", "cart", "pay")
REQUESTS = 60
PROMPT = (
    "The folder logs/ contains the logs of the services gate, cart and pay, one line per request.\n"
    "{question}\nUse the tools. End with only the number, user or request after ####, for example:"
    " #### u12"
)


class Line(NamedTuple):
    """A line of a log."""

    service: str
    second: int
    level: str
    user: str
    request: str
    took: int

    def __str__(self) -> str:
        clock = f"12:{self.second // 60:02}:{self.second % 60:02}"
        return f"{clock} {self.level} user={self.user} request={self.request} took={self.took}"


@reward("log_detective")
def log_detective(trajectory) -> float:
    """Return 1 if the last line of the last message is #### and the right answer."""
    lines = trajectory.final_text.strip().splitlines()
    return float(bool(lines) and lines[-1].strip() == f"#### {trajectory.sample.ground_truth}")


def logs(rng: random.Random) -> list[Line]:
    """Return the log lines of an hour. A request that fails is not forwarded."""
    lines = []
    users = [f"u{n}" for n in rng.sample(range(10, 100), 12)]
    for number in rng.sample(range(1000, 10_000), REQUESTS):
        second, user = rng.randrange(3500), rng.choice(users)
        for i, service in enumerate(SERVICES):
            failed = rng.random() < 0.15
            took = rng.randint(5, 999)
            level = "ERROR" if failed else "INFO"
            lines.append(Line(service, second + 20 * i, level, user, f"r{number}", took))
            if failed:
                break
    return sorted(lines, key=lambda line: line.second)


class Case(NamedTuple):
    """A question, its answer, and a shell command that finds the answer."""

    question: str
    answer: str
    command: str


def case(lines: list[Line], difficulty: int, service: str) -> Case | None:
    """Return a question of that difficulty; None if it has no single answer in these logs."""
    failed = [line for line in lines if line.level == "ERROR"]
    if difficulty == 1:
        return Case(
            f"How many requests failed (ERROR) in {service}?",
            str(sum(line.service == service for line in failed)),
            f"grep -c ERROR logs/{service}.log",
        )
    if difficulty == 2:
        (first, most), (_, second) = Counter(line.user for line in failed).most_common(2)
        if most == second:
            return None
        return Case(
            "Which user had the most failed requests (ERROR) in total?",
            first,
            "grep -h ERROR logs/*.log | grep -o 'user=[^ ]*' | sort | uniq -c | sort -n | tail -1",
        )
    numbers = {line.request for line in failed if line.service == "pay"}
    took = {x.request: x.took for x in lines if x.service == "gate" and x.request in numbers}
    slowest = [request for request in took if took[request] == max(took.values())]
    if len(slowest) != 1:
        return None
    return Case(
        "Of the requests that failed (ERROR) in pay, which one took longest in gate?",
        slowest[0],
        "grep ERROR logs/pay.log | grep -o 'request=[^ ]*' | grep -F -f - logs/gate.log"
        " | sort -t= -k4 -n | tail -1",
    )


def rows(count: int, seed: int, difficulty: int = 2) -> list[dict[str, Any]]:
    """Return the rows of a dataset."""
    rng = random.Random(seed)
    dataset: list[dict[str, Any]] = []
    while len(dataset) < count:
        lines = logs(rng)
        question = case(lines, difficulty, rng.choice(SERVICES))
        if question is None:
            continue
        files = {
            f"logs/{s}.log": "".join(f"{line}\n" for line in lines if line.service == s)
            for s in SERVICES
        }
        dataset.append(
            {
                "prompt": [{"role": "user", "content": PROMPT.format(question=question.question)}],
                "agent_name": "tool_agent",
                "data_source": "examples/log_detective",
                "tools": ["shell"],
                "tools_kwargs": {"shell": {"create_kwargs": {"files": files}}},
                "ground_truth": question.answer,
                "command": question.command,
            }
        )
    return dataset


def gold(row: dict[str, Any]) -> list[str]:
    """Return the turns of a policy that is right."""
    return [
        _call("list_files", {}),
        _call("run", {"command": row["command"]}),
        f"#### {row['ground_truth']}",
    ]


def _call(name: str, arguments: dict[str, Any]) -> str:
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


def main() -> None:
    """Write rows to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output", help="a .jsonl or .parquet file")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--difficulty", type=int, default=2, choices=(1, 2, 3))
    args = parser.parse_args()
    write_rows(args.output, rows(args.rows, args.seed, args.difficulty))


if __name__ == "__main__":
    main()
