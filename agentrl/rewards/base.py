"""A reward: a plain function of the trajectory, or verl's `compute_score`.

The two are told apart by their parameters. A function with a parameter `solution_str`, or one that
takes keywords only (`**kwargs`), is a `compute_score`; any other is called with the trajectory.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat, TypeVar

from agentrl.errors import ConfigError, RegistryError, UserCodeError, user_code
from agentrl.registry import rewards
from agentrl.rewards.compute_score import NAMES, arguments
from agentrl.signatures import argument_problems, place
from agentrl.trajectory import Trajectory

F = TypeVar("F", bound=Callable[..., Any])

VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD
POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


def reward(name: str) -> Callable[[F], F]:
    """Register a reward under the name that `reward.function` uses; the function stays as it is.

        @reward("exact")
        def exact(trajectory):
            return float(trajectory.final_text.strip() == trajectory.sample.ground_truth)

    It returns a number, or a mapping with "score" and other numbers (they become metrics). It may
    be `async def`.

    Raises:
        RegistryError: the name is taken.
    """
    if not isinstance(name, str):
        raise RegistryError(
            f'write @reward("name") above {place(name)}: the config refers to it by name'
        )

    def register(function: F) -> F:
        return rewards.add(name, function)

    return register


class Grader:
    """A reward with its `reward.kwargs`, proven to fit each other, ready to be called."""

    def __init__(
        self, name: str, function: Callable[..., Any], kwargs: Mapping[str, Any] | None = None
    ):
        """Check the function's parameters.

        Raises:
            ConfigError: it takes no trajectory, or not these arguments; all problems at once.
        """
        self.name = name
        self.function = function
        self.kwargs = dict(kwargs or {})
        parameters = inspect.signature(function).parameters
        kinds = [p.kind for p in parameters.values()]
        self.is_compute_score = "solution_str" in parameters or set(kinds) == {VAR_KEYWORD}
        self._takes = NAMES if VAR_KEYWORD in kinds else [n for n in NAMES if n in parameters]
        if self.is_compute_score:
            problems = argument_problems(function, self.kwargs, NAMES)
        elif kinds and kinds[0] in POSITIONAL:
            problems = argument_problems(function, self.kwargs, [*parameters][:1])
        else:
            problems = [
                f"its parameters are ({', '.join(parameters)}), but it must take the trajectory"
                f" first, or verl's {', '.join(NAMES)}"
            ]
        if problems:
            raise ConfigError(
                f"the reward {name!r} cannot be called with reward.kwargs={self.kwargs}: "
                + "; ".join(problems)
            )

    async def grade(self, trajectory: Trajectory) -> tuple[float, dict[str, float]]:
        """The outcome reward, and the other numbers that the function returned.

        A plain function runs on the event loop, where it should be quick; one that waits (for a
        judge, a sandbox) should be `async def`.

        Raises:
            UserCodeError: the function raised, or returned no finite number.
            Infrastructure: as the function raised it: a judge is down.
        """
        named = f"the reward {self.name!r} of sample {trajectory.sample.id!r}"
        with user_code(named):
            if self.is_compute_score:
                known = arguments(trajectory)
                returned = self.function(**{n: known[n] for n in self._takes}, **self.kwargs)
            else:
                returned = self.function(trajectory, **self.kwargs)
            if inspect.isawaitable(returned):
                returned = await returned
        return read_score(named, returned)


def read_score(named: str, returned: Any) -> tuple[float, dict[str, float]]:
    """The score, and what else a mapping holds of finite numbers (text is left aside).

    Raises:
        UserCodeError: no score, or one that is not a finite number; it says what came.
    """
    if isinstance(returned, Mapping):
        if "score" not in returned:
            raise UserCodeError(f'{named} returned no "score", only {sorted(map(str, returned))}')
        metrics = {str(k): _number(v) for k, v in returned.items() if k != "score"}
        score = returned["score"]
    else:
        metrics, score = {}, returned
    number = _number(score)
    if not math.isfinite(number):
        raise UserCodeError(
            f"{named} returned {score!r} ({type(score).__name__}); it must be a finite number,"
            ' or a mapping with one under "score"'
        )
    return number, {k: v for k, v in metrics.items() if math.isfinite(v)}


def _number(value: Any) -> float:
    """`value` as a float (numpy's and torch's scalars too); NaN where it is none."""
    try:
        return float(value) if isinstance(value, SupportsFloat) else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan
