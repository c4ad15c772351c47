"""The local engine against plain transformers: a small random model, exact answers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.not_recorded import NotRecorded
from support.updates import update
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl.engine.base import EngineControl, Sampler, Sampling
from agentrl.engine.local import LocalEngine
from agentrl.engine.local.decoder import Decoder
from agentrl.engine.local.sampling import sample, uniforms
from agentrl.engine.local.schedule import DecodeSchedule, TurnRequest
from agentrl.errors import EngineError, UserError
from agentrl.trajectory import Generation

VOCABULARY = 264
END = 256


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and eight control tokens from id 256."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{i}|>" for i in range(8)]})
    return tokenizer


TOKENIZER = byte_tokenizer()
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": None,
}


def random_model(seed: int = 0, **changes) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, **changes})).eval()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_worker_has_threads_of_its_own(monkeypatch):
    """It shares the cores with tools, the thread of the learner does not."""
    seen, torch_number = [], torch.get_num_threads
    model = random_model()
    model.register_forward_pre_hook(lambda *_: seen.append((threading.get_ident(), torch_number())))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)  # as on a machine with many cores
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    here = threading.get_ident()
    with running(model) as engine:
        assert str(engine.threads).startswith("3 of ")
        asyncio.run(engine.scores(tokens(5)))
    assert {n for thread, n in seen if thread != here} == {3}
    assert torch_number() == 1
    torch.set_num_threads(1)  # the number of threads that start later


@contextlib.contextmanager
def running(model=None, *, deterministic: bool = True, **options) -> Iterator[LocalEngine]:
    engine = LocalEngine(model or random_model(), TOKENIZER, deterministic=deterministic, **options)
    try:
        yield engine
    finally:
        engine.close()


def tokens(n: int, seed: int = 0) -> array[int]:
    return array("i", np.random.default_rng(seed).integers(0, 256, n).tolist())


def ask(
    engine: Sampler,
    prompt: array[int],
    sampling: Sampling,
    *,
    episode_id: str,
    seed: int = 1,
    seconds: float = 60,
):
    return engine.generate(
        prompt, sampling, episode_id=episode_id, seed=seed, deadline=time.monotonic() + seconds
    )


async def flood(
    engine: LocalEngine, prompts: Sequence[array[int]], sampling: Sampling, tag: str = "e"
) -> list[Generation]:
    """One turn for each prompt, all at once."""
    ids = [f"{tag}{i}" for i in range(len(prompts))]
    for episode_id in ids:
        engine.begin(episode_id)
    answers = await asyncio.gather(
        *(
            ask(engine, prompt, sampling, episode_id=episode_id, seed=i)
            for i, (prompt, episode_id) in enumerate(zip(prompts, ids, strict=True))
        )
    )
    for episode_id in ids:
        engine.end(episode_id)
    return answers


async def play(
    engine: LocalEngine,
    episodes: int = 12,
    turns: int = 3,
    *,
    pause: random.Random | None = None,
    order: random.Random | None = None,
    temperature: float = 1.0,
    tag: str = "e",
) -> list[tuple[array[int], list[Generation]]]:
    """Episodes of several turns with observations between; rows and generations, by episode."""
    for i in range(episodes):
        engine.begin(f"{tag}{i}")

    async def one(i: int) -> tuple[array[int], list[Generation]]:
        plan = random.Random(i)
        row = tokens(plan.randint(3, 40), seed=i // 4)
        answers = []
        for t in range(plan.randint(1, turns)):
            if pause:
                await asyncio.sleep(pause.random() * 0.02)
            sampling = Sampling(
                temperature=temperature, max_tokens=plan.randint(1, 25), stop_ids=(END, 7, 8, 9)
            )
            answer = await ask(engine, row, sampling, episode_id=f"{tag}{i}", seed=100 * i + t)
            answers.append(answer)
            row.extend(answer.token_ids)
            if plan.random() < 0.8:
                row.extend(tokens(plan.randint(1, 20), seed=1000 * i + t))
        if pause:
            await asyncio.sleep(pause.random() * 0.02)
        engine.end(f"{tag}{i}")
        return row, answers

    todo = list(range(episodes))
    if order:
        order.shuffle(todo)
    done = dict(zip(todo, await asyncio.gather(*map(one, todo)), strict=True))
    return [done[i] for i in range(episodes)]


def bits(played: list[tuple[array[int], list[Generation]]]) -> list[tuple[bytes, list[bytes]]]:
    return [(row.tobytes(), [g.logprobs.tobytes() for g in answers]) for row, answers in played]


def plain_logprobs(model, row: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """Of each token given those before it, by one uncached pass; the first one's is 0."""
    ids = torch.tensor([list(row)])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature
    scores = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return np.concatenate([[0.0], scores.numpy()])


# -- what is sampled -------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("graphs", ["none", "all", "until one fails"])
async def test_logprobs_are_those_of_a_full_forward(temperature, deterministic, graphs, caplog):
    with running(deterministic=deterministic) as engine:
        if graphs != "none":
            recorded = NotRecorded(engine._decoder._decode, 2 if graphs != "all" else 0)
            engine._decoder._graphs = recorded
        played = await play(engine, 16, 4, temperature=temperature)
    if graphs != "none":
        assert all(n in (1, 2, 4, 8, 16) and t == 128 for n, t in recorded.shapes)
        assert ("without CUDA graphs: operation not" in caplog.text) == (graphs != "all")
    model, off, turns = random_model(), [], 0
    for row, answers in played:
        full = plain_logprobs(model, row, temperature)
        for answer in answers:
            turns += 1
            at = answer.prompt_tokens
            off += list(full[at : at + len(answer.token_ids)] - np.array(answer.logprobs))
            assert list(row[at : at + len(answer.token_ids)]) == list(answer.token_ids)
    assert turns > 30 and len(off) > 300
    assert np.abs(off).max() < 1e-4
    assert np.abs(off).mean() < 1e-6


