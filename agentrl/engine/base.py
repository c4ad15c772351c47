"""The two interfaces of an engine: `Sampler` for episodes, `EngineControl` for the trainer.

Token ids go in; token ids, logprobs and policy versions come out. Logprobs are log_softmax(logits /
temperature) over the full vocabulary, of the sampled token, as the trainer computes them. With
`Sampling.returns_kept` they are over the tokens that `top_p` and `top_k` keep.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from agentrl.config.sections import RolloutConfig, ValConfig
from agentrl.images import RowImage
from agentrl.trajectory import Generation

CONTINUATION = "continuation"
"""The id with which `Engine.continue_row` samples."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of one turn. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    """Strings that end a turn. The tokens that complete one are kept (sampled, mask 1)."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end a turn. The token is kept."""
    returns_kept: bool = False
    """Return the tokens that `top_p` and `top_k` keep, and logprobs over them (`Generation`)."""
    experts_from: int | None = None
    """Return the experts that were chosen for each token of the row from this one on
    (`Generation`); None: return none."""

    @classmethod
    def of(cls, config: RolloutConfig | ValConfig) -> Sampling:
        """Return the parameters that a section of the config sets; `max_tokens` is not one."""
        return cls(config.temperature, config.top_p, config.top_k)

    def as_greedy(self) -> Sampling:
        """Return the parameters of the same turn at temperature 0."""
        return replace(self, temperature=0.0, returns_kept=False, experts_from=None)

    def as_dict(self) -> dict[str, Any]:
        """Return the parameters as plain values, for trajectories on disk."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Update:
    """The current policy.

    It may be read and sent several times (to the engines of a pool), but only until the next update
    of the policy: the tensors are not copies.
    """

    version: int
    weights: Callable[[], Iterator[tuple[str, Any]]]
    """Yields the tensors of the plain model by their names in transformers, for an engine in this
    process. They are on the learner's device and in its precision, with LoRA merged into them.
    Tensors that never change may be missing."""
    send: Callable[[Any], Any]
    """Sends the policy along a `Route` to servers, and returns what was `Sent`."""
    is_changed: bool = True
    """False if the weights are the same as in the previous update. An engine that still has them
    then only takes the new version."""


class Followers(Protocol):
    """Other processes that sample from the servers of this process. Any thread may call them."""

    def changed(self) -> None:
        """Send the state of the servers to them soon, and before the next `usage`."""
        ...

    def usage(self, server: int) -> ServerUsage:
        """Ask them how they use a server, when they have its state. Blocks."""
        ...


@dataclass(frozen=True, slots=True)
class ServerUsage:
    """How other processes use a server: their turns in flight, and the adapters of these."""

    turns: int = 0
    adapters: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SharedSampler:
    """How other processes sample from the servers of this process.

    Attributes:
        make: returns what makes the sampler in another process, whose first argument is a `Channel`
            (`agentrl.rollout_workers`). It can be pickled.
        functions: the functions of this process that the sampler calls, by name.
        state: returns the state that `functions["follow"]` of the sampler gets.
    """

    make: Callable[[], Callable[[Any, int], Sampler]]
    functions: Mapping[str, Callable[..., Any]]
    state: Callable[[], Any]


class Sampler(Protocol):
    """The part of an engine that an episode and a rollout use."""

    max_length: int
    """The longest row in tokens: the sum of prompt, sampled and observed tokens."""
    is_concurrent: bool = False
    """True if an episode may have several requests in flight, for its own conversations."""
    failovers: int = 0
    """How many turns went to another server because one failed."""

    async def ready(self) -> None:
        """Return when tokens can be requested.

        It waits only while a server is being restarted. It is awaited before an episode is played,
        so that the outage does not count against the time limit of the episode.

        Raises:
            EngineError: no engine will be available.
        """

    def begin(self, episode_id: str, *, awaited: bool = True) -> None:
        """Announce an episode that will request tokens.

        A rollout announces the episodes of a step before any of them runs, so that an engine may
        form batches by episodes and turns instead of by wall-clock time.

        Args:
            episode_id: unique for each attempt.
            awaited: False if other episodes should not wait for the turns of this one, because they
                come from another process.
        """

    async def generate(
        self,
        prompt_ids: array[int],
        sampling: Sampling,
        *,
        episode_id: str,
        seed: int,
        deadline: float,
        images: Sequence[RowImage] = (),
    ) -> Generation:
        """Sample the continuation of `prompt_ids`.

        Args:
            prompt_ids: the whole row: the prompt and the response so far.
            sampling: the sampling parameters.
            episode_id: the id of an episode that was announced by `begin`.
            seed: the only source of randomness, together with the index of the token in the row.
            deadline: `time.monotonic()` seconds at which to give up.
            images: the images of the row, in order. The row has the placeholder tokens of each.

        Raises:
            EngineError: the engine failed. The sample may be played again.
        """
        ...

    def end(self, episode_id: str) -> None:
        """Free the cache of an episode, which requests no more tokens.

        It is always called, also for an episode that failed.
        """

    def reprefill_tokens(self) -> int:
        """Return how many tokens, of prompts and sampled, were processed again so far.

        This is because the weights changed within their turn.
        """
        return 0

    def share(self, followers: Followers) -> SharedSampler | None:
        """Let other processes sample without asking this one; None if they must ask.

        Args:
            followers: they get the state of the servers whenever it changes.
        """
        return None


class EngineControl(Protocol):
    """The part of an engine that the trainer uses."""

    def weights_moving(self) -> None:
        """Announce that the trainer changes its weights, until `publish`.

        Tokens are still requested, and sampled from the published policy.
        """

    def sleep(self) -> None:
        """Announce that the trainer computes from now on: no tokens are requested until `publish`.

        An engine may free memory that it shares with the trainer. This includes `weights_moving`.
        """

    def publish(self, update: Update) -> int:
        """Load the current policy. Tokens that are sampled afterwards carry `update.version`.

        Returns:
            The number of bytes that were sent; 0 if the engine had the weights.

        Raises:
            EngineError: the engine did not load the policy, or does not sample from it.
        """
        ...

    def close(self) -> None:
        """Free everything. Requests in flight fail with `EngineError`."""
        ...


class Engine(Sampler, EngineControl, Protocol):
    """Both interfaces: what a command opens and closes."""

    async def scores(
        self, token_ids: array[int], images: Sequence[RowImage] = ()
    ) -> list[array[float]]:
        """Score a row by every engine of a pool.

        Returns:
            The logprob of each token given the tokens before it, by each engine. The first token's
            is 0, and so are those of the placeholder tokens of images.

        Raises:
            EngineError: no engine answered.
        """
        ...

    async def continue_row(
        self,
        token_ids: array[int],
        tokens: int,
        timeout_s: float,
        images: Sequence[RowImage] = (),
    ) -> Generation:
        """Sample a few tokens after a row, outside of episodes, at temperature 1.

        Raises:
            EngineError: see `generate`.
        """
        self.begin(CONTINUATION)
        try:
            sampling, deadline = Sampling(max_tokens=tokens), time.monotonic() + timeout_s
            return await self.generate(
                token_ids,
                sampling,
                episode_id=CONTINUATION,
                seed=0,
                deadline=deadline,
                images=images,
            )
        finally:
            self.end(CONTINUATION)

    def metrics(self) -> dict[str, float]:
        """Return the counts of events since the last call, for the record of a step."""
        return {}
