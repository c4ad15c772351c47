"""Who samples tokens: the two faces of an engine.

An episode sees a `Sampler`, the trainer an `EngineControl`. Token ids go in; ids, logprobs and
policy versions come out. Logprobs are log_softmax(logits / temperature) over the full vocabulary,
of the sampled token, because the trainer's are too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from agentrl.errors import ConfigError
from agentrl.trajectory import Generation


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one turn is sampled. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    """Texts that end a turn; the tokens that complete one are kept (sampled, mask 1)."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end a turn; the token is kept."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for trajectories on disk."""
        return asdict(self)

    def check_trainable(self) -> None:
        """Refuse sampling from another distribution than the trainer's softmax.

        Raises:
            ConfigError: temperature 0, top_p below 1 or top_k set.
        """
        wrong = [
            text
            for bad, text in (
                (self.temperature <= 0, f"rollout.temperature={self.temperature} (must be > 0)"),
                (self.top_p < 1, f"rollout.top_p={self.top_p} (must be 1)"),
                (self.top_k > 0, f"rollout.top_k={self.top_k} (must be 0)"),
            )
            if bad
        ]
        if wrong:
            raise ConfigError(
                "training needs samples from the policy's own distribution, but "
                + ", ".join(wrong)
                + ". Set these under `val` instead: evaluation takes them."
            )


@dataclass(frozen=True, slots=True)
class Update:
    """The policy as it is now, in the forms that engines take.

    Each may be asked for several times (engines of a pool), and until the next update of the policy
    only: what comes out are no copies.
    """

    version: int
    weights: Callable[[], Iterator[tuple[str, Any]]]
    """Tensors of the plain model by name, on the learner's device and in its precision, LoRA merged
    into them; those that never change may be missing."""
    adapter: Callable[[Path], None] | None = None
    """Writes the LoRA adapter into an existing folder, as PEFT does; None where the weights
    themselves learn."""
    write: Callable[[Path, Any], int] | None = None
    """Writes the weights as safetensors into an existing folder itself, in a dtype or (None) their
    own, and says how many bytes: where they are in other processes."""


class Sampler(Protocol):
    """All that an episode and a rollout see of an engine."""

    max_length: int
    """The longest row, in tokens: prompt, sampled and observed together."""

    async def ready(self) -> None:
        """Return once tokens can be asked for: at once, but where a server is being started anew.

        Waited for before an episode is played, so that the outage is not within its time.

        Raises:
            EngineError: there will be no engine.
        """

    def begin(self, episode_id: str) -> None:
        """Announce an episode that will ask for tokens.

        Rollouts announce a step's episodes before any runs, so that an engine may batch by episodes
        and turns instead of by wall clock.
        """

    async def generate(
        self,
        prompt_ids: array[int],
        sampling: Sampling,
        *,
        episode_id: str,
        seed: int,
        deadline: float,
    ) -> Generation:
        """Continue `prompt_ids` (all tokens of the episode so far).

        Args:
            prompt_ids: the whole row, prompt and response so far.
            sampling: how to sample.
            episode_id: of an episode announced by `begin`.
            seed: with the token's index in the row, the only source of randomness.
            deadline: `time.monotonic()` seconds after which to give up.

        Raises:
            EngineError: the engine failed; the episode may be played again.
        """
        ...

    def end(self, episode_id: str) -> None:
        """The episode asks no more: free its cache. Always called, also for one that failed."""

    async def score(self, token_ids: array[int], temperature: float = 1.0) -> array[float]:
        """Logprob of each token given those before it; the first token's is 0."""
        ...


class EngineControl(Protocol):
    """The trainer's side of an engine."""

    def sleep(self) -> None:
        """The trainer works from now on and nothing is asked for until `publish`.

        An engine may give back memory that it shares with the trainer.
        """

    def publish(self, update: Update) -> int:
        """Take the policy as it is now: what is sampled from now on carries `update.version`.

        Returns:
            How many bytes were sent.

        Raises:
            EngineError: the engine did not take it, or does not sample from it.
        """
        ...

    def close(self) -> None:
        """Free everything; requests in flight fail with `EngineError`."""
        ...


class Engine(Sampler, EngineControl, Protocol):
    """Both faces: what a command opens and closes."""

    async def scores(self, token_ids: array[int]) -> list[array[float]]:
        """As `score` at temperature 1, by every engine that this one is made of.

        Raises:
            EngineError: none of them answers.
        """
        return [await self.score(token_ids)]

    def metrics(self) -> dict[str, float]:
        """What happened to it since the last call, for the record of a step."""
        return {}
