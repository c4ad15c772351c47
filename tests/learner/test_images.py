"""Rows with images in the learner: the numbers are those of the model's own forward pass.

The models are tiny, with random weights, and real classes. Rows are made by hand: texts, and for
each image its start, its placeholders and its end.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import cache
from io import BytesIO
from typing import Any

import pytest
import torch
from peft import PeftModel
from PIL import Image as PIL
from support.exact_rank import ExactRank
from support.processes import Processes
from support.trainer_fixtures import (
    config,
    group,
    scored,
    segment,
    step,
    tensors_in,
    tiny_folder,
)
from support.vision import FAMILIES, vision_config, vision_model, write_vision_model
from transformers import AutoModelForImageTextToText

from agentrl.engine.local.load import QUANTIZED_BASE, load_causal_lm
from agentrl.errors import ConfigError, RunStopped
from agentrl.images import Image, ImageRule, RowImage, load_processor, prepare
from agentrl.learner.algorithms import make_targets
from agentrl.learner.batch import Batch, collate
from agentrl.learner.learner import Learner
from agentrl.learner.memory import read_shape
from agentrl.learner.modes import check_context
from agentrl.learner.packing import Mode, make_micro_batch
from agentrl.learner.rank import LocalRankGroup
from agentrl.learner.sft import Example, SFTLearner, make_rows, make_sft_config
from agentrl.trajectory import Segment, token_array

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
    rule = ImageRule.load(folder)
    assert rule
    return prepare(Image.of(picture), rule)


def shown(image: RowImage) -> list[int]:
    return [START, *[image.token_id] * image.tokens, END]


def row(pieces: list[tuple[str, list[Any]]]) -> Segment:
    """Return a row of texts ("P", "A", "E" with ids) in which an image stands for its tokens."""
    ids = [
        (k, [t for x in p for t in (shown(x) if isinstance(x, RowImage) else [x])])
        for k, p in pieces
    ]
    found = tuple(x for _, p in pieces for x in p if isinstance(x, RowImage))
    return replace(segment(ids[0][1], *ids[1:]), images=found)


def make_batch(folder, sampled: int = 10) -> Batch:
    """Return rows with an image at the start, in the middle, several, and none."""
    first, second, third = (picture(folder, s, 60 + 30 * s) for s in range(3))
    prompt = ("P", [first, 5, 6])
    rows = [
        row([prompt, ("A", [7, 8, 9])]),
        row([prompt, ("A", [9, 8]), ("E", [4, second, 4]), ("A", [11, 12])]),
        row([prompt, ("A", [9]), ("E", [second, third]), ("A", [3, 12, 14])]),
        row([("P", [2, 3]), ("A", [4, 5]), ("E", [6] * 80), ("A", [7])]),
        row([("P", [2, third, 3]), ("A", [4, sampled, 5]), ("E", [second]), ("A", [7])]),
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
        ids = torch.cat(
            [batch.prompt_ids[b, batch.prompt_ids.shape[1] - p :], batch.response_ids[b, :r]]
        )
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
    batch, learner = make_batch(folder_of(family), PLACEHOLDER), learner_of(tmp_path)
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


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in learner.rank.policy.model.named_parameters()}


def changed(learner: Learner, before: dict[str, torch.Tensor]) -> set[str]:
    return {n for n, w in weights_of(learner).items() if not torch.equal(w, before[n])}


def test_lora(folder_of, tmp_path):
    """The tower has a `gate_proj`, too, which gets no adapter; the reference is the base."""
    folder, family = folder_of("qwen2_5_vl"), "qwen2_5_vl"
    batch = make_batch(folder)
    learner = learner_of(
        folder, model__lora_rank=4, algorithm__kl_loss_coef=0.1, optim__lr=1e-2, trainer__seed=1
    )
    names = set(learner.rank.optimizers["actor"].parameters)
    assert len(names) == 2 * 7 * 2 and not any("visual" in name for name in names)
    expected = own_logprobs(vision_model(family), batch, folder).detach()
    assert (learner.logprobs(batch) - expected).abs().max() < 1e-4
    step(learner, batch)
    initial = learner.initial_logprobs(batch)
    assert (initial - expected).abs().max() < 1e-4
    learned = learner.logprobs(batch)
    assert (learned - expected).abs().max() > 0.01
    learner.ranks.save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(vision_model(family), str(tmp_path))
    assert (own_logprobs(model, batch, folder).detach() - learned).abs().max() < 1e-4
    learner.rank.policy.save_whole(tmp_path / "whole")
    merged = load_causal_lm(tmp_path / "whole", torch.float32)
    assert (own_logprobs(merged, batch, folder).detach() - learned).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_all_weights_learn_and_are_saved(family, folder_of, tmp_path):
    """The reference is a copy; a checkpoint, an export and the tensors for servers are whole."""
    folder, batch = folder_of(family), make_batch(folder_of(family))
    keys = {"algorithm__kl_loss_coef": 0.1, "optim__lr": 1e-2}
    learner = learner_of(folder, **keys)
    before = learner.logprobs(batch)
    step(learner, batch)
    assert torch.equal(learner.initial_logprobs(batch), before)
    learned = learner.logprobs(batch)
    assert (learned - before).abs().max() > 0.01
    (tmp_path / "saved").mkdir()
    learner.ranks.save(tmp_path / "saved")
    again = learner_of(folder, **keys)
    again.ranks.load(tmp_path / "saved")
    assert torch.equal(again.logprobs(batch), learned)
    step(again, batch)
    step(learner, batch)
    assert not changed(again, weights_of(learner))
    again.ranks.save_pretrained(tmp_path / "export")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "export", dtype=torch.float32)
    exported = own_logprobs(model.eval(), batch, tmp_path / "export").detach()
    assert (exported - again.logprobs(batch)).abs().max() < 1e-5
    published, files = dict(again.export(published=True)), tensors_in(folder)
    assert published.keys() == files.keys()
    assert all(torch.equal(published[n], t) for n, t in tensors_in(tmp_path / "export").items())


def test_a_frozen_vision_tower(folder_of, tmp_path):
    folder = folder_of("qwen3_vl")
    learner = learner_of(folder, model__freeze_vision_tower=True, optim__lr=1e-2)
    before = weights_of(learner)
    step(learner, make_batch(folder))
    moved = changed(learner, before)
    is_moved = {name: name in moved for name in before if ".k_proj.bias" not in name}
    assert is_moved == {name: "visual" not in name for name in is_moved}
    assert not any("visual" in name for name in learner.rank.optimizers["actor"].parameters)
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM has no vision tower"):
        learner_of(tiny_folder(tmp_path), model__freeze_vision_tower=True)


def test_a_base_of_four_bits(folder_of, tmp_path):
    """Its text part is rounded, as it is when the adapter is merged; images are read as before."""
    folder, batch = folder_of("qwen2_vl"), make_batch(folder_of("qwen2_vl"))
    lora = {"model__lora_rank": 4, "optim__lr": 1e-2}
    learner = learner_of(folder, model__quantization="nf4", **lora)
    step(learner, batch)
    learned = learner.logprobs(batch)
    learner.ranks.save_pretrained(tmp_path)
    merged = load_causal_lm(tmp_path, torch.float32)
    assert (own_logprobs(merged, batch, folder).detach() - learned).abs().max() < 1e-4
    (tmp_path / QUANTIZED_BASE).unlink()
    other = load_causal_lm(tmp_path, torch.float32)
    assert (own_logprobs(other, batch, folder).detach() - learned).abs().max() > 0.01


WORLDS = {
    "full": {"algorithm__kl_loss_coef": 0.1, "algorithm__ppo_epochs": 2},
    "recompute": {"optim__recompute": True},
    "critic": {"algorithm__name": "ppo", "optim__critic_lr": 1e-3, "algorithm__ppo_epochs": 2},
    "frozen": {"model__freeze_vision_tower": True},
    "lora": {"model__lora_rank": 4, "algorithm__name": "ppo", "optim__recompute": True},
}


@pytest.fixture(scope="module")
def groups(folder_of):
    folder = folder_of("qwen2_5_vl")
    opened = {1: LocalRankGroup(ExactRank(folder)), 2: Processes(2, ExactRank, folder)}
    yield opened
    for ranks in opened.values():
        ranks.close()


@pytest.mark.parametrize(
    "world", [pytest.param(w, marks=[pytest.mark.slow] * (w != "full")) for w in WORLDS]
)
def test_two_ranks_learn_what_one_learns(world, folder_of, groups):
    """A rank may have no image, or no row, in a pass in which the other one has images."""
    batch, results = make_batch(folder_of("qwen2_5_vl")), []
    for count, ranks in groups.items():
        settings = config(optim__lr=1e-3, **WORLDS[world])
        ranks.begin(settings)
        learner = Learner("", settings, total_steps=2, group=ranks)
        before = ranks.weights()
        metrics = step(learner, batch)
        assert metrics["perf/micro_batches"] == {1: 5, 2: 4}[count]
        results.append((metrics, ranks.weights(), before))
    (one, weights, _), (two, others, before) = results
    assert one["actor/grad_norm"] == pytest.approx(two["actor/grad_norm"], rel=1e-5)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=1e-5, atol=1e-7)
    moved = {n for n in others if not torch.equal(others[n], before[n])}
    has_tower = any("actor.model.visual" in name for name in moved)
    assert has_tower == (world in ("full", "recompute", "critic"))
    assert any("critic.visual" in name for name in moved) == (world == "critic")


def test_the_images_of_a_prompt_are_sent_once(folder_of):
    """All rows of a group have the same objects, which a pickle has once."""
    batch = make_batch(folder_of("qwen2_5_vl"))
    shared = batch.images[0][0]
    alone = replace(batch, images=((), (), (), (), ()))
    size = len(pickle.dumps(batch)) - len(pickle.dumps(alone))
    distinct = {image.key: len(image.data) for images in batch.images for image in images}
    assert len(distinct) == 3 and all(row[0] is shared for row in batch.images[:3])
    assert size < sum(distinct.values()) + 2000
    micro_batches = [
        make_micro_batch(batch, torch.tensor([b]), batch.response_mask, {}) for b in range(5)
    ]
    assert len(pickle.dumps(micro_batches)) < sum(distinct.values()) + 20_000


def test_placeholders_are_those_of_the_images(folder_of):
    image = picture(folder_of("qwen2_5_vl"), 0)
    good = row([("P", [2, image]), ("A", [7])])
    for wrong, found in (
        (replace(good, images=(image, image)), rf"\[{image.tokens}\]"),
        (replace(good, prompt_ids=good.prompt_ids[:-2]), rf"\[{image.tokens - 1}\]"),
        (row([("P", [2]), ("A", shown(image))]), r"\[\]"),
    ):
        wrong = replace(wrong, images=wrong.images or (image,))
        with pytest.raises(
            RunStopped, match=f"episode e: the images .* the row has {found} placeh"
        ):
            collate([group(scored([wrong], 1.0))])


def test_imitation_of_rows_with_images(folder_of):
    """The loss is the mean of -log p of the trained tokens, as by the model's own forward pass."""
    folder = folder_of("qwen3_vl")
    image, other = picture(folder, 0), picture(folder, 1)
    rows = [[2, *shown(image), 3, 7, 8, *shown(other), 9], [2, 3, 4]]
    masks = [[int(t in (7, 8, 9)) for t in rows[0]], [0, 1, 1]]
    examples = [
        Example(token_array(ids), token_array(mask), images)
        for ids, mask, images in zip(rows, masks, [(image, other), ()], strict=True)
    ]
    keys = make_sft_config(folder, steps=2, lr=1e-3, overrides=["trainer.device=cpu"])
    loss = SFTLearner(keys).train_step(examples, 1)
    segments = [
        row([("P", [2, image, 3]), ("A", [7, 8]), ("E", [other]), ("A", [9])]),
        row([("P", [2]), ("A", [3, 4])]),
    ]
    batch = collate([group(*[scored([s], 0.0) for s in segments])])
    own = own_logprobs(vision_model("qwen3_vl"), batch, folder)
    assert loss == pytest.approx(-own.sum().item() / 5, rel=1e-5)
    with pytest.raises(RunStopped, match="conversation 1 of the batch"):
        make_rows([examples[0], Example(examples[1].ids, examples[1].mask, (image,))])


def test_ranks_cannot_share_rows_of_a_model_that_reads_images():
    with pytest.raises(ConfigError, match=r"context_parallel_size=2.*it reads images"):
        check_context(vision_config(), Mode.PACKED, 2)
    check_context(vision_config(), Mode.PACKED, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_memory_of_a_vision_tower(family):
    """An estimate of what the tower keeps is above what autograd saves, but not by much."""
    config = vision_config(family)
    config.vision_config.depth = 8
    model = AutoModelForImageTextToText.from_config(config).bfloat16()
    tower, vision = model.model.visual, read_shape(config).vision
    assert vision.parameters == sum(p.numel() for p in tower.parameters())
    weights = {p.untyped_storage().data_ptr() for p in tower.parameters()}
    saved = {}

    def keep(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    grid = torch.tensor([[1, 16, 16]])
    pixels = torch.randn(256, 6 * config.vision_config.patch_size**2, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        tower(pixels, grid_thw=grid)
    measured = sum(s.nbytes() for at, s in saved.items() if at not in weights) / 2 / 64
    assert measured < 1.05 * vision.kept_numbers(False) < 2 * measured
    assert vision.kept_numbers(True) < 0.3 * vision.kept_numbers(False)
