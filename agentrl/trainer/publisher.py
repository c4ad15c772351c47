"""Publishing: sends the policy to the engine, and checks that the engine uses it.

After every update of weights trainer and engine both score one fixed row, the canary. If they hold
the same weights, their logprobs differ only by arithmetic: by 0.009 nats on average in bfloat16,
0.02 with an adapter, 1e-6 in float32. This noise is measured once, at the start, for the row and
for tokens that the engine samples after it. The limit there is a multiple of the model's own
rounding: the change of the trainer's logprobs if all results are rounded once more (`rounding.py`).

Later, an engine with older weights differs from the trainer in the direction in which the policy
moved. An engine with other weights differs by more than the noise. Both are checked only if the
policy moved further than the noise, which a step at a small learning rate may not do. Otherwise
only a difference that no step explains is an error.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl.config.sections import MAX_UNCORRECTED_MISMATCH
from agentrl.engine.base import EngineControl, Update
from agentrl.engine.local.rounding import MAX_ROUNDINGS
from agentrl.engine.remote import fp8
from agentrl.errors import EngineError, RunStopped
from agentrl.learner.learner import Learner
from agentrl.learner.profile import annotate
from agentrl.trajectory import Generation


class Publisher:
    """Sends the policy to the engine."""

    def __init__(
        self,
        learner: Learner,
        engine: EngineControl,
        token_ids: array[int],
        scores: Callable[[array[int]], list[array[float]]],
        state: Mapping[str, Any] | None = None,
        sample: Callable[[array[int]], Generation] | None = None,
    ):
        """Create a publisher; nothing is sent yet.

        Args:
            learner: the learner, which has the policy.
            engine: the engine, to which the policy is sent.
            token_ids: the row that learner and engine score after each update, at least two tokens.
            scores: returns the row's logprobs from each engine behind `engine`.
            state: `state` at the checkpoint that the run resumes from. None: the noise is measured
                at the first publication.
            sample: returns tokens that the engine samples after a row, at temperature 1; None: the
                start compares the row only.
        """
        self._learner, self._engine = learner, engine
        self._token_ids, self._scores, self._sample = token_ids, scores, sample
        self._rounding: float | None = None
        """`canary/rounding`, when it has been measured."""
        self.drifts: dict[int, float] = {}
        """`canary/drift` of each version that was published, in nats."""
        self._sent_steps = -1
        """`Learner.policy_steps` when the engine last passed the check; -1: never."""
        self._scored: tuple[Tensor, Tensor] = torch.zeros(0), torch.zeros(0, 0)
        """The row's logprobs from trainer and engines after the last transfer of weights."""
        self._canary: Canary | None = None
        if state is not None:
            self._rounding, self._canary = state["rounding"], Canary.load(state)

    @property
    def noise(self) -> float:
        """Mean absolute difference of the logprobs at the first publication, in nats."""
        assert self._canary is not None, "nothing was published yet"
        return self._canary.baseline_noise

    @property
    def state(self) -> dict[str, Any]:
        """The state of the check, for a checkpoint."""
        assert self._canary is not None, "nothing was published yet"
        return self._canary.state | {"rounding": self._rounding}

    def publish(self, version: int) -> dict[str, float]:
        """Send the policy to the engine. Tokens that the engine samples afterwards have `version`.

        If no optimizer step has changed the policy since its last transfer, an engine that has it
        gets only the version. If all have it, the check uses the logprobs of the last one.

        Returns:
            `timing_s/update_weights` (until the engine can sample), `perf/update_weights_bytes`,
            and the canary's metrics with `timing_s/canary`. `canary/rounding`, in nats, is the
            model's own rounding at the first publication: of the row's tokens that have a
            probability below a half, since others have almost none.

        Raises:
            RunStopped: the engine did not accept the policy, or does not sample from it.
            EngineError: the engine cannot sample.
        """
        start = time.perf_counter()
        is_start, steps = self._canary is None, self._learner.policy_steps
        is_changed = steps != self._sent_steps
        if is_start and self._learner.has_lora:
            self._canary = self._measure_perturbed(version)
        send_start = time.perf_counter()
        with annotate("update_weights"):
            sent = self._send(version, is_changed)
        send_end = time.perf_counter()
        if is_changed or sent:  # An engine that was restarted or slept may have got the weights.
            with annotate("canary"):
                self._scored = self._score(is_start)
        assert self._canary is not None
        metrics = self._canary.check(*self._scored, version)
        self._sent_steps = steps
        self.drifts[version] = metrics["canary/drift"]
        return metrics | {
            "canary/rounding": self._rounding,
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
            trainer, rounding = self._score_with_rounding(self._token_ids)
            # The limit of `rollout.max_mismatch` is for the policy: this adapter is larger.
            canary = Canary.measure(
                trainer, self._score_engines(), rounding.mean().item(), math.inf
            )
            # An engine that starts later must not get the perturbed adapter.
            self._engine.weights_moving()
        return canary

    def _score(self, is_start: bool) -> tuple[Tensor, Tensor]:
        """Return the row's logprobs: (T - 1,) of the trainer, (engines, T - 1).

        At the start, also measure the model's rounding, and compare the logprobs with which the
        engine samples tokens after the row.
        """
        engines = self._score_engines()
        if not is_start:
            return self._learner.ranks.score(self._token_ids), engines
        sampled = self._sample(self._token_ids) if self._sample else None
        row = self._token_ids + sampled.token_ids if sampled else self._token_ids
        trainer, rounding = self._score_with_rounding(row)
        n = engines.shape[1]
        uncertain = rounding[:n][trainer[:n] < math.log(0.5)]
        self._rounding = uncertain.mean().item() if len(uncertain) else 0.0
        canary = self._measure(trainer[:n], engines, rounding[:n])
        self._canary = self._canary or canary
        if sampled:
            self._measure(trainer[n:], torch.tensor(sampled.logprobs)[None], rounding[n:])
        return trainer[:n], engines

    def _measure(self, trainer: Tensor, engines: Tensor, rounding: Tensor) -> Canary:
        limit = self._learner.config.rollout.max_mismatch
        return Canary.measure(trainer, engines, rounding.mean().item(), limit)

    def _score_with_rounding(self, token_ids: array[int]) -> tuple[Tensor, Tensor]:
        """Return the trainer's logprobs of a row, and how much the engine's rounding changes them.

        Both are (T - 1,). The second is measured in the trainer's precision.
        """
        logprobs = self._learner.ranks.score(token_ids, perturbations=PERTURBATIONS)
        coarser = fp8.ROUNDING if self._learner.config.rollout.is_fp8 else 1
        return logprobs[0], coarser * (logprobs[1:] - logprobs[0]).abs().mean(0)

    def _score_engines(self) -> Tensor:
        """Return the row's logprobs from each engine, (engines, T - 1)."""
        try:
            scores = self._scores(self._token_ids)
        except EngineError as e:
            raise RunStopped(f"the engine cannot score a row: {e}") from e
        return torch.tensor(scores)[:, 1:]

    def _send(self, version: int, is_changed: bool = True) -> int:
        ranks = self._learner.ranks
        update = Update(version, self._learner.export, ranks.send_weights, is_changed)
        if torch.cuda.is_available() and self._learner.config.rollout.sleep != "none":
            torch.cuda.empty_cache()  # the engine needs the memory
        try:
            return self._engine.publish(update)
        except EngineError as e:
            raise RunStopped(
                f"the engine did not accept version {version} of the policy: {e}"
            ) from e


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
MAX_START_MISMATCH = MAX_UNCORRECTED_MISMATCH
"""In nats, at the start. Even if rounding explains a larger difference, the engine's samples are
not the policy's."""
ROW_TOKENS_PER_SAMPLE = 4
"""At the start, an engine samples one token for each 4 tokens of the row. They are compared too."""
SAMPLED_SECONDS = 600.0
"""Their time limit: a server's first turn may be slow, and `rollout.timeout_s` short."""
PERTURBATIONS = 4
"""The number of passes in which the model's own rounding is measured."""


@dataclass
class Canary:
    """The state of the check: the noise, and the trainer's logprobs when the policy last moved."""

    baseline_noise: float
    """Mean absolute difference of the logprobs at the start, in nats."""
    noise: float
    """The same after the last update."""
    last: Tensor | None = None
    """The trainer's logprobs when an engine was last seen to follow them."""

    @classmethod
    def measure(
        cls,
        trainer: Tensor,
        engines: Tensor,
        rounding: float = math.inf,
        max_mismatch: float = MAX_START_MISMATCH,
    ) -> Canary:
        """Measure the noise at the start, when trainer and engines hold the same weights.

        Args:
            trainer: (T,) the trainer's logprobs.
            engines: (E, T) the logprobs of each engine.
            rounding: the model's own rounding of these logprobs, a mean in nats; infinite: unknown.
            max_mismatch: `rollout.max_mismatch`.

        Raises:
            RunStopped: trainer and engines hold different models, or rounding alone makes them
                differ by more than `max_mismatch`.
        """
        baseline_noise = max(_max(_distance(trainer, e) for e in engines), MIN_NOISE)
        explained = MAX_ROUNDINGS * max(rounding, MIN_NOISE)
        if not baseline_noise <= min(explained, max_mismatch):
            hint = (
                f" If they do, only rounding makes them differ: rollout.max_mismatch="
                f"{1.5 * baseline_noise:.2g} allows it, with algorithm.tis_cap=2 to correct it."
                if baseline_noise <= explained
                else ""
            )
            raise RunStopped(
                f"engine and trainer differ by {baseline_noise:.3g} nats a token before the first"
                f" step, where arithmetic explains at most {min(explained, max_mismatch):.3g}. Do"
                f" they hold the same model? Did the engine load the weights, or the adapter?{hint}"
            )
        return cls(baseline_noise, baseline_noise)

    @property
    def state(self) -> dict[str, Any]:
        """The state that `load` restores, in JSON values."""
        return vars(self) | {"last": None if self.last is None else self.last.tolist()}

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Canary:
        """Return a canary with this `state`, which measures drift from the same logprobs."""
        last = None if state["last"] is None else torch.tensor(state["last"])
        return cls(state["baseline_noise"], state["noise"], last)

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
        if self.last is not None and len(self.last) != len(trainer):
            self.last = None
        drift = 0.0 if self.last is None else _distance(trainer, self.last)
        moved = drift > MIN_MOVEMENT * self.noise
        worst = _max(self._judge(trainer, e, drift, moved, version) for e in engines)
        if moved or self.last is None:
            self.noise = min(
                max(self.baseline_noise, worst), MAX_NOISE_GROWTH * self.baseline_noise
            )
            self.last = trainer
        return {"canary/mismatch": worst, "canary/drift": drift}

    def _judge(
        self, trainer: Tensor, engine: Tensor, drift: float, moved: bool, version: int
    ) -> float:
        mismatch = _distance(trainer, engine)
        if moved:
            rounding = ROUNDING_SHARE * max(0.0, drift - FAR_MOVEMENT * self.noise)
            limit = NOISE_TOLERANCE * self.noise + min(rounding, self.noise)
        else:
            limit = MIN_MOVEMENT * self.noise + drift
        lag = 0.0
        if moved and self.last is not None:
            lag = _share(trainer - engine, trainer - self.last)
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
