"""Each shipped diagnosis, on tables that are built by hand: it fires, and on healthy ones not."""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from agentrl.config import FIELDS
from agentrl.report import Finding, Run, diagnose, diagnoses
from agentrl.report.behaviour import BEHAVIOUR_SCHEMA, ends_with_truth
from agentrl.report.episodes import Episodes, without_group_means
from agentrl.report.finding import ALARMS
from agentrl.report.run import metrics_table

N = 40
"""The steps of the runs here."""
EPISODE = {
    "split": "train",
    "group": 0,
    "sample_id": "s",
    "agent_name": "tool_agent",
    "data_source": "d",
    "prompt": "How many?",
    "masked": False,
    "stop_reason": "done",
    "has_tools": True,
    "turns": 2,
    "tool_calls": 1,
    "failed_calls": 0,
    "repeated_calls": 0,
    "sampled_tokens": 20,
    "ground_truth": None,
    "started": 0.0,
    "seconds": 1.0,
    "queue_seconds": 0.0,
    "generate_seconds": 0.7,
    "tool_seconds": 0.2,
    "reward_seconds": 0.1,
    "interaction_seconds": 0.0,
    "open_seconds": 0.0,
    "tool_times": [],
}


def noisy(values: Any, seed: int = 0, scale: float = 0.02) -> list[float]:
    """Add noise between steps to a metric."""
    values = np.broadcast_to(np.asarray(values, float), (N,))
    return list(values + np.random.default_rng(seed).normal(0, scale, N) * np.abs(values).max())


def ramp(first: float, last: float) -> np.ndarray:
    return np.linspace(first, last, N)


def learning(**changes: Any) -> dict[str, Any]:
    """Return the metrics of a healthy run, with changes; None removes a metric."""
    metrics = {
        "critic/score/mean": noisy(ramp(0.2, 0.7)),
        "critic/score/min": [0.0] * N,
        "critic/score/max": [1.0] * N,
        "waste/dead_group_frac": noisy(0.4, 1),
        "waste/dead_step": [0.0] * N,
        "response_length/mean": noisy(ramp(60, 70), 2),
        "rollout/tool_agent/tool_call_rate": noisy(0.9, 3),
        "rollout/tool_agent/reward": noisy(ramp(0.2, 0.7)),
        "actor/ppo_kl": noisy(1e-3, 4, 0.3),
        "actor/pg_clipfrac": noisy(0.01, 5, 0.3),
        "actor/grad_norm": noisy(0.2, 6, 0.3),
        "actor/lr": [1e-4] * N,
        "canary/drift": noisy(0.05, 7, 0.2),
        "rollout_corr/logprob_diff_mean": noisy(0.015, 8, 0.1),
        "rollout_corr/logprob_diff_mean/turn_1": noisy(0.014, 9, 0.1),
        "rollout_corr/logprob_diff_mean/turn_2": noisy(0.02, 10, 0.1),
        "rollout_corr/logprob_diff_mean/after_observation": noisy(0.02, 11, 0.1),
        "rollout/dropped": [0.0] * N,
        "stop/done": [0.95] * N,
        "stop/turn_tokens": [0.05] * N,
    }
    changed = metrics | changes
    return {name: values for name, values in changed.items() if values is not None}


def make_run(metrics: dict[str, Any], episodes: Sequence[dict[str, Any]] = ()) -> Run:
    length = max((len(v) for v in metrics.values()), default=0)
    record = [
        (i + 1, {k: v[i] for k, v in metrics.items() if v[i] is not None}) for i in range(length)
    ]
    rows = [
        EPISODE | {"episode_id": f"e{i}", "answer": f"a{i}", "reward": float(i % 2)} | episode
        for i, episode in enumerate(episodes)
    ]
    for row in rows:
        truth = row.get("ground_truth")
        row["right"] = ends_with_truth(row["answer"], truth) if truth else None
    run = Run(Path("runs/none"))
    run.__dict__.update(
        metrics=metrics_table(record), behaviour=pa.Table.from_pylist(rows, BEHAVIOUR_SCHEMA)
    )
    run.__dict__["config"] = {"data": {"batch_size": 8}, "rollout": {"n": 8}}
    return run


def alarms(run: Run) -> list[Finding]:
    return [finding for finding in diagnose(run) if finding.severity in ALARMS]


def the_alarm(run: Run) -> Finding:
    [finding] = alarms(run)
    return finding


def test_a_healthy_run_has_no_alarm():
    assert alarms(make_run(learning())) == []


def never(**changes: Any) -> list[dict[str, Any]]:
    """Return the episodes of a run in which those of react fail and the others succeed."""
    rollouts = []
    for step, k in itertools.product(range(1, N + 1), range(4)):
        common = {"step": step, "group": k, "sample_id": f"{step}/{k}"}
        rollouts.append(common | {"reward": 1.0, "answer": "#### 4"})
        common |= {"group": k + 4, "agent_name": "react", "answer": f"{k}?"}
        rollouts.append(common | {"reward": 0.0} | changes)
    return rollouts


@pytest.mark.parametrize(
    ("changes", "severity", "clause", "cause"),
    [
        ({}, "warning", "", "too hard"),
        (
            {"answer": "so it is #### 17", "ground_truth": "17.0"},
            "error",
            "100% of them end",
            "not",
        ),
        ({"answer": "The cat sat.", "ground_truth": "cat sat"}, "error", "'cat sat'", "not accept"),
        ({"answer": "The cat sat.", "ground_truth": "cat"}, "warning", "", "too hard"),
        ({"stop_reason": "turns"}, "warning", "'turns' cuts 100%", "rollout.max_turns"),
        ({"failed_calls": 1}, "warning", "tool call fails in 100%", "of these rows do not work"),
    ],
)
def test_rows_that_never_earn(changes, severity, clause, cause):
    found = alarms(make_run(learning(), never(**changes)))
    [finding] = [f for f in found if f.name == "unrewarded"]
    assert finding.severity == severity
    assert finding.text.startswith("none of 160 rollouts of react earned more than the smallest")
    assert clause in finding.text and cause in finding.causes[0]


def test_rows_that_earn_sometimes_have_no_alarm():
    rollouts = never()
    for rollout in rollouts[1::50]:
        rollout["reward"] = 1.0
    assert "unrewarded" not in [f.name for f in alarms(make_run(learning(), rollouts))]


def test_steps_that_jump():
    drift = [2.0, 0.0, 1.0, None, 0.6, *[0.05] * (N - 5)]
    finding = the_alarm(make_run(learning(**{"canary/drift": drift})))
    assert (finding.name, finding.subject, finding.step) == ("unstable_update", "drift", 1)
    assert finding.evidence["drift"] == pytest.approx(1.2)
    drift = [0.4, 0.45, 0.6, 0.4, *[0.05] * (N - 4)]
    assert not alarms(make_run(learning(**{"canary/drift": drift})))