async def test_greedy_equals_generate():
    prompts = [tokens(n, seed=n) for n in (5, 5, 17, 40)]
    with running() as engine:
        answers = await flood(engine, prompts, Sampling(temperature=0, max_tokens=30))
    model = random_model()
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([list(prompt)])
        out = model.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=None)
        assert out[0, len(prompt) :].tolist() == list(answer.token_ids)
        full = plain_logprobs(model, out[0].tolist())[len(prompt) :]
        np.testing.assert_allclose(answer.logprobs, full, atol=1e-5)
        assert answer.finish_reason == "length"


@pytest.mark.parametrize(
    "model",
    [
        LlamaForCausalLM(LlamaConfig(**SHAPE)),
        Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
        MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
        Qwen2ForCausalLM(Qwen2Config(**SHAPE, attn_implementation="eager")),
    ],
    ids=lambda m: type(m).__name__,
)
async def test_other_decoders(model):
    with running(model) as engine:
        for row, answers in await play(engine, 4, 2):
            full = plain_logprobs(model, row)
            for answer in answers:
                at = answer.prompt_tokens
                np.testing.assert_allclose(
                    full[at : at + len(answer.token_ids)], answer.logprobs, atol=1e-5
                )


def test_a_model_with_windows_is_refused():
    config = MistralConfig(**SHAPE, sliding_window=64)
    with pytest.raises(UserError, match=r"MistralForCausalLM: .*\(sliding_window=64\)"):
        LocalEngine(MistralForCausalLM(config), TOKENIZER, deterministic=True)


async def test_long_prompts_are_fed_in_pieces():
    model = random_model(max_position_embeddings=4096)
    prompts = [tokens(n, seed=n) for n in (1300, 600, 20, 513)]
    with running(model) as engine:
        answers = await flood(engine, prompts, Sampling(max_tokens=5))
    for prompt, answer in zip(prompts, answers, strict=True):
        full = plain_logprobs(model, prompt + answer.token_ids)
        np.testing.assert_allclose(full[len(prompt) :], answer.logprobs, atol=2e-5)
        assert answer.cached_tokens == 0


async def test_the_cache_changes_nothing():
    """Turns of one episode from its cache, against each turn as an episode of its own."""
    with running() as engine, running() as other:
        row = tokens(30)
        engine.begin("cached")
        for turn in range(4):
            sampling = Sampling(max_tokens=10)
            cached = await ask(engine, row, sampling, episode_id="cached", seed=turn)
            other.begin(f"{turn}")
            fresh = await ask(other, row, sampling, episode_id=f"{turn}", seed=turn)
            other.end(f"{turn}")
            assert fresh.token_ids == cached.token_ids
            np.testing.assert_allclose(fresh.logprobs, cached.logprobs, atol=1e-5)
            assert cached.prompt_tokens == fresh.prompt_tokens == len(row)
            # The last sampled token and the five observed since are not in the cache.
            assert cached.cached_tokens == (len(row) - 6 if turn else 0)
            assert fresh.cached_tokens == 0
            row.extend(cached.token_ids)
            row.extend(tokens(5, seed=len(row)))


async def test_an_edited_history_drops_the_cache_to_the_common_prefix():
    with running() as engine:
        engine.begin("e")
        row = tokens(40)
        first = await ask(engine, row, Sampling(max_tokens=8), episode_id="e")
        edited = row + first.token_ids + tokens(3, seed=5)
        edited[25] = (edited[25] + 1) % 256
        second = await ask(engine, edited, Sampling(max_tokens=8), episode_id="e")
        assert second.cached_tokens == 25
        full = plain_logprobs(random_model(), edited + second.token_ids)
        np.testing.assert_allclose(full[len(edited) :], second.logprobs, atol=1e-5)
        shorter = edited[:10]
        third = await ask(engine, shorter, Sampling(max_tokens=8), episode_id="e")
        assert (third.prompt_tokens, third.cached_tokens) == (10, 9)
        full = plain_logprobs(random_model(), shorter + third.token_ids)
        np.testing.assert_allclose(full[10:], third.logprobs, atol=1e-5)


async def test_a_shared_prefix_is_computed_once():
    """One of the prompts has less than the others share; two more have a beginning of their own."""
    shared, other = tokens(540, seed=1), tokens(30, seed=2)
    prompts = [shared + tokens(10, seed=i) for i in range(3, 6)]
    prompts += [shared[:520], other + tokens(9, seed=6), other + tokens(7, seed=7)]
    model = random_model(max_position_embeddings=1024)
    with running(random_model(max_position_embeddings=1024)) as engine:
        answers = await flood(engine, prompts, Sampling(max_tokens=6))
    assert [a.cached_tokens for a in answers] == [0, 519, 519, 519, 0, 0], "30 tokens are too few"
    for prompt, answer in zip(prompts, answers, strict=True):
        full = plain_logprobs(model, prompt + answer.token_ids)
        np.testing.assert_allclose(full[len(prompt) :], answer.logprobs, atol=1e-5)


async def test_a_prompt_may_equal_the_prefix_that_others_share():
    """Four such prompts beside long ones: no pass may consist only of rows that lack nothing."""
    prompts = []
    for seed in range(4):
        shared = tokens(200, seed)
        prompts += [shared + tokens(1, seed + 4), shared + tokens(600, seed + 8)]
    model = random_model(max_position_embeddings=1024)
    with running(random_model(max_position_embeddings=1024)) as engine:
        answers = await flood(engine, prompts, Sampling(max_tokens=2))
    assert [a.cached_tokens for a in answers] == [0, 200] * 4
    for prompt, answer in zip(prompts, answers, strict=True):
        full = plain_logprobs(model, prompt + answer.token_ids)
        np.testing.assert_allclose(full[len(prompt) :], answer.logprobs, atol=1e-5)


async def test_equal_prompts_are_computed_once():
    prompts = [tokens(50, seed=i // 4) for i in range(8)]
    with running() as engine:
        answers = await flood(engine, prompts, Sampling(max_tokens=6))
    assert [a.cached_tokens for a in answers] == [0, 49, 49, 49, 0, 49, 49, 49]
    model = random_model()
    for prompt, answer in zip(prompts, answers, strict=True):
        full = plain_logprobs(model, prompt + answer.token_ids)
        np.testing.assert_allclose(full[50:], answer.logprobs, atol=1e-5)
    assert len({a.token_ids.tobytes() for a in answers[:4]}) == 4


async def test_the_seed_alone_decides():
    """The same seed and row: the same tokens, alone or in a crowd; another seed: others."""
    prompt, sampling = tokens(12), Sampling(max_tokens=20)
    with running(deterministic=False) as engine:
        for episode_id in "abcd":
            engine.begin(episode_id)
        crowd = await asyncio.gather(
            ask(engine, prompt, sampling, episode_id="a", seed=5),
            ask(engine, tokens(30, 3), Sampling(max_tokens=40), episode_id="b", seed=6),
            ask(engine, prompt, sampling, episode_id="c", seed=5),
            ask(engine, prompt, sampling, episode_id="d", seed=-1),
        )
    with running() as engine:
        engine.begin("x")
        alone = await ask(engine, prompt, sampling, episode_id="x", seed=5)
    assert crowd[0].token_ids == crowd[2].token_ids == alone.token_ids != crowd[3].token_ids


# -- where turns end -------------------------------------------------------------------------------


def babbler(text: str) -> Qwen2ForCausalLM:
    """A model that says the text's next byte; the text's bytes are all distinct."""
    model = random_model(tie_word_embeddings=False, hidden_size=320, num_attention_heads=10)
    ids = TOKENIZER.encode(text)
    assert len(set(ids)) == len(ids)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[:, :VOCABULARY] = torch.eye(VOCABULARY)
        for now, then in itertools.pairwise(ids):
            model.lm_head.weight[then, now] = 10.0
    return model


async def test_a_stop_string_ends_the_turn_and_is_kept():
    text = "Wake up\nObsr;é:xyz"
    ids = TOKENIZER.encode(text)
    cases = {
        ("é:",): "ake up\nObsr;é:",
        ("é",): "ake up\nObsr;é",
        ("nope", "p\nO"): "ake up\nO",
        (): text[1:],
    }
    with running(babbler(text)) as engine:
        for i, (stop, expected) in enumerate(cases.items()):
            engine.begin(f"{i}")
            answer = await ask(
                engine,
                array("i", ids[:1]),
                Sampling(temperature=0, max_tokens=60, stop=stop, stop_ids=(ids[-1],)),
                episode_id=f"{i}",
            )
            engine.end(f"{i}")
            assert TOKENIZER.decode(list(answer.token_ids)) == expected
            assert answer.finish_reason == "stop"


async def test_a_stop_string_in_the_prompt_does_not_count():
    text = "abc:def"
    with running(babbler(text)) as engine:
        engine.begin("e")
        answer = await ask(
            engine,
            array("i", TOKENIZER.encode("abc:")),
            Sampling(temperature=0, max_tokens=2, stop=("c:", "c:d")),
            episode_id="e",
        )
    assert TOKENIZER.decode(list(answer.token_ids)) == "de"
    assert answer.finish_reason == "length"


async def test_a_row_ends_at_the_models_maximum_length():
    with running(random_model(max_position_embeddings=64)) as engine:
        assert engine.max_length == 64
        engine.begin("e")
        answer = await ask(engine, tokens(60), Sampling(max_tokens=50), episode_id="e")
        assert (len(answer.token_ids), answer.finish_reason) == (4, "length")
        with pytest.raises(EngineError, match="64 tokens, but the number must be 1 to 63"):
            await ask(engine, tokens(64), Sampling(max_tokens=1), episode_id="e")
        with pytest.raises(EngineError, match="vocabulary has 264"):
            await ask(engine, array("i", [999]), Sampling(max_tokens=1), episode_id="e")
        with pytest.raises(EngineError, match="begin"):
            await ask(engine, tokens(4), Sampling(max_tokens=1), episode_id="other")


# -- the draw --------------------------------------------------------------------------------------


def test_the_random_numbers_of_a_seed_never_change():
    u = uniforms(np.array([0, 0, 1, 2**64 - 1], np.uint64), np.array([0, 1, 0, 7]))
    assert [f"{x:.9f}" for x in u] == FIXED
    many = uniforms(np.arange(200_000, dtype=np.uint64) // 1000, np.arange(200_000) % 1000)
    assert many.min() >= 0 and many.max() < 1
    assert abs(many.mean() - 0.5) < 0.002 and abs(many.var() - 1 / 12) < 0.001
    grid = many.reshape(200, 1000)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.01


FIXED = ["0.883310808", "0.431527997", "0.749748241", "0.774144550"]


def test_draws_follow_the_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, -torch.inf]]).expand(50_000, -1)
    n = len(logits)
    u = uniforms(np.full(n, 3, np.uint64), np.arange(n))
    for temperature in (1.0, 0.5, 2.0):
        drawn, logprobs, _ = sample(logits, *columns(n, temperature), u)
        p = (logits[0] / temperature).softmax(-1).numpy()
        share = np.bincount(drawn, minlength=5) / n
        assert share[4] == 0
        np.testing.assert_allclose(share, p, atol=0.01)
        np.testing.assert_allclose(logprobs, np.log(p[drawn]), atol=1e-6)


