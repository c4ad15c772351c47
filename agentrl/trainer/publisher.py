"""Publishing: sends the policy to the engine, and checks that the engine uses it.

After every update of weights trainer and engine both score one fixed row, the canary. If they hold
the same weights, their logprobs differ only by arithmetic: by 0.009 nats on average in bfloat16,
0.02 with an adapter, 1e-6 in float32. This noise is measured once, at the start. An engine with
older weights differs from the trainer in the direction in which the policy moved. An engine with
other weights differs by more than the noise. Both are checked only if the policy moved further than
the noise, which a step at a small learning rate may not do. Otherwise only a difference that no
step explains is an error.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from agentrl.engine.base import EngineControl
from agentrl.errors import EngineError, RunStopped
from agentrl.trainer.learner import Learner
from agentrl.trainer.profile import annotate


class Publisher:
    """Sends the policy to the engine."""

    def __init__(
        self,
        learner: Learner,
        engine: EngineControl,
        token_ids: array[int],
        scores: Callable[[array[int]], list[array[float]]],
        noise: float | None = None,
        canary_state: Mapping[str, Any] | None = None,
    ):
        """Create a publisher; nothing is sent yet.

        Args:
            learner: the learner, which has the policy.
            engine: the engine, to which the policy is sent.
            token_ids: the row that learner and engine score after each update, at least two tokens.
            scores: returns the row's logprobs from each engine behind `engine`.
            noise: the noise at the start of the run, from the checkpoint that the run resumes from.
                None: it is measured at the first publication.
            canary_state: `canary_state` at the checkpoint that the run resumes from; older
                checkpoints have none.
        """
        self._learner, self._engine = learner, engine
        self._token_ids, self._scores = token_ids, scores
        self.drifts: dict[int, float] = {}
        """`canary/drift` of each version that was published, in nats."""
        self._canary = None if noise is None else Canary(noise)
        if self._canary is not None and canary_state is not None:
            self._canary.load(canary_state)

    @property
    def noise(self) -> float:
        """Mean absolute difference of the logprobs at the first publication, in nats."""
        assert self._canary is not None, "nothing was published yet"
        return self._canary.baseline_noise

    @property
    def canary_state(self) -> dict[str, Any]:
        """The state of the check, for a checkpoint."""
        assert self._canary is not None, "nothing was published yet"
        return self._canary.state

    def publish(self, version: int) -> dict[str, float]:
        """Send the policy to the engine. Tokens that the engine samples afterwards have `version`.

        Returns:
            `timing_s/update_weights` (until the engine can sample), `perf/update_weights_bytes`,
            and the canary's metrics with `timing_s/canary`.

        Raises:
            RunStopped: the engine did not accept the policy, or does not sample from it.
        """
        start = time.perf_counter()
        if self._canary is None and self._learner.has_lora:
            self._canary = self._measure_perturbed(version)
        send_start = time.perf_counter()
        with annotate("update_weights"):
            sent = self._send(version)
        send_end = time.perf_counter()
        with annotate("canary"):
            trainer, engines = self._score_both()
        if self._canary is None:
            self._canary = Canary.measure(trainer, engines)
        metrics = self._canary.check(trainer, engines, version)
        self.drifts[version] = metrics["canary/drift"]
        return metrics | {
            "timing_s/update_weights": send_end - send_start,
            "timing_s/canary": send_start - start + time.perf_counter() - send_end,
            "perf/update_weights_bytes": float(sent),
        }

    def _measure_perturbed(self, version: int) -> Canary:
        """Measure the noise with a perturbed adapter.

        An initial adapter is zero: it would not show that an engine ignores adapters.
        """
        with self._learner.perturbed_adapter():
            self._send(version)
            canary = Canary.measure(*self._score_both())
            # An engine that starts later must not get the perturbed adapter.
            self._engine.weights_moving()
        return canary

    def _send(self, version: int) -> int:
        update = self._learner.make_update(version)
        if torch.cuda.is_available() and self._learner.config.rollout.sleep != "none":
            torch.cuda.empty_cache()  # the engine needs the memory
        try:
            return self._engine.publish(update)
        except EngineError as e:
            raise RunStopped(
                f"the engine did not accept version {version} of the policy: {e}"
            ) from e

    def _score_both(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row's logprobs: (T - 1,) of the trainer, (engines, T - 1)."""
        try:
            scores = self._scores(self._token_ids)
        except EngineError as e:
            raise RunStopped(f"the engine cannot score a row: {e}") from e
        return self._learner.ranks.score(self._token_ids), torch.tensor(scores)[:, 1:]


NOISE_TOLERANCE = 1.5
"""A multiple of the noise. Noise may grow with the policy, but not suddenly: a run sharpens logits,
and rounding errors grow with them."""
MIN_MOVEMENT = 3.0
"""A multiple of the noise: a policy that moved further can be distinguished from its last version.
"""
MAX_NOISE_GROWTH = 3.0
"""A multiple of the mismatch at the start: larger growth is not noise."""
FAR_MOVEMENT, ROUNDING_SHARE = 10.0, 0.05
"""If a policy moves by more than `FAR_MOVEMENT` times the noise in one update, the limit of the
mismatch grows by `ROUNDING_SHARE` of the excess, at most by the noise: the new weights have other
rounding errors. A model with 7 billion new random weights needed this."""
MAX_LAG = 0.25
"""The share of the last movement that an engine may lack."""
MIN_NOISE = 1e-5
"""The noise of float32, in nats. The value measured at the start may be smaller by chance."""
MAX_START_MISMATCH = 0.2
"""In nats, at the start. A larger difference means another model."""


