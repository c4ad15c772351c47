"""Engine against trainer: against plain loops, against an enumerated KL, and the guard."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.trainer_fixtures import group, scored, segment, turn
from torch import tensor

from agentrl.config import AlgorithmConfig
from agentrl.errors import RunStopped
from agentrl.learner.batch import Batch, check_logprobs, collate
from agentrl.learner.losses import importance_ratios, importance_weights
from agentrl.learner.mismatch import (
    MEAN,
    MismatchGuard,
    importance_weight_metrics,
    mean_drift,
    mismatch_metrics,
)

NAN = float("nan")


def episodes() -> Batch:
    """A rollout of five turns in two rows, one of a single turn, one that does not train."""
    talk = segment([1], ("A", [2, 3]), ("E", [4]), ("A", [5]), ("E", [6, 7]), ("A", [8, 9, 1]))
    aside = segment([1, 2], ("E", [3]), ("A", [4, 5]), ("E", [6]), ("A", [7]))
    turns = [turn(0, 0, 2), turn(0, 3, 4), turn(1, 1, 3, 1), turn(0, 6, 9), turn(1, 4, 5, 1)]
    short = scored([segment([1], ("A", [2, 3, 4]))], 1.0, [turn(0, 0, 3)])
    out = scored([segment([1], ("A", [5, 6]))], 9.0, [turn(0, 0, 2)], masked=True)
    return collate([group(scored([talk, aside], 0.0, turns), short, out)], 31)


def apart(batch: Batch, gaps: torch.Tensor) -> torch.Tensor:
    """The trainer's logprobs, `gaps` (B, T) above the engine's; spoilt where nothing is sampled."""
    return torch.where(batch.action_mask, batch.rollout_logprobs + gaps, NAN)


@given(st.integers(0, 2**31))
@examples(30)
def test_the_metrics_are_those_of_a_plain_loop(seed):
    batch = episodes()
    g = torch.Generator().manual_seed(seed)
    old = apart(batch, 0.5 * torch.randn(batch.response_ids.shape, generator=g))
    metrics = mismatch_metrics(batch, old, batch.action_mask)

    gaps: list[float] = []
    rollouts: dict[int, float] = defaultdict(float)
    by_turn: dict[str, list[float]] = {}
    for b, row in enumerate(batch.action_mask.tolist()):
        for t, chosen in enumerate(row):
            if not chosen:
                continue
            gap = old[b, t].item() - batch.rollout_logprobs[b, t].item()
            gaps.append(gap)
            rollouts[int(batch.rollout[b])] += gap
            k = int(batch.turn[b, t])
            by_turn.setdefault(f"turn_{k + 1}" if k < 3 else "turn_4plus", []).append(abs(gap))
            if t and not batch.response_mask[b, t - 1]:
                by_turn.setdefault("after_observation", []).append(abs(gap))
    assert {k: len(v) for k, v in by_turn.items()} == {
        "turn_1": 5, "turn_2": 1, "turn_3": 2, "turn_4plus": 4, "after_observation": 4,
    }  # fmt: skip

    def effective(gaps):
        weights = [math.exp(gap) for gap in gaps]
        return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))

    n = len(gaps)
    expected = {
        MEAN: sum(map(abs, gaps)) / n,
        "rollout_corr/logprob_diff_max": max(map(abs, gaps)),
        "rollout_corr/kl": sum(-gap for gap in gaps) / n,
        "rollout_corr/k3_kl": sum(math.expm1(gap) - gap for gap in gaps) / n,
        "rollout_corr/rollout_is_eff_sample_size": effective(gaps),
        "rollout_corr/rollout_is_seq_eff_sample_size": effective(rollouts.values()),
        "training/rollout_ratio_error_mean": sum(abs(math.expm1(gap)) for gap in gaps) / n,
        **{f"{MEAN}/{name}": sum(far) / len(far) for name, far in by_turn.items()},
    }
    assert expected == pytest.approx({name: metrics[name] for name in expected}, abs=1e-12)


def test_what_is_measured_is_the_kl_of_the_engine_to_the_trainer():
    """Tokens in just the engine's proportions: both estimators are the KL itself, no other one."""
    engine, trainer = tensor([4, 2, 1, 1]) / 8, tensor([1, 5, 1, 1]) / 8
    drawn = tensor([0, 0, 0, 0, 1, 1, 2, 3])
    batch = collate([group(scored([segment([1], ("A", drawn.tolist()))], 0.0))], 31)
    batch = replace(batch, rollout_logprobs=engine.log()[drawn][None])
    metrics = mismatch_metrics(batch, trainer.log()[drawn][None], batch.action_mask)
    kl = (engine * (engine / trainer).log()).sum().item()
    assert abs(kl - (trainer * (trainer / engine).log()).sum().item()) > 0.05
    assert metrics["rollout_corr/kl"] == pytest.approx(kl, abs=1e-6)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(kl, abs=1e-6)


