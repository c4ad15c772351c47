"""Models with experts on two ranks: they learn and publish what one rank does."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from support.architectures import ARCHITECTURES, architecture, make_model
from support.exact_rank import AnyRank
from support.processes import Processes
from support.trainer_fixtures import as_sampled_by, config, random_groups, tensors_in, tiny_folder
from support.updates import policy_of
from transformers import PreTrainedModel

from agentrl.config import ModelConfig
from agentrl.engine.local.load import load_causal_lm
from agentrl.engine.remote.senders import Route
from agentrl.errors import ConfigError
from agentrl.learner.algorithms import make_targets
from agentrl.learner.batch import collate
from agentrl.learner.learner import Learner
from agentrl.learner.packing import Mode, pack_row
from agentrl.learner.policy import ACTOR, Policy, describe_targets
from agentrl.learner.rank import LocalRankGroup

UNUSED = 3
"""The number of an expert that no token reaches."""


@pytest.fixture(scope="module")
def groups():
    ranks = Processes(2, AnyRank)
    with closing(ranks):
        yield LocalRankGroup(AnyRank()), ranks


def without_an_expert(name: str) -> PreTrainedModel:
    """Return a tiny model whose routers never choose the expert `UNUSED`."""
    if name != "Qwen3-MoE":
        model = architecture(name)
        for n, tensor in (*model.named_parameters(), *model.named_buffers()):
            if n.endswith(("router.bias", "e_score_correction_bias")):
                tensor.data[UNUSED] = -1e4
        return model
    kind, values = ARCHITECTURES[name]
    model = make_model(kind, values | {"num_experts": 5})
    for n, weight in model.named_parameters():
        if n.endswith("mlp.gate.weight"):  # Two experts get a token: 0 and 1, or 2 and 4.
            weight.data = torch.stack([weight[0], weight[0], -weight[0], 0 * weight[0], -weight[0]])
    return model


WORLDS = {
    "Qwen3-MoE": torch.float32,
    "gpt-oss": torch.float64,
    "slow Qwen3-MoE": torch.float64,
    "slow gpt-oss": torch.float32,
    "slow DeepSeek-V3": torch.float32,
}


@pytest.mark.parametrize(
    "world", [pytest.param(w, marks=pytest.mark.slow) if "slow" in w else w for w in WORLDS]
)
def test_two_ranks_have_the_gradients_of_one(groups, world, tmp_path):
    """With grouped products (float32), and with one product for each expert (float64).

    There are 3 rows in micro-batches of at most one row, so a rank runs an empty one.
    """
    name, dtype = world.removeprefix("slow "), WORLDS[world]
    model = without_an_expert(name)
    model.save_pretrained(tmp_path)
    batch = as_sampled_by(model, collate(random_groups(3, groups=1, n=3), 31))
    cfg = config(optim__lr=1e-3, optim__micro_batch_tokens=1)
    found = []
    for group in groups:
        group.open(tmp_path, cfg, dtype)
        learner = Learner("", cfg, total_steps=4, group=group)
        assert learner.mode is Mode.PACKED
        old = learner.old_logprobs(batch)
        metrics, _ = learner.update(batch, make_targets(batch, cfg, old, None, None), 1)
        found.append(
            (metrics["actor/grad_norm"], old, group.first_gradients(), group.parameter_names())
        )
    (norm, old, gradients, names), (norm_2, old_2, gradients_2, _) = found
    tolerance = 1e-9 if dtype is torch.float64 and name == "gpt-oss" else 1e-4
    assert norm > 1e-3 and norm_2 == pytest.approx(norm, rel=tolerance)
    torch.testing.assert_close(old_2, old, atol=tolerance, rtol=0)
    assert gradients_2.keys() == gradients.keys() == names
    largest = max(g.norm() for g in gradients.values())
    for key, gradient in gradients.items():
        torch.testing.assert_close(
            gradients_2[key], gradient, atol=tolerance * largest, rtol=tolerance, msg=key
        )
    experts = [g for key, g in gradients.items() if "experts." in key and g.dim() == 3]
    assert experts and all(not g[UNUSED].any() and g[:UNUSED].any() for g in experts)


@pytest.mark.parametrize("lora", [0, 4])
def test_ranks_send_published_names_and_export_their_own(groups, lora, tmp_path):
    """The local engine gets the names of the model, a server those of the files."""
    architecture("Qwen3-MoE").save_pretrained(tmp_path / "model")
    base = tensors_in(tmp_path / "model")
    cfg = config(model__lora_rank=lora)
    seen = []
    for group in groups:
        group.open(tmp_path / "model", cfg, torch.float32)
        folder = tmp_path / f"sent{len(seen)}"
        folder.mkdir()
        sent = group.send_weights(Route(1, folder=folder, dtype=torch.float32))
        assert not sent.errors
        files = tensors_in(folder)
        assert files.keys() <= base.keys() and (lora or files.keys() == base.keys())
        assert files and set(sent.names) == files.keys()
        update = policy_of(Learner("", cfg, total_steps=1, group=group), 1)
        own = dict(update.weights())
        assert own and own.keys() <= group.parameter_names() | files.keys()
        (again := tmp_path / f"again{len(seen)}").mkdir()
        update.send(Route(1, folder=again, dtype=torch.float32))
        assert tensors_in(again).keys() == files.keys()
        seen.append(files)
    for name, tensor in seen[0].items():
        torch.testing.assert_close(seen[1][name], tensor, atol=1e-6, rtol=0, msg=name)
        if not lora:
            torch.testing.assert_close(tensor, base[name], atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("name", ["Qwen3-MoE", "DeepSeek-V3", "gpt-oss"])
def test_all_linear_adapts_attention_only_and_says_so(name, tmp_path):
    """PEFT would adapt routers and stacked experts of some models, which engines do not load."""
    model = architecture(name)
    model.save_pretrained(tmp_path / "base")
    keys = {"path": str(tmp_path / "base"), "lora_rank": 4}
    stacked = sum(p.numel() for n, p in model.named_parameters() if ".mlp." in n and p.dim() > 1)
    share = stacked / sum(p.numel() for p in model.parameters())
    line = describe_targets(ModelConfig(**keys))
    assert f"leaves out {share:.1%} of" in line and "mlp.experts.gate_up_proj" in line
    assert not describe_targets(ModelConfig(**keys, lora_target_modules=["o_proj"]))
    for wrong in (["nope"], "embed_tokens", []):
        with pytest.raises(ConfigError, match=r"cannot be adapted\. Choose all-linear, or from"):
            describe_targets(ModelConfig(**keys, lora_target_modules=wrong))
    assert not describe_targets(ModelConfig(path=str(tiny_folder(tmp_path / "dense"))))

    policy = Policy(load_causal_lm(tmp_path / "base", torch.float32), 1.0)
    for targets in (["gate_proj", "up_proj"], ["experts"], ["gate"]):
        with pytest.raises(ConfigError, match=r"cannot be adapted\. Choose all-linear, or from"):
            policy.add_adapter(ACTOR, 4, 8, targets, 0)
    policy.add_adapter(ACTOR, 4, 8, "all-linear", 0)
    learning = policy.parameters(ACTOR)
    assert learning and all(".self_attn." in n for n in learning)
    with policy.perturbed_adapter(0), torch.no_grad():
        row = pack_row(range(1, 12), policy.packed_model.mode)
        expected, _ = policy.logprobs(row)
        policy.save_adapter(tmp_path / "adapter")
    merged = load_causal_lm(tmp_path / "adapter", torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(Policy(merged, 1.0).logprobs(row)[0], expected)
        assert (policy.logprobs(row)[0] - expected).abs().max() > 0.1
