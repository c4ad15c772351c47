"""Images in the local engine: its logprobs are those of the model's own forward pass."""

import asyncio
import copy
import time
from array import array
from contextlib import contextmanager

import numpy as np
import pytest
from support.image_rows import PAD, TOKENIZER, Reference, picture, row_of
from support.not_recorded import NotRecorded
from support.vision import vision_model, write_vision_model

from agentrl.engine.base import Sampling, Update
from agentrl.engine.local import LocalEngine
from agentrl.errors import RequestRefused
from agentrl.images import FAMILIES, ImageRule, load_processor

SAMPLING = Sampling(max_tokens=10, stop_ids=(PAD,))
USER, ASSISTANT = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return write_vision_model(tmp_path_factory.mktemp("vision") / request.param, request.param)


@pytest.fixture(scope="module")
def one_folder(tmp_path_factory):
    return write_vision_model(tmp_path_factory.mktemp("vision") / FAMILIES[1], FAMILIES[1])


@contextmanager
def opened(folder, model=None):
    model = copy.deepcopy(model) if model else vision_model(folder.name)
    processor = load_processor(folder)
    engine = LocalEngine(model, TOKENIZER, deterministic=True, slots=8, processor=processor)
    try:
        yield engine
    finally:
        engine.close()


def ask(engine, name, row, images=(), seed=0, sampling=SAMPLING):
    deadline = time.monotonic() + 100
    return engine.generate(
        row, sampling, episode_id=name, seed=seed, deadline=deadline, images=images
    )


async def play(engine, name, turns, seed):
    """Play an episode of parts (texts and images) for each turn.

    Returns:
        For each turn: the row before it, the images of the row, and the answer.
    """
    row, images, played = array("i"), (), []
    for i, parts in enumerate(turns):
        row = row + row_of(*parts)
        images += tuple([part for part in parts if not isinstance(part, str)])
        answer = await ask(engine, name, row, images, 100 * seed + i)
        assert answer.prompt_tokens == len(row)
        played.append((row, images, answer))
        row = row + answer.token_ids
        if answer.token_ids[-1] == PAD:
            break  # A row in which the policy sampled the placeholder cannot be continued.
    engine.end(name)
    return played


async def play_all(engine, episodes):
    for name in episodes:
        engine.begin(name)
    items = enumerate(episodes.items())
    return await asyncio.gather(*(play(engine, name, turns, i) for i, (name, turns) in items))


def episodes_of(folder):
    """Rows with and without images, of one and of several turns."""
    rule = ImageRule.load(folder)
    a, b, c = (picture(rule, *size, seed) for seed, size in enumerate([(3, 2), (2, 4), (2, 2)]))
    other = picture(rule, 3, 2, seed=9)
    return {
        "one": [[USER, a, " what?" + ASSISTANT]],
        "the same": [[USER, a, " what?" + ASSISTANT]],
        "another": [[USER, other, " what?" + ASSISTANT]],
        "text": [[USER + "what?" + ASSISTANT], [USER + "and?" + ASSISTANT]],
        "tools": [
            [USER, a, " and ", c, " what?" + ASSISTANT],
            ["<|im_end|>\n" + USER, b, ASSISTANT],
            ["<|im_end|>\n" + USER + "go on" + ASSISTANT],
            ["<|im_end|>\n" + USER, c, " ", other, ASSISTANT],
        ],
        "late": [[USER + "look" + ASSISTANT], ["<|im_end|>\n" + USER, b, " so?" + ASSISTANT]],
    }


def check(reference, played):
    for row, images, answer in played:
        expected = reference.logprobs(row + answer.token_ids, images)[len(row) :]
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("graphs", [False, True])
async def test_logprobs_of_many_rows_and_turns_are_the_models(folder, graphs):
    model = vision_model(folder.name)
    reference, episodes = Reference(model, folder), episodes_of(folder)
    with opened(folder, model) as engine:
        if graphs:
            engine._decoder._graphs = NotRecorded(engine._decoder._decode)
        played = await play_all(engine, episodes)
        for turns in played:
            check(reference, turns)
        one, same, another, _, tools, _ = played
        assert len(tools) > 2
        assert one[0][2].logprobs[0] != another[0][2].logprobs[0]
        # A row that repeats another's image is computed once, and a turn feeds what is new alone.
        assert same[0][2].cached_tokens == len(same[0][0]) - 1
        assert tools[1][2].cached_tokens >= len(tools[0][0])
        row, images, answer = tools[-1]
        row = row + answer.token_ids[:-1]
        (scores,) = await engine.scores(row, images)
        np.testing.assert_allclose(scores, reference.logprobs(row, images), atol=1e-4)
    if graphs:
        return
    with opened(folder, model) as engine:  # The same bits.
        assert await play_all(engine, episodes) == played