def columns(
    n: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.full(n, temperature, np.float32), np.full(n, top_k), np.full(n, top_p)


@given(
    logits=st.lists(st.floats(-8, 8, width=16), min_size=1, max_size=12),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
)
@examples(100)
def test_top_k_and_top_p_narrow_the_support_and_nothing_else(logits, temperature, top_k, top_p):
    n = 400
    u = np.linspace(0, 1, n, endpoint=False)
    rows = torch.tensor([logits]).expand(n, -1)
    drawn, logprobs, _ = sample(rows, *columns(n, temperature, top_k, top_p), u)
    logp = (rows[0].double() / temperature).log_softmax(-1).numpy()
    p = np.exp(logp)
    order = np.argsort(-p, kind="stable")
    kept = order[: top_k or None]
    mass = p[kept].cumsum()
    kept = kept[: int((mass - p[kept] < top_p * mass[-1] * (1 + 1e-6)).sum())]
    assert set(drawn) <= set(kept)
    assert order[0] in drawn
    share = np.bincount(drawn, minlength=len(logits)) / n
    np.testing.assert_allclose(share[kept], p[kept] / p[kept].sum(), atol=2.5 / n + 1e-4)
    np.testing.assert_allclose(logprobs, logp[drawn], atol=1e-4)


@pytest.mark.parametrize("scale", [0.0, 1.0, 12.0])
def test_kept_tokens_and_logprobs_over_them(scale):
    """With ties at every boundary; no logprob is above 0, also if one token alone is kept."""
    n, size = 4000, 40
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(n, size, generator=generator)).round()
    top_k = np.arange(n) % 7
    top_p = np.where(top_k == 0, 0.8, np.array([1.0, 0.6, 0.95])[np.arange(n) % 3])
    u, asked = np.random.default_rng(0).random(n), np.arange(n) % 5 > 0
    drawn, logprobs, kept = sample(logits, np.ones(n, np.float32), top_k, top_p, u, asked)
    assert kept is not None and (logprobs <= 0).all()
    p = logits.double().softmax(-1)
    for i in np.flatnonzero(asked):
        mass = p[i, kept[i].astype(int)]
        assert drawn[i] in kept[i] and len({*kept[i]}) == len(kept[i]) <= (top_k[i] or size)
        assert logprobs[i] == pytest.approx((p[i, drawn[i]] / mass.sum()).log().item(), abs=1e-5)
        likely = p[i].sort(descending=True).values[: len(mass)]
        torch.testing.assert_close(mass, likely, rtol=0, atol=0)


def test_each_row_has_its_own_sampling_parameters():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]]).repeat(5, 1)
    drawn, logprobs, _ = sample(
        logits,
        np.array([0, 1, 1, 1, 0.5], np.float32),
        np.array([0, 1, 0, 2, 0]),
        np.array([1, 1, 0.2, 1, 1.0]),
        np.array([0.999] * 5),
    )
    assert drawn.tolist() == [1, 1, 1, 2, 3]
    full = logits[0].log_softmax(-1)
    half = (logits[0] * 2).log_softmax(-1)
    np.testing.assert_allclose(logprobs, [full[1], full[1], full[1], full[2], half[3]], atol=1e-6)


# -- determinism -----------------------------------------------------------------------------------


async def test_the_speed_of_tools_changes_no_bit():
    runs = []
    for attempt in range(3):
        with running() as engine:
            if attempt == 2:  # an engine that has played other episodes before, in larger rows
                await play(engine, 20, 4, tag="before", temperature=1.3)
                await flood(engine, [tokens(300)], Sampling(max_tokens=9), tag="long")
                engine.publish(update([], 0))
            sleepy = random.Random(attempt) if attempt else None
            runs.append(bits(await play(engine, pause=sleepy, order=sleepy)))
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("slots", [1, pytest.param(3, marks=pytest.mark.slow), 7])
async def test_fewer_slots_than_episodes(slots: int):
    with running(slots=256) as engine:
        roomy = await play(engine)
    runs = []
    for attempt in range(2):
        with running(slots=slots) as engine:
            sleepy = random.Random(attempt)
            played = await play(engine, pause=sleepy, order=sleepy)
            runs.append(bits(played))
        assert [row for row, _ in played] == [row for row, _ in roomy]
    assert runs[0] == runs[1]


async def test_repeated_batches_give_the_same_bits():
    with running() as engine:
        waves = [bits(await play(engine, tag=f"{i}-")) for i in range(3)]
    assert waves[0] == waves[1] == waves[2]


async def test_without_determinism_turns_start_at_once():
    """An episode that keeps everybody waiting holds up nobody."""
    with running(deterministic=False) as engine:
        engine.begin("silent")
        (answer,) = await asyncio.wait_for(
            flood(engine, [tokens(5)], Sampling(max_tokens=5)), timeout=20
        )
    assert len(answer.token_ids) == 5


