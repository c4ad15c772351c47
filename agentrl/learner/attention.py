"""Causal attention over packed rows, so that no row attends to another one.

    flat row     P1 A B | P2 C            a prompt is stored once before all its responses

There are two implementations with the same result. The first calls attention once per response,
together with its prompt. It works on every device, and on a CPU it gives the same bits every time.
The second is one call of a kernel for sequences of different lengths, on a GPU in half precision.
The queries stay where they are, as separate sequences; keys and values are copied, so that each
response has its prompt in front:

    queries      P1 | A    | B    | P2 C
    keys         P1 | P1 A | P1 B | P2 C

The indices for this (`Varlen`) are computed once per flat row, not in every layer.

Some models change the scores. Both implementations support this:

- Attention sinks (gpt-oss): each head has a learned score of an extra key whose value is 0. On a
  GPU, the kernel's output is multiplied by sigmoid(lse - sink), with a gradient of its own
  (`attention_with_sinks`).
- Soft caps (Gemma 2): a score x becomes cap * tanh(x / cap). flash-attention computes this if it is
  installed; torch's kernel does not.
- Sliding windows, and windows that start again every n tokens (Llama 4's chunks).

What no kernel computes is computed in plain operations, one block of queries after the other
(`_attend_in_blocks`). This takes several times as long as a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import custom_op
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from agentrl.learner.context_parallel import ContextGroup

PACKED = "agentrl_packed"
"""The name under which transformers finds `packed_attention`."""
HALF = (torch.bfloat16, torch.float16)
MAX_HEAD_SIZE = 256
"""The largest head size of flash-attention's kernels."""
SDPA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""The backends that torch may use per response. cuDNN's gradients were wrong for pieces of one
length whose incoming gradients had different strides (torch 2.11, an H200, bfloat16)."""
BLOCK = 512
"""The queries of a block in `_attend_in_blocks`."""
WITHOUT_EFFECT = {
    *("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "use_cache"),
    *("num_items_in_batch", "deterministic"),
}
"""Keyword arguments of attention layers that do not change the result here: the layout and the
rotary embeddings contain the positions already."""
NOT_PASSED = -1
"""The sliding window of a layer that passes none, not even None."""


Kernel = Callable[..., Tensor]
"""(q, k, v, cu_q, cu_k, max_q, max_k, scale, window) -> out.