def test_effective_sample_sizes_run_from_one_to_a_single_sample():
    batch = episodes()
    token, rollout = (f"rollout_corr/rollout_is_{x}eff_sample_size" for x in ("", "seq_"))
    same = mismatch_metrics(batch, apart(batch, tensor(0.0)), batch.action_mask)
    assert same[token] == same[rollout] == 1.0
    # All tokens alike: their weights are equal, those of rollouts of 9 and of 3 tokens are not.
    higher = mismatch_metrics(batch, apart(batch, tensor(2.0)), batch.action_mask)
    assert higher[token] == pytest.approx(1.0)
    assert higher[rollout] == pytest.approx(0.5, abs=1e-4)
    one = torch.zeros(batch.response_ids.shape)
    one[0, 0] = 50.0
    alone = mismatch_metrics(batch, apart(batch, one), batch.action_mask)
    assert alone[token] == pytest.approx(1 / 12) and alone[rollout] == pytest.approx(1 / 2)


@pytest.mark.parametrize(
    ("places", "named"),
    [
        ([(0, 0), (0, 1)], {"turn_1"}),
        ([(0, 7)], {"turn_4plus"}),
        ([(0, 3)], {"turn_2", "after_observation"}),
        ([(0, 3), (0, 6), (1, 1), (1, 4)], {"turn_2", "turn_3", "turn_4plus", "after_observation"}),
    ],
)
def test_differences_are_reported_by_position(places, named):
    batch = episodes()
    gaps = torch.zeros(batch.response_ids.shape)
    gaps[tuple(zip(*places, strict=True))] = 0.5
    metrics = mismatch_metrics(batch, apart(batch, gaps), batch.action_mask)
    nonzero = {
        n.rpartition("/")[2] for n, far in metrics.items() if n.startswith(f"{MEAN}/") and far
    }
    assert nonzero == named
    if "after_observation" in named and len(places) == 4:
        assert metrics[f"{MEAN}/after_observation"] == pytest.approx(0.5)


def test_there_are_no_metrics_without_tokens_or_turns():
    batch = episodes()
    old = apart(batch, tensor(0.1))
    nobody = torch.zeros_like(batch.action_mask)
    assert mismatch_metrics(batch, old, nobody) == {}
    assert importance_weight_metrics(batch, old, nobody, AlgorithmConfig()) == {}
    only_short = batch.action_mask & (batch.rollout == 1)[:, None]
    metrics = mismatch_metrics(batch, old, only_short)
    assert {n for n in metrics if n.startswith(f"{MEAN}/")} == {f"{MEAN}/turn_1"}
    assert metrics["rollout_corr/rollout_is_seq_eff_sample_size"] == 1.0


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@given(st.integers(0, 2**31))
@examples(20)
def test_the_shares_are_of_weights_that_the_loss_cuts(level, mode, seed):
    batch, cap = episodes(), 1.5
    mask = batch.action_mask
    g = torch.Generator().manual_seed(seed)
    old = apart(batch, 0.5 * torch.randn(mask.shape, generator=g))
    config = AlgorithmConfig(tis_cap=cap, tis_level=level, tis_mode=mode)
    metrics = importance_weight_metrics(batch, old, mask, config)
    ratios = importance_ratios(old, batch.rollout_logprobs, mask, level)[mask]
    weights = importance_weights(ratios, cap, mode)
    cut = (weights != ratios).float().mean().item()
    high, low = (metrics[f"rollout_corr/rollout_is_ratio_fraction_{x}"] for x in ("high", "low"))
    assert cut == pytest.approx(high + low if mode == "mask" else high)
    masked = metrics.get("rollout_corr/rollout_rs_masked_fraction")
    assert masked == (pytest.approx(cut) if mode == "mask" else None)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(ratios.max().item(), rel=1e-6)


def test_the_shares_of_rejected_rows_and_of_tokens_with_weight_0():
    batch = episodes()
    mask, rows = batch.action_mask, batch.action_mask.any(1).nonzero()[:, 0].tolist()
    gaps = torch.zeros(mask.shape)
    gaps[rows[0]] = 0.5
    old = apart(batch, gaps)
    share = (mask[rows[0]].sum() / mask.sum()).item()
    for keys in ({"tis_cap": 0.0}, {"tis_mode": "mask", "tis_cap": 9.0}):
        config = AlgorithmConfig(reject_band=[0.9, 1.1], **keys)
        metrics = importance_weight_metrics(batch, old, mask, config)
        assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(
            1 / len(rows)
        )
        assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(share)
    config = AlgorithmConfig(tis_mode="mask", tis_cap=1.2, tis_low=0.1)
    metrics = importance_weight_metrics(batch, old, mask, config)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(share)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_low"] == 0


def test_all_mismatch_metrics_are_documented():
    page = Path(__file__).parents[2] / "docs/run_folder.md"
    section = (
        page.read_text(encoding="utf-8").split("### Engine against trainer")[1].split("\n## ")[0]
    )
    batch, config = episodes(), AlgorithmConfig(tis_mode="mask", reject_band=[0.5, 2.0])
    old = apart(batch, tensor(0.1))
    names = [*mismatch_metrics(batch, old, batch.action_mask)]
    for name in [*names, *importance_weight_metrics(batch, old, batch.action_mask, config)]:
        stem, _, last = name.rpartition("_")
        assert f"`{name}`" in section or (f"`{stem}_" in section and f"_{last}`" in section), name


