"""Named parameters and the AdamW that moves them: one for the policy, one for a critic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from agentrl.config import OptimConfig
from agentrl.errors import ConfigError
from agentrl.trainer.sharding import whole

BETAS = (0.9, 0.999)
"""AdamW's own: memories of 10 and of 1,000 steps."""


class Optimizer:
    """AdamW with clipped gradients; the learning rate rises, then is linear in the step."""

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, nn.Parameter],
        lr: float,
        config: OptimConfig,
        total_steps: int,
        accelerator: Accelerator,
        betas: tuple[float, float] = BETAS,
    ):
        """Set up; nothing is allocated for moments until the first step.

        Args:
            name: "actor" or "critic"; names its files.
            parameters: what learns, by name.
            lr: its peak.
            config: the section `optim`.
            total_steps: of the run; the last one's learning rate is `lr * config.lr_final`.
            accelerator: does the clipping.
            betas: AdamW's.
        """
        self.name = name
        self.parameters = dict(parameters)
        self._schedule = Schedule(lr, config, total_steps)
        self._adam = _adam(config, list(self.parameters.values()), lr, betas)
        self._max_grad_norm = config.max_grad_norm
        self._accelerator = accelerator
        self._stowed = config.offload == "optimizer" and accelerator.device.type == "cuda"

    def descend(self, step: int) -> float:
        """One optimizer step on the gradient that is there, which is gone then.

        Args:
            step: 1 for the first of the run; sets the learning rate.

        Returns:
            the gradient's norm, over all ranks, before clipping. If that is no finite number, the
            weights are as they were.
        """
        norm = self._accelerator.clip_grad_norm_(self.parameters.values(), self._max_grad_norm)
        assert norm is not None  # only DeepSpeed keeps it to itself
        size = whole(norm).item()
        if math.isfinite(size):
            for group in self._adam.param_groups:
                group["lr"] = self._schedule(step)
            self._move("cuda")
            self._adam.step()
            self._move("cpu")
        self.forget()
        return size

    def forget(self) -> None:
        """Drop the gradient."""
        self._adam.zero_grad(set_to_none=True)

    def _move(self, device: str) -> None:
        """The moments, where they wait on the CPU between steps."""
        if not self._stowed:
            return
        for state in self._adam.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    state[key] = value.to(device)

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


class Schedule:
    """The learning rate of a step: `Schedule(lr, config, total_steps)(step)`."""

    def __init__(self, lr: float, config: OptimConfig, total_steps: int):
        """Rise to `lr` in `config.lr_warmup_steps`; then fall to `lr * config.lr_final`."""
        self._lr, self._final = lr, config.lr_final
        self._warmup, self._total_steps = config.lr_warmup_steps, total_steps

    def __call__(self, step: int) -> float:
        """Of a step; the first is 1. Steps beyond the last keep the last's."""
        if step <= self._warmup:
            return self._lr * step / (self._warmup + 1)
        first = self._warmup + 1
        done = min(1.0, (step - first) / max(1, self._total_steps - first))
        return self._lr * (1 + (self._final - 1) * done)


def _adam(
    config: OptimConfig, parameters: list[nn.Parameter], lr: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """The optimizer that `optim.name` names.

    Raises:
        ConfigError: its package is not there.
    """
    if config.name == "adamw":
        return torch.optim.AdamW(
            parameters, lr=lr, betas=betas, weight_decay=config.weight_decay, fused=True
        )
    try:
        from torchao.optim import AdamW8bit  # type: ignore[import-not-found]
    except ImportError:
        raise ConfigError(
            'optim.name=adamw_8bit needs torchao: pip install "agentrl[8bit]"'
        ) from None
    return AdamW8bit(parameters, lr=lr, betas=betas, weight_decay=config.weight_decay)
