"""What the optimizer steps of one batch share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from torch import Tensor

from agentrl.config import Config
from agentrl.trainer.batch import Batch, Targets, check_logprobs
from agentrl.trainer.mismatch import mismatch, weight_metrics


class PolicyUpdate:
    """What the optimizer steps of one batch have in common."""

    def __init__(
        self,
        config: Config,
        batch: Batch,
        targets: Targets,
        check: Callable[[Mapping[str, float]], None] | None,
    ):
        """Compare engine and trainer at once where the old logprobs are given."""
        self.batch = batch
        self.mask = batch.action_mask
        self.compared: dict[str, float] = {}
        self.given_old = targets.old_logprobs is not None
        self._a = a = config.algorithm
        self._targets, self._check = targets, check
        taught = self.mask & (targets.advantages != 0)
        self.moves = self.mask if a.kl_loss_coef or a.entropy_coef else taught
        given = targets.old_logprobs
        self.old = torch.zeros_like(batch.rollout_logprobs) if given is None else given
        if self.given_old:
            self.compare()

    def columns(self, finding: bool) -> dict[str, Tensor]:
        """(B, T) each: what the loss needs; `finding`: the old logprobs are not known yet."""
        t = self._targets
        columns = {"weights": t.weights, "advantages": t.advantages}
        if not finding:
            columns["old"] = self.old
        if self._a.tis_cap:
            columns["rollout"] = self.batch.rollout_logprobs
        if self._a.kl_loss_coef:
            assert t.reference_logprobs is not None
            columns["reference"] = t.reference_logprobs
        return columns

    @cached_property
    def _ran(self) -> Tensor:
        return self.mask if self.given_old else self.mask & self.moves.any(1)[:, None]

    def compare(self) -> None:
        """Engine against trainer, as soon as `old` is known."""
        check_logprobs(self.batch, self.old, self._ran, "trainer")
        self.compared |= mismatch(self.batch, self.old, self._ran)
        self.compared |= weight_metrics(self.batch, self.old, self._ran, self._a)
        if self._check:
            self._check(self.compared)
