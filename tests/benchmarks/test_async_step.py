"""The benchmark of overlapping steps: its simulation, and that the measured steps overlap."""

# pyright: reportMissingImports=false

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "async_step", raising=False)
    import async_step

    return async_step


def test_the_simulation_of_equal_times(module):
    """A step of one draw: generation takes 1, then the update 1."""
    assert module.simulate([[1.0]] * 3, 1, 0) == [2.0, 4.0, 6.0]
    assert module.simulate([[1.0]] * 3, 1, 1) == [2.0, 3.0, 4.0]


def test_the_simulation_waits_for_the_draw_whose_turn_it_is(module):
    """With one slot, draws are played one after another; the second one takes 5."""
    draws = [[1.0], [5.0], [0.5]]
    assert module.simulate(draws, 1, 0) == [2.0, 8.0, 9.5]
    assert module.simulate(draws, 1, 1) == [2.0, 7.0, 8.0]
    # Two slots and draws of two rollouts: a slot is free before the draw has ended.
    assert module.simulate([[1.0, 3.0], [1.0, 1.0]], 1, 1) == [4.0, 5.0]


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0])
def test_overlap_reaches_the_bounds_without_overhead(module, sigma):
    draws = module.draw_seconds(60, 8, 8, sigma)
    zero, one, two = (module.rate(module.simulate(draws, 8, k)) for k in (0, 1, 2))
    assert zero == pytest.approx(0.5, abs=0.01)
    assert one > {0.0: 0.99, 0.5: 0.9, 1.0: 0.85}[sigma] and two > 0.95


def test_measured_steps_overlap(module):
    draws = module.draw_seconds(6, 2, 2, 0.5)
    alternating, metrics = module.run(draws, 2, 0, 0.2)
    overlapping, measured = module.run(draws, 2, 2, 0.2)
    assert not metrics and 0 < measured["staleness/mean"] <= 2
    assert module.rate(overlapping) > 1.3 * module.rate(alternating)
