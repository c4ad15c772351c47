"""Find how rows become the input of a model, so that the numbers of a row depend on no other row.

Packed rows that share their prompts cost the least (`packing.py`), but not every model computes
them right: a layer may ignore the layout, and a recurrent layer carries its state from one row to
the next. Nothing is derived from names or versions. `prove_mode` compares each mode with the
model's own forward pass of one row after the other, logits and gradients, and takes the first that
is equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from agentrl.engine.local.windows import (
    VOCABULARY,
    NoSmallCopy,
    describe_windows,
    find_rope_types,
    find_windows,
    small_copy,
)
from agentrl.errors import ConfigError
from agentrl.plural import plural
from agentrl.trainer.attention import HALF, PACKED
from agentrl.trainer.batch import TokenRows
from agentrl.trainer.head import Head
from agentrl.trainer.packing import Mode, PackedRows, pack

SHORT_ROW, LONG_ROW = 4, 40
"""The tokens of a prompt and of its longest response. Long rows exceed the windows of the small
copy, the width of convolutions, and the 64 tokens that linear attention computes at a time."""
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
HALF_TOLERANCE = 0.15
"""The largest relative error of the logits of the median token in half precision.

Rounding sends tokens to other experts: with random weights, 24 layers and 8 of 64 experts, two
right passes of gpt-oss differ by 0.05 to 0.1, and one without its attention sinks by 0.2 to 0.8.
"""
SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier")
"""Keys of configs with a factor of the logits. Granite divides by it, others multiply."""
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


def hidden_states(model: PreTrainedModel, packed: PackedRows) -> Tensor:
    """Return the states that predict the chosen tokens, (N, H)."""
    output = decoder_of(model)(use_cache=False, **packed.arguments())
    return output.last_hidden_state.flatten(0, 1).index_select(0, packed.states)


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


def prove_mode(model: PreTrainedModel, compute: torch.dtype | None = None) -> tuple[Mode, str]:
    """Find the first mode in which a model computes what its own forward pass does, and set it.

    Each mode is tried with a few tokens in the model itself, and with longer rows in a small copy
    with random weights (`small_copy`), in float32 and in the precision of the passes.

    Args:
        model: in evaluation mode; its attention implementation becomes that of the mode.
        compute: the precision of the model's passes; None: that of its weights.

    Returns:
        The mode, and why the modes before it are wrong for this model: "" if it is the first, one
        sentence if all have the same problem, otherwise "packed: ...; packed whole: ...".

    Raises:
        ConfigError: not even one row at a time is right, because the model is not causal, or its
            logits are not the output of its output layer.
    """
    copy = _Copy(model, compute or model.dtype)
    return _find_mode(model, [_Comparison(model, SHORT_ROW), copy])


def find_mode(config: PretrainedConfig) -> tuple[Mode, str]:
    """Return what `prove_mode` finds on this machine's CPU for models with a config.

    No weights are loaded.

    Raises:
        ConfigError: see `prove_mode`; or the small copy cannot be built.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    try:
        copy = small_copy(model, "cpu")
    except NoSmallCopy as e:
        raise ConfigError(f"{type(model).__name__}: {e}") from e
    long_rows = _Comparison(copy, LONG_ROW, gradients=True)
    return _find_mode(copy, [_Comparison(copy, SHORT_ROW), long_rows])


