"""Find how rows become the input of a model, so that the numbers of a row depend on no other row.

Packed rows that share their prompts cost the least (`packing.py`), but not every model computes
them right: a layer may ignore the layout, and a recurrent layer carries its state from one row to
the next. Nothing is derived from names or versions. `prove_mode` compares each mode with the
model's own forward pass of one row after the other, logits and gradients, and takes the first that
is equal.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.metadata import distributions
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers import PretrainedConfig, PreTrainedModel

from agentrl.engine.local import windows
from agentrl.engine.local.load import empty_model, reads_images
from agentrl.engine.local.routers import Choices
from agentrl.engine.local.windows import (
    VOCABULARY,
    NoSmallCopy,
    describe_windows,
    find_rope_types,
    find_windows,
    small_copy,
)
from agentrl.errors import ConfigError
from agentrl.installation import home
from agentrl.learner import attention, head, packing
from agentrl.learner.attention import HALF, PACKED
from agentrl.learner.batch import TokenRows
from agentrl.learner.context_parallel import ContextGroup, count_copies
from agentrl.learner.head import Head
from agentrl.learner.packing import Mode, PackedRows, has_new_prompt, pack
from agentrl.learner.vision import states_with_images, zero_gradient
from agentrl.plural import plural
from agentrl.regular_files import atomic_file, secure_folder

SHORT_ROW, LONG_ROW = 4, 40
"""The tokens of a prompt and of its longest response. Long rows exceed the windows of the small
copy, the width of convolutions, and the 64 tokens that linear attention computes at a time."""
CPU_TOKENS = 1024
"""The tokens of the longest flat row of a proof without a GPU, and in float32. On a GPU, the proof
in the precision of the passes has those of a micro-batch."""
LONGEST_ROW = 2048
"""The most tokens of a row in a proof: some models' own attention stores all scores of a row."""
TOLERANCE, GRADIENT_TOLERANCE = 1e-3, 1e-3
"""The largest relative error of logits and of a weight's gradient in float32."""
GRADIENT_ROUNDING = 1e-5
"""The error that is allowed in every weight's gradient, relative to the largest gradient."""
PERTURBATION = 1e-6
"""The relative change of all weights that shows how a model rounds: ten times float32's own
rounding. Some kernels round float32 to fewer bits (Triton's compute in TF32), and then the
gradients of two modes that are both right differ by more than `GRADIENT_TOLERANCE`."""
ROUNDING_FACTOR, MAX_ROUNDING = 4.0, 0.02
"""Then the gradient of a weight may differ by so many times its own change under the perturbation,
but by no more than that share of the largest gradient. For Qwen3.5 with flash-linear-attention on
an H200, a right mode's gradient of `A_log` differed by 0.3 times that change."""
HALF_TOLERANCE, HALF_GRADIENT_TOLERANCE, HALF_GRADIENT_ROUNDING = 0.15, 0.15, 0.03
"""The same in half precision; the logits of each row have one error, by their norm."""
REPEAT_FACTOR = 4.0
"""In half precision, other tokens in the other rows may change a row so many times as much as
computing the same input again; 0 if that gives the same bits."""
ATOMIC_ROUNDING = 2.0**-8
"""On a GPU, the backward pass of attention adds in an order that changes from pass to pass, but not
in every pass. The gradients of a row then differed by up to 0.0016 of their norm (H100)."""
SCALES = (
    *("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier"),
    "logits_mup_width_multiplier",
)
"""Keys of configs with a factor of the logits. Granite and Inkling divide by it, not multiply."""
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "softcap")
SUPPORTED = (
    "Choose a model with causal attention whose logits are the output of its output layer, such as"
    " Qwen or Llama."
)

