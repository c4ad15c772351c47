"""Routers are found and replaced, and the local engine returns what they choose."""

from __future__ import annotations

import asyncio
import copy
from contextlib import closing

import pytest
import torch
from engine.test_local import TOKENIZER
from support.architectures import ARCHITECTURES, architecture, make_model
from support.models_page import KINDS
from support.moe import experts_of, moe_model, own_experts, turn, turns
from support.updates import update
from torch import Tensor

from agentrl.engine.local import LocalEngine
from agentrl.engine.local.decoder import MIN_PREFIX
from agentrl.engine.local.routers import Routers
from agentrl.errors import ConfigError, RunStopped

WITH_ROUTERS = (
    "Qwen3-MoE", "Qwen3.5-MoE", "gpt-oss", "Nemotron-H", "Granite 4 hybrid", "GLM-4.5",
    "DeepSeek-V3",
)  # fmt: skip
IDS = torch.arange(1, 20)[None]
PROMPT = [7, 3, 9, 200, 41, 5, 5, 77, 120, 6]


def logits(model) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits[0]


@pytest.mark.parametrize("name", WITH_ROUTERS)
def test_the_choices_of_another_model_give_its_logits_and_gradients(name):
    """The other model has the same weights but other biases of its choices, or is the same."""
    model = architecture(name).float().eval()
    other = copy.deepcopy(model)
    is_biased = False
    for n, bias in (*other.named_parameters(), *other.named_buffers()):
        if n.endswith("e_score_correction_bias"):  # They choose, and weigh nothing.
            bias.data.add_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(0)))
            is_biased = True
    routers, others = Routers(model), Routers(other)
    with others.recording() as recorded:
        expected = logits(other)
    experts = others.join(recorded)
    assert experts.shape == (19, routers.width) and experts.dtype == torch.int16
    before = logits(model)
    routers.replay(experts)
    replayed = logits(model)
    torch.testing.assert_close(replayed, expected, atol=1e-5, rtol=0)
    assert ((before - expected).abs().max() > 0.01) == is_biased
    for x in (replayed, expected):
        x.square().mean().backward()
    gradients = dict(other.named_parameters())
    for n, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, gradients[n].grad, atol=1e-5, rtol=1e-4, msg=n)
    gates = [p.grad for n, p in model.named_parameters() if n.endswith("gate.weight")]
    assert all(g is not None and g.any() for g in gates)
    routers.replay(experts.index_fill(0, torch.arange(19), -1))
    assert torch.equal(logits(model), before)
    routers.replay(None)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("name", [n for n in ARCHITECTURES if n not in WITH_ROUTERS])
def test_models_without_routers_are_refused(name):
    with pytest.raises(ConfigError, match=r"has no num_experts_per_tok, so it has no routers"):
        Routers(architecture(name))


def test_routers_that_cannot_be_replaced_are_refused(monkeypatch):
    [(kind, values)] = [v["PhiMoE"] for v in KINDS.values() if "PhiMoE" in v]
    with pytest.raises(ConfigError, match=r"PhimoeForCausalLM.*no module chooses its experts by"):
        Routers(make_model(kind, values | {"num_experts_per_tok": 2}))
    model = moe_model()
    block = model.model.layers[1].mlp
    frozen = copy.deepcopy(block.gate)
    block.gate.forward = lambda x: (frozen.forward(x), type(block.gate).forward(block.gate, x))[0]
    with pytest.raises(ConfigError, match=r"not depend on the choices of layer 1|several routers"):
        Routers(model)


def test_experts_of_another_model_are_refused():
    routers = Routers(moe_model())
    routers.check(torch.full((1, 3, 16), 15))
    for width, largest in ((12, 15), (16, 16)):
        with pytest.raises(RunStopped, match=rf"{width} experts for a token, up .* {largest}, b"):
            routers.check(torch.full((1, 3, width), largest))


@pytest.fixture(scope="module")
def model():
    return moe_model()


@pytest.fixture
def engine(model):
    options = {"deterministic": False, "returns_experts": True}
    engine = LocalEngine(copy.deepcopy(model), TOKENIZER, **options)
    with closing(engine):
        yield engine


def test_the_local_engine_returns_the_experts_of_all_inputs(engine, model):
    """The batch has equal prompts, prompts with a common prefix, and others."""
    common = [(7 * i) % 250 + 1 for i in range(3 * MIN_PREFIX)]
    prompts = [[*common, i, 9] for i in range(6)] + [PROMPT] * 3 + [PROMPT[:5], [4]]
    for prompt, answer in zip(prompts, turns(engine, prompts), strict=True):
        expected = own_experts(model, [*prompt, *answer.token_ids])[:-1]
        assert torch.equal(experts_of(answer).long(), expected)


