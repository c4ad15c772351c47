"""One rank, two or four: nothing that is learned depends on it, nor on how rows are cut and dealt.

Real processes over gloo, weights spread by `fully_shard`, everything in float64.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import fields, replace
from itertools import product

import pytest
import torch
from support.exact_rank import EXACT, ExactRank
from support.processes import Processes
from support.trainer_fixtures import (
    VOCABULARY,
    as_sampled_by,
    config,
    random_groups,
    tiny_folder,
    tiny_model,
)

from agentrl.learner.algorithms import make_targets
from agentrl.learner.batch import Batch, KeptTokens, collate
from agentrl.learner.dispatch import RankGroup, dispatched_methods
from agentrl.learner.learner import Learner
from agentrl.learner.rank import LearnerRanks, LocalRankGroup, Rank

KEYS = {
    "optim__lr": 1e-3,
    "optim__critic_lr": 1e-3,
    "algorithm__kl_loss_coef": 0.1,
    "algorithm__kl_type": "k2",
    "algorithm__entropy_coef": 0.01,
    "algorithm__ppo_epochs": 2,
}
WORLDS = {
    "full": {},
    "lora": {"model__lora_rank": 4},
    "4 bits": {"model__lora_rank": 4, "model__quantization": "nf4"},
    "critic": {"algorithm__name": "ppo"},
    "shared critic": {"algorithm__name": "ppo", "model__lora_rank": 4},
    "recompute": {"optim__recompute": True, "algorithm__name": "ppo", "model__lora_rank": 4},
    "offload": {"optim__offload": "all"},
    "rows": {"algorithm__policy_loss": "gspo", "algorithm__tis_level": "sequence"},
}
"""The models that are sharded: weights, an adapter, a critic of its own or on the policy's base."""
BUDGETS = (10_000, 150, 60)
"""Tokens of a micro-batch: all in one, a few, many."""
SOME_CUTS = ((1, 60), (4, 150))
"""Ranks and tokens of a micro-batch: each cut finer than all in one."""
FEW_CUTS = ((2, 60),)
"""For the other worlds: ranks and cuts work in the same way in all of them."""
ALL_CUTS = tuple(product((1, 2, 4), BUDGETS))


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    folder = tiny_folder(tmp_path_factory.mktemp("ranks") / "model")
    opened = {
        1: LocalRankGroup(ExactRank(folder)),
        **{n: Processes(n, ExactRank, folder) for n in (2, 4)},
    }
    yield opened
    for group in opened.values():
        group.close()


@pytest.fixture(scope="module")
def batch() -> Batch:
    """16 rollouts of 4 prompts, a group without advantages; one rollout says nothing."""
    made = as_sampled_by(tiny_model(), collate(random_groups(3, groups=4, n=4, dead=[1]), 31))
    mask = made.response_mask.clone()
    mask[5] = False
    return replace(made, response_mask=mask, train=torch.arange(16) != 9)


def run(group, cfg, batch: Batch, steps: int = 2):
    group.begin(cfg)
    learner = Learner("", cfg, total_steps=4, group=group)
    seen, learned = [], []
    for step in range(1, steps + 1):
        old, values = learner.old_logprobs(batch), learner.values(batch)
        targets = make_targets(batch, cfg, old, values, learner.reference_logprobs(batch))
        metrics, numbers = learner.update(batch, targets, step)
        seen.append({k: v for k, v in metrics.items() if not k.startswith("perf/")})
        learned.append(numbers)
    return seen, learner.logprobs(batch), group.weights(), learned


def close(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=EXACT, rtol=EXACT, msg=name)


def check_same(result, expected) -> None:
    for mine, theirs in zip(result[0], expected[0], strict=True):
        close(mine, theirs)
    torch.testing.assert_close(result[1], expected[1], atol=EXACT, rtol=0)
    close(result[2], expected[2])
    for mine, theirs in zip(result[3], expected[3], strict=True):
        for field in fields(theirs):
            both = getattr(mine, field.name), getattr(theirs, field.name)
            assert (both[0] is None) == (both[1] is None), field.name
            if both[0] is not None:
                torch.testing.assert_close(*both, atol=EXACT, rtol=EXACT, equal_nan=True)


