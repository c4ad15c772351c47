"""Who samples tokens: the two faces of an engine.

An episode sees a `Sampler`, the trainer an `EngineControl`. Token ids go in; ids, logprobs and
policy versions come out. Logprobs are log_softmax(logits / temperature) over the full vocabulary,
of the sampled token, because the trainer's are too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import asdict, dataclass
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


class Sampler(Protocol):
    """All that an episode and a rollout see of an engine."""

    max_length: int
    """The longest row, in tokens: prompt, sampled and observed together."""

    def begin(self, episode_id: str) -> None:
        """Announce an episode that will ask for tokens.

        Rollouts announce a step's episodes before any runs, so that an engine may batch by episodes
        and turns instead of by wall clock.
        """
        ...

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
        ...

    async def score(self, token_ids: array[int], temperature: float = 1.0) -> array[float]:
        """Logprob of each token given those before it; the first token's is 0."""
        ...


class EngineControl(Protocol):
    """The trainer's side of an engine."""

    def publish(self, update: Iterable[tuple[str, Any]], version: int) -> None:
        """Replace the named tensors; tokens sampled from now on carry `version`."""
        ...

    def pause(self) -> None:
        """Stop stepping until `resume`; nothing in flight is lost."""
        ...

    def resume(self) -> None:
        """Go on after `pause`."""
        ...

    def close(self) -> None:
        """Free everything; requests in flight fail with `EngineError`."""
        ...


class Engine(Sampler, EngineControl, Protocol):
    """Both faces: what a command opens and closes."""
