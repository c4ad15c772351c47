"""The summary of a plan, and the plans that are refused before a model is loaded."""

import pytest
from support.trainer_fixtures import config

from agentrl.errors import ConfigError
from agentrl.preflight import Plan, check_policy_learns, describe_run
from agentrl.rewards import Scorer
from agentrl.trajectory import Sample


def plan(rows=1, **keys):
    c = config(data__train="rows.jsonl", **keys)
    return Plan(c, [Sample("r", (), row=i) for i in range(rows)], [], Scorer(c.reward))


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({}, "of 128 (grpo);"),
        ({"algorithm__name": "gspo"}, "of 128 (gspo);"),
        ({"algorithm__policy_loss": "cispo"}, "of 128 (grpo with policy_loss=cispo);"),
        (
            {"algorithm__name": "ppo", "algorithm__adv_estimator": "turn_rloo",
             "algorithm__loss_agg_mode": "seq-mean-token-sum"},
            "(ppo with adv_estimator=turn_rloo, loss_agg_mode=seq-mean-token-sum);",
        ),
        ({"trainer__n_gpus_per_node": 1}, "of 128 (grpo);"),
        ({"trainer__n_gpus_per_node": 4}, "of 128 on 4 ranks (grpo);"),
        (
            {"trainer__nnodes": 2, "trainer__n_gpus_per_node": 4, "trainer__ray_address": "auto"},
            "of 128 on 8 ranks (grpo);",
        ),
    ],
)  # fmt: skip
def test_the_plan_says_what_learns_and_on_how_many_ranks(keys, line):
    assert line in describe_run(plan(**keys))


@pytest.mark.parametrize(
    ("keys", "steps"),
    [({"trainer__total_steps": 3}, 3), ({"trainer__total_epochs": 2, "data__batch_size": 2}, 4)],
)
def test_a_critic_that_warms_up_to_the_end_is_refused(keys, steps):
    def warm(alone, **more):
        keys_ = {**keys, "algorithm__name": "ppo", "algorithm__critic_warmup": alone, **more}
        check_policy_learns(plan(4, **keys_))

    warm(steps - 1)
    for alone in (steps, steps + 1):
        with pytest.raises(ConfigError, match=f"critic_warmup={alone} of {steps} steps: .* never"):
            warm(alone)
    warm(steps, trainer__val_only=True, data__val="rows.jsonl")


@pytest.mark.parametrize(
    ("rows", "size", "epochs", "steps", "verls", "left_out"),
    [
        (10, 6, 3, 5, 3, "12 rows of 3 epochs"),
        (10, 4, 1, 3, 2, "2 rows of 1 epoch"),
        (9, 4, 1, 3, 2, "1 row of 1 epoch"),
        (8, 4, 2, 4, 4, ""),
        (3, 4, 2, 2, 2, ""),
        (3, 8, 1, 1, 1, ""),
    ],
)
def test_epochs_play_all_of_their_rows(rows, size, epochs, steps, verls, left_out):
    keys = {"trainer__total_epochs": epochs, "data__batch_size": size}
    ours, dropping = plan(rows, **keys), plan(rows, **keys, data__drop_last=True)
    assert (ours.total_steps, dropping.total_steps) == (steps, verls)
    assert describe_run(ours).endswith(f"; {steps} step{'s' * (steps > 1)}")
    lines = describe_run(dropping).splitlines()
    assert [line for line in lines if "drop_last" in line] == [
        f"data.drop_last=true leaves out {left_out}" for _ in range(bool(left_out))
    ]


def test_a_trainer_refuses_such_a_critic_like_the_command_line(tmp_path):
    from agentrl.trainer import Trainer

    p = plan(4, algorithm__name="ppo", algorithm__critic_warmup=3, trainer__total_steps=3)
    with pytest.raises(ConfigError, match="critic_warmup=3 of 3 steps"):
        Trainer(p.config, p)


def test_without_training_rows_nothing_is_refused():
    check_policy_learns(plan(0, algorithm__name="ppo", algorithm__critic_warmup=9))
