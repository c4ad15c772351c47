"""Hypothesis strategies of groups of rollouts, and batches of them with random observations."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import strategies as st
from support.trainer_fixtures import group, scored, segment, turn

from agentrl.config import RewardConfig
from agentrl.learner.batch import Batch, collate

PAD = 0
SIXTEENTHS = st.integers(-32, 32).map(lambda k: k / 16)


@dataclass(frozen=True)
class Rollout:
    """A rollout without observations: rows of turns of (number of sampled tokens, reward)."""

    rows: tuple[tuple[tuple[int, float], ...], ...]
    reward: float
    masked: bool


TURNS = st.tuples(st.integers(0, 3), SIXTEENTHS)
ROLLOUTS = st.builds(
    Rollout,
    rows=st.lists(st.lists(TURNS, min_size=1, max_size=3).map(tuple), min_size=1, max_size=2).map(
        tuple
    ),
    reward=SIXTEENTHS,
    masked=st.sampled_from([False, False, False, True]),
)
ROLLOUT_GROUPS = st.lists(
    st.lists(ROLLOUTS, min_size=0, max_size=4), min_size=1, max_size=3
).filter(lambda groups: any(groups))


def batch_of(groups: list[list[Rollout]], gaps: random.Random | None) -> Batch:
    """Return a batch with random observations before, between and after turns.

    Without `gaps` there are no observations.
    """

    def observed() -> tuple[str, list[int]]:
        return ("E", [gaps.randrange(99) for _ in range(gaps.randrange(4))] if gaps else [])

    def member(rollout: Rollout):
        segments, turns = [], []
        for s, row in enumerate(rollout.rows):
            pieces = [observed()]
            for sampled, earned in row:
                at = sum(len(ids) for _, ids in pieces)
                turns.append(turn(s, at, at + sampled, turn=earned))
                pieces += [("A", [1] * sampled), observed()]
            segments.append(segment([1], *pieces))
        return scored(segments, rollout.reward, turns, masked=rollout.masked)

    return collate(
        [group(*map(member, members)) for members in groups], PAD, RewardConfig(turn_weight=0.5)
    )
