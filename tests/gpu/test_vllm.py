"""vLLM on a GPU that it shares with the learner: turns, weights, adapters, and runs of ten steps.

`AGENTRL_VLLM_PYTHON` names the Python that has vLLM; without it, it is this one. With `-s`, the
figures are printed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gaps import batch_of, describe, gaps, random_prompts, small_tokenizer
from support.reference_model import ask
from support.trainer_fixtures import step
from support.updates import policy_of, publish
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl import reward
from agentrl.config import Config, load_config
from agentrl.engine.base import Sampling
from agentrl.engine.remote.launch import ServerProcess, VLLMLaunch
from agentrl.engine.remote.open import parameter_names
from agentrl.engine.remote.senders import Delivery
from agentrl.engine.remote.vllm import VLLMEngine
from agentrl.learner.batch import Batch
from agentrl.learner.learner import Learner
from agentrl.record import read_metrics
from agentrl.trainer import Trainer

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="no GPU")]

PYTHON = os.environ.get("AGENTRL_VLLM_PYTHON", "")
DEVICE, GPU_INDICES, MEMORY = "cuda", [0], 0.2
ARGUMENTS = ["--attention-backend", "TRITON_ATTN", "--enforce-eager", "--max-model-len", "2048"]
DATA = Path(__file__).parents[2] / "datasets"
PROMPTS, N, PROMPT_TOKENS, TOKENS, STEPS = 16, 4, 64, 256, 10
RANK = 16
SHAPE = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "rope_theta": 1e6,
}  # fmt: skip
"""Qwen2.5-0.5B's, whose head is tied to its embeddings."""
MEAN_GAP, MAX_GAP = 0.04, 0.4
"""In nats: what bfloat16 explains."""


