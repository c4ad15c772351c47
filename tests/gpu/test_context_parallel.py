"""Two GPUs that share the tokens of each row learn what one GPU learns."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from support.exact_rank import AnyRank
from support.processes import Processes
from support.trainer_fixtures import config, random_groups
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.learner.algorithms import make_targets
from agentrl.learner.batch import collate
from agentrl.learner.learner import Learner
from agentrl.learner.rank import LocalRankGroup

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="fewer than two GPUs")]


@pytest.mark.parametrize("recompute", [False, True])
def test_two_gpus_that_share_rows_have_the_numbers_of_one(tmp_path, recompute):
    """The layers are compiled, and micro-batches have different lengths."""
    shape = LlamaConfig(
        vocab_size=1000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    LlamaForCausalLM(shape).bfloat16().save_pretrained(tmp_path)
    batch = collate(random_groups(3, groups=8, n=4), 31)
    keys = {"trainer__device": "cuda", "optim__recompute": recompute}
    shared = {"trainer__n_gpus_per_node": 2, "trainer__context_parallel_size": 2}
    one = config(**keys, optim__micro_batch_tokens=200)
    two = config(**keys, **shared, optim__micro_batch_tokens=100)
    found = []
    with closing(Processes(2, AnyRank)) as ranks:
        for cfg, group in ((one, LocalRankGroup(AnyRank())), (two, ranks)):
            group.open(tmp_path, cfg, None)
            learner = Learner("", cfg, total_steps=4, group=group)
            old = learner.logprobs(batch)
            metrics, _ = learner.update(batch, make_targets(batch, cfg, old, None, None), 1)
            found.append((old[batch.response_mask], metrics, group.first_gradients()))
    (old, metrics, gradients), (old_2, metrics_2, gradients_2) = found
    print(f"logprobs differ by {(old - old_2).abs().mean():.5f}")
    assert (old - old_2).abs().mean() < 0.02
    assert metrics_2["actor/grad_norm"] == pytest.approx(metrics["actor/grad_norm"], rel=0.05)
    norm = torch.stack([g.float().norm().cpu() for g in gradients.values()]).norm()
    errors = [(gradients_2[n].cpu() - g.cpu()).float().norm() for n, g in gradients.items()]
    print(f"gradients differ by {torch.stack(errors).norm() / norm:.4f}")
    assert torch.stack(errors).norm() < 0.1 * norm