SCRIPT = st.lists(
    st.lists(st.integers(1, 30), max_size=4), min_size=1, max_size=7
)  # turns' lengths, by episode


@given(script=SCRIPT, slots=st.integers(1, 5), order=st.randoms(use_true_random=False))
@examples(150)
def test_the_schedule_is_a_function_of_episodes_and_turns(script, slots, order):
    calm = [log_of_schedule(script, slots, None), log_of_schedule(script, slots, order)]
    assert calm[0] == calm[1]
    admitted = [name for _, names in calm[0] for name in names]
    assert sorted(admitted) == sorted(f"e{i}" for i, turns in enumerate(script) for _ in turns)


def log_of_schedule(script, slots: int, order: random.Random | None):
    """Return the step at which each episode joins; episodes start at random steps or at once."""
    schedule = DecodeSchedule(slots, deterministic=True)
    todo = {f"e{i}": list(turns) for i, turns in enumerate(script)}
    for name in todo:
        schedule.begin(name)
    act = set(todo)
    left: dict[str, int] = {}
    log = []
    for _ in range(5000):
        for name in sorted(act):
            if order is None or order.random() < 0.2:
                act.discard(name)
                if todo[name]:
                    schedule.ask(TurnRequest(name, np.zeros(1), Sampling(), 0, 0.0))
                else:
                    schedule.end(name)
        joined = schedule.admit()
        if schedule.waiting_for:
            continue
        if joined:
            log.append((schedule.step, [e.id for e, _ in joined]))
            schedule.pack()
            assert sorted(e.row for e in schedule.decoding) == list(range(schedule.width))
        for entry, _ in joined:
            left[entry.id] = todo[entry.id].pop(0)
        if not schedule.decoding and not act:
            break
        assert sum(e is not None for e in schedule.rows) <= slots
        if schedule.decoding:
            schedule.step += 1
        for entry in list(schedule.decoding):
            left[entry.id] -= 1
            if not left[entry.id]:
                schedule.finish(entry)
                act.add(entry.id)
    assert not schedule.decoding and not act
    return log


# -- when things go wrong --------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [True, False])
async def test_a_cancelled_turn_frees_its_row(deterministic: bool):
    with running(deterministic=deterministic, slots=1) as engine:
        engine.begin("a")
        engine.begin("b")
        long = asyncio.create_task(ask(engine, tokens(5), Sampling(max_tokens=500), episode_id="a"))
        await asyncio.sleep(0.05)
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        engine.end("a")
        answer = await ask(engine, tokens(5), Sampling(max_tokens=5), episode_id="b", seconds=20)
        assert len(answer.token_ids) == 5


class Gate:
    """Holds the engine's thread in a forward pass from the next one on, until opened."""

    def __init__(self, model: Qwen2ForCausalLM):
        self.inside, self.opened = threading.Event(), threading.Event()
        self._hook = model.lm_head.register_forward_hook(self._stop)

    def _stop(self, *_) -> None:
        self.inside.set()
        self.opened.wait(20)

    def open(self) -> None:
        self._hook.remove()
        self.opened.set()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("left", [1, 400])
async def test_an_episode_asks_again_while_its_cancelled_turn_is_being_sampled(
    deterministic: bool, left: int
):
    """This holds too if the abandoned turn ends (`left=1`) in the step in which it was abandoned.

    The row comes free in the end, for the other episode.
    """
    model, sampling = random_model(), Sampling(max_tokens=9)
    with running(model, deterministic=deterministic, slots=1) as engine:
        engine.begin("a")
        engine.begin("b")
        gate = Gate(model)
        first = ask(engine, tokens(5), Sampling(max_tokens=left), episode_id="a")
        lost = [asyncio.create_task(first)]
        await asyncio.to_thread(gate.inside.wait, 20)
        for seed in (2, 3):  # the second takes the place of one that is not sampled yet
            lost[-1].cancel()
            with pytest.raises(asyncio.CancelledError):
                await lost[-1]
            turn = ask(engine, tokens(7), sampling, episode_id="a", seed=seed, seconds=20)
            lost.append(asyncio.create_task(turn))
            await asyncio.sleep(0)
        with pytest.raises(EngineError, match="already has a turn in flight"):
            await ask(engine, tokens(7), sampling, episode_id="a")
        turn = ask(engine, tokens(7), sampling, episode_id="b", seed=3, seconds=20)
        waiting = asyncio.create_task(turn)
        waiting.add_done_callback(lambda _: engine.end("b"))
        lost[-1].add_done_callback(lambda _: engine.end("a"))
        gate.open()
        answer, other = await asyncio.gather(lost[-1], waiting)
    assert answer.token_ids == other.token_ids and len(answer.token_ids) == 9
    full = plain_logprobs(random_model(), tokens(7) + answer.token_ids)
    np.testing.assert_allclose(full[7:], answer.logprobs, atol=1e-5)


@pytest.mark.parametrize("how", ["end", "close", "deadline"])
async def test_a_turn_after_a_cancelled_one_is_always_answered(how: str):
    model = random_model(max_position_embeddings=100_000)
    with running(model) as engine:
        engine.begin("a")
        gate, long = Gate(model), Sampling(max_tokens=90_000)
        lost = asyncio.create_task(ask(engine, tokens(5), long, episode_id="a"))
        await asyncio.to_thread(gate.inside.wait, 20)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        seconds = 0.1 if how == "deadline" else 60
        again = asyncio.create_task(ask(engine, tokens(5), long, episode_id="a", seconds=seconds))
        await asyncio.sleep(0)
        if how == "end":
            engine.end("a")
        elif how == "close":
            threading.Timer(0.1, gate.open).start()
            await asyncio.to_thread(engine.close)
        gate.open()
        with pytest.raises(EngineError, match={"end": "ended", "close": "closed"}.get(how, how)):
            await asyncio.wait_for(again, 20)


