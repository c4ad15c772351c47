"""A Gymnasium environment as a conversation: observations are what the user says, actions answers.

gymnasium is an extra (`pip install "agentrl[gym]"`), imported when an environment is first needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from agentrl.answers import without_thoughts
from agentrl.errors import UserError
from agentrl.interactions.base import Interaction, Reply, interaction
from agentrl.trajectory import Message, Sample
from agentrl.workers import PerLoop, Threads

MAX_THREADS = 64
"""Environments of a process that step at once; more wait."""
CLOSE_S = 5.0
"""How long a closing waits for a step that is still at work."""

T = TypeVar("T")


@interaction("gym")
class GymInteraction(Interaction):
    """Plays an environment of Gymnasium whose actions and observations can be written.

    Each answer is read as an action, the step's reward is the turn's score, and the next
    observation is the reply. All rollouts of a row begin in the same state, as their comparison
    wants it, and meet the same chances: both come from the row's seed.

    The row's prompt shows the first observation: `GymInteraction.first` says what to write there.
    For other words, derive from this class, override `describe` or `read`, and register it under
    another name.
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
        """Choose the environment of one episode; it is made with the first answer.

        Args:
            sample: the row.
            envs: the environments that rows may name.
            env_id: which of them; may be left out where there is one.
            env_kwargs: arguments of `gymnasium.make`.
            seed: of the reset; by default the row's number.
            reset_options: `options` of the reset.
            actions: names of discrete actions, in order; by default actions are numbers.
            observations: names of an observation's numbers or parts, or of its values.
            max_steps: after so many answers the episode ends; 0: when the environment says so.
            invalid_penalty: taken off for an answer that holds no action.
        """
        self._env_id = chosen(env_id, envs)
        self._env_kwargs = dict(env_kwargs or {})
        self._seed = sample.row if seed is None else seed
        self._reset_options = dict(reset_options) if reset_options else None
        self.actions, self.observations = tuple(actions), tuple(observations)
        self._left = max_steps or -1
        self._invalid_penalty = invalid_penalty
        self._lock = threading.Lock()
        """A step that nobody awaits any more may still be at work."""
        self.env: Any = None
        """The environment, once it is made."""

    @classmethod
    def first(cls, seed: int, *, envs: Sequence[str], **kwargs: Any) -> str:
        """The first observation of an episode with this seed: for the prompt of its row.

        Args:
            seed: the row's.
            envs: see the constructor.
            kwargs: its other arguments.
        """
        one = cls(sample=Sample("", ()), envs=envs, seed=seed, **kwargs)
        try:
            return one.describe(one._begin())
        finally:
            one._end()

    @classmethod
    def problems(cls, kwargs: Mapping[str, Any]) -> Iterable[str]:
        """See `Interaction`: makes the environment and looks at its spaces, once for each kind."""
        kind = {k: v for k, v in kwargs.items() if k not in ("seed", "reset_options")}
        key = f"{cls.__module__}.{cls.__qualname__} {kind!r}"
        if key not in _KNOWN:
            _KNOWN[key] = _look(cls, kind)
        return _KNOWN[key]

    def describe(self, observation: Any) -> str:
        """An observation as the policy reads it."""
        return _spaces().describe(self.env.observation_space, observation, self.observations)

    def read(self, text: str) -> Any:
        """The action that an answer holds, or None; what was thought before it is left out."""
        return _spaces().read_action(self.env.action_space, text, self.actions)

    async def respond(self, messages: Sequence[Message]) -> Reply | None:
        """Take the step that the assistant's last message asks for."""
        return await _in_thread(partial(self._step, messages[-1].content))

    async def close(self) -> None:
        """Close the environment."""
        await _in_thread(self._end)

    def _begin(self) -> Any:
        self.env = _spaces().make(self._env_id, disable_env_checker=True, **self._env_kwargs)
        observation, _ = self.env.reset(seed=self._seed, options=self._reset_options)
        return observation

    def _step(self, text: str) -> Reply:
        with self._lock:
            if self.env is None:
                self._begin()
            self._left -= 1
            env: Any = self.env
            action = self.read(without_thoughts(text))
            if action is None:
                how = _spaces().how_to_act(env.action_space, self.actions)
                said = f"I see no action in that. Answer with {how}."
                return Reply(said, -self._invalid_penalty, done=self._left == 0)
            observation, reward, terminated, truncated, _ = env.step(action)
            done = bool(terminated or truncated or self._left == 0)
            return Reply(self.describe(observation), float(reward), done)

    def _end(self) -> None:
        if self._lock.acquire(timeout=CLOSE_S):
            try:
                if self.env is not None:
                    self.env.close()
            finally:
                self._lock.release()


def chosen(env_id: str, envs: Sequence[str]) -> str:
    """The environment to play.

    Raises:
        ValueError: it is not among those that the config allows.
    """
    if env_id in envs:
        return env_id
    if not env_id and len(envs) == 1:
        return envs[0]
    said = f"env_id={env_id!r} is not among them" if env_id else "env_id must say which"
    raise ValueError(f"envs={list(envs)}: {said}")


def _spaces() -> Any:
    try:
        from agentrl.interactions import spaces
    except ImportError:
        raise UserError('the interaction gym needs gymnasium: pip install "agentrl[gym]"') from None
    return spaces


_KNOWN: dict[str, list[str]] = {}
"""The problems of each kind of environment, found once: rows differ in their seeds alone."""


def _look(cls: type[GymInteraction], kwargs: Mapping[str, Any]) -> list[str]:
    spaces = _spaces()
    envs = kwargs["envs"]
    if isinstance(envs, str) or not all(isinstance(e, str) for e in envs):
        return [f"envs={envs!r} must be a list of names of environments"]
    try:
        env_id = chosen(kwargs.get("env_id", ""), envs)
    except ValueError as e:
        return [str(e)]
    try:
        env = spaces.make(env_id, **kwargs.get("env_kwargs", {}))
    except Exception as e:
        return [f"gymnasium.make({env_id!r}) raised {type(e).__name__}: {e}"]
    try:
        read = None if cls.read is not GymInteraction.read else env.action_space
        shown = None if cls.describe is not GymInteraction.describe else env.observation_space
        names = kwargs.get("actions", ()), kwargs.get("observations", ())
        return [f"{env_id}: {what}" for what in spaces.problems(read, shown, *names)]
    finally:
        env.close()


_threads = PerLoop(lambda: Threads(MAX_THREADS), Threads.close)


async def _in_thread(function: Callable[[], T]) -> T:
    """`function()` in a thread of the event loop's own: no environment holds up other episodes."""
    return await _threads.get().run(function)
