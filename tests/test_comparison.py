"""pass@k, maj@k, intervals and differences of validations, against sums over all subsets."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from agentrl.comparison import (
    Expectation,
    Validation,
    flipped_rows,
    interval_of,
    maj_at_k,
    merge_seeds,
    paired_difference,
    pass_at_k,
    rewards_of,
    shared_rows,
    tool_metrics,
    values_of,
)
from agentrl.config import ValConfig
from agentrl.errors import UserError
from agentrl.evaluate import evaluate, without_tools
from agentrl.metrics import standard_error, t_quantile
from agentrl.rewards.base import parse_score
from agentrl.store import TrajectoryStore
from agentrl.trajectory import Group, Message, Sample, Scored, Scores, Trajectory

ANSWERS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=8)


def group(answers, *, right="a", key="0", prompt="How much?", truth="1", tools=()):
    """A row whose rollouts give these answers; None: the reward returns no answer."""
    sample = Sample(key, (Message("user", prompt),), ground_truth=truth, row=int(key), tools=tools)
    scored = []
    for k, answer in enumerate(answers):
        trajectory = Trajectory(sample, f"e-{key}-{k}", k, (), (), (), {}, "done")
        value = float(answer == right)
        scored.append(Scored(trajectory, {"outcome": value}, value, answer=answer))
    return Group(sample, tuple(scored))


def majority(votes, right):
    """The probability that a vote is right, if one of the most common answers is drawn."""
    most = max(map(votes.count, votes))
    winners = [a for a in set(votes) if votes.count(a) == most]
    return (right in winners) / len(winners)


@examples(200)
@given(ANSWERS, st.integers(1, 8))
def test_pass_and_maj_are_means_over_all_subsets(answers, k):
    subsets = [*combinations(answers, min(k, len(answers)))]
    found = group(answers)
    expected = sum("a" in subset for subset in subsets) / len(subsets)
    assert pass_at_k(found, k) == pytest.approx(expected, abs=1e-12)
    expected = sum(majority(subset, "a") for subset in subsets) / len(subsets)
    assert maj_at_k(found, k) == pytest.approx(expected, abs=1e-12)


def test_maj_of_many_different_answers_is_fast():
    many = group([str(i) for i in range(63)] + ["a"])
    assert maj_at_k(many, 32) == pytest.approx(1 / 64)  # all answers tie


def test_values_need_answers_for_maj_and_several_rollouts_for_pass():
    assert [*values_of([group(["a"])])] == ["reward", "acc"]
    assert [*values_of([group("abab"), group("aba")])] == ["reward", "acc", "pass@2", "maj@2"]
    assert [*values_of([group("abab"), group(["a", "b", None, "a"])])][2:] == ["pass@4"]


def test_a_reward_returns_the_answer_as_text():
    assert Scores(1.0).answer is None
    numbers = parse_score("it", {"score": 1, "answer": 12, "acc": 1})
    assert (numbers.answer, numbers.metrics) == ("12", {"acc": 1.0})
    assert parse_score("it", {"score": 1, "pred": "x+1"}).answer == "x+1"  # as verl's graders
    assert parse_score("it", {"score": 1, "answer": ""}).answer == ""


def test_the_answer_is_stored(tmp_path):
    groups = [group(["a", "12"]), group([None], key="1")]
    groups[0] = replace(
        groups[0], scored=tuple(replace(s, metrics={"acc": 1.0}) for s in groups[0].scored)
    )
    TrajectoryStore(tmp_path).write(0, groups, split="val")
    read = [rollout.scored for rollout in TrajectoryStore(tmp_path).read()]
    assert [(s.answer, s.metrics) for s in read] == [
        ("a", {"acc": 1.0}),
        ("12", {"acc": 1.0}),
        (None, {}),
    ]


class Played:
    """`Rollouts` that return groups which were scored before."""

    def __init__(self, **splits):
        self.splits, self.samples = splits, {}

    def collect(self, samples, *, tag, **_):
        self.samples[tag] = samples
        return self.splits[tag]


def test_metrics_of_an_evaluation_have_standard_errors():
    groups = [group(row, key=str(i)) for i, row in enumerate(["aabb", "abbb", "bbbb"])]
    played: object = Played(val=groups)
    metrics = evaluate(played, [], ValConfig(n=4, greedy=False)).metrics  # type: ignore[arg-type]
    # Pairs with an `a`: 5 of 6, 3 of 6, 0. Votes of four: a tie, b, b.
    assert metrics["val/acc/pass@2"] == pytest.approx((5 / 6 + 3 / 6 + 0) / 3)
    assert metrics["val/acc/pass@2/se"] == pytest.approx(standard_error([[5 / 6], [3 / 6], [0]]))
    assert metrics["val/acc/maj@4"] == pytest.approx(0.5 / 3)
    no_answers: object = Played(val=[group([None] * 4)])
    metrics = evaluate(no_answers, [], ValConfig(n=4, greedy=False)).metrics  # type: ignore[arg-type]
    assert not any("/maj@" in name for name in metrics)


# -- tools ----------------------------------------------------------------------------------------


def test_rows_without_tools_are_played_with_the_same_seeds_and_compared_by_row():
    rows = [
        Sample(str(i), (Message("user", "?"),), tools=("t",) * (i < 3), row=i) for i in range(4)
    ]
    assert [(s.row, s.tools) for s in without_tools(rows)] == [(0, ()), (1, ()), (2, ())]
    with_tools = [group(a, key=str(i)) for i, a in enumerate(["a", "a", "a", "b"])]
    bare = [group(a, key=str(i)) for i, a in enumerate(["a", "b", "b"])]
    played: object = Played(val=with_tools, without=bare)
    val = ValConfig(greedy=False, without_tools=True)
    result = evaluate(played, rows, val)  # type: ignore[arg-type]
    assert result.splits["without"] is bare
    assert result.metrics["val_without_tools/reward/mean@1"] == pytest.approx(1 / 3)
    # The differences are 0, 1, 1; the fourth row has no tools.
    half = t_quantile(0.975, 2) * math.sqrt(1 / 3) / math.sqrt(3)
    assert result.metrics["val/tool_dependence"] == pytest.approx(2 / 3)
    assert result.metrics["val/tool_dependence/low"] == pytest.approx(2 / 3 - half)
    assert result.metrics["val/tool_dependence/high"] == pytest.approx(2 / 3 + half)
    one = tool_metrics(with_tools[:1], bare[:1])
    assert one == {"val/tool_dependence": 0.0, "val/tool_dependence/calls": 0.0}
    assert tool_metrics(with_tools[3:], bare) == {}  # all rollouts of these rows were dropped


def test_other_prompts_pair_rows_by_id_and_truth():
    first = Validation(0, {"0": [group("a")], "1": [group("a", key="1", truth="2")]})
    second = Validation(
        0, {"0": [group("a", prompt="Compute:")], "1": [group("a", key="1", truth="3")]}
    )
    assert shared_rows(first, second) == [] and shared_rows(first, second, same_prompts=False) == [
        "0"
    ]


def test_a_row_passes_if_more_than_half_of_its_rollouts_do():
    rows = {"0": ("ab", "aab"), "1": ("aa", "ab"), "2": ("ab", "bb"), "3": ("a", "a")}
    first, second = (
        Validation(0, {key: [group(row[i], key=key)] for key, row in rows.items()}) for i in (0, 1)
    )
    assert flipped_rows(first, second, [*rows]) == (["0"], ["1"])


def test_pass_at_k_over_seeds_is_that_of_one_policy():
    """Two policies that each pass with both rollouts or none: pass@2 is 1/2, not 5/6."""
    seeds = [Validation(0, {"0": [group(answers)]}) for answers in ("aa", "bb")]
    merged = merge_seeds(seeds)
    values = values_of([*merged])
    assert [*values] == ["reward", "acc", "pass@2", "maj@2"]
    assert {name: merged.values(value, "0") for name, value in values.items()} == {
        "reward": [1.0, 1.0, 0.0, 0.0],
        "acc": [1.0, 1.0, 0.0, 0.0],
        "pass@2": [1.0, 0.0],
        "maj@2": [1.0, 0.0],
    }
    single = merge_seeds([Validation(0, {"0": [group(a)]}) for a in ("a", "b")])
    assert [*values_of([*single])] == ["reward", "acc"], "no policy has two rollouts"
    assert paired_difference(single, seeds[0], rewards_of).mean == 0.5


# -- expectations ---------------------------------------------------------------------------------

METRICS = {
    "val/rows": 10.0, "val/reward/mean@4": 0.8, "val/reward/se@4": 0.05, "val/num_turns": 2.0,
    "val/acc/pass@4": 0.9, "val/acc/pass@4/se": 0.02, "val/tool_dependence": 0.3,
    "val/tool_dependence/low": 0.1, "val/tool_dependence/high": 0.5,
    "val-core/my/source/rows": 4.0, "val-core/my/source/acc/mean@4": 1.0,
    "val-core/my/source/acc/se@4": 0.0,
}  # fmt: skip


def test_an_expectation_tests_the_end_of_the_interval():
    half = 2.262157 * 0.05  # t(0.975, 9)
    low, high = interval_of(METRICS, "val/reward/mean@4")
    assert (low, high) == (pytest.approx(0.8 - half), pytest.approx(0.8 + half))
    for text, kept in [
        (f"val/reward/mean@4>={low - 1e-6}", True),
        (f"val/reward/mean@4>={low + 1e-6}", False),
        (f" val/reward/mean@4 <= {high + 1e-6} ", True),
        (f"val/reward/mean@4<={high - 1e-6}", False),
        ("val/tool_dependence>=0.1", True),
        ("val/tool_dependence>=1.1e-1", False),
        ("val/acc/pass@4>=0.85", True),
        ("val/acc/pass@4>=0.88", False),
    ]:
        assert Expectation.parse(text).check(METRICS)[0] is kept, text
    assert "not >= 0.9" in Expectation.parse("val/reward/mean@4>=0.9").check(METRICS)[1]


@pytest.mark.parametrize("rows", [2, 4, 100])
def test_equal_rows_are_no_certainty(rows):
    """R successes of R: Clopper and Pearson's end, by the incomplete beta function of mpmath."""
    metrics = {"v/rows": rows, "v/acc/mean@1": 1.0, "v/acc/se@1": 0.0}
    low, high = interval_of(metrics, "v/acc/mean@1")
    assert mpmath.betainc(rows, 1, 0, low, regularized=True) == pytest.approx(0.025) and high == 1
    low, high = interval_of(metrics | {"v/acc/mean@1": 0.0}, "v/acc/mean@1")
    assert mpmath.betainc(1, rows, 0, high, regularized=True) == pytest.approx(0.975) and low == 0
    assert interval_of(METRICS, "val-core/my/source/acc/mean@4")[0] == pytest.approx(0.025**0.25)


@pytest.mark.parametrize(
    "text",
    ["val/x", "val/x>0.9", "val/x==1", "val/x>=", "val/x>=nan", "val/x>=inf", ">=1", "a>=1>=2", ""],
)
def test_an_expectation_of_another_form_is_refused(text):
    with pytest.raises(UserError, match="must be METRIC>=NUMBER or METRIC<=NUMBER"):
        Expectation.parse(text)


def test_metrics_that_cannot_be_expected_are_named():
    with pytest.raises(UserError, match=r"no metric 'val/reward/mean@1'\. Did you mean .*mean@4"):
        interval_of(METRICS, "val/reward/mean@1")
    with pytest.raises(UserError, match="needs a reward that returns an `answer`"):
        interval_of(METRICS, "val/acc/maj@4")
    with pytest.raises(UserError, match=r"num_turns = 2 has no interval.*val/acc/pass@4"):
        interval_of(METRICS, "val/num_turns")
    with pytest.raises(UserError, match="has no interval"):  # one row
        interval_of({"val/rows": 1.0, "val/reward/mean@1": 1.0}, "val/reward/mean@1")