async def test_a_turn_that_was_cancelled_before_it_joined_changes_no_bit():
    """Whether it is asked for again before the engine's thread has noticed, or long after."""
    runs = []
    for pause in (None, 0.0, 0.05):
        with running() as engine:

            async def one(episode_id: str, length: int) -> list[Generation]:
                row, turns = tokens(length), []
                for turn in range(2):
                    sampling = Sampling(max_tokens=5 + length)
                    turns.append(await ask(engine, row, sampling, episode_id=episode_id, seed=turn))
                    row.extend(turns[-1].token_ids)
                engine.end(episode_id)
                return turns

            for episode_id in "abc":
                engine.begin(episode_id)
            a, b = (asyncio.create_task(one(e, n)) for e, n in (("a", 9), ("b", 15)))
            await asyncio.sleep(0.02)  # both wait for c
            if pause is not None:
                a.cancel()
                await asyncio.gather(a, return_exceptions=True)
                await asyncio.sleep(pause)
                a = asyncio.create_task(one("a", 9))
            runs.append(await asyncio.gather(a, b, one("c", 30)))
    assert runs[0] == runs[1] == runs[2]


async def test_a_deadline_passes_while_the_engine_waits():
    with running() as engine:
        engine.begin("a")
        engine.begin("silent")
        start = time.monotonic()
        with pytest.raises(EngineError, match=r"'a'.*deadline.*waited for 'silent'"):
            await ask(engine, tokens(5), Sampling(max_tokens=5), episode_id="a", seconds=0.2)
        assert 0.2 <= time.monotonic() - start < 5
        engine.end("silent")
        answer = await ask(engine, tokens(5), Sampling(max_tokens=5), episode_id="a", seconds=20)
        assert len(answer.token_ids) == 5


async def test_a_deadline_passes_while_decoding():
    model = random_model(max_position_embeddings=100_000)
    with running(model, deterministic=False) as engine:
        engine.begin("a")
        engine.begin("b")
        other = asyncio.create_task(ask(engine, tokens(5), Sampling(max_tokens=60), episode_id="b"))
        with pytest.raises(EngineError, match=r"'a': the deadline passed$"):
            await ask(engine, tokens(5), Sampling(max_tokens=90_000), episode_id="a", seconds=0.3)
        assert len((await other).token_ids) == 60


@pytest.mark.parametrize("slots", [1, pytest.param(4, marks=pytest.mark.slow), 256])
async def test_an_idle_episode_delays_the_others_for_a_limited_time(slots: int, caplog):
    """An episode goes silent after its first turn; the others play three, within 10 s."""
    sampling = Sampling(max_tokens=12)
    with running(patience=0.2, slots=slots) as engine:
        for i in range(6):
            engine.begin(f"e{i}")

        async def one(i: int) -> None:
            row = tokens(9, seed=i)
            for turn in range(1 if i == 0 else 3):
                answer = await ask(engine, row, sampling, episode_id=f"e{i}", seed=turn, seconds=10)
                row.extend(answer.token_ids)
            if i:
                engine.end(f"e{i}")

        start = time.monotonic()
        await asyncio.gather(*map(one, range(6)))
        assert 0.2 <= time.monotonic() - start < 5
        (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert "'e0'" in warning and "'e1'" not in warning and "0.2 s" in warning

        # Served when it asks after all; and nobody waits for it a second time.
        row = tokens(15, seed=8)
        late = await ask(engine, row, sampling, episode_id="e0", seed=3)
        if slots == 1:
            engine.end("e0")
        engine.begin("new")
        new = await ask(engine, row, sampling, episode_id="new", seed=3)
        assert sum(r.levelname == "WARNING" for r in caplog.records) == 1
        assert late.token_ids == new.token_ids
        full = plain_logprobs(random_model(), row + late.token_ids)
        np.testing.assert_allclose(full[15:], late.logprobs, atol=1e-5)
        engine.end("e0")
        engine.end("new")
        caplog.clear()
        after = bits(await play(engine, tag="after"))
    assert not caplog.records
    with running(slots=slots) as engine:
        assert bits(await play(engine)) == after  # the next wave is exact again


async def test_patience_begins_when_another_episode_waits(caplog):
    with running(patience=0.3) as engine:
        engine.begin("a")
        engine.begin("b")
        await asyncio.sleep(0.5)  # both open their sandboxes
        first = asyncio.create_task(
            ask(engine, tokens(5), Sampling(max_tokens=5), episode_id="a", seconds=10)
        )
        await asyncio.sleep(0.1)
        assert not first.done()
        await ask(engine, tokens(5), Sampling(max_tokens=5), episode_id="b", seconds=10)
        await first
    assert not caplog.records


BAD_STOPS = [("",), ("x", ""), (None,), "ab"]


@pytest.mark.parametrize("stop", BAD_STOPS, ids=repr)
async def test_an_invalid_stop_is_refused(stop):
    with running() as engine:
        engine.begin("a")
        with pytest.raises(UserError, match=r"episode 'a': stop=.*non-empty strings") as refused:
            await ask(engine, tokens(5), Sampling(stop=stop), episode_id="a")
        assert repr(stop) in str(refused.value)
        answer = await ask(engine, tokens(5), Sampling(max_tokens=5), episode_id="a")
        assert len(answer.token_ids) == 5


@pytest.mark.parametrize(
    "bad",
    [
        {"stop_ids": ("x",)},
        {"top_k": None},
        {"temperature": "warm"},
        {"stop": ("\ud800 ",)},  # half a surrogate pair: no bytes
    ],
    ids=repr,
)
@pytest.mark.parametrize("company", [0, 3])
async def test_an_exception_in_a_request_fails_that_request_only(bad: dict, company: int):
    prompts = [tokens(7, seed=i) for i in range(4)]
    sampling = Sampling(max_tokens=10)
    with running() as engine:
        (calm, *_) = await flood(engine, prompts[:1], sampling, tag="calm")
    with running() as engine:
        wrong = Sampling(**{"max_tokens": 10, **bad})
        samplings = [sampling] * company + [wrong]
        *good, failed = await gather(engine, prompts[: company + 1], 3, samplings)
        assert isinstance(failed, EngineError)
        assert f"episode '{company}': cannot serve its request: " in str(failed)
        assert all(isinstance(g, Generation) and len(g.token_ids) == 10 for g in good)
        (again,) = await flood(engine, prompts[:1], sampling, tag="again")
    assert again.token_ids == calm.token_ids and again.logprobs == calm.logprobs


async def test_an_exception_in_a_score_fails_that_score_only(monkeypatch):
    with running() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "score", lambda *_: [][0])
            with pytest.raises(EngineError, match="cannot score: IndexError"):
                await engine.scores(tokens(5))
        assert len((await engine.scores(tokens(5)))[0]) == 5


