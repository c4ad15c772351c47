"""From tokens to gradients through a model: which logits get a gradient, and which tokens attend.

The tests also compare old, engine and reference logprobs.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.trainer_fixtures import (
    VOCABULARY,
    as_sampled_by,
    config,
    group,
    plain_logprobs,
    random_groups,
    scored,
    segment,
    tiny_folder,
    tiny_model,
)
from torch import Tensor, arange
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.learner.algorithms import make_targets
from agentrl.learner.batch import Batch, collate
from agentrl.learner.learner import Learner
from agentrl.learner.packing import pack
from agentrl.learner.policy import Policy

FULL = {"optim__lr": 1e-3}
LORA = {"optim__lr": 1e-2, "model__lora_rank": 4}
PPO = {"algorithm__name": "ppo", "optim__critic_lr": 1e-3}
RECOMPUTE = {"optim__recompute": True}
POLICY = Policy(tiny_model(), 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def batch() -> Batch:
    return as_sampled_by(tiny_model(), collate(random_groups(0, groups=4, n=4), 31))


def weights(learner: Learner) -> dict[str, Tensor]:
    assert learner.rank is not None
    return {n: t.detach().clone() for n, t in learner.rank.policy.model.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


# --- the shift between logits and tokens --------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """Return a model without layers whose logits are its last hidden states.

    So the gradient of all logits is one tensor.
    """
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=VOCABULARY,
            intermediate_size=8,
            num_hidden_layers=0,
            num_attention_heads=1,
            num_key_value_heads=1,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.eye(VOCABULARY))
    folder = tmp_path_factory.mktemp("bare")
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("loss", ["vanilla", "gspo", "cispo", "sapo", "dppo"])
def test_only_the_logits_before_a_sampled_token_learn_and_learn_that_token(bare, loss):
    """Compares the gradient of all (L, V) logits of a pack with exact values.

    If the logits were shifted by one position, other positions would have a gradient.
    """
    batch = collate(
        [
            group(
                scored([segment([1, 2, 3], ("A", [4]), ("E", [5, 6]), ("A", [7, 8]))], 1.0),
                scored([segment([1, 2, 3], ("E", [9]), ("A", [10]), ("E", [11, 12]))], 0.0),
                scored([segment([1, 2, 3], ("A", [13, 14]))], 5.0, masked=True),
            ),
            group(
                scored([segment([15], ("A", [16, 17]), ("E", [18]))], 0.0),
                scored([segment([15], ("A", [19]))], 2.0),
            ),
        ],
        31,
    )
    c = config(algorithm__policy_loss=loss, algorithm__tis_cap=0, algorithm__norm_adv_by_std=False)
    learner = Learner(bare, c, total_steps=1)
    assert learner.rank is not None
    seen = []

    def keep(module, args, output):
        output.last_hidden_state.retain_grad()
        seen.append(output.last_hidden_state)

    learner.rank.policy.model.get_decoder().register_forward_hook(keep)
    targets = make_targets(batch, c, None, None, None)
    learner.update(batch, targets, 1)
    (logits,) = seen  # (1, L, V)
    #       row 0: 1 2 3 4 5 6 7 8; row 1 from its response on: 9 10 11 12
    #       row 3: 15 16 17 18;     row 4 from its response on: 19
    places = {(2, 4, 0, 0), (5, 7, 0, 3), (6, 8, 0, 4), (8, 10, 1, 1), (12, 16, 3, 0)}
    places |= {(13, 17, 3, 1), (12, 19, 4, 0)}  # two responses begin after the same token
    expected = torch.zeros_like(logits[0])
    for at, token, row, t in places:
        probabilities = logits.detach()[0, at].softmax(-1)
        slope = probabilities - torch.eye(VOCABULARY)[token]
        expected[at] += targets.weights[row, t] * targets.advantages[row, t] * slope
    touched = (logits.grad[0] != 0).any(-1).nonzero()[:, 0].tolist()
    assert touched == sorted({place[0] for place in places})
    torch.testing.assert_close(logits.grad[0], expected, atol=1e-7, rtol=1e-5)


# --- company ------------------------------------------------------------------------------------


def padded(model, batch: Batch, side: str) -> Tensor:
    """Return the logprobs of sampled tokens, (B, T), from one forward pass of padded rows."""
    rows = [
        torch.cat([ids[len(ids) - p :], response[:r]])
        for ids, p, response, r in zip(
            batch.prompt_ids,
            batch.prompt_lengths.tolist(),
            batch.response_ids,
            batch.response_lengths.tolist(),
            strict=True,
        )
    ]
    width = max(map(len, rows))
    pads = [(width - len(row), 0) if side == "left" else (0, width - len(row)) for row in rows]
    ids = torch.stack(
        [torch.nn.functional.pad(r, p, value=31) for r, p in zip(rows, pads, strict=True)]
    )
    real = torch.stack(
        [torch.nn.functional.pad(torch.ones_like(r), p) for r, p in zip(rows, pads, strict=True)]
    )
    positions = (real.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=real, position_ids=positions).logits
    logprobs = logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[:, :, 0]
    out = torch.zeros(batch.response_mask.shape)
    for b, (before, _) in enumerate(pads):
        start, length = before + int(batch.prompt_lengths[b]) - 1, int(batch.response_lengths[b])
        out[b, :length] = logprobs[b, start : start + length]
    return torch.where(batch.response_mask, out, 0.0)


def test_logprobs_are_the_same_alone_packed_and_padded_on_either_side(folder, batch):
    expected = plain_logprobs(tiny_model(), batch)
    learner = Learner(folder, config(), total_steps=1)
    for logprobs in (
        learner.logprobs(batch),
        padded(tiny_model(), batch, "left"),
        padded(tiny_model(), batch, "right"),
    ):
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


def test_packed_rows_need_restarted_positions(batch):
    """Without restarted positions, the logprobs differ: so the test above can fail."""
    policy = Policy(tiny_model(), 1.0)
    packed = pack(batch, arange(16), batch.response_mask)
    running = replace(packed, position_ids=arange(packed.input_ids.shape[1])[None])
    with torch.no_grad():
        right, wrong = policy.logprobs(packed)[0], policy.logprobs(running)[0]
    assert (right - wrong).abs().max() > 1e-2


@given(st.integers(0, 999), st.integers(0, 7), st.integers(0, 2**31))
@examples(25)
def test_a_row_does_not_affect_other_rows(seed, changed, chance):
    """All tokens of one response are changed. The logprobs of the other rows stay bit-identical."""
    batch = collate(random_groups(seed, groups=2, n=4), 31)
    g = torch.Generator().manual_seed(chance)
    ids = batch.response_ids.clone()
    shift = torch.randint(1, VOCABULARY, ids[changed].shape, generator=g)
    ids[changed] = (ids[changed] + shift) % VOCABULARY
    logprobs = []
    for some in (batch, replace(batch, response_ids=ids)):
        with torch.no_grad():
            flat = POLICY.logprobs(pack(some, arange(8), some.response_mask))[0]
        logprobs.append(torch.zeros(ids.shape).masked_scatter(some.response_mask, flat))
    others = arange(8) != changed
    assert torch.equal(logprobs[0][others], logprobs[1][others])
    assert not torch.equal(logprobs[0][changed], logprobs[1][changed])


# --- old, engine and reference ------------------------------------------------------------------

WAYS = [FULL, LORA, FULL | RECOMPUTE, LORA | RECOMPUTE, FULL | PPO, LORA | PPO]


@pytest.mark.parametrize("keys", WAYS)
def test_passed_and_computed_old_logprobs_make_the_same_update(folder, batch, keys):
    """The updates are bit-identical, also with recomputed layers: all ratios are exactly 1."""
    learners = [Learner(folder, config(**keys), total_steps=1) for _ in range(2)]
    metrics = []
    for learner, computes in zip(learners, (False, True), strict=True):
        old = learner.logprobs(batch) if computes else None
        targets = make_targets(batch, learner.config, old, learner.values(batch), None)
        metrics.append(learner.update(batch, targets, 1)[0])
    assert metrics[0] == metrics[1]
    assert metrics[0]["actor/ppo_kl"] == metrics[0]["actor/pg_clipfrac"] == 0.0
    assert metrics[0]["actor/grad_norm"] > 0
    assert same(*map(weights, learners))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("keys", [FULL, LORA])
def test_importance_weights_of_equal_logprobs_change_nothing(folder, batch, keys, level, mode):
    keys |= {"algorithm__kl_loss_coef": 0.1}
    learned = []
    for cap in (0.0, 1.5):
        tis = {"algorithm__tis_level": level, "algorithm__tis_mode": mode}
        learner = Learner(folder, config(**keys, **tis, algorithm__tis_cap=cap), total_steps=1)
        exact = replace(batch, rollout_logprobs=learner.logprobs(batch))
        reference = plain_logprobs(tiny_model(1), batch)
        targets = make_targets(exact, learner.config, None, None, reference)
        metrics, _ = learner.update(exact, targets, 1)
        learned.append((metrics["actor/pg_loss"], metrics["actor/kl_loss"], weights(learner)))
    assert learned[0][:2] == learned[1][:2]
    assert same(learned[0][2], learned[1][2])


@pytest.mark.parametrize("keys", [FULL | PPO, LORA | PPO])
def test_the_reference_does_not_change_while_a_critic_learns(folder, batch, keys):
    """With LoRA, policy, critic and reference share a base, whose weights must not change."""
    keys = keys | {"algorithm__kl_reward_coef": 0.1, "algorithm__ppo_epochs": 2}
    learner = Learner(folder, config(**keys), total_steps=9)
    frozen = [n for n in weights(learner) if "lora_" not in n]

    def digest() -> str:
        unchanged = weights(learner)
        return hashlib.sha256(b"".join(unchanged[n].numpy().tobytes() for n in frozen)).hexdigest()

    before, unchanged = learner.reference_logprobs(batch), digest()
    assert before is not None and torch.equal(before, learner.logprobs(batch))
    for step in range(1, 4):
        old, values = learner.old_logprobs(batch), learner.values(batch)
        reference = learner.reference_logprobs(batch)
        assert reference is not None and torch.equal(reference, before)
        targets = make_targets(batch, learner.config, old, values, reference)
        learner.update(batch, targets, step)
    assert not torch.equal(learner.logprobs(batch), before)
    assert (digest() == unchanged) == ("model__lora_rank" in keys)