q and out are (L, heads, d), k and v are (K, key-value heads, d). Sequence i has the queries cu_q[i]
to cu_q[i + 1] and the keys cu_k[i] to cu_k[i + 1]; both are (sequences + 1,) int32. The last query
of a sequence attends to its last key, and every earlier query to one key less. No query attends to
more than `window` keys back; -1: no limit. A kernel that supports soft caps has the optional
argument `softcap`."""


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """Maps K keys to L tokens, S of which are in prompts of several responses."""

    source: Tensor
    """(K,) the token of each key."""
    first_key: Tensor
    """(L,) one key of each token."""
    shared: Tensor
    """(S,) the tokens with several keys."""
    copies: Tensor
    """(S, C) all keys of these tokens, padded with 0."""
    present: Tensor
    """(S, C) bool: False for padding."""


@dataclass(frozen=True, slots=True)
class Varlen:
    """The arguments of a kernel for one layout."""

    kernel: Kernel
    dtypes: tuple[torch.dtype, ...]
    """The data types that the kernel supports."""
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    """At least the length of the longest sequence. Powers of two, so that few programs are
    compiled."""
    sharing: SharedPrompts
    has_softcap: bool
    """True if the kernel supports soft caps."""

    def supports(self, query: Tensor, value: Tensor, scores: Scores) -> bool:
        """Return whether one call of the kernel computes this attention."""
        d = max(query.shape[-1], value.shape[-1])
        if query.dtype not in self.dtypes or d % 8 or d > MAX_HEAD_SIZE:
            return False
        if scores.chunk is not None and scores.chunk < self.max_k:
            return False
        return scores.softcap is None or (self.has_softcap and scores.sinks is None)


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer computes and limits its scores."""

    scale: float | None
    """The factor of the scores; None: 1 / sqrt(d)."""
    window: int | None = None
    """How many tokens back a token attends, itself included; None: all."""
    chunk: int | None = None
    """Tokens attend only within chunks of so many tokens of a row; None: no chunks."""
    softcap: float | None = None
    """A score x becomes softcap * tanh(x / softcap)."""
    sinks: Tensor | None = None
    """(heads,) the score of an extra key whose value is 0."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions of prompts and responses in the flat row."""

    pieces: list[int]
    """The lengths, in tokens, of a prompt, its responses, the next prompt, its responses, ..."""
    responses: list[int]
    """The number of responses of each prompt."""
    varlen: Varlen | None = None
    """The arguments of the kernel, if there is one."""
    whole: bool = False
    """True if every response has a prompt of its own, so that rows are also whole for layers that
    mix tokens by other means than attention."""
    context: ContextGroup | None = None
    """The ranks that share the tokens; None: this one has all."""

    def sequences(self, device: torch.device) -> dict[str, Any]:
        """Return where whole rows begin and end, under the names of transformers."""
        lengths = [sum(row) for row in zip(self.pieces[::2], self.pieces[1::2], strict=True)]
        ends = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
        numbers = torch.arange(len(lengths), device=device, dtype=torch.int32)
        return {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
            "seq_idx": numbers.repeat_interleave(torch.tensor(lengths, device=device))[None],
        }

    def to(self, device: torch.device) -> Layout:
        """Return a copy for a model on the device."""
        kernel = kernel_for(device)
        if kernel is None:
            return replace(self, varlen=None)
        return replace(self, varlen=varlen(self, device, kernel))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = NOT_PASSED,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Compute causal attention of every response with its prompt.

    transformers calls this function in every layer.

    Args:
        module: the attention layer.
        query: (1, heads, L, d); L is this rank's part of the tokens if ranks share them.
        key: (1, key-value heads, L, d).
        value: (1, key-value heads, L, e).
        attention_mask: None; the layout replaces it.
        layout: the layout of all tokens; None: the layer did not pass it on.
        scaling: the factor of the scores; None: 1 / sqrt(d).
        sliding_window: how many tokens back a token attends, itself included; None: all. If it is
            not passed, the layer's attribute of this name.
        softcap: the limit of the scores: x becomes softcap * tanh(x / softcap). Without
            flash-attention, no kernel computes this, and attention takes several times as long.
        s_aux: attention sinks, (heads,): the score of an extra key whose value is 0.
        dropout: 0.
        is_causal: not False.
        **others: arguments without an effect on the result (`WITHOUT_EFFECT`).

    Returns:
        (1, L, heads, e), and None in place of the scores.

    Raises:
        NotImplementedError: the layer passes no layout, or asks for something else that changes
            the result.
    """
    if layout is None:
        raise NotImplementedError(
            f"{type(module).__name__} does not pass the layout of packed rows to its attention"
        )
    _raise_if_unsupported(module, query, key, attention_mask, dropout, is_causal, others)
    window, chunk = _limits(module, sliding_window)
    context = layout.context
    if context and s_aux is not None:
        s_aux = context.own_heads(s_aux)
    scores = Scores(scaling, window, chunk, softcap, s_aux)
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        # Autocast converts matrix products only, so rotary embeddings return float32.
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if context:
        query, key, value = context.all_tokens(query, key, value)
    if layout.varlen is not None and layout.varlen.supports(query, value, scores):
        out = _attend_varlen(query, key, value, layout.varlen, scores)
    else:
        out = _attend_per_response(query, key, value, layout, scores)  # type: ignore[call-arg]
    return (context.all_heads(out) if context else out), None


def _raise_if_unsupported(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: object,
    dropout: float,
    is_causal: bool | None,
    others: dict[str, object],
) -> None:
    wishes = [k for k, v in others.items() if k not in WITHOUT_EFFECT and v is not None]
    if mask is not None:
        wishes.append("attention_mask")
    if dropout:
        wishes.append(f"dropout={dropout}")
    if is_causal is False:
        wishes.append("is_causal=False")
    if key.shape[2] != query.shape[2]:
        wishes.append("more keys than tokens")
    if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
        # Llama 4 multiplies queries by a factor of their index in the flat row.
        wishes.append("attn_temperature_tuning")
    if wishes:
        raise NotImplementedError(
            f"{type(module).__name__} needs {', '.join(wishes)}, which attention over packed rows"
            " does not support"
        )


def _limits(module: nn.Module, window: int | None) -> tuple[int | None, int | None]:
    """Return the sliding window and the chunk of a layer.

    Most layers pass their sliding window. Others (Qwen2-MoE, Llama 4) only get a mask for it, but
    transformers makes no masks for packed attention.
    """
    if window == NOT_PASSED:
        window = getattr(module, "sliding_window", None)
    config: Any = getattr(module, "config", None)
    chunk = getattr(config, "attention_chunk_size", None)
    # The index is read only where it matters: compilers make one program for each index.
    if chunk is not None and config.layer_types[module.layer_idx] != "chunked_attention":
        chunk = None
    return window, chunk


# --- one call for all responses ------------------------------------------------------------------


def _attend_varlen(query: Tensor, key: Tensor, value: Tensor, at: Varlen, scores: Scores) -> Tensor:
    size, out_size = query.shape[-1], value.shape[-1]
    scale = size**-0.5 if scores.scale is None else scores.scale
    if size != out_size:
        # Kernels support one head size. The added zeros change no score and no value.
        widest = max(size, out_size)
        query, key, value = (pad(x, (0, widest - x.shape[-1])) for x in (query, key, value))
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    s = at.sharing
    k = _Gather.apply(k, s.source, s.first_key, s.shared, s.copies, s.present)
    v = _Gather.apply(v, s.source, s.first_key, s.shared, s.copies, s.present)
    back = -1 if scores.window is None else scores.window - 1
    arguments = at.cu_q, at.cu_k, at.max_q, at.max_k, scale, back
    if scores.sinks is not None:
        out, _ = attention_with_sinks(q, k, v, scores.sinks.float(), *arguments)
    elif scores.softcap is not None:
        out = at.kernel(q, k, v, *arguments, softcap=scores.softcap)
    else:
        out = at.kernel(q, k, v, *arguments)
    return out[None, ..., :out_size]


class _Gather(torch.autograd.Function):
    """Select rows by `SharedPrompts.source`. The gradient is a gather, too.

    torch's own gradient of indexing adds bfloat16 numbers in the order in which threads arrive.
    This gradient sums the copies of a row in float32, in a fixed order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        source: Tensor,
        first_key: Tensor,
        shared: Tensor,
        copies: Tensor,
        present: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(first_key, shared, copies, present)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        first_key, shared, copies, present = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        several = grad[copies] * present[:, :, None, None]
        total = several.sum(1, dtype=wide).to(grad.dtype)
        summed = grad.index_select(0, first_key).index_copy(0, shared, total)
        return summed, None, None, None, None, None