def test_without_importance_weights_there_are_no_metrics_of_them():
    batch = episodes()
    old = apart(batch, tensor(0.1))
    assert (
        importance_weight_metrics(batch, old, batch.action_mask, AlgorithmConfig(tis_cap=0)) == {}
    )


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_a_logprob_that_is_not_finite_is_named_with_its_episode(bad):
    batch = replace(episodes(), episodes=("ada", "bob", "cy"))
    old = apart(batch, tensor(0.0))
    check_logprobs(batch, old, batch.action_mask, "trainer")
    old[2, 1] = bad
    message = f"the trainer's logprob of response token 1 of episode bob is {bad}"
    with pytest.raises(RunStopped, match=message):
        check_logprobs(batch, old, batch.action_mask, "trainer")
    check_logprobs(batch, old, batch.action_mask & (batch.rollout == 0)[:, None], "trainer")


# --- the guard ----------------------------------------------------------------------------------


def test_the_guard_lets_pass_ten_times_the_reference_but_no_more():
    guard = MismatchGuard(baseline_noise=0.02)
    guard.check({MEAN: 0.2})
    with pytest.raises(RunStopped, match=r"differ by 0\.201 on average, where 0\.02 was"):
        guard.check({MEAN: 0.201})
    guard.check({})


def test_the_guard_allows_rounding_after_equal_logprobs():
    guard = MismatchGuard(baseline_noise=1e-8)
    guard.check({MEAN: 0.01})
    with pytest.raises(RunStopped, match=r"the limit is 0\.01"):
        guard.check({MEAN: 0.011})
    with pytest.raises(RunStopped, match="differ by nan"):
        guard.check({MEAN: NAN})


def test_the_guard_names_the_worst_turn_and_the_causes():
    batch = episodes()
    gaps = torch.full(batch.response_ids.shape, 0.1)
    gaps[0, 6:9] = 0.9
    with pytest.raises(RunStopped) as stopped:
        MismatchGuard(0.009).check(mismatch_metrics(batch, apart(batch, gaps), batch.action_mask))
    message = str(stopped.value)
    assert "largest in turn 4 or later: 0.7" in message
    assert "The step was not trained on" in message
    causes = ["weights", "temperature", "another model", "option of the engine"]
    assert sorted(causes, key=message.index) == causes


# --- tokens of older versions --------------------------------------------------------------------


def with_versions(batch: Batch, *versions: int) -> Batch:
    """Return the batch with these versions of its training tokens, in turns."""
    mask = batch.action_mask
    rows = torch.full(mask.shape, -1)
    n = int(mask.sum())
    rows[mask] = tensor([versions[i % len(versions)] for i in range(n)]).long()
    return replace(batch, versions=rows)


def test_the_drift_of_a_batch_is_that_of_the_versions_after_each_token():
    drifts = {0: 5.0, 3: 0.5, 4: 0.25, 5: 1.0}
    batch = episodes()
    n = int(batch.action_mask.sum())
    assert mean_drift(with_versions(batch, 5), drifts) == 0
    assert mean_drift(with_versions(batch, 3), drifts) == 1.25
    fives, fours = (n + 1) // 2, n // 2
    assert mean_drift(with_versions(batch, 5, 4), drifts) == pytest.approx(fours / (fives + fours))
    # Tokens that do not train have no influence, and no token has no drift.
    old = replace(batch, versions=torch.where(batch.action_mask, tensor(5), tensor(0)))
    assert mean_drift(old, drifts) == 0
    nobody = replace(batch, train=torch.zeros_like(batch.train))
    assert mean_drift(nobody, drifts) == 0


def test_the_guard_allows_older_tokens_three_times_their_drift():
    guard = MismatchGuard(baseline_noise=0.02)
    guard.drift = 0.1
    guard.check({MEAN: 0.499})
    with pytest.raises(RunStopped, match=r"differ by 0\.501 on average.*the limit is 0\.5\)"):
        guard.check({MEAN: 0.501})
    guard.check({MEAN: 0.4, f"{MEAN}/current_version": 0.199})
    with pytest.raises(RunStopped, match=r"differ by 0\.201 on average.*the limit is 0\.2\)"):
        guard.check({MEAN: 0.4, f"{MEAN}/current_version": 0.201})


@pytest.mark.parametrize(
    ("current", "older", "exists"),
    [(1000, 1, True), (999, 1, False), (1001, 0, False), (0, 1001, False)],
)
def test_tokens_of_the_current_version_have_a_mean_of_their_own(current, older, exists):
    n = current + older
    batch = collate([group(scored([segment([1], ("A", [2] * n))], 0.0, [turn(0, 0, n)]))], 31)
    versions = tensor([7] * current + [6] * older).long()[None]
    gaps = torch.where(versions == 7, 0.125, 0.5)
    batch = replace(batch, versions=versions)
    metrics = mismatch_metrics(batch, apart(batch, gaps), batch.action_mask, version=7)
    assert (f"{MEAN}/current_version" in metrics) == exists
    if exists:
        assert metrics[f"{MEAN}/current_version"] == 0.125
