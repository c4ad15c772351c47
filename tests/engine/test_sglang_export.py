"""A real server that loads an exported checkpoint returns the learner's logprobs."""

import asyncio
from array import array
from pathlib import Path

import pytest
import torch
from support.reference_model import ask
from support.trainer_fixtures import config
from support.updates import policy_of, publish
from transformers import AutoModelForCausalLM

from agentrl.engine.base import Sampling
from agentrl.engine.remote.launch import SGLangLaunch
from agentrl.engine.remote.senders import Delivery
from agentrl.engine.remote.sglang import SGLangEngine
from agentrl.http import fetch_json
from agentrl.learner.learner import Learner
from agentrl.trainer.checkpoint import save_checkpoint
from agentrl.trainer.export import export

pytestmark = pytest.mark.sglang


@pytest.fixture
def load(sglang_server, tiny_model):
    """Have the session's server load a folder; afterwards it has its own again."""

    def ask(folder: Path) -> None:
        status, answer = fetch_json(
            sglang_server.url,
            "/update_weights_from_disk",
            {"model_path": str(folder), "flush_cache": True},
            token=sglang_server.admin_token,
            timeout=120,
        )
        assert status == 200 and answer["success"], answer

    yield ask
    ask(Path(tiny_model))


@pytest.mark.parametrize("keys", [{}, {"model__lora_rank": 4}], ids=["full", "lora"])
async def test_a_server_loads_it(load, sglang_server, tiny_model, tiny_tokenizer, tmp_path, keys):
    cfg = config(**keys, model__path=str(tiny_model))
    learner = Learner(tiny_model, cfg, total_steps=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in learner.rank.optimizers["actor"].parameters.values():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    meta = {"config": cfg.model_dump(mode="json"), "dtype": "float32"}
    save_checkpoint(tmp_path, 1, learner.ranks.save, meta)
    export(tmp_path, tmp_path / "out", merge=True)
    load(tmp_path / "out")
    vocabulary = AutoModelForCausalLM.from_pretrained(tiny_model).config.vocab_size
    engine = SGLangEngine(
        sglang_server.url,
        vocabulary=vocabulary,
        key=sglang_server.token,
        admin_key=sglang_server.admin_token,
        process=None,
    )
    row = array("i", tiny_tokenizer("What is 12*13? It is 156.")["input_ids"])
    scores, expected = torch.tensor(await engine.score(row)), learner.ranks.score(row)
    torch.testing.assert_close(scores[-len(expected) :], expected, atol=1e-4, rtol=0)
    before = Learner(tiny_model, config(), total_steps=1).ranks.score(row)
    assert (before - expected).abs().max() > 0.1
    engine.close()


@pytest.fixture(scope="module")
def lora_server(sglang_python, tiny_model):
    server = SGLangLaunch(
        str(tiny_model),
        python=sglang_python,
        dtype="float32",
        lora_rank=4,
        lora_targets=["all"],
        adapters=3,
        arguments=["--lora-backend", "torch_native"],
    ).start()
    yield server
    server.stop()


@pytest.mark.slow
async def test_adapters_come_through_a_folder(lora_server, tiny_model, tiny_tokenizer):
    learner = Learner(tiny_model, config(model__lora_rank=4), total_steps=1)
    engine = SGLangEngine(
        lora_server.url,
        vocabulary=AutoModelForCausalLM.from_pretrained(tiny_model).config.vocab_size,
        key=lora_server.token,
        admin_key=lora_server.admin_token,
        process=None,
        delivery=Delivery("adapter"),
    )
    row = array("i", tiny_tokenizer("What is 12*13? It is 156.")["input_ids"])
    seen = []
    for version in (1, 2, 3):
        with torch.no_grad():
            for parameter in learner.rank.optimizers["actor"].parameters.values():
                parameter.add_(0.05 * torch.randn(parameter.shape))
        size = publish(engine, policy_of(learner, version))
        assert engine.version == version and size >= 4 * sum(
            p.numel() for p in learner.rank.optimizers["actor"].parameters.values()
        )
        scores, expected = torch.tensor(await engine.score(row)), learner.ranks.score(row)
        torch.testing.assert_close(scores[-len(expected) :], expected, atol=1e-4, rtol=0)
        assert all((expected - other).abs().max() > 1e-2 for other in seen)
        seen.append(expected)
    assert len(engine.adapters.listed()) == 2
    engine.adapters.close()


@pytest.mark.slow
async def test_turns_in_flight_end_with_the_adapter_that_they_named(lora_server, tiny_model):
    """As with `trainer.max_staleness=1`: turns span one publication."""
    learner = Learner(tiny_model, config(model__lora_rank=4), total_steps=1)
    engine = SGLangEngine(
        lora_server.url,
        vocabulary=AutoModelForCausalLM.from_pretrained(tiny_model).config.vocab_size,
        key=lora_server.token,
        admin_key=lora_server.admin_token,
        delivery=Delivery("adapter", adapters=3),
    )
    parameters = [*learner.rank.optimizers["actor"].parameters.values()]
    prompts = [array("i", range(3 + i, 40 + i)) for i in range(6)]
    states, tasks, spanned = {}, {}, 0
    for version in range(1, 6):
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(0.05 * torch.randn(parameter.shape))
        states[version] = [p.detach().clone() for p in parameters]
        spanned += sum(not task.done() for task in tasks.get(version - 1, ()))
        await asyncio.to_thread(publish, engine, policy_of(learner, version))
        tasks[version] = [
            asyncio.create_task(ask(engine, prompt, Sampling(max_tokens=150), f"e{version}-{i}"))
            for i, prompt in enumerate(prompts)
        ]
        await asyncio.gather(*tasks.get(version - 1, ()))
    assert spanned > 6
    for version, turns in tasks.items():
        for parameter, state in zip(parameters, states[version], strict=True):
            parameter.data.copy_(state)
        for prompt, turn in zip(prompts, await asyncio.gather(*turns), strict=True):
            assert set(turn.versions) == {version}
            exact = learner.ranks.score(prompt + turn.token_ids)[-len(turn.token_ids) :]
            logprobs = torch.tensor(turn.logprobs.tolist())
            torch.testing.assert_close(logprobs, exact, atol=1e-4, rtol=0)
    assert engine.reprefill_tokens() == 0
    engine.adapters.close()
