"""Draws by measured success: exact rates, epochs, weights of files, and the state."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from agentrl.data import Curriculum, RowOrder

BAND = {"low": 0.1, "high": 0.9, "decay": 0.5, "floor": 0.1}


def curriculum(n=8, seed=0, shuffle=True, weights=(), **keys) -> Curriculum:
    return Curriculum(RowOrder(n, seed, shuffle, tuple(weights)), **{**BAND, **keys})


def play(c: Curriculum, successes, draws: int, batch: int = 4) -> list[int]:
    """Draw rows in steps, each of which is committed with the success of its rows."""
    rows = []
    for _ in range(draws // batch):
        taken = c.take(c.position, batch)
        rows += taken
        c.commit(c.position + batch, [(row, successes[row]) for row in taken])
    return rows


def test_rows_in_the_band_are_drawn_once_an_epoch_in_another_order():
    rows = play(curriculum(), [0.5] * 8, 32)
    epochs = [tuple(rows[i : i + 8]) for i in range(0, 32, 8)]
    assert all(sorted(epoch) == [*range(8)] for epoch in epochs) and len({*epochs}) == 4
    assert rows != play(curriculum(seed=1), [0.5] * 8, 32)
    in_order = play(curriculum(shuffle=False), [0.5] * 8, 32)
    assert in_order == [*range(8)] * 4


@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_outside_of_the_band_are_drawn_at_the_floor(shuffle):
    """In an interval of length 1, each of 4 rows in the band, and 4 of the 40 others."""
    successes = [0.5] * 4 + [0.0] * 20 + [1.0] * 20
    rows = play(curriculum(44, shuffle=shuffle), successes, 44 + 40 * 8, 4)
    assert sorted(rows[:44]) == [*range(44)], "first each row once"
    played = Counter(rows[44:])
    assert all(39 <= played[row] <= 41 for row in range(4))
    assert all(3 <= played[row] <= 5 for row in range(4, 44)), "no row is lost"


def test_a_row_that_becomes_learnable_is_drawn_as_often_as_others():
    c, successes = curriculum(), [0.0] * 4 + [0.5] * 4
    play(c, successes, 80)
    assert c.metrics()["curriculum/too_hard"] == 4
    successes[:4] = [0.5] * 4
    before = Counter(play(c, successes, 88))  # each hard row is drawn again within 10 epochs
    assert c.metrics()["curriculum/in_band"] == 8 and all(before[row] for row in range(4))
    assert Counter(play(c, successes, 80)) == pytest.approx(dict.fromkeys(range(8), 10), abs=1)


def test_the_weights_of_files_multiply():
    """A row of the first file is drawn two times as often, in the band and outside of it."""
    c = curriculum(20, weights=[(10, 2.0), (10, 1.0)])
    successes = ([0.5] * 5 + [1.0] * 5) * 2
    play(c, successes, 40)
    played = Counter(play(c, successes, 1320))  # 80 intervals of 10 + 1 + 5 + 0.5 draws
    for rows, times in (
        (range(5), 160),
        (range(5, 10), 16),
        (range(10, 15), 80),
        (range(15, 20), 8),
    ):
        assert all(abs(played[row] - times) <= 3 for row in rows)


def test_success_is_a_decaying_mean_and_pools_are_closed_intervals():
    c = curriculum(5, shuffle=False, decay=0.75)
    c.take(0, 5)
    c.commit(5, [(0, 0.1), (1, 0.9), (2, 0.0), (3, 1.0)])
    names = ("not_played", "too_hard", "in_band", "too_easy")
    assert [c.metrics()[f"curriculum/{name}"] for name in names] == [1, 1, 2, 1]
    c.commit(5, [(2, 0.4), (3, 0.5)])  # 0.75 * 0 + 0.25 * 0.4 = 0.1; 0.75 + 0.125 = 0.875
    assert [c.metrics()[f"curriculum/{name}"] for name in names] == [1, 0, 4, 0]
    c.commit(5, [(3, 1.2), (2, -4.0)])  # rewards need not be in [0, 1]: 0.956, -0.925
    assert [c.metrics()[f"curriculum/{name}"] for name in names] == [1, 1, 2, 1]


def test_draws_ahead_of_a_step_stay_when_weights_change():
    c = curriculum(6)
    first = c.take(0, 4)
    ahead = c.take(4, 4)
    assert c.take(0, 8) == first + ahead, "a draw is made once"
    c.commit(4, [(row, 1.0) for row in first])
    assert c.take(4, 4) == ahead
    later = c.take(8, 6)
    c.commit(8, [(row, 1.0) for row in ahead])
    assert c.take(8, 6) == later and c.position == 8


@given(
    st.integers(0, 99),
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=12),
    st.integers(0, 11),
    st.booleans(),
)
@examples(60)
def test_a_loaded_state_draws_the_same_rows(tmp_path_factory, seed, n, steps, at, shuffle):
    """`steps`: how many rows each takes, and how many more are drawn ahead."""

    def run(c: Curriculum, part) -> list[list[int]]:
        taken = []
        for count, more in part:
            taken.append(c.take(c.position, count + more)[:count])
            success = [(row, (row * 7 + c.position) % 5 / 4) for row in taken[-1]]
            c.commit(c.position + count, success)
        return taken

    whole, first, second = (curriculum(n, seed, shuffle) for _ in range(3))
    folder = tmp_path_factory.mktemp("state")
    run(first, steps[:at])
    first.save(folder)
    second.position = first.position
    second.load(folder)
    assert run(whole, steps)[at:] == run(second, steps[at:])
    assert whole.metrics() == second.metrics()
    assert whole.take(whole.position, 20) == second.take(second.position, 20)


def test_without_a_state_all_rows_are_new(tmp_path):
    c = curriculum(4)
    c.load(tmp_path)
    assert c.metrics()["curriculum/not_played"] == 4 and sorted(c.take(0, 4)) == [0, 1, 2, 3]


def test_many_rows_are_fast():
    """A million rows: a draw searches all of them, in less than a tenth of a second."""
    import time

    c = curriculum(1_000_000)
    start = time.process_time()
    rows = c.take(0, 64)
    assert len({*rows}) == 64 and time.process_time() - start < 6.4
    assert not math.isnan(c.metrics()["curriculum/not_played"])
