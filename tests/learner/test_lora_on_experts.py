"""Adapters of stacked experts: gradients, files, weights for engines, and two ranks."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from support.architectures import architecture
from support.exact_rank import AnyRank
from support.processes import Processes
from support.trainer_fixtures import (
    as_sampled_by,
    config,
    random_groups,
    targets_of,
    tensors_in,
    weights_of,
)

from agentrl.config import ModelConfig, load_config
from agentrl.engine.local.load import load_causal_lm
from agentrl.engine.remote.launch import EngineSlot
from agentrl.engine.remote.open import make_openers
from agentrl.engine.remote.senders import Route
from agentrl.errors import ConfigError
from agentrl.learner.batch import collate
from agentrl.learner.learner import Learner
from agentrl.learner.packing import pack_row
from agentrl.learner.policy import ACTOR, Policy, describe_targets
from agentrl.learner.rank import LocalRankGroup

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
TARGETS = [*EXPERTS, "o_proj"]
NAMES = ("Qwen3-MoE", "gpt-oss", "GLM-4.5", "DeepSeek-V3", "Qwen3.5-MoE", "Granite 4 hybrid")
QUICK = NAMES[:2]
SOME = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]


@pytest.fixture
def folder(tmp_path):
    architecture("Qwen3-MoE").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapted(folder: Path, targets: list[str] = TARGETS) -> Policy:
    policy = Policy(load_causal_lm(folder, torch.float32), 1.0)
    policy.add_adapter(ACTOR, 4, 8, targets, 0)
    return policy


def row_of(policy: Policy):
    return pack_row(range(1, 12), policy.packed_model.mode)


@pytest.mark.parametrize("name", SOME)
def test_an_adapter_has_the_gradient_of_the_merged_weights(name, tmp_path):
    """And is saved, merged, and sent as the same policy, by the names of the files."""
    architecture(name).save_pretrained(tmp_path / "base")
    policy = adapted(tmp_path / "base")
    with torch.no_grad():
        base, _ = policy.logprobs(row_of(policy))
    with policy.perturbed_adapter(0):
        with torch.no_grad():
            expected, _ = policy.logprobs(row_of(policy))
        policy.model.zero_grad()
        policy.logprobs(row_of(policy))[0].sum().backward()
        policy.save_adapter(tmp_path / "adapter")
        policy.save_whole(tmp_path / "whole")
        sent = dict(policy.export(published=True))
        matrices = {
            name: [(x[ACTOR].weight.detach().clone(), x[ACTOR].weight.grad) for x in pair]
            for name, layer in policy.adapted()
            if "experts" in name and (pair := (layer.lora_A, layer.lora_B))
        }
    assert (base - expected).abs().max() > 0.01
    files = tensors_in(tmp_path / "whole")
    assert sent and all(torch.equal(files[n], t) for n, t in sent.items())
    for saved in ("adapter", "whole"):
        merged = Policy(load_causal_lm(tmp_path / saved, torch.float32), 1.0)
        with torch.no_grad():
            torch.testing.assert_close(
                merged.logprobs(row_of(merged))[0], expected, atol=1e-5, rtol=0
            )
    merged.logprobs(row_of(merged))[0].sum().backward()
    dense = {n: p.grad for n, p in merged.model.named_parameters()}
    assert {n.rpartition(".")[2] for n in matrices} == {"gate_up_proj", "down_proj"}
    for weight, ((a, of_a), (b, of_b)) in matrices.items():
        g = dense[weight]
        a, of_a = (x.view(len(g), 4, -1) for x in (a, of_a))
        b, of_b = (x.view(len(x), 4, len(g)).permute(2, 0, 1) for x in (b, of_b))
        g = g if g.shape[1:] == (b.shape[1], a.shape[2]) else g.transpose(1, 2)
        for own, expected in ((of_b, 2 * g @ a.mT), (of_a, 2 * b.mT @ g)):  # alpha / rank = 2
            assert (own - expected).norm() <= 1e-4 * expected.norm() and expected.norm() > 0


@pytest.fixture(scope="module")
def groups():
    ranks = Processes(2, AnyRank)
    with closing(ranks):
        yield LocalRankGroup(AnyRank()), ranks


def test_two_ranks_do_what_one_does(groups, folder, tmp_path):
    """Gradients, the second step's weights, what is sent and saved; a resumed run is bit-equal."""
    model = load_causal_lm(folder, torch.float32)
    batch = as_sampled_by(model, collate(random_groups(3, groups=2, n=4), 31))
    cfg = config(
        model__path=str(folder), model__lora_rank=4, model__lora_target_modules=TARGETS,
        optim__lr=1e-2, optim__micro_batch_tokens=40,
    )  # fmt: skip
    seen = []
    for i, group in enumerate(groups):
        group.open(folder, cfg, torch.float32)
        learner = Learner("", cfg, total_steps=4, group=group)
        learner.update(batch, targets_of(learner, batch), 1)
        first = weights_of(group.first_gradients())
        saved = tmp_path / f"saved{i}"
        saved.mkdir()
        group.save(saved)
        learner.update(batch, targets_of(learner, batch), 2)
        second = weights_of(group.weights())
        (sent := tmp_path / f"sent{i}").mkdir()
        assert not group.send_weights(Route(1, folder=sent, dtype=torch.float32)).errors
        group.open(folder, cfg, torch.float32)
        group.load(saved)
        again = Learner("", cfg, total_steps=4, group=group)
        again.update(batch, targets_of(again, batch), 2)
        resumed = group.weights()
        assert all(torch.equal(second[n], resumed[n]) for n in second)
        seen.append((first, second, tensors_in(sent), saved))
    one, two = seen
    assert one[0].keys() == two[0].keys() and any("experts" in n for n in one[0])
    for part in range(3):
        largest = max(t.norm() for t in one[part].values())
        for n, t in one[part].items():
            torch.testing.assert_close(
                two[part][n], t, atol=1e-4 * float(largest), rtol=1e-3, msg=f"{part} {n}"
            )
    assert any("experts.0.up_proj" in n for n in one[2])
    merged = load_causal_lm(two[3] / "adapter", torch.float32)
    assert (
        merged.state_dict()["model.layers.0.mlp.experts.down_proj"]
        - model.state_dict()["model.layers.0.mlp.experts.down_proj"]
    ).abs().max() > 0


