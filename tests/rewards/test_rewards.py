from __future__ import annotations

import asyncio
import logging
import math
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.trajectories import make_trajectory, row, turn

from agentrl import registry
from agentrl.config import RewardConfig
from agentrl.errors import (
    ConfigError,
    DataError,
    EngineError,
    RegistryError,
    UserCodeError,
    UserError,
)
from agentrl.rewards import GRADERS, Grader, Scorer, check_graders, reward
from agentrl.rewards.base import num_turns
from agentrl.rewards.gsm8k import compute_score
from agentrl.trajectory import (
    Message,
    Scored,
    ToolCall,
    ToolResult,
    Trajectory,
)


def score(trajectory: Trajectory, policy=None, **config: Any) -> Scored:
    return asyncio.run(Scorer(RewardConfig(**config), policy).score(trajectory))


@pytest.fixture
def registered():
    """`registered(f)` registers a function for the length of a test and returns its name."""

    def register(function) -> str:
        name = getattr(function, "__name__", "odd")
        assert reward(name)(function) is function
        return name

    return register


@pytest.fixture
def file(tmp_path):
    """`file(text)` writes a user's file and returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "my.py"
        path.write_text(text)
        return path

    return write


# -- gsm8k ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kwargs", "expected"),
    [
        ("#### 12", {}, (1.0, 1.0)),
        ("3*4 = 12.\n#### 12", {}, (1.0, 1.0)),
        ("#### 7\nno:\n#### 12", {}, (1.0, 1.0)),
        ("#### 12\nno:\n#### 7", {}, (0.0, 0.0)),
        ("#### 7", {}, (0.0, 0.0)),
        ("#### 7", {"format_score": 0.1}, (0.1, 0.0)),
        ("it is 12", {"format_score": 0.1}, (0.0, 0.0)),
        ("it is 12", {"method": "flexible"}, (1.0, 1.0)),
        ("it is 12.", {"method": "flexible"}, (1.0, 1.0)),
        ("12 is wrong, 7", {"method": "flexible", "format_score": 0.1}, (0.1, 0.0)),
        ("#### 12", {"score": 2.0}, (2.0, 1.0)),
        ("#### $1,2", {}, (1.0, 1.0)),
        ("#### 12.0", {}, (0.0, 0.0)),
        ("", {}, (0.0, 0.0)),
        ("#### 12" + "." * 301, {}, (0.0, 0.0)),
    ],
)
def test_gsm8k(text, kwargs, expected):
    result = compute_score(text, "12", **kwargs)
    assert (result["score"], result["acc"]) == expected


@given(st.text(max_size=400), st.text("#### 12,.$-\n", max_size=20))
def test_only_the_end_of_the_text_counts(before, end):
    tail = (before + end)[-300:]
    for method in ("strict", "flexible"):
        assert compute_score(before + end, "12", method) == compute_score(tail, "12", method)


# -- what a grader sees --------------------------------------------------------------------------


def test_only_what_the_assistant_wrote_is_judged():
    messages = [
        ("assistant", "let me ask"),
        ("tool", "#### 12"),
        ("assistant", "hm"),
        ("user", "it is #### 12"),
    ]
    assert score(make_trajectory(*messages)).reward == 0.0
    assert score(make_trajectory(*messages, ("assistant", "#### 12"))).reward == 1.0


def test_few_shot_answers_in_the_prompt_are_not_the_assistants():
    prompt = (Message("user", "3*4?"), Message("assistant", "#### 12"), Message("user", "again"))
    assert score(make_trajectory(("assistant", "no"), sample=row(prompt=prompt))).reward == 0.0


SEEN: list[dict[str, Any]] = []


def test_a_compute_score_gets_verls_arguments(registered):
    def verls(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        SEEN.append({"kwargs": kwargs, **extra_info})
        assert (data_source, solution_str, ground_truth) == ("mine", "a\nb\n#### 12", "12")
        return {"score": 0.5, "acc": True, "length": 3, "pred": "12", "odd": math.nan}

    SEEN.clear()
    turns = (
        turn(
            tool_calls=(ToolCall("f", {}), ToolCall("f", {})),
            tool_results=(ToolResult("1", reward=0.25), ToolResult("2")),
            rewards={"tool": 0.25},
        ),
        turn(rewards={"turn": 0.5}),
        turn(),
    )
    trajectory = make_trajectory(
        ("assistant", "a"),
        ("tool", "1"),
        ("tool", "2"),
        ("assistant", "b"),
        ("user", "and?"),
        ("assistant", "#### 12"),
        sample=row(data_source="mine", extra={"index": 3}),
        turns=turns,
        stop_reason="turns",
    )
    scored = score(trajectory, function=registered(verls), kwargs={"style": "x"})
    assert [
        {
            "kwargs": {"style": "x"},
            "index": 3,
            "num_turns": 6,
            "turn_scores": [0.0, 0.5, 0.0],
            "tool_rewards": [0.25],
            "stop_reason": "turns",
            "messages": [m.as_dict() for m in trajectory.messages],
            "final_text": "#### 12",
        }
    ] == SEEN
    assert SEEN[0]["messages"][2:4] == [
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "1"},
    ]
    assert scored.rewards == {"outcome": 0.5, "turn": 0.5, "tool": 0.25}
    assert scored.metrics == {"acc": 1.0, "length": 3.0}


@pytest.mark.parametrize(
    ("roles", "expected"),
    [("a", 2), ("ata", 4), ("attta", 4), ("ataua", 6), ("at", 3), ("aa", 3)],
)
def test_num_turns_as_verl_counts(roles, expected):
    names = {"a": "assistant", "t": "tool", "u": "user"}
    assert num_turns(make_trajectory(*((names[r], "x") for r in roles))) == expected


def by_solution(solution_str):
    return len(solution_str)


def by_keywords(**kwargs):
    return len(kwargs["solution_str"]) + len(kwargs["data_source"])


async def by_waiting(solution_str, ground_truth):
    await asyncio.sleep(0)
    return {"score": len(solution_str)}


def by_trajectory(trajectory):
    return len(trajectory.turns)


async def by_any_name(t, /, *, bonus=0):
    return len(t.turns) + bonus


@pytest.mark.parametrize(
    ("function", "expected"),
    [(by_solution, 3), (by_keywords, 15), (by_waiting, 3), (by_trajectory, 1), (by_any_name, 1)],
)
def test_the_parameters_say_how_a_reward_is_called(registered, function, expected):
    assert (
        score(make_trajectory(("assistant", "abc")), function=registered(function)).reward
        == expected
    )


# -- start-up ------------------------------------------------------------------------------------


def no_parameters():
    return 1.0


def trls(prompts, completions, **kwargs):
    """The columns are there, and the completion has all messages after the prompt."""
    assert [prompt[-1]["role"] for prompt in prompts] == ["user"]
    assert kwargs["answer"] == ["12"] and kwargs["data_source"] == ["openai/gsm8k"]
    return [float(len(completion)) for completion in completions]


def trls_keywords(*, completions, answer, bonus=1.0, **kwargs):
    pairs = zip(completions, answer, strict=True)
    return [bonus * (c[-1]["content"] == a) for c, a in pairs]


def trls_closed(completions):
    return [None for _ in completions]


async def trls_wrong(completions):
    return 1.0


def keyword_only(*, bonus):
    return bonus


def demanding(trajectory, threshold):
    return threshold


@pytest.mark.parametrize(
    ("function", "kwargs", "says"),
    [
        (by_any_name, {"bonis": 1}, "unknown argument 'bonis'. Did you mean 'bonus'?"),
        (demanding, {}, "missing argument 'threshold'"),
        (demanding, {"trajectory": 1}, "argument 'trajectory' is passed by agentrl"),
        (by_solution, {"solution_str": "x"}, "argument 'solution_str' is passed by agentrl"),
        (no_parameters, {}, "its parameters are (), but it must take the trajectory first, or"),
        (keyword_only, {}, "its parameters are (bonus), but it must take the trajectory first"),
        (trls_closed, {"completion": 1}, "unknown argument 'completion'"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused(registered, function, kwargs, says):
    with pytest.raises(ConfigError) as caught:
        Scorer(RewardConfig(function=registered(function), kwargs=kwargs))
    assert says in str(caught.value) and function.__name__ in str(caught.value)


def test_unknown_kwargs_of_a_grader_are_refused_before_anything_runs():
    scorer = Scorer(RewardConfig(kwargs={"format_scor": 0.1}))
    with pytest.raises(ConfigError, match=r"'format_scor'. Did you mean 'format_score'"):
        check_graders([row()], scorer)


def test_a_wrong_value_of_a_graders_kwargs_is_found_by_the_check():
    with pytest.raises(ConfigError, match=r"'stict' is unknown. Did you mean 'strict'"):
        check_graders([row()], Scorer(RewardConfig(kwargs={"method": "stict"})))


def test_rows_without_a_grader_are_refused_with_the_choices():
    rows = [row(data_source="openai/gsm8", row=i) for i in range(5)] + [row(data_source="", row=9)]
    with pytest.raises(DataError) as caught:
        check_graders([row(), *rows], Scorer(RewardConfig()), "train.jsonl")
    first, second = str(caught.value).splitlines()
    assert first.startswith(
        "train.jsonl: rows 0, 1, 2, ... (5 in all): no grader for data_source 'openai/gsm8'."
        " Did you mean 'openai/gsm8k'? Known: openai/gsm8k, agentrl/arithmetic, lighteval/MATH,"
    )
    assert "reward.function" in first and "path.py:function" in first
    assert second.startswith("train.jsonl: row 9: no data_source.")


@pytest.mark.parametrize(
    ("function", "kwargs", "expected"),
    [(trls, {}, 3.0), (trls_keywords, {"bonus": 2}, 2.0), (trls_closed, {}, 0.0)],
)
def test_a_reward_with_trls_signature_gets_lists_of_one(registered, function, kwargs, expected):
    sample = row(extra={"answer": "12"})
    messages = ("assistant", "a"), ("tool", "1"), ("assistant", "12")
    own = make_trajectory(*messages, sample=sample)
    assert score(own, function=registered(function), kwargs=kwargs).reward == expected


def test_a_reward_with_trls_signature_says_what_is_missing(registered):
    own = make_trajectory(("assistant", "12"), sample=row(extra={"solution": "12"}))
    with pytest.raises(
        UserCodeError, match=r"needs the column 'answer'\. The row has: comp.*solution"
    ):
        score(own, function=registered(trls_keywords))
    with pytest.raises(UserCodeError, match="it must return a list with a score"):
        score(own, function=registered(trls_wrong))
    own = make_trajectory(("assistant", "12"), sample=row(extra={"completions": "11"}))
    with pytest.raises(UserCodeError, match="the row's column 'completions' is not the argument"):
        score(own, function=registered(trls_closed))


def test_an_environment_that_scores_itself_needs_no_grader():
    own = make_trajectory(("assistant", "a"), tool_reward=2.0, sample=row(data_source=""))
    scored = score(own, outcome_weight=0, tool_weight=1)
    assert (scored.rewards["outcome"], scored.reward) == (0.0, 2.0)
    scorer = Scorer(RewardConfig(outcome_weight=0, tool_weight=1))
    check_graders([row(data_source="", ground_truth=None)], scorer)
    assert scorer.describe("") == "grader none"
    assert scorer.grader("openai/gsm8k").name == "gsm8k"  # acc stays a metric


@pytest.mark.parametrize("truth", ["12", "1,012", "-3", "0.5", "$7", 12, 12.0, " 12 "])
@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_ground_truths_that_can_be_reached(truth, method):
    scorer = Scorer(RewardConfig(kwargs={"method": method, "score": 0.5}))
    check_graders([row(ground_truth=truth)], scorer)


@pytest.mark.parametrize("truth", [None, "", "twelve", "12 apples", "3*4=12\n#### 12", ["12"]])
def test_ground_truths_that_no_answer_could_match_are_refused(truth):
    with pytest.raises(DataError, match=r"row 4: the grader 'gsm8k' cannot read ground_truth="):
        check_graders([row(ground_truth=truth, row=4)], Scorer(RewardConfig()))


def test_a_reward_function_judges_all_rows(registered):
    scorer = Scorer(RewardConfig(function=registered(by_trajectory)))
    check_graders([row(data_source="anything", ground_truth=None)], scorer)
    assert scorer.grader("anything").function is by_trajectory


def test_every_known_grader_is_registered():
    assert set(GRADERS.values()) <= set(registry.rewards.names())


def test_the_gsm8k_grader_serves_other_sources_by_name():
    trajectory = make_trajectory(("assistant", "#### 12"), sample=row(data_source="mine"))
    assert score(trajectory, function="gsm8k").metrics == {"acc": 1.0}


# -- reward.function -----------------------------------------------------------------------------


def test_a_function_in_a_file(file):
    path = file("async def compute_score(solution_str, ground_truth, k=1):\n    return k * 2\n")
    scored = score(
        make_trajectory(("assistant", "x")), function=f"{path}:compute_score", kwargs={"k": 3}
    )
    assert scored.reward == 6.0


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("gsm8", "no reward named 'gsm8'. Did you mean 'gsm8k'?"),
        ("{path}", "must name its function: "),
        ("{path}:compute_scor", "no function 'compute_scor' in"),
        ("{path}:compute_scor", "Did you mean 'compute_score'? It defines: compute_score"),
        ("nowhere.py:f", "no such file: nowhere.py"),
    ],
)
def test_a_reward_that_is_not_there(file, function, says):
    path = file("from json import dumps\ndef compute_score(solution_str):\n    return 0.0\n")
    with pytest.raises(UserError) as caught:
        Scorer(RewardConfig(function=function.format(path=path)))
    assert says in str(caught.value) and "dumps" not in str(caught.value)


def test_a_decorator_without_a_name_says_so():
    with pytest.raises(RegistryError, match=r'"name"\) above by_trajectory, .*rewards.py:\d+:'):
        reward(by_trajectory)  # type: ignore[arg-type]


# -- mistakes of a reward ------------------------------------------------------------------------


def graded(returned: Any) -> Scored:
    def returning(trajectory):
        if isinstance(returned, Exception):
            raise returned
        return returned

    grader = Grader("mine", returning)
    scores = asyncio.run(grader.grade(make_trajectory(("assistant", "x"))))
    return Scored(make_trajectory(), {}, scores.outcome, scores.metrics)


@pytest.mark.parametrize(
    "function",
    [
        lambda t: {"score": asyncio.sleep(0)},
        lambda t: asyncio.sleep(0, asyncio.sleep(0)),
        lambda t: 1.0 + asyncio.sleep(0),
        lambda t: asyncio.sleep(0).score,
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_coroutine_instead_of_a_score_says_await(function):
    grader = Grader("mine", function)
    with pytest.raises(UserCodeError, match=r"coroutine.*Write `await` before the call"):
        asyncio.run(grader.grade(make_trajectory(("assistant", "x"))))


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (ZeroDivisionError("oh"), r"'mine' of sample 'r7' raised ZeroDivisionError: oh \(.*:\d+\)"),
        (math.nan, "returned nan"),
        (math.inf, "returned inf"),
        (None, r"returned None \(NoneType\)"),
        ("1.0", r"returned '1.0' \(str\)"),
        ([1.0], r"returned \[1.0\] \(list\)"),
        ({"score": None}, "returned None"),
        ({"acc": 1.0}, r"returned no \"score\", only \['acc'\]"),
        ({}, 'returned no "score"'),
    ],
)
def test_a_reward_that_raises_or_returns_no_number(returned, says):
    with pytest.raises(UserCodeError, match=says):
        graded(returned)


@pytest.mark.parametrize("returned", [1, True, 1.0, MappingProxyType({"score": 1})])
def test_what_counts_as_a_number(returned):
    assert graded(returned).reward == 1.0


def test_numbers_of_other_libraries():
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    for one in (numpy.float32(1), numpy.int64(1), numpy.bool_(True), torch.tensor(1.0)):
        assert graded(one).reward == 1.0
    with pytest.raises(UserCodeError):
        graded(torch.ones(2))


def test_a_judge_that_is_down_is_infrastructure_not_a_reward():
    with pytest.raises(EngineError):
        graded(EngineError("judge is down"))


@pytest.mark.parametrize("source", ["turn", "tool"])
def test_a_nan_of_another_reward_source_is_caught_too(source):
    trajectory = make_trajectory(
        ("assistant", "#### 12"), turns=(turn(rewards={source: math.nan}),)
    )
    with pytest.raises(UserCodeError, match=f"the {source} rewards of sample 'r7' sum to nan"):
        score(trajectory)


# -- weights and budgets -------------------------------------------------------------------------


def rich(**fields: Any) -> Trajectory:
    """Outcome 1, turn 0.75, tool 0.5 + 2."""
    turns = (turn(rewards={"turn": 0.25, "tool": 0.5}), turn(rewards={"turn": 0.5}))
    return make_trajectory(
        ("assistant", "a"),
        ("tool", "1"),
        ("assistant", "#### 12"),
        turns=turns,
        tool_reward=2.0,
        **fields,
    )


def test_nothing_counts_twice_by_default():
    scored = score(rich())
    assert scored.rewards == {"outcome": 1.0, "turn": 0.75, "tool": 2.5}
    assert scored.reward == 1.0 and not scored.masked


def test_the_weighted_sum():
    scored = score(rich(), outcome_weight=2.0, turn_weight=4.0, tool_weight=10.0)
    assert scored.reward == 2.0 + 3.0 + 25.0


@pytest.mark.parametrize(
    ("policy", "stop_reason", "expected", "masked"),
    [
        ({}, "turns", 1.0, False),
        ({"turns": "keep"}, "turns", 1.0, False),
        ({"turns": "zero"}, "turns", 0.0, False),
        ({"turns": "mask"}, "turns", 1.0, True),
        ({"turns": 0.25}, "turns", 0.75, False),
        ({"turns": "zero", "time": "mask"}, "done", 1.0, False),
        ({"turns": "zero", "time": "mask"}, "time", 1.0, True),
    ],
)
def test_budget_policy(policy, stop_reason, expected, masked):
    scored = score(rich(stop_reason=stop_reason), policy)
    assert (scored.reward, scored.masked) == (expected, masked)
    assert scored.rewards["outcome"] == 1.0, "what was earned stays on record"


async def test_scores_without_a_weight_are_reported_once(caplog):
    scorer = Scorer(RewardConfig(tool_weight=1.0))
    with caplog.at_level(logging.WARNING, logger="agentrl"):
        for _ in range(3):
            await scorer.score(rich())
    assert [r.getMessage().split(",")[0] for r in caplog.records] == ["rollouts have turn rewards"]
    assert "reward.turn_weight is 0" in caplog.text


async def test_no_warning_without_unused_scores(caplog):
    with caplog.at_level(logging.WARNING, logger="agentrl"):
        await Scorer(RewardConfig()).score(make_trajectory(("assistant", "#### 12")))
    assert not caplog.records


async def test_scoring_is_quick():
    scorer, trajectory = Scorer(RewardConfig()), rich()
    started = time.process_time()
    for _ in range(1000):
        await scorer.score(trajectory)
    assert time.process_time() - started < 1.0


# -- the row belongs to its other rollouts, too ---------------------------------------------------


def test_a_reward_that_changes_the_row_changes_it_for_nobody_else(registered):
    def pops(data_source, solution_str, ground_truth, extra_info, words):
        number = len(ground_truth) + len(extra_info["left"]) + len(words)
        ground_truth.pop(), extra_info["left"].pop(), words.pop()
        return number

    def pops_of_the_trajectory(trajectory):
        [call] = trajectory.turns[0].tool_calls
        assert call.arguments == trajectory.messages[-1].tool_calls[0].arguments == {"x": [1]}
        call.arguments.clear()
        trajectory.messages[-1].tool_calls[0].arguments["x"].clear()
        return len(trajectory.sample.ground_truth) + len(trajectory.sample.extra.pop("left"))

    @reward("pops_of_the_group", group=True)
    def pops_of_the_group(trajectories):
        return [len(t.sample.ground_truth.pop()) for t in trajectories]

    def make() -> Trajectory:
        calls = (ToolCall("f", {"x": [1]}),)
        sample = row(ground_truth=["aa", "b", "ccc"], extra={"left": [1, 2]})
        message = Message("assistant", "a", (ToolCall("f", {"x": [1]}),))
        return make_trajectory(message, sample=sample, turns=(turn(tool_calls=calls),))

    trajectory = make()
    names = {registered(pops): 1.0, registered(pops_of_the_trajectory): 100.0}
    config = RewardConfig(
        functions={**names, "pops_of_the_group": 1e4}, kwargs={"pops": {"words": ["w", "v"]}}
    )
    scorer = Scorer(config)
    for _ in range(2):
        scored = asyncio.run(scorer.score_all([trajectory] * 2))
        assert [s.reward for s in scored] == [7 + 500 + 30000] * 2
    assert trajectory == make() and config.kwargs["pops"]["words"] == ["w", "v"]


def test_extra_info_keeps_the_rows_own_values(registered):
    seen = {}

    def reads(solution_str, extra_info):
        seen.update(extra_info)
        return 0.0

    own = {"messages": ["mine"], "num_turns": 99, "stop_reason": None, "index": 3}
    trajectory = make_trajectory(("assistant", "a"), sample=row(extra=own))
    score(trajectory, function=registered(reads))
    assert seen == {
        **own,
        "rollout_messages": [m.as_dict() for m in trajectory.messages],
        "rollout_num_turns": 2,
        "rollout_stop_reason": "done",
        "turn_scores": [0.0],
        "tool_rewards": [],
        "final_text": "a",
    }
