"""Causal language models asked about chosen tokens: the policy, and a critic.

A model runs many rows packed into one (`packing.py`), and a row's numbers do not depend on its
company. The head, by far the widest layer, is applied where a token was chosen and nowhere else.
Models stay in evaluation mode, also while they learn: dropout would make the probability ratio at
the first update differ from 1.

The policy is what learns, and what an engine samples from; with LoRA, over a frozen base. Its
weights may be spread over ranks (`sharding.py`). Then whatever gathers them (`export`,
`save_adapter`, `save_pretrained`, `perturbed_adapter`) is called on all ranks at once, and only rank 0 writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TypeVar

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from agentrl.engine.local.load import quiet_peft
from agentrl.engine.local.windows import LONG, NoSmallCopy, describe_windows, with_short_windows
from agentrl.errors import ConfigError
from agentrl.trainer.attention import PACKED, Layout
from agentrl.trainer.head import chosen_logprobs
from agentrl.trainer.packing import PackedRows
from agentrl.trainer.sharding import copy_full, full_tensor, is_rank_zero, reshard

T = TypeVar("T")

PERTURBATION = 0.3
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
        self._adaptable_modules = [
            name
            for name, module in model.named_modules()
            if isinstance(module, (nn.Linear, Conv1D)) and module is not head
        ]
        self.packed_model = PackedModel(model, compute)

    def logprobs(
        self,
        packed: PackedRows,
        *,
        entropy_gradient: bool = False,
        temperature: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logprob of each chosen token, and the entropy where it was chosen, (N,) each.

        Args:
            packed: the rows.
            entropy_gradient: whether the entropy carries a gradient.
            temperature: another than the policy's.
        """
        temperature = self.temperature if temperature is None else temperature

        def read(hidden: Tensor) -> tuple[Tensor, Tensor]:
            weight = self.packed_model.head.weight
            return chosen_logprobs(hidden, weight, packed.tokens, temperature, entropy_gradient)

        return self.packed_model(packed, read)

    def add_adapter(
        self, name: str, rank: int, alpha: int, target_modules: str | list[str], seed: int
    ) -> None:
        """Put a LoRA adapter beside the weights, which are frozen from then on.

        The adapter has no dropout, as the module says, and starts as zero: the policy is its base.

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
        self._unfreeze_adapters()

    def parameters(self, adapter: str) -> dict[str, nn.Parameter]:
        """What learns of an adapter by name; without LoRA all weights, whatever it is called."""
        named = self.model.named_parameters()
        return {n: p for n, p in named if self.peft is None or f".{adapter}." in n}

    def _check_targets(self, target_modules: str | list[str]) -> None:
        if target_modules == "all-linear":
            return
        ends = [f".{name}" for name in self._adaptable_modules]
        wrong = [t for t in target_modules if not any(end.endswith(f".{t}") for end in ends)]
        if wrong or not target_modules:
            names = sorted({end.rpartition(".")[2] for end in ends})
            raise ConfigError(
                f"model.lora_target_modules={target_modules!r}: {', '.join(wrong) or 'nothing'} is"
                f" not to be adapted. Choose all-linear, or from {', '.join(names)}; the output"
                " layer and the embeddings stay as they are."
            )

    @contextmanager
    def adapter(self, name: str | None) -> Iterator[None]:
        """Run with another adapter than the policy's, backward passes too.

        None: with every adapter off, as the policy was before it learned anything.
        """
        assert self.peft is not None
        with ExitStack() as stack:
            stack.callback(self._unfreeze_adapters)
            if name is None:
                stack.enter_context(self.peft.disable_adapter())
            else:
                self.peft.set_adapter(name)
                stack.callback(self.peft.set_adapter, ACTOR)
            # What learns are the pieces, not what was gathered of them.
            stack.callback(reshard, self.packed_model)
            yield

    def _unfreeze_adapters(self) -> None:
        """Undo that PEFT freezes the adapters which are not in use."""
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_("lora_" in name)

    @contextmanager
    def perturbed_adapter(self, seed: int) -> Iterator[None]:
        """Within the block the LoRA adapter is another one, whose output is not zero.

        At the beginning an adapter is zero, and an engine that ignored it would look right.
        """
        layers = [m for m in self.model.modules() if isinstance(m, LoraLayer)]
        before = [_lora_b(layer).detach().clone() for layer in layers]
        random = torch.Generator().manual_seed(seed)
        try:
            with torch.no_grad():
                for layer in layers:
                    up = _lora_b(layer)
                    copy_full(up, torch.randn(up.shape, generator=random))
                    change = layer.get_delta_weight(ACTOR)  # type: ignore[operator]
                    size = full_tensor(_base_weight(layer).norm()) / full_tensor(change.norm())
                    copy_full(up, full_tensor(up) * (PERTURBATION * size))
            yield
        finally:
            with torch.no_grad():
                for layer, values in zip(layers, before, strict=True):
                    _lora_b(layer).copy_(values)

    def save_adapter(self, folder: Path) -> None:
        """The policy's LoRA adapter, in a folder that PEFT and engines load."""
        assert self.peft is not None
        named = self.model.named_parameters()
        adapters = {f"base_model.model.{n}": full_tensor(p).cpu() for n, p in named if "lora_" in n}
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
            yield from ((n, full_tensor(p.detach())) for n, p in self.model.named_parameters())
            return
        for name, module in self.model.named_modules():
            if isinstance(module, LoraLayer):
                with torch.no_grad():
                    weight = _base_weight(module)
                    merged = full_tensor(weight) + full_tensor(module.get_delta_weight(ACTOR))  # type: ignore
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
            name.replace(".base_layer.", "."): full_tensor(weight.detach()).cpu()
            for name, weight in self.model.named_parameters()
            if "lora_" not in name
        }
        merged = {} if self.peft is None else {n: t.cpu() for n, t in self.export()}
        if is_rank_zero():
            self.model.save_pretrained(folder, state_dict=base | merged)


