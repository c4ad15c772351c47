"""The changes that `optim` makes to a model before training, as far as a CPU can test them.

(`test_ranks.py` has what comes of it.)
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.architectures import ARCHITECTURES, make_model
from support.trainer_fixtures import tiny_model
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

from agentrl.config import OptimConfig, load_config
from agentrl.errors import ConfigError
from agentrl.learner import sharding
from agentrl.learner.optimizer import Optimizer, learning_rate
from agentrl.learner.packing import pack_row
from agentrl.learner.policy import PackedModel

GPUS: Any = SimpleNamespace(device_type="cuda", size=lambda: 2)


def optim(*overrides: str) -> OptimConfig:
    return load_config(None, overrides).optim


@pytest.fixture
def spread(monkeypatch) -> list[dict[str, Any]]:
    """Stands for GPUs that are not here: what `fully_shard` was asked for, module by module."""
    calls = []
    monkeypatch.setattr(sharding, "fully_shard", lambda module, **how: calls.append(how))
    monkeypatch.setattr(sharding, "_fits_gathered", lambda scorer, mesh: True)
    monkeypatch.setattr(sharding, "MIN_COMPILED_SIZE", 0)
    monkeypatch.setattr(torch, "compile", lambda function, **how: partial(_compiled, function))
    return calls


def _compiled(function, *args, **kwargs):
    return function(*args, **kwargs)


def on_gpus(config: OptimConfig) -> list[nn.Module]:
    """The layers of a model after `shard`, which finds that nothing was spread here."""
    scorer = PackedModel(tiny_model())
    parts, offloads = (scorer, scorer.layers(), scorer.value_head), config.offload == "all"
    with pytest.raises(AssertionError, match="not sharded"):
        sharding.shard(*parts, GPUS, torch.bfloat16, offloads)
    sharding.wrap_layers(scorer, scorer.layers(), GPUS, config)
    return scorer.layers()


def around(layer: nn.Module) -> list[Any]:
    """Return the wrappers of a layer's forward function, the outermost first."""
    wrappers, run = [], layer.forward
    while isinstance(run, partial):
        wrappers.append(run.func)
        run = run.args[0]
    return wrappers


def test_a_small_model_is_not_compiled(spread, monkeypatch):
    """Compiling takes longer than all of its run."""
    monkeypatch.setattr(sharding, "MIN_COMPILED_SIZE", 10**6)
    assert [around(layer) for layer in on_gpus(optim())] == [[]] * 2


def test_how_a_layer_is_sharded(spread):
    """Compiled inside of what runs it twice: else the second run would not be compiled."""
    for overrides, expected in {
        (): [_compiled],
        ("optim.compile=never",): [],
        ("optim.recompute=true",): [checkpoint, _compiled],
        ("optim.recompute=true", "optim.compile=never"): [checkpoint],
    }.items():
        layers = on_gpus(optim(*overrides))
        assert [around(layer) for layer in layers] == [expected] * 2
    scorer = PackedModel(tiny_model())
    sharding.wrap_layers(scorer, scorer.layers(), None, optim())  # one process on a CPU
    assert [around(layer) for layer in scorer.layers()] == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3.5", "LFM2", "Qwen2.5"])
def test_parts_with_a_convolution_are_not_compiled(name, monkeypatch):
    """No compiled graph contains a convolution, and the logits are equal."""
    compile_with, programs = torch.compile, []

    def record(program, inputs):
        programs.append(program)
        return program

    monkeypatch.setattr(
        torch, "compile", lambda function, **how: compile_with(function, backend=record, **how)
    )
    model, compiled = (make_model(*ARCHITECTURES[name]) for _ in range(2))
    for layer in compiled.get_decoder().layers:
        sharding.compile_layer(layer)
    for length in (12, 7):
        ids = torch.arange(1, 1 + length)[None]
        actual, expected = (m(input_ids=ids, use_cache=False).logits for m in (compiled, model))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    targets = [str(node.target) for program in programs for node in program.graph.nodes]
    assert any("linear" in t for t in targets) and not any("conv" in t for t in targets)
    assert ("conv" in module_class_names(model)) == (name != "Qwen2.5")


def module_class_names(model: nn.Module) -> str:
    return " ".join(type(m).__name__.lower() for m in model.modules())