def test_recomputed_layers_have_the_same_gradients(folder):
    found = []
    for recompute in (False, True):
        cfg = config(
            model__path=str(folder), model__lora_rank=4, model__lora_target_modules=EXPERTS,
            optim__recompute=recompute,
        )  # fmt: skip
        learner = Learner(str(folder), cfg, total_steps=1)
        batch = collate(random_groups(3, groups=1, n=4), 31)
        found.append(learner.gradient(batch, targets_of(learner, batch)))
    assert found[0].keys() == found[1].keys() and found[0]
    for n, t in found[0].items():
        assert torch.equal(found[1][n], t)
    assert any(t.any() for t in found[0].values())


def test_the_reference_is_the_base(folder):
    cfg = config(
        model__path=str(folder), model__lora_rank=4, model__lora_target_modules=EXPERTS,
        algorithm__kl_loss_coef=0.1, optim__lr=1e-2,
    )  # fmt: skip
    learner = Learner(str(folder), cfg, total_steps=1)
    batch = collate(random_groups(3, groups=1, n=4), 31)
    before = learner.initial_logprobs(batch)
    learner.update(batch, targets_of(learner, batch), 1)
    assert torch.equal(learner.initial_logprobs(batch), before)
    assert not torch.equal(learner.logprobs(batch), before)


def test_names_are_checked(folder):
    keys = {"path": str(folder), "lora_rank": 4}
    assert not describe_targets(ModelConfig(**keys, lora_target_modules=EXPERTS))
    match = r"experts\.up_proj cannot be adapted.*o_proj.*experts\.down_proj, experts\.gate_up_proj"
    with pytest.raises(ConfigError, match=match):
        describe_targets(ModelConfig(**keys, lora_target_modules=["experts.up_proj"]))
    with pytest.raises(ConfigError, match=r"nf4.*is a Qwen3MoeExperts, not a torch\.nn\.Linear"):
        adapted(folder).quantize("cpu")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["rollout.name=vllm"], "rollout.name=vllm"),
        (["rollout.name=sglang", "rollout.lora=adapter"], "rollout.lora=adapter"),
        (["rollout.name=sglang", "rollout.quantization=fp8", "algorithm.tis_cap=2"], "fp8"),
    ],
)
def test_no_server_gets_an_adapter_of_experts(folder, settings, key):
    cfg = load_config(overrides=[
        f"model.path={folder}", "model.lora_rank=4", "data.train=x.jsonl", *settings,
        "model.lora_target_modules=[experts.down_proj]",
    ])  # fmt: skip
    slots = [EngineSlot((0,))]
    with pytest.raises(ConfigError, match=rf"{key} with model.lora_target_modules=\['experts.down"):
        make_openers(cfg, str(folder), cpu=False, slots=slots)
    cfg = cfg.with_values("rollout", name="sglang", lora="auto", quantization="none")
    [opener] = make_openers(cfg, str(folder), cpu=False, slots=slots)
    assert opener.args[0].rollout.lora == "merge"
