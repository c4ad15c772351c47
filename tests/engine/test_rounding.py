"""A difference of engine and trainer at the start is compared with the model's own rounding."""

import asyncio
from array import array
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.trainer_fixtures import VOCABULARY, config, tiny_model

from agentrl.config import load_config
from agentrl.engine.local import LocalEngine
from agentrl.engine.local import engine as local_engine
from agentrl.engine.local.load import compute_dtype, load_causal_lm
from agentrl.errors import ConfigError, RunStopped
from agentrl.learner.learner import Learner
from agentrl.learner.rank import LocalRankGroup, Rank
from agentrl.testing import byte_tokenizer
from agentrl.trainer.publisher import Publisher

ROW = array("i", [(7 * k + k * k) % VOCABULARY for k in range(40)])
BFLOAT16 = torch.bfloat16
OVERRIDE: Any = {"rollout__max_mismatch": 5.0}
LORA: Any = {"model__lora_rank": 4}


@pytest.fixture
def confident(tmp_path):
    """The folder of a model in float32 with large logits, as supervised fine-tuning makes them."""
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight.mul_(25.0)
    model.save_pretrained(tmp_path)
    return tmp_path


def start(folder, change=None, *, dtype=BFLOAT16, **keys: Any):
    """Publish from a learner in bfloat16 to an engine, whose weights `change` then changes."""
    settings = config(**keys)
    group = LocalRankGroup(Rank(folder, settings, dtype=BFLOAT16))
    learner = Learner(folder, settings, total_steps=1, group=group)
    model = load_causal_lm(folder, dtype)
    with (
        asyncio.Runner() as runner,
        closing(LocalEngine(model, byte_tokenizer(), deterministic=False)) as engine,
    ):
        publish = engine.publish

        def publish_changed(update):
            size = publish(update)
            if change is not None:
                with torch.no_grad():
                    change(model)
            return size

        engine.publish = publish_changed
        publisher = Publisher(
            learner,
            engine,
            ROW,
            lambda ids: runner.run(engine.scores(ids)),
            sample=lambda ids: runner.run(engine.continue_row(ids, 16, 60.0)),
        )
        return publisher.publish(0)


def perturb_one_layer(model):
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))


def forget_the_adapter(model):
    model.load_state_dict(tiny_model().bfloat16().state_dict() | {
        "model.norm.weight": model.model.norm.weight.clone()
    })  # fmt: skip


def test_rounding_of_a_confident_model_needs_an_override(confident):
    """An engine in float32 differs by rounding alone, and by more than 0.2 nats."""
    with pytest.raises(RunStopped, match=r"at most 0\.2\. .* rollout\.max_mismatch=") as caught:
        start(confident, dtype=torch.float32)
    assert "algorithm.tis_cap=2" in str(caught.value)
    metrics = start(confident, dtype=torch.float32, rollout__max_mismatch=5.0)
    assert 0.2 < metrics["canary/mismatch"] < 3 * metrics["canary/rounding"]


@pytest.mark.parametrize("keys", [{}, LORA])
def test_an_engine_in_the_precision_of_the_learner_needs_none(confident, keys):
    assert start(confident, **keys)["canary/mismatch"] < 0.2


def test_rounding_of_a_model_with_small_logits_is_small(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    metrics = start(tmp_path)
    assert 1e-3 < metrics["canary/rounding"] < 0.1


@pytest.mark.parametrize(("change", "keys"), [(perturb_one_layer, {}), (forget_the_adapter, LORA)])
def test_other_weights_are_found_with_the_override(confident, change, keys):
    with pytest.raises(RunStopped, match="Do they hold the same model") as caught:
        start(confident, change, **keys, **OVERRIDE)
    assert "max_mismatch" not in str(caught.value)


def test_tokens_that_the_engine_samples_are_compared(tmp_path, monkeypatch):
    tiny_model().save_pretrained(tmp_path)
    generate = LocalEngine.generate

    async def at_another_temperature(self, *args, **kwargs):
        result = await generate(self, *args, **kwargs)
        return replace(result, logprobs=array("f", [2 * x for x in result.logprobs]))

    monkeypatch.setattr(LocalEngine, "generate", at_another_temperature)
    with pytest.raises(RunStopped, match="Do they hold the same model"):
        start(tmp_path)


def test_a_large_mismatch_needs_importance_weights():
    with pytest.raises(ConfigError, match=r"algorithm\.tis_cap=0 with rollout\.max_mismatch=0\.3"):
        load_config(None, ["rollout.max_mismatch=0.3", "algorithm.tis_cap=0"])
    load_config(None, ["rollout.max_mismatch=0.3"])


def test_the_local_engine_computes_as_the_learner_does(tmp_path, monkeypatch):
    """On a GPU both use bfloat16, whatever the precision of the files."""
    tiny_model().save_pretrained(tmp_path)
    assert compute_dtype("cuda") == BFLOAT16
    monkeypatch.setattr(local_engine, "compute_dtype", lambda device: compute_dtype("cuda"))
    with closing(LocalEngine.load(str(tmp_path), byte_tokenizer(), device="cpu")) as engine:
        assert engine.dtype == BFLOAT16