@pytest.mark.parametrize(
    ("world", "cuts"),
    [
        pytest.param("full", SOME_CUTS, id="full-some"),
        *(pytest.param(w, FEW_CUTS, id=f"{w}-few") for w in ("lora", "4 bits", "offload", "rows")),
        *(pytest.param(w, ALL_CUTS, id=f"{w}-all", marks=pytest.mark.slow) for w in WORLDS),
    ],
)
def test_ranks_and_micro_batches_change_nothing(groups, batch, world, cuts):
    cfg = config(**KEYS, **WORLDS[world])
    expected = run(groups[1], cfg, batch)
    metrics = expected[0]
    assert all(any(m[f"{who}/grad_norm"] > 1e-3 for m in metrics) for who in ["actor"])
    for ranks, budget in cuts:
        other = config(**KEYS, **WORLDS[world], optim__micro_batch_tokens=budget)
        result = run(groups[ranks], other, batch)
        spread, count = groups[ranks].sharded_parameters()
        assert spread == (0 if ranks == 1 else count)
        check_same(result, expected)


SHARED = ((2, 2, 30), (4, 2, 150), (4, 4, 10_000))
"""Ranks, ranks that share each row, and tokens of a micro-batch."""


@pytest.mark.parametrize(
    ("world", "cuts"),
    [
        pytest.param("rows", SHARED[:2], id="rows-some"),
        pytest.param("shared critic", SHARED[:1], id="shared critic-one"),
        *(pytest.param(w, SHARED, id=f"{w}-all", marks=pytest.mark.slow) for w in WORLDS),
    ],
)
def test_ranks_that_share_rows_change_nothing(groups, batch, world, cuts):
    cfg = config(**KEYS, **WORLDS[world])
    expected = run(groups[1], cfg, batch)
    for ranks, size, budget in cuts:
        other = config(
            **KEYS,
            **WORLDS[world],
            optim__micro_batch_tokens=budget,
            trainer__n_gpus_per_node=ranks,
            trainer__context_parallel_size=size,
        )
        check_same(run(groups[ranks], other, batch), expected)


@pytest.mark.slow
def test_kept_tokens_go_to_the_rank_and_micro_batch_of_their_row(groups, batch):
    """Some tokens are sampled from all. Old logprobs, reference and entropy are over the kept."""
    cfg = config(**KEYS)
    kept = random_kept(batch)
    cut = replace(batch, kept=kept)
    metrics, logprobs, weights, _ = run(groups[1], cfg, cut)
    groups[1].begin(cfg)
    plain = Learner("", cfg, total_steps=4, group=groups[1]).logprobs(batch)
    is_cut = batch.response_mask & (kept.counts > 0)
    assert is_cut.any() and (batch.response_mask & ~is_cut).any()
    assert (run(groups[1], cfg, batch)[1] - logprobs).abs().max() > 0.1
    groups[1].begin(cfg)
    mine = Learner("", cfg, total_steps=4, group=groups[1]).logprobs(cut)
    assert (mine > plain)[is_cut].all() and torch.equal(
        mine[batch.response_mask & ~is_cut], plain[batch.response_mask & ~is_cut]
    )
    for ranks, size, budget in ((1, 1, 60), (2, 1, 60), (2, 1, 10_000), (2, 2, 60)):
        spread = {"n_gpus_per_node": ranks, "context_parallel_size": size}
        other = config(**KEYS, optim__micro_batch_tokens=budget).with_values("trainer", **spread)
        result = run(groups[ranks], other, cut)
        for actual, expected in zip(result[0], metrics, strict=True):
            close(actual, expected)
        torch.testing.assert_close(result[1], logprobs, atol=EXACT, rtol=0)
        close(result[2], weights)


def random_kept(batch: Batch) -> KeptTokens:
    """Three kept tokens at each token, the sampled one among them; none at every fourth token."""
    g = torch.Generator().manual_seed(0)
    shape = batch.response_ids.shape
    numbers = torch.arange(batch.response_ids.numel()).view(shape)
    is_cut = batch.response_mask & (numbers % 4 > 0)
    others = torch.stack(
        [torch.randperm(VOCABULARY - 1, generator=g)[:2] for _ in numbers.view(-1)]
    )
    own = batch.response_ids.reshape(-1, 1)
    ids = torch.cat([own, others + (others >= own)], 1).view(*shape, 3)
    return KeptTokens(ids[is_cut].flatten().int(), 3 * is_cut.int())


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_the_order_of_rollouts_changes_nothing(groups, batch, ranks):
    """This holds for each assignment of rows to ranks."""
    cfg = config(**KEYS, algorithm__name="ppo")
    _, logprobs, weights, _ = run(groups[1], cfg, batch, 1)
    order = torch.tensor([12, 13, 14, 15, 4, 7, 6, 5, 2, 0, 1, 3, 11, 10, 9, 8])
    result = run(groups[ranks], cfg, reordered(batch, order), 1)
    torch.testing.assert_close(result[1], logprobs[order], atol=EXACT, rtol=0)
    close(result[2], weights)