class Critic:
    """A transformer with a scalar head: the reward still to come, seen from before a token.

    The head starts at zero, so the first values are 0 whatever the model says. It computes in
    float32 or wider: half of a bfloat16's digits are no estimate of a return.
    """

    def __init__(self, packed_model: PackedModel):
        """Build the head.

        Args:
            scorer: has the transformer; its own, or one shared with the policy.
        """
        self.packed_model = packed_model
        model = packed_model.model
        wide = torch.promote_types(model.dtype, torch.float32)
        width = packed_model.head.in_features
        self.head = nn.Linear(width, 1, device=model.device, dtype=wide)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        packed_model.value_head = self.head

    def decoder_parameters(self) -> dict[str, nn.Parameter]:
        """The weights of a transformer of its own: all but the output layer, never asked."""
        named = self.packed_model.model.get_decoder().named_parameters()
        return {f"model.{name}": parameter for name, parameter in named}

    def values(self, packed: PackedRows) -> Tensor:
        """The value of the state before each chosen token, (N,)."""
        return self.packed_model(packed, self._read)

    def _read(self, hidden: Tensor) -> Tensor:
        # A copy: what leaves a module that is spread over ranks must be no view.
        return self.head(hidden.to(self.head.weight.dtype)).squeeze(-1).clone()


# --- the model below --------------------------------------------------------------------------

_SUPPORTED = (
    "Choose a model with causal attention whose logits are the output of its output layer, such as"
    " Qwen or Llama."
)


class PackedModel(nn.Module):
    """A causal language model and, where there is a critic, its head.

    It is what `sharding.shard` spreads over ranks. So all that reads weights does it within
    `forward`: there, and nowhere else, they are whole.
    """

    def __init__(self, model: PreTrainedModel, compute: torch.dtype | None = None):
        """Use `model`, packed from now on.

        Args:
            model: in evaluation mode.
            compute: what it will compute in, where that is not the precision of its weights.

        Raises:
            ConfigError: packed, it would be another model.
        """
        super().__init__()
        if compute in (None, model.dtype):
            verify_packing(model)
        else:
            verify_packing(deepcopy(model).to(compute))  # type: ignore[arg-type]
            model.set_attn_implementation(PACKED)
        self.model = model
        self.value_head: nn.Linear | None = None

    @property
    def head(self) -> nn.Linear:
        """The output layer."""
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return head

    def layers(self) -> list[nn.Module]:
        """The blocks of the transformer, in their order.

        Raises:
            ConfigError: it has none that can be found.
        """
        layers = getattr(self.model.get_decoder(), "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ConfigError(
                f"{type(self.model).__name__} has no list of layers, such as Qwen or Llama have:"
                " it cannot be trained here"
            )
        return list(layers)

    def forward(self, packed: PackedRows, read: Callable[[Tensor], T]) -> T:
        """Run the transformer, and `read` (N, H): its states where chosen tokens are predicted."""
        return read(hidden_states(self.model, packed))


