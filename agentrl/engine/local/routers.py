"""The routers of a mixture of experts: record the experts that they choose, or replace them.

Two passes that are both right round differently, and send some tokens to different experts. Then
their logprobs differ by more than rounding. If the trainer runs the experts that the engine chose,
they do not (rollout routing replay, arXiv 2510.11370). The weights of these experts are still those
of the trainer's own router, which so gets a gradient.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from agentrl.errors import ConfigError, RunStopped

TRIAL_TOKENS = 7
"""The tokens of the passes that find the routers."""
MIN_CHANGE = 4.0
"""Other experts must change the logits so many times as much as the same experts chosen again."""
NO_REPLAY = "Set rollout.router_replay=false"


class Choices(TorchFunctionMode):
    """Within its block, `choose` decides what `torch.topk` returns."""

    def choose(self, candidates: Tensor, indices: Tensor) -> Tensor:
        """Return the indices that `topk` returns in place of its own, of the same shape."""
        raise NotImplementedError

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch."""
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        indices = self.choose(args[0], result.indices)
        if indices is result.indices:
            return result
        return type(result)((args[0].gather(-1, indices), indices))


def choices_of_a_token(config: PretrainedConfig) -> tuple[int, int]:
    """Return the number of layers of a model, and of the experts that a token has in a layer.

    Raises:
        ConfigError: the model has no routers, by its config.
    """
    text = config.get_text_config()
    top_k = getattr(text, "num_experts_per_tok", None)
    if not isinstance(top_k, int):
        raise ConfigError(
            f"rollout.router_replay=true: the config of {config.model_type} has no"
            f" num_experts_per_tok, so it has no routers. {NO_REPLAY}"
        )
    return text.num_hidden_layers, top_k


