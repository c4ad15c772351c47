"""Images with a real SGLang server on a CPU: its logprobs are those of transformers."""

import asyncio
import time

import numpy as np
import pytest
import torch
from support.image_rows import Reference, picture, row_of
from support.updates import publish, update
from support.vision import vision_model, write_vision_model

from agentrl.engine.base import Sampling
from agentrl.engine.local.load import with_published_names
from agentrl.engine.remote.launch import SGLangLaunch
from agentrl.engine.remote.sglang import SGLangEngine
from agentrl.images import ImageRule

pytestmark = pytest.mark.sglang

USER, ASSISTANT = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
SPECIAL = 256
"""The first token that is no byte."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_vision_model(tmp_path_factory.mktemp("vision"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def server(sglang_python, folder):
    launch = SGLangLaunch(str(folder), python=sglang_python, dtype="float32", reads_images=True)
    server = launch.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def engine(server, folder):
    return SGLangEngine(
        server.url,
        vocabulary=vision_model().config.text_config.vocab_size,
        key=server.token,
        admin_key=server.admin_token,
    )


def talkative(seed):
    """Return a model that samples bytes alone at temperature 0: other tokens have logit 0."""
    model = vision_model("qwen2_5_vl", seed)
    with torch.no_grad():
        model.lm_head.weight[SPECIAL:] = 0
    return model


def policy(model, version):
    """Return an update to all weights, also of the layers for images, by the names of files."""
    weights = [(name, p.detach()) for name, p in model.named_parameters()]
    return update(with_published_names(model, weights), version)


def ask(engine, row, images, n=12):
    return engine.generate(
        row,
        Sampling(temperature=0.0, max_tokens=n),
        episode_id="e",
        seed=1,
        deadline=time.monotonic() + 100,
        images=images,
    )


def check(reference, row, images, answer):
    assert answer.prompt_tokens == len(row)
    expected = reference.logprobs(row + answer.token_ids, images)[len(row) :]
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)


async def test_images_in_the_prompt_and_in_a_result(engine, folder):
    """Turns, scores and a published policy are the model's; an image matters."""
    rule, models = ImageRule.load(folder), [talkative(0), talkative(1)]
    a, b, other = picture(rule, 3, 2, 1), picture(rule, 2, 4, 2), picture(rule, 3, 2, 3)
    prompt = row_of(USER + "look ", a, " at it" + ASSISTANT)
    result = row_of("<|im_end|>\n" + USER, b, "\n" + ASSISTANT)
    for version, model in enumerate(models):
        reference = Reference(model, folder)
        await asyncio.to_thread(publish, engine, policy(model, version))
        first = await ask(engine, prompt, [a])
        check(reference, prompt, [a], first)
        row = prompt + first.token_ids + result
        second = await ask(engine, row, [a, b])
        check(reference, row, [a, b], second)
        assert second.cached_tokens >= len(prompt)
        row += second.token_ids
        mine = await engine.score(row, [a, b])
        np.testing.assert_allclose(mine, reference.logprobs(row, [a, b]), atol=1e-4)
        # The same tokens with another image: nothing of the first one is left in a cache.
        changed = await engine.score(row, [other, b])
        np.testing.assert_allclose(changed, reference.logprobs(row, [other, b]), atol=1e-4)
        assert np.abs(np.subtract(mine, changed)).max() > 0.01
        text = row_of(USER + "no image" + ASSISTANT)
        check(reference, text, [], await ask(engine, text, []))


async def test_a_turn_that_an_update_cuts_keeps_its_images(engine, folder):
    rule, models = ImageRule.load(folder), [talkative(2), talkative(3)]
    images = [picture(rule, 3, 2, 1), picture(rule, 2, 4, 2)]
    row = row_of(USER, images[0], " and ", images[1], ASSISTANT)
    await asyncio.to_thread(publish, engine, policy(models[0], 2))
    turn = asyncio.create_task(ask(engine, row, images, 500))
    while not engine.turns_in_flight():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    await asyncio.to_thread(publish, engine, policy(models[1], 3))
    answer = await turn
    versions = np.array(answer.versions)
    assert set(versions) == {2, 3} and len(versions) == 500
    for version, model in enumerate(models, start=2):
        expected = Reference(model, folder).logprobs(row + answer.token_ids, images)[len(row) :]
        at = versions == version
        np.testing.assert_allclose(np.array(answer.logprobs)[at], expected[at], atol=1e-4)
