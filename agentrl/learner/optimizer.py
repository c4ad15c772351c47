"""AdamW over named parameters: one optimizer for the policy, one for a critic."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from agentrl.config import OptimConfig
from agentrl.errors import ConfigError
from agentrl.installation import install_command
from agentrl.learner.sharding import full_tensor
from agentrl.learner.state import PARAMETER_PREFIX, check_state, read_state, write_state

BETAS = (0.9, 0.999)
"""AdamW's default decay rates: averages over about 10 and 1,000 steps."""


class Optimizer:
    """AdamW with gradient clipping."""

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, nn.Parameter],
        config: OptimConfig,
        accelerator: Accelerator,
        betas: tuple[float, float] = BETAS,
    ):
        """Create the optimizer. Memory for the moments is allocated by the first step.

        Args:
            name: "actor" or "critic"; the name of its folder in a checkpoint.
            parameters: the parameters that learn, by name.
            config: the section `optim`.
            accelerator: clips the gradient.
            betas: AdamW's decay rates of the two moments.
        """
        self.name = name
        self.parameters = dict(parameters)
        self._adamw = _make_adamw(config, list(self.parameters.values()), betas)
        self._max_grad_norm = config.max_grad_norm
        self._accelerator = accelerator
        self._offloads_moments = config.offload == "optimizer" and accelerator.device.type == "cuda"

    def step(self, lr: float) -> float:
        """Run one optimizer step and drop the gradient.

        Args:
            lr: the learning rate.

        Returns:
            The gradient norm over all ranks, before clipping. If it is not finite, no weight has
            changed.
        """
        norm = self._accelerator.clip_grad_norm_(self.parameters.values(), self._max_grad_norm)
        assert norm is not None  # only DeepSpeed returns None
        size = full_tensor(norm).item()
        if math.isfinite(size):
            for group in self._adamw.param_groups:
                # torchao keeps the learning rate in a tensor, which must not be replaced.
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr
            self._move_moments("cuda")
            self._adamw.step()
            self._move_moments("cpu")
        self.zero_grad()
        return size

    def zero_grad(self) -> None:
        """Drop the gradient."""
        self._adamw.zero_grad(set_to_none=True)

    def _move_moments(self, device: str) -> None:
        """Move the moments to a device, if they are kept on the CPU between steps."""
        if not self._offloads_moments:
            return
        for state in self._adamw.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    state[key] = value.to(device)

    def save(self, folder: Path) -> None:
        """Write parameters and moments into `folder/<name>`. All ranks call it at once.

        Raises:
            RunStopped: a rank cannot write there.
        """
        write_state(folder / self.name, self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint: `parameter.<name>` and AdamW's state."""
        return self._parameters() | self._moments()

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, bit for bit; quantised moments are restored up to rounding.

        All ranks call it at once. The number of ranks may differ from that of `save`.

        Raises:
            ConfigError: the files belong to another model (other names or shapes), or do not exist.
        """
        folder, ours = folder / self.name, self._parameters()
        moments = check_state(folder, ours, PARAMETER_PREFIX)
        self._init_moments({name.partition(".")[2] for name in moments})
        read_state(folder, ours | self._moments())
        self._move_moments("cpu")

    def _parameters(self) -> dict[str, Tensor]:
        return {PARAMETER_PREFIX + name: p.detach() for name, p in self.parameters.items()}

    def _moments(self) -> dict[str, Tensor]:
        """Return AdamW's state: `exp_avg.<name>`, `exp_avg_sq.<name>` and `step.<name>`."""
        return {
            f"{kind}.{name}": value
            for name, parameter in self.parameters.items()
            for kind, value in self._adamw.state.get(parameter, {}).items()
        }

    def _init_moments(self, names: Collection[str]) -> None:
        """Allocate the moments of these parameters, to be overwritten.

        AdamW allocates them in its first step. That step also changes the parameters, which the
        caller overwrites too.
        """
        self._adamw.state.clear()
        for name in names:
            self.parameters[name].grad = torch.zeros_like(self.parameters[name])
        if names:
            self._adamw.step()
        self.zero_grad()


def learning_rate(peak: float, config: OptimConfig, total_steps: int, step: int) -> float:
    """Return the learning rate of a step.

    It rises to `peak` in `config.lr_warmup_steps`, then falls linearly to `peak * config.lr_final`
    at the last of `total_steps`, where it stays.

    Args:
        peak: the highest learning rate.
        config: the section `optim`.
        total_steps: the length of the run.
        step: the number of the step, from 1.
    """
    if step <= config.lr_warmup_steps:
        return peak * step / (config.lr_warmup_steps + 1)
    first = config.lr_warmup_steps + 1
    fraction = min(1.0, (step - first) / max(1, total_steps - first))
    return peak * (1 + (config.lr_final - 1) * fraction)


def _make_adamw(
    config: OptimConfig, parameters: list[nn.Parameter], betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """Return the optimizer that `optim.name` names.

    Raises:
        ConfigError: its package is not installed.
    """
    if config.name == "adamw":
        return torch.optim.AdamW(
            parameters, betas=betas, weight_decay=config.weight_decay, fused=True
        )
    try:
        from torchao.optim import AdamW8bit  # type: ignore[import-not-found]
    except ImportError:
        command = install_command("8bit")
        raise ConfigError(f"optim.name=adamw_8bit needs torchao: {command}") from None
    return AdamW8bit(parameters, betas=betas, weight_decay=config.weight_decay)
