from __future__ import annotations

import asyncio
import hashlib
import math
import warnings
from array import array
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.tensor_rank import token_positions, update_on_tensors
from support.trainer_fixtures import (
    as_sampled_by,
    config,
    group,
    in_float64,
    plain_logprobs,
    random_groups,
    scored,
    segment,
    step,
    targets_of,
    tensors_in,
    tiny_folder,
    tiny_model,
)
from torch import tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.engine.local import LocalEngine
from agentrl.errors import ConfigError, RunStopped
from agentrl.learner.algorithms import make_targets
from agentrl.learner.batch import Batch, Targets, collate
from agentrl.learner.learner import Learned, Learner
from agentrl.learner.rank import COMPILED_ROWS
from agentrl.registry import policy_loss
from agentrl.store import LEARNED, LEARNED_SCHEMA
from agentrl.testing.tokenizer import byte_tokenizer
from agentrl.trainer.publisher import Publisher

NAN = float("nan")
FULL = {"optim__lr": 1e-3}
LORA = {"optim__lr": 1e-2, "model__lora_rank": 4}
PPO = {"algorithm__name": "ppo", "optim__critic_lr": 1e-3}
SEQUENCE = {"algorithm__tis_level": "sequence", "algorithm__tis_mode": "mask"}
CAP = 1.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def batch() -> Batch:
    return as_sampled_by(tiny_model(), collate(random_groups(0, groups=4, n=4, dead=[1]), 31))


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in learner.rank.policy.model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def gradient(learner: Learner, tmp_path: Path) -> dict[str, torch.Tensor]:
    """The clipped gradient of the first optimizer step: ten times Adam's first moment."""
    learner.ranks.save(tmp_path)
    moments = tensors_in(tmp_path / "actor")
    return {n: 10 * t for n, t in moments.items() if n.startswith("exp_avg.")}


# --- logprobs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["prompt", "response"])
def test_a_token_id_outside_the_vocabulary_is_named(folder, batch, which):
    learner = Learner(folder, config(), total_steps=1)
    ids = getattr(batch, f"{which}_ids")
    first = ids.shape[1] - int(batch.prompt_lengths[2]) if which == "prompt" else 0
    for wrong in (32, -1):
        changed = ids.clone()
        changed[2, first] = wrong
        message = rf"token 0 of the {which} of row 2 .* is {wrong}, .* of 32 \(0 to 31\)"
        with pytest.raises(RunStopped, match=message):
            learner.logprobs(replace(batch, **{f"{which}_ids": changed}))


def test_padding_ids_are_never_read_as_tokens(folder, batch):
    learner = Learner(folder, config(), total_steps=1)
    wide, tall = batch.prompt_ids.shape[1], batch.response_ids.shape[1]
    filling = torch.arange(wide) < wide - batch.prompt_lengths[:, None]
    after = torch.arange(tall) >= batch.response_lengths[:, None]
    assert filling.any() and after.any()
    filled = replace(
        batch,
        prompt_ids=batch.prompt_ids.masked_fill(filling, 99),
        response_ids=batch.response_ids.masked_fill(after, 99),
    )
    assert torch.equal(learner.logprobs(filled), learner.logprobs(batch))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_model_at_the_sampled_tokens(folder, batch, temperature):
    learner = Learner(folder, config(rollout__temperature=temperature), total_steps=1)
    expected = plain_logprobs(tiny_model(), batch, temperature)
    torch.testing.assert_close(learner.logprobs(batch), expected, atol=1e-5, rtol=1e-5)


def test_at_the_first_update_every_ratio_is_one(folder, batch):
    for keys in (FULL, LORA):
        metrics = step(Learner(folder, config(**keys), total_steps=1), batch)
        assert metrics["training/rollout_ratio_error_mean"] < 1e-6
        assert metrics["training/rollout_ratio_error_max"] < 1e-5
        assert metrics["training/rollout_probs_diff_max"] < 1e-5
        assert metrics["actor/ppo_kl"] == 0.0
        assert metrics["actor/pg_clipfrac"] == 0.0


def test_a_wrong_temperature_shows_in_the_ratio(folder, batch):
    learner = Learner(folder, config(rollout__temperature=0.7), total_steps=1)
    assert step(learner, batch)["training/rollout_ratio_error_mean"] > 0.1


def test_old_logprobs_are_computed_only_if_the_update_cannot_recompute_them(folder, batch):
    def is_computed(**keys) -> bool:
        learner = Learner(folder, config(**keys), total_steps=1)
        return learner.old_logprobs(batch) is not None

    assert not is_computed()
    assert not is_computed(algorithm__ppo_epochs=3)
    assert not is_computed(algorithm__mini_batch_size=16)
    assert is_computed(algorithm__mini_batch_size=8)
    assert is_computed(algorithm__kl_reward_coef=0.1)