async def test_closing_fails_requests_in_flight():
    model = random_model(max_position_embeddings=100_000)
    engine = LocalEngine(model, TOKENIZER, deterministic=True)
    engine.begin("a")
    task = asyncio.create_task(ask(engine, tokens(5), Sampling(max_tokens=90_000), episode_id="a"))
    await asyncio.sleep(0.05)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        await task
    with pytest.raises(EngineError, match="closed"):
        engine.begin("b")
    with pytest.raises(EngineError, match="closed"):
        await engine.scores(tokens(3))
    engine.end("a")


async def test_a_broken_model_fails_every_later_request():
    model = random_model()
    with running(model) as engine:
        engine.begin("a")
        engine.begin("b")

        def burst(*args):
            raise MemoryError("no more")

        model.lm_head.register_forward_hook(burst)
        turns = [ask(engine, tokens(5), Sampling(), episode_id=e) for e in "ab"]
        for outcome in await asyncio.gather(*turns, return_exceptions=True):
            assert isinstance(outcome, EngineError) and "MemoryError: no more" in str(outcome)
        with pytest.raises(EngineError, match="no more"):
            engine.begin("c")


async def test_nan_logits_fail_their_episode_only():
    poison = 77
    model = random_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = torch.nan
    prompts = [tokens(9, 4), array("i", [1, 2, poison, 3])]
    assert poison not in prompts[0]
    with running(model, slots=2) as engine:
        good, bad = await gather(engine, prompts, seed=3)
        assert isinstance(good, Generation) and poison not in good.token_ids
        assert isinstance(bad, EngineError) and "'1'" in str(bad) and "NaN" in str(bad)
        again = await gather(engine, prompts[:1] * 2, seed=3)
    assert [a.token_ids for a in again] == [good.token_ids] * 2


async def test_nan_of_a_cancelled_turn_fails_no_later_episode_in_its_row():
    """With graphs its row goes on to be fed, while the other rows decode."""
    poison = 77
    model = random_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = torch.nan
        model.lm_head.weight[poison] = 0  # It is never the most likely token.
    with running(model, slots=4, deterministic=False) as engine:
        engine._decoder._graphs = NotRecorded(engine._decoder._decode)
        others, greedy = [], Sampling(0, max_tokens=200)
        for i in range(3):
            engine.begin(f"{i}")
            turn = ask(engine, array("i", range(60)), greedy, episode_id=f"{i}")
            others.append(asyncio.create_task(turn))
        engine.begin("bad")
        prompt = array("i", [1, 2, 3, 4, 5, 6, 7, poison, *range(8, 16)])
        bad = asyncio.create_task(ask(engine, prompt, Sampling(), episode_id="bad"))
        gate = Gate(model)
        await asyncio.to_thread(gate.inside.wait, 20)
        bad.cancel()
        gate.open()
        await asyncio.gather(bad, return_exceptions=True)
        await asyncio.sleep(0.05)  # until the poison is fed
        engine.end("bad")
        engine.begin("good")
        good = await ask(engine, tokens(9), Sampling(0, max_tokens=3), episode_id="good")
        assert len(good.token_ids) == 3 and not any(turn.done() for turn in others)
        await asyncio.gather(*others)


async def gather(
    engine: LocalEngine,
    prompts: list[array[int]],
    seed: int,
    samplings: Sequence[Sampling] = (Sampling(max_tokens=12),) * 2,
) -> list:
    """One short turn for each prompt, or what it raised."""

    async def one(i: int) -> Generation:
        try:
            return await ask(engine, prompts[i], samplings[i], episode_id=f"{i}", seed=seed)
        finally:
            engine.end(f"{i}")

    for i in range(len(prompts)):
        engine.begin(f"{i}")
    return await asyncio.gather(*map(one, range(len(prompts))), return_exceptions=True)


# -- its control -----------------------------------------------------------------------------------


