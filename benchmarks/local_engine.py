"""Measure how fast the local engine samples, compared with batched `model.generate`.

One JSON object a line: name, value, unit, context. `python benchmarks/local_engine.py`.

The model is tiny (Qwen2 shape, 2 layers, hidden 128, MLP 384, heads 4/2, vocabulary 576, float32),
so these figures show what the engine adds to the model. Each is the best of its repetitions, in
which the contestants alternate.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from workload.timing import print_figure

from agentrl.engine.base import Sampling
from agentrl.engine.local import LocalEngine

VOCABULARY = 576
REPETITIONS = 7


def tiny_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.08,
    )
    return Qwen2ForCausalLM(config).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}:" if i % 50 == 0 else f"w{i}": i for i in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w0")))


async def flood(engine: LocalEngine, prompts: list[array], tokens: int, tag: str) -> int:
    """Run all prompts at once, one turn each, and return the number of sampled tokens."""
    ids = [f"{tag}-{i}" for i in range(len(prompts))]
    for episode_id in ids:
        engine.begin(episode_id)
    answers = await asyncio.gather(
        *(
            engine.generate(
                prompt,
                Sampling(max_tokens=tokens),
                episode_id=episode_id,
                seed=i,
                deadline=time.monotonic() + 600,
            )
            for i, (episode_id, prompt) in enumerate(zip(ids, prompts, strict=True))
        )
    )
    for episode_id in ids:
        engine.end(episode_id)
    return sum(len(a.token_ids) for a in answers)


async def episodes(engine: LocalEngine, tag: str, tool_seconds: float) -> tuple[int, int]:
    """Run the demo's step: 16 prompts x 8 rollouts, up to 4 turns of ~25 tokens, answers of ~20.

    Returns:
        The number of sampled tokens, and of turns.
    """
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCABULARY, rng.integers(85, 116)) for _ in range(16)]
    plans = [
        [(int(rng.integers(10, 41)), int(rng.integers(12, 29))) for _ in range(rng.integers(1, 5))]
        for _ in range(128)
    ]
    ids = [f"{tag}-{i}" for i in range(len(plans))]
    for episode_id in ids:
        engine.begin(episode_id)

    async def play(i: int) -> tuple[int, int]:
        row = array("i", prompts[i // 8].tolist())
        sampled = 0
        for t, (length, observed) in enumerate(plans[i]):
            answer = await engine.generate(
                row,
                # A third of the demo's rows are ReAct rows, which have a stop string.
                Sampling(max_tokens=length, stop=("Observation:",) if i % 3 == 0 else ()),
                episode_id=ids[i],
                seed=i * 10 + t,
                deadline=time.monotonic() + 600,
            )
            sampled += len(answer.token_ids)
            row.extend(answer.token_ids)
            await asyncio.sleep(tool_seconds)
            row.extend((7 * i + k) % VOCABULARY for k in range(observed))
        engine.end(ids[i])
        return sampled, len(plans[i])

    results = await asyncio.gather(*(play(i) for i in range(len(plans))))
    return sum(r[0] for r in results), sum(r[1] for r in results)


def generate(model: Qwen2ForCausalLM, prompts: list[array], tokens: int) -> int:
    ids = torch.tensor(prompts)
    out: Any = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        eos_token_id=0,
        pad_token_id=0,
    )
    return out.numel() - ids.numel()


def main() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    rng = np.random.default_rng(0)
    machine = {"transformers": transformers.__version__, "threads": torch.get_num_threads()}
    for prompt_length in (16, 100):
        prompts = [
            array("i", rng.integers(0, VOCABULARY, prompt_length).tolist()) for _ in range(64)
        ]
        engines = {
            f"deterministic={d}": LocalEngine(tiny_model(), tokenizer, deterministic=d)
            for d in (True, False)
        }
        best = dict.fromkeys(["generate", *engines], 0.0)
        for repetition in range(REPETITIONS):
            start = time.perf_counter()
            sampled = generate(model, prompts, 64)
            best["generate"] = max(best["generate"], sampled / (time.perf_counter() - start))
            for name, engine in engines.items():
                start = time.perf_counter()
                sampled = asyncio.run(flood(engine, prompts, 64, f"{repetition}"))
                best[name] = max(best[name], sampled / (time.perf_counter() - start))
        context = {"requests": 64, "tokens": 64, "prompt": prompt_length, **machine}
        for name, value in best.items():
            print_figure(f"flood/{name}", value, "tokens/s", **context)
        for name in engines:
            print_figure(
                f"flood/{name}/ratio", best[name] / best["generate"], "x generate", **context
            )
            engines[name].close()
    for deterministic in (True, False):
        for tool_seconds in (0.0, 0.005):
            engine = LocalEngine(tiny_model(), tokenizer, deterministic=deterministic)
            seconds, sampled, turns = float("inf"), 0, 0
            for repetition in range(REPETITIONS):
                start = time.perf_counter()
                sampled, turns = asyncio.run(episodes(engine, str(repetition), tool_seconds))
                seconds = min(seconds, time.perf_counter() - start)
            context = {"episodes": 128, "turns": turns, "tool_s": tool_seconds, **machine}
            name = f"episodes/deterministic={deterministic}"
            print_figure(f"{name}/seconds", seconds, "s per step", **context)
            print_figure(f"{name}/speed", sampled / seconds, "tokens/s", **context)
            engine.close()


if __name__ == "__main__":
    main()
