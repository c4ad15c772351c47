"""Publishing: from the learner to the engine, with the proof that it arrived.

After every update of weights trainer and engine both score one fixed row. Where they hold the same,
their logprobs differ by what different arithmetic does (0.009 nats on average in bfloat16, 0.02
with an adapter, 1e-6 in float32), which is measured once, at the start. An engine that stayed
behind differs from the trainer in the very direction in which the policy moved; one that holds
something else differs by more than arithmetic did until then. Both are judged only where the policy
moved further than that noise: at small learning rates a step is less. Where it did not, only a
difference that no step explains is wrong.
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


class Publisher:
    """The way of the policy to the engine."""

    def __init__(
        self,
        learner: Learner,
        engine: EngineControl,
        token_ids: array[int],
        scores: Callable[[array[int]], list[array[float]]],
        noise: float | None = None,
        canary: Mapping[str, Any] | None = None,
    ):
        """Send nothing yet.

        Args:
            learner: has the policy.
            engine: gets it.
            token_ids: a row that both score after each update, two tokens at least.
            scores: the logprobs of it by every engine behind `engine`.
            noise: of the run's beginning, where it goes on from a checkpoint: then an engine that
                holds the base is not taken for the measure.
            canary: `canary` of the checkpoint that the run goes on from; older ones have none.
        """
        self._learner, self._engine = learner, engine
        self._token_ids, self._scores = token_ids, scores
        self._canary = None if noise is None else Canary(noise)
        if self._canary is not None and canary is not None:
            self._canary.load(canary)

    @property
    def noise(self) -> float:
        """Mean absolute difference of the logprobs at the first publication, in nats."""
        assert self._canary is not None, "nothing was published yet"
        return self._canary.reference

    @property
    def canary(self) -> dict[str, Any]:
        """What a run that goes on must know of the publications so far."""
        assert self._canary is not None, "nothing was published yet"
        return self._canary.state

    def publish(self, version: int) -> dict[str, float]:
        """Hand the policy to the engine; what it samples from now on carries `version`.

        Returns:
            `timing_s/update_weights` (until the engine could sample), `perf/update_weights_bytes`,
            and the canary's, with `timing_s/canary`.

        Raises:
            RunStopped: the engine did not take it, or does not sample from it.
        """
        start = time.perf_counter()
        if self._canary is None and self._learner.lora:
            self._canary = self._measure_perturbed(version)
        send_start = time.perf_counter()
        sent = self._send(version)
        send_end = time.perf_counter()
        trainer, engines = self._score_both()
        if self._canary is None:
            self._canary = Canary.measure(trainer, engines)
        metrics = self._canary.check(trainer, engines, version)
        return metrics | {
            "timing_s/update_weights": send_end - send_start,
            "timing_s/canary": send_start - start + time.perf_counter() - send_end,
            "perf/update_weights_bytes": float(sent),
        }

    def _measure_perturbed(self, version: int) -> Canary:
        """Measured with another adapter: as it begins it is zero, not seen where it is ignored."""
        with self._learner.perturbed_adapter():
            self._send(version)
            canary = Canary.measure(*self._score_both())
            self._engine.sleep()  # what was shaken is sent to no engine that comes late
        return canary

    def _send(self, version: int) -> int:
        update = self._learner.make_update(version)
        if torch.cuda.is_available() and self._learner.config.rollout.sleep != "none":
            torch.cuda.empty_cache()  # the engine takes its memory back
        try:
            return self._engine.publish(update)
        except EngineError as e:
            raise RunStopped(f"the engine did not take version {version} of the policy: {e}") from e

    def _score_both(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The logprobs of the row: trainer's, (T - 1,), and each engine's, (engines, T - 1)."""
        try:
            scores = self._scores(self._token_ids)
        except EngineError as e:
            raise RunStopped(f"the engine does not score a row: {e}") from e
        return self._learner.ranks.score(self._token_ids), torch.tensor(scores)[:, 1:]