async def test_publish_replaces_weights_and_drops_caches():
    old, new = random_model(0), random_model(1)
    row = tokens(20)
    with running(random_model(0)) as engine:
        engine.begin("e")
        first = await ask(engine, row, Sampling(max_tokens=6), episode_id="e")
        assert engine.publish(update(new.state_dict().items(), 3)) > 0
        row.extend(first.token_ids)
        second = await ask(engine, row, Sampling(max_tokens=6), episode_id="e")
    assert set(first.versions) == {0} and set(second.versions) == {3}
    assert second.cached_tokens == 0
    np.testing.assert_allclose(first.logprobs, plain_logprobs(old, row)[20:26], atol=1e-5)
    np.testing.assert_allclose(
        second.logprobs, plain_logprobs(new, row + second.token_ids)[26:], atol=1e-5
    )


async def test_a_version_without_new_weights_keeps_the_cache():
    row = tokens(20)
    with running(random_model(0)) as engine:
        engine.begin("e")
        first = await ask(engine, row, Sampling(max_tokens=6), episode_id="e")
        assert engine.publish(replace(update([], 3), is_changed=False)) == 0
        row.extend(first.token_ids)
        second = await ask(engine, row, Sampling(max_tokens=6), episode_id="e")
    assert set(first.versions) == {0} and set(second.versions) == {3}
    assert second.cached_tokens == 25
    expected = plain_logprobs(random_model(0), row + second.token_ids)[26:]
    np.testing.assert_allclose(second.logprobs, expected, atol=1e-5)


async def test_publish_in_the_middle_of_a_turn():
    old, new = random_model(0), random_model(1)
    row = tokens(20)
    with running(random_model(0)) as engine:
        engine.begin("e")
        task = asyncio.create_task(ask(engine, row, Sampling(max_tokens=400), episode_id="e"))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(engine.publish, update(new.named_parameters(), 1))
        answer = await task
    cut = list(answer.versions).index(1)
    assert cut > 0 and list(answer.versions) == [0] * cut + [1] * (400 - cut)
    whole = row + answer.token_ids
    np.testing.assert_allclose(
        answer.logprobs[:cut], plain_logprobs(old, whole)[20 : 20 + cut], atol=2e-5
    )
    np.testing.assert_allclose(
        answer.logprobs[cut:], plain_logprobs(new, whole)[20 + cut :], atol=2e-5
    )


@pytest.mark.parametrize("tied", [True, False])
async def test_publish_of_some_tensors(tied: bool):
    model = random_model(tie_word_embeddings=tied)
    name = "model.embed_tokens.weight"
    with running(model) as engine:
        [before] = await engine.scores(tokens(20))
        engine.publish(update([(name, model.get_parameter(name) * 1.5)], 1))
        [after] = await engine.scores(tokens(20))
    assert (model.lm_head.weight is model.get_parameter(name)) == tied
    np.testing.assert_allclose(after, plain_logprobs(model, tokens(20)), atol=1e-5)
    assert before != after


def test_publish_refuses_what_does_not_fit():
    with running() as engine:
        with pytest.raises(EngineError, match=r"Qwen2ForCausalLM has no tensor 'model\.nope'"):
            engine.publish(update([("model.nope", torch.zeros(1))], 1))
        with pytest.raises(EngineError, match=r"'model\.norm\.weight' has shape \(3,\).*\(32,\)"):
            engine.publish(update([("model.norm.weight", torch.zeros(3))], 1))


async def test_turns_pause_while_weights_are_replaced():
    with running() as engine:
        engine.begin("e")
        task = asyncio.create_task(ask(engine, tokens(5), Sampling(max_tokens=300), episode_id="e"))
        await asyncio.sleep(0.05)
        with engine.paused():
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(task), 0.6)
            engine.publish(update([], 2))  # stays paused
            await asyncio.sleep(0.05)
            assert not task.done()
        answer = await asyncio.wait_for(task, 20)
    assert len(answer.token_ids) == 300 and {0, 2} == set(answer.versions)


@pytest.mark.parametrize("length", [1, 2, 300, 513, 700])
async def test_score_is_a_plain_forward(length: int):
    model = random_model(max_position_embeddings=1024)
    with running(model) as engine:
        [scores] = await engine.scores(tokens(length))
        assert len(scores) == length
        np.testing.assert_allclose(scores, plain_logprobs(model, tokens(length)), atol=2e-5)


async def test_two_loops_share_an_engine():
    with running(deterministic=False) as engine:

        def elsewhere() -> list[Generation]:
            return asyncio.run(flood(engine, [tokens(9)], Sampling(max_tokens=7), tag="there"))

        here, there = await asyncio.gather(
            flood(engine, [tokens(9)], Sampling(max_tokens=7), tag="here"),
            asyncio.to_thread(elsewhere),
        )
    assert here[0].token_ids == there[0].token_ids


async def test_loading_from_a_folder(tmp_path):
    random_model().save_pretrained(tmp_path)
    engine = LocalEngine.load(str(tmp_path), TOKENIZER, device="cpu")
    sampler: Sampler = engine
    control: EngineControl = engine
    (answer,) = await flood(engine, [tokens(8)], Sampling(max_tokens=6))
    full = plain_logprobs(random_model(), tokens(8) + answer.token_ids)
    np.testing.assert_allclose(full[8:], answer.logprobs, atol=1e-5)
    control.close()
    assert sampler.max_length == 512
    with pytest.raises(UserError, match="cannot load a model from"):
        LocalEngine.load(str(tmp_path / "nothing"), TOKENIZER)
