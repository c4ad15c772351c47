"""Measure how fast the local engine samples, compared with batched `model.generate`.

One JSON object a line: name, value, unit, context. `python benchmarks/local_engine.py`, or with
`--device cuda` the figures of a model of the shape of SmolLM2-135M (random weights, bfloat16) on a
GPU: 256 rows at once, and the calculator's step, 32 prompts x 8 rollouts of up to 4 turns.

With `--model smollm2` (a name or a folder) the figures of a real model on the CPU, in float32 and
in bfloat16: sampled tokens per second of CPU time for a step of `recipes/facts` (8 prompts x 8
rollouts) and for a validation (64 prompts), and the mean difference of the engine's logprobs from
those of a learner, which computes in float32.

With neither, the model is tiny (Qwen2 shape, 2 layers, hidden 128, MLP 384, heads 4/2,
vocabulary 576, float32), so these figures show what the engine adds to the model. Each is the best
of its repetitions, in which the contestants alternate.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from workload.timing import arguments, print_figure

from agentrl.engine.base import Sampling
from agentrl.engine.local import LocalEngine
from agentrl.engine.local.load import load_causal_lm
from agentrl.pretrained import MODELS, get_model

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


def smollm2_shape(device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(device, torch.bfloat16).eval()


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


async def episodes(
    engine: LocalEngine, tag: str, tool_seconds: float, groups: int = 16, longest: int = 40
) -> tuple[int, int]:
    """Run a step: groups of 8 rollouts, up to 4 turns, answers of ~20 tokens.

    Args:
        engine: runs the turns.
        tag: makes ids of episodes unique.
        tool_seconds: what an answer takes.
        groups: the number of prompts.
        longest: the tokens of the longest turn. Three of four have 10 to 40.

    Returns:
        The number of sampled tokens, and of turns.
    """
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCABULARY, rng.integers(85, 116)) for _ in range(groups)]
    limits = [41, 41, 41, longest + 1]
    plans = [
        [
            (int(rng.integers(10, limits[t * 7 % 4])), int(rng.integers(12, 29)))
            for t in range(rng.integers(1, 5))
        ]
        for _ in range(8 * groups)
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


def measure_shape(device: str) -> None:
    """Print the figures of SmolLM2's shape, those after the first round."""
    rng = np.random.default_rng(0)
    prompts = [array("i", rng.integers(0, 49152, 100).tolist()) for _ in range(256)]
    engine = LocalEngine(smollm2_shape(device), tiny_tokenizer(), deterministic=False)
    for repetition in range(4):
        start = time.perf_counter()
        sampled = asyncio.run(flood(engine, prompts, 128, f"flood-{repetition}"))
        seconds = time.perf_counter() - start
        print_figure("flood/speed", sampled / seconds, "tokens/s", rows=256, round=repetition)
    for tool_seconds in (0.0, 0.02):
        for repetition in range(3):
            start, tag = time.perf_counter(), f"{tool_seconds}-{repetition}"
            sampled, turns = asyncio.run(episodes(engine, tag, tool_seconds, 32, 96))
            seconds = time.perf_counter() - start
            context = {"turns": turns, "tool_s": tool_seconds, "round": repetition}
            print_figure("episodes/seconds", seconds, "s per step", **context)
            print_figure("episodes/speed", sampled / seconds, "tokens/s", **context)
    engine.close()


def recipe_prompts(tokenizer: PreTrainedTokenizerBase) -> list[array]:
    """Return the token ids of the first 64 prompts of `recipes/facts`."""
    rows = Path("recipes/facts/train.jsonl").read_text().splitlines()[:64]
    prompts = [[{"role": "user", "content": json.loads(row)["prompt"]}] for row in rows]
    ids: Any = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False)
    return [array("i", prompt) for prompt in ids]


def measure_model(name: str) -> None:
    """Print the figures of a real model: each the median of three rounds."""
    path = get_model(name) if name in MODELS else Path(name)
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = recipe_prompts(tokenizer)
    works = {"step": [p for p in prompts[:8] for _ in range(8)], "validation": prompts}
    learner = load_causal_lm(path, torch.float32)
    for dtype in ("float32", "bfloat16"):
        model = load_causal_lm(path, getattr(torch, dtype))
        engine = LocalEngine(model, tokenizer, deterministic=True)
        for work, rows in works.items():
            speeds = []
            for repetition in range(3):
                start = time.process_time()
                sampled = asyncio.run(flood(engine, rows, 24, f"{work}-{repetition}"))
                speeds.append(sampled / (time.process_time() - start))
            print_figure(f"{work}/{dtype}", statistics.median(speeds), "tokens/s of CPU time")
        row = array("i", [token for prompt in prompts[:8] for token in prompt])
        ids = torch.tensor([row])
        with torch.inference_mode():
            logprobs = learner(input_ids=ids).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
        scores = torch.tensor(asyncio.run(engine.scores(row))[0])[1:]
        mismatch = (scores - expected).abs().mean().item()
        print_figure(f"mismatch/{dtype}", mismatch, "nats a token")
        engine.close()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", help="cuda: the figures of a GPU")
    parser.add_argument("--model", help="a name or a folder: the figures of a real model")
    args = parser.parse_args()
    if args.device:
        return measure_shape(args.device)
    if args.model:
        return measure_model(args.model)
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
