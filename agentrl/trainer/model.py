"""The policy and the critic: causal language models asked about chosen tokens only.

Both run many rows packed into one (`packing.py`), and a row's numbers do not depend on its company.
The head, by far the widest layer, is applied where a token was chosen and nowhere else.

Models stay in evaluation mode, also while they learn: dropout would make the probability ratio at
the first update differ from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from agentrl.errors import ConfigError
from agentrl.trainer.packing import PACKED, Layout, Packed

LOGITS_AT_ONCE = 2**26
"""Logits held at a time; more tokens than that are scored in chunks, recomputed in backward."""
SHAKE = 0.3
"""Norm of what a shaken adapter adds to a layer, as a share of the layer's own: about half a nat,
which is more than training adds, with the rounding errors that belong to it."""
ACTOR, CRITIC = "default", "critic"
"""Names of the LoRA adapters; PEFT writes the one called default as a plain adapter folder."""


def chosen_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log_softmax(logits / temperature) at the chosen tokens, and the entropy; in float32 or wider.

    Args:
        logits: (N, V).
        tokens: (N,).
        temperature: the logits are divided by it, as in the engine; never the logprobs.

    Returns:
        logprobs and entropies, (N,) each.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_p = (wide / temperature).log_softmax(-1)
    return log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


class Policy:
    """A causal language model that scores its own tokens; with LoRA, over a frozen base."""

    def __init__(self, model: PreTrainedModel, temperature: float):
        """Use `model`, packed from now on; `add_adapter` makes it a frozen base.

        Raises:
            ConfigError: packed, it would be another model.
        """
        self.model = model
        self.temperature = temperature
        self.peft: PeftModel | None = None
        head = model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        self._head = head
        # An adapter on the head or the embeddings would not be published, nor would it learn.
        self._adaptable = [
            name
            for name, module in model.named_modules()
            if isinstance(module, (nn.Linear, Conv1D)) and module is not head
        ]
        self._adopt()

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
        hidden = hidden_states(self.model, packed)
        size = max(1, LOGITS_AT_ONCE // self._head.out_features)
        if len(hidden) <= size:
            return self._score(hidden, packed.tokens, heat, entropy_gradient)
        parts = [
            checkpoint(self._score, h, t, heat, entropy_gradient, use_reentrant=False)
            for h, t in zip(hidden.split(size), packed.tokens.split(size), strict=True)
        ]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _score(
        self, hidden: Tensor, tokens: Tensor, temperature: float, gradient: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy = chosen_logprobs(self._head(hidden), tokens, temperature)
        return logprobs, entropy if gradient else entropy.detach()

    def add_adapter(
        self, name: str, rank: int, alpha: int, target_modules: str | list[str], seed: int
    ) -> dict[str, nn.Parameter]:
        """Put a LoRA adapter beside the weights, which are frozen from then on.

        No dropout: see the module. The adapter starts as zero: the policy is its base.

        Returns:
            The adapter's parameters by name.

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
        with torch.random.fork_rng():
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
        return {n: p for n, p in self.model.named_parameters() if f".{name}." in n}

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
        """Run with another adapter than the policy's."""
        assert self.peft is not None
        self.peft.set_adapter(name)
        try:
            yield
        finally:
            self.peft.set_adapter(ACTOR)
            self._all_learn()

    @contextmanager
    def base(self) -> Iterator[None]:
        """Run with every adapter off: the policy as it was before it learned anything."""
        assert self.peft is not None
        try:
            with self.peft.disable_adapter():
                yield
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
                    up.copy_(torch.randn(up.shape, generator=random))
                    change = layer.get_delta_weight(ACTOR)  # type: ignore[operator]
                    up.mul_(SHAKE * _base(layer).norm() / change.norm())
            yield
        finally:
            with torch.no_grad():
                for layer, values in zip(layers, before, strict=True):
                    _up(layer).copy_(values)

    def save_adapter(self, folder: Path) -> None:
        """The policy's LoRA adapter, in a folder that PEFT and engines load."""
        assert self.peft is not None
        # Else PEFT asks the hub whether the vocabulary grew, which it did not.
        self.peft.save_pretrained(
            str(folder), selected_adapters=[ACTOR], save_embedding_layers=False
        )

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """What an engine must hold to sample from this policy: tensors of the plain model by name.

        With LoRA only the adapted weights, each merged anew from the untouched base: adding to and
        subtracting from the base in place would wear it off. Otherwise all of them. They are not
        copies: use them before the next update.
        """
        if self.peft is None:
            yield from ((n, p.detach()) for n, p in self.model.named_parameters())
            return
        for name, module in self.model.named_modules():
            if isinstance(module, LoraLayer):
                with torch.no_grad():
                    weight = _base(module)
                    merged = weight + module.get_delta_weight(ACTOR)  # type: ignore[operator]
                yield f"{name}.weight", merged.to(weight.dtype)

    def save_pretrained(self, folder: Path) -> None:
        """A folder that transformers loads; with LoRA, one that PEFT loads.

        But where the base lies in no folder, being an adapter merged at loading, an adapter's
        folder could only name another base: then it is the whole model, with LoRA merged.
        """
        if self.peft is None:
            self.model.save_pretrained(folder)
        elif self.model.name_or_path:
            self.save_adapter(folder)
        else:
            weights = {
                name.replace(".base_layer.", "."): weight.detach()
                for name, weight in self.model.named_parameters()
                if "lora_" not in name
            }
            self.model.save_pretrained(folder, state_dict=weights | dict(self.export()))

    @torch.no_grad()
    def _adopt(self) -> None:
        """Switch the model to packed attention, and prove that it says the same as by itself.

        Two rows of one prompt, packed, against one row after the other through the model's own
        forward. That fails for layers that mix tokens by other means than attention, and for logits
        that are more than the head's output.
        """
        device = self.model.device
        ids = torch.arange(8, device=device)
        rows = ids, torch.cat([ids[:4], ids[4:].flip(0)])
        plain = [self.model(input_ids=r[None], use_cache=False).logits[0, 3:] for r in rows]
        expected = torch.cat(plain).float()
        pair = Packed(
            input_ids=torch.cat([rows[0], rows[1][4:]])[None],
            position_ids=torch.cat([ids, ids[4:]])[None],
            layout=Layout(pieces=[4, 4, 4], responses=[2]),
            states=torch.tensor([3, 4, 5, 6, 7, 3, 8, 9, 10, 11], device=device),
            tokens=ids,
        )
        tolerance = 1e-3 if self.model.dtype in (torch.float32, torch.float64) else 5e-2
        try:
            self.model.set_attn_implementation(PACKED)
            found = self._head(hidden_states(self.model, pair)).float()
            why = "its logits differ from its own when rows are packed"
            same = (found - expected).abs().max() <= tolerance * expected.abs().max()
        except (TypeError, ValueError, NotImplementedError) as e:
            same, why = False, str(e)
        if not same:
            raise ConfigError(
                f"{type(self.model).__name__} cannot be trained here: {why}. Choose a model of"
                " causal attention whose logits are its output layer's, such as Qwen or Llama."
            )


