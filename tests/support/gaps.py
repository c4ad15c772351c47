"""The gap of an engine to the learner: how far apart their logprobs of sampled tokens are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice
from typing import Any

from support.trainer_fixtures import group, scored
from torch import Tensor

from agentrl.agent_loops.context import TokenRow
from agentrl.demo.arithmetic import rows
from agentrl.demo.recipe import train_tokenizer
from agentrl.learner.batch import Batch, collate
from agentrl.learner.learner import Learner
from agentrl.trajectory import Generation, token_array


def small_tokenizer() -> Any:
    return train_tokenizer(m.content for r in islice(rows(1), 50) for m in r.gold)


def random_prompts(vocabulary: int, count: int, tokens: int, n: int) -> list[list[int]]:
    """Return random prompts, each n times."""
    r = random.Random(0)
    some = [[r.randrange(1, vocabulary) for _ in range(tokens)] for _ in range(count)]
    return [row for row in some for _ in range(n)]


def batch_of(prompts: Sequence[Sequence[int]], answers: Sequence[Generation], n: int) -> Batch:
    """Return a batch of one turn per prompt, in groups of n, with rewards that differ."""
    members = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        row = TokenRow(token_array(prompt))
        row.extend((), answer, len(answer.token_ids))
        members.append(scored([row.segment()], float(i % 2)))
    return collate([group(*members[i : i + n]) for i in range(0, len(members), n)])


def gaps(learner: Learner, batch: Batch) -> Tensor:
    """Return the distance of the logprobs of each sampled token, in nats."""
    return (learner.logprobs(batch) - batch.rollout_logprobs)[batch.response_mask].abs()


def describe(gap: Tensor) -> str:
    """Return the figures of gaps in nats."""
    return f"mean {gap.mean():.5f}, max {gap.max():.4f}, over 0.1: {(gap > 0.1).float().mean():.3%}"