def test_recomputed_old_logprobs_train_like_passed_ones(folder, batch):
    """Two epochs over one mini-batch: the first pass is the old policy's."""
    without = Learner(folder, config(**FULL, algorithm__ppo_epochs=2), total_steps=1)
    with_logprobs = Learner(folder, config(**FULL, algorithm__ppo_epochs=2), total_steps=1)
    targets = targets_of(without, batch)
    a, _ = without.update(batch, targets, 1)
    targets = replace(targets, old_logprobs=with_logprobs.logprobs(batch))
    b, _ = with_logprobs.update(batch, targets, 1)
    assert a["actor/ppo_kl"] != 0.0
    assert a["actor/pg_loss"] == pytest.approx(b["actor/pg_loss"], abs=1e-6)
    for n, w in weights(without).items():
        torch.testing.assert_close(w, weights(with_logprobs)[n], atol=1e-5, rtol=1e-4)


# --- the loss, against a plain one --------------------------------------------------------------


def plain_update(
    batch: Batch,
    targets: Targets,
    reference: torch.Tensor,
    epochs: int,
    level: str = "token",
    mode: str = "truncate",
    **w: float,
):
    """The same update written without batching, skipping or packing: row by row, token by token.

    Returns:
        The weights, and (B, T) numbers of each token, NaN where there is none.
    """
    model = in_float64(tiny_model())
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    old: dict[tuple[int, int], torch.Tensor] = {}
    names = ("old_logprobs", "importance_weights", "entropy", "clipped")
    numbers = {n: torch.full(batch.response_mask.shape, NAN).double() for n in names}
    tokens = int(batch.response_mask.sum())
    for _ in range(epochs):
        loss = torch.zeros((), dtype=torch.float64)
        for b in range(len(batch.rollout)):
            p, r = int(batch.prompt_lengths[b]), int(batch.response_lengths[b])
            prompt = batch.prompt_ids[b, batch.prompt_ids.shape[1] - p :]
            ids = torch.cat([prompt, batch.response_ids[b, :r]])
            log_p = model(input_ids=ids[None]).logits[0].log_softmax(-1)
            sampled = [t for t in range(r) if batch.response_mask[b, t]]
            for t in sampled:
                old.setdefault((b, t), log_p[p + t - 1, ids[p + t]].detach())
            gaps = {t: float(old[b, t] - batch.rollout_logprobs[b, t]) for t in sampled}
            for t in range(r):
                if not batch.response_mask[b, t]:
                    continue
                row = log_p[p + t - 1]
                lp, adv = row[ids[p + t]], targets.advantages[b, t].double()
                ratio = (lp - old[b, t]).exp()
                pg = -torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
                weight = math.exp(gaps[t] if level == "token" else sum(gaps.values()))
                if mode == "mask":
                    weight = weight if 1 / CAP <= weight <= CAP else 0.0
                else:
                    weight = min(weight, CAP)
                pg = pg * weight
                gap = reference[b, t] - lp
                now = math.exp(float(lp - batch.rollout_logprobs[b, t]))
                kl = (gap.exp() - 1 - gap) * min(now, CAP)  # whatever the mode is
                entropy = -(row.exp() * row).sum()
                is_clipped = bool(ratio > 1.2 if adv > 0 else ratio < 0.8)
                if numbers["entropy"][b, t].isnan():
                    numbers["old_logprobs"][b, t] = old[b, t]
                    numbers["importance_weights"][b, t] = weight
                    numbers["entropy"][b, t] = entropy.detach()
                    numbers["clipped"][b, t] = 0.0
                numbers["clipped"][b, t] += is_clipped and adv != 0
                loss = loss + (pg + w["kl"] * kl - w["entropy"] * entropy) / tokens
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
    return dict(model.named_parameters()), numbers


@pytest.mark.parametrize(
    ("kl", "entropy", "level", "mode"),
    [
        (0.0, 0.0, "token", "truncate"),
        pytest.param(0.3, 0.0, "token", "truncate", marks=pytest.mark.slow),
        (0.0, 0.2, "token", "truncate"),
        (0.0, 0.0, "token", "mask"),
        (0.0, 0.0, "sequence", "truncate"),
        (0.3, 0.0, "sequence", "mask"),
    ],
)
def test_the_update_is_the_one_in_the_paper(folder, batch, kl, entropy, level, mode):
    """With a dead group, whose rows are not run in the first case and must not be missed."""
    noise = torch.randn(batch.rollout_logprobs.shape, generator=torch.Generator().manual_seed(0))
    batch = replace(batch, rollout_logprobs=batch.rollout_logprobs + 0.4 * noise)
    keys = {
        "algorithm__kl_loss_coef": kl,
        "algorithm__entropy_coef": entropy,
        "algorithm__tis_cap": CAP,
        "algorithm__tis_level": level,
        "algorithm__tis_mode": mode,
    }
    learner = Learner(folder, config(**FULL, **keys, algorithm__ppo_epochs=3), total_steps=1)
    in_float64(learner.rank.policy.model)
    reference = plain_logprobs(tiny_model(1), batch)
    targets = replace(targets_of(learner, batch), reference_logprobs=reference)
    metrics, learned = learner.update(batch, targets, 1)
    shares = [metrics[f"rollout_corr/rollout_is_ratio_fraction_{x}"] for x in ("high", "low")]
    assert all(0.01 < share < 0.99 for share in shares)  # or the cap would not be tried
    expected, numbers = plain_update(
        batch, targets, reference, 3, level, mode, kl=kl, entropy=entropy
    )
    # Old logprobs are float32 between the epochs, and Adam divides by small gradients.
    for name, weight in weights(learner).items():
        torch.testing.assert_close(weight, expected[name].detach(), atol=2e-6, rtol=0.0)
    # A row without advantages is run only for a KL or an entropy term. Else nothing is known of it.
    is_run = (targets.advantages != 0).any(1) if kl == entropy == 0 else torch.tensor(True)
    assert is_run.all() or not is_run[batch.group[batch.rollout] == 1].any()
    for name, column in numbers.items():
        column = column.masked_fill(~is_run.view(-1, 1), NAN)
        mine = getattr(learned, name).double()
        torch.testing.assert_close(mine, column, atol=3e-6, rtol=0.0, equal_nan=True, msg=name)
    assert numbers["clipped"].nan_to_num().max() == 2  # not in the first of the three passes


def test_each_number_of_a_token_is_the_one_that_the_loss_used():
    """Two epochs over two mini-batches of PPO with a KL term; a rollout is masked."""
    batch = collate(random_groups(1, groups=4, n=2), 31)
    batch = replace(batch, response_ids=token_positions(batch), train=torch.arange(8) != 2)
    mask = batch.response_mask & (batch.train[batch.rollout])[:, None]
    drawn = torch.randn(5, *mask.shape, generator=torch.Generator().manual_seed(0)) - 3
    now, old, reference, values, entropy = drawn
    c = config(
        **PPO,
        algorithm__kl_loss_coef=0.1,
        algorithm__ppo_epochs=2,
        algorithm__mini_batch_size=4,
        algorithm__dual_clip=3.0,
        algorithm__tis_cap=CAP,
    )
    targets = make_targets(batch, c, old, values, reference, teacher_logprobs=reference - 1)
    outputs = {"logprobs": now, "entropy": entropy, "values": values}
    _, _, learned = update_on_tensors(batch, targets, c, **outputs)
    ratios, a = (now.double() - old).exp(), targets.advantages
    too_low, too_high, far = (
        (a < 0) & (ratios < 0.8),
        (a > 0) & (ratios > 1.2),
        (a < 0) & (ratios > 3),
    )
    assert all((mask & part).any() for part in (too_low, too_high, far))
    expected = {
        "old_logprobs": old,
        "reference_logprobs": reference,
        "teacher_logprobs": reference - 1,
        "values": values,
        "advantages": targets.advantages,
        "returns": targets.returns,
        "importance_weights": (old.double() - batch.rollout_logprobs).exp().clamp(max=CAP),
        "entropy": entropy,
        "clipped": 2.0 * (too_low | too_high | far),
    }
    assert {field.name for field in fields(learned)} == expected.keys()
    for name, numbers in expected.items():
        numbers = numbers.double().masked_fill(~mask, NAN)
        mine = getattr(learned, name).double()
        torch.testing.assert_close(mine, numbers, atol=0, rtol=1e-5, equal_nan=True, msg=name)


def test_the_table_of_what_was_learned_has_a_row_for_each_segment():
    rows = segment([1], ("A", [2, 3]), ("E", [4])), segment([1], ("A", [5]))
    batch = collate([group(scored(rows, 1.0), scored(rows[:1], 0.0))], 31)
    batch = replace(batch, episodes=("a", "b"))
    numbers = torch.tensor([[0.5, -1.0, NAN], [0.25, NAN, NAN], [0.0, 2.0, NAN]]).double()
    none = dict.fromkeys(LEARNED)
    table = Learned(**none | {"advantages": numbers, "clipped": numbers.abs().ceil()}).table(batch)
    written = table.cast(LEARNED_SCHEMA).to_pydict()
    assert written.pop("episode_id") == ["a", "a", "b"] and written.pop("segment") == [0, 1, 0]
    assert written.pop("advantages") == [[0.5, -1.0, None], [0.25], [0.0, 2.0, None]]
    assert written.pop("clipped") == [[1, 1, None], [1], [0, 2, None]]
    assert all(column == [[None] * 3, [None], [None] * 3] for column in written.values())


def test_what_is_not_known_is_not_zero(folder, batch):
    """Of rows that are not run, and without a critic, a KL term, a cap or a count of clips."""

    def silent(logprobs, old, advantages, mask, config):
        return torch.where(mask, -advantages * logprobs, 0.0), {"pg_clipfrac": mask.float()}

    policy_loss("silent")(silent)
    keys = {"algorithm__tis_cap": 0, "algorithm__policy_loss": "silent"}
    learner = Learner(folder, config(**FULL, **keys), total_steps=1)
    targets = targets_of(learner, batch)
    _, learned = learner.update(batch, targets, 1)
    for name in ("reference_logprobs", "values", "returns", "importance_weights", "clipped"):
        assert getattr(learned, name) is None
    is_dead = (batch.group[batch.rollout] == 1)[:, None]
    assert (learned.advantages[batch.action_mask & is_dead] == 0).all()
    assert torch.equal(~learned.advantages.isnan(), batch.action_mask)
    for numbers in (learned.old_logprobs, learned.entropy):
        assert torch.equal(~numbers.isnan(), batch.action_mask & ~is_dead)
    # Old logprobs that were computed before the update are known for all rows.
    old = learner.logprobs(batch)
    _, learned = learner.update(batch, replace(targets, old_logprobs=old), 2)
    assert torch.equal(~learned.old_logprobs.isnan(), batch.action_mask)
    _, learned = learner.update(batch, targets, 3, learn_policy=False)
    assert learned.old_logprobs is learned.entropy is learned.clipped is None