def test_each_turn_returns_the_experts_since_the_last(engine, model):
    async def play():
        engine.begin("a")
        first = await turn(engine, PROMPT, "a")
        row = [*PROMPT, *first.token_ids, 8, 9, 10]
        start = len(row) - 4  # The last token of the first turn was no input of it.
        second = await turn(engine, row, "a", start=start, seed=1)
        branch = await turn(engine, [*PROMPT, 11, 12], "a", seed=2)
        none = await turn(engine, [*PROMPT, 11], "a", start=None)
        engine.end("a")
        return first, row, second, branch, none

    first, row, second, branch, none = asyncio.run(play())
    both = torch.cat([experts_of(first), experts_of(second)])
    assert torch.equal(both.long(), own_experts(model, [*row, *second.token_ids])[:-1])
    assert second.cached_tokens > 0 and branch.cached_tokens > 0
    expected = own_experts(model, [*PROMPT, 11, 12, *branch.token_ids])[:-1]
    assert torch.equal(experts_of(branch).long(), expected)
    assert not none.experts
    cut = second.first(3)
    assert torch.equal(experts_of(cut), experts_of(second)[:-9])
    assert second.first(100) == second


@pytest.mark.parametrize("cause", ["another conversation", "new weights", "another episode"])
def test_a_branch_returns_the_experts_of_tokens_that_were_processed_again(engine, model, cause):
    """They were processed for a later turn of a row, which did not return their experts."""
    other = moe_model()
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.3 * weight.std() * torch.randn_like(weight))

    async def play():
        engine.begin("a")
        engine.begin("b")
        first = await turn(engine, PROMPT, "a")
        row = [*PROMPT, *first.token_ids, 8, 9]
        if cause == "another conversation":
            await turn(engine, [9, *PROMPT, *PROMPT, 4], "a")
        elif cause == "new weights":
            await asyncio.to_thread(engine.publish, update(other.named_parameters(), 1))
        else:
            given_up = asyncio.create_task(turn(engine, row, "a", n=400))
            await asyncio.sleep(0.1)
            given_up.cancel()
            await asyncio.wait([given_up])
            await turn(engine, [9, *PROMPT, *PROMPT, 4], "b")
        await turn(engine, row, "a", start=len(row) - 3)
        prompt = [*row, 11]
        branch = await turn(engine, prompt, "a")
        return [*prompt, *branch.token_ids], branch

    ids, branch = asyncio.run(play())
    assert branch.cached_tokens > len(PROMPT)
    now = other if cause == "new weights" else model
    assert torch.equal(experts_of(branch).long(), own_experts(now, ids)[:-1])


def test_new_weights_do_not_change_the_experts_of_sampled_tokens(engine, model):
    """A token's experts are those with which the token after it was sampled."""
    other = moe_model()
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.3 * weight.std() * torch.randn_like(weight))

    async def play():
        for name in "ab":
            engine.begin(name)
        playing = asyncio.create_task(turn(engine, PROMPT, "a", n=400))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(engine.publish, update(other.named_parameters(), 1))
        late = await turn(engine, [*PROMPT, 3], "b")
        answer = await playing
        row = [*PROMPT, *answer.token_ids, 8]
        return answer, late, await turn(engine, row, "a", start=len(row) - 2, n=20)

    answer, late, second = asyncio.run(play())
    switch = answer.versions.index(1)
    assert 0 < switch < 400
    ids = [*PROMPT, *answer.token_ids, 8, *second.token_ids]
    old, new = own_experts(model, ids), own_experts(other, ids)
    at = len(PROMPT) + switch - 1
    assert not torch.equal(old[:at], new[:at])
    both = torch.cat([experts_of(answer), experts_of(second)])
    assert torch.equal(both.long(), torch.cat([old[:at], new[at:-1]]))
    expected = own_experts(other, [*PROMPT, 3, *late.token_ids])[:-1]
    assert torch.equal(experts_of(late).long(), expected)


def test_the_local_engine_refuses_a_model_without_routers():
    with pytest.raises(ConfigError, match="has no routers"):
        LocalEngine(architecture("Qwen3"), TOKENIZER, deterministic=True, returns_experts=True)
