"""The learning curve is a small, valid picture of the numbers in metrics.jsonl."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from agentrl.observers.curve import (
    MAX_POINTS,
    _smooth,
    _thin,
    validation_points,
    validation_series,
    write_comparison,
    write_curve,
)

SVG = "{http://www.w3.org/2000/svg}"


def draw(folder: Path, steps: list[tuple[int, dict]]) -> tuple[str, list[str]]:
    """The picture's text and the texts within it."""
    metrics, picture = folder / "metrics.jsonl", folder / "curve.svg"
    metrics.write_text("".join(json.dumps({"step": s, "data": d}) + "\n" for s, d in steps))
    write_curve(metrics, picture)
    svg = picture.read_text(encoding="utf-8")
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        assert element.tag != f"{SVG}script"
        for name, value in element.attrib.items():  # nothing is loaded from elsewhere
            assert not name.endswith("href") or value.startswith("#")
    assert "nan" not in svg and "inf" not in svg
    return svg, [e.text or "" for e in root.iter(f"{SVG}text")]


def test_validation_series_by_label():
    keys = [
        "val/tool_agent/reward/mean@4",
        "val/reward/mean@4",
        "val/react/reward/mean@4",
        "val/react/acc/mean@4",
        "val/react/acc/pass@4",
        "val_greedy/reward/mean@1",
        "val_greedy/react/reward/mean@1",
        "val-core/gsm8k/reward/mean@4",
        "critic/score/mean",
    ]
    assert list(validation_series(keys).items()) == [
        ("validation", "val/reward/mean@4"),
        ("react", "val/react/reward/mean@4"),
        ("tool_agent", "val/tool_agent/reward/mean@4"),
        ("greedy", "val_greedy/reward/mean@1"),
    ]
    only = ["val/reward/mean@1", "val/react/reward/mean@1"]
    assert list(validation_series(only)) == ["validation"]


def run(steps: int, every: int, agents: list[str]) -> list[tuple[int, dict]]:
    rng = random.Random(0)
    rows: list[tuple[int, dict]] = []
    for step in range(steps + 1):
        data = {} if step == 0 else {"critic/score/mean": rng.random()}
        if step % every == 0:
            data |= {f"val/{a}/reward/mean@1": rng.random() for a in agents}
            data |= {"val/reward/mean@1": 0.5, "val_greedy/reward/mean@1": 0.75}
        rows.append((step, data))
    return rows


def test_lines_legend_and_ticks(tmp_path):
    svg, texts = draw(tmp_path, run(140, 20, ["react", "tool_agent"]))
    labels = [re.sub(r" [\d.]+$", "", t) for t in texts[-5:]]
    training = "training (thick: mean of 9 steps)"
    assert labels == [training, "validation", "react", "tool_agent", "greedy"]
    assert "greedy 0.75" in texts and tmp_path.name in texts
    assert {"0", "0.2", "1", "20", "140", "step", "reward"} <= set(texts)
    assert len(svg) < 30_000
    assert "fill: #ffffff" not in svg and "stroke: #000000" not in svg, "for white and for black"


def test_the_same_numbers_make_the_same_file(tmp_path):
    steps = run(20, 5, ["react"])
    assert draw(tmp_path, steps)[0] == draw(tmp_path, steps)[0]


def test_drawing_leaves_matplotlib_as_it_was(tmp_path):
    import matplotlib

    had_pyplot = "matplotlib.pyplot" in sys.modules
    before = matplotlib.rcParams.copy()
    draw(tmp_path, run(20, 5, ["react"]))
    assert matplotlib.rcParams.copy() == before
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


def test_a_long_run_stays_small(tmp_path):
    agents = [f"an_agent_with_a_long_name_{i}" for i in range(30)]
    svg, texts = draw(tmp_path, run(20_000, 10, agents))
    assert len(svg) < 50_000
    assert {"0", "5,000", "20,000"} <= set(texts)


@pytest.mark.parametrize("steps", [[], [(0, {})], [(3, {"critic/score/mean": None})]])
def test_a_curve_without_steps(tmp_path, steps):
    assert "no steps yet" in draw(tmp_path, steps)[1]
    write_curve(tmp_path / "missing.jsonl", tmp_path / "curve.svg")


def test_one_step(tmp_path):
    assert "training 0.50" in draw(tmp_path, [(1, {"critic/score/mean": 0.5})])[1]


