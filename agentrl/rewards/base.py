"""A reward: a plain function of the trajectory, or verl's `compute_score`.

The parameters decide how a function is called. A function with a parameter `solution_str`, or with
`**kwargs` only, is a `compute_score`. One with a parameter `completions` is called as TRL calls it,
with lists of one entry (docs/trl.md). Any other function is called with the trajectory.

The arguments of `compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)`
are these:

- `solution_str`: the assistant's text, turns joined by newlines; no tool or user text.
- `extra_info`: the row's `extra`, and `num_turns`, `turn_scores` (one per assistant turn, 0.0 by
  default), `tool_rewards` (one per tool call that returned a reward), `stop_reason`, `messages`
  (the whole conversation as `{"role", "content"}`) and `final_text` (the assistant's last message).
  If the row has one of these names, its own value stays, and ours is `rollout_NAME`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

from agentrl.config import RewardConfig
from agentrl.errors import (
    ConfigError,
    RegistryError,
    UserCodeError,
    UserError,
    missing_await,
    user_code,
)
from agentrl.registry import rewards
from agentrl.rewards.executor import RewardExecutor, RewardTimeout
from agentrl.signatures import KEYWORD, find_argument_problems, identify, require_name
from agentrl.trajectory import Scores, Trajectory, as_number, copy_value
from agentrl.workers import locate_function

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD
POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


@dataclass(frozen=True, slots=True)
class RewardOptions:
    """The options of `@reward`."""

    process: bool = False
    group: bool = False
    late: float | None = None
    bounded: bool = False
    sandbox: bool = False


GENRM_ARGUMENTS = ("reward_router_address", "reward_model_tokenizer")
"""Arguments that verl passes if it serves a generative reward model."""
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
    """Register a reward under the name that `reward.function` uses. It is returned unchanged.

        @reward("exact")
        def exact(trajectory):
            return float(trajectory.final_text.strip() == trajectory.sample.ground_truth)

    The reward returns a number, or a mapping with "score" and other numbers, which become metrics,
    or `Scores`, which may also have scores of turns.
    It may be a function, an `async def` function or a class. If it is a class, one object is made
    with `reward.kwargs` and used for the whole run; at the end its `close` is called, if it exists.

    Args:
        name: the name in the config.
        process: run the reward in a process that is killed at the deadline `reward.timeout_s`. Use
            this for a function that may hang in C code, crash, or use up the memory.
        group: the reward is called with the list of a sample's trajectories and returns a score for
            each.
        late: the score of a rollout if the reward was killed at the deadline because of the answer.
            None: the rollout is scored again, then dropped. Needs `process`.
        bounded: the reward is async and has its own deadlines. `reward.timeout_s` does not apply,
            because it would include the wait for a free slot.
        sandbox: the reward runs code in `agentrl.sandbox.current()`. The sandbox is tested before
            the run starts.

    Raises:
        RegistryError: the name is taken, or the options contradict each other.
    """
    require_name("reward", name, "the config refers")

    def register(function: F) -> F:
        label = f"the reward {name!r} ({identify(function)})"
        if process and inspect.isclass(function):
            raise RegistryError(f"{label} is a class: process=True is for functions")
        if late is not None and not process:
            raise RegistryError(f"{label} has late={late}, which needs process=True")
        if process or group or bounded or sandbox:
            options = RewardOptions(process, group, late, bounded, sandbox)
            setattr(function, _OPTIONS, options)
        return rewards.add(name, function)

    return register


class Grader:
    """A reward function with its `reward.kwargs`, checked against its signature."""

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
            name: the name of the reward, for messages.
            function: a function, or a class, which is called with `kwargs`.
            kwargs: further arguments, by name.
            executor: runs the function; None: a new executor with the default settings.
            key: the config key of `kwargs`, for messages.

        Raises:
            ConfigError: the function cannot take a trajectory, or does not take these arguments.
                The message has all problems.
        """
        self.name = name
        self.function: Callable[..., Any] = function
        self.kwargs = dict(kwargs or {})
        options: RewardOptions = getattr(function, _OPTIONS, RewardOptions())
        self.options = options
        self._executor = executor or RewardExecutor(RewardConfig())
        self._key = key
        if inspect.isclass(function):
            self.function, bound = self._make_instance(function), {}
        else:
            bound = self.kwargs
        parameters = inspect.signature(self.function).parameters
        kinds = [p.kind for p in parameters.values()]
        self.is_compute_score = "solution_str" in parameters or set(kinds) == {VAR_KEYWORD}
        self._is_trl = "completions" in parameters and not options.group
        self._arguments = [n for n in ARGUMENTS if n in parameters or VAR_KEYWORD in kinds]
        self._is_ours = is_ours = str(getattr(function, "__module__", "")).startswith("agentrl.")
        pools = ["pool"] if is_ours and "pool" in parameters else []
        self._raise_problems(self._find_problems(parameters, bound, pools))
        self._bound = {**bound, **dict.fromkeys(pools, self._executor.pool)}
        if options.process:
            locate_function(self.function)
        is_object = not inspect.isroutine(self.function)
        target = type(self.function).__call__ if is_object else self.function
        self._is_async = inspect.iscoroutinefunction(target)
        # agentrl's own functions are fast, so they run on the event loop if they are neither async
        # nor in a process. If an own function in a process times out, the answer is the cause.
        self._timeout_score = options.late
        if is_ours and options.process and options.late is None:
            self._timeout_score = 0.0
        self._runs_inline = is_ours and not self._is_async and not options.process

    def _make_instance(self, function: type) -> Any:
        """Return an object of a reward that is a class."""
        self._raise_problems(find_argument_problems(function, self.kwargs))
        try:
            with user_code(f"the constructor of the reward {self.name!r}"):
                return function(**self.kwargs)
        except (UserCodeError, UserError) as e:
            problem = _user_error(e)
            if isinstance(problem, UserCodeError):
                raise problem from None
            raise ConfigError(f"the reward {self.name!r} ({self._key}): {problem}") from None

    def _find_problems(
        self,
        parameters: Mapping[str, inspect.Parameter],
        bound: Mapping[str, Any],
        pools: Sequence[str],
    ) -> Sequence[str]:
        """Return why the function cannot be called, if it cannot."""
        is_group = self.options.group
        if genrm := [n for n in GENRM_ARGUMENTS if n in parameters and n not in bound]:
            return [
                f"its {' and '.join(genrm)} would be those of verl's generative reward model"
                " (genrm), which agentrl does not serve. Ask a judge instead (docs/rewards.md)"
            ]
        if self._is_trl:
            return find_argument_problems(self.function, bound, parameters.keys() - bound)
        if self.is_compute_score and not is_group:
            return find_argument_problems(self.function, bound, [*ARGUMENTS, *pools])
        if parameters and next(iter(parameters.values())).kind in POSITIONAL:
            return find_argument_problems(self.function, bound, [*parameters][:1])
        first = "list of trajectories" if is_group else "trajectory"
        verls = "" if is_group else f", or verl's {', '.join(ARGUMENTS)}"
        return [
            f"its parameters are ({', '.join(parameters)}), but it must take the {first} first"
            f"{verls}"
        ]

    def _raise_problems(self, problems: Sequence[str]) -> None:
        if problems:
            raise ConfigError(
                f"the reward {self.name!r} cannot be called with {self._key}={self.kwargs}: "
                + "; ".join(problems)
            )

    async def grade(self, trajectory: Trajectory) -> Scores:
        """Return the outcome reward and the other scores that the function returned.

        Raises:
            UserCodeError: the function raised, or did not return a finite number.
            Infrastructure: the function raised this (a judge is down), or did not return in time.
            GraderCrash: the function's process died.
        """
        label = f"the reward {self.name!r} of sample {trajectory.sample.id!r}"
        args, kwargs = (), {}
        if self._is_trl:
            kwargs = self._columns(label, self._copy(trajectory))
        elif self.is_compute_score:
            trajectory = replace(trajectory, sample=self._copy(trajectory.sample))
            kwargs = {n: ARGUMENTS[n](trajectory) for n in self._arguments}
        else:
            args = (self._copy(trajectory),)
        try:
            returned = await self._call(label, args, kwargs)
        except RewardTimeout:
            if self._timeout_score is None:
                raise
            return Scores(self._timeout_score, metrics={"grader_timeout": 1.0})
        if self._is_trl:
            if not isinstance(returned, Sequence) or len(returned) != 1:
                raise UserCodeError(
                    f"{label} returned {returned!r:.200}: as in TRL, it must return a list with a"
                    f" score for each completion; there is one{missing_await(returned)}"
                )
            returned = 0.0 if returned[0] is None else returned[0]
        scores = parse_score(label, returned)
        if self._timeout_score is None:
            return scores
        return replace(scores, metrics={**scores.metrics, "grader_timeout": 0.0})

    async def compare(self, trajectories: Sequence[Trajectory]) -> list[Scores]:
        """Return the results of `grade` for all trajectories of a sample, by one call."""
        label = f"the reward {self.name!r} of sample {trajectories[0].sample.id!r}"
        # Also for a process: a pickle would keep the row that they share.
        own = [t if self._is_ours else copy_value(t) for t in trajectories]
        returned = await self._call(label, [own], {})
        try:
            scores = [] if isinstance(returned, (Mapping, str)) else [*returned]
        except TypeError:
            scores = []
        if len(scores) != len(trajectories):
            raise UserCodeError(
                f"{label} returned {returned!r:.200}: it must return one score for each of the"
                f" {len(trajectories)} trajectories{missing_await(returned)}"
            )
        return [parse_score(label, score) for score in scores]

    async def grade_text(self, text: str, ground_truth: Any) -> dict[str, float]:
        """Call a `compute_score` with a text; return the score and the other numbers.

        Raises:
            UserError: the function raised this.
            Infrastructure: the function did not return in time, or its process died.
        """
        label = f"the grader {self.name!r}"
        available = {"solution_str": text, "ground_truth": ground_truth, "data_source": ""}
        kwargs = {n: available[n] for n in self._arguments if n in available}
        try:
            scores = parse_score(label, await self._call(label, (), kwargs))
        except UserCodeError as e:
            raise _user_error(e) from None
        return {"score": scores.outcome, **scores.metrics}

    async def close(self) -> None:
        """Close the object, if the reward is a class."""
        close = getattr(self.function, "close", None)
        if close is not None and not inspect.isroutine(self.function):
            with user_code(f"close of the reward {self.name!r}"):
                awaitable = close()
                if inspect.isawaitable(awaitable):
                    await awaitable

    def _columns(self, label: str, trajectory: Trajectory) -> dict[str, Any]:
        """Return the arguments of a function with TRL's signature: lists with one entry.

        Raises:
            UserCodeError: the row has no column for a parameter without a default, or a column with
                the name of another argument and another value.
        """
        sample, parameters = trajectory.sample, inspect.signature(self.function).parameters
        columns = {
            **sample.extra,
            "data_source": sample.data_source,
            "ground_truth": sample.ground_truth,
            "prompts": [m.as_dict() for m in sample.prompt],
            "completions": [m.as_dict() for m in trajectory.response_messages],
            "completion_ids": [i for s in trajectory.segments[-1:] for i in s.response_ids],
        }
        for name, parameter in parameters.items():
            is_needed = parameter.default is parameter.empty and parameter.kind in KEYWORD
            if is_needed and name not in {**columns, **self._bound}:
                raise UserCodeError(
                    f"{label} needs the column {name!r}. The row has: {', '.join(sorted(columns))}"
                )
        takes_all = any(p.kind is VAR_KEYWORD for p in parameters.values())
        passed = {name: [x] for name, x in columns.items() if takes_all or name in parameters}
        for name, (value,) in passed.items():
            if sample.extra.get(name, value) != value:
                raise UserCodeError(
                    f"{label}: the row's column {name!r} is not the argument {name!r}, which has"
                    " TRL's meaning. Rename the column"
                )
        return passed

    def _copy(self, value: T) -> T:
        """Return a value that the function may change. agentrl's own functions change none."""
        return value if self._is_ours or self.options.process else copy_value(value)

    async def _call(self, label: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        kwargs = {**kwargs, **self._copy(self._bound)}
        if self._runs_inline or self.options.bounded:
            with user_code(label):
                returned = self.function(*args, **kwargs)
                return await returned if inspect.isawaitable(returned) else returned
        if self.options.process:
            return await self._executor.call_in_process(label, self.function, args, kwargs)
        return await self._executor.call(label, self.function, args, kwargs, self._is_async)


def _user_error(error: UserCodeError | UserError) -> Exception:
    """Return the `UserError` that user code raised, which says how to fix it, or else `error`."""
    return error.__cause__ if isinstance(error.__cause__, UserError) else error


def parse_score(label: str, returned: Any) -> Scores:
    """Return the result of a reward as `Scores`.

    Raises:
        UserCodeError: there is no score, or it is not a finite number.
    """
    if isinstance(returned, Scores):
        return returned
    metrics, score = {}, returned
    if isinstance(returned, Mapping):
        if "score" not in returned:
            raise UserCodeError(f'{label} returned no "score", only {sorted(map(str, returned))}')
        if isinstance(returned.get("turns"), Mapping | list):
            raise UserCodeError(
                f"{label} returned {returned!r:.200}: scores of turns need"
                " Scores(outcome, turns={index: score})"
            )
        metrics = {k: v for k, v in returned.items() if k != "score"}
        score = returned["score"]
    number = as_number(score)
    if not math.isfinite(number):
        raise UserCodeError(
            f"{label} returned {score!r} ({type(score).__name__}); it must be a finite number,"
            f' or a mapping with one under "score", or Scores{missing_await(score)}'
        )
    return Scores(number, metrics=metrics)


def extra_info(trajectory: Trajectory) -> dict[str, Any]:
    """Return the row's `extra` and facts about the episode.

    If the row has the name of a fact, its own value stays, and the fact is `rollout_NAME`.
    """
    extra = trajectory.sample.extra
    facts = {
        "num_turns": num_turns(trajectory),
        "turn_scores": [t.rewards.get("turn", 0.0) for t in trajectory.turns],
        "tool_rewards": [
            r.reward for t in trajectory.turns for r in t.tool_results if r.reward is not None
        ],
        "stop_reason": trajectory.stop_reason,
        "messages": [m.as_dict() for m in trajectory.messages],
        "final_text": trajectory.final_text,
    }
    return {f"rollout_{k}" if k in extra else k: v for k, v in facts.items()} | {**extra}


ARGUMENTS: Mapping[str, Callable[[Trajectory], Any]] = {
    "data_source": lambda trajectory: trajectory.sample.data_source,
    "solution_str": lambda trajectory: trajectory.assistant_text,
    "ground_truth": lambda trajectory: trajectory.sample.ground_truth,
    "extra_info": extra_info,
}
"""The arguments of a `compute_score`, by name."""


def num_turns(trajectory: Trajectory) -> int:
    """Return assistant turns + user turns + 1, as verl counts them.

    A user turn is an interaction's reply, or the results of all calls of one assistant turn. The 1
    stands for the prompt.

    Example: call a tool, read its result, answer: 2 + 1 + 1 = 4.
    """
    roles = [m.role for m in trajectory.response_messages]
    observed = sum(a == "assistant" != b for a, b in pairwise(roles))
    return len(trajectory.turns) + observed + 1
