"""A reward: a plain function of the trajectory, or verl's `compute_score`.

The two are told apart by their parameters. A function with a parameter `solution_str`, or one that
takes keywords only (`**kwargs`), is a `compute_score`; any other is called with the trajectory.

What the arguments of `compute_score(data_source, solution_str, ground_truth, extra_info=None,
**kwargs)` hold here:

- `solution_str`: what the assistant wrote, turns joined by newlines; never tool or user text.
- `extra_info`: the row's `extra`, and `num_turns`, `turn_scores` (one per assistant turn, 0.0 where
  there was none), `tool_rewards` (one per tool call that returned a reward), `stop_reason`,
  `messages` (the whole conversation, `{"role", "content"}` each) and `final_text` (the assistant's
  last message).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, SupportsFloat, TypeVar

from agentrl.config import RewardConfig
from agentrl.errors import ConfigError, RegistryError, UserCodeError, UserError, user_code
from agentrl.registry import rewards
from agentrl.rewards.executor import RewardExecutor, RewardTimeout
from agentrl.signatures import argument_problems, place
from agentrl.trajectory import Trajectory
from agentrl.workers import check_reachable

F = TypeVar("F", bound=Callable[..., Any])

VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD
POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


@dataclass(frozen=True, slots=True)
class RewardOptions:
    """How a reward is run: the arguments of `@reward`."""

    process: bool = False
    group: bool = False
    late: float | None = None
    bounded: bool = False
    sandbox: bool = False


_OPTIONS = "_agentrl_reward"


def reward(
    name: str,
    *,
    process: bool = False,
    group: bool = False,
    late: float | None = None,
    bounded: bool = False,
    sandbox: bool = False,
) -> Callable[[F], F]:
    """Register a reward under the name that `reward.function` uses; the function stays as it is.

        @reward("exact")
        def exact(trajectory):
            return float(trajectory.final_text.strip() == trajectory.sample.ground_truth)

    It returns a number, or a mapping with "score" and other numbers (they become metrics). It may
    be `async def`, or a class: then one object, made with `reward.kwargs`, judges the whole run,
    and its `close`, if it has one, is called at the end.

    Args:
        name: what the config calls it.
        process: run it in a process that is killed at the deadline `reward.timeout_s`: for what may
            hang without ever giving way, crash, or eat all memory.
        group: it is called with the list of a sample's trajectories, and returns as many scores.
        late: the score of a rollout for which it was killed at the deadline, if that is the
            answer's doing; None: the rollout is judged again, then dropped. Needs `process`.
        bounded: it is async and keeps deadlines of its own: `reward.timeout_s`, which also counts
            the waiting for a place to work in, is not for it.
        sandbox: it runs code in `agentrl.sandbox.current()`, which is tried before the run starts.

    Raises:
        RegistryError: the name is taken.
    """
    if not isinstance(name, str):
        raise RegistryError(
            f'write @reward("name") above {place(name)}: the config refers to it by name'
        )

    def register(function: F) -> F:
        said = f"the reward {name!r} ({place(function)})"
        if process and inspect.isclass(function):
            raise RegistryError(f"{said} is a class: process=True is for functions")
        if late is not None and not process:
            raise RegistryError(f"{said} has late={late}, which needs process=True")
        if process or group or bounded or sandbox:
            options = RewardOptions(process, group, late, bounded, sandbox)
            setattr(function, _OPTIONS, options)
        return rewards.add(name, function)

    return register


class Grader:
    """A reward with its `reward.kwargs`, proven to fit each other, ready to be called."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        kwargs: Mapping[str, Any] | None = None,
        executor: RewardExecutor | None = None,
        key: str = "reward.kwargs",
    ):
        """Check the function's parameters.

        Args:
            name: what messages call it.
            function: a function, or a class that is made with `kwargs`.
            kwargs: further arguments, by name.
            executor: where it runs.
            key: the config key that holds `kwargs`, for messages.

        Raises:
            ConfigError: it takes no trajectory, or not these arguments; all problems at once.
        """
        self.name = name
        self.function: Callable[..., Any] = function
        self.kwargs = dict(kwargs or {})
        options: RewardOptions = getattr(function, _OPTIONS, RewardOptions())
        self.options = options
        self._executor = executor or RewardExecutor(RewardConfig())
        self._key = key
        if inspect.isclass(function):
            self._refuse(argument_problems(function, self.kwargs))
            try:
                with user_code(f"the constructor of the reward {name!r}"):
                    made: Any = function(**self.kwargs)
            except UserCodeError as e:
                raise _said_by_itself(e) from None
            self.function, given = made, {}
        else:
            given = self.kwargs
        parameters = inspect.signature(self.function).parameters
        kinds = [p.kind for p in parameters.values()]
        self.is_compute_score = "solution_str" in parameters or set(kinds) == {VAR_KEYWORD}
        self._takes = [n for n in ARGUMENTS if n in parameters or VAR_KEYWORD in kinds]
        home = getattr(function, "__module__", None) or ""
        ours = home.startswith("agentrl.")
        pools = ["pool"] if ours and "pool" in parameters else []
        if self.is_compute_score and not options.group:
            problems = argument_problems(self.function, given, [*ARGUMENTS, *pools])
        elif kinds and kinds[0] in POSITIONAL:
            problems = argument_problems(self.function, given, [*parameters][:1])
        else:
            first = "list of trajectories" if options.group else "trajectory"
            verls = "" if options.group else f", or verl's {', '.join(ARGUMENTS)}"
            problems = [
                f"its parameters are ({', '.join(parameters)}), but it must take the {first} first"
                f"{verls}"
            ]
        self._refuse(problems)
        self._given = {**given, **dict.fromkeys(pools, self._executor.pool)}
        if options.process:
            check_reachable(self.function)
        called = self.function if inspect.isroutine(self.function) else type(self.function).__call__
        self._waits = inspect.iscoroutinefunction(called)
        # Ours are known to be quick where they do not say otherwise, late by the answer's doing.
        self._late = 0.0 if ours and options.process and options.late is None else options.late
        self._inline = ours and not self._waits and not options.process

    def _refuse(self, problems: Sequence[str]) -> None:
        if problems:
            raise ConfigError(
                f"the reward {self.name!r} cannot be called with {self._key}={self.kwargs}: "
                + "; ".join(problems)
            )

    async def grade(self, trajectory: Trajectory) -> tuple[float, dict[str, float]]:
        """The outcome reward, and the other numbers that the function returned.

        Raises:
            UserCodeError: the function raised, or returned no finite number.
            Infrastructure: as the function raised it (a judge is down), or it did not end in time.
            GraderCrash: its process died.
        """
        named = f"the reward {self.name!r} of sample {trajectory.sample.id!r}"
        args = () if self.is_compute_score else (trajectory,)
        given = {n: ARGUMENTS[n](trajectory) for n in self._takes} if not args else {}
        try:
            returned = await self._called(named, args, given)
        except RewardTimeout:
            if self._late is None:
                raise
            return self._late, {"grader_timeout": 1.0}
        score, metrics = read_score(named, returned)
        return score, metrics if self._late is None else {**metrics, "grader_timeout": 0.0}

    async def compare(
        self, trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, dict[str, float]]]:
        """As `grade`, of a sample's trajectories by a reward that sees all of them."""
        named = f"the reward {self.name!r} of sample {trajectories[0].sample.id!r}"
        returned = await self._called(named, [list(trajectories)], {})
        try:
            scores = [] if isinstance(returned, (Mapping, str)) else [*returned]
        except TypeError:
            scores = []
        if len(scores) != len(trajectories):
            raise UserCodeError(
                f"{named} returned {returned!r:.200}: it must return as many scores as it was given"
                f" trajectories, {len(trajectories)}"
            )
        return [read_score(named, score) for score in scores]

    async def grade_text(self, text: str, ground_truth: Any) -> dict[str, float]:
        """What a `compute_score` makes of this text: its score and its other numbers.

        Raises:
            UserError: as it raised it.
            Infrastructure: it did not end in time, or its process died.
        """
        named = f"the grader {self.name!r}"
        known = {"solution_str": text, "ground_truth": ground_truth, "data_source": ""}
        given = {n: known[n] for n in self._takes if n in known}
        try:
            score, metrics = read_score(named, await self._called(named, (), given))
        except UserCodeError as e:
            raise _said_by_itself(e) from None
        return {"score": score, **metrics}

    async def close(self) -> None:
        """Close an object that a class made for this run."""
        close = getattr(self.function, "close", None)
        if close is not None and not inspect.isroutine(self.function):
            with user_code(f"close of the reward {self.name!r}"):
                closed = close()
                if inspect.isawaitable(closed):
                    await closed

    async def _called(self, named: str, args: Sequence[Any], given: Mapping[str, Any]) -> Any:
        given = {**given, **self._given}
        if self._inline or self.options.bounded:
            with user_code(named):
                returned = self.function(*args, **given)
                return await returned if inspect.isawaitable(returned) else returned
        if self.options.process:
            return await self._executor.call_in_process(named, self.function, args, given)
        return await self._executor.call(named, self.function, args, given, self._waits)


