"""Incidents: from metrics and logs to the service at fault and what befell it, in two turns.

    python examples/aiops/env.py data/aiops_train.jsonl --rows 512 --seed 1 --difficulty 2

First the assistant reasons; then it is asked for JSON and nothing else. The service that cries the
loudest is seldom the one at fault: others wait for it and log timeouts. The difficulty is how many
services do.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Sequence
from typing import Any

from agentrl import Interaction, Message, Reply, Trajectory, interaction, reward
from agentrl.data import write_rows

SERVICES = (
    *("api", "auth", "billing", "cart", "catalog", "gateway", "inventory", "ledger", "mail"),
    *("orders", "payments", "search", "shipping", "users"),
)
SYMPTOMS = {
    "memory_leak": ("memory 71% 84% 97%", "killed by the kernel: out of memory"),
    "disk_full": ("disk 93% 98% 100%", "write failed: no space left on device"),
    "expired_certificate": ("handshakes failed 0% 100% 100%", "certificate has expired"),
    "bad_deploy": ("errors 0% 41% 43% since version 2.8.1", "TypeError in a handler of 2.8.1"),
    "traffic_spike": ("requests 90/s 850/s 2400/s", "queue full, 412 requests refused"),
}
"""By type of incident, what its metrics and its log say."""
ASK = """\
You are on call. Think aloud in a few sentences: which service is at fault, and what befell it? \
Give no JSON yet.

{evidence}"""
NOW = """\
Now answer with a JSON object and nothing else: {{"service": "...", "incident_type": "..."}}. \
Types of incidents: {types}."""
MIN_THOUGHT = 40
"""Characters of reasoning, less is none."""


@interaction("aiops_report")
class Report(Interaction):
    """Hears the reasoning, asks for the report, and has no more to say."""

    def __init__(self) -> None:
        self.asked = False

    async def respond(self, messages: Sequence[Message]) -> Reply | None:
        if self.asked:
            return None
        self.asked = True
        return Reply(NOW.format(types=", ".join(SYMPTOMS)))


@reward("service_incident")
def service_incident(trajectory: Trajectory) -> dict[str, float]:
    """1 where the last of two turns holds one report, and that is service:incident_type."""
    found = re.findall(r"\{[^{}]*\}", trajectory.final_text)
    right = (
        len(trajectory.turns) == 2
        and len(found) == 1
        and reported(found[0]) == trajectory.sample.ground_truth
    )
    return {"score": float(right), "acc": float(right)}


@reward("json_only")
def json_only(trajectory: Trajectory) -> float:
    """1 where the first turn reasons without JSON, and the second is a report and nothing else."""
    if len(trajectory.turns) != 2:
        return 0.0
    first, last = (m.content.strip() for m in trajectory.answers)
    reasons = len(first) >= MIN_THOUGHT and "{" not in first
    return float(reasons and reported(last) is not None)


def reported(text: str) -> str | None:
    """`service:incident_type` of a report; None of anything else, lists and doubled keys too."""
    try:
        pairs = json.loads(text, object_pairs_hook=lambda pairs: pairs)
    except (ValueError, RecursionError):
        return None
    if not isinstance(pairs, list) or len(pairs) != 2:
        return None
    report = {k: v for k, v in pairs if isinstance(k, str) and isinstance(v, str)}
    if report.keys() != {"service", "incident_type"} or report["incident_type"] not in SYMPTOMS:
        return None
    return f"{report['service']}:{report['incident_type']}"


def rows(count: int, seed: int, difficulty: int = 2) -> list[dict[str, Any]]:
    """Rows of a dataset; no incident comes twice."""
    rng = random.Random(seed)
    made: dict[str, dict[str, Any]] = {}
    while len(made) < count:
        fault, *others = rng.sample(SERVICES, difficulty + 2)
        kind = rng.choice([*SYMPTOMS])
        text = ASK.format(evidence=evidence(fault, kind, others, rng))
        made[text] = {
            "prompt": text,
            "agent_name": "tool_agent",
            "data_source": "examples/aiops",
            "ground_truth": f"{fault}:{kind}",
            "interaction": "aiops_report",
        }
    return list(made.values())


def evidence(fault: str, kind: str, others: Sequence[str], rng: random.Random) -> str:
    """Metrics and logs: the fault, a service that is well, and those that wait for the fault."""
    metrics, log = SYMPTOMS[kind]
    well, *waiting = others
    lines = [f"{fault}: {metrics}", f"{well}: errors 0% 0% 0%"]
    lines += [f"{w}: errors 2% {rng.randint(50, 69)}% {rng.randint(70, 99)}%" for w in waiting]
    logs = [
        (rng.randint(0, 19), f"{fault} {log}"),
        (rng.randint(20, 59), f"{well} GET /health 200"),
    ]
    for before, w in zip([fault, *waiting], waiting, strict=False):
        logs += [
            (rng.randint(20, 59), f"{w} timeout after 5 s, waiting for {before}")
            for _ in range(rng.randint(2, 3))
        ]
    rng.shuffle(lines)
    told = [f"10:{minute:02d} {text}" for minute, text in sorted(logs)]
    return "\n".join(["Metrics, three readings each:", *lines, "", "Logs:", *told])


def gold(row: dict[str, Any]) -> list[str]:
    """What a policy that is right says, turn by turn: it reads who waits for whom."""
    text = row["prompt"]
    blamed = re.findall(r"waiting for (\w+)", text)
    waits = set(re.findall(r"(\w+) timeout after", text))
    fault = next((b for b in blamed if b not in waits), "")
    for kind, (metrics, _) in SYMPTOMS.items():
        for service in re.findall(rf"^(\w+): {re.escape(metrics)}$", text, re.MULTILINE):
            fault, found = fault or service, kind
    report = json.dumps({"service": fault, "incident_type": found})
    return [f"Others wait for {fault}, and of {fault} itself the metrics say: {found}.", report]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--difficulty", type=int, default=2)
    given = parser.parse_args()
    write_rows(given.output, rows(given.rows, given.seed, given.difficulty))
    print(f"{given.rows} rows: {given.output}")
