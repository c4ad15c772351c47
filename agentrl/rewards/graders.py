"""Find the reward of a row: the one that the config names, or the grader of its `data_source`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from agentrl.answers import as_text, plain_number
from agentrl.errors import ConfigError, DataError
from agentrl.registry import did_you_mean, load_function, rewards
from agentrl.rewards import code, math
from agentrl.rewards.base import Grader
from agentrl.rewards.executor import RewardExecutor
from agentrl.rewards.search_qa import right_answers
from agentrl.trajectory import Trajectory

GRADERS = {
    "openai/gsm8k": "gsm8k",
    "agentrl/arithmetic": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo": "math_dapo",
    "math": "math_dapo",
    "aime*": "math_dapo",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "searchR1_*": "search_qa",
}
"""data_source -> the name of the `compute_score` that grades its rows. `*` matches any ending."""

UNGRADED = {
    "numina_*": "verl's prime_math is not part of agentrl; `reward.function=math` grades answers in"
    " \\boxed{...}",
    "hiyouga/geometry3k": "verl's grader of these questions about images is not part of agentrl;"
    " `reward.function=math` grades answers in \\boxed{...}",
}
"""data_source -> advice for rows that verl has a grader for and agentrl does not."""

GOLD: Mapping[str, Callable[..., str]] = {
    "gsm8k": lambda truth, **_: f"#### {plain_number(truth)}",
    "math": lambda truth, **_: _boxed(truth),
    "math_dapo": lambda truth, strict_box_verify=False, **_: (
        _boxed(truth) if strict_box_verify else f"Answer: {as_text(truth)}"
    ),
    "search_qa": lambda truth, **_: f"<answer>{''.join(right_answers(truth)[:1])}</answer>",
}
"""For each grader, a function that makes the shortest text with full marks, from a ground truth and
`reward.kwargs`."""

PROBLEMS: Mapping[str, Callable[[Any], str]] = {
    "code": code.problem_of,
    "math": math.problem_of,
    "none": lambda truth: "",
}
"""For each grader that runs a program or reads no answer, a function that returns
why a ground truth is unusable, or ""."""


def grader_of(
    data_source: str,
    kwargs: Mapping[str, Any],
    executor: RewardExecutor | None = None,
    key: str = "reward.kwargs",
) -> Grader:
    """Return the grader that agentrl ships for rows of `data_source`.

    Raises:
        DataError: there is no such grader. The message says how to set one.
        ConfigError: the grader does not take these `reward.kwargs`.
    """
    name = _entry(GRADERS, data_source)
    if not name:
        problem = f"no grader for data_source {data_source!r}" if data_source else "no data_source"
        instead = _entry(UNGRADED, data_source)
        hint = f" {instead}." if instead else did_you_mean(data_source, GRADERS)
        raise DataError(
            f"{problem}.{hint} Known: {', '.join(GRADERS)}. Or set"
            f" reward.function to a registered reward ({', '.join(rewards.names())}) or to your own"
            " (path.py:function). If turns or tools give all rewards: reward.outcome_weight=0"
        )
    return Grader(name, rewards.get(name), kwargs, executor, key)


def no_outcome(trajectory: Trajectory) -> float:
    """Return 0: the turns and tools of the environment give all rewards."""
    return 0.0


def _boxed(truth: Any) -> str:
    return f"\\boxed{{{as_text(truth)}}}"


def _entry(table: Mapping[str, str], data_source: str) -> str:
    """Return the value of the first key that matches, or ""."""
    return next((v for k, v in table.items() if fnmatchcase(data_source, k)), "")


def find_reward(name: str, key: str = "reward.function") -> Callable[..., Any]:
    """Return the function that `reward.function` names: a registered name, or `path.py:function`.

    Raises:
        ConfigError: there is no such reward. The message lists the choices.
        UserError: the file is missing or does not load.
    """
    path, _, attribute = name.rpartition(":")
    if path.endswith(".py"):
        return load_function(path, attribute, key)
    if name.endswith(".py"):
        raise ConfigError(f"{key}={name!r} must name its function: {name}:FUNCTION")
    if name not in rewards:
        raise ConfigError(
            f"{key}={name!r}: {rewards.explain_unknown(name)}. Name your own reward by its"
            " file (path.py:function), or list the file that registers it in `files`"
        )
    return rewards.get(name)