def _find_mode(
    model: PreTrainedModel, comparisons: Sequence[_Comparison | _Copy]
) -> tuple[Mode, str]:
    """Return the first mode that changes no result; see `prove_mode`."""
    output_layer(model)
    own: Any = model.config._attn_implementation
    problems: list[tuple[Mode, str]] = []
    problem = ""
    for mode in Mode:
        problem = _find_unsupported(model, mode)
        problem = problem or next(filter(None, (c.compare(mode) for c in comparisons)), "")
        if not problem:
            return mode, _describe_problems(problems)
        problems.append((mode, problem))
        model.set_attn_implementation(own)
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

    def __init__(self, model: PreTrainedModel, length: int, *, gradients: bool = False):
        """Run nothing yet.

        Args:
            model: has its own attention implementation.
            length: the tokens of a prompt and of its longest response.
            gradients: True if gradients are computed, too.
        """
        self._model, self._gradients = model, gradients
        self._attention: Any = model.config._attn_implementation
        self._batch = _rows(length, min(VOCABULARY, model.config.get_text_config().vocab_size))

    def compare(self, mode: Mode) -> str:
        """Return how a mode changes the results, or "".

        The model's attention implementation becomes that of the mode.
        """
        model = self._model
        if self.failure:
            return self.failure
        name = "packed logits" if mode.is_flat else "the logits of the output layer"
        try:
            model.set_attn_implementation(PACKED if mode.is_flat else self._attention)
            with torch.set_grad_enabled(self._gradients):
                logits = _mode_logits(model, self._batch, mode, self._own.scale_and_softcap)
            if not _are_close(logits, self._own.logits):
                return f"{name} differ from the model's own forward pass"
            if self._gradients and not self._has_own_gradients(_gradients(model, logits)):
                return f"{name} have other gradients than the model's own forward pass"
        except NotImplementedError as e:
            return _one_line(e) or type(e).__name__  # `packed_attention` gives a whole clause.
        except MODEL_ERRORS as e:
            how = "packed" if mode.is_flat else "padded"
            return f"{how} rows fail ({type(e).__name__}: {_one_line(e)})"
        return ""

    def _has_own_gradients(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether a mode has the model's own gradients, up to rounding.

        How the model rounds is measured only if they differ, because this takes another pass.
        """
        own = self._own.gradients
        return _are_gradients_close(gradients, own) or _are_gradients_close(
            gradients, own, self._rounding
        )

    @cached_property
    def _rounding(self) -> Sequence[Tensor]:
        """The norm of the change of each weight's gradient if all weights change a little."""
        model, mode_attention = self._model, self._model.config._attn_implementation
        weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        try:
            model.set_attn_implementation(self._attention)
            with torch.no_grad():
                for i, weight in enumerate(model.parameters()):
                    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(i))
                    weight.mul_(1 + PERTURBATION * noise.to(weight.device))
            with torch.enable_grad():
                found = _gradients(model, _own_logits(model, self._batch))
        finally:
            model.load_state_dict(weights)
            model.set_attn_implementation(mode_attention)  # type: ignore[arg-type]
        own = self._own.gradients
        return [(x - y).norm() for x, y in zip(found, own, strict=True)]

    @cached_property
    def failure(self) -> str:
        """Why no mode can be right, or ""."""
        try:
            self._model.set_attn_implementation(self._attention)
            self._own = self._run()
            is_causal = _is_causal(self._model, self._batch)
        except MODEL_ERRORS as e:
            return _no_own_pass(e)
        return "" if is_causal else "a token changes the logits of earlier tokens"

    def _run(self) -> _Results:
        model = self._model
        gradients = self._gradients and model.dtype not in HALF  # In half, none are compared.
        with torch.set_grad_enabled(gradients):
            logits = _own_logits(model, self._batch)
        found = _gradients(model, logits) if gradients else []
        return _Results(logits.detach(), found, find_scale_and_softcap(model))


class _Copy:
    """A small copy of a model, which is compared on long rows."""

    def __init__(self, model: PreTrainedModel, compute: torch.dtype):
        """Build nothing yet.

        Args:
            model: any model, with its own attention implementation.
            compute: the precision of its passes.
        """
        self._model, self._compute = model, compute
        self._attention: Any = model.config._attn_implementation
        self._comparisons: dict[torch.dtype, _Comparison] = {}
        config = model.config.to_dict() | {"_name_or_path": "", "attention": self._attention}
        text = json.dumps(config, sort_keys=True, default=str)
        self._key = type(model), text, model.device.type, compute

    def compare(self, mode: Mode) -> str:
        """Return how a mode changes the results of the copy, or ""; equal models are run once."""
        key = *self._key, mode
        if key not in _results:
            _results[key] = self._compare(mode)
        return _results[key]

    def _compare(self, mode: Mode) -> str:
        config = self._model.config
        windows = f"{describe_windows(config)}, and " if find_windows(config) else ""
        try:
            copy = self._copy
        except NoSmallCopy as e:
            # Without windows, a few tokens in the model itself show the same.
            return f"{windows}{e}" if windows and mode is not Mode.ALONE else ""
        for dtype in dict.fromkeys((torch.float32, self._compute)):
            copy.set_attn_implementation(self._attention)
            copy.to(dtype)  # type: ignore[arg-type]
            comparison = _Comparison(copy, LONG_ROW, gradients=True)
            problem = self._comparisons.setdefault(dtype, comparison).compare(mode)
            # Some kernels support half precision only.
            if problem and (dtype == self._compute or not problem.startswith(_NO_OWN_PASS)):
                return f"{windows}for longer rows {problem}"
        return ""

    @cached_property
    def _copy(self) -> PreTrainedModel:
        copy = small_copy(self._model)
        # Rounded first, so that no later change of the precision changes a weight.
        return copy.to(self._compute).to(torch.float32)  # type: ignore[arg-type]


_results: dict[tuple[Any, ...], str] = {}
"""The results of comparisons by class, config, device, precision and mode."""
_NO_OWN_PASS = "the model's own forward pass fails"


def _no_own_pass(error: Exception) -> str:
    return f"{_NO_OWN_PASS} ({type(error).__name__}: {_one_line(error)})"