MODEL_ERRORS = (
    TypeError, ValueError, AttributeError, LookupError, RuntimeError, AssertionError
)  # fmt: skip
"""The exceptions that models raise if they do not support an input."""


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the transformer below the output layer.

    For some classes (Llama 4, ModernBERT) transformers' `get_decoder` returns the whole model or
    the output layer instead.
    """
    decoder = model.get_decoder()
    if decoder in (model, model.get_output_embeddings()):
        return getattr(model, "model", decoder)  # type: ignore[return-value]
    return decoder


def output_layer(model: PreTrainedModel) -> nn.Linear:
    """Return the layer that computes the logits.

    Raises:
        ConfigError: there is none, or it is not a linear layer.
    """
    layer = model.get_output_embeddings()
    if isinstance(layer, nn.Linear):
        return layer
    what = "it has no output layer"
    if layer is not None:
        what = f"its output layer is a {type(layer).__name__}, not a torch.nn.Linear"
    raise _refusal(model, what)


def set_attention(model: PreTrainedModel, name: str | None) -> None:
    """Set the attention of a model; if it reads images, that of its text part."""
    part = decoder_of(model) if reads_images(model.config) else model
    part.set_attn_implementation(name)  # type: ignore[arg-type]


def hidden_states(model: PreTrainedModel, packed: PackedRows) -> Tensor:
    """Return the states that predict the chosen tokens, (N, H)."""
    if packed.images:
        hidden = states_with_images(model, packed)
    else:
        hidden = decoder_of(model)(use_cache=False, **packed.arguments()).last_hidden_state
    if packed.images == ():
        hidden = hidden + zero_gradient(model)
    return hidden.flatten(0, 1).index_select(0, packed.states)


@torch.no_grad()
def find_scale_and_softcap(model: PreTrainedModel) -> tuple[float, float | None]:
    """Return `scale` and `softcap` of a model's `Head`.

    The keys of configs mean different things in different models. So each candidate is compared
    with the model's own logits, and the closest one is returned; `prove_mode` checks that it is
    close enough.

    Raises:
        ConfigError: the model has no output layer, or its own forward pass fails.
    """
    config = model.config.get_text_config()

    def values_of(keys: Sequence[str]) -> list[float]:
        values = [getattr(config, key, None) for key in keys]
        return [float(v) for v in values if isinstance(v, float | int) and v]

    factors, caps = values_of(SCALES), values_of(SOFTCAPS)
    candidates = list(product([1.0, *factors, *(1 / f for f in factors)], [None, *caps]))
    if len(candidates) == 1:
        return candidates[0]
    ids = torch.arange(1, 1 + SHORT_ROW, device=model.device)[None]
    layer = output_layer(model)
    try:
        logits = model(input_ids=ids, use_cache=False).logits.float()
        states = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state
        products = linear(states, layer.weight, layer.bias).float()
    except MODEL_ERRORS as e:
        raise _refusal(model, _no_own_pass(e)) from e

    def error(candidate: tuple[float, float | None]) -> float:
        own = Head(layer.weight, None, *candidate).logits_of(products)
        return (own - logits).abs().max().item()

    return min(candidates, key=error)


def prove_mode(
    model: PreTrainedModel, compute: torch.dtype | None = None, tokens: int | None = None
) -> tuple[Mode, str]:
    """Find the first mode in which a model computes what its own forward pass does, and set it.

    Each mode is tried with a few tokens in the model itself, and with longer rows in a small copy
    with random weights (`small_copy`), in float32 and in the precision of the passes. If there is
    no copy, the model itself runs the longer rows.

    Args:
        model: in evaluation mode; its attention implementation becomes that of the mode.
        compute: the precision of the model's passes; None: that of its weights.
        tokens: those of a micro-batch of the run that has loaded the model. What the copy shows is
            then stored for the next run. None: `CPU_TOKENS`, and nothing is stored or read.

    Returns:
        The mode, and why the modes before it are wrong for this model: "" if it is the first, one
        sentence if all have the same problem, otherwise "packed: ...; packed whole: ...".

    Raises:
        ConfigError: not even one row at a time is right, because the model is not causal, or its
            logits are not the output of its output layer.
    """
    copy = _Copy(model, compute or model.dtype, tokens)
    return _find_mode(model, [_Comparison(model, SHORT_ROW), copy])


def find_mode(config: PretrainedConfig) -> tuple[Mode, str]:
    """Return what `prove_mode` finds on this machine's CPU for models with a config.

    No weights are loaded.

    Raises:
        ConfigError: see `prove_mode`; or the small copy cannot be built.
    """
    model = empty_model(config, dtype=torch.float32)
    copy = _Copy(model, torch.float32, CPU_TOKENS)
    try:
        short_rows = _Comparison(copy.model, SHORT_ROW)
    except NoSmallCopy as e:
        raise ConfigError(f"{type(model).__name__}: {e}") from e
    return _find_mode(copy.model, [short_rows, copy])


def check_context(config: PretrainedConfig, mode: Mode, ranks: int) -> None:
    """Check that ranks can share the rows of a model, as far as its config tells.

    Args:
        config: the model's.
        mode: what `prove_mode` has found.
        ranks: `trainer.context_parallel_size`.

    Raises:
        ConfigError: they cannot.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    try:
        if ranks > 1 and reads_images(config):
            raise NotImplementedError("it reads images, whose rows cannot be shared")
        if ranks > 1 and mode is not Mode.PACKED:
            raise NotImplementedError(f"it runs {mode.value}, and only packed rows can be shared")
        if isinstance(heads, int):
            shared = getattr(text, "num_key_value_heads", None)
            count_copies(heads, shared or heads, ranks)
    except NotImplementedError as e:
        raise _cannot_share(config.model_type, ranks, str(e)) from e


def prove_context(model: PreTrainedModel, mode: Mode, context: ContextGroup) -> None:
    """Compare the states of rows that ranks share with those of one rank; all ranks call it.

    Args:
        model: its attention implementation is that of the mode.
        mode: what `prove_mode` has found.
        context: the ranks.

    Raises:
        ConfigError: they differ, or `check_context` refuses the model.
    """
    check_context(model.config, mode, context.size)
    vocabulary = min(VOCABULARY, model.config.get_text_config().vocab_size)
    batch = _rows(LONG_ROW, 0, LONGEST_ROW, vocabulary)
    packed = pack(batch, torch.arange(len(batch.response_ids)), batch.response_mask)
    part = packed.part(context).to(model.device)
    assert part.is_own is not None
    whole = hidden_states(model, packed.to(model.device))[part.is_own].float()
    try:
        error = (hidden_states(model, part).float() - whole).norm() / whole.norm()
    except NotImplementedError as e:
        raise _cannot_share(type(model).__name__, context.size, str(e)) from e
    dist.all_reduce(error, dist.ReduceOp.MAX, context.group)
    if not error <= (HALF_TOLERANCE if model.dtype in HALF else TOLERANCE):
        problem = f"its states differ from those of one rank by {error.item():.2g} of their norm"
        raise _cannot_share(type(model).__name__, context.size, problem)


def _cannot_share(name: str, ranks: int, problem: str) -> ConfigError:
    return ConfigError(
        f"trainer.context_parallel_size={ranks}: ranks cannot share the rows of {name}: {problem}."
        " Set another number, or 1"
    )


def _find_mode(
    model: PreTrainedModel, comparisons: Sequence[_Comparison | _Copy]
) -> tuple[Mode, str]:
    """Return the first mode that changes no result; see `prove_mode`."""
    output_layer(model)
    own = model.config._attn_implementation
    problems: list[tuple[Mode, str]] = []
    problem = ""
    for mode in Mode:
        problem = _find_unsupported(model, mode)
        problem = problem or next(filter(None, (c.compare(mode) for c in comparisons)), "")
        if not problem:
            return mode, _describe_problems(problems)
        problems.append((mode, problem))
        set_attention(model, own)
    raise _refusal(model, problem)


def _describe_problems(problems: Sequence[tuple[Mode, str]]) -> str:
    """Return what is wrong with each mode, such as "packed: A; packed whole: B"; each text once."""
    modes: dict[str, Mode] = {}
    for mode, problem in problems:
        modes.setdefault(problem, mode)
    if len(modes) == 1:
        return next(iter(modes))
    return "; ".join(f"{mode.value}: {problem}" for problem, mode in modes.items())


def _refusal(model: PreTrainedModel, problem: str) -> ConfigError:
    return ConfigError(f"{type(model).__name__} cannot be trained here: {problem}. {SUPPORTED}")


def describe_mode(mode: Mode, reason: str, n: int) -> str:
    """Return a line about how rows are run, and what it costs; docs/models.md explains the modes.

    Args:
        mode: the mode of a model.
        reason: why the modes before it are wrong; see `prove_mode`.
        n: the number of responses to a prompt.
    """
    if mode is Mode.PACKED:
        return "rows: packed; a prompt is run once for all its responses"
    how, more = {
        Mode.WHOLE: ("packed whole", ""),
        Mode.PADDED: (
            "padded",
            ", and padding to the longest row of a micro-batch, which is less than half of it",
        ),
        Mode.ALONE: ("alone", ", in micro-batches of one row"),
    }[mode]
    return (
        f"rows: {how}, each with its own prompt, because {reason}. With {plural(n, 'response')} to"
        f" a prompt, each as long as the prompt, the learner runs {2 * n / (n + 1):.1f} times the"
        f" tokens of packed rows{more}"
    )


class _Comparison:
    """The logits and gradients of a model for a few rows, which a mode must not change."""

    def __init__(
        self, model: PreTrainedModel, length: int, tokens: int = 0, weights: Iterable[Tensor] = ()
    ):
        """Run nothing yet.

        Args:
            model: has its own attention implementation.
            length: the tokens of most prompts, and of the longest response to them.
            tokens: those of all rows, each with its own prompt; 0: three rows.
            weights: those whose gradients are compared. Without any, only logits are.
        """
        self._model, self._weights = model, list(weights)
        self._attention: Any = model.config._attn_implementation
        text = model.config.get_text_config()
        self._vocabulary = min(VOCABULARY, text.vocab_size)
        longest = min(getattr(text, "max_position_embeddings", None) or tokens, LONGEST_ROW)
        self._batch = _rows(length, tokens, longest, self._vocabulary)
        self._numbers = _number_tokens(self._batch)
        self._row_numbers = [numbers for numbers, _ in _whole_rows(self._numbers)]
        self._is_half = model.dtype in HALF
        self._choices = _RepeatedChoices(int(self._numbers.response_ids.max()) + 1)

    def compare(self, mode: Mode) -> str:
        """Return how a mode changes the results, or "".

        The model's attention implementation becomes that of the mode.
        """
        model = self._model
        if self.failure:
            return self.failure
        name = "packed logits" if mode.is_flat else "the logits of the output layer"
        try:
            set_attention(model, PACKED if mode.is_flat else self._attention)
            with torch.set_grad_enabled(bool(self._weights)):
                logits, _ = self._run(self._batch, mode)
            if not all(map(self._are_close, self._by_row(logits), self._by_row(self._own.logits))):
                return f"{name} differ from the model's own forward pass"
            if self._weights:
                if not self._has_own_gradients(_gradients(logits, self._weights)):
                    return f"{name} have other gradients than the model's own forward pass"
                if self._is_half and mode is not Mode.ALONE:
                    return self._find_leak(logits.detach(), mode)
        except NotImplementedError as e:
            return _one_line(e) or type(e).__name__  # `packed_attention` gives a whole clause.
        except MODEL_ERRORS as e:
            how = "packed" if mode.is_flat else "padded"
            return f"{how} rows fail ({_describe(e)})"
        return ""

    def _are_close(self, a: Tensor, b: Tensor) -> bool:
        """Return whether the logits of a row, (T, V), are equal up to rounding."""
        errors, b = a.float() - b.float(), b.float()
        if self._is_half:  # The logits of some models are float32 then, too.
            # A number that is added to all logits of a token has no effect.
            return bool(errors.norm() <= HALF_TOLERANCE * (b - b.mean(-1, keepdim=True)).norm())
        return bool(errors.abs().max() <= TOLERANCE * b.abs().max())

    def _by_row(self, logits: Tensor) -> Sequence[Tensor]:
        return logits.split(self._batch.response_lengths.tolist())

    def _run(self, batch: TokenRows, mode: Mode) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Run rows by the input of a mode, and a head with the model's own scale and soft cap.

        Returns:
            The logits of all response tokens, (N, V), and of each pass the embeddings of its
            tokens, and their numbers (`_number_tokens`).
        """
        model, rows = self._model, torch.arange(len(batch.response_ids))
        layer = output_layer(model)
        output = Head(layer.weight, layer.bias, *self._own.scale_and_softcap)
        logits, inputs = [], []
        numbers = rows
        handle = model.get_input_embeddings().register_forward_hook(
            lambda _, __, embeddings: inputs.append((embeddings, numbers))
        )
        with handle:
            for some in rows.split({Mode.PADDED: 3, Mode.ALONE: 1}.get(mode, len(rows))):
                mask = batch.response_mask[some]
                packed = pack(batch, some, mask, mode).to(model.device)
                numbers = pack(self._numbers, some, mask, mode).input_ids.flatten()
                with self._choose(numbers):
                    # Not `layer(...)`: a subclass may do more, which `chosen_logprobs` would leave
                    # out.
                    products = linear(hidden_states(model, packed), layer.weight, layer.bias)
                logits.append(output.logits_of(products))
        return torch.cat(logits), inputs

    def _own_logits(self, batch: TokenRows) -> Tensor:
        """Return the same logits by the model's own forward pass of one row after the other."""
        rows = zip(_whole_rows(batch), self._row_numbers, strict=True)
        return torch.cat([self._own_row(ids, at)[prompt - 1 : -1] for (ids, prompt), at in rows])

    def _own_row(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Return the model's own logits of all tokens of a row, (T, V)."""
        ids = ids[None].to(self._model.device)
        with self._choose(numbers):
            return self._model(input_ids=ids, use_cache=False).logits[0]

    def _choose(self, numbers: Tensor) -> AbstractContextManager[Any]:
        """Make the choices of a pass those of the first one; not in float32, which seldom flips."""
        return self._choices.of(numbers) if self._is_half else nullcontext()

    def _has_own_gradients(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether a mode has the model's own gradients, up to rounding.

        How the model rounds is measured only if they differ, because this takes another pass.
        """
        own = self._own.gradients
        return _are_gradients_close(gradients, own) or (
            not self._is_half and _are_gradients_close(gradients, own, self._rounding)
        )

    @cached_property
    def _rounding(self) -> Sequence[Tensor]:
        """The norm of the change of each weight's gradient if all weights change a little."""
        model = self._model
        mode_attention = model.config.get_text_config()._attn_implementation
        weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        try:
            set_attention(model, self._attention)
            with torch.no_grad():
                for i, weight in enumerate(model.parameters()):
                    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(i))
                    weight.mul_(1 + PERTURBATION * noise.to(weight.device))
            with torch.enable_grad():
                changed = _gradients(self._own_logits(self._batch), self._weights)
        finally:
            model.load_state_dict(weights)
            set_attention(model, mode_attention)
        own = self._own.gradients
        return [(x - y).norm() for x, y in zip(changed, own, strict=True)]

    @cached_property
    def failure(self) -> str:
        """Why no mode can be right, or ""."""
        try:
            set_attention(self._model, self._attention)
            self._own = self._run_own()
            if self._own.logits.isnan().any():
                return "its own logits are NaN, so its weights or their files are damaged"
            return self._find_later_tokens()
        except MODEL_ERRORS as e:
            return _no_own_pass(e)

    def _run_own(self) -> _Results:
        with torch.set_grad_enabled(bool(self._weights)):
            logits = self._own_logits(self._batch)
        own = _gradients(logits, self._weights) if self._weights else []
        with torch.no_grad():
            other = self._own_logits(self._other_tokens()) if own and self._is_half else logits
        return _Results(logits.detach(), own, other, find_scale_and_softcap(self._model))

    @torch.no_grad()
    def _find_later_tokens(self) -> str:
        """Return how the logits of a row depend on the tokens that follow, or ""."""
        ids, prompt = next(_whole_rows(self._batch))
        numbers, other = self._row_numbers[0], torch.cat([ids[:prompt], ids[: len(ids) - prompt]])
        own = self._own_row(ids, numbers)[:prompt]
        if not self._are_close(self._own_row(other, numbers)[:prompt], own):
            return "a token changes the logits of earlier tokens"
        # The positions of longrope depend on the length of the row.
        if "longrope" in find_rope_types(self._model):
            return ""
        if not self._are_close(self._own_row(ids[:prompt], numbers[:prompt]), own):
            return "the logits of a token depend on the number of tokens that follow"
        return ""

    # --- changing some tokens to see what they change ---

    def _other_tokens(self, row: int | None = None) -> TokenRows:
        """Return rows with other tokens in all prompts, or in all that a row does not have."""
        batch, prompts = self._batch, self._numbers.prompt_ids
        prompt_ids = 1 + batch.prompt_ids % (self._vocabulary - 1)
        if row is None:
            return replace(batch, prompt_ids=prompt_ids)
        response_ids = 1 + batch.response_ids % (self._vocabulary - 1)
        response_ids[row] = batch.response_ids[row]
        prompt_ids[(prompts == prompts[row]).all(1)] = batch.prompt_ids[row]
        return replace(batch, prompt_ids=prompt_ids, response_ids=response_ids)

    def _find_leak(self, logits: Tensor, mode: Mode) -> str:
        """Return how rows depend on each other, or not on their prompts, or "".

        Rounding hides small differences from the model's own pass. It hides none here: the same
        pass runs twice, with other tokens elsewhere, so a row must keep its bits.

        Args:
            logits: those of the mode.
            mode: how rows become the input.
        """
        for row in (0, 1, len(self._batch.response_ids) - 1):
            own = self._logits_and_gradients(self._batch, row, mode)
            changed = self._logits_and_gradients(self._other_tokens(row), row, mode)
            if not all(map(torch.equal, own, changed)):
                again = self._logits_and_gradients(self._batch, row, mode)
                for i, (x, y, z) in enumerate(zip(own, changed, again, strict=True)):
                    allowed = REPEAT_FACTOR * (x - z).norm()
                    if i and x.is_cuda:  # a gradient
                        allowed = allowed.maximum(ATOMIC_ROUNDING * x.norm())
                    if not (x - y).norm() <= allowed:
                        return "a row's logits or gradients depend on the tokens of other rows"
        with torch.no_grad():
            other, _ = self._run(self._other_tokens(), mode)
        own = self._count_changes(self._own.logits, self._own.of_other_prompts)
        if (2 * self._count_changes(logits, other) < own).any():
            return "a response depends less on its prompt than in the model's own forward pass"
        return ""

    def _count_changes(self, a: Tensor, b: Tensor) -> Tensor:
        """Return how many tokens of each row differ, without the first of a row."""
        return torch.stack([row[1:].sum() for row in self._by_row((a != b).any(-1))])

    @torch.enable_grad()
    def _logits_and_gradients(self, batch: TokenRows, row: int, mode: Mode) -> list[Tensor]:
        """Return the logits of a row and their gradients with respect to all embeddings.

        The logits are NaN, which equals nothing, if a token of another row has a gradient.
        """
        logits, inputs = self._run(batch, mode)
        of_row = self._by_row(logits)[row]
        gradients = _gradients(of_row, [embeddings for embeddings, _ in inputs])
        results = [of_row.detach().float().clone()]
        for gradient, (_, numbers) in zip(gradients, inputs, strict=True):
            is_own = torch.isin(numbers, self._row_numbers[row]).to(gradient.device)
            flat = gradient.flatten(0, 1).float()
            results.append(flat[is_own])
            if flat[~is_own].any():
                results[0].fill_(torch.nan)
        return results


class _Copy:
    """A small copy of a model, which is compared on long rows."""

    def __init__(self, model: PreTrainedModel, compute: torch.dtype, tokens: int | None):
        """Build nothing yet.

        Args:
            model: any model, with its own attention implementation. The copy of one without weights
                ("meta") is on the CPU.
            compute: the precision of its passes.
            tokens: see `prove_mode`.
        """
        self._original, self._compute = model, compute
        device = torch.device("cpu") if model.device.type == "meta" else model.device
        self._attention: Any = model.config._attn_implementation
        self._tokens = tokens if tokens and device.type == "cuda" else CPU_TOKENS
        self._comparisons: dict[tuple[torch.dtype, int], _Comparison] = {}
        config = model.config.to_dict() | {"_name_or_path": "", "attention": self._attention}
        config |= {"dtype": None, "class": str(type(model))}  # The copy has its own precision.
        values = config, str(compute), self._tokens, _describe_machine(device)
        text = json.dumps(values, sort_keys=True, default=str)
        self._key = hashlib.sha256(text.encode()).hexdigest()
        folder = home() / "modes"
        is_kept = tokens and secure_folder(folder)
        self._file = folder / f"{self._key}.json" if is_kept else None

    def compare(self, mode: Mode) -> str:
        """Return how a mode changes the results of the copy, or ""; equal models are run once."""
        if self._key not in _results:
            _results[self._key] = {}
            with suppress(OSError, ValueError):  # The file is missing or damaged.
                if self._file:
                    _results[self._key] = _RESULTS.validate_json(self._file.read_bytes())
        results = _results[self._key]
        if mode.value not in results:
            results[mode.value] = self._compare(mode)
            # What an error says may not be true next time, if memory was short for example.
            lasting = {m: problem for m, problem in results.items() if "Error" not in problem}
            if self._file:
                with suppress(OSError):  # Then the next run compares again.
                    self._file.parent.mkdir(0o700, parents=True, exist_ok=True)
                    with atomic_file(self._file) as staging:
                        staging.write_bytes(_RESULTS.dump_json(lasting))
        return results[mode.value]

    def _compare(self, mode: Mode) -> str:
        config = self._original.config
        limits = f"{describe_windows(config)}, and " if find_windows(config) else ""
        try:
            model, weights = self.model, list(self.model.parameters())
            dtypes: Iterable[torch.dtype] = dict.fromkeys((torch.float32, self._compute))
        except NoSmallCopy as e:
            if limits:
                return f"{limits}{e}" if mode is not Mode.ALONE else ""
            model = self._original
            # Sharded layers are gathered for a pass: only `backward` gives their gradients.
            is_sharded = any(isinstance(p, DTensor) for p in model.parameters())
            weights: Any = [] if is_sharded else [model.get_input_embeddings().weight]
            dtypes = [model.dtype]
        for dtype in dtypes:
            model.to(dtype)  # type: ignore[arg-type]
            for tokens in (0, self._tokens if dtype == self._compute else CPU_TOKENS):
                set_attention(model, self._attention)
                comparison = _Comparison(model, LONG_ROW, tokens, weights)
                problem = self._comparisons.setdefault((dtype, tokens), comparison).compare(mode)
                # Some kernels support half precision only.
                if problem and (dtype == self._compute or not problem.startswith(_NO_OWN_PASS)):
                    return f"{limits}for longer rows {problem}"
        return ""

    @cached_property
    def model(self) -> PreTrainedModel:
        """The copy."""
        copy = small_copy(self._original, "cpu" if self._original.device.type == "meta" else None)
        # Rounded first, so that no later change of the precision changes a weight.
        return copy.to(self._compute).to(torch.float32)  # type: ignore[arg-type]


_RESULTS = TypeAdapter(dict[str, str])
_results: dict[str, dict[str, str]] = {}
"""The results of comparisons by a hash of class, config, device, precision and versions, and by
mode."""
_NO_OWN_PASS = "the model's own forward pass fails"
_NO_MEMORY = re.compile(r"_ALLOC_FAILED|can't allocate memory")
"""Found in the messages of cuBLAS and of torch's allocator for CPUs, which raise RuntimeError."""


@cache
def _describe_machine(device: torch.device) -> list[str]:
    """Return what else the results depend on: device, packages, and the code of the proof."""
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else torch.backends.cpu.get_cpu_capability()
    code = b"".join(Path(str(m.__file__)).read_bytes() for m in (attention, head, packing, windows))
    own = hashlib.sha256(code + Path(__file__).read_bytes()).hexdigest()
    return [name, own, *sorted(f"{d.name} {d.version}" for d in distributions())]


def _no_own_pass(error: Exception) -> str:
    return f"{_NO_OWN_PASS} ({_describe(error)})"


def _describe(error: Exception) -> str:
    """Return the type and the message of an error that a model raised.

    Raises:
        ConfigError: the memory was full, which says nothing about the model.
    """
    text = f"{type(error).__name__}: {_one_line(error)}"
    if isinstance(error, torch.OutOfMemoryError) or _NO_MEMORY.search(text):
        raise ConfigError(
            f"the memory is full before the first step ({text}). Other processes may use it, on a"
            " GPU: nvidia-smi. `agentrl check` estimates what this run needs; decrease"
            " optim.micro_batch_tokens, which is also the length of this test's rows"
        ) from error
    return text


@dataclass(frozen=True, slots=True)
class _Results:
    """What a model computes for rows, one row after the other."""

    logits: Tensor
    """(N, V) of all response tokens."""
    gradients: list[Tensor]
    """Those of the weights, or none."""
    of_other_prompts: Tensor
    """(N, V) in half precision: the logits after other prompts."""
    scale_and_softcap: tuple[float, float | None]
    """The factor and the soft cap of the logits, as `find_scale_and_softcap` returns them."""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _rows(length: int, tokens: int, longest: int, vocabulary: int) -> TokenRows:
    """Return rows of different length, two to a prompt.

    Args:
        length: the tokens of most prompts, and of the longest response to them.
        tokens: those of all rows, each with its own prompt; 0: three rows. The first row has half
            of them, if it may.
        longest: the most tokens of a row.
        vocabulary: the number of different tokens.
    """
    random = torch.Generator().manual_seed(0)
    length = max(length, min(tokens // 64, longest // 2))
    first = max(2 * length, min(9 * tokens // 16, longest))
    count = max(3, 1 + 4 * (tokens - first) // (7 * length))
    rows = torch.arange(count)
    prompts = torch.randint(1, vocabulary, (count, length), generator=random)[rows // 2]
    lengths = length - length * (rows % 3) // 4
    lengths[0] = first - length
    width = int(lengths.max())
    is_there = torch.arange(width) < lengths[:, None]
    responses = torch.randint(1, vocabulary, (count, width), generator=random)
    prompt_lengths = length - rows // 2 % 2
    return TokenRows(prompts, prompt_lengths, responses * is_there, lengths, is_there)


def _number_tokens(batch: TokenRows) -> TokenRows:
    """Return rows with a number for each token, from 1, in place of its id. 0 is padding.

    Tokens of a prompt have the same numbers in all rows that share it.
    """
    rows, width = batch.prompt_ids.shape
    prompt = has_new_prompt(batch, torch.arange(rows)).cumsum(0)[:, None] - 1
    responses = torch.arange(batch.response_ids.numel()).view_as(batch.response_ids)
    return replace(
        batch,
        prompt_ids=1 + prompt * width + torch.arange(width),
        response_ids=1 + rows * width + responses,
    )


class _RepeatedChoices(Choices):
    """Repeats the choices that a model made for a token, such as those of experts.

    Rounding sends tokens to other experts, so the results of two passes that are both right differ
    as much as those of a wrong one. A choice is one among as many candidates by the same call of
    `topk`.
    """

    def __init__(self, size: int):
        """Start without a choice; all numbers are below `size`."""
        super().__init__()
        self._size = size
        self._chosen: dict[tuple[int, ...], Tensor] = {}

    def of(self, numbers: Tensor) -> _RepeatedChoices:
        """Return this mode for the next pass, whose tokens have these numbers."""
        self._numbers, self._calls = numbers, 0
        return self

    def choose(self, candidates: Tensor, indices: Tensor) -> Tensor:
        self._calls += 1
        n = len(self._numbers)
        if indices.shape[:-1] != candidates.shape[:-1] or indices.numel() % n:
            return indices
        new, at = indices.reshape(n, -1), self._numbers.to(indices.device)
        key = self._calls, candidates.shape[-1], new.shape[1]
        chosen = self._chosen.setdefault(key, new.new_full((self._size, new.shape[1]), -1))
        chosen[at] = chosen[at].where(chosen[at] >= 0, new)
        return chosen[at].view_as(indices)


def _whole_rows(batch: TokenRows) -> Iterator[tuple[Tensor, int]]:
    """Yield the tokens of each row, (T,), and the length of its prompt."""
    for i, (prompt, response) in enumerate(
        zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True)
    ):
        start = batch.prompt_ids.shape[1] - prompt
        yield torch.cat([batch.prompt_ids[i, start:], batch.response_ids[i, :response]]), prompt


@torch.enable_grad()
def _gradients(logits: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of a weighted sum of (N, V) logits with respect to weights."""
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    total = (logits.float() * noise.to(logits.device)).sum()
    results = torch.autograd.grad(total, weights, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for g, w in zip(results, weights, strict=True)]


def _are_gradients_close(
    a: Sequence[Tensor], b: Sequence[Tensor], rounding: Sequence[Tensor] = ()
) -> bool:
    """Return whether the gradients of all weights are equal up to rounding.

    Some gradients are 0 but for rounding: that of a bias of keys, for example.

    Args:
        a: the gradient of each weight.
        b: the model's own.
        rounding: for each weight the norm of the change of its gradient if the weights are
            perturbed, a number; empty: the fixed tolerances alone.
    """
    errors = torch.stack([(x - y).float().norm() for x, y in zip(a, b, strict=True)])
    norms = torch.stack([y.float().norm() for y in b])
    of_weight, of_largest = GRADIENT_TOLERANCE, GRADIENT_ROUNDING
    if b[0].dtype in HALF:
        of_weight, of_largest = HALF_GRADIENT_TOLERANCE, HALF_GRADIENT_ROUNDING
    allowed = of_weight * norms + of_largest * norms.max()
    if rounding:
        measured = ROUNDING_FACTOR * torch.stack(list(rounding))
        allowed = allowed.maximum(measured.clamp(max=MAX_ROUNDING * norms.max()))
    return bool((errors <= allowed).all())


# --- settings that a few tokens do not show -------------------------------------------------------


def _find_unsupported(model: PreTrainedModel, mode: Mode) -> str:
    """Return why a mode would change the model in a way that the rows do not show, or ""."""
    types = find_rope_types(model)
    if "dynamic" in types:
        return (
            "its rotary positions (dynamic) depend on the longest row that ever ran, so a row's"
            " logprobs would depend on the rows before it. longrope, linear, yarn and llama3 do not"
        )
    if mode is not Mode.ALONE and "longrope" in types:
        return (
            "its rotary positions (longrope) depend on the longest row of a pass, so a row's"
            " logprobs would depend on the other rows"
        )
    return ""