def hidden_states(model: PreTrainedModel, packed: PackedRows) -> Tensor:
    """(N, H): what the head reads where each chosen token is predicted."""
    output = model.get_decoder()(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        use_cache=False,
        layout=packed.layout,
    )
    return output.last_hidden_state[0].index_select(0, packed.states)


@torch.no_grad()
def verify_packing(model: PreTrainedModel) -> None:
    """Switch a model to packed attention, and prove that its logits stay the same.

    The trial packs two rows of one prompt, and compares with one row after the other through the
    model's own forward. That fails for layers that mix tokens by other means than attention, and
    for logits that are more than the head's output. If the config has windows of attention, a small
    copy in which they are short is tried on rows that are longer (`with_short_windows`).

    Raises:
        ConfigError: they do not.
    """
    name = type(model).__name__
    if problem := _find_unsupported(model):
        raise ConfigError(f"{name} cannot be trained here: {problem}")
    try:
        short = with_short_windows(model)
    except NoSmallCopy as e:
        raise ConfigError(f"{name} cannot be trained here: {e}. {_SUPPORTED}") from e
    if problem := _compare_packed(model, 4):
        raise ConfigError(f"{name} cannot be trained here: {problem}. {_SUPPORTED}")
    if short is not None and (problem := _compare_packed(short, LONG // 2)):
        raise ConfigError(
            f"{name} cannot be trained here: {describe_windows(model.config)}, and for longer rows"
            f" {problem}. {_SUPPORTED}"
        )


def _compare_packed(model: PreTrainedModel, half: int) -> str:
    """Switch a model to packed attention; return how its logits differ then, or "".

    Args:
        model: any; it keeps packed attention.
        half: tokens of the prompt, and of each of both responses.
    """
    device, length = model.device, 2 * half
    ids = torch.arange(length, device=device)
    rows = ids, torch.cat([ids[:half], ids[half:].flip(0)])
    plain = [model(input_ids=r[None], use_cache=False).logits[0, half - 1 :] for r in rows]
    expected = torch.cat(plain).float()
    first = torch.arange(half - 1, length)
    pair = PackedRows(
        input_ids=torch.cat([rows[0], rows[1][half:]])[None],
        position_ids=torch.cat([ids, ids[half:]])[None],
        layout=Layout(pieces=[half] * 3, responses=[2]).to(device),
        states=torch.cat([first, first[:1], first[1:] + half]).to(device),
        tokens=ids,
    )
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 5e-2
    head = model.get_output_embeddings()
    try:
        model.set_attn_implementation(PACKED)
        packed_logits = head(hidden_states(model, pair)).float()  # type: ignore[operator]
    except (TypeError, ValueError, AttributeError, RuntimeError) as e:
        return str(e)
    if (packed_logits - expected).abs().max() <= tolerance * expected.abs().max():
        return ""
    return "packed logits differ from the model's own forward pass"


def _find_unsupported(model: PreTrainedModel) -> str:
    """Return a reason why packing changes the model that a trial of a few tokens misses, or ""."""
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        return "its output layer has a bias, which the loss head leaves out"
    changing = {"dynamic", "longrope"} & set(_rope_types(model.config.get_text_config().to_dict()))
    if changing:
        return (
            f"its rotary positions ({', '.join(changing)}) depend on the longest row of a pass, so"
            " that a row's logprobs would depend on the rows beside it. Choose a model with other"
            " ones (default, linear, yarn, llama3)"
        )
    return ""


def _rope_types(config: object) -> Iterator[str]:
    """All that a config says of rotary positions, in whatever place: of layers of a kind, too."""
    if isinstance(config, dict):
        for key, value in config.items():
            if key in ("rope_type", "type") and isinstance(value, str):
                yield value
            else:
                yield from _rope_types(value)


# --- layers with LoRA ----------------------------------------------------------------------------


def _base_weight(layer: LoraLayer) -> Tensor:
    """The frozen weights."""
    return layer.get_base_layer().weight  # type: ignore[return-value]


def _lora_b(layer: LoraLayer) -> Tensor:
    """The adapter's second matrix, which is zero at the beginning."""
    return layer.lora_B[ACTOR].weight  # type: ignore[return-value]
