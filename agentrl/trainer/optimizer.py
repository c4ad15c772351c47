"""Named parameters and the AdamW that moves them: one for the policy, one for a critic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from agentrl.config import OptimConfig
from agentrl.errors import ConfigError, RunStopped

Loss = Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]
"""rows (b,) of a micro-batch -> its share of the loss, and numbers to sum over micro-batches."""


class Optimizer:
    """AdamW without weight decay; clipped gradients; a learning rate that is linear in the step."""

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, nn.Parameter],
        lr: float,
        config: OptimConfig,
        total_steps: int,
        accelerator: Accelerator,
    ):
        """Set up; nothing is allocated for moments until the first step.

        Args:
            name: "actor" or "critic"; names its metrics and its files.
            parameters: what learns, by name.
            lr: at step 1.
            config: the section `optim`.
            total_steps: of the run; the last one's learning rate is `lr * config.lr_final`.
            accelerator: does backward and clipping.
        """
        self.name = name
        self.parameters = dict(parameters)
        self._adam = torch.optim.AdamW(
            self.parameters.values(), lr=lr, weight_decay=0.0, fused=True
        )
        self._lr, self._lr_final = lr, config.lr_final
        self._total_steps = total_steps
        self._max_grad_norm = config.max_grad_norm
        self._accelerator = accelerator

    def lr(self, step: int) -> float:
        """The learning rate of a step; the first is 1. Steps beyond the last keep the last's."""
        done = min(1.0, (step - 1) / max(1, self._total_steps - 1))
        return self._lr * (1 + (self._lr_final - 1) * done)

    def descend(
        self,
        step: int,
        micro_batches: Iterable[Tensor],
        loss: Loss,
        before: Callable[[], None] | None = None,
    ) -> dict[str, float]:
        """One optimizer step on the sum of the micro-batches' losses.

        Without any micro-batch the gradient is zero and nothing moves, not even by momentum: what
        taught nothing changes nothing.

        Args:
            step: 1 for the first of the run.
            micro_batches: rows of each.
            loss: of a micro-batch.
            before: called when all micro-batches were run, before any weight moves; what it raises
                leaves the weights as they were.

        Returns:
            what `loss` counted, summed, and the gradient's norm before clipping as `grad_norm`.

        Raises:
            RunStopped: the loss or the gradient is not finite; the weights are as they were.
        """
        self._adam.zero_grad(set_to_none=True)  # what a step that was stopped has left
        sums: dict[str, Tensor] = {}
        for rows in micro_batches:
            with self._accelerator.autocast():
                share, counted = loss(rows)
            self._accelerator.backward(share)
            for key, value in {"loss": share.detach(), **counted}.items():
                sums[key] = sums[key] + value if key in sums else value
        if before:
            before()
        if not sums:
            return {"grad_norm": 0.0}
        norm = self._accelerator.clip_grad_norm_(self.parameters.values(), self._max_grad_norm)
        assert norm is not None  # only DeepSpeed keeps it to itself
        sums["grad_norm"] = norm.detach()
        numbers = torch.stack([value.double() for value in sums.values()])
        counts = dict(zip(sums, numbers.tolist(), strict=True))
        finite = all(map(math.isfinite, counts.values()))
        if finite:
            for group in self._adam.param_groups:
                group["lr"] = self.lr(step)
            self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        if not finite:
            spoilt = ", ".join(f"{key}={counts[key]}" for key in counts)
            raise RunStopped(
                f"step {step}: the {self.name}'s loss or gradient is not finite ({spoilt}). This"
                f" update was not made. A lower learning rate (now {self.lr(step):g}) is the usual"
                " cure; a nan in rollout_logprobs or rewards would have been named before."
            )
        return counts

    def save(self, folder: Path) -> None:
        """Write `<name>.safetensors` and `<name>_optimizer.safetensors`: parameters and moments."""
        moments = {
            f"{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self._adam.state[parameter].items()
        }
        weights = {n: p.detach().contiguous() for n, p in self.parameters.items()}
        save_file(weights, self._file(folder))
        save_file(moments, self._file(folder, "_optimizer"))

    def load(self, folder: Path) -> None:
        """Take back what `save` wrote, bit for bit.

        Raises:
            ConfigError: it is of another model: other names or shapes, or none of these.
        """
        saved = self._read(folder)
        shapes = {name: list(tensor.shape) for name, tensor in saved.items()}
        ours = {name: list(parameter.shape) for name, parameter in self.parameters.items()}
        for name in sorted(shapes.keys() | ours.keys()):
            if shapes.get(name) != ours.get(name):
                raise ConfigError(
                    f"{self._file(folder)} is of another model: {name} is"
                    f" {shapes.get(name, 'missing')} there and {ours.get(name, 'missing')} here"
                )
        moments = self._read(folder, "_optimizer")
        self._adam.state.clear()
        for name, parameter in self.parameters.items():
            with torch.no_grad():
                parameter.copy_(saved[name])
        for name, value in moments.items():
            parameter, key = name.rsplit(".", 1)
            owner = self.parameters[parameter]
            self._adam.state[owner][key] = value.to(owner.device)

    def _read(self, folder: Path, suffix: str = "") -> dict[str, Tensor]:
        try:
            return load_file(self._file(folder, suffix))
        except FileNotFoundError:
            raise ConfigError(
                f"{folder} holds no {self._file(folder, suffix).name}: it was saved by a run of"
                " another algorithm"
            ) from None

    def _file(self, folder: Path, suffix: str = "") -> Path:
        return folder / f"{self.name}{suffix}.safetensors"