@pytest.mark.parametrize(
    "keys", [FULL, FULL | PPO | {"algorithm__kl_loss_coef": 0.1}, FULL | SEQUENCE]
)
def test_micro_batches_change_neither_loss_nor_gradient(folder, batch, tmp_path, keys):
    batch = replace(batch, rollout_logprobs=batch.rollout_logprobs * 1.02)
    runs = []
    for tokens in (1, 40, 16384):
        learner = Learner(folder, config(**keys, optim__micro_batch_tokens=tokens), total_steps=1)
        targets = targets_of(learner, batch)
        if runs:
            targets = runs[0][2]
        in_float64(learner.rank.policy.model)
        metrics, _ = learner.update(batch, targets, 1)
        out = tmp_path / str(tokens)
        out.mkdir()
        runs.append((metrics, gradient(learner, out), targets))
    for metrics, grads, _ in runs[1:]:
        assert metrics["actor/pg_loss"] == pytest.approx(runs[0][0]["actor/pg_loss"], abs=1e-10)
        assert metrics["actor/grad_norm"] == pytest.approx(runs[0][0]["actor/grad_norm"], abs=1e-10)
        for name, g in grads.items():
            torch.testing.assert_close(g, runs[0][1][name], atol=1e-10, rtol=0.0)


def test_nothing_outside_the_mask_is_read(folder, batch):
    """Spoil every slot of every stream that is no sampled token."""
    keys = FULL | PPO | {"algorithm__kl_loss_coef": 0.1, "algorithm__ppo_epochs": 2}
    runs = []
    for filler in (0.0, NAN, 1e30):
        learner = Learner(folder, config(**keys), total_steps=1)
        targets = targets_of(learner, batch)

        def spoil(x: torch.Tensor | None, filler: float = filler) -> torch.Tensor:
            assert x is not None
            return torch.where(batch.response_mask, x, filler)

        spoilt = replace(
            targets,
            advantages=spoil(targets.advantages),
            weights=spoil(targets.weights),
            old_logprobs=spoil(learner.logprobs(batch)),
            reference_logprobs=spoil(targets.reference_logprobs),
            returns=spoil(targets.returns),
            values=spoil(targets.values),
        )
        padded = replace(batch, rollout_logprobs=spoil(batch.rollout_logprobs))
        metrics, _ = learner.update(padded, spoilt, 1)
        runs.append((metrics, weights(learner)))
    assert all(math.isfinite(v) for v in runs[0][0].values())
    for metrics, w in runs[1:]:
        assert metrics == runs[0][0]
        assert same(w, runs[0][1])


def test_importance_weights_scale_the_policy_gradient(folder, batch):
    """The engine held every token half as likely: each counts twice, but no more than the cap."""
    off = replace(batch, rollout_logprobs=batch.rollout_logprobs - math.log(2))
    losses = []
    for cap in (0.0, 1.5, 10.0):
        learner = Learner(folder, config(**FULL, algorithm__tis_cap=cap), total_steps=1)
        losses.append(step(learner, off)["actor/grad_norm"])
    assert losses[1] / losses[0] == pytest.approx(1.5, rel=1e-4)
    assert losses[2] / losses[0] == pytest.approx(2.0, rel=1e-4)


# --- steps --------------------------------------------------------------------------------------


def test_one_optimizer_step_per_mini_batch_and_epoch(folder, batch, tmp_path):
    keys = {"algorithm__mini_batch_size": 6, "algorithm__ppo_epochs": 2}  # 16 rollouts: 3 each
    learner = Learner(folder, config(**FULL, **keys, **PPO), total_steps=1)
    step(learner, batch)
    learner.ranks.save(tmp_path)
    for name in ("actor", "critic"):
        moments = tensors_in(tmp_path / name)
        assert {t.item() for n, t in moments.items() if n.startswith("step.")} == {6.0}


def test_the_passes_of_an_optimizer_step_are_counted(folder, batch):
    """Three of four groups have a loss: a row of four each, longer than one token."""
    for tokens, passes in ((1, 3 * 4), (10**6, 1)):
        learner = Learner(folder, config(**FULL, optim__micro_batch_tokens=tokens), total_steps=9)
        assert step(learner, batch)["perf/micro_batches"] == passes


