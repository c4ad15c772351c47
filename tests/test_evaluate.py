"""Standard errors, intervals and paired differences of validations, against other computations."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import stdev
from xml.etree import ElementTree

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from agentrl.cli import main
from agentrl.comparison import paired_difference, read_validation, rewards_of
from agentrl.config import ValConfig
from agentrl.errors import DataError
from agentrl.evaluate import evaluate
from agentrl.metrics import standard_error, t_quantile
from agentrl.store import TrajectoryStore
from agentrl.trajectory import Group, Message, Sample, Scored, Trajectory

# Student, "The Probable Error of a Mean", 1908: extra hours of sleep of ten patients under two
# drugs. R's t.test(drug_2, drug_1, paired=TRUE): 1.58, [0.7001142, 2.4598858].
DRUG_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
DRUG_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
values_of_rows = st.lists(
    st.lists(st.integers(-9, 9), min_size=1, max_size=4), min_size=2, max_size=6
)


def validation(*rewards: list[float], prompt: str = "How much?", first: int = 0) -> list[Group]:
    groups = []
    for i, row in enumerate(rewards, first):
        sample = Sample(str(i), (Message("user", prompt),), ground_truth=i, row=i)
        scored = [
            Scored(Trajectory(sample, f"e-{i}-{k}", k, (), (), (), {}, "done"), {"outcome": r}, r)
            for k, r in enumerate(row)
        ]
        groups.append(Group(sample, tuple(scored)))
    return groups


@pytest.fixture
def store(tmp_path):
    def write(name: str, groups: list[Group], step: int = 0):
        TrajectoryStore(tmp_path / name / "trajectories").write(step, groups, split="val")
        return tmp_path / name

    return write


@examples(100)
@given(values_of_rows)
def test_the_standard_error_is_the_clustered_one_of_the_literature(rows):
    """Miller's formula, pair by pair, in exact numbers, times G / (G - 1)."""
    n, clusters = sum(map(len, rows)), len(rows)
    mean = Fraction(sum(map(sum, rows)), n)
    within = sum((a - mean) * (b - mean) for row in rows for a in row for b in row)
    expected = math.sqrt(within / n**2 * Fraction(clusters, clusters - 1))
    assert standard_error(rows) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_with_one_rollout_a_row_it_is_the_usual_standard_error():
    assert standard_error([[x] for x in DRUG_1]) == pytest.approx(stdev(DRUG_1) / math.sqrt(10))
    # The same value twice in each row is no more information.
    assert standard_error([[x, x] for x in DRUG_1]) == standard_error([[x] for x in DRUG_1])
    assert math.isnan(standard_error([[1.0, 0.0]])) and math.isnan(standard_error([]))


@pytest.mark.parametrize("degrees", [*range(1, 12), 30, 99, 100, 199, 200, 201, 500, 10**5])
@pytest.mark.parametrize("p", [0.9, 0.975, 0.995])
def test_quantiles_of_student(degrees, p):
    """Against the incomplete beta function of mpmath."""
    x = mpmath.mpf(degrees) / (degrees + mpmath.mpf(t_quantile(p, degrees)) ** 2)
    half, tail = mpmath.mpf(1) / 2, mpmath.mpf(degrees) / 2
    probability = 1 - mpmath.betainc(tail, half, 0, x, regularized=True) / 2
    assert float(probability) == pytest.approx(p, abs=1e-8)


def test_a_paired_difference_is_that_of_r(store):
    first = read_validation(store("a", validation(*([x] for x in DRUG_1))))
    second = read_validation(store("b", validation(*([x] for x in DRUG_2))))
    found = paired_difference(first, second, rewards_of)
    assert found.n == 10 and found.mean == pytest.approx(1.58)
    assert (found.low, found.high) == (pytest.approx(0.7001142), pytest.approx(2.4598858))
    back = paired_difference(second, first, rewards_of)
    assert (back.low, back.high) == (pytest.approx(-found.high), pytest.approx(-found.low))


