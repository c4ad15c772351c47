"""The warning about steps without a learning signal."""

from __future__ import annotations

import pytest

from agentrl.trainer.collect import DEAD_GROUPS, DEAD_STEP, MAX_DEAD_STEPS, DeadSteps


def metrics(dead: bool, groups: float = 1.0, **stops: float) -> dict[str, float]:
    stops = stops or {"done": 1.0}
    return {
        DEAD_STEP: float(dead),
        DEAD_GROUPS: groups,
        **{f"stop/{name}": share for name, share in stops.items()},
    }


def warnings_of(caplog, steps: str, *, resumed_after: int = 0) -> list[str]:
    """Return the messages about a run whose dead steps are marked by x."""
    record = [(0, {"val-core/all/reward": 0.0})]
    record += [(k, metrics(s == "x")) for k, s in enumerate(steps[:resumed_after], 1)]
    dead_steps = DeadSteps(record)
    for k, s in enumerate(steps[resumed_after:], resumed_after + 1):
        dead_steps.add(k, metrics(s == "x"))
    dead_steps.finish()
    return [r.getMessage().split(" had no learning signal")[0] for r in caplog.records]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("....", []),
        ("", []),
        (".xx.", []),
        ("x.x.x.x.", []),
        ("xx", ["2 of 2 steps"]),
        ("xxx", ["steps 1 to 3", "3 of 3 steps"]),
        (".xxxx.", ["steps 2 to 4", "4 of 6 steps"]),
        ("xxx.xxxx", ["steps 1 to 3", "steps 5 to 7", "7 of 8 steps"]),
    ],
)
def test_when_a_warning_is_logged(caplog, steps, expected):
    assert warnings_of(caplog, steps) == expected


@pytest.mark.parametrize("after", range(1, 7))
def test_a_resumed_run_repeats_no_warning(caplog, after):
    straight = warnings_of(caplog, ".xxxx.")
    caplog.clear()
    resumed = warnings_of(caplog, ".xxxx.", resumed_after=after)
    assert resumed == (straight if after < 1 + MAX_DEAD_STEPS else straight[1:])


def test_a_warning_names_dead_groups_the_stop_reason_and_the_budget_that_helps(caplog):
    dead_steps = DeadSteps([])
    for step in (1, 2):
        dead_steps.add(step, metrics(True, 0.5, turns=0.25, done=0.75))
    dead_steps.add(3, metrics(True, 0.25, turns=0.9, done=0.1))
    dead_steps.finish()
    third, end = (r.getMessage() for r in caplog.records)
    assert "equal in 25% of the groups" in third
    assert "reason is 'turns' (90% of the rollouts)" in third
    assert "equal in 42% of the groups" in end
    assert "reason is 'done' (53% of the rollouts)" in end
    assert third.endswith("Raise the budget 'turns', or set rollout.budget_policy.turns=keep.")
    assert "Raise the budget" not in end