class Canary:
    """The state of the check: the noise, and the trainer's logprobs when the policy last moved."""

    def __init__(self, baseline_noise: float):
        """Use the noise that was measured at the start.

        Args:
            baseline_noise: mean absolute difference of the logprobs in nats.
        """
        self.baseline_noise = baseline_noise
        self._noise = baseline_noise
        self._last: Tensor | None = None
        """The trainer's logprobs when an engine was last seen to follow them."""

    @classmethod
    def measure(cls, trainer: Tensor, engines: Tensor) -> Canary:
        """Measure the noise at the start, when trainer and engines hold the same weights.

        Args:
            trainer: (T,) the trainer's logprobs.
            engines: (E, T) the logprobs of each engine.

        Raises:
            RunStopped: trainer and engines hold different models.
        """
        baseline_noise = max(_max(_distance(trainer, e) for e in engines), MIN_NOISE)
        if not baseline_noise <= MAX_START_MISMATCH:
            raise RunStopped(
                f"engine and trainer differ by {baseline_noise:.3g} nats a token before the first"
                f" step, where arithmetic explains at most {MAX_START_MISMATCH:g}. Do they hold the"
                " same model? Did the engine load the weights, or the adapter?"
            )
        return cls(baseline_noise)

    @property
    def state(self) -> dict[str, Any]:
        """The state that `load` restores, in JSON values."""
        return {"noise": self._noise, "last": None if self._last is None else self._last.tolist()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore `state`, so that later drift is measured from the same logprobs."""
        self._noise = state["noise"]
        self._last = None if state["last"] is None else torch.tensor(state["last"])

    def check(self, trainer: Tensor, engines: Tensor, version: int) -> dict[str, float]:
        """Check an update.

        Args:
            trainer: (T,) the trainer's logprobs after the update.
            engines: (E, T) the logprobs of each engine.
            version: for the message.

        Returns:
            `canary/mismatch`: the largest difference of an engine's logprobs from the trainer's.
                `canary/drift`: the change of the trainer's logprobs since the last check in which
                the policy had moved. Both are mean absolute differences in nats.

        Raises:
            RunStopped: the engine does not hold the trainer's weights.
        """
        # The row is shorter if a run resumes with an engine that accepts fewer tokens.
        if self._last is not None and len(self._last) != len(trainer):
            self._last = None
        drift = 0.0 if self._last is None else _distance(trainer, self._last)
        moved = drift > MIN_MOVEMENT * self._noise
        worst = _max(self._judge(trainer, e, drift, moved, version) for e in engines)
        if moved or self._last is None:
            self._noise = min(
                max(self.baseline_noise, worst), MAX_NOISE_GROWTH * self.baseline_noise
            )
            self._last = trainer
        return {"canary/mismatch": worst, "canary/drift": drift}

    def _judge(
        self, trainer: Tensor, engine: Tensor, drift: float, moved: bool, version: int
    ) -> float:
        mismatch = _distance(trainer, engine)
        if moved:
            rounding = ROUNDING_SHARE * max(0.0, drift - FAR_MOVEMENT * self._noise)
            limit = NOISE_TOLERANCE * self._noise + min(rounding, self._noise)
        else:
            limit = MIN_MOVEMENT * self._noise + drift
        lag = 0.0
        if moved and self._last is not None:
            lag = _share(trainer - engine, trainer - self._last)
        if mismatch <= limit and lag <= MAX_LAG:
            return mismatch
        raise RunStopped(
            f"version {version} of the policy was published, but the engine's logprobs of a fixed"
            f" row differ from the trainer's by {mismatch:.3g} nats a token, where arithmetic"
            f" explains {limit:.3g} ({self.baseline_noise:.3g} at the start; the policy moved by"
            f" {drift:.3g}). "
            + (
                f"The engine's logprobs lack {lag:.0%} of this movement: it still samples from an"
                " earlier version."
                if lag > MAX_LAG
                else "The engine does not hold any version of the policy: it has other weights, or"
                " no adapter."
            )
        )


def _share(missing: Tensor, movement: Tensor) -> float:
    """Return how much of a change of logprobs is missing: 0 for none of it, 1 for all of it.

    Noise in `missing` has little influence, because it is almost orthogonal to `movement`.
    """
    return (torch.dot(missing, movement) / torch.dot(movement, movement)).item()


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the mean absolute difference; NaN if either has a NaN."""
    return (a - b).abs().mean().item()


def _max(mismatches: Iterable[float]) -> float:
    """Return the largest number; NaN if any is NaN, which Python's `max` may miss."""
    return torch.tensor(list(mismatches)).max().item()