@pytest.mark.parametrize("keys", [FULL, LORA, PPO], ids=["full", "lora", "ppo"])
def test_compiling_runs_both_passes_and_changes_nothing(folder, keys):
    learner = Learner(str(folder), config(**keys), total_steps=4)
    rank = learner.rank
    layer = rank.policy.packed_model.layers()[0]
    plain, passes = layer.forward, []

    def forward(*args, **kwargs):
        passes.append(torch.is_grad_enabled())
        return plain(*args, **kwargs)

    layer.forward = forward
    before = [p.clone() for p in rank.policy.model.parameters()]
    learner.ranks.compile()
    assert not passes  # Nothing is compiled on a CPU.
    rank._compiled = True
    learner.ranks.compile()
    assert passes == [False, True] * len(COMPILED_ROWS)
    assert all(p.grad is None for p in rank.policy.model.parameters())
    assert all(map(torch.equal, before, rank.policy.model.parameters()))


def test_a_batch_without_signal_changes_no_weight_not_even_by_momentum(folder, batch):
    learner = Learner(folder, config(**FULL), total_steps=9)
    step(learner, batch)
    before = weights(learner)
    dead = collate(random_groups(1, groups=2, n=4, dead=[0, 1]), 31)
    metrics = step(learner, dead, 2)
    assert same(weights(learner), before)
    assert metrics["actor/grad_norm"] == 0.0


def test_the_norm_is_that_of_the_optimizer_steps_that_were_made(folder):
    """A mini-batch without a signal takes none: it is no gradient of 0."""
    keys = FULL | {"algorithm__mini_batch_size": 4, "optim__lr": 1e-9}
    alone = random_groups(1, groups=1, n=4)
    norms = []
    for groups in (alone, alone + random_groups(2, groups=2, n=4, dead=[0, 1])):
        learner = Learner(folder, config(**keys), total_steps=1)
        norms.append(step(learner, collate(groups, 31))["actor/grad_norm"])
    assert norms[0] > 0.01
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_masked_rollouts_and_rollouts_without_tokens_are_harmless(folder):
    rows = [scored([segment([1], ("A", [2, 3]))], r) for r in (1.0, 0.0)]
    cut = scored([segment([1], ("A", [4] * 9))], 9.0, masked=True)
    silent = scored([segment([1, 2], ("E", [3]))], 0.5)
    empty = scored([segment([1])], 0.5)
    keys = FULL | PPO
    learner = Learner(folder, config(**keys), total_steps=1)
    metrics = step(learner, collate([group(*rows, cut, silent, empty)], 31))
    assert all(math.isfinite(v) for v in metrics.values())
    nobody = step(learner, collate([group(cut, empty)], 31), 2)
    assert nobody["actor/grad_norm"] == nobody["critic/grad_norm"] == 0.0


def test_the_learning_rate_is_linear_and_ends_at_its_share(folder, batch):
    learner = Learner(folder, config(optim__lr=1e-3, optim__lr_final=0.2), total_steps=5)
    rates = [step(learner, batch, s)["actor/lr"] for s in (1, 3, 5, 6)]
    assert rates == pytest.approx([1e-3, 6e-4, 2e-4, 2e-4])
    alone = Learner(folder, config(optim__lr=1e-3, optim__lr_final=0.2), total_steps=1)
    assert step(alone, batch)["actor/lr"] == pytest.approx(1e-3)


@pytest.mark.parametrize("keys", [FULL, LORA, FULL | PPO])
def test_a_loss_that_is_not_finite_stops_the_run_before_any_weight_changes(folder, batch, keys):
    learner = Learner(folder, config(**keys), total_steps=9)
    targets = targets_of(learner, batch)
    step(learner, batch, 3)
    before = weights(learner)
    spoilt = targets.advantages.clone()
    spoilt[0, 0] = NAN
    with pytest.raises(RunStopped, match=r"step 4: the actor's loss or gradient .*pg_loss=nan"):
        learner.update(batch, replace(targets, advantages=spoilt), 4)
    assert same(weights(learner), before)
    metrics = step(learner, batch, 4)
    assert all(math.isfinite(v) for v in metrics.values())


def test_the_error_for_a_nan_loss_says_whether_weights_have_changed(folder, batch):
    learner = Learner(folder, config(**FULL | PPO), total_steps=4)
    targets = targets_of(learner, batch)
    before = weights(learner)
    with pytest.raises(RunStopped, match=r"critic's loss .* Earlier optimizer steps of this train"):
        learner.update(batch, replace(targets, returns=targets.returns * NAN), 1)
    assert not same(weights(learner), before)


def test_the_error_for_a_nan_loss_names_a_custom_loss_first(folder, batch):
    policy_loss("mine")(lambda logprobs, old, a, mask, config: (logprobs * NAN, {}))
    learner = Learner(folder, config(**FULL, algorithm__policy_loss="mine"), total_steps=1)
    with pytest.raises(RunStopped, match=r"likeliest cause is your own policy loss 'mine'"):
        step(learner, batch)
    learner = Learner(folder, config(**FULL), total_steps=1)
    with pytest.raises(RunStopped, match=r"have not changed\. A lower learning rate"):
        targets = targets_of(learner, batch)
        learner.update(batch, replace(targets, advantages=targets.advantages * NAN), 1)


# --- before a weight moves ----------------------------------------------------------------------

# Old logprobs found on the first pass, or given; rows that cannot move the policy; a critic.
WAYS = [
    LORA | PPO,
    FULL | {"algorithm__mini_batch_size": 4},
    *(pytest.param(keys, marks=pytest.mark.slow) for keys in (FULL, LORA, FULL | PPO)),
]


