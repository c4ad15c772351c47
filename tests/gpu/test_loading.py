"""The memory of two GPUs while a model is loaded: a shard on each, never the whole model."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from support.exact_rank import AnyRank
from support.processes import Processes
from support.trainer_fixtures import config
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.learner import rank, sharding
from agentrl.learner.dispatch import SPLIT, dispatch
from agentrl.learner.rank import Rank

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="fewer than two GPUs")]


class LoadingRank(AnyRank):
    @dispatch(SPLIT)
    def peaks(self, _, folder, cfg):
        """Load a model as if it were too large to stay gathered.

        Returns:
            The most bytes that were allocated until the model was sharded, the most until it was
            ready, and the bytes of this rank's shards.
        """
        sharding.MAX_GATHERED_SHARE = 0
        sharding.open_accelerator("cuda")
        torch.cuda.reset_peak_memory_stats()
        start, sharded = torch.cuda.memory_allocated(), []

        def shard_and_measure(*args):
            sharding.shard(*args)
            sharded.append(torch.cuda.max_memory_allocated() - start)

        rank.shard = shard_and_measure
        Rank.__init__(self, folder, cfg)
        own: list[Any] = [*self.policy.model.parameters()]
        size = sum(p.to_local().numel() * p.element_size() for p in own)
        return sharded[0], torch.cuda.max_memory_allocated() - start, size


@pytest.mark.parametrize("lora_rank", [0, 8])
def test_a_gpu_never_holds_more_than_its_shard_and_a_layer(tmp_path, lora_rank):
    shape = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(shape).bfloat16()
    model.save_pretrained(tmp_path)
    width = 2 if lora_rank else 4  # bytes of a weight: frozen, or learning in float32
    whole = width * sum(p.numel() for p in model.parameters())
    layer = width * sum(p.numel() for p in model.model.layers[0].parameters())
    cfg = config(trainer__device="cuda", model__lora_rank=lora_rank)
    with closing(Processes(2, LoadingRank)) as ranks:
        for sharded, ready, own in ranks.peaks([None] * 2, tmp_path, cfg):
            print(f"whole {whole}, shards {own}, sharded {sharded}, ready {ready}")
            assert own < 0.55 * whole
            assert sharded <= own + layer + 2**22  # the allocator rounds up
            # Embeddings, output layer, three layers, and the passes of the small copy.
            assert ready <= own + 0.4 * whole + 2**30
