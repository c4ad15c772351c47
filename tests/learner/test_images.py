"""Rows with images in the learner: the numbers are those of the model's own forward pass.

The models are tiny, with random weights, and real classes. Rows are made by hand: texts, and for
each image its start, its placeholders and its end.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from io import BytesIO

import pytest
import torch
from PIL import Image as PIL
from support.trainer_fixtures import config, group, scored, segment
from support.vision import FAMILIES, vision_model, write_vision_model
from transformers import AutoModelForImageTextToText

from agentrl.errors import RunStopped
from agentrl.images import Image, ImageRule, RowImage, load_processor, prepare
from agentrl.learner.algorithms import make_targets
from agentrl.learner.batch import Batch, collate
from agentrl.learner.learner import Learner

START, END, PLACEHOLDER = 263, 264, 265


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    return cache(
        lambda family: write_vision_model(tmp_path_factory.mktemp(family) / "model", family)
    )


@cache
def picture(folder, seed: int, width: int = 90, height: int = 60) -> RowImage:
    noise = torch.rand(height, width, 3, generator=torch.Generator().manual_seed(seed))
    picture = PIL.fromarray((255 * noise).byte().numpy())
    return prepare(Image.of(picture), ImageRule.load(folder))


def shown(image: RowImage) -> list[int]:
    return [START, *[image.token_id] * image.tokens, END]


def row(pieces, *images):
    """Return a row of texts ("P", "A", "E" with ids) in which an image stands for its tokens."""
    ids = [(k, [t for x in p for t in (shown(x) if isinstance(x, RowImage) else [x])]) for k, p in pieces]
    found = tuple(x for _, p in pieces for x in p if isinstance(x, RowImage))
    return replace(segment(ids[0][1], *ids[1:]), images=found)


def make_batch(folder) -> Batch:
    """Return rows with an image at the start, in the middle, several, none, and a sampled one."""
    first, second, third = (picture(folder, s, 60 + 30 * s) for s in range(3))
    prompt = ("P", [first, 5, 6])
    rows = [
        row([prompt, ("A", [7, 8, 9])]),
        row([prompt, ("A", [9, 8]), ("E", [4, second, 4]), ("A", [11, 12])]),
        row([prompt, ("A", [9]), ("E", [second, third]), ("A", [3, 12, 14])]),
        row([("P", [2, 3]), ("A", [4, 5]), ("E", [6]), ("A", [7])]),
        row([("P", [2, third, 3]), ("A", [4, PLACEHOLDER, 5]), ("E", [second]), ("A", [7])]),
    ]
    groups = [
        group(*[scored([r], float(i % 2)) for i, r in enumerate(rows[:3])]),
        group(*[scored([r], float(i)) for i, r in enumerate(rows[3:])]),
    ]
    return collate(groups, 258)


def own_logprobs(model, batch: Batch, folder, temperature: float = 1.0) -> torch.Tensor:
    """Return (B, T) logprobs of sampled tokens by the model's forward pass of one row at a time.

    A sampled placeholder is put in as token 0, which has the same embedding (`same_embedding`).
    """
    out = torch.zeros(batch.rollout_logprobs.shape)
    processor = load_processor(folder)
    for b, images in enumerate(batch.images or [()] * len(out)):
        p, r = int(batch.prompt_lengths[b]), int(batch.response_lengths[b])
        ids = torch.cat([batch.prompt_ids[b, batch.prompt_ids.shape[1] - p :], batch.response_ids[b, :r]])
        is_sampled = torch.cat([torch.zeros(p, dtype=torch.bool), batch.response_mask[b, :r]])
        inputs = ids.masked_fill(is_sampled & (ids == PLACEHOLDER), 0)[None]
        arguments = {}
        if images:
            pictures = [PIL.open(BytesIO(image.data)) for image in images]
            arguments = dict(processor(images=pictures, return_tensors="pt"))
            arguments["mm_token_type_ids"] = (inputs == PLACEHOLDER).int()
        logits = model(input_ids=inputs, use_cache=False, **arguments).logits[0].float()
        logprobs = torch.log_softmax(logits[:-1] / temperature, -1)
        chosen = logprobs.gather(1, ids[1:, None])[p - 1 :, 0]
        out[b, :r] = torch.where(batch.response_mask[b, :r], chosen, 0.0)
    return out


def same_embedding(model):
    """Give token 0 the embedding of the placeholder, so that a reference can use it."""
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[0] = weight[PLACEHOLDER]
    return model


def learner_of(folder, **keys) -> Learner:
    return Learner(folder, config(**keys), total_steps=2)


def gradients(learner: Learner, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the gradient of the mean logprob of all sampled tokens."""
    targets = make_targets(batch, learner.config, learner.old_logprobs(batch), None, None)
    weights = batch.response_mask.double() / batch.response_mask.sum()
    ones = torch.ones_like(targets.advantages)
    return learner.gradient(batch, replace(targets, advantages=ones, weights=weights))


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_the_models_own(family, folder_of, tmp_path):
    model = same_embedding(vision_model(family))
    model.save_pretrained(tmp_path)
    load_processor(folder_of(family)).save_pretrained(tmp_path)
    batch, learner = make_batch(folder_of(family)), learner_of(tmp_path)
    expected = own_logprobs(model, batch, tmp_path)
    assert (learner.logprobs(batch) - expected.detach()).abs().max() < 1e-4
    assert (expected[3] - expected[3].mean()).abs().max() > 0.1
    (-expected.sum() / batch.response_mask.sum()).backward()
    actual = gradients(learner, replace(batch, rollout_logprobs=expected.detach()))
    own = {name: p.grad for name, p in model.named_parameters()}
    assert actual.keys() == {name for name, g in own.items() if g is not None}
    assert any("visual" in name for name in actual)
    for name, gradient in actual.items():
        if "embed_tokens" in name:  # the reference puts token 0 in place of the sampled one
            own[name][PLACEHOLDER] += own[name][0]
            own[name][0], gradient[0] = 0, 0
        torch.testing.assert_close(gradient, own[name], rtol=1e-3, atol=1e-5)