def everything(learner: Learner, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    learner.ranks.save(folder)
    return {f"{f.name}/{n}": t for f in folder.iterdir() for n, t in tensors_in(f).items()}


@pytest.mark.parametrize("keys", WAYS)
def test_a_check_is_called_once_before_any_weight_changes(folder, batch, tmp_path, keys):
    learner = Learner(folder, config(**keys, algorithm__ppo_epochs=2), total_steps=1)
    targets = targets_of(learner, batch)
    before, seen = everything(learner, tmp_path / "before"), []

    def check(metrics):
        assert same(everything(learner, tmp_path / f"check{len(seen)}"), before)
        seen.append(dict(metrics))

    metrics, _ = learner.update(batch, targets, 1, check)
    (checked,) = seen
    assert checked["rollout_corr/logprob_diff_mean"] < 1e-6
    assert checked.items() <= metrics.items()
    after = everything(learner, tmp_path / "after")
    for name, weight in before.items():
        assert not torch.equal(weight, after[name]) or "lora_A" in name, name


@pytest.mark.parametrize("keys", WAYS)
def test_a_batch_that_a_check_refuses_changes_nothing(folder, batch, tmp_path, keys):
    """The metrics and weights of the next step are those of a learner that never saw the first."""

    def refuse(metrics):
        raise RunStopped("no")

    learner, fresh = (Learner(folder, config(**keys), total_steps=2) for _ in range(2))
    spoilt = replace(batch, rollout_logprobs=batch.rollout_logprobs - 1.0)
    with pytest.raises(RunStopped, match="no"):
        learner.update(spoilt, targets_of(learner, spoilt), 1, refuse)
    assert step(learner, batch) == step(fresh, batch)
    assert same(everything(learner, tmp_path / "a"), everything(fresh, tmp_path / "b"))


def test_a_check_is_called_without_rows_to_train(folder):
    learner = Learner(folder, config(**FULL), total_steps=1)
    dead = collate(random_groups(1, groups=2, n=4, dead=[0, 1]), 31)
    seen = []
    learner.update(dead, targets_of(learner, dead), 1, seen.append)
    assert seen == [{}]


@pytest.mark.parametrize("keys", [FULL, FULL | {"algorithm__mini_batch_size": 4}, FULL | PPO])
def test_a_trainer_that_computes_no_number_is_stopped_and_the_episode_named(
    folder, batch, tmp_path, keys
):
    learner = Learner(folder, config(**keys), total_steps=1)
    targets = targets_of(learner, batch)
    with torch.no_grad():  # tied: there is no distribution any more
        learner.rank.policy.model.get_parameter("model.embed_tokens.weight")[3] = NAN
    spoilt = replace(targets, old_logprobs=learner.old_logprobs(batch))
    named = replace(batch, episodes=tuple(f"e{r}" for r in range(16)))
    before = everything(learner, tmp_path / "before")
    with pytest.raises(
        RunStopped, match="trainer's logprob of response token 0 of episode e0 is nan"
    ):
        learner.update(named, spoilt, 1)
    after = everything(learner, tmp_path / "after")
    assert all(torch.equal(t, after[n]) or t.isnan().any() for n, t in before.items())


# --- reference ----------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [FULL, LORA])
def test_the_kl_to_the_reference_starts_at_zero_and_the_reference_never_moves(folder, batch, keys):
    keys = keys | {"algorithm__kl_loss_coef": 0.1, "algorithm__ppo_epochs": 2}
    learner = Learner(folder, config(**keys), total_steps=9)
    base = [p for n, p in learner.rank.policy.model.named_parameters() if "lora_" not in n]

    def digest() -> str:
        return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in base)).hexdigest()

    before, base_digest = learner.reference_logprobs(batch), digest()
    assert before is not None
    assert torch.equal(before, learner.logprobs(batch))
    single = Learner(folder, config(**(keys | {"algorithm__ppo_epochs": 1})), total_steps=9)
    assert step(single, batch)["actor/kl_loss"] == 0.0
    for s in range(1, 4):
        metrics = step(learner, batch, s)
    assert metrics["actor/kl_loss"] > 0
    after = learner.reference_logprobs(batch)
    assert after is not None and torch.equal(after, before)
    assert not torch.equal(learner.logprobs(batch), before)
    assert (digest() == base_digest) == (learner.rank.policy.peft is not None)


def test_without_a_kl_there_is_no_reference(folder, batch):
    assert Learner(folder, config(), total_steps=1).reference_logprobs(batch) is None
    assert Learner(folder, config(), total_steps=1).values(batch) is None