# --- one call for each response ------------------------------------------------------------------


@torch.compiler.disable  # Otherwise a program would be compiled for the lengths of each flat row.
def _attend_per_response(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scores: Scores
) -> Tensor:
    queries, keys, values = (x.split(layout.pieces, dim=2) for x in (query, key, value))
    attend = _attend_causally
    if scores.softcap is not None or scores.sinks is not None:
        attend = _attend_in_blocks
    out = []
    p = 0
    for count in layout.responses:
        for r in range(p + 1, p + 1 + count):
            # The prompt's queries are computed again with every response. This keeps the square
            # shape that fast kernels support, and costs attention only.
            q, k, v = (torch.cat([x[p], x[r]], dim=2) for x in (queries, keys, values))
            size = scores.chunk or q.shape[2]
            chunks = zip(q.split(size, 2), k.split(size, 2), v.split(size, 2), strict=True)
            y = torch.cat([attend(*chunk, scores) for chunk in chunks], dim=2)
            out.append(y if r == p + 1 else y[:, :, layout.pieces[p] :])
        p += 1 + count
    return torch.cat(out, dim=2).transpose(1, 2).contiguous()


def _attend_causally(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """Compute attention of n tokens with torch's kernels: (1, heads, n, e)."""
    n = q.shape[2]
    mask = None
    if scores.window is not None and n > scores.window:
        mask = _visible(0, n, 0, scores.window, q.device)
    with sdpa_kernel(SDPA_BACKENDS):
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scores.scale, enable_gqa=True
        )