@dataclass(frozen=True, slots=True)
class _Results:
    """What a model computes for rows, one row after the other."""

    logits: Tensor
    """(N, V) of all response tokens."""
    gradients: list[Tensor]
    """Those of all weights, or none."""
    scale_and_softcap: tuple[float, float | None]
    """The factor and the soft cap of the logits, as `find_scale_and_softcap` returns them."""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _rows(length: int, vocabulary: int) -> TokenRows:
    """Return three rows of different length; the first two have the same prompt."""
    random = torch.Generator().manual_seed(0)

    def draw(rows: int) -> Tensor:
        return torch.randint(1, vocabulary, (rows, length), generator=random)

    prompts, responses = draw(2)[[0, 0, 1]], draw(3)
    lengths = torch.tensor([length, length - length // 4, length // 2])
    is_there = torch.arange(length) < lengths[:, None]
    prompt_lengths = torch.tensor([length, length, length - 1])
    return TokenRows(prompts, prompt_lengths, responses * is_there, lengths, is_there)


def _whole_rows(batch: TokenRows) -> Iterator[tuple[Tensor, int]]:
    """Yield the tokens of each row, (T,), and the length of its prompt."""
    for i, (prompt, response) in enumerate(
        zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True)
    ):
        start = batch.prompt_ids.shape[1] - prompt
        yield torch.cat([batch.prompt_ids[i, start:], batch.response_ids[i, :response]]), prompt


def _own_logits(model: PreTrainedModel, batch: TokenRows) -> Tensor:
    """Return the logits of all response tokens by the model's own forward pass, (N, V)."""
    logits = []
    for ids, prompt in _whole_rows(batch):
        row = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0]
        logits.append(row[prompt - 1 : -1])
    return torch.cat(logits)


def _mode_logits(
    model: PreTrainedModel, batch: TokenRows, mode: Mode, shape: tuple[float, float | None]
) -> Tensor:
    """Return the same logits by the input of a mode, and a head with this scale and soft cap."""
    numbers = torch.arange(len(batch.response_ids))
    layer = output_layer(model)
    head = Head(layer.weight, layer.bias, *shape)
    logits = []
    for rows in numbers.split(1) if mode is Mode.ALONE else [numbers]:
        packed = pack(batch, rows, batch.response_mask[rows], mode).to(model.device)
        # Not `layer(...)`: a subclass may do more, which `chosen_logprobs` would leave out.
        products = linear(hidden_states(model, packed), layer.weight, layer.bias)
        logits.append(head.logits_of(products))
    return torch.cat(logits)


def _is_causal(model: PreTrainedModel, batch: TokenRows) -> bool:
    """Return whether logits stay the same if the tokens that follow change or are left out."""
    ids, prompt = next(_whole_rows(batch))
    rows = [ids, torch.cat([ids[:prompt], ids[: len(ids) - prompt]])]
    if "longrope" not in find_rope_types(
        model.config
    ):  # Its positions depend on the length of the row.
        rows.append(ids[:prompt])
    with torch.no_grad():
        whole, *others = (
            model(input_ids=row[None].to(model.device), use_cache=False).logits[0, :prompt]
            for row in rows
        )
    return all(_are_close(other, whole) for other in others)


@torch.enable_grad()
def _gradients(model: PreTrainedModel, logits: Tensor) -> list[Tensor]:
    """Return the gradients of a weighted sum of (N, V) logits with respect to all weights."""
    weights = [p for p in model.parameters() if p.requires_grad]
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    total = (logits.float() * noise.to(logits.device)).sum()
    found = torch.autograd.grad(total, weights, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for g, w in zip(found, weights, strict=True)]


def _are_close(a: Tensor, b: Tensor) -> bool:
    """Return whether (N, V) logits are equal up to rounding."""
    errors, largest = (a.float() - b.float()).abs().amax(-1), b.float().abs().max()
    if a.dtype in HALF:
        return bool(errors.median() <= HALF_TOLERANCE * largest)
    return bool(errors.max() <= TOLERANCE * largest)


def _are_gradients_close(
    a: Sequence[Tensor], b: Sequence[Tensor], rounding: Sequence[Tensor] = ()
) -> bool:
    """Return whether the gradients of all weights are equal up to rounding; True in half precision.

    Some gradients are 0 but for rounding: that of a bias of keys, for example.

    Args:
        a: the gradient of each weight.
        b: the model's own.
        rounding: for each weight the norm of the change of its gradient if the weights are
            perturbed, a number; empty: the fixed tolerances alone.
    """
    if not b or b[0].dtype in HALF:
        return True
    errors = torch.stack([(x - y).norm() for x, y in zip(a, b, strict=True)])
    norms = torch.stack([y.norm() for y in b])
    allowed = GRADIENT_TOLERANCE * norms + GRADIENT_ROUNDING * norms.max()
    if rounding:
        measured = ROUNDING_FACTOR * torch.stack(list(rounding))
        allowed = allowed.maximum(measured.clamp(max=MAX_ROUNDING * norms.max()))
    return bool((errors <= allowed).all())


# --- settings that a few tokens do not show -------------------------------------------------------


def _find_unsupported(model: PreTrainedModel, mode: Mode) -> str:
    """Return why a mode would change the model in a way that the rows do not show, or ""."""
    types = find_rope_types(model.config)
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
