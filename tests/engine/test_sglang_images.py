"""Images with a real SGLang server on a CPU: its logprobs are those of transformers."""

import numpy as np
import pytest
import torch
from support.image_rows import PAD, Reference, picture, row_of
from support.updates import publish, update
from support.vision import write_vision_model
from transformers import AutoModelForImageTextToText

from agentrl.engine.base import Sampling
from agentrl.engine.local.load import with_published_names
from agentrl.engine.remote.launch import SGLangLaunch
from agentrl.engine.remote.sglang import SGLangEngine
from agentrl.images import ImageRule

pytestmark = pytest.mark.sglang

SAMPLING = Sampling(max_tokens=12, stop_ids=(PAD,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_vision_model(tmp_path_factory.mktemp("vision"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def server(sglang_python, folder):
    launch = SGLangLaunch(str(folder), python=sglang_python, dtype="float32", reads_images=True)
    server = launch.start()
    yield server
    server.stop()


@pytest.fixture
def model(folder):
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def engine(server, model):
    engine = SGLangEngine(
        server.url,
        vocabulary=model.config.text_config.vocab_size,
        key=server.token,
        admin_key=server.admin_token,
        process=server,
    )
    publish(engine, update(published(model), 0))
    yield engine
    engine.admin.manage("/continue_generation", {})


def published(model):
    return with_published_names(model, ((n, p.detach()) for n, p in model.named_parameters()))


async def turn(engine, row, images, seed=1, **changes):
    return await engine.generate(
        row, SAMPLING, episode_id="e", seed=seed, deadline=float("inf"), images=images
    )


@pytest.fixture
def conversation(folder):
    """Two turns: an image in the prompt, and one in the result of a tool."""
    rule = ImageRule.load(folder)
    first, second = picture(rule, 3, 2, seed=1), picture(rule, 2, 4, seed=2)
    prompt = row_of("<|im_start|>user\nlook ", first, " at it<|im_end|>\n<|im_start|>assistant\n")
    result = row_of(
        "<|im_end|>\n<|im_start|>user\n", second, "\n<|im_end|>\n<|im_start|>assistant\n"
    )
    return prompt, result, [first, second]


async def test_two_turns_with_images(engine, model, folder, conversation):
    prompt, result, images = conversation
    reference = Reference(model, folder)
    first = await turn(engine, prompt, images[:1])
    row = prompt + first.token_ids + result
    second = await turn(engine, row, images)
    for before, answer, shown in ((prompt, first, images[:1]), (row, second, images)):
        assert answer.prompt_tokens == len(before) and answer.token_ids
        expected = reference.logprobs(before + answer.token_ids, shown)[len(before) :]
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
    whole = row + second.token_ids
    scores = np.array(await engine.score(whole, images))
    expected = np.where(np.array(whole) == PAD, 0, reference.logprobs(whole, images))
    np.testing.assert_allclose(scores, expected, atol=1e-4)
