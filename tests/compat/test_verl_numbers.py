"""docs/verl.md, "Where numbers differ": each line of the table, on a batch of a few tokens.

verl's numbers are literals. With AGENTRL_VERL (a git clone), verl's own functions must return them.
"""

import ast
import os
import subprocess
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.trainer_fixtures import config, group, scored, segment, turn
from torch import tensor
from torch.optim.lr_scheduler import LambdaLR

from agentrl.config import OptimConfig
from agentrl.learner.algorithms import loss_weights, make_targets
from agentrl.learner.batch import collate
from agentrl.learner.optimizer import learning_rate

from .conftest import TAG

MODE = "seq-mean-token-sum-norm"


def function_of_verl(name: str):
    """Return a function of verl's from the clone that AGENTRL_VERL names."""
    space: dict = {"torch": torch, "np": np, "defaultdict": defaultdict, "LambdaLR": LambdaLR}
    for path in ("verl/utils/torch_functional.py", "verl/trainer/ppo/core_algos.py"):
        command = ["git", "-C", os.environ["AGENTRL_VERL"], "show", f"{TAG}:{path}"]
        source = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and (
                path.endswith("functional.py") or node.name == name
            ):
                node.decorator_list, node.returns = [], None
                for argument in [*node.args.args, *node.args.kwonlyargs]:
                    argument.annotation = None
                exec(compile(ast.Module([node], []), path, "exec"), space)
        space["verl_F"] = SimpleNamespace(**space)
    return space[name]


def assert_close(actual: torch.Tensor, expected) -> None:
    torch.testing.assert_close(actual.float(), tensor(expected).float(), atol=1e-4, rtol=0)


def check_verl(name: str, expected, *args, **kwargs) -> None:
    """Check what a function of verl's returns, if AGENTRL_VERL names a clone."""
    if "AGENTRL_VERL" not in os.environ:
        return
    returned = function_of_verl(name)(*args, **kwargs)
    returned = returned[0] if isinstance(returned, tuple) else returned
    assert_close(returned, expected)


def batch_of(*rewards: float, lengths=None, groups=None):
    """Rollouts of one turn, in groups; by default all in one."""
    rows = [
        scored([segment([1], ("A", [2] * n))], reward, [turn(0, 0, n)])
        for reward, n in zip(rewards, lengths or [1] * len(rewards), strict=True)
    ]
    sizes, made = groups or [len(rows)], []
    for size in sizes:
        made.append(group(*rows[:size]))
        rows = rows[size:]
    return collate(made, 0)


def advantages(batch, **keys):
    """Return the advantages of the tokens that were sampled, row by row."""
    targets = make_targets(batch, config(**keys), None, None, None)
    return targets.advantages[batch.action_mask]


def test_a_norm_is_also_divided_by_the_rollouts():
    batch = batch_of(1.0, 0.0, lengths=[2, 4])
    mask = batch.action_mask
    ours = loss_weights(batch, MODE, 0, 10).sum().item()
    assert ours == pytest.approx(6 / 10 / 2)
    check_verl("agg_loss", 0.6, torch.ones(mask.shape), mask, MODE, loss_scale_factor=10)


def test_a_token_mean_is_that_of_the_mini_batch():
    """verl's worker takes the mean of each micro-batch, weighted by its rows."""
    batch = batch_of(1.0, 0.0, lengths=[2, 4])
    mask = batch.action_mask
    losses = torch.where(mask, tensor([[1.0], [4.0]]), 0.0)
    ours = (loss_weights(batch, "token-mean", 0, 10) * losses).sum().item()
    assert ours == pytest.approx((2 * 1 + 4 * 4) / 6)
    verls = (1.0 + 4.0) / 2
    for row, mean in ((0, 1.0), (1, 4.0)):
        check_verl("agg_loss", mean, losses[row : row + 1], mask[row : row + 1], "token-mean")
    assert ours != pytest.approx(verls)


@pytest.mark.parametrize(
    ("name", "function", "verls"),
    [
        ("grpo", "compute_grpo_outcome_advantage", [7.0, -0.7071, 0.7071]),
        ("rloo", "compute_rloo_outcome_advantage", [7.0, -2.0, 2.0]),
    ],
)
def test_a_group_of_one_has_no_advantage(name, function, verls):
    batch = batch_of(7.0, 1.0, 3.0, groups=[1, 2])
    ours = advantages(batch, algorithm__name=name)
    assert_close(ours, [0.0, *verls[1:]])
    rewards, index = tensor([[7.0], [1.0], [3.0]]), np.array([0, 1, 1])
    check_verl(function, [[v] for v in verls], rewards, torch.ones(3, 1), index)


def test_whitening_is_a_key_of_its_own():
    batch = batch_of(1.0, 3.0, 0.0, 8.0, groups=[2, 2])
    name = "reinforce_plus_plus_baseline"
    plain = advantages(batch, algorithm__adv_estimator=name)
    assert plain.tolist() == [-1.0, 1.0, -4.0, 4.0]
    white = advantages(batch, algorithm__name=name)
    verls = [-0.2970, 0.2970, -1.1882, 1.1882]
    assert_close(white, verls)
    rewards, index = tensor([[1.0], [3.0], [0.0], [8.0]]), np.array([0, 0, 1, 1])
    function = "compute_reinforce_plus_plus_baseline_outcome_advantage"
    check_verl(function, [[v] for v in verls], rewards, torch.ones(4, 1), index)


def test_the_return_of_reinforce_plus_plus_passes_over_observations():
    row = segment([1], ("A", [2, 3]), ("E", [4]), ("A", [5]))
    other = segment([1], ("A", [2, 3, 4, 5]))
    turns = [turn(0, 0, 2), turn(0, 3, 4)]
    batch = collate([group(scored([row], 1.0, turns), scored([other], 0.0, [turn(0, 0, 4)]))], 0)
    name = "reinforce_plus_plus"
    ours = advantages(batch, algorithm__adv_estimator=name)
    assert ours.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    # verl whitens: what was 0 is equal again, so the first two tokens got no reward.
    verls = [[-0.3780, -0.3780, 0.0, 2.2678], [-0.3780] * 4]
    rewards = tensor([[0.0, 0.0, 0.0, 1.0], [0.0] * 4])
    mask = tensor([[1.0, 1.0, 0.0, 1.0], [1.0] * 4])
    gamma = SimpleNamespace(gamma=1.0)
    function = "compute_reinforce_plus_plus_outcome_advantage"
    check_verl(function, verls, rewards, mask, gamma)


def test_the_first_step_of_the_warm_up_has_a_rate():
    rates = [learning_rate(1.0, OptimConfig(lr_warmup_steps=4), 10, step) for step in range(1, 7)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    if "AGENTRL_VERL" in os.environ:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = function_of_verl("get_constant_schedule_with_warmup")(optimizer, 4)
        assert schedule.get_last_lr() == [0.0]