@pytest.mark.parametrize("name", ["sampled_tokens", "tool_calls"])
def test_a_reward_that_pays_for_length_or_calls_is_audited(name):
    def rollouts(noise: float) -> list[dict[str, Any]]:
        rng = np.random.default_rng(0)
        return [
            {"step": step, "group": group, "sample_id": f"{step}/{group}", name: k, "answer": "?"}
            | {"reward": 5.0 * group + k + noise * rng.normal()}
            for step, group, k in itertools.product(range(1, N + 1), range(4), range(1, 9))
        ]

    def subjects(noise: float) -> list[str]:
        run = make_run(learning(**{"critic/score/max": [30.0] * N}), rollouts(noise))
        return [f.subject for f in diagnose(run) if f.name == "audit"]

    assert name in subjects(0.1) and name not in subjects(10.0)


def test_the_entropy_explodes():
    metrics = learning(
        **{"critic/score/mean": noisy(0.3), "actor/entropy": list(ramp(0.1, 2.5))},
    )
    [finding] = [f for f in alarms(make_run(metrics)) if f.name == "entropy"]
    assert finding.evidence["first"] == pytest.approx(0.1) and finding.evidence["last"] > 2
    falling = learning(**{"actor/entropy": list(ramp(0.8, 0.1))})
    rising = learning(**{"actor/entropy": list(ramp(0.5, 1.5))})
    assert not alarms(make_run(falling)) and not alarms(make_run(rising))


def test_dead_groups_of_solved_rows_are_a_note():
    """Some rewards are larger than that of a right answer, so the mean does not show it."""
    metrics = learning(**{"waste/dead_group_frac": noisy(0.9), "critic/score/max": [2.0] * N})
    solved = [r | {"reward": 1.0} for r in never()]
    [finding] = [f for f in diagnose(make_run(metrics, solved)) if f.name == "dead_groups"]
    assert finding.severity == "note"
    [finding] = [f for f in diagnose(make_run(metrics, never())) if f.name == "dead_groups"]
    assert finding.severity == "warning" and "in 50% all rollouts fail" in finding.text


@pytest.mark.parametrize("steps", [0, 1, 4, 5, 9, 10, 11])
def test_short_runs_have_no_alarm(steps):
    assert alarms(make_run({name: values[:steps] for name, values in learning().items()})) == []


def test_a_run_without_metrics_has_no_finding():
    assert diagnose(make_run({})) == []


@pytest.mark.parametrize("seed", range(5))
def test_noise_without_a_trend_has_no_alarm(seed):
    """Very noisy rewards and lengths: 30 % between steps."""
    reward = noisy(0.5, seed, 0.3)
    metrics = learning(
        **{
            "critic/score/mean": reward,
            "rollout/tool_agent/reward": reward,
            "response_length/mean": noisy(80, seed + 50, 0.3),
            "rollout/tool_agent/tool_call_rate": noisy(0.5, seed + 60, 0.3),
        }
    )
    assert alarms(make_run(metrics)) == []


def test_a_solved_run_has_a_note_and_no_alarm():
    metrics = learning(
        **{
            "critic/score/mean": list(ramp(0.3, 1.0).clip(0, 0.98)),
            "waste/dead_group_frac": [0.3] * 10 + [0.95] * 30,
            "waste/dead_step": [0.0] * 30 + [1.0] * 10,
        }
    )
    findings = diagnose(make_run(metrics))
    assert [(f.name, f.severity) for f in findings] == [("dead_groups", "note")]
    assert findings[0].step == 9  # the first ten steps whose mean is 80 %


def test_dead_steps_name_the_budget():
    metrics = learning(
        **{
            "waste/dead_step": [0.0] * 5 + [1.0] * 4 + [0.0] * 31,
            "waste/dead_group_frac": [0.2] * 5 + [0.25] * 4 + [0.2] * 31,
            "stop/done": [0.1] * N,
            "stop/turns": [0.9] * N,
            "stop/turn_tokens": None,
        }
    )
    finding = next(f for f in alarms(make_run(metrics)) if f.name == "dead_groups")
    assert (finding.severity, finding.step) == ("error", 6)
    assert "steps 6 to 9 had no learning signal" in finding.text
    assert "equal in 25% of the groups, rollouts of the others are masked" in finding.text
    assert "'turns' (90% of the rollouts)" in finding.text
    assert "rollout.budget_policy.turns=keep" in finding.tries


def test_two_dead_steps_are_no_alarm():
    assert alarms(make_run(learning(**{"waste/dead_step": [1.0, 1.0] + [0.0] * 38}))) == []


def test_a_reward_that_never_matches():
    zeros = [0.0] * N
    metrics = learning(
        **{
            "critic/score/mean": zeros,
            "critic/score/max": zeros,
            "waste/dead_step": [1.0] * N,
            "waste/dead_group_frac": [1.0] * N,
            "rollout/tool_agent/reward": zeros,
        }
    )
    finding = the_alarm(make_run(metrics))
    assert finding.name == "dead_groups"
    assert "every rollout of the run has the reward 0" in finding.causes[0]


def test_many_dead_groups():
    metrics = learning(**{"waste/dead_group_frac": [0.5] * 20 + [0.9] * 20})
    finding = the_alarm(make_run(metrics))
    assert (finding.name, finding.step, finding.severity) == ("dead_groups", 19, "warning")


@pytest.mark.parametrize(
    ("changes", "subject"),
    [
        ({"/turn_2": noisy(0.06, 1, 0.1)}, "turns"),
        ({"/after_observation": noisy(0.09, 1, 0.1)}, "after_observation"),
        ({"": noisy(0.07, 1, 0.1)}, ""),
        ({"": noisy(np.r_[np.full(20, 1e-6), np.full(20, 4e-3)], 1)}, ""),
    ],
)
def test_mismatch(changes, subject):
    names = {f"rollout_corr/logprob_diff_mean{key}": values for key, values in changes.items()}
    others = {
        "": {
            f"rollout_corr/logprob_diff_mean/{t}": None
            for t in ("turn_1", "turn_2", "after_observation")
        }
    }
    finding = the_alarm(make_run(learning(**names, **(others.get(subject, {})))))
    assert (finding.name, finding.subject) == ("mismatch", subject)


@pytest.mark.parametrize(
    "changes",
    [
        {"/turn_1": noisy(0.002, 1, 0.1), "/turn_2": noisy(0.007, 2, 0.1)},
        {"": noisy(0.01, 1, 0.1), "/after_observation": noisy(0.04, 2, 0.1)},
        {"": noisy(np.r_[np.full(20, 2e-3), np.full(20, 0.06)], 1)},
    ],
)
def test_rounding_of_uncertain_tokens_is_no_mismatch(changes):
    changed = {f"rollout_corr/logprob_diff_mean{key}": values for key, values in changes.items()}
    assert the_alarm(make_run(learning(**changed))).name == "mismatch"
    changed["canary/rounding"] = [0.1] * N
    assert alarms(make_run(learning(**changed))) == []
    changed["rollout_corr/logprob_diff_mean/after_observation"] = noisy(0.3, 2, 0.1)
    assert the_alarm(make_run(learning(**changed))).name == "mismatch"