# --- saving -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [FULL, LORA | PPO, *(pytest.param(k, marks=pytest.mark.slow) for k in (LORA, FULL | PPO))],
)
def test_a_resumed_learner_goes_on_bit_for_bit(folder, batch, tmp_path, keys):
    c = config(**keys, optim__lr_final=0.1, algorithm__ppo_epochs=2)
    straight = Learner(folder, c, total_steps=4)
    first = Learner(folder, c, total_steps=4)
    for s in (1, 2):
        step(straight, batch, s)
        step(first, batch, s)
    first.ranks.save(tmp_path)
    files = [t for name in first.rank.optimizers for t in tensors_in(tmp_path / name).values()]
    assert first.ranks.saved_bytes() == sum(t.nbytes for t in files)
    torch.manual_seed(99)
    second = Learner(folder, c, total_steps=4)
    second.ranks.load(tmp_path)
    for s in (3, 4):
        assert step(straight, batch, s) == step(second, batch, s)
    assert same(weights(straight), weights(second))
    written = {f.suffix for who in ("actor", "critic") for f in (tmp_path / who).glob("*")}
    assert written == {".safetensors"}


def test_a_checkpoint_before_the_first_step_loads(folder, batch, tmp_path):
    a, b = (Learner(folder, config(**FULL), total_steps=2) for _ in range(2))
    a.ranks.save(tmp_path)
    b.ranks.load(tmp_path)
    assert step(a, batch) == step(b, batch)


def test_a_checkpoint_of_another_model_is_refused(folder, tmp_path):
    Learner(folder, config(model__lora_rank=2), total_steps=1).ranks.save(tmp_path)
    with pytest.raises(ConfigError, match="of another model"):
        Learner(folder, config(model__lora_rank=4), total_steps=1).ranks.load(tmp_path)
    with pytest.raises(ConfigError, match="of another model"):
        Learner(folder, config(), total_steps=1).ranks.load(tmp_path)
    with pytest.raises(ConfigError, match="has no critic"):
        Learner(folder, config(model__lora_rank=2, **PPO), total_steps=1).ranks.load(tmp_path)


@pytest.mark.parametrize("keys", [FULL, LORA, LORA | PPO])
def test_transformers_loads_the_saved_folder(folder, batch, tmp_path, keys):
    learner = Learner(folder, config(**keys), total_steps=2)
    step(learner, batch)
    learner.ranks.save_pretrained(tmp_path)
    if "model__lora_rank" in keys:
        base = AutoModelForCausalLM.from_pretrained(folder)
        loaded = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    else:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(
        plain_logprobs(loaded, batch),  # type: ignore[arg-type]
        learner.logprobs(batch),
        atol=1e-5,
        rtol=1e-5,
    )


# --- from an adapter ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory) -> Path:
    """Return the folder of an adapter with random weights."""
    learner = Learner(folder, config(**LORA), total_steps=2)
    for name, weight in learner.rank.policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    path = tmp_path_factory.mktemp("adapter")
    learner.ranks.save_pretrained(path)
    return path


def as_peft_says(folder: Path, adapter: Path, batch: Batch) -> torch.Tensor:
    base = AutoModelForCausalLM.from_pretrained(folder)
    return plain_logprobs(PeftModel.from_pretrained(base, str(adapter)).eval(), batch)  # type: ignore