def test_rows_are_paired_by_id_and_content(store):
    first = read_validation(store("a", validation([0.0], [0.0], [0.0], [0.0])))
    second = validation([1.0], first=3) + validation([5.0], prompt="Another question?")
    found = paired_difference(first, read_validation(store("b", second)), rewards_of)
    assert (found.n, found.mean) == (1, 1.0) and math.isnan(found.low)
    other = read_validation(store("c", validation([1.0], first=9)))
    with pytest.raises(DataError, match="share no rows"):
        paired_difference(first, other, rewards_of)


def test_a_validation_is_read_by_step(store):
    folder = store("a", validation([1.0, 0.0]), step=10)
    store("a", validation([1.0, 1.0]), step=20)
    assert [len(g.scored) for g in read_validation(folder)] == [2]
    assert read_validation(folder).step == 20 and read_validation(folder, 10).step == 10
    with pytest.raises(DataError, match=r"not validated at step 15\. Its validations: 10, 20"):
        read_validation(folder, 15)
    with pytest.raises(DataError, match=r"no validation.*agentrl eval --output"):
        read_validation(folder.parent)


class Played:
    """`Rollouts` that return groups which were scored before."""

    def __init__(self, groups: list[Group]):
        self.groups = groups

    def collect(self, samples, **_):
        return self.groups