def reordered(batch: Batch, order: torch.Tensor) -> Batch:
    """The same rollouts, one row each, in another order, groups renumbered."""
    rows = {
        name: getattr(batch, name)[order]
        for name in (
            "prompt_ids", "prompt_lengths", "response_ids", "response_lengths", "response_mask",
            "rollout_logprobs", "versions", "token_rewards", "turn", "rewards", "train",
        )
    }  # fmt: skip
    group = torch.tensor([0] * 4 + [1] * 4 + [2] * 4 + [3] * 4)
    return replace(batch, **rows, group=group)


@pytest.mark.parametrize(
    ("ranks", "rows"),
    [(2, 0), (2, 1), (4, 3), *(pytest.param(4, n, marks=pytest.mark.slow) for n in (0, 1))],
)
def test_ranks_without_anything_to_do_keep_step(groups, batch, ranks, rows):
    """Fewer rows that teach than ranks: nobody waits for ever, and the others' gradient stands."""
    cfg = config(**(KEYS | {"algorithm__kl_loss_coef": 0.0, "algorithm__entropy_coef": 0.0}))
    teaches = torch.arange(16) < rows
    alone = replace(batch, train=batch.train & teaches)
    results = []
    for group in (groups[1], groups[ranks]):
        group.begin(cfg)
        learner = Learner("", cfg, total_steps=4, group=group)
        targets = make_targets(alone, cfg, None, None, None)
        targets = replace(targets, advantages=torch.where(alone.action_mask, 0.5, 0.0))
        results.append((learner.update(alone, targets, 1)[0], group.weights()))
    close(results[1][0], results[0][0])
    close(results[1][1], results[0][1])


def test_a_loss_of_the_users_is_not_called_by_a_rank_without_rows(groups, batch):
    """The rank runs all else, or the other would wait for it for ever."""
    keys = KEYS | {"algorithm__kl_loss_coef": 0.0, "algorithm__entropy_coef": 0.0}
    one = replace(batch, train=torch.arange(16) == 0)
    results = []
    for loss in ("vanilla", "loss_of_nonempty_rows"):
        cfg = config(**keys | {"algorithm__ppo_epochs": 1, "algorithm__policy_loss": loss})
        groups[2].begin(cfg)
        groups[2].register(loss)
        learner = Learner("", cfg, total_steps=4, group=groups[2])
        targets = make_targets(one, cfg, None, None, None)
        targets = replace(targets, advantages=torch.where(one.action_mask, 0.5, 0.0).double())
        results.append((learner.update(one, targets, 1)[0], groups[2].weights()))
    close(results[1][1], results[0][1])
    assert results[1][0]["actor/largest"] == 0.5
    for name in ("actor/entropy", "actor/ppo_kl", "actor/grad_norm"):
        assert results[1][0][name] == pytest.approx(results[0][0][name], abs=EXACT)


def test_values_and_scores_come_from_all_ranks(groups, batch):
    cfg = config(**KEYS, algorithm__name="ppo")
    for group in groups.values():
        group.begin(cfg)
        learner = Learner("", cfg, total_steps=4, group=group)
        torch.testing.assert_close(
            learner.ranks.score([1, 2, 3, 4]),
            learner.ranks.score([1, 2, 3, 4, 5])[:3],
            atol=1e-6,
            rtol=0,
        )
        assert learner.values(batch).eq(0).all()  # the head begins at zero


def test_every_rank_writes_its_own_profile(groups, batch, tmp_path):
    group, cfg = groups[2], config(**KEYS)
    plain = run(group, cfg, batch, 1)
    group.begin(cfg)
    group.start_profile()
    learner = Learner("", cfg, total_steps=4, group=group)
    learner.logprobs(batch)
    reference = learner.reference_logprobs(batch)
    learner.update(batch, make_targets(batch, cfg, None, None, reference), 1)
    files = [tmp_path / f"rank_{rank}.json.gz" for rank in range(2)]
    assert group.stop_profile(files) == ["", ""]
    for file in files:
        trace = json.loads(gzip.decompress(file.read_bytes()))
        names = Counter(e["name"] for e in trace["traceEvents"] if e["ph"] == "X")
        assert names["old_logprobs"] == names["reference_logprobs"] == 1
        assert names["forward"] == names["backward"] >= 2 and names["optimizer"] == 2
    assert torch.equal(learner.logprobs(batch), plain[1])


def test_the_calls_of_all_ranks_are_declared():
    methods = {name for name in vars(LearnerRanks) if not name.startswith("_")}
    declared = {*LearnerRanks.__annotations__, *methods} - {*RankGroup.__annotations__}
    assert declared == {*dispatched_methods(Rank)}