NOISE_TOLERANCE = 1.5
"""Times the noise. Noise may grow with the policy, but not at once: logits that a run sharpens are
larger, and so are their rounding errors."""
MIN_MOVEMENT = 3.0
"""Times the noise: a policy that moved further is told from the last one."""
MAX_NOISE_GROWTH = 3.0
"""Times the mismatch at the start: more growth is no noise."""
FAR_MOVEMENT, ROUNDING_SHARE = 10.0, 0.05
"""A policy that moves by more than `FAR_MOVEMENT` times the noise at once may bring this share of the rest
as rounding errors of its own, up to the noise: one of 7 billion new random weights did."""
MAX_LAG = 0.25
"""The share of the last movement that an engine may lack."""
MIN_NOISE = 1e-5
"""The noise of float32, in nats; what is measured at the start may be less by chance."""
MAX_START_MISMATCH = 0.2
"""Nats at the start: more is no arithmetic, but another model."""


class Canary:
    """The fixed row, as it was scored last."""

    def __init__(self, reference: float):
        """Judge by what was measured at the start.

        Args:
            reference: mean absolute difference of the logprobs in nats.
        """
        self.reference = reference
        self._noise = reference
        self._last: Tensor | None = None
        """The trainer's logprobs when an engine was last seen to follow them."""

    @classmethod
    def measure(cls, trainer: Tensor, engines: Tensor) -> Canary:
        """Measure at the start, where both hold the same.

        Args:
            trainer: (T,) its logprobs.
            engines: (E, T) those of each engine.

        Raises:
            RunStopped: they are of different models.
        """
        reference = max(_max(_distance(trainer, e) for e in engines), MIN_NOISE)
        if not reference <= MAX_START_MISMATCH:
            raise RunStopped(
                f"engine and trainer differ by {reference:.3g} nats a token before the first"
                f" step, where arithmetic makes at most {MAX_START_MISMATCH:g}. Do they hold the same"
                " model? Were the weights, or the adapter, taken by the engine?"
            )
        return cls(reference)

    @property
    def state(self) -> dict[str, Any]:
        """What `load` takes back, in values that JSON can hold."""
        return {"noise": self._noise, "last": None if self._last is None else self._last.tolist()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`: a later drift is measured from the same logprobs, as it was."""
        self._noise = state["noise"]
        self._last = None if state["last"] is None else torch.tensor(state["last"])

    def check(self, trainer: Tensor, engines: Tensor, version: int) -> dict[str, float]:
        """Judge an update.

        Args:
            trainer: (T,) its logprobs now.
            engines: (E, T) those of each engine.
            version: for the message.

        Returns:
            In nats: `canary/mismatch` and `canary/drift`, how far the policy moved since an engine
            was last seen to follow it.

        Raises:
            RunStopped: the engine does not hold what the trainer holds.
        """
        # The row has another length if a run is resumed with an engine that takes fewer tokens.
        if self._last is not None and len(self._last) != len(trainer):
            self._last = None
        drift = 0.0 if self._last is None else _distance(trainer, self._last)
        moved = drift > MIN_MOVEMENT * self._noise
        worst = _max(self._judge(trainer, e, drift, moved, version) for e in engines)
        if moved or self._last is None:
            self._noise = min(max(self.reference, worst), MAX_NOISE_GROWTH * self.reference)
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
            f" explains {limit:.3g} ({self.reference:.3g} at the start; the policy moved by"
            f" {drift:.3g}). "
            + (
                f"They lack {lag:.0%} of that movement: the engine still samples from an earlier"
                " version."
                if lag > MAX_LAG
                else "The engine holds something else than any version: other weights, or no"
                " adapter."
            )
        )


def _share(missing: Tensor, movement: Tensor) -> float:
    """How much of a movement is missing: 0 none, 1 all of it; noise is at right angles to it."""
    return (torch.dot(missing, movement) / torch.dot(movement, movement)).item()


def _distance(a: Tensor, b: Tensor) -> float:
    """Mean absolute difference; NaN where either has one."""
    return (a - b).abs().mean().item()


def _max(mismatches: Iterable[float]) -> float:
    """The largest; NaN where any is, which Python's `max` may pass over."""
    return torch.tensor(list(mismatches)).max().item()
