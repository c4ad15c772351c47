"""Incidents: find the faulty service and the type of incident in metrics and logs, in two turns.

    python examples/aiops/env.py data/aiops_train.jsonl --rows 512 --seed 1 --difficulty 2

In the first turn the assistant reasons, in the second it writes JSON only. The service with the
most errors is not the faulty one: other services wait for the faulty service and log timeouts. The
difficulty is the number of services that wait.

The column `trace`, for `agentrl sft`, is an episode that is right in about a third of the rows, so
that reinforcement learning has something to improve.
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
"""By type of incident: its metrics and its log message."""
ASK = """\
You are on call. Explain in a few sentences which service is at fault and what happened to it. \
Do not write JSON yet.

{evidence}"""
NOW = """\
Now answer with only a JSON object: {{"service": "...", "incident_type": "..."}}. \
Incident types: {types}."""
THOUGHT = "{service} is at fault. Its metrics and its log show {incident_type}."
RIGHT_SHARE = 0.35
"""The share of rows whose `trace` is right."""
MIN_THOUGHT = 40
"""The minimum number of characters of the reasoning."""


@interaction("aiops_report")
class Report(Interaction):
    """Asks for the report after the reasoning, then ends the conversation."""

    def __init__(self) -> None:
        self.has_asked = False

    async def respond(self, messages: Sequence[Message]) -> Reply | None:
        if self.has_asked:
            return None
        self.has_asked = True
        return Reply(question())


def question() -> str:
    """Return the message that asks for the report."""
    return NOW.format(types=", ".join(SYMPTOMS))


@reward("service_incident")
def service_incident(trajectory: Trajectory) -> dict[str, float]:
    """Return 1 if the second turn contains one report and that is right."""
    reports = re.findall(r"\{[^{}]*\}", trajectory.final_text)
    right = (
        len(trajectory.turns) == 2
        and len(reports) == 1
        and parse_report(reports[0]) == trajectory.sample.ground_truth
    )
    return {"score": float(right), "acc": float(right)}


@reward("json_only")
def json_only(trajectory: Trajectory) -> float:
    """Return 1 if the first turn reasons without JSON and the second is only a report."""
    if len(trajectory.turns) != 2:
        return 0.0
    first, last = (m.content.strip() for m in trajectory.answers)
    reasons = len(first) >= MIN_THOUGHT and "{" not in first
    return float(reasons and parse_report(last) is not None)


def parse_report(text: str) -> str | None:
    """Return `service:incident_type` of a report; None if the text is anything else."""
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
    """Return the rows of a dataset; all incidents are different."""
    rng = random.Random(seed)
    rows_by_text: dict[str, dict[str, Any]] = {}
    while len(rows_by_text) < count:
        fault, *others = rng.sample(SERVICES, difficulty + 2)
        kind = rng.choice([*SYMPTOMS])
        text = ASK.format(evidence=evidence(fault, kind, others, rng))
        rows_by_text[text] = {
            "prompt": text,
            "agent_name": "tool_agent",
            "data_source": "examples/aiops",
            "ground_truth": f"{fault}:{kind}",
            "interaction": "aiops_report",
            "trace": conversation(*habit(fault, kind, others, rng)),
        }
    return list(rows_by_text.values())


def evidence(fault: str, kind: str, others: Sequence[str], rng: random.Random) -> str:
    """Return metrics and logs of the faulty service, a healthy one, and those that wait."""
    metrics, log = SYMPTOMS[kind]
    healthy, *waiting = others
    lines = [f"{fault}: {metrics}", f"{healthy}: errors 0% 0% 0%"]
    lines += [f"{w}: errors 2% {rng.randint(50, 69)}% {rng.randint(70, 99)}%" for w in waiting]
    logs = [
        (rng.randint(0, 19), f"{fault} {log}"),
        (rng.randint(20, 59), f"{healthy} GET /health 200"),
    ]
    for before, w in zip([fault, *waiting], waiting, strict=False):
        logs += [
            (rng.randint(20, 59), f"{w} timeout after 5 s, waiting for {before}")
            for _ in range(rng.randint(2, 3))
        ]
    rng.shuffle(lines)
    texts = [f"10:{minute:02d} {text}" for minute, text in sorted(logs)]
    return "\n".join(["Metrics, three readings each:", *lines, "", "Logs:", *texts])


def gold(row: dict[str, Any]) -> list[str]:
    """Return the turns of a policy that is right."""
    text = row["prompt"]
    blamed = re.findall(r"waiting for (\w+)", text)
    waits = set(re.findall(r"(\w+) timeout after", text))
    fault = next((b for b in blamed if b not in waits), "")
    for kind, (metrics, _) in SYMPTOMS.items():
        for service in re.findall(rf"^(\w+): {re.escape(metrics)}$", text, re.MULTILINE):
            fault, incident_type = fault or service, kind
    return [m["content"] for m in conversation(fault, incident_type) if m["role"] == "assistant"]


def conversation(service: str, incident_type: str) -> list[dict[str, str]]:
    """Return an episode's messages after the prompt, with a report that may be wrong."""
    report = {"service": service, "incident_type": incident_type}
    return [
        {"role": "assistant", "content": THOUGHT.format(**report)},
        {"role": "user", "content": question()},
        {"role": "assistant", "content": json.dumps(report)},
    ]


def habit(fault: str, kind: str, others: Sequence[str], rng: random.Random) -> tuple[str, str]:
    """Return the service and type that a hasty engineer reports: right in RIGHT_SHARE of cases.

    The mistakes name another type of incident, and sometimes a service that waits.
    """
    if rng.random() < RIGHT_SHARE:
        return fault, kind
    service = rng.choice(others) if rng.random() < 0.15 else fault
    return service, rng.choice([other for other in SYMPTOMS if other != kind])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--difficulty", type=int, default=2)
    args = parser.parse_args()
    write_rows(args.output, rows(args.rows, args.seed, args.difficulty))
    print(f"{args.rows} rows: {args.output}")