def _attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """Compute attention of n tokens in plain operations: (1, heads, n, e).

    The memory is that of `BLOCK` * n scores for each head, also in the backward pass, which
    computes the scores again.
    """
    n = q.shape[2]
    out = []
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        first = 0 if scores.window is None else max(0, start + 1 - scores.window)
        block = q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop]
        arguments = (*block, start, first, scores, scores.sinks)
        if n > BLOCK:
            y = checkpoint(_attend_block, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            y = _attend_block(*arguments)
        out.append(y)
    return torch.cat(out, dim=2)  # type: ignore[arg-type]


def _attend_block(
    q: Tensor, k: Tensor, v: Tensor, start: int, first: int, scores: Scores, sinks: Tensor | None
) -> Tensor:
    """Compute attention of the queries from `start` on, with the keys from `first` on."""
    group = (k.shape[1], -1)  # the query heads of each key-value head
    scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    x = q.unflatten(1, group) @ k.transpose(2, 3).unsqueeze(2)
    x = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    if scores.softcap is not None:
        x = torch.tanh(x / scores.softcap) * scores.softcap
    stop = first + k.shape[2]
    x = x.masked_fill(~_visible(start, stop, first, scores.window, q.device), -torch.inf)
    if sinks is not None:
        sink = sinks.to(x.dtype).unflatten(0, group)[None, :, :, None, None]
        x = torch.cat([x, sink.expand(*x.shape[:-1], 1)], dim=-1)
    share = x.softmax(-1)[..., : k.shape[2]].to(v.dtype)
    return (share @ v.unsqueeze(2)).flatten(1, 2)


def _visible(start: int, stop: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """Return which of the tokens `first` to `stop` each token from `start` on attends to."""
    tokens = torch.arange(start, stop, device=device)
    back = tokens[:, None] - torch.arange(first, stop, device=device)
    return (back >= 0) & (back < (stop if window is None else window))


def varlen(
    layout: Layout, device: torch.device, kernel: Kernel, dtypes: tuple[torch.dtype, ...] = HALF
) -> Varlen:
    """Return the arguments of `kernel` for a layout, on the device.

    A prompt with only one response forms one sequence with this response and is not copied. If no
    prompt is copied, the first two tokens count as a shared prompt with a single copy. So each
    layout has a `sharing`, and one compiled program of a layer computes all layouts.
    """
    queries, keys = [], []
    source, first_key, shared, copies = [], [], [], []
    piece = token = key = 0  # the offsets of the next piece, token and key
    for count in layout.responses:
        prompt, *responses = layout.pieces[piece : piece + 1 + count]
        piece += 1 + count
        if count == 1:
            prompt, responses = prompt + responses[0], []
        start, firsts = token, [key]
        for length in (prompt, *responses):
            before = prompt if token > start else 0
            queries.append(length)
            keys.append(before + length)
            source += [torch.arange(start, start + before), torch.arange(token, token + length)]
            first_key.append(torch.arange(key + before, key + before + length))
            if before:
                firsts.append(key)
            token += length
            key += before + length
        if responses:
            at = torch.arange(prompt)
            shared.append(start + at)
            copies.append(torch.tensor(firsts) + at[:, None])

    def to_device(x: Tensor) -> Tensor:
        return x.to(device, non_blocking=True)

    if not shared:
        shared, copies = [torch.arange(2)], [torch.tensor([[0, -1], [1, -1]])]
    widest = max(c.shape[1] for c in copies)
    padded = [pad(c, (0, widest - c.shape[1]), value=-1) for c in copies]
    index = to_device(torch.cat(padded))
    sharing = SharedPrompts(
        to_device(torch.cat(source)),
        to_device(torch.cat(first_key)),
        to_device(torch.cat(shared)),
        index.clamp(min=0),
        index >= 0,
    )
    cu_q = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
    cu_k = torch.tensor([0, *keys]).cumsum(0, dtype=torch.int32)
    longest = _next_power_of_two(max(queries)), _next_power_of_two(max(keys))
    has_softcap = "softcap" in signature(kernel).parameters
    return Varlen(kernel, dtypes, to_device(cu_q), to_device(cu_k), *longest, sharing, has_softcap)


def _next_power_of_two(n: int) -> int:
    """Return the next power of two, at least 128.

    Kernels treat a single query as a special case.
    """
    return max(128, 1 << (n - 1).bit_length())


# --- kernels for sequences of different lengths --------------------------------------------------


@cache
def kernel_for(device: torch.device) -> Kernel | None:
    """Return flash-attention's kernel if it is installed, else torch's own; None if neither fits.

    All supported versions (flash-attention since 2.1; torch's varlen is one of these) align the
    mask at the last key, as `Kernel` says. With another alignment, the logits would differ, and
    `prove_mode` would not choose packed rows.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    if torch.cuda.get_device_capability(device)[0] == 9:
        try:
            from flash_attn_interface import flash_attn_varlen_func  # type: ignore

            return _flash(flash_attn_varlen_func)
        except ImportError:
            pass
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore

        return _flash(flash_attn_varlen_func)
    except ImportError:
        return torch_kernel


HAS_GQA = "enable_gqa" in signature(varlen_attn).parameters
"""True if torch's own kernel shares keys between query heads."""


def torch_kernel(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
    """Run `torch.nn.attention.varlen` as a `Kernel`."""
    *sequences, scale, window = arguments
    options: dict[str, Any] = {}
    if k.shape[1] != q.shape[1]:
        if HAS_GQA:
            options["enable_gqa"] = True
        else:
            group_size = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group_size, 1), v.repeat_interleave(group_size, 1)
    options |= {"scale": scale, "window_size": (window, 0)}
    return varlen_attn(q, k, v, *sequences, **options)  # type: ignore[return-value]


def _flash(function: Callable[..., Any]) -> Kernel:
    """Wrap `flash_attn_varlen_func` of flash-attention 2 or 3 as a `Kernel`."""

    def kernel(*arguments: Any, softcap: float = 0.0) -> Tensor:
        *sequences, scale, window = arguments
        out = function(
            *sequences,
            softmax_scale=scale,
            causal=True,
            window_size=(window, 0 if window >= 0 else -1),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **({"softcap": softcap} if softcap else {}),
        )
        return out[0] if isinstance(out, tuple) else out

    return kernel


# --- attention sinks -----------------------------------------------------------------------------
#
# An extra key with the score s and the value 0 changes only the sum of the softmax:
#     lse' = log(exp(lse) + exp(s)),    out' = out * exp(lse - lse') = out * sigmoid(lse - s)
# The backward pass of flash-attention computes the attention weights as exp(score - lse), and the
# gradients of the scores as weight * (grad . v - grad . out). With lse' and out' in place of lse
# and out, these are the weights and the gradients with the extra key. The gradient of s itself is
# exp(s - lse') * (0 - grad . out').


@custom_op("agentrl::attention_with_sinks", mutates_args=())
def attention_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Compute attention with sinks, (heads,) float32, as a `Kernel` does without.

    Returns:
        The output, (L, heads, d), and lse', (heads, L) float32. The latter has no gradient.
    """
    out, lse = _flash_forward(q, k, v, cu_q, cu_k, max_q, max_k, scale, window)
    share = torch.sigmoid(lse - sinks[:, None])
    return (out * share.T[:, :, None]).to(out.dtype), torch.logaddexp(lse, sinks[:, None])


@custom_op("agentrl::attention_with_sinks_backward", mutates_args=())
def _sinks_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    at = cu_q, cu_k, max_q, max_k, scale, window
    dq, dk, dv = _flash_backward(grad.contiguous(), q, k, v, out, lse, *at)
    inner = torch.linalg.vecdot(grad.to(lse.dtype), out.to(lse.dtype))
    return dq, dk, dv, -(torch.exp(sinks[:, None] - lse) * inner.T).sum(1)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the output and the lse of torch's flash-attention, with a `Kernel`'s arguments."""
    *at, scale, window = arguments
    limits = {"scale": scale, "window_size_left": window, "window_size_right": 0}
    # `varlen_attn` does not differentiate the lse, so its operators are called directly.
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *at, 0.0, window < 0, False, **limits
    )
    return out, lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from the output and the lse of `_flash_forward`."""
    *at, scale, window = arguments
    limits = {"scale": scale, "window_size_left": window, "window_size_right": 0}
    # Without dropout, the state of the random numbers is not used.
    no_rng = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, *at, 0.0, window < 0, *no_rng, **limits
    )


@attention_with_sinks.register_fake
def _(q: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@_sinks_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *others: object
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in (q, k, v, sinks))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, cu_q, cu_k, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, cu_q, cu_k)


def _sinks_gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_sinks_backward(grad, *ctx.saved_tensors, *ctx.rest), *6 * (None,)


attention_with_sinks.register_autograd(_sinks_gradients, setup_context=_keep_for_backward)


AttentionInterface.register(PACKED, packed_attention)