def test_rewards_beyond_zero_and_one(tmp_path):
    _, texts = draw(tmp_path, [(1, {"critic/score/mean": -3}), (2, {"critic/score/mean": 12})])
    assert {"0", "10", "-5"} <= set(texts)


def test_hostile_names_are_text(tmp_path):
    name = '<script>alert("x")<script>&\x00\u202e'
    keys = [f"val/{label}/reward/mean@1" for label in (name, "svg>")]
    svg, texts = draw(tmp_path, [(1, dict.fromkeys(keys, 1.0))])
    assert "<script" not in svg and "\x00" not in svg
    assert any(t.startswith('<script>alert("x")') for t in texts)


@pytest.mark.parametrize("name", ["_hidden", "$x_1$", "\N{HIRAGANA LETTER A}", "a" * 200])
def test_every_name_is_in_the_legend(tmp_path, name, recwarn):
    _, texts = draw(tmp_path, [(1, {f"val/{name}/reward/mean@1": 1.0})])
    assert texts[-1] == f"{name[:40]} 1.00"
    assert not recwarn.list


@examples(25)
@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.floats(allow_nan=True, allow_infinity=True)),
        max_size=30,
        unique_by=lambda p: p[0],
    )
)
def test_any_numbers_make_a_valid_picture(tmp_path_factory, points):
    folder = tmp_path_factory.mktemp("curve")
    draw(folder, [(s, {"critic/score/mean": v, "val/reward/mean@1": v}) for s, v in sorted(points)])


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 1, "0 0.2 0.4 0.6 0.8 1"), (-3, 12, "-5 0 5 10 15"), (0, 4e6, "0 1,000,000 2,000,000")],
)
def test_ticks_are_round_and_span_the_values(tmp_path, low, high, ticks):
    steps = [(1, {"critic/score/mean": low}), (2, {"critic/score/mean": high})]
    _, texts = draw(tmp_path, steps)
    numbers = texts[texts.index("step") + 1 : texts.index("reward")]
    assert numbers[: len(ticks.split())] == ticks.split()
    values = [float(number.replace(",", "")) for number in numbers]
    assert values[0] <= low and values[-1] >= high


def test_a_smoothed_value_is_the_mean_that_the_legend_names(tmp_path):
    steps = [(i, {"critic/score/mean": float(i * i)}) for i in range(1, 82)]
    _, texts = draw(tmp_path, steps)
    # 81 steps: windows of 3 on each side, at the end of the last step and the 3 before it.
    last = sum(i * i for i in range(78, 82)) / 4
    assert f"training (thick: mean of 7 steps) {last:.2f}" in texts


def test_the_axis_fits_small_differences(tmp_path):
    steps = [(i, {"val/reward/mean@1": 0.9 + i / 1000}) for i in range(10)]
    _, texts = draw(tmp_path, steps)
    rewards = texts[texts.index("step") + 1 : texts.index("reward")]
    assert rewards[0] == "0.9" and rewards[-1] == "0.91"


def test_runs_are_compared_in_one_picture(tmp_path):
    for name, value in (("training", 0.25), ("b", 0.75)):
        (tmp_path / name).mkdir()
        lines = [{"step": s, "data": {"val/reward/mean@4": value * s}} for s in range(2)]
        text = "\n".join(map(json.dumps, lines))
        (tmp_path / name / "metrics.jsonl").write_text(text + "\n")
    runs = {n: validation_points(tmp_path / n / "metrics.jsonl") for n in ("training", "b")}
    assert runs["b"] == [(0.0, 0.0), (1.0, 0.75)]
    write_comparison(runs, tmp_path / "compare.svg")
    texts = [e.text for e in ElementTree.parse(tmp_path / "compare.svg").iter(f"{SVG}text")]
    assert texts[-2:] == ["training 0.25", "b 0.75"] and "validation" in texts


def test_smoothing_and_thinning_keep_ends_and_level():
    flat = [(float(i), 0.5) for i in range(1000)]
    assert [y for _, y in _smooth(flat)] == pytest.approx([0.5] * 1000)
    ramp = [(float(i), float(i)) for i in range(1000)]
    thin = _thin(ramp)
    assert len(thin) == MAX_POINTS and thin[0] == ramp[0] and thin[-1] == ramp[-1]
    assert thin == sorted(thin)