def _said_by_itself(error: UserCodeError) -> Exception:
    """What says itself what the user should mend, in place of a bug."""
    return error.__cause__ if isinstance(error.__cause__, UserError) else error


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


def extra_info(trajectory: Trajectory) -> dict[str, Any]:
    """The row's `extra` with what happened in the episode."""
    return {
        **trajectory.sample.extra,
        "num_turns": num_turns(trajectory),
        "turn_scores": [t.rewards.get("turn", 0.0) for t in trajectory.turns],
        "tool_rewards": [
            r.reward for t in trajectory.turns for r in t.tool_results if r.reward is not None
        ],
        "stop_reason": trajectory.stop_reason,
        "messages": [m.as_dict() for m in trajectory.messages],
        "final_text": trajectory.final_text,
    }


ARGUMENTS: Mapping[str, Callable[[Trajectory], Any]] = {
    "data_source": lambda trajectory: trajectory.sample.data_source,
    "solution_str": lambda trajectory: trajectory.assistant_text,
    "ground_truth": lambda trajectory: trajectory.sample.ground_truth,
    "extra_info": extra_info,
}
"""The arguments of a `compute_score`, by name."""


def num_turns(trajectory: Trajectory) -> int:
    """Assistant turns + user turns + 1, as verl counts them.

    A user turn is what answers an assistant turn: an interaction's reply, or the results of all the
    calls of one turn. The 1 stands for the prompt.

    Example: call a tool, read its result, answer: 2 + 1 + 1 = 4.
    """
    roles = [m.role for m in trajectory.response_messages]
    observed = sum(a == "assistant" != b for a, b in pairwise(roles))
    return len(trajectory.turns) + observed + 1