def test_older_tokens_are_no_mismatch():
    run = make_run(learning(**{"rollout_corr/logprob_diff_mean": noisy(0.07, 1, 0.1)}))
    assert the_alarm(run).name == "mismatch"
    run.__dict__["config"] |= {"trainer": {"max_staleness": 1}}
    assert alarms(run) == []


def test_errors_of_an_agent():
    found = the_alarm(make_run(learning(**{"stop/agent_error": [0.3] * N})))
    assert found.name == "agent_error" and found.evidence == {"agent_errors": pytest.approx(0.3)}
    assert alarms(make_run(learning(**{"stop/agent_error": [0.9] + [0.1] * (N - 1)}))) == []


def test_lost_rollouts():
    assert the_alarm(make_run(learning(**{"rollout/dropped": [2.0] * N}))).name == "dropped"
    assert alarms(make_run(learning(**{"rollout/dropped": [2.0] + [0.0] * 39}))) == []


def cut_episodes(reward_of_cut: float, reason: str) -> list[dict[str, Any]]:
    """Half of the rollouts of 20 rows in each of 10 steps are cut."""
    return [
        {
            "step": 31 + step,
            "sample_id": f"s{row}",
            "stop_reason": reason if k else "done",
            "reward": reward_of_cut if k else 0.5 + 0.01 * row,
        }
        for step in range(10)
        for row in range(20)
        for k in (0, 1)
    ]


@pytest.mark.parametrize("reason", ["turn_tokens", "turns"])
def test_truncation_counts_if_cut_rollouts_earn_less(reason):
    metrics = learning(**{"stop/turn_tokens": None, f"stop/{reason}": [0.05] * 20 + [0.5] * 20})
    finding = the_alarm(make_run(metrics, cut_episodes(0.0, reason)))
    assert (finding.name, finding.subject, finding.severity) == ("truncation", reason, "warning")
    assert f"raise rollout.max_{reason}" in finding.tries
    assert len(finding.episodes) == 5
    assert alarms(make_run(metrics, cut_episodes(1.0, reason))) == []


def test_truncation_of_a_run_without_trajectories():
    metrics = learning(**{"stop/turn_tokens": [0.8] * N})
    assert the_alarm(make_run(metrics)).severity == "error"
    assert alarms(make_run(learning(**{"stop/turns": [0.8] * N}))) == []


@pytest.mark.parametrize(
    ("error", "share", "fires"),
    [
        ("timeout", 0.2, True),
        ("timeout", 0.02, False),
        ("bad_call", 0.6, True),
        ("schema", 0.4, False),
    ],
)
def test_tool_errors(error, share, fires):
    found = [f.subject for f in alarms(make_run(learning(**{f"tool_error/{error}": [share] * N})))]
    assert found == ([error] if fires else [])


def test_a_tool_whose_every_call_crashes_is_the_first_finding():
    """Also in a run of three steps that has other errors, such as equal rewards."""
    broken = {"reward": 0.0, "broken_tools": ["run", "run"], "working_tools": ["search"]}
    episodes = [{"step": s, "failed_turn": 1, **broken} for s in (1, 2, 2, 3) for _ in range(8)]
    metrics = {"critic/score/mean": [0.0] * 3, "waste/dead_step": [1.0] * 3}
    first, *others = diagnose(make_run(metrics, episodes))
    assert (first.name, first.severity, first.subject) == ("tool_errors", "error", "run")
    assert "every valid call of the tool 'run' crashes or times out (64 of 64)" in first.text
    assert first.step == 1 and first.turns == [1] * len(first.episodes)
    assert "run" not in [f.subject for f in others]
    # One call that works, or few calls, are no proof.
    assert not alarms(make_run(learning(), [*episodes, {"step": 3, "working_tools": ["run"]}]))
    assert not alarms(make_run(learning(), episodes[:2]))


def test_tool_use_dies_out():
    rate = noisy(np.r_[np.full(10, 0.9), np.linspace(0.9, 0.05, 20), np.full(10, 0.05)], 1)
    flat = noisy(0.3, 2)
    metrics = learning(
        **{
            "rollout/tool_agent/tool_call_rate": rate,
            "rollout/tool_agent/reward": flat,
        }
    )
    episodes = [{"step": s, "tool_calls": 0} for s in range(1, N + 1)]
    finding = the_alarm(make_run(metrics, episodes))
    assert (finding.name, finding.subject) == ("tool_use", "tool_agent")
    assert 15 <= finding.step <= 25 and finding.episodes
    risen = metrics | {"rollout/tool_agent/reward": noisy(ramp(0.2, 0.7))}
    assert alarms(make_run(risen, episodes)) == []  # it is listed for audit
    assert "tool_use" in [
        f.name for f in diagnose(make_run(risen, episodes)) if f.severity == "audit"
    ]


def test_tools_that_are_never_called():
    metrics = learning(
        **{
            "rollout/tool_agent/tool_call_rate": [0.0] * N,
            "critic/score/mean": noisy(0.3, 1),
            "actor/ppo_kl": None,
            "canary/drift": None,
        }
    )
    names = [f.name for f in alarms(make_run(metrics, [{"step": 1, "tool_calls": 0}]))]
    assert "tool_use" in names
    without = [{"step": 1, "tool_calls": 0, "has_tools": False}]
    assert "tool_use" not in [f.name for f in alarms(make_run(metrics, without))]


def test_tool_use_dies_out_because_short_rollouts_pay():
    """A reward that takes off 0.02 a token, more than a right answer brings."""
    rate = np.r_[np.full(10, 0.9), np.zeros(N - 10)]
    metrics = learning(
        **{
            "rollout/tool_agent/tool_call_rate": rate,
            "rollout/tool_agent/reward": noisy(ramp(-1.5, 0.1)),
            "critic/score/min": [-2.0] * N,
        }
    )
    rollouts = [
        {"step": s, "group": 0, "tool_calls": int(s <= 10), "sampled_tokens": 10 * (k + 1)}
        | {"reward": float(k % 2) - 0.02 * 10 * (k + 1)}
        for s, k in itertools.product(range(1, N + 1), range(8))
    ]
    [finding] = [f for f in diagnose(make_run(metrics, rollouts)) if f.name == "tool_use"]
    assert finding.causes[0].startswith("a penalty for calls, turns or length")
    assert finding.evidence["length_correlation"] < -0.3
    free = [r | {"reward": float(r["sampled_tokens"] // 10 % 5) / 4} for r in rollouts]
    [finding] = [f for f in diagnose(make_run(metrics, free)) if f.name == "tool_use"]
    assert "length_correlation" not in finding.evidence


@pytest.mark.parametrize("last, fires", [(0.0, True), (0.28, False)])
def test_one_large_update_after_which_the_reward_falls(last, fires):
    metrics = learning(
        **{
            "canary/drift": np.r_[1.2, noisy(0.05, 7, 0.2)[1:]],
            "critic/score/mean": np.r_[0.3, noisy(last, 3)[1:]],
            "rollout/tool_agent/reward": None,
        }
    )
    found = [f for f in alarms(make_run(metrics)) if f.name == "unstable_update"]
    assert [(f.step, f.severity) for f in found] == ([(1, "error")] if fires else [])


@pytest.mark.parametrize("drift, fires", [(0.28, True), (0.12, False)])
def test_large_updates_and_an_agent_loop_whose_reward_falls(drift, fires):
    metrics = learning(
        **{
            "canary/drift": np.r_[noisy(drift, 7, 0.05)[:12], noisy(0.05, 8, 0.2)[12:]],
            "rollout/react/reward": noisy(np.r_[np.full(12, 0.6), np.zeros(N - 12)], 4, 0.02),
        }
    )
    long_after = np.r_[noisy(0.05, 8, 0.2)[:30], noisy(drift, 7, 0.05)[30:]]
    assert alarms(make_run(metrics | {"canary/drift": long_after})) == []
    found = [f for f in alarms(make_run(metrics)) if f.name == "unstable_update"]
    assert len(found) == fires
    if fires:
        assert "the reward of react fell from 0.6" in found[0].text
        healthy = metrics | {"rollout/react/reward": noisy(ramp(0.2, 0.6), 4, 0.02)}
        assert alarms(make_run(healthy)) == []  # the updates did no harm


@pytest.mark.parametrize("failing, fires", [(5, True), (3, False)])
def test_dead_groups_reports_rows_that_always_fail(failing, fires):
    """Each step has eight rows. Some always fail, and the policy solves the others."""
    rollouts = [
        {"step": s, "group": g, "reward": float(g >= failing and k < 7)}
        for s, g, k in itertools.product(range(1, N + 1), range(8), range(8))
    ]
    found = alarms(make_run(learning(), rollouts))
    assert [(f.name, f.subject) for f in found] == ([("dead_groups", "rows")] if fires else [])
    if fires:
        assert "in steps 21 to 40 all rollouts fail in 62% of the groups" in found[0].text


@pytest.mark.parametrize("budget, fires", [("trajectory_tokens", True), ("turns", False)])
def test_truncation_reports_a_budget_that_cuts_all_rollouts_with_two_calls(budget, fires):
    """The policy learns to answer without the calls that it needs, so few rollouts are cut."""
    rollouts = [
        {"step": s, "group": g, "tool_calls": 2 if k == 0 else 0, "reward": float(k == 7 > g)}
        | {"stop_reason": budget if k == 0 else "done"}
        for s, g, k in itertools.product(range(1, N + 1), range(3), range(8))
    ]
    metrics = learning(
        **{"critic/score/mean": noisy(0.1, 1, 0.02), f"stop/{budget}": [0.125] * N},
        **{"rollout/tool_agent/reward": noisy(0.1, 1, 0.02)},
    )
    found = [f for f in alarms(make_run(metrics, rollouts)) if f.name == "truncation"]
    assert [f.subject for f in found] == ([f"{budget} and calls"] if fires else [])


@pytest.mark.parametrize(
    "truth, reward_of, fires",
    [
        ("19.0", lambda right, g: float(right and g > 2), True),  # rows 0 to 2 reject them
        ("19", lambda right, g: float(right), False),
        ("19", lambda right, g: float(g % 2), False),  # not for the answer
        ("19", lambda right, g: 0.0, True),
        ("19", lambda right, g: 1.0, False),
    ],
    ids=["some rejected", "exact", "another reward", "all rejected", "all accepted"],
)
def test_rejected_answers_reports_right_answers_if_the_reward_is_for_the_answer(
    truth, reward_of, fires
):
    rollouts = [
        {"step": s, "group": g, "ground_truth": truth, "answer": f"#### {19 if k < 3 else k}"}
        | {"reward": reward_of(k < 3, g)}
        for s, g, k in itertools.product(range(1, N + 1), range(8), range(8))
    ]
    rewards = [r["reward"] for r in rollouts]
    metrics = learning(
        **{"critic/score/min": [min(rewards)] * N, "critic/score/max": [max(rewards)] * N}
    )
    if not any(rewards):
        metrics |= {"critic/score/mean": [0.0] * N, "waste/dead_step": [1.0] * N}
    found = [f for f in alarms(make_run(metrics, rollouts)) if f.name == "rejected_answers"]
    assert len(found) == fires
    if fires:
        assert (
            f"the answer '#### 19' to the ground truth {truth!r} has the reward 0" in found[0].text
        )
        assert alarms(make_run(metrics, rollouts))[0].name == "rejected_answers"


@pytest.mark.parametrize("cut_reward, fires", [(0.0, True), (1.0, False)])
def test_a_budget_that_cuts_one_agent_loop(cut_reward, fires):
    rollouts = [
        {"step": s, "group": g, "sample_id": f"{s}/{g}", "agent_name": "react" if g < 2 else "a"}
        | {"stop_reason": "trajectory_tokens" if g < 2 and k < 5 else "done"}
        | {"reward": cut_reward if g < 2 and k < 5 else float((k + g) % 4 > 0)}
        for s, g, k in itertools.product(range(1, N + 1), range(8), range(8))
    ]
    metrics = learning(**{"stop/trajectory_tokens": [0.16] * N})
    found = [f for f in alarms(make_run(metrics, rollouts)) if f.name == "truncation"]
    assert len(found) == fires
    if fires:
        assert "cuts 62% of the rollouts of react" in found[0].text


def calls(repeated: int) -> list[dict[str, Any]]:
    return [
        {
            "step": s,
            "tool_calls": 4,
            "repeated_calls": repeated if s > 20 else 0,
            "repeated_turn": 1,
        }
        for s in range(1, N + 1)
        for _ in range(4)
    ]


def test_repeated_calls():
    finding = the_alarm(make_run(learning(), calls(2)))
    assert (finding.name, finding.step) == ("repeated_calls", 16)  # the first window that has 25 %
    assert finding.evidence["share"] == 0.5
    assert set(finding.turns) == {1} and len(finding.turns) == len(finding.episodes) > 0
    assert alarms(make_run(learning(), calls(0))) == []


@pytest.mark.parametrize("pays", [True, False])
def test_repeated_calls_that_earn_more_are_paid_by_the_reward(pays):
    rows = [row | {"repeated_calls": 3 * (i % 2)} for i, row in enumerate(calls(0))]
    rows = [row | {"reward": float(bool(row["repeated_calls"]) == pays)} for row in rows]
    finding = the_alarm(make_run(learning(), rows))
    assert finding.name == "repeated_calls"
    assert finding.causes[0].startswith("calls earn reward") == pays


def questions(answer: str, varied: bool = False) -> list[dict[str, Any]]:
    """Two kinds of rows; since step 12 the second one fails with `answer`."""
    rows = []
    for s in range(1, N + 1):
        for row in range(4):
            for k in range(4):
                how = {"step": s, "group": row, "sample_id": f"{s}-{row}", "reward": 1.0}
                how["prompt"] = f"How many {'abcd'[row]}x do we have if {s} break?"
                if row == 3:
                    how["prompt"] = f"What is {s} times {row}?"
                    if s >= 12:
                        how |= {"reward": 0.0, "answer": f"{k}" if varied else answer.format(s)}
                rows.append(how)
    return rows


@pytest.mark.parametrize("answer", ["#### 0", "#### {}"])
def test_a_kind_of_rows_collapses(answer):
    finding = the_alarm(make_run(learning(), questions(answer)))
    assert (finding.name, finding.step) == ("collapse", 12)
    assert finding.text.startswith("rows like 'What is 1 times 3?': ")
    assert "all 116 rollouts fail and 100% give the same wrong answer" in finding.text
    assert finding.evidence["reward_elsewhere"] == 1.0
    assert ("'#### 0'" in finding.text) == (answer == "#### 0")


def test_many_kinds_that_collapse_are_one_finding():
    verbs = ("bake", "sell", "lose", "grow", "hide")
    rows = [
        {"step": s, "group": k, "sample_id": f"{s}-{k}", "prompt": f"We {verb} {s}."}
        | {"reward": 0.0, "answer": "no"}
        for s in range(1, N + 1)
        for k, verb in enumerate(verbs)
        for _ in range(4)
    ]
    rows += [row | {"prompt": "What?", "reward": 1.0, "group": 9, "sample_id": "w"} for row in rows]
    found = [f for f in alarms(make_run(learning(), rows)) if f.name == "collapse"]
    [finding] = found
    assert finding.evidence["kinds"] == 5 and "and 3 other kinds of rows" in finding.text
    assert len(set(finding.episodes)) == 5


def test_a_kind_of_rows_that_fails_with_many_answers_is_no_collapse():
    assert alarms(make_run(learning(), questions("", varied=True))) == []


@pytest.mark.parametrize("rising", [True, False])
def test_the_reward_falls(rising):
    reward = noisy(np.r_[ramp(0.2, 0.7)[:25], np.full(15, 0.1)])
    metrics = learning(**{"critic/score/mean": reward})
    if rising:
        metrics["actor/ppo_kl"] = noisy(np.r_[np.full(25, 1e-3), np.full(15, 0.05)], 1)
    finding = the_alarm(make_run(metrics))
    assert (finding.name, finding.severity) == ("reward_falls", "error")
    assert 15 <= finding.step <= 26
    assert ("while actor/ppo_kl rose from 0.001" in finding.text) == rising


def with_validations(training: Sequence[float], validation: dict[int, float]) -> Run:
    """Return a run with the mean rewards of its validations by step; 0 is before training."""
    run = make_run(learning(**{"critic/score/mean": noisy(np.array(training))}))
    name = "val-core/a/reward/mean@1"
    record = [(int(r["step"]), {k: v for k, v in r.items() if k != "step" and v is not None})
              for r in run.metrics.to_pylist()]  # fmt: skip
    by_step = dict([(0, {}), *record])
    for step, value in validation.items():
        by_step[step] = by_step[step] | {name: value}
    run.__dict__["metrics"] = metrics_table(sorted(by_step.items()))
    return run


@pytest.mark.parametrize(
    ("validation", "is_named"),
    [
        ({0: 0.2, 10: 0.3, 20: 0.38, 30: 0.35, 40: 0.4}, True),
        ({0: 0.2, 10: 0.33, 20: 0.42, 30: 0.52, 40: 0.62}, False),  # a small gap
        ({0: 0.0, 10: 0.1, 20: 0.2, 30: 0.3, 40: 0.4}, False),  # harder from the start
        ({10: 0.35, 20: 0.45, 30: 0.42, 40: 0.4}, False),  # nobody knows how it began
    ],
)
def test_overfitting(validation, is_named):
    run = with_validations(ramp(0.2, 0.7), validation)
    found = [f for f in alarms(run) if f.name == "overfitting"]
    assert bool(found) == is_named
    if is_named:
        assert found[0].step == 30 and "the validation rows 0.4 at step 40" in found[0].text


def test_training_rows_that_reward_something_else_are_not_called_memorized():
    """A third of the rows has a wrong ground truth, and no row was played twice."""
    run = with_validations(ramp(0.2, 0.9), {0: 0.2, 10: 0.3, 20: 0.38, 30: 0.35, 40: 0.4})
    episodes = [
        {"step": step, "split": split, "agent_name": kind, "reward": reward, "answer": answer}
        for step, split, kind, reward, answer in (
            *((39, "train", "react", 0.8, f"{k}") for k in range(16)),
            *((39, "train", "single_turn", 0.9, "4" if k % 4 else f"x{k}") for k in range(16)),
            *((40, "val", "react", 0.7, "1") for _ in range(16)),
            *((40, "val", "single_turn", 0.1, "4") for _ in range(16)),
        )
    ]
    own = make_run({}, episodes)
    epochs = pa.array([0.1] * run.metrics.num_rows)
    own.__dict__["metrics"] = run.metrics.append_column("training/epoch", epochs)
    [finding] = [f for f in alarms(own) if f.name == "overfitting"]
    assert "memorizes" not in finding.text and "they reward something else" in finding.text
    assert "agent_name=single_turn earn 0.9 against 0.1, and 75% of them" in finding.text
    assert "'4'" in finding.text


def test_clipping_and_spikes():
    finding = the_alarm(make_run(learning(**{"actor/pg_clipfrac": noisy(0.5, 1)})))
    assert (finding.name, finding.subject) == ("unstable_update", "clip")
    norms = noisy(0.2, 6, 0.3)
    norms[25] = norms[30] = 20.0
    assert alarms(make_run(learning(**{"actor/grad_norm": norms}))) == []
    norms[35] = 30.0
    finding = the_alarm(make_run(learning(**{"actor/grad_norm": norms})))
    assert (finding.subject, finding.step) == ("grad_norm", 26)
    assert "3 times" in finding.text and "to 30 in step 36" in finding.text


def test_length_grows_without_reward():
    metrics = learning(
        **{
            "response_length/mean": noisy(ramp(60, 150), 2),
            "critic/score/mean": noisy(np.r_[np.linspace(0.2, 0.5, 5), np.full(35, 0.5)], 1),
        }
    )
    metrics["critic/score/mean"][:5] = [0.5] * 5
    names = [f.name for f in alarms(make_run(metrics))]
    assert "length" in names
    rising = metrics | {"critic/score/mean": noisy(ramp(0.2, 0.7))}
    assert alarms(make_run(rising)) == []


@pytest.mark.parametrize(("drift", "severity"), [(1e-5, "error"), (0.05, "warning")])
def test_the_reward_is_flat(drift, severity):
    flat = noisy(0.3, 1)
    metrics = learning(
        **{
            "critic/score/mean": flat,
            "rollout/tool_agent/reward": flat,
            "canary/drift": noisy(drift, 2),
        }
    )
    finding = the_alarm(make_run(metrics))
    assert (finding.name, finding.severity) == ("reward_flat", severity)


def test_an_audit_lists_one_answer_for_all_rows_and_a_falling_validation():
    episodes = [
        {"step": 36 + i % 5, "sample_id": f"s{i}", "reward": 1.0, "answer": "yes"}
        for i in range(60)
    ]
    validation: list[Any] = [None] * N
    errors = list(validation)
    for i, value in ((0, 0.3), (20, 0.6), (39, 0.2)):
        validation[i], errors[i] = value, 0.03
    metrics = learning(**{"val/reward/mean@1": validation, "val/reward/se@1": errors})
    findings = [f for f in diagnose(make_run(metrics, episodes)) if f.severity == "audit"]
    assert {f.subject for f in findings} == {"answers", "validation"}
    assert alarms(make_run(metrics, episodes)) == []


def test_the_time_of_a_step():
    """Ten rollouts of a second each start together; the last one ends a second later."""
    episodes = [
        {"step": s, "seconds": 2.0 if k == 9 else 1.0} for s in range(1, N + 1) for k in range(10)
    ]
    metrics = learning(
        **{
            "timing_s/step": [4.0] * N,
            "timing_s/gen": [2.0] * N,
            "timing_s/update_actor": [1.6] * N,
            "timing_s/update_weights": [0.4] * N,
        }
    )
    [note] = diagnose(make_run(metrics, episodes))
    # 90 % have ended after 1.1 s: 0.9 of 2 s are spent waiting.
    assert note.evidence["waiting for the last rollouts"] == pytest.approx(0.45 * 0.5)
    assert note.evidence["generation"] == pytest.approx(0.7 * 0.55 * 0.5)
    assert note.evidence["tools"] == pytest.approx(0.2 * 0.55 * 0.5)
    assert note.evidence["rewards"] == pytest.approx(0.1 * 0.55 * 0.5)
    assert note.evidence["the update"] == 0.4 and "s: the update 40%" in note.text
    assert sum(v for k, v in note.evidence.items() if k != "seconds") == pytest.approx(1.0)


def test_the_groups_of_each_split_are_counted_from_0():
    """Group 0 of those that were set aside is another one than group 0 of those that trained."""
    rewards = {"train": [1.0, 0.0], "evicted": [1.0, 1.0]}
    episodes = [{"step": 1, "split": s, "reward": r} for s, of in rewards.items() for r in of]
    stored = Episodes(make_run({}, episodes).behaviour)
    assert without_group_means(stored, "reward").tolist() == [0.5, -0.5, 0.0, 0.0]


@pytest.mark.parametrize(("passes", "helps"), [(None, True), (1.0, False), (3.0, True)])
def test_larger_passes_are_advised_only_if_there_are_several(passes, helps):
    metrics = learning(**{"timing_s/step": [4.0] * N, "timing_s/update_actor": [3.0] * N})
    if passes:
        metrics["perf/micro_batches"] = [passes] * N
    [note] = [f for f in diagnose(make_run(metrics)) if f.name == "step_time"]
    assert note.tries == ["a larger optim.micro_batch_tokens"] * helps + ["docs/scaling.md"]


def test_rollouts_of_the_local_engine_wait_for_the_tool_of_one():
    """One of ten waits 0.6 s for a tool: the others count that time as generation."""
    waits = [{"tool_times": [0.2, 0.5, 0.4, 0.8]}, {"tool_times": [0.7, 0.75]}, *[{}] * 8]
    episodes = [{"step": s, "started": 100.0 * s} | wait for s in range(1, N + 1) for wait in waits]
    run = make_run(learning(**{"timing_s/step": [2.0] * N, "timing_s/gen": [1.0] * N}), episodes)
    [note] = diagnose(run)
    assert note.evidence["tools"] == pytest.approx(0.2 * 0.5)
    run.__dict__["config"]["rollout"]["name"] = "local"
    [note] = diagnose(run)
    assert note.evidence["tools"] == pytest.approx(0.6 * 0.5)
    assert note.evidence["generation"] == pytest.approx(0.3 * 0.5)
    assert note.tries[0].startswith("more processes of the tool server")


def test_interactions_and_opening_tools_are_parts_of_a_step():
    """A rollout takes 2 s: its interaction takes 0.8 s, and its tools open in 0.2 s."""
    episodes = [
        {"step": s, "interaction_seconds": 0.8, "open_seconds": 0.2, "tool_times": [0.1, 0.9]}
        for s in range(1, N + 1)
        for _ in range(4)
    ]
    run = make_run(learning(**{"timing_s/step": [2.0] * N, "timing_s/gen": [1.0] * N}), episodes)
    [note] = diagnose(run)
    assert note.evidence["interactions"] == pytest.approx(0.8 / 2.0 * 0.5)
    assert note.evidence["opening tools"] == pytest.approx(0.2 / 2.0 * 0.5)


@pytest.mark.parametrize(("rising", "severity"), [(True, "warning"), (False, None)])
def test_a_reward_that_begins_to_fall_while_the_kl_rises(rising, severity):
    """A third of the best level is lost: with a rising KL that is a collapse that has begun."""
    reward = np.concatenate([np.linspace(0.3, 0.52, N // 2), np.full(N - N // 2, 0.35)])
    kl = np.concatenate([np.full(N // 2, 1e-3), np.full(N - N // 2, 1e-2 if rising else 1e-3)])
    metrics = learning(**{"critic/score/mean": noisy(reward), "actor/ppo_kl": noisy(kl, 4, 0.05)})
    found = [f for f in diagnose(make_run(metrics)) if f.name == "reward_falls"]
    assert [f.severity for f in found] == ([severity] if severity else [])


def test_one_agent_loop_whose_responses_grow():
    """Overall the responses grow little and the reward rises."""
    rollouts = [
        {"step": step, "group": group, "agent_name": agent, "reward": float(k < 2)}
        | {"sampled_tokens": 40 + (2 * step if agent == "react" else 0) + k}
        for step in range(1, N + 1)
        for group, agent in enumerate(("react", "tool_agent"))
        for k in range(4)
    ]
    finding = the_alarm(make_run(learning(), rollouts))
    assert (finding.name, finding.subject) == ("length", "react")
    assert "responses of react grew from 52 to 112 tokens since step 1" in finding.text


@pytest.mark.parametrize(
    ("outlier", "number", "is_named"),
    [
        (-100.0, 16, True),
        (-10.0, 16, True),
        (-0.2, 16, False),
        (-100.0, 1, False),
        (9.0, 90, False),
    ],
)
def test_a_few_rewards_far_from_the_others(outlier, number, is_named):
    """The outliers are in steps 1 to 4; their gradient norm is high there."""
    rollouts = [{"step": 1 + i // 8, "reward": float(i % 2)} for i in range(8 * N)]
    for i in range(number):
        rollouts[2 * i]["reward"] = outlier
    norm = [50.0] * 4 + [2.0] * (N - 4)
    run = make_run(learning(**{"actor/grad_norm": norm}), rollouts)
    found = [f for f in diagnose(run) if f.name == "reward_outliers"]
    assert bool(found) == is_named
    if is_named:
        assert f"5.0% of the rollouts have a reward of about {outlier:g}, all others 0 to 1" in (
            found[0].text
        )
        assert "the gradient norm is 50 in steps with them, else 2" in found[0].text


@pytest.mark.parametrize("others", [(0.0, 0.0, 1.0), (0.95, 1.0, 0.0), (0.95, 1.0, 0.5)])
def test_rare_successes_and_failures_are_no_outliers(others):
    """Two levels of most rollouts, and one of every fiftieth."""
    rollouts = [
        {"step": 1 + i // 8, "reward": others[2] if i % 50 == 0 else others[i % 2]}
        for i in range(8 * N)
    ]
    assert not [f for f in diagnose(make_run(learning(), rollouts)) if f.name == "reward_outliers"]


def test_a_part_of_the_reward_that_rises_without_the_accuracy():
    metrics = learning(
        **{"grader/acc": noisy(0.2, 3, 0.2), "grader/form": noisy(ramp(0.4, 1.0), 4)}
    )
    [finding] = [f for f in diagnose(make_run(metrics)) if f.severity == "audit"]
    assert finding.subject == "grader/form" and "'form' instead of" in finding.causes[0]
    metrics["grader/acc"] = noisy(ramp(0.2, 0.5), 3)
    assert not [f for f in diagnose(make_run(metrics)) if f.severity == "audit"]


def test_a_loop_that_stops_calling_tools_within_noisy_steps():
    """The rates before vary so much that a comparison of means proves nothing."""
    rates = np.concatenate([[0.81, 0.23, 0.79, 0.21, 0.03], np.full(N - 5, 0.0)])
    run = make_run(learning(**{"rollout/tool_agent/tool_call_rate": list(rates)}))
    [finding] = [f for f in diagnose(run) if f.name == "tool_use"]
    assert "tool_agent stops calling tools" in finding.text


def test_a_loop_that_stops_calling_tools_within_four_steps():
    rates = np.concatenate([[0.75, 0.7, 0.3, 0.1], np.full(N - 4, 0.01)])
    run = make_run(learning(**{"rollout/tool_agent/tool_call_rate": list(rates)}))
    [finding] = [f for f in diagnose(run) if f.name == "tool_use"]
    assert (finding.subject, finding.severity) == ("tool_agent", "audit")
    assert "72% of its rollouts called one around step 1, 1% in the last" in finding.text


@pytest.mark.parametrize(("truth", "is_named"), [("5", True), (None, False), ("own", False)])
def test_a_kind_of_rows_with_one_ground_truth(truth, is_named):
    def row(k: int) -> dict[str, Any]:
        kind = "How many plums are in the bag" if k % 2 else "Add these two numbers"
        own = f"{k % 7}" if truth == "own" or k % 2 == 0 else truth
        return {"step": 1 + k % N, "sample_id": f"s{k}", "prompt": f"{kind}? {k}"} | {
            "ground_truth": own,
            "group": k,
        }

    run = make_run(learning(), [row(k) for k in range(60)])
    found = [f for f in diagnose(run) if f.name == "ground_truths"]
    assert bool(found) == is_named
    if is_named:
        assert "all 30 rows like 'How many plums are in the bag? 1' have it: '5'" in found[0].text


@pytest.mark.parametrize(
    ("react", "other", "named_agents"),
    [
        ("cached", "read", ["react"]),
        ("cached", "cached", ["react", "tool_agent"]),
        ("read", "read", []),
        ("constant", "read", []),  # The reward is for something else than the answer.
    ],
)
def test_right_and_wrong_answers_with_the_same_reward(react, other, named_agents):
    """A reward that is cached by its row differs between steps, one that is read by answers."""

    def reward_of(how: str, step: int, k: int) -> float:
        return {"cached": float(step % 3 == 0), "read": float(k < 2), "constant": 0.5}[how]

    rollouts = [
        {"step": step, "group": group, "sample_id": f"s{step}", "agent_name": agent}
        | {"ground_truth": "4", "answer": f"#### {4 if k < 2 else k}"}
        | {"reward": reward_of(how, step, k)}
        for step in range(1, N + 1)
        for group, (agent, how) in enumerate((("react", react), ("tool_agent", other)))
        for k in range(4)
    ]
    found = [f for f in diagnose(make_run(learning(), rollouts)) if f.name == "equal_rewards"]
    assert len(found) == (1 if named_agents else 0)
    for finding in found:
        assert finding.evidence == {"share": 1.0, "groups": 13.0 * len(named_agents)}
        for agent in ("react", "tool_agent"):
            text = f"in 100% of the 13 groups of {agent}"
            assert (text in finding.text) == (agent in named_agents)


def test_right_answers_in_another_notation_are_not_called_wrong():
    """A solved run: the reward takes both notations, and one group in ten has a failure."""
    rollouts = [
        {"step": step, "group": group, "sample_id": f"{step}/{group}", "ground_truth": "0.5"}
        | {"answer": "#### 0.5" if k % 2 else "#### 1/2", "reward": float(k or group)}
        for step in range(1, N + 1)
        for group in range(10)
        for k in range(8)
    ]
    assert not [f for f in diagnose(make_run(learning(), rollouts)) if f.name == "equal_rewards"]


@pytest.mark.parametrize(("size", "name"), [(17.0, None), (25.0, "length")])
def test_short_responses_of_a_solved_loop_that_grow(size, name):
    rollouts = [
        {"step": step, "group": g, "agent_name": agent, "reward": 1.0, "answer": "4"}
        | {"sampled_tokens": 9 + int((size - 9) * step / N) + k % 2 if g else 40}
        for step in range(1, N + 1)
        for g, agent in enumerate(("react", "calc"))
        for k in range(8)
    ]
    found = [f for f in diagnose(make_run(learning(), rollouts)) if f.name == "length"]
    assert [(f.name, f.severity) for f in found] == ([(name, "note")] if name else [])


@pytest.mark.parametrize(
    ("share", "truths", "is_named"), [(0.6, 7, True), (0.3, 7, False), (0.6, 2, False)]
)
def test_most_rows_of_a_data_source_with_one_ground_truth(share, truths, is_named):
    """Rows with two possible truths (yes or no) agree often, so they are not reported."""
    rows = [
        {"step": 1 + k % N, "sample_id": f"s{k}", "group": k, "prompt": f"Add {k}"}
        | {"data_source": "a" if k % 2 else "b"}
        | {"ground_truth": f"{k // 2 % 9}" if k % 2 == 0 else f"own {k // 2 % truths}"}
        | ({"ground_truth": "1"} if k % 2 and (k // 2) % 10 < 10 * share else {})
        for k in range(200)
    ]
    found = [f for f in diagnose(make_run(learning(), rows)) if f.name == "ground_truths"]
    assert bool(found) == is_named
    if is_named:
        assert "60% of the 100 rows of tool_agent, a have the same" in found[0].text
        assert "'1'; in the other rows the most frequent one has 12%" in found[0].text


def test_validation_of_a_kind_of_rows_falls():
    """The agent loop and the data source are the same rows: one finding, with their answer."""
    none: list[Any] = [None] * N

    def validation(first: float, last: float, error: float = 0.05) -> tuple[list[Any], list[Any]]:
        return [first, *none[2:], last], [error, *none[2:], error]

    names = ("val/react/reward", "val_greedy/react/reward", "val-core/maths/b/reward")
    metrics = learning()
    for name, (values, errors) in zip(
        names, (validation(0.5, 0.2), validation(0.9, 0.1), validation(0.6, 0.1)), strict=True
    ):
        metrics |= {f"{name}/mean@1": values, f"{name}/se@1": errors}
    rows = [
        {"step": N, "agent_name": "react", "data_source": "maths/b", "answer": f"#### {k % 2}"}
        for k in range(8)
    ]
    finding = the_alarm(make_run(metrics, rows))
    assert (finding.name, finding.subject) == ("validation_falls", "react")
    assert "validation reward of react fell from 0.9 (step 1) to 0.1 (step 40)" in finding.text
    assert "in the last training steps 50% of its rollouts answer '#### 0'" in finding.text
    values, errors = validation(0.5, 0.2, error=0.1)
    metrics = learning(**{"val/react/reward/mean@1": values, "val/react/reward/se@1": errors})
    assert alarms(make_run(metrics, rows)) == [], "within the noise of the validation"
    for first, last, number in ((0.9, 0.1, 3), (math.nan, 0.1, 30), (0.04, 0.01, 30)):
        values, errors = validation(first, last, error=1e-3)
        metrics = learning(
            **{
                "val/react/reward/mean@1": values,
                "val/react/reward/se@1": errors,
                "val/react/rows": [number] * N,
            }
        )
        assert alarms(make_run(metrics, rows)) == []


def test_validations_that_take_much_of_the_time():
    step = {"timing_s/step": [2.0] * N, "timing_s/gen": [1.0] * N}
    every = learning(**step, **{"timing_s/testing": [1.0] * N})
    [note] = [f for f in diagnose(make_run(every)) if f.subject == "validations"]
    assert note.severity == "note" and note.evidence["share"] == pytest.approx(1 / 3)
    assert note.text == "validations take 33% of the time of the run: 40 of 1 s; a step takes 2 s"
    rarely = learning(**step, **{"timing_s/save_checkpoint": [1.0, None] * 20})
    assert not [f for f in diagnose(make_run(rarely)) if f.subject]


def test_notes_on_the_settings_are_findings():
    run = make_run(learning())
    run.__dict__["config"] |= {"optim": {"lr_warmup_steps": 500}, "trainer": {"total_steps": 35}}
    run.__dict__["config"] |= {"algorithm": {"kl_loss_coef": 3.0}}
    found = [f for f in diagnose(run) if f.name == "settings"]
    assert [f.subject for f in found] == ["optim.lr_warmup_steps", "algorithm.kl_loss_coef"]
    assert {f.severity for f in found} == {"note"} and "never reaches optim.lr" in found[0].text
    run.__dict__["config"] |= {"optim": {"no_such_key": 1}}
    assert not [f for f in diagnose(run) if f.name == "settings"]


FILES = sorted(Path(diagnoses.__file__).parent.glob("*.py"))
ADVICE = yaml.safe_load((FILES[0].parent / "advice.yaml").read_text())


def nodes(kind: type[ast.AST]) -> list[Any]:
    """Return the nodes of a kind in the source of the shipped diagnoses."""
    trees = [ast.parse(file.read_text()) for file in FILES]
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, kind)]


def test_each_entry_of_the_advice_exists_and_is_used():
    calls = [c for c in nodes(ast.Call) if isinstance(c.func, ast.Name) and c.func.id == "advice"]
    literal = {arg.value for call in calls for arg in call.args if isinstance(arg, ast.Constant)}
    assert len(literal) > 30 and literal <= ADVICE.keys()
    starts = [getattr(node.values[0], "value", "") for node in nodes(ast.JoinedStr)]
    begins = tuple(start for start in starts if re.fullmatch(r"[a-z_]+\.", str(start)))
    texts = {node.value for node in nodes(ast.Constant)}
    assert [name for name in ADVICE if name not in texts and not name.startswith(begins)] == []
    for entry in ADVICE.values():
        assert entry.keys() <= {"causes", "tries"} and all(map(all, entry.values()))


def test_config_keys_and_files_that_findings_name_exist():
    """What to try is a text; the keys and pages in it must exist."""
    advice = [text for entry in ADVICE.values() for texts in entry.values() for text in texts]
    texts = [*advice, *(node.value for node in nodes(ast.Constant))]
    text = "\n".join(t for t in texts if isinstance(t, str))
    sections = {key.partition(".")[0] for key in FIELDS}
    named = re.findall(r"(?<![\w/.])([a-z]+)\.([a-z_]+)", text)
    keys = {f"{section}.{key}" for section, key in named if section in sections}
    assert len(keys) > 30
    assert {key for key in keys if key not in FIELDS} <= {"rollout.max_"}  # one for each budget
    root = Path(__file__).parent.parent.parent
    for page in set(re.findall(r"docs/\w+\.md", text)):
        assert (root / page).exists(), page


def worth(*, calls: Sequence[float], gain: Sequence[float], half: float = 0.02) -> dict[str, Any]:
    """Return the metrics of validations with and without tools, at the first and the last step."""
    at = {0: 0, N - 1: 1}
    values = {"": gain, "/calls": calls}
    values |= {"/low": [g - half for g in gain], "/high": [g + half for g in gain]}
    return {
        f"val/tool_dependence{name}": [two[at[i]] if i in at else None for i in range(N)]
        for name, two in values.items()
    }


@pytest.mark.parametrize(
    ("calls", "gain", "text"),
    [
        ((0.9, 0.9), (0.3, 0.4), ""),
        ((0.9, 0.2), (0.3, 0.0), "stops calling tools that help: 90% of its rollouts called one"),
        ((0.9, 0.5), (0.3, 0.1), ""),  # still more than half of them
        ((0.9, 0.2), (0.0, 0.0), ""),  # they never helped
        ((0.2, 0.05), (0.1, 0.0), ""),  # and were never used much
        ((0.9, 0.9), (0.3, 0.0), "calls tools that do not help: 90% of its rollouts call one"),
        ((0.9, 0.9), (0.3, -0.2), "calls tools that do not help"),
        ((0.9, 0.9), (0.3, 0.04), ""),  # the interval ends at 0.06 of a range of 1
        ((0.1, 0.1), (0.0, 0.0), ""),
    ],
)
def test_tools_are_worth_their_calls(calls, gain, text):
    found = alarms(make_run(learning(**worth(calls=calls, gain=gain))))
    assert [f.name for f in found] == ["tool_worth"] * bool(text)
    if text:
        assert text in found[0].text and found[0].tries