async def test_weights_that_change_within_a_turn(folder):
    """Both parts of the turn have the images; those of the new weights are computed again."""
    model, other = vision_model(folder.name), vision_model(folder.name, seed=1)
    update = Update(1, lambda: iter(other.state_dict().items()), lambda route: None)
    rule = ImageRule.load(folder)
    images = picture(rule, 3, 2, 0), picture(rule, 2, 4, 1)
    row = row_of(USER, images[0], " and ", images[1], " what?" + ASSISTANT)
    sampling = Sampling(max_tokens=400)
    with opened(folder, model) as engine:
        engine.begin("e")
        turn = asyncio.create_task(ask(engine, "e", row, images, sampling=sampling))
        while not engine._decoder.rows.length.max() > len(row) + 2:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.publish, update)
        answer = await turn
    ids, versions = answer.token_ids, np.array(answer.versions)
    assert set(versions) == {0, 1}
    # Rows in which the policy sampled placeholders are not the model's: compare up to the first.
    end = ids.index(PAD) if PAD in ids else len(ids)
    changed = int(versions.argmax())
    assert changed < end
    for version, reference in enumerate([Reference(model, folder), Reference(other, folder)]):
        expected = reference.logprobs(row + ids[:end], images)[len(row) :]
        at = versions[:end] == version
        np.testing.assert_allclose(np.array(answer.logprobs[:end])[at], expected[at], atol=1e-4)


async def test_a_row_that_changes_its_images(one_folder):
    """The same tokens with other images, fewer, and none: nothing stale stays in the cache."""
    model = vision_model(one_folder.name)
    reference, rule = Reference(model, one_folder), ImageRule.load(one_folder)
    a, b, c = (picture(rule, 3, 2, seed) for seed in range(3))
    two = row_of(USER, a, " and ", b, " what?" + ASSISTANT)
    fewer = row_of(USER, a, " and some text that is longer than it" + ASSISTANT)
    with opened(one_folder, model) as engine:
        engine.begin("e")
        first = None
        for row, images in [
            (two, (a, b)),
            (two, (a, c)),
            (two, (c, a)),
            (fewer, (c,)),
            (two, (c, b)),
            (two, ()),
            (two, (a, b)),
        ]:
            answer = await ask(engine, "e", row, images)
            if images:
                check(reference, [(row, images, answer)])
            else:
                assert answer.logprobs[0] != first.logprobs[0]
            first = first or answer


async def test_rows_without_images_are_those_of_the_text_model(one_folder):
    model = vision_model(one_folder.name)
    row = row_of(USER + "what?" + ASSISTANT)
    with opened(one_folder, model) as engine:
        engine.begin("e")
        answer = await ask(engine, "e", row)
        check(Reference(model, one_folder), [(row, (), answer)])
        long = array("i", [5 + k % 200 for k in range(1200)])
        (scores,) = await engine.scores(long)
        np.testing.assert_allclose(scores, Reference(model, one_folder).logprobs(long), atol=1e-4)


async def test_a_long_row_with_an_image_at_its_start(one_folder):
    """The tokens after the last image are fed in chunks."""
    model, rule = vision_model(one_folder.name), ImageRule.load(one_folder)
    image, text = picture(rule, 3, 5, 0), "".join(chr(97 + k % 26) for k in range(1200))
    row = row_of(USER, image, text + ASSISTANT)
    reference = Reference(model, one_folder)
    with opened(one_folder, model) as engine:
        engine.begin("e")
        check(reference, [(row, (image,), await ask(engine, "e", row, (image,)))])
        (scores,) = await engine.scores(row, (image,))
        np.testing.assert_allclose(scores, reference.logprobs(row, (image,)), atol=1e-4)


async def test_rows_that_do_not_have_their_images_are_refused(one_folder):
    rule = ImageRule.load(one_folder)
    image = picture(rule, 3, 2, 0)
    row = row_of(USER, image, " what?" + ASSISTANT)
    with opened(one_folder) as engine:
        engine.begin("e")
        for images, ids in [
            ((image, image), row),
            ((image,), row + array("i", [PAD])),
            ((image,), row_of(USER)),
            ((picture(rule, 1, 7, 0),), row),
        ]:
            with pytest.raises(RequestRefused, match="placeholder token"):
                await ask(engine, "e", ids, images)
            with pytest.raises(RequestRefused, match="placeholder token"):
                await engine.scores(ids, images)
        assert (await ask(engine, "e", row, (image,))).token_ids


async def test_a_model_without_images_refuses_them(tiny_model, tiny_tokenizer, one_folder):
    image = picture(ImageRule.load(one_folder), 3, 2, 0)
    engine = LocalEngine.load(str(tiny_model), tiny_tokenizer, device="cpu")
    try:
        engine.begin("e")
        with pytest.raises(RequestRefused, match=r"no images here\. Models that do: qwen2_vl"):
            await ask(engine, "e", row_of(image), (image,))
    finally:
        engine.close()
