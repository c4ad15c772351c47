"""Random trajectories with tool results for training, their rewards, and their FLOPs.

The rows of a group share a prompt. The lengths of responses are log-normal, with a long tail; 66 of
every 146 response tokens are tool results. The engine's logprobs are those of a uniform
distribution, which is about the distribution of random weights.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.learner.batch import Batch, collate
from agentrl.trajectory import (
    Group,
    Sample,
    Scored,
    Segment,
    Trajectory,
    float_array,
    token_array,
)

SAMPLED, OBSERVED = 80, 66
FIRST = 100
"""The first token id that is used; smaller ids may be special tokens."""
Lengths = Callable[[random.Random], int]


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens of one trajectory."""

    prompt: list[int]
    response: list[int]
    mask: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Trajectories, ordered by group, with their rewards."""

    rows: list[Row]
    rewards: list[float]
    n: int
    """The number of rows in a group."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rows))

    @property
    def trained(self) -> int:
        return sum(sum(row.mask) for row in self.rows)

    def apart(self, vocabulary: int) -> Rollouts:
        """Return the same rows with prompts that begin with different tokens, without sharing."""
        rows = [
            replace(row, prompt=[FIRST + k % (vocabulary - FIRST), *row.prompt[1:]])
            for k, row in enumerate(self.rows)
        ]
        return replace(self, rows=rows)

    def flops(self, config: Any, *, frozen: bool) -> int:
        """Return the FLOPs of forward and backward pass; the head runs on sampled tokens only.

        A weight that learns costs 6 multiplications and additions per token, a frozen weight 4,
        because it needs no gradient. Adapters are not counted. `config` is Qwen2's.
        """
        hidden, layers = config.hidden_size, config.num_hidden_layers
        kv = config.num_key_value_heads * (hidden // config.num_attention_heads)
        block = hidden * (hidden + 2 * kv) + hidden**2 + 3 * hidden * config.intermediate_size
        weights = layers * block * self.tokens + config.vocab_size * hidden * self.trained
        attention = layers * hidden * sum(len(row) ** 2 for row in self.rows)
        return (4 if frozen else 6) * weights + 6 * attention

    def batch(self, vocabulary: int) -> Batch:
        """Return the rows as the trainer's batch."""
        uniform = -math.log(vocabulary)
        scored = [
            Scored(
                Trajectory(Sample("s", ()), "e", k, (_segment(row, uniform),), (), (), {}, "done"),
                {"outcome": reward},
                reward,
            )
            for k, (row, reward) in enumerate(zip(self.rows, self.rewards, strict=True))
        ]
        groups = [tuple(scored[k : k + self.n]) for k in range(0, len(scored), self.n)]
        return collate([Group(Sample("s", ()), members) for members in groups], 0)


def draw(
    rows: int, n: int, prompt: int, lengths: Lengths, vocabulary: int, seed: int = 0
) -> Rollouts:
    """Return random trajectories.

    Args:
        rows: the number of rows, a multiple of `n`.
        n: the number of rows per prompt.
        prompt: the number of tokens of a prompt.
        lengths: returns the length of the next response.
        vocabulary: the size of the vocabulary.
        seed: the seed of the random numbers.
    """
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(FIRST, vocabulary) for _ in range(count)]

    made = []
    for _ in range(rows // n):
        shared = tokens(prompt)
        for _ in range(n):
            response = tokens(lengths(rng))
            mask = [int(t % (SAMPLED + OBSERVED) < SAMPLED) for t in range(len(response))]
            made.append(Row(shared, response, mask))
    return Rollouts(made, [rng.gauss(0, 1) for _ in made], n)


def long_tailed(mean: float) -> Lengths:
    """Return log-normal lengths with this mean: at least 32 tokens, at most six times the mean."""
    return lambda rng: max(
        32, min(int(mean * 6), int(rng.lognormvariate(math.log(mean) - 0.32, 0.8)))
    )


def _segment(row: Row, logprob: float) -> Segment:
    return Segment(
        token_array(row.prompt),
        token_array(row.response),
        token_array(row.mask),
        float_array([logprob * chosen for chosen in row.mask]),
        token_array([0] * len(row.response)),
    )


def bins(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Numbers of the rows of each pack: the longest first, each into the first that has room."""
    packs: list[list[int]] = []
    room: list[int] = []
    for k in sorted(range(len(lengths)), key=lambda k: -lengths[k]):
        at = next((b for b, left in enumerate(room) if lengths[k] <= left), len(packs))
        if at == len(packs):
            packs.append([])
            room.append(budget)
        packs[at].append(k)
        room[at] -= lengths[k]
    return packs
