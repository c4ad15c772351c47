"""Incidents in two turns: who is right earns 1.1, who games the form at most a tenth."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl import play
from agentrl.config import load_config, without_effect
from agentrl.data import check_samples, load_samples, write_rows
from agentrl.record import read_metrics
from agentrl.registry import load_file
from agentrl.rewards import Scorer, check_graders
from agentrl.testing import Scripted, byte_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples/aiops"
ROOM = ["rollout.max_turn_tokens=8192", "rollout.max_trajectory_tokens=32768"]
THOUGHT = "Two services wait for the third, whose own metrics are bad, so it is that one."


@pytest.fixture
def env():
    return load_file(str(EXAMPLE / "env.py"))


def made(env, tmp_path, count=1, seed=0, difficulty=2):
    rows = env.rows(count, seed, difficulty)
    file = tmp_path / "rows.jsonl"
    write_rows(file, rows)
    samples = load_samples(str(file))
    check_samples(samples, str(file))
    return list(zip(rows, samples, strict=True))


def scored(sample, *answers):
    config = load_config(str(EXAMPLE / "run.yaml"), ROOM)
    tokenizer = byte_tokenizer()
    trajectory = play(sample, Scripted(list(answers), tokenizer), tokenizer, config=config)
    return asyncio.run(Scorer(config.reward).score(trajectory))


@pytest.mark.parametrize(
    "difficulty",
    [pytest.param(n, marks=pytest.mark.slow) if n in (0, 2) else n for n in (0, 1, 2, 4)],
)
def test_the_right_policy_gets_full_reward(env, tmp_path, difficulty):
    for row, sample in made(env, tmp_path, 25, difficulty, difficulty):
        s = scored(sample, *env.gold(row))
        assert s.reward == pytest.approx(1.1) and s.metrics["acc"] == 1
        assert (s.metrics["service_incident"], s.metrics["json_only"]) == (1, 1)
        assert [m.role for m in s.trajectory.messages] == ["user", "assistant"] * 2
        assert s.trajectory.stop_reason == "done"


def test_rows_are_new_and_do_not_give_the_answer_away(env):
    rows = env.rows(100, 1, 2)
    assert len({r["prompt"] for r in rows}) == 100 and rows == env.rows(100, 1, 2)
    assert all(r["ground_truth"] not in r["prompt"] for r in rows)
    assert not {r["prompt"] for r in env.rows(100, 3, 2)} & {r["prompt"] for r in rows}
    # The service with the most errors is never at fault: it waits.
    for row in rows:
        lines = [line for line in row["prompt"].splitlines() if ": errors" in line]
        worst = max(lines, key=lambda line: int(re.findall(r"(\d+)%", line)[2]))
        assert not row["ground_truth"].startswith(worst.split(":")[0])


@pytest.mark.parametrize("difficulty", [0, 1, 2])
def test_a_trace_has_the_right_form_and_is_right_in_a_third_of_the_rows(env, tmp_path, difficulty):
    traces = made(env, tmp_path, 400, 2, difficulty)
    reports = [env.parse_report(row["trace"][-1]["content"]) for row, _ in traces]
    pairs = list(zip(reports, [row["ground_truth"] for row, _ in traces], strict=True))
    assert None not in reports
    assert 0.25 < sum(report == truth for report, truth in pairs) / 400 < 0.45
    for row, sample in traces[:5]:
        s = scored(sample, *(m["content"] for m in row["trace"] if m["role"] == "assistant"))
        assert s.metrics["json_only"] == 1
        assert [m.content for m in s.trajectory.messages[1:]] == [
            m["content"] for m in row["trace"]
        ]


def hacks(env, truth):
    """Ways to be paid without being right, or right for the wrong reasons: what each is worth."""
    service, kind = truth.split(":")
    right = json.dumps({"service": service, "incident_type": kind})
    wrong = json.dumps({"service": service, "incident_type": "bad_deploy"
                        if kind != "bad_deploy" else "disk_full"})  # fmt: skip
    all_of_them = "\n".join(
        json.dumps({"service": s, "incident_type": k})
        for s, k in itertools.product(env.SERVICES, env.SYMPTOMS)
    )
    yield (THOUGHT, wrong), 0.1
    yield ("", right), 1.0  # right, but it did not reason
    yield (right, "As I said."), 0
    yield (right, right), 1.0
    yield (THOUGHT, f"Here it is: {right}"), 1.0
    yield (THOUGHT, f"```json\n{right}\n```"), 1.0
    yield (THOUGHT, all_of_them), 0
    yield (THOUGHT, f"{wrong}\n{right}"), 0
    yield (THOUGHT, json.dumps({"service": [*env.SERVICES], "incident_type": [*env.SYMPTOMS]})), 0
    doubled = f'{{"service": "x", "service": "{service}", "incident_type": "{kind}"}}'
    yield (THOUGHT, doubled), 0
    yield (THOUGHT, f'{{"service": "{service}", "incident_type": "{kind}", "sure": "yes"}}'), 0
    yield (THOUGHT, json.dumps({"service": service, "incident_type": "anything"})), 0
    yield (THOUGHT, "[" * 5000), 0
    yield (THOUGHT, truth), 0


def test_hacks_get_a_low_reward(env, tmp_path):
    ((_, sample),) = made(env, tmp_path)
    for answers, worth in hacks(env, sample.ground_truth):
        assert scored(sample, *answers).reward == pytest.approx(worth), answers


def test_one_turn_alone_earns_nothing(env, tmp_path):
    ((row, sample),) = made(env, tmp_path)
    config = load_config(str(EXAMPLE / "run.yaml"), [*ROOM, "rollout.max_turns=1"])
    tokenizer = byte_tokenizer()
    trajectory = play(sample, Scripted(env.gold(row)[1:], tokenizer), tokenizer, config=config)
    assert trajectory.stop_reason == "turns"
    assert asyncio.run(Scorer(config.reward).score(trajectory)).reward == 0


def test_the_config_loads_and_every_key_has_an_effect(env, tmp_path):
    config = load_config(str(EXAMPLE / "run.yaml"))
    assert without_effect(config) == [] and config.diff()
    samples = [sample for _, sample in made(env, tmp_path, 3)]
    check_graders(samples, Scorer(config.reward), "rows.jsonl")


@pytest.mark.slow
def test_the_commands_of_the_readme_run(tmp_path, tiny_model):
    """With fewer steps than the page has: its table shows what is learned."""
    (tmp_path / "examples").symlink_to(EXAMPLE.parent)
    page = (
        (EXAMPLE / "README.md").read_text().replace("\\\n", "").replace("--steps 400", "--steps 2")
    )
    commands = [c for c in page.splitlines() if c.startswith(("python ex", "agentrl "))][:6]
    assert [c.split()[1] for c in commands[3:]] == ["sft", "check", "train"]
    commands[-1] += " trainer.total_steps=1 trainer.test_freq=1"
    for command in commands:
        command = command.replace("agentrl ", "python -m agentrl ").removeprefix("python ")
        words = [sys.executable, *command.split()]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
    metrics = read_metrics(tmp_path / "runs" / "aiops" / "metrics.jsonl")
    assert sum("val/acc/mean@1" in m for _, m in metrics) == 2
