"""Assigning rows to ranks: each row once, ranks in step, rows of a prompt together, even loads."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product
from random import Random

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.examples import examples
from torch import Tensor, arange

from agentrl.learner.batch import TokenRows
from agentrl.learner.packing import assign_rows, pack


@dataclass(frozen=True)
class World:
    """Families of (tokens of their prompt, tokens of each response to it); which rows are run."""

    families: tuple[tuple[int, tuple[int, ...]], ...]
    keep: int

    def rows(self) -> Tensor:
        count = sum(len(responses) for _, responses in self.families)
        return torch.tensor([b for b in range(count) if self.keep >> b & 1], dtype=torch.int64)

    def batch(self) -> TokenRows:
        """Neighbouring families differ in the first token of their prompt."""
        prompts = [p for p, responses in self.families for _ in responses]
        lengths = [r for _, responses in self.families for r in responses]
        first = [f for f, (_, responses) in enumerate(self.families) for _ in responses]
        width = max(prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        for b, (prompt, f) in enumerate(zip(prompts, first, strict=True)):
            ids[b, width - prompt] = f + 1
        response = arange(max(lengths))
        mask = response < torch.tensor(lengths)[:, None]
        return TokenRows(
            prompt_ids=ids,
            prompt_lengths=torch.tensor(prompts),
            response_ids=mask.long(),
            response_lengths=torch.tensor(lengths),
            response_mask=mask,
        )


def worlds(families: int = 4, each: int = 4, longest: int = 30):
    family = st.tuples(
        st.integers(1, longest),
        st.lists(st.integers(1, longest), min_size=1, max_size=each).map(tuple),
    )
    return st.builds(
        World,
        st.lists(family, min_size=1, max_size=families).map(tuple),
        st.integers(0, 2 ** (families * each) - 1),
    )


def tokens(batch: TokenRows, rows: Tensor | list[int]) -> int:
    """Return the number of tokens that the model processes for these rows."""
    rows = torch.as_tensor(rows, dtype=torch.int64)
    if not len(rows):
        return 0
    return pack(batch, rows, batch.response_mask[rows]).input_ids.numel()


def loads(batch: TokenRows, dealt: list[list[Tensor]]) -> list[int]:
    return [tokens(batch, torch.cat(share)) if share else 0 for share in dealt]


def family_of(world: World) -> list[int]:
    return [f for f, (_, responses) in enumerate(world.families) for _ in responses]


@given(worlds(), st.integers(1, 5), st.integers(1, 150))
@examples(150)
def test_every_row_is_run_once_and_all_ranks_keep_step(world, ranks, budget):
    batch, rows = world.batch(), world.rows()
    dealt = assign_rows(batch, rows, ranks, budget)
    assert len(dealt) == ranks
    assert sorted(r for share in dealt for piece in share for r in piece.tolist()) == rows.tolist()
    assert len({len(share) for share in dealt}) == 1
    assert all(share for share in dealt) == bool(len(rows))
    for share in dealt:
        assert all(p.dtype == torch.int64 and (p.diff() > 0).all() for p in share)
        assert all(tokens(batch, piece) <= budget or len(piece) == 1 for piece in share)


@given(worlds(), st.integers(1, 150))
@examples(100)
def test_pieces_of_one_rank_are_neighbours_and_as_full_as_their_order_allows(world, budget):
    batch, rows = world.batch(), world.rows()
    [pieces] = assign_rows(batch, rows, 1, budget)
    assert [r for piece in pieces for r in piece.tolist()] == rows.tolist()
    for piece, following in pairwise(pieces):
        assert tokens(batch, torch.cat([piece, following[:1]])) > budget


@pytest.mark.parametrize(("ranks", "budget"), [(2, 4000), (4, 4000), (8, 2000)])
def test_ranks_wait_little_for_each_other(ranks, budget):
    """Passes that are filled one after the other leave a rest to each rank: 0.8 and less."""
    random = Random(0)
    families = [
        (100, tuple(int(random.lognormvariate(5, 0.8)) for _ in range(8))) for _ in "x" * 32
    ]
    world = World(tuple(families), -1)
    batch = world.batch()
    dealt = assign_rows(batch, world.rows(), ranks, budget)
    run = [[tokens(batch, piece) for piece in share] for share in dealt]
    slowest = sum(max(at) for at in zip(*run, strict=True))
    assert tokens(batch, world.rows()) >= 0.93 * ranks * slowest


@given(worlds(), st.integers(1, 5), st.integers(1, 150))
@examples(50)
def test_the_schedule_depends_on_the_lengths_only(world, ranks, budget):
    batch, rows = world.batch(), world.rows()
    first, second = (assign_rows(batch, rows, ranks, budget) for _ in range(2))
    for mine, theirs in zip(first, second, strict=True):
        assert [p.tolist() for p in mine] == [p.tolist() for p in theirs]


@given(worlds(families=3, each=2), st.integers(2, 3))
@example(World(((30, (1, 1)), (30, (1, 1)), (30, (1, 1))), -1), 2)
@examples(100)
def test_no_rank_has_much_more_than_it_must(world, ranks):
    """Against the best of all ways, tried one by one."""
    batch, rows = world.batch(), world.rows()
    if not len(rows):
        return
    busiest = max(loads(batch, assign_rows(batch, rows, ranks, 10_000)))
    ways = product(range(ranks), repeat=len(rows))
    best = min(
        max(tokens(batch, rows[torch.tensor(way) == rank]) for rank in range(ranks)) for way in ways
    )
    assert busiest <= 4 / 3 * best + 1e-9


@pytest.mark.parametrize(
    ("ranks", "groups", "most"), [(2, 3, 1.15), (4, 9, 1.15), (8, 9, 1.25), (8, 12, 1.2)]
)
def test_groups_that_do_not_divide_by_the_ranks_are_shared(ranks, groups, most):
    """Whole, the last ones would leave most ranks idle: 9 groups on 8 take as long as 16."""
    world = World(((50, (50,) * 8),) * groups, -1)
    batch, rows = world.batch(), world.rows()
    rank_loads = loads(batch, assign_rows(batch, rows, ranks, 10_000))
    assert max(rank_loads) <= most * groups * 450 / ranks
    assert -(-groups // ranks) * 450 > most * groups * 450 / ranks


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 60), st.integers(1, 20))
@examples(50)
def test_a_prompt_stays_on_one_rank_if_the_load_is_even(ranks, each, prompt, response):
    world = World(((prompt, (response,) * 4),) * (ranks * each), -1)
    batch = world.batch()
    dealt = assign_rows(batch, world.rows(), ranks, 10_000)
    assert loads(batch, dealt) == [each * (prompt + 4 * response)] * ranks
    family = family_of(world)
    homes = {(family[r], i) for i, share in enumerate(dealt) for p in share for r in p.tolist()}
    assert len(homes) == len(world.families)


def test_a_lone_group_is_run_by_all_ranks():
    world = World(((10, (40,) * 8),), -1)
    batch = world.batch()
    assert loads(batch, assign_rows(batch, world.rows(), 4, 10_000)) == [90] * 4
    # A prompt that is nearly all of it: each rank has to run it once, and gains little.
    world = World(((1000, (1, 1)),), -1)
    batch = world.batch()
    assert loads(batch, assign_rows(batch, world.rows(), 2, 10_000)) == [1001, 1001]


def test_ranks_with_less_work_run_smaller_pieces_before_empty_ones():
    world = World(((1, (99,)), (1, (99,)), (1, (9, 9)), (1, (9, 9))), -1)
    batch = world.batch()
    dealt = assign_rows(batch, world.rows(), 3, 100)
    assert sorted(loads(batch, dealt)) == [38, 100, 100]
    assert [len(share) for share in dealt] == [1, 1, 1]
    dealt = assign_rows(batch, world.rows(), 2, 100)
    assert [[len(piece) for piece in share] for share in dealt] == [[1, 2], [1, 2]]
    alone = World(((1, (9,)), (1, (9,)), (1, (9,))), -1)
    batch = alone.batch()
    dealt = assign_rows(batch, alone.rows(), 2, 10)
    assert sorted(sorted(len(piece) for piece in share) for share in dealt) == [[0, 1], [1, 1]]


def test_nothing_to_run():
    batch = World(((1, (1,)),), 0).batch()
    assert assign_rows(batch, arange(0), 3, 10) == [[], [], []]
    # Fewer rows than ranks: the others keep step with a pass over nothing.
    dealt = assign_rows(batch, arange(1), 3, 10)
    assert [[piece.tolist() for piece in share] for share in dealt] == [[[0]], [[]], [[]]]
