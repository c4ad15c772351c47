"""The policy: what learns, and what an engine samples from; with LoRA, over a frozen base.

Its weights may be spread over ranks (`sharding.py`). Then whatever gathers them (`export`,
`save_adapter`, `save_pretrained`, `shaken`) is called on all ranks at once, and only rank 0 writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from agentrl.engine.local.load import quiet_peft
from agentrl.errors import ConfigError
from agentrl.trainer.head import chosen_logprobs
from agentrl.trainer.model import Scorer
from agentrl.trainer.packing import Packed
from agentrl.trainer.sharding import fill, is_rank_zero, settle, whole

SHAKE = 0.3
"""Norm of what a shaken adapter adds to a layer, as a share of the layer's own: about half a nat,
which is more than training adds, with the rounding errors that belong to it."""
ACTOR, CRITIC = "default", "critic"
"""Names of the LoRA adapters; PEFT writes the one called default as a plain adapter folder."""


class Policy:
    """A causal language model that scores its own tokens."""

    def __init__(
        self, model: PreTrainedModel, temperature: float, compute: torch.dtype | None = None
    ):
        """Use `model`, packed from now on; `add_adapter` makes it a frozen base.

        Args:
            model: in evaluation mode.
            temperature: its logits are divided by it.
            compute: what it will compute in, where that is not the precision of its weights.

        Raises:
            ConfigError: packed, it would be another model.
        """
        self.model = model
        self.temperature = temperature
        self.peft: PeftModel | None = None
        head = model.get_output_embeddings()
        # An adapter on the head or the embeddings would not be published, nor would it learn.
        self._adaptable = [
            name
            for name, module in model.named_modules()
            if isinstance(module, (nn.Linear, Conv1D)) and module is not head
        ]
        self.scorer = Scorer(model, compute)

    def logprobs(
        self, packed: Packed, *, entropy_gradient: bool = False, temperature: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logprob of each chosen token, and the entropy where it was chosen, (N,) each.

        Args:
            packed: the rows.
            entropy_gradient: whether the entropy carries a gradient.
            temperature: another than the policy's.
        """
        heat = self.temperature if temperature is None else temperature

        def read(hidden: Tensor) -> tuple[Tensor, Tensor]:
            weight = self.scorer.head.weight
            return chosen_logprobs(hidden, weight, packed.tokens, heat, entropy_gradient)

        return self.scorer(packed, read)

    def add_adapter(
        self, name: str, rank: int, alpha: int, target_modules: str | list[str], seed: int
    ) -> None:
        """Put a LoRA adapter beside the weights, which are frozen from then on.

        No dropout: see `model.py`. The adapter starts as zero: the policy is its base.

        Raises:
            ConfigError: no such modules to adapt.
        """
        if isinstance(target_modules, str) and target_modules != "all-linear":
            # PEFT takes a lone text for a regular expression over whole paths.
            target_modules = [target_modules]
        self._check_targets(target_modules)
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            target_modules=target_modules,
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(), quiet_peft():
            torch.manual_seed(seed)
            try:
                if self.peft is None:
                    self.peft = get_peft_model(self.model, config, adapter_name=name)  # type: ignore
                else:
                    self.peft.add_adapter(name, config)
            except ValueError as e:
                raise ConfigError(f"model.lora_target_modules={target_modules!r}: {e}") from e
        self.model.eval()
        self._all_learn()

    def parameters(self, adapter: str) -> dict[str, nn.Parameter]:
        """What learns of an adapter by name; without LoRA all weights, whatever it is called."""
        named = self.model.named_parameters()
        return {n: p for n, p in named if self.peft is None or f".{adapter}." in n}

    def _check_targets(self, target_modules: str | list[str]) -> None:
        if target_modules == "all-linear":
            return
        ends = [f".{name}" for name in self._adaptable]
        wrong = [t for t in target_modules if not any(end.endswith(f".{t}") for end in ends)]
        if wrong or not target_modules:
            names = sorted({end.rpartition(".")[2] for end in ends})
            raise ConfigError(
                f"model.lora_target_modules={target_modules!r}: {', '.join(wrong) or 'nothing'} is"
                f" not to be adapted. Choose all-linear, or from {', '.join(names)}; the output"
                " layer and the embeddings stay as they are."
            )

    @contextmanager
    def adapter(self, name: str) -> Iterator[None]:
        """Run with another adapter than the policy's, backward passes too."""
        assert self.peft is not None
        self.peft.set_adapter(name)
        try:
            yield
        finally:
            settle(self.scorer)  # what learns are the pieces, not what was gathered of them
            self.peft.set_adapter(ACTOR)
            self._all_learn()

    @contextmanager
    def base(self) -> Iterator[None]:
        """Run with every adapter off: the policy as it was before it learned anything."""
        assert self.peft is not None
        try:
            with self.peft.disable_adapter():
                try:
                    yield
                finally:
                    settle(self.scorer)  # as above
        finally:
            self._all_learn()

    def _all_learn(self) -> None:
        """Undo that PEFT freezes the adapters which are not in use."""
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_("lora_" in name)

    @contextmanager
    def shaken(self, seed: int) -> Iterator[None]:
        """Within the block the LoRA adapter is another one, whose output is not zero.

        At the beginning an adapter is zero, and an engine that ignored it would look right.
        """
        layers = [m for m in self.model.modules() if isinstance(m, LoraLayer)]
        before = [_up(layer).detach().clone() for layer in layers]
        random = torch.Generator().manual_seed(seed)
        try:
            with torch.no_grad():
                for layer in layers:
                    up = _up(layer)
                    fill(up, torch.randn(up.shape, generator=random))
                    change = layer.get_delta_weight(ACTOR)  # type: ignore[operator]
                    size = whole(_base(layer).norm()) / whole(change.norm())
                    fill(up, whole(up) * (SHAKE * size))
            yield
        finally:
            with torch.no_grad():
                for layer, values in zip(layers, before, strict=True):
                    _up(layer).copy_(values)

    def save_adapter(self, folder: Path) -> None:
        """The policy's LoRA adapter, in a folder that PEFT and engines load."""
        assert self.peft is not None
        named = self.model.named_parameters()
        adapters = {f"base_model.model.{n}": whole(p).cpu() for n, p in named if "lora_" in n}
        if is_rank_zero():
            with quiet_peft():
                self.peft.save_pretrained(
                    str(folder),
                    selected_adapters=[ACTOR],
                    # Else PEFT asks the hub whether the vocabulary grew, which it did not.
                    save_embedding_layers=False,
                    state_dict=adapters,
                )

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """What an engine must hold to sample from this policy: tensors of the plain model by name.

        With LoRA only the adapted weights, each merged anew from the untouched base: adding to and
        subtracting from the base in place would wear it off. Otherwise all of them. They may be
        no copies: use them before the next update.
        """
        if self.peft is None:
            yield from ((n, whole(p.detach())) for n, p in self.model.named_parameters())
            return
        for name, module in self.model.named_modules():
            if isinstance(module, LoraLayer):
                with torch.no_grad():
                    weight = _base(module)
                    merged = whole(weight) + whole(module.get_delta_weight(ACTOR))  # type: ignore
                yield f"{name}.weight", merged.to(weight.dtype)

    def save_pretrained(self, folder: Path) -> None:
        """A folder that transformers loads; with LoRA, one that PEFT loads.

        But where the base lies in no folder, being an adapter merged at loading, an adapter's
        folder could only name another base: then it is the whole model, with LoRA merged.
        """
        if self.peft is not None and self.model.name_or_path:
            self.save_adapter(folder)
        else:
            self.save_whole(folder)

    def save_whole(self, folder: Path) -> None:
        """The whole model, in a folder that transformers loads; LoRA is merged, as in `export`."""
        base = {
            name.replace(".base_layer.", "."): whole(weight.detach()).cpu()
            for name, weight in self.model.named_parameters()
            if "lora_" not in name
        }
        merged = {} if self.peft is None else {n: t.cpu() for n, t in self.export()}
        if is_rank_zero():
            self.model.save_pretrained(folder, state_dict=base | merged)


def _base(layer: LoraLayer) -> Tensor:
    """The frozen weights."""
    return layer.get_base_layer().weight  # type: ignore[return-value]


def _up(layer: LoraLayer) -> Tensor:
    """The adapter's second matrix, which is zero at the beginning."""
    return layer.lora_B[ACTOR].weight  # type: ignore[return-value]