def random_model(path: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    tokenizer = small_tokenizer()
    config = Qwen2Config(
        **SHAPE, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with torch.device(DEVICE):
        model = Qwen2ForCausalLM(config).bfloat16()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """Two models of other weights. The server starts with the first."""
    folder = tmp_path_factory.mktemp("qwen")
    return [random_model(folder / str(seed), seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def server(folders):
    start = time.perf_counter()
    server = VLLMLaunch(
        str(folders[0]), python=PYTHON, dtype="bfloat16", gpus=GPU_INDICES, memory=MEMORY,
        lora_rank=RANK, arguments=ARGUMENTS,
    ).start()  # fmt: skip
    print(f"\nvLLM is ready after {time.perf_counter() - start:.0f} s")
    yield server
    server.stop()


def engine_of(server: ServerProcess, **options: Any) -> VLLMEngine:
    return VLLMEngine(
        server.url, vocabulary=SHAPE["vocab_size"], key=server.token, process=server, **options
    )


def learner_of(folder: Path, lora_rank: int = 0) -> Learner:
    settings: dict[str, Any] = {
        "trainer": {"device": DEVICE}, "model": {"lora_rank": lora_rank},
        "optim": {"micro_batch_tokens": 4096, "lr": 0.005},
    }  # fmt: skip
    return Learner(str(folder), Config.model_validate(settings), total_steps=1)


def sampled(engine: VLLMEngine, name: str) -> Batch:
    """Sample turns at the same time, and print the speed."""
    prompts = random_prompts(SHAPE["vocab_size"], PROMPTS, PROMPT_TOKENS, N)

    async def run() -> Sequence[Any]:
        sampling = Sampling(max_tokens=TOKENS)
        calls = [ask(engine, p, sampling, f"e{i}", seed=i) for i, p in enumerate(prompts)]
        return await asyncio.gather(*calls)

    start = time.perf_counter()
    answers = asyncio.run(run())
    seconds, tokens = time.perf_counter() - start, sum(len(a.token_ids) for a in answers)
    print(f"{name}: {tokens} tokens of {len(prompts)} turns, {tokens / seconds:,.0f} tokens/s")
    assert {v for a in answers for v in a.versions} == {engine.version}
    return batch_of(prompts, answers, N)


def check_gap(gap: Tensor, name: str) -> None:
    print(f"gap in nats, {name}: {describe(gap)}")
    assert gap.mean() < MEAN_GAP and gap.max() < MAX_GAP


def check_publish(engine: VLLMEngine, learner: Learner, stale: Batch, version: int) -> None:
    """Publish the learner's policy: its gap to the engine is small, and was not before."""
    before = gaps(learner, stale)
    print(f"gap in nats, a control, before version {version}: {describe(before)}")
    start = time.perf_counter()
    size = publish(engine, policy_of(learner, version))
    print(f"version {version}: {size / 2**20:,.0f} MiB in {time.perf_counter() - start:.2f} s")
    batch = sampled(engine, f"version {version}")
    after = gaps(learner, batch)
    check_gap(after, f"version {version}")
    assert before.mean() > 5 * after.mean()


def test_turns_and_all_weights(folders, server):
    engine = engine_of(server, names=parameter_names(str(folders[0])))
    sampled(engine, "the first turns")
    batch = sampled(engine, "as loaded")
    learner = learner_of(folders[0])
    check_gap(gaps(learner, batch), "as loaded")
    check_publish(engine, learner_of(folders[1]), batch, 1)
    # Again as at the start, for the next test.
    publish(engine, policy_of(learner, 2))
    check_gap(gaps(learner, sampled(engine, "version 2")), "version 2")


def test_adapters(folders, server):
    engine = engine_of(server, delivery=Delivery("adapter"))
    batch = sampled(engine, "without an adapter")
    learner = learner_of(folders[0], RANK)
    check_gap(gaps(learner, batch), "without an adapter")
    for version in (1, 2):
        print(f"grad_norm {step(learner, batch, version)['actor/grad_norm']:.4f}")
        check_publish(engine, learner, batch, version)


@reward("even_tokens")
def even_tokens(trajectory) -> float:
    """Return the share of even token ids: random weights get other scores too."""
    ids = [i for s in trajectory.segments for i in s.response_ids]
    return sum(i % 2 == 0 for i in ids) / len(ids)


@pytest.mark.parametrize("lora_rank", [0, RANK], ids=["all weights", "lora"])
def test_ten_steps(folders, tmp_path, lora_rank):
    config = load_config(
        None,
        [
            "rollout.name=vllm", f"trainer.device={DEVICE}",
            f"rollout.gpu_memory_utilization={MEMORY}", f"trainer.total_steps={STEPS}",
            "data.batch_size=16", "rollout.n=4", "rollout.max_turn_tokens=64",
            "rollout.max_trajectory_tokens=384", "reward.function=even_tokens",
            f"optim.lr={1e-3 if lora_rank else 3e-5}", "trainer.save_freq=0",
            "trainer.test_freq=0", f"model.lora_rank={lora_rank}",
        ],
        {
            "files": ["shelf:calculator"], "data.train": str(DATA / "arithmetic_train.parquet"),
            "model.path": str(folders[0]), "trainer.output": str(tmp_path),
            "rollout.launch": ARGUMENTS, "rollout.python": PYTHON,
        },
    )  # fmt: skip
    start = time.perf_counter()
    Trainer(config).run()
    print(f"\n{STEPS} steps in {time.perf_counter() - start:.0f} s, with the start of the server")
    history = read_metrics(tmp_path / "metrics.jsonl")
    assert [number for number, _ in history] == list(range(1, STEPS + 1))
    for number, m in history:
        print(
            f"step {number}: gap {m['rollout_corr/logprob_diff_mean']:.5f}, max"
            f" {m['rollout_corr/logprob_diff_max']:.4f}, canary {m['canary/mismatch']:.5f}, drift"
            f" {m['canary/drift']:.5f}, score {m['critic/score/mean']:.4f},"
            f" {m['perf/throughput']:,.0f} tokens/s, {m['timing_s/step']:.1f} s, of it gen"
            f" {m['timing_s/gen']:.1f} and update_weights {m['timing_s/update_weights']:.2f}"
        )
    for number, m in history:
        assert m["rollout_corr/logprob_diff_mean"] < MEAN_GAP, number
        assert m["actor/grad_norm"] > 0
    # A control: if the engine had not followed, its gap would have been this.
    assert sum(m["canary/drift"] for _, m in history) > 2 * MEAN_GAP