def test_what_is_offloaded_to_the_cpu(spread):
    for where, policies in {"none": 0, "optimizer": 0, "all": 3}.items():
        spread.clear()
        on_gpus(optim(f"optim.offload={where}"))
        assert len(spread) == 3  # two layers and the rest
        assert (
            sum(isinstance(how["offload_policy"], CPUOffloadPolicy) for how in spread) == policies
        )
    for where in ("none", "optimizer", "all"):
        assert moves(optim("optim.offload=" + where)) == (["cuda", "cpu"] * (where == "optimizer"))


def moves(config: OptimConfig) -> list[str]:
    """Return the devices to which an optimizer step on a GPU sends the moments."""
    sent = []

    class Moments(torch.Tensor):
        def to(self, device):  # type: ignore[override]
            sent.append(device)
            return self

    accelerator: Any = SimpleNamespace(
        device=torch.device("cuda"), clip_grad_norm_=lambda parameters, most: torch.tensor(1.0)
    )
    weight = nn.Parameter(torch.ones(2))
    optimizer = Optimizer("actor", {"w": weight}, config, accelerator)
    weight.grad = torch.ones(2)
    optimizer.step(1e-3)
    sent.clear()
    optimizer._adamw.state[weight]["exp_avg"] = torch.zeros(2).as_subclass(Moments)
    optimizer._adamw.state[weight].pop("exp_avg_sq")
    for device in ("cuda", "cpu"):
        optimizer._move_moments(device)
    return sent


@pytest.mark.parametrize("recompute", [False, True])
def test_a_checkpointed_layer_is_recomputed(recompute):
    scorer = PackedModel(tiny_model())
    ran = []
    for layer in scorer.layers():
        layer.get_submodule("self_attn").register_forward_hook(lambda *_: ran.append(1))
    sharding.wrap_layers(scorer, scorer.layers(), None, OptimConfig(recompute=recompute))
    scorer(pack_row(range(8)), lambda hidden: hidden.sum()).backward()
    assert len(ran) == 2 * (1 + recompute)


def test_trainable_weights_are_float32():
    scorer = PackedModel(tiny_model().bfloat16())
    frozen = scorer.model.get_parameter("model.norm.weight").requires_grad_(False)
    head = scorer.model.lm_head.weight
    sharding.upcast_trainable(scorer)
    assert frozen.dtype == torch.bfloat16
    assert {p.dtype for p in scorer.parameters() if p.requires_grad} == {torch.float32}
    assert (
        scorer.model.lm_head.weight is head
    )  # tied as before: an optimizer holds the same tensors
    assert scorer.model.get_input_embeddings().weight is head


def test_the_rate_rises_and_then_is_linear():
    config = OptimConfig(lr_warmup_steps=3, lr_final=0.5)
    rates = [learning_rate(8.0, config, 8, step) for step in range(1, 10)]
    assert rates == [2, 4, 6, 8, 7, 6, 5, 4, 4]
    flat = [learning_rate(8.0, OptimConfig(lr_warmup_steps=1), 9, step) for step in (1, 2, 9)]
    assert flat == [4, 8, 8]
    # Longer than the run: it never gets there, and never falls.
    assert [learning_rate(8.0, config, 2, step) for step in (1, 2)] == [2, 4]


def test_weights_decay_by_the_learning_rate_times_weight_decay():
    device: Any = SimpleNamespace(
        device=torch.device("cpu"), clip_grad_norm_=lambda parameters, most: torch.tensor(1.0)
    )
    weight = nn.Parameter(torch.tensor([2.0]))
    config = OptimConfig(weight_decay=0.25)
    optimizer = Optimizer("actor", {"w": weight}, config, device)
    weight.grad = torch.zeros(1)
    optimizer.step(0.1)
    assert weight.item() == pytest.approx(2.0 * (1 - 0.1 * 0.25))


def test_a_model_without_layers_to_be_found_is_refused():
    scorer = PackedModel(tiny_model())
    del scorer.model.model.layers  # type: ignore[union-attr]
    with pytest.raises(
        ConfigError, match="Qwen2ForCausalLM cannot be trained here: it has no list of layers"
    ):
        sharding.shard(scorer, scorer.layers(), scorer.value_head, None, None, False)
