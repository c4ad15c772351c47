"""Whether the engine samples from what the trainer trains: asked after every update of weights.

Both score one fixed row. Where they hold the same, their logprobs differ by what different
arithmetic does (0.009 nats on average in bfloat16, 0.02 with an adapter, 1e-6 in float32), which is
measured once, at the start. Where the policy has moved further than that since the last time, an
engine that stayed behind is seen; where it has moved less, noise would be judged, and only an
engine that is neither the new policy nor the last one is.
"""

from __future__ import annotations

from torch import Tensor

from agentrl.errors import RunStopped

TOLERANCE = 1.5
"""Times the mismatch at the start."""
MOVED = 3.0
"""Times the mismatch at the start: a policy that moved further is judged by itself."""
LEAST_MISMATCH = 1e-5
"""The noise of float32, in nats; what is measured at the start may be less by chance."""
MOST_MISMATCH = 0.2
"""Nats at the start: more is no arithmetic, but another model."""


class Canary:
    """The fixed row, as it was scored last."""

    def __init__(self, trainer: Tensor, engines: Tensor):
        """Measure at the start, where both hold the same.

        Args:
            trainer: (T,) its logprobs.
            engines: (E, T) those of each engine.

        Raises:
            RunStopped: they are of different models.
        """
        self.reference = max(_distance(trainer, _worst(trainer, engines)), LEAST_MISMATCH)
        """Mean absolute difference of the logprobs in nats."""
        if not self.reference <= MOST_MISMATCH:
            raise RunStopped(
                f"engine and trainer differ by {self.reference:.3g} nats a token before the first"
                f" step, where arithmetic makes at most {MOST_MISMATCH:g}. Do they hold the same"
                " model? Were the weights, or the adapter, taken by the engine?"
            )
        self._last: Tensor | None = None

    def check(self, trainer: Tensor, engines: Tensor, version: int) -> dict[str, float]:
        """Judge an update.

        Args:
            trainer: (T,) its logprobs now.
            engines: (E, T) those of each engine.
            version: for the message.

        Returns:
            `canary/mismatch` and, from the second time on, `canary/drift`, in nats.

        Raises:
            RunStopped: the engine does not hold what the trainer holds.
        """
        engine = _worst(trainer, engines)
        mismatch = _distance(trainer, engine)
        drift = 0.0 if self._last is None else _distance(trainer, self._last)
        moved = drift > MOVED * self.reference
        limit = TOLERANCE * self.reference if moved else MOVED * self.reference + drift
        if not mismatch <= limit:
            stale = "" if self._last is None else self._stale(engine, mismatch)
            raise RunStopped(
                f"version {version} of the policy was published, but the engine's logprobs of a"
                f" fixed row differ from the trainer's by {mismatch:.3g} nats a token, where"
                f" {limit:.3g} is the most that arithmetic explains ({self.reference:.3g} at the"
                f" start; the policy moved by {drift:.3g}).{stale}"
            )
        metrics = {"canary/mismatch": mismatch}
        if self._last is not None:
            metrics["canary/drift"] = drift
        self._last = trainer
        return metrics

    def _stale(self, engine: Tensor, mismatch: float) -> str:
        assert self._last is not None
        before = _distance(engine, self._last)
        if before < mismatch:
            return (
                f" They are nearer to the last version's ({before:.3g}): the engine still samples"
                " from that one."
            )
        return " They are no nearer to the last version's: the engine holds something else."


def _distance(a: Tensor, b: Tensor) -> float:
    """Mean absolute difference; NaN where either has one."""
    return (a - b).abs().mean().item()


def _worst(trainer: Tensor, engines: Tensor) -> Tensor:
    """(T,) of the engine that is furthest from the trainer, and of one with NaN first."""
    return engines[(engines - trainer).abs().mean(1).argmax()]