def test_an_evaluation_has_rows_and_standard_errors():
    rewards = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    played: object = Played(validation(*rewards))
    metrics = evaluate(played, [], ValConfig(n=2)).metrics  # type: ignore[arg-type]
    assert metrics["val/rows"] == 3
    assert metrics["val/reward/se@2"] == metrics["val/acc/se@2"] == standard_error(rewards)
    # The row means are 0.5, 1, 0, and rows of equal size are as good as their means.
    assert metrics["val/reward/se@2"] == pytest.approx(0.5 / math.sqrt(3))
    [first, *others] = played.groups  # type: ignore[attr-defined]
    scored = [replace(s, metrics={"format": k}) for k, s in enumerate(first.scored)]
    mixed: object = Played([replace(first, scored=tuple(scored)), *others])
    metrics = evaluate(mixed, [], ValConfig(n=2)).metrics  # type: ignore[arg-type]
    assert metrics["val/grader/format"] == 0.5
    one: object = Played(validation([1.0, 0.0]))
    alone = evaluate(one, [], ValConfig(n=2)).metrics  # type: ignore[arg-type]
    assert "val/reward/se@2" not in alone and alone["val/rows"] == 1


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def compare(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main(["compare", *map(str, words)])
        out, err = capsys.readouterr()
        assert bool(ended.value.code) == ("error:" in err), err
        return out + err

    return run


def test_compare_prints_differences_and_draws_a_picture(compare, store, tmp_path):
    store("sleep_1", validation(*([x] for x in DRUG_1)), step=10)
    store("sleep_2", validation(*([x] for x in DRUG_2)), step=20)
    output = compare("sleep_1", "sleep_2")
    lines = [line.split() for line in output.splitlines()]
    assert lines[0] == ["step", "rows", "reward", "acc"]
    assert lines[1][:6] == ["sleep_1", "10", "10", "0.750", "±", "0.566"]
    assert lines[2][:6] == ["sleep_2", "20", "10", "2.330", "±", "0.633"]
    [difference] = [x for x in output.splitlines() if x.startswith("sleep_2 - sleep_1")]
    assert difference.split()[3:7] == ["10", "+1.580", "[+0.700,", "+2.460]"]
    texts = [e.text for e in ElementTree.parse(tmp_path / "compare.svg").iter()]
    assert "sleep_1 0.75" in texts and "sleep_2 2.33" in texts
    assert "note:" not in output


def test_runs_that_differ_in_their_seeds_alone_are_one_line(compare, store):
    for name, seed, lr, rewards in [
        ("grpo-0", 0, 1e-5, (0.0, 1.0)),
        ("grpo-1", 1, 1e-5, (1.0, 1.0)),
        ("ppo-0", 0, 1e-4, (0.0, 0.0)),
    ]:
        folder = store(name, validation(*([x] for x in rewards)), step=10)
        trainer = f"trainer: {{seed: {seed}, output: runs/{name}}}"
        (folder / "config.yaml").write_text(f"optim: {{lr: {lr}}}\n{trainer}\n")
    lines = [line.split() for line in compare("grpo-0", "grpo-1", "ppo-0").splitlines()]
    assert lines[0] == [
        "step",
        "rows",
        "reward",
        "acc",
        "seeds",
        *["mean", "[95", "%", "interval]"],
    ]
    assert lines[1][:6] == ["grpo-0", "(2", "seeds)", "10", "2", "0.750"]
    # t(0.975, 1) = 12.7062, s / sqrt(2) = 0.25
    assert lines[1][-5:] == ["0.500", "1.000", "0.750", "[-2.427,", "3.927]"]
    [difference] = [line for line in lines if line[:2] == ["ppo-0", "-"]]
    assert difference[5:7] == ["2", "-0.750"]
    seeds = [line.split() for line in compare("grpo-0", "grpo-1").splitlines()]
    assert seeds[1][0] == "grpo-0" and seeds[2][0] == "grpo-1"


def test_a_difference_by_seed_has_an_interval_over_seeds(compare, store, tmp_path):
    rewards = {"a": [0.0, 0.25, 0.5], "b": [0.5, 1.0, 0.75]}
    names = [f"lr={run}-seed={seed}" for run in rewards for seed in range(3)]
    for name in names:
        run, seed = name[3], int(name[-1])
        value = rewards[run][seed]
        folder = store(name, validation([value], [value]), step=10)
        (folder / "config.yaml").write_text(f"optim: {{lr: {run}}}\ntrainer: {{seed: {seed}}}\n")
        steps = [{"step": s, "data": {"val/reward/mean@1": s / 10 * value}} for s in (0, 10)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
    lines = compare(*names).splitlines()
    # The differences are 0.5, 0.75 and 0.25: s = 0.25, t(0.975, 2) = 4.302653.
    half = 4.302653 * 0.25 / 3**0.5
    [line] = [line for line in lines if line.startswith("lr=b (3 seeds) - lr=a (3 seeds)")]
    assert line.endswith(f"+0.500 [{0.5 - half:+.3f}, {0.5 + half:+.3f}]")
    numbers = json.loads(Path("compare.json").read_text())
    assert numbers["differences"][0]["reward_by_seed"]["low"] == pytest.approx(0.5 - half)
    assert numbers["validations"][0]["over_seeds"]["mean"] == 0.25
    assert "lr=b (3 seeds)" in Path("compare.svg").read_text()


def test_one_row_has_no_interval(compare, store):
    store("a", validation([0.0]), step=10)
    store("b", validation([1.0]), step=10)
    lines = [line.split() for line in compare("a", "b").splitlines()]
    assert lines[1][:4] == ["a", "10", "1", "0.000"] and "±" not in lines[1]
    [difference] = [line for line in lines if line[:3] == ["b", "-", "a"]]
    assert difference[3:5] == ["1", "+1.000"] and not any("[" in word for word in difference)


def test_compare_says_which_rows_are_not_shared(compare, store):
    store("a", validation([0.0], [1.0], [1.0]))
    store("b", validation([1.0], [1.0]))
    assert "note: a has 3 rows, b has 2; 2 are in both" in compare("a", "b")
    store("c", validation([1.0], [1.0], prompt="Another question?"))
    output = compare("a", "c")
    assert "error: c - a: they share no rows" in output and "agentrl eval --dataset" in output


def test_compare_refuses_what_cannot_be_compared(compare, store):
    store("a", validation([0.0], [1.0]))
    assert "needs two or more folders" in compare("a")
    assert "named twice" in compare("a", "a")
    assert "must end in .svg" in compare("a", "a", "--output", "x.png")
    assert "has no validation" in compare("a", "nowhere")
