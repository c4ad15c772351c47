"""Images in the local engine: its logprobs are those of the model's own forward pass."""

import asyncio
import time
from array import array
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from support.image_rows import PAD, TOKENIZER, Reference, picture, row_of
from support.vision import vision_model, write_vision_model

from agentrl.engine.base import Sampling, Update
from agentrl.engine.local import LocalEngine
from agentrl.errors import RequestRefused
from agentrl.images import FAMILIES, ImageRule, load_processor

SAMPLING = Sampling(max_tokens=10, stop_ids=(PAD,))
USER, ASSISTANT = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return write_vision_model(tmp_path_factory.mktemp(request.param), request.param)


def family_of(folder):
    return folder.name[:-1]


@contextmanager
def opened(folder, **options):
    model = vision_model(family_of(folder))
    options = {"deterministic": True, "slots": 8} | options
    engine = LocalEngine(model, TOKENIZER, processor=load_processor(folder), **options)
    try:
        yield engine
    finally:
        engine.close()


def reference(folder, seed=0):
    return Reference(vision_model(family_of(folder), seed), folder)


async def play(engine, name, turns, seed=0):
    """Play an episode of (text and images) per turn; return its row, images and sampled places."""
    row, images, sampled = array("i"), [], []
    for i, parts in enumerate(turns):
        row += row_of(*parts)
        images += [part for part in parts if not isinstance(part, str)]
        answer = await engine.generate(
            row,
            SAMPLING,
            episode_id=name,
            seed=100 * seed + i,
            deadline=time.monotonic() + 60,
            images=tuple(images),
        )
        assert answer.prompt_tokens == len(row)
        sampled.append((len(row), answer))
        row = row + answer.token_ids
        if answer.token_ids[-1] == PAD:
            break  # A row in which the policy sampled the placeholder cannot be continued.
    engine.end(name)
    return row, images, sampled


async def play_all(engine, episodes):
    for name in episodes:
        engine.begin(name)
    played = [play(engine, name, turns, seed) for seed, (name, turns) in enumerate(episodes.items())]
    return await asyncio.gather(*played)


def episodes_of(folder):
    """Rows with and without images, of one and of several turns."""
    rule = ImageRule.load(folder)
    a, b, c = (picture(rule, *size, seed) for seed, size in enumerate([(3, 2), (2, 4), (1, 1)]))
    return {
        "one image": [[USER, a, " what?" + ASSISTANT]],
        "same": [[USER, a, " what?" + ASSISTANT]],
        "other image": [[USER, picture(rule, 3, 2, 9), " what?" + ASSISTANT]],
        "text": [[USER + "what?" + ASSISTANT], [USER + "and?" + ASSISTANT]],
        "tool": [
            [USER, a, " and ", c, " what?" + ASSISTANT],
            ["<|im_end|>\n" + USER, b, ASSISTANT],
            ["<|im_end|>\n" + USER + "go on" + ASSISTANT],
            ["<|im_end|>\n" + USER, c, " ", b, ASSISTANT],
        ],
        "late": [[USER + "look" + ASSISTANT], ["<|im_end|>\n" + USER, b, " so?" + ASSISTANT]],
    }


def check(ref, results):
    for row, images, sampled in results:
        at = np.flatnonzero(np.array(row) == PAD)
        ended = [row[-1] == PAD]
        assert len(at) == sum(image.tokens for image in images) + sum(ended)
        for start, answer in sampled:
            end = start + len(answer.token_ids)
            whole, shown = row[:end], [i for i in images][: count_before(row, images, start)]
            expected = ref.logprobs(whole[:-1] + array("i", [0]), shown)[start : end - 1]
            np.testing.assert_allclose(answer.logprobs[:-1], expected, atol=1e-4)


def count_before(row, images, start):
    """How many images end before a position."""
    found, at = 0, np.flatnonzero(np.array(row[:start]) == PAD)
    total = 0
    for image in images:
        total += image.tokens
        found += total <= len(at)
    return found


async def test_logprobs_are_the_models(folder):
    with opened(folder) as engine:
        results = await play_all(engine, episodes_of(folder))
        check(reference(folder), results)
        assert len(results[4][2]) > 2  # turns