class Routers:
    """The routers of a model. Without `replay` and `recording`, it runs as it did before.

    The experts of a token are `width` numbers: `top_k` of each layer, -1 in layers without a
    router.
    """

    def __init__(self, model: PreTrainedModel):
        """Find the routers, and check that the model runs the experts that replace their choices.

        Args:
            model: in evaluation mode, with its own attention; `forward` of its routers is replaced.

        Raises:
            ConfigError: there are none, or the model does not run other experts than its own.
        """
        self.layers, self.top_k = choices_of_a_token(model.config)
        self.width = self.layers * self.top_k
        self.experts = 0
        """The number of experts of a layer."""
        self._replayed: Tensor | None = None
        self._recorded: dict[int, Tensor] | None = None
        self._calls: dict[int, int] = {}
        name = type(model).__name__
        try:
            self._find(model)
            self._check(model)
        except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as e:
            raise ConfigError(
                f"rollout.router_replay=true: {name} cannot run the experts that an engine chose:"
                f" {e}. {NO_REPLAY}"
            ) from e

    def replay(self, experts: Tensor | None) -> None:
        """Run these experts from now on, also if a backward pass runs layers again.

        Args:
            experts: (N, width) of the tokens of the next passes. A token without experts in a layer
                (-1) gets the router's own. None: all tokens do.
        """
        self._replayed = experts

    def check(self, experts: Tensor) -> None:
        """Check experts of an engine, (..., width), before a pass.

        Raises:
            RunStopped: they are not those of this model.
        """
        width, largest = experts.shape[-1], int(experts.max())
        if width != self.width or largest >= self.experts:
            raise RunStopped(
                f"the engine chose {width} experts for a token, up to number {largest}, but the"
                f" model has {self.layers} layers with {self.top_k} of {self.experts} experts"
            )

    @contextmanager
    def recording(self) -> Iterator[dict[int, Tensor]]:
        """Record the experts of one pass within the block: (N, top_k) by layer. See `join`."""
        self._recorded = recorded = {}
        try:
            yield recorded
        finally:
            self._recorded = None

    def join(self, recorded: dict[int, Tensor]) -> Tensor:
        """Return what `recording` has recorded as experts, (N, width) int16."""
        some = next(iter(recorded.values()))
        missing = torch.full_like(some, -1)
        layers = [recorded.get(layer, missing) for layer in range(self.layers)]
        return torch.cat(layers, -1).to(torch.int16)

    def _find(self, model: PreTrainedModel) -> None:
        """Replace `forward` of each module that chooses experts.

        A router may call `topk` for groups of experts first, so its last call is the choice.
        """
        names = {module: name for name, module in model.named_modules()}
        running: list[nn.Module] = []
        calls: dict[nn.Module, list[int]] = {}
        routers = self

        def leave(*_: Any) -> None:
            running.pop()

        class Finder(Choices):
            def choose(self, candidates: Tensor, indices: Tensor) -> Tensor:
                count = calls.setdefault(running[-1], [0, 0, 0])
                count[0] += 1
                if indices.numel() == TRIAL_TOKENS * routers.top_k == len(indices) * routers.top_k:
                    count[1:] = count[0], candidates.shape[-1]
                return indices

        handles = [m.register_forward_pre_hook(lambda m, _: running.append(m)) for m in names]
        handles += [m.register_forward_hook(leave) for m in names]
        try:
            with Finder():
                _trial(model)
        finally:
            for handle in handles:
                handle.remove()
        for module, (_, call, experts) in calls.items():
            if not call:
                continue
            layer = int(re.findall(r"\.(\d+)\.", names[module])[0])
            if layer in self._calls or layer >= self.layers:
                raise ValueError(f"layer {layer} has several routers")
            self._calls[layer], self.experts = call, max(experts, self.experts)
            module.forward = torch.compiler.disable(partial(self._run, layer, module.forward))
        if not self._calls:
            raise ValueError("no module chooses its experts by torch.topk")

    def _run(self, layer: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if self._replayed is None and self._recorded is None:
            return forward(*args, **kwargs)
        with _Router(self, layer):
            return forward(*args, **kwargs)

    def _check(self, model: PreTrainedModel) -> None:
        """Replace the model's choices by themselves, and then those of each router by others.

        Raises:
            ValueError: the logits change, or do not change.
        """
        try:
            with self.recording() as recorded:
                own = _trial(model)
            experts = self.join(recorded)
            self.replay(experts)
            rounding = (_trial(model) - own).norm()
            for layer in self._calls:
                part = slice(layer * self.top_k, (layer + 1) * self.top_k)
                others = experts.clone()
                others[:, part] = (others[:, part] + 1) % self.experts
                self.replay(others)
                if not (_trial(model) - own).norm() > MIN_CHANGE * rounding:
                    raise ValueError(f"its logits do not depend on the choices of layer {layer}")
            if rounding > 0.1 * (own - own.mean(-1, keepdim=True)).norm():
                raise ValueError("the same choices give other logits")
        finally:
            self.replay(None)


class _Router(Choices):
    """Records or replaces the choice of one router in one call of its `forward`."""

    def __init__(self, routers: Routers, layer: int):
        super().__init__()
        self._routers, self._layer, self._call = routers, layer, 0

    def choose(self, candidates: Tensor, indices: Tensor) -> Tensor:
        routers, layer = self._routers, self._layer
        self._call += 1
        if self._call != routers._calls[layer]:
            return indices
        if (replayed := routers._replayed) is not None:
            start = layer * routers.top_k
            chosen = replayed[:, start : start + routers.top_k].to(indices)
            indices = chosen.where(chosen >= 0, indices)
        if routers._recorded is not None:
            routers._recorded[layer] = indices
        return indices


@torch.no_grad()
def _trial(model: PreTrainedModel) -> Tensor:
    """Return the logits of a short row, (T, V)."""
    ids = torch.arange(1, 1 + TRIAL_TOKENS, device=model.device)[None]
    return model(input_ids=ids, use_cache=False).logits[0].float()
