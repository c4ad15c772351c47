"""`GymInteraction`: a Gymnasium environment as a conversation.

The user's messages are observations, the assistant's messages are actions. gymnasium is an optional
dependency (the extra `gym`). It is imported when an environment is first needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from agentrl.answers import without_thoughts
from agentrl.errors import UserError
from agentrl.installation import install_command
from agentrl.interactions.base import Interaction, Reply, interaction
from agentrl.trajectory import Message, Sample
from agentrl.workers import PerLoop, Threads

MAX_THREADS = 64
"""The maximum number of environments of a process that step concurrently; the others wait."""
CLOSE_SECONDS = 5.0
"""The time that `close` waits for a step that is still running, in seconds."""

T = TypeVar("T")


@interaction("gym")
class GymInteraction(Interaction):
    """A Gymnasium environment whose actions and observations can be written as text.

    Each assistant message is parsed as an action. The reward of the step is the score of the turn,
    and the next observation is the reply. All rollouts of a row use the row's seed, so they begin
    in the same state and their rewards can be compared.

    The row's prompt must contain the first observation, which `GymInteraction.first` returns. To
    change the texts, derive a class, override `describe` or `read`, and register it under another
    name.
    """

    config_only = ("envs", "env_kwargs")

    def __init__(
        self,
        sample: Sample,
        envs: Sequence[str],
        env_id: str = "",
        env_kwargs: Mapping[str, Any] | None = None,
        seed: int | None = None,
        reset_options: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        observations: Sequence[str] = (),
        max_steps: int = 0,
        invalid_penalty: float = 0.0,
    ):
        """Choose the environment of one episode. The first assistant message creates it.

        Args:
            sample: the dataset row.
            envs: the environments that rows may name.
            env_id: the environment, one of `envs`; optional if `envs` has only one.
            env_kwargs: the arguments of `gymnasium.make`.
            seed: the seed of `reset`; by default the row's number.
            reset_options: the `options` of `reset`.
            actions: the names of discrete actions, in order; by default actions are numbers.
            observations: the names of the parts of an observation, or of the values of a
                `Discrete` one.
            max_steps: the number of steps after which the episode ends; 0 means no limit.
            invalid_penalty: the penalty for a message without a valid action.
        """
        self._env_id = choose_env(env_id, envs)
        self._env_kwargs = dict(env_kwargs or {})
        self._seed = sample.row if seed is None else seed
        self._reset_options = dict(reset_options) if reset_options else None
        self.actions, self.observations = tuple(actions), tuple(observations)
        self._steps_left = max_steps or -1
        self._invalid_penalty = invalid_penalty
        self._lock = threading.Lock()
        """Held by a step and by `close`: a step may still run after its episode has ended."""
        self.env: Any = None
        """The environment; None until it is created."""

    @classmethod
    def first(cls, seed: int, *, envs: Sequence[str], **kwargs: Any) -> str:
        """Return the first observation of an episode with this seed, for the prompt of its row.

        Args:
            seed: the row's seed.
            envs: as in the constructor.
            kwargs: other arguments of the constructor.
        """
        episode = cls(sample=Sample("", ()), envs=envs, seed=seed, **kwargs)
        try:
            return episode.describe(episode._reset())
        finally:
            episode._close()

    @classmethod
    def problems(cls, kwargs: Mapping[str, Any]) -> Iterable[str]:
        """Return problems with the environment's spaces, from an environment that is then closed.

        It is created once for each set of arguments.
        """
        kind = {k: v for k, v in kwargs.items() if k not in ("seed", "reset_options")}
        key = f"{cls.__module__}.{cls.__qualname__} {kind!r}"
        if key not in _problems:
            _problems[key] = _check_env(cls, kind)
        return _problems[key]

    def describe(self, observation: Any) -> str:
        """Return the text of an observation."""
        return _spaces().describe(self.env.observation_space, observation, self.observations)

    def read(self, text: str) -> Any:
        """Return the action in an assistant message without its thinking, or None."""
        return _spaces().read_action(self.env.action_space, text, self.actions)

    async def respond(self, messages: Sequence[Message]) -> Reply | None:
        """Step the environment with the action in the assistant's last message."""
        return await _in_thread(partial(self._step, messages[-1].content))

    async def close(self) -> None:
        """Close the environment."""
        await _in_thread(self._close)

    def _reset(self) -> Any:
        self.env = _spaces().make(self._env_id, disable_env_checker=True, **self._env_kwargs)
        observation, _ = self.env.reset(seed=self._seed, options=self._reset_options)
        return observation

    def _step(self, text: str) -> Reply:
        with self._lock:
            if self.env is None:
                self._reset()
            self._steps_left -= 1
            env: Any = self.env
            action = self.read(without_thoughts(text))
            if action is None:
                expected = _spaces().describe_action(env.action_space, self.actions)
                content = f"Error: no valid action found. Reply with {expected}."
                return Reply(content, -self._invalid_penalty, done=self._steps_left == 0)
            observation, reward, terminated, truncated, _ = env.step(action)
            done = bool(terminated or truncated or self._steps_left == 0)
            return Reply(self.describe(observation), float(reward), done)

    def _close(self) -> None:
        if self._lock.acquire(timeout=CLOSE_SECONDS):
            try:
                if self.env is not None:
                    self.env.close()
            finally:
                self._lock.release()


def choose_env(env_id: str, envs: Sequence[str]) -> str:
    """Return the id of the environment to play.

    Raises:
        ValueError: the environment is not one of those that the config allows.
    """
    if env_id in envs:
        return env_id
    if not env_id and len(envs) == 1:
        return envs[0]
    problem = f"env_id={env_id!r} is not one of them" if env_id else "env_id must name one of them"
    raise ValueError(f"envs={list(envs)}: {problem}")


def _spaces() -> Any:
    try:
        from agentrl.interactions import spaces
    except ImportError:
        command = install_command("gym")
        raise UserError(f"the interaction gym needs gymnasium: {command}") from None
    return spaces


_problems: dict[str, list[str]] = {}
"""The problems of each set of arguments. Rows usually differ in their seeds only."""


def _check_env(cls: type[GymInteraction], kwargs: Mapping[str, Any]) -> list[str]:
    spaces = _spaces()
    envs = kwargs["envs"]
    if isinstance(envs, str) or not all(isinstance(e, str) for e in envs):
        return [f"envs={envs!r} must be a list of environment ids"]
    try:
        env_id = choose_env(kwargs.get("env_id", ""), envs)
    except ValueError as e:
        return [str(e)]
    try:
        env = spaces.make(env_id, **kwargs.get("env_kwargs", {}))
    except Exception as e:
        return [f"gymnasium.make({env_id!r}) raised {type(e).__name__}: {e}"]
    try:
        action_space = None if cls.read is not GymInteraction.read else env.action_space
        observation_space = (
            None if cls.describe is not GymInteraction.describe else env.observation_space
        )
        names = kwargs.get("actions", ()), kwargs.get("observations", ())
        return [
            f"{env_id}: {problem}"
            for problem in spaces.problems(action_space, observation_space, *names)
        ]
    finally:
        env.close()


_threads = PerLoop(lambda: Threads(MAX_THREADS, "gym"), Threads.close)


async def _in_thread(function: Callable[[], T]) -> T:
    """Call a function in a thread, so that an environment does not block other episodes."""
    return await _threads.get().run(function)
