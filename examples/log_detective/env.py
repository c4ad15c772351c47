"""Log detective: who or what is to blame, found with a shell in a folder of logs.

    python examples/log_detective/env.py data/logs.jsonl --rows 256 --seed 1 --difficulty 2

Every row brings logs of its own, of three services that hand requests on. The difficulty is what
must be put together: 1 counts lines of one file, 2 compares users over all files, 3 follows
requests from one file into another.
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
    "The folder logs/ holds the logs of the services gate, cart and pay, a line a request.\n"
    "{question}\nLook with the tools. Answer with the number, user or request alone, behind ####,"
    " for example: #### u12"
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
    """1 where the last line of the last message is the answer behind ####, and nothing else."""
    lines = trajectory.final_text.strip().splitlines()
    return float(bool(lines) and lines[-1].strip() == f"#### {trajectory.sample.ground_truth}")


def logs(rng: random.Random) -> list[Line]:
    """What the services wrote in an hour; a request that fails goes no further."""
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
    """A question, its answer, and the command that finds it."""

    question: str
    answer: str
    command: str


def case(lines: list[Line], difficulty: int, service: str) -> Case | None:
    """A question of that difficulty; None where these logs leave it open."""
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
            "Which user had the most failed requests (ERROR) in all?",
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
    """Rows of a dataset."""
    rng = random.Random(seed)
    made: list[dict[str, Any]] = []
    while len(made) < count:
        lines = logs(rng)
        asked = case(lines, difficulty, rng.choice(SERVICES))
        if asked is None:
            continue
        files = {
            f"logs/{s}.log": "".join(f"{line}\n" for line in lines if line.service == s)
            for s in SERVICES
        }
        made.append(
            {
                "prompt": [{"role": "user", "content": PROMPT.format(question=asked.question)}],
                "agent_name": "tool_agent",
                "data_source": "examples/log_detective",
                "tools": ["shell"],
                "tools_kwargs": {"shell": {"create_kwargs": {"files": files}}},
                "ground_truth": asked.answer,
                "command": asked.command,
            }
        )
    return made


def gold(row: dict[str, Any]) -> list[str]:
    """What a policy that is right says, turn by turn."""
    return [
        _call("list_files", {}),
        _call("run", {"command": row["command"]}),
        f"#### {row['ground_truth']}",
    ]


def _call(name: str, arguments: dict[str, Any]) -> str:
    called = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{called}\n</tool_call>"


def main() -> None:
    """Write rows to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output", help="a .jsonl or .parquet file")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--difficulty", type=int, default=2, choices=(1, 2, 3))
    given = parser.parse_args()
    write_rows(given.output, rows(given.rows, given.seed, given.difficulty))


if __name__ == "__main__":
    main()