def test_peft_logs_no_deprecation_warning_about_checkpointing(folder, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        learner = Learner(folder, config(**LORA | PPO), total_steps=1)
        learner.ranks.save_pretrained(tmp_path / "adapter")
        Learner(tmp_path / "adapter", config(), total_steps=1)  # merged at loading


def test_an_engine_samples_from_the_base_with_its_adapter(folder, adapter, batch):
    expected = as_peft_says(folder, adapter, batch)
    scores = torch.zeros_like(expected)
    engine = LocalEngine.load(str(adapter), byte_tokenizer(), device="cpu")
    for b in range(len(expected)):
        p, r = int(batch.prompt_lengths[b]), int(batch.response_lengths[b])
        ids = [*batch.prompt_ids[b, -p:].tolist(), *batch.response_ids[b, :r].tolist()]
        scores[b, :r] = tensor(asyncio.run(engine.scores(array("i", ids)))[0][p:])
    engine.close()
    mask = batch.response_mask
    torch.testing.assert_close(scores[mask], expected[mask], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("keys", [FULL, LORA, LORA | PPO])
def test_a_run_from_an_adapter_begins_there_and_leaves_a_whole_model(
    folder, adapter, batch, tmp_path, keys
):
    """This holds with LoRA too: the folder of an adapter could only name the wrong base model."""
    learner = Learner(adapter, config(**keys, algorithm__kl_loss_coef=0.1), total_steps=2)
    start = learner.logprobs(batch)
    torch.testing.assert_close(start, as_peft_says(folder, adapter, batch), atol=1e-5, rtol=1e-5)
    batch = replace(batch, rollout_logprobs=start)
    assert step(learner, batch)["actor/kl_loss"] == 0.0
    assert step(learner, batch, 2)["actor/kl_loss"] > 0.0
    learner.ranks.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").exists()
    assert not (tmp_path / "adapter_config.json").exists()
    names = {name for name, _ in tiny_model().named_parameters()}
    assert load_file(tmp_path / "model.safetensors").keys() == names
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert not torch.allclose(learner.logprobs(batch), start, atol=1e-3)
    torch.testing.assert_close(
        plain_logprobs(loaded, batch), learner.logprobs(batch), atol=1e-5, rtol=1e-5
    )


class PlainEngine:
    """A plain model that takes tensors by name."""

    def __init__(self):
        self.model = tiny_model()
        self.version = -1
        self.holds = False
        """True if it holds the last update."""
        self.loads = True
        """False if it loses what is sent."""

    def publish(self, update):
        self.version = update.version
        if self.holds and not update.is_changed:
            return 0
        own = dict(self.model.named_parameters())
        sent = 0
        with torch.no_grad():
            for name, value in update.weights():
                own[name].copy_(value if self.loads else own[name])
                sent += value.nbytes
        self.holds = True
        return sent

    def scores(self, token_ids):
        with torch.no_grad():
            logits = self.model(torch.tensor([token_ids])).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[1:, None])[:, 0]
        return [array("f", [0.0, *logprobs.tolist()])]

    def weights_moving(self): ...

    def pause(self): ...

    def resume(self): ...

    def close(self): ...


@pytest.mark.parametrize("keys", [FULL, LORA])
def test_an_engine_with_the_published_weights_samples_from_the_policy(folder, batch, keys):
    learner, engine = Learner(folder, config(**keys), total_steps=2), PlainEngine()
    publisher = Publisher(learner, engine, array("i", [3, 1, 4, 1, 5, 9, 2, 6]), engine.scores)
    publisher.publish(0)
    for s in (1, 2):
        step(learner, batch, s)
        metrics = publisher.publish(s)
        assert metrics["canary/mismatch"] < 1e-5 < metrics["canary/drift"]
    assert engine.version == 2
    assert metrics["perf/update_weights_bytes"] == sum(t.nbytes for _, t in learner.export())
    torch.testing.assert_close(
        plain_logprobs(engine.model, batch), learner.logprobs(batch), atol=1e-5, rtol=1e-5
    )
    assert not torch.allclose(learner.logprobs(batch), plain_logprobs(tiny_model(), batch))


def test_an_engine_that_gets_an_unchanged_policy_again_is_compared(folder, batch):
    learner, engine = Learner(folder, config(**FULL), total_steps=1), PlainEngine()
    publisher = Publisher(learner, engine, array("i", [3, 1, 4, 1, 5, 9, 2, 6]), engine.scores)
    publisher.publish(0)
    step(learner, batch, 1)
    size = publisher.publish(1)["perf/update_weights_bytes"]
    assert publisher.publish(2)["perf/update_weights_bytes"] == 0 and engine.version == 2
    engine.model, engine.holds = tiny_model(), False  # It is restarted.
    assert publisher.publish(3)["perf/update_weights_bytes"] == size
    engine.model, engine.holds, engine.loads = tiny_model(), False, False
    with pytest.raises(RunStopped, match="version 4"):
        publisher.publish(4)


# --- it learns ----------------------------------------------------------------------------------


def play(learner: Learner, engine: PreTrainedModel, g: torch.Generator) -> Batch:
    """Sixteen rows of a sampled, an observed (5 or 8) and a sampled token, which ought to be odd
    where the observed one is."""

    engine.load_state_dict(dict(learner.export()), strict=False)

    def draw(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = engine(input_ids=ids).logits[:, -1]
        return torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=g)], 1)

    observed = tensor([5] * 8 + [8] * 8)
    ids = draw(torch.cat([draw(torch.ones(16, 1, dtype=torch.int64)), observed[:, None]], 1))
    rewards = (ids[:, 3] % 2 == observed % 2).tolist()
    rows = [segment([1], ("A", [a]), ("E", [e]), ("A", [b])) for _, a, e, b in ids.tolist()]
    members = [scored([row], float(r)) for row, r in zip(rows, rewards, strict=True)]
    batch = collate([group(*members[:8]), group(*members[8:])], 31)
    return as_sampled_by(engine, batch)


@pytest.mark.parametrize(
    "keys",
    [
        {"optim__lr": 1e-2},
        {"optim__lr": 2e-2, "model__lora_rank": 4},
        pytest.param(
            {"optim__lr": 1e-2, "algorithm__name": "ppo", "optim__critic_lr": 1e-2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_it_learns_to_follow_what_it_observed(folder, keys):
    learner = Learner(folder, config(**keys, algorithm__ppo_epochs=2), total_steps=60)
    engine, g = tiny_model(), torch.Generator().manual_seed(0)
    rewards = []
    for s in range(1, 61):
        batch = play(learner, engine, g)
        step(learner, batch, s)
        rewards.append(batch.rewards.mean().item())
        if sum(rewards[-4:]) / 4 > 0.9:
            break
    assert sum(rewards[:4]) / 4 < 0.7
    assert sum(rewards[-4:]) / 4 > 0.9


def test_the_critic_learns_the_return(folder, batch):
    c = config(**PPO | {"optim__critic_lr": 1e-2}, algorithm__ppo_epochs=4)
    learner = Learner(folder, c, total_steps=50)
    metrics = [step(learner, batch, s) for s in range(1, 16)]
    assert metrics[0]["critic/vf_explained_var"] == 0.0
    assert metrics[-1]["critic/vf_loss"] < 0.2 * metrics[0]["critic/vf_loss"]
    assert metrics[-1]["critic/vf_explained_var"] > 0.8