def _base(layer: LoraLayer) -> Tensor:
    """The frozen weights."""
    return layer.get_base_layer().weight  # type: ignore[return-value]


def _up(layer: LoraLayer) -> Tensor:
    """The adapter's second matrix, which is zero at the beginning."""
    return layer.lora_B[ACTOR].weight  # type: ignore[return-value]


class Critic:
    """A transformer with a scalar head: the reward still to come, seen from before a token.

    The head starts at zero, so the first values are 0 whatever the model says.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """Build the head.

        Args:
            model: the transformer; its own copy, or one shared with the policy.
            adapter: entered while it runs, where it is shared.
        """
        self.model = model
        self._adapter = adapter
        head = model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        wide = torch.promote_types(model.dtype, torch.float32)
        self.head = nn.Linear(head.in_features, 1, device=model.device, dtype=wide)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def values(self, packed: Packed) -> Tensor:
        """The value of the state before each chosen token, (N,)."""
        with self._adapter():
            hidden = hidden_states(self.model, packed)
        return self.head(hidden.to(self.head.weight.dtype))[:, 0]


def hidden_states(model: PreTrainedModel, packed: Packed) -> Tensor:
    """(N, H): what the head reads where each chosen token is predicted."""
    output = model.get_decoder()(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        use_cache=False,
        layout=packed.layout,
    )
    return output.last_hidden_state[0].index_select(0, packed.states)
