"""Attention over packed rows: one call of a varlen kernel, compared with one call for each piece.

The kernel of these tests is written in torch, in a custom operator that compilers treat as opaque.
So the tests check the inputs that a real kernel would get, and how its outputs are used.
"""

from __future__ import annotations

import json
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from agentrl.learner import attention
from agentrl.learner.attention import (
    PACKED,
    Layout,
    _flash,
    _Gather,
    attention_with_sinks,
    kernel_for,
    packed_attention,
    torch_kernel,
    varlen,
)
from agentrl.learner.sharding import compile_layer

CPU = torch.device("cpu")
ALL = (torch.float64, torch.float32, torch.bfloat16)


def sequences(q, k, cu_q, cu_k, scale, window):
    """Yield for each sequence: the slices of its queries and keys, and its attention weights.

    The attention weights have the shape (heads, queries, keys).
    """
    each = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q_ends, k_ends = cu_q.tolist(), cu_k.tolist()
    for i in range(len(q_ends) - 1):
        a, b = slice(*q_ends[i : i + 2]), slice(*k_ends[i : i + 2])
        keys = k[b].repeat_interleave(each, 1).double()
        scores = torch.einsum("qhd,khd->hqk", q[a].double(), keys) * scale
        n, m = scores.shape[1:]
        back = torch.arange(m - n, m)[:, None] - torch.arange(m)
        seen = (back >= 0) & ((back <= window) | (window < 0))
        yield a, b, scores.masked_fill(~seen, -torch.inf).softmax(-1)


@torch.library.custom_op("agentrl_tests::varlen", mutates_args=())
def opaque(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float | None, window: int
) -> Tensor:
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    each = q.shape[1] // k.shape[1]
    for a, b, share in sequences(q, k, cu_q, cu_k, scale, window):
        values = v[b].repeat_interleave(each, 1).double()
        out[a] = torch.einsum("hqk,khd->qhd", share, values).to(out.dtype)
    return out


@torch.library.custom_op("agentrl_tests::varlen_backward", mutates_args=())
def opaque_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    scale: float | None,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    heads, each = k.shape[1], q.shape[1] // k.shape[1]
    factor = q.shape[-1] ** -0.5 if scale is None else scale

    def together(x: Tensor) -> Tensor:
        return x.unflatten(1, (heads, each)).sum(2).to(dk.dtype)

    for a, b, share in sequences(q, k, cu_q, cu_k, scale, window):
        keys, values = (x[b].repeat_interleave(each, 1).double() for x in (k, v))
        g = grad[a].double()
        d_share = torch.einsum("qhd,khd->hqk", g, values)
        d_score = share * (d_share - (share * d_share).sum(-1, keepdim=True)) * factor
        dq[a] = torch.einsum("hqk,khd->qhd", d_score, keys).to(dq.dtype)
        dk[b] = together(torch.einsum("hqk,qhd->khd", d_score, q[a].double()))
        dv[b] = together(torch.einsum("hqk,qhd->khd", share, g))
    return dq, dk, dv


@opaque.register_fake
def _(q, k, v, cu_q, cu_k, scale, window):
    return torch.empty_like(q)


@opaque_backward.register_fake
def _(grad, q, k, v, cu_q, cu_k, scale, window):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:5])
    ctx.rest = inputs[5:]


opaque.register_autograd(
    lambda ctx, grad: (*opaque_backward(grad, *ctx.saved_tensors, *ctx.rest), *4 * (None,)),
    setup_context=keep,
)


def kernel(q, k, v, cu_q, cu_k, max_q, max_k, scale, window):
    return opaque(q, k, v, cu_q, cu_k, scale, window)


def ready(layout: Layout) -> Layout:
    return Layout(layout.pieces, layout.responses, varlen(layout, CPU, kernel, ALL))


LAYOUTS = st.lists(
    st.tuples(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
).map(lambda groups: Layout([n for p, r in groups for n in (p, *r)], [len(r) for _, r in groups]))


@given(
    LAYOUTS,
    st.integers(0, 99),
    st.sampled_from([None, 1, 2, 3, 100]),
    st.sampled_from([None, 0.7]),
    st.sampled_from([(4, 2), (2, 2), (3, 1)]),
    st.sampled_from([(8, 8), (8, 5), (3, 16)]),
)
@examples(80)
def test_one_packed_call_equals_one_call_for_each_piece(layout, seed, window, scale, heads, sizes):
    """Checks values and gradients, for prompts with one or several responses, windows, GQA, and
    values of another size than keys."""
    g = torch.Generator().manual_seed(seed)
    length = sum(layout.pieces)
    shapes = [(1, h, length, d) for h, d in zip(heads + heads[1:], sizes[:1] + sizes, strict=True)]
    qkv = [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]
    upstream = torch.randn((1, length, heads[0], sizes[1]), generator=g, dtype=torch.float64)
    outputs = []
    for how in (layout, ready(layout)):
        out = packed_attention(
            torch.nn.Identity(), *qkv, None, layout=how, scaling=scale, sliding_window=window
        )[0]
        outputs.append((out, *torch.autograd.grad((upstream * out).sum(), qkv)))
    assert_close(outputs[1], outputs[0], rtol=1e-10, atol=1e-10)


def test_the_keys_of_a_shared_prompt_are_copied_and_no_others():
    at = varlen(Layout([3, 2, 1, 4, 2], [2, 1]), CPU, kernel)
    #  P1 P1 P1 | A A | B | P2 P2 P2 P2 C C
    #   0  1  2   3 4   5    6  7  8  9 ..
    assert at.cu_q.tolist() == [0, 3, 5, 6, 12]
    assert at.cu_k.tolist() == [0, 3, 8, 12, 18]
    assert at.cu_q.dtype == at.cu_k.dtype == torch.int32
    s = at.sharing
    assert s is not None
    keys = [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8, 9, 10, 11]
    assert s.source.tolist() == keys
    assert s.source[s.first_key].tolist() == list(range(12))
    assert s.shared.tolist() == [0, 1, 2]
    assert s.copies.tolist() == [[0, 3, 8], [1, 4, 9], [2, 5, 10]]
    assert s.present.all()


def test_without_shared_prompts_nothing_is_copied():
    at = varlen(Layout([3, 2, 4, 1], [1, 1]), CPU, kernel)
    assert at.sharing.source.tolist() == at.sharing.first_key.tolist() == list(range(10))
    assert at.cu_q.tolist() == at.cu_k.tolist() == [0, 5, 10]


def test_longest_sequences_are_rounded_up():
    for longest, expected in ((1, 128), (128, 128), (129, 256), (4097, 8192)):
        at = varlen(Layout([longest, 1, 1], [2]), CPU, kernel)
        assert (at.max_q, at.max_k) == (expected, 2 * expected if longest == 128 else expected)


def test_copies_are_summed_in_float32():
    """In bfloat16, 1 plus any number of summands of 1/256 is 1."""
    n = 64
    s = varlen(Layout([1] + [1] * n, [n]), CPU, kernel).sharing
    assert s is not None
    x = torch.zeros(n + 1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    keys = _Gather.apply(x, s.source, s.first_key, s.shared, s.copies, s.present)
    grad = torch.full_like(keys, 1 / 256)
    grad[0] = 1
    keys.backward(grad)
    assert x.grad is not None
    assert x.grad[0].item() == 1 + n / 256


def test_unsupported_inputs_are_computed_piece_by_piece():
    layout = Layout([2, 2, 3], [2])
    qkv = [torch.randn(1, 2, 7, 8) for _ in range(3)]
    expected = packed_attention(torch.nn.Identity(), *qkv, None, layout=layout)[0]

    def never(*_):
        raise AssertionError

    half_only = Layout(layout.pieces, layout.responses, varlen(layout, CPU, never))
    out = packed_attention(torch.nn.Identity(), *qkv, None, layout=half_only)[0]
    assert torch.equal(out, expected)
    with pytest.raises(AssertionError):
        half = [x.bfloat16() for x in qkv]
        packed_attention(torch.nn.Identity(), *half, None, layout=half_only)


def test_under_autocast_all_tensors_have_one_dtype():
    layout = ready(Layout([2, 2, 3], [2]))
    q, k, v = (torch.randn(1, 2, 7, 8) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out = packed_attention(torch.nn.Identity(), q, k, v.bfloat16(), None, layout=layout)[0]
    assert out.dtype == torch.bfloat16


# --- scores that a model changes ------------------------------------------------------------------


def by_formula(q, k, v, layout, window, softcap, sinks):
    """Compute attention of each row alone, in float64, with the sinks as scores of an extra key."""
    rows, piece, start = [], 0, 0
    for count in layout.responses:
        prompt, *responses = layout.pieces[piece : piece + 1 + count]
        piece += 1 + count
        at = start + prompt
        for i, length in enumerate(responses):
            tokens = [*range(start, start + prompt), *range(at, at + length)]
            at += length
            rows.append((tokens, 0 if i == 0 else prompt))
        start = at
    out = q.new_empty((q.shape[2], q.shape[1], v.shape[3]))
    each = q.shape[1] // k.shape[1]
    for tokens, first in rows:
        for i in range(first, len(tokens)):
            seen = tokens[0 if window is None else max(0, i + 1 - window) : i + 1]
            for h in range(q.shape[1]):
                x = k[0, h // each, seen] @ q[0, h, tokens[i]] * q.shape[3] ** -0.5
                if softcap is not None:
                    x = softcap * torch.tanh(x / softcap)
                total = x.exp().sum() + (0 if sinks is None else sinks[h].exp())
                out[tokens[i], h] = (x.exp() / total) @ v[0, h // each, seen]
    return out[None]


def flash_forward(q, k, v, cu_q, cu_k, max_q, max_k, scale, window):
    """Compute what flash-attention's kernel returns, of which the lse is (heads, L)."""
    out, lse = torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]))
    each = q.shape[1] // k.shape[1]
    for a, b, share in sequences(q, k, cu_q, cu_k, scale, window):
        values = v[b].repeat_interleave(each, 1)
        out[a] = torch.einsum("hqk,khd->qhd", share.to(q.dtype), values)
        # The last key of a sequence is seen by its last query only, but each query sees one.
        for i in range(a.stop - a.start):
            j = b.stop - b.start - (a.stop - a.start) + i
            own = k[b][j].repeat_interleave(each, 0)
            lse[:, a.start + i] = (q[a][i] * own).sum(-1) * scale - share[:, i, j].log().to(q.dtype)
    return out, lse if q.dtype == torch.float64 else lse.float()


def flash_backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, scale, window):
    """Compute gradients as flash-attention's kernel does, from `out` and `lse`."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    heads, each = k.shape[1], q.shape[1] // k.shape[1]
    for a, b, share in sequences(q, k, cu_q, cu_k, scale, window):
        keys, values = (x[b].repeat_interleave(each, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[a], keys) * scale
        weights = torch.exp(scores - lse[:, a, None]) * (share > 0)
        inner = (grad[a] * out[a]).sum(-1).T[:, :, None]
        d_score = weights * (torch.einsum("qhd,khd->hqk", grad[a], values) - inner) * scale
        dq[a] = torch.einsum("hqk,khd->qhd", d_score, keys)
        dk[b] = torch.einsum("hqk,qhd->khd", d_score, q[a]).unflatten(1, (heads, each)).sum(2)
        dv[b] = torch.einsum("hqk,qhd->khd", weights, grad[a]).unflatten(1, (heads, each)).sum(2)
    return dq, dk, dv


@pytest.fixture
def flash(monkeypatch):
    """Replaces torch's flash-attention, which needs a GPU."""
    monkeypatch.setattr(attention, "_flash_forward", flash_forward)
    monkeypatch.setattr(attention, "_flash_backward", flash_backward)


def capped_kernel(q, k, v, cu_q, cu_k, max_q, max_k, scale, window, softcap=0.0):
    out = []
    for a, b, share in sequences(q, k, cu_q, cu_k, scale, window):
        keys, values = (x[b].repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        x = torch.tanh(torch.einsum("qhd,khd->hqk", q[a], keys) * scale / softcap) * softcap
        x = x.masked_fill(share == 0, -torch.inf)
        out.append(torch.einsum("hqk,khd->qhd", x.softmax(-1), values))
    return torch.cat(out)


SHARED = Layout([4, 3, 5, 2, 3], [2, 1])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("way", ["one call", "piece by piece", "blocks"])
@pytest.mark.parametrize("wish", ["sinks", "softcap", "both"])
def test_sinks_and_soft_caps_are_those_of_the_formula(wish, way, window, flash, monkeypatch):
    """Checks values and all gradients, in float64."""
    if way == "blocks":
        monkeypatch.setattr(attention, "BLOCK", 2)
    layout = SHARED
    if way == "one call":
        layout = Layout(layout.pieces, layout.responses, varlen(layout, CPU, capped_kernel, ALL))
    g = torch.Generator().manual_seed(0)
    length = sum(layout.pieces)
    inputs = [
        (2 * torch.randn(1, heads, length, d, generator=g)).double().requires_grad_()
        for heads, d in ((4, 8), (2, 8), (2, 6))
    ]
    sinks = torch.randn(4, generator=g).double().requires_grad_() if wish != "softcap" else None
    softcap = 1.5 if wish != "sinks" else None
    upstream = torch.randn((1, length, 4, 6), generator=g).double()
    learned = inputs if sinks is None else [*inputs, sinks]
    out = packed_attention(
        torch.nn.Identity(),
        *inputs,
        None,
        layout=layout,
        sliding_window=window,
        softcap=softcap,
        s_aux=sinks,
    )[0]
    expected = by_formula(*inputs, layout, window, softcap, sinks)
    # The gradient of the sinks passes through float32.
    for x, y in (
        (out, expected),
        *zip(
            torch.autograd.grad((out * upstream).sum(), learned),
            torch.autograd.grad((expected * upstream).sum(), learned),
            strict=True,
        ),
    ):
        assert_close(x, y, rtol=1e-6, atol=1e-7)


def test_kernels_compute_what_they_support(flash):
    def called(size: int = 8, **wish) -> bool:
        seen = []

        def spy(q, k, v, cu_q, cu_k, max_q, max_k, scale, window):
            seen.append(window)
            return torch.zeros_like(q)

        layout = Layout(SHARED.pieces, SHARED.responses, varlen(SHARED, CPU, spy, ALL))
        qkv = [torch.randn(1, 2, 17, size) for _ in range(3)]
        packed_attention(wish.pop("module", torch.nn.Identity()), *qkv, None, layout=layout, **wish)
        return bool(seen)

    assert called()
    assert called(size=256)
    assert not called(size=264)
    assert not called(size=12)
    assert called(module=chunked(128))
    assert not called(module=chunked(127))
    assert not called(softcap=2.0)


def test_the_backward_pass_keeps_no_scores_of_several_blocks(monkeypatch):
    layout, n = Layout([10, 22], [1]), 32
    qkv = [torch.randn(1, 2, n, 8, requires_grad=True) for _ in range(3)]

    def kept_scores() -> int:
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            packed_attention(torch.nn.Identity(), *qkv, None, layout=layout, softcap=1.0)
        return sum(x.dim() == 5 and x.shape[3] > 1 and x.shape[4] > 8 for x in kept)

    assert kept_scores() > 0
    monkeypatch.setattr(attention, "BLOCK", 16)
    assert kept_scores() == 0


def chunked(size: int) -> torch.nn.Module:
    layer = torch.nn.Identity()
    layer.config = CONFIG_MAPPING["llama4_text"](attention_chunk_size=size)
    layer.layer_idx = layer.config.layer_types.index("chunked_attention")
    return layer


def test_the_operators_of_sinks_follow_torchs_rules(flash):
    """Checks among others that compilers get the right shapes, and that the gradients are those of
    the operator."""
    at = varlen(SHARED, CPU, kernel)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, h, 8, generator=g) for n, h in ((17, 4), (25, 2), (25, 2)))
    qkv = [x.requires_grad_() for x in (q, k, v, torch.randn(4, generator=g))]
    torch.library.opcheck(
        attention_with_sinks, (*qkv, at.cu_q, at.cu_k, at.max_q, at.max_k, 0.3, 2)
    )


def test_torchs_flash_attention_accepts_the_arguments():
    """Runs the checks of its operators; their kernels need a GPU."""
    q, k = (
        torch.empty(n, h, 16, device="meta", dtype=torch.bfloat16) for n, h in ((10, 4), (14, 2))
    )
    cu = torch.tensor([0, 10], dtype=torch.int32, device="meta")
    for window in (-1, 3):
        at = cu, cu, 128, 128, 0.3, window
        out, lse = attention._flash_forward(q, k, k, *at)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, (4, 10), torch.float32)
        grads = attention._flash_backward(out, q, k, k, out, lse, *at)
        assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize(
    ("wish", "name"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"indices": torch.zeros(1)}, "indices"),
        ({"is_causal": False}, "is_causal=False"),
        ({"dropout": 0.1}, r"dropout=0\.1"),
        ({"invented": 1}, "invented"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(wish, name):
    qkv = [torch.randn(1, 2, 4, 8) for _ in range(3)]
    layout = Layout([2, 2], [1])
    with pytest.raises(NotImplementedError, match=f"Identity needs {name}, which"):
        packed_attention(torch.nn.Identity(), *qkv, None, layout=layout, **wish)
    harmless = {"position_ids": torch.zeros(1, 4), "indices": None, "is_causal": True, "dropout": 0}
    packed_attention(torch.nn.Identity(), *qkv, None, layout=layout, **harmless)


def test_masks_and_keys_of_other_tokens_are_refused():
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 5, 8)
    layout = Layout([2, 2], [1])
    with pytest.raises(NotImplementedError, match="needs attention_mask, which"):
        packed_attention(torch.nn.Identity(), q, q, q, torch.zeros(1), layout=layout)
    with pytest.raises(NotImplementedError, match="needs more keys than tokens, which"):
        packed_attention(torch.nn.Identity(), q, k, k, None, layout=layout)


SHAPE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS = {
    "gpt_oss": {**WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {**WINDOWS, "attn_logit_softcapping": 2.0},
    "gemma3_text": WINDOWS,
    "smollm3": {"no_rope_layers": [1, 0]},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 5,
        "no_rope_layers": [1, 0],
        "attn_temperature_tuning": False,
        "intermediate_size_mlp": 16,
        "num_local_experts": 2,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": None,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
    },
    "phi3": {"sliding_window": 5, "partial_rotary_factor": 0.5},
    "cohere2": WINDOWS,
    "olmo3": WINDOWS,
    "qwen2_moe": {
        **WINDOWS, **EXPERTS, "use_sliding_window": True, "shared_expert_intermediate_size": 16
    },
}  # fmt: skip


def tiny(kind: str, **changes: object) -> PreTrainedModel:
    """Return a model with weights so wide that each token changes the states of the next ones."""
    shape = {k: v for k, v in {**SHAPE, **MODELS[kind], **changes}.items() if v is not None}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**shape)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn_like(weight)
            if weight.dim() > 1:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
            else:
                weight.add_(noise, alpha=0.5)
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_packed_rows_have_the_states_and_gradients_of_the_models_own_attention(kind):
    model = tiny(kind)
    decoder = model.model
    prompts = [torch.randint(3, 48, (n,)) for n in (7, 4)]
    responses = [[torch.randint(3, 48, (n,)) for n in lengths] for lengths in ((6, 9), (5,))]
    layout = Layout([7, 6, 9, 4, 5], [2, 1])
    upstream = torch.randn(sum(layout.pieces), 32)

    def gradients(states: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        (states * upstream).sum().backward()
        weights = {n: w.grad for n, w in model.named_parameters() if w.grad is not None}
        return {n: g.clone() for n, g in weights.items()}

    expected, ids, positions = [], [], []
    for prompt, several in zip(prompts, responses, strict=True):
        ids += [prompt, *several]
        start = len(prompt)
        positions += [torch.arange(start), *(torch.arange(len(r)) + start for r in several)]
        for i, response in enumerate(several):
            row = torch.cat([prompt, response])[None]
            states = decoder(input_ids=row, use_cache=False).last_hidden_state[0]
            expected.append(states if i == 0 else states[start:])
    eager = torch.cat(expected)
    expected_gradients = gradients(eager)
    model.set_attn_implementation(PACKED)
    states = decoder(
        input_ids=torch.cat(ids)[None],
        position_ids=torch.cat(positions)[None],
        use_cache=False,
        layout=layout,
    ).last_hidden_state[0]
    assert (states - eager).abs().max() < 1e-5 * eager.abs().max()
    found = gradients(states)
    assert found.keys() == expected_gradients.keys()
    for name, gradient in found.items():
        norm = expected_gradients[name].norm()
        assert norm > 0, name
        assert (gradient - expected_gradients[name]).norm() < 1e-5 * norm, name
    assert (kind == "gpt_oss") == any("sinks" in name for name in found)


def test_queries_that_depend_on_their_index_in_the_flat_row_are_refused():
    model = tiny("llama4_text", attn_temperature_tuning=True)
    model.set_attn_implementation(PACKED)
    ids = torch.arange(4)[None]
    with pytest.raises(NotImplementedError, match="needs attn_temperature_tuning"):
        model.model(input_ids=ids, use_cache=False, layout=Layout([2, 2], [1]))


def test_there_is_no_kernel_for_a_cpu():
    assert kernel_for(CPU) is None
    assert Layout([2, 2], [1]).to(CPU).varlen is None


def test_torchs_own_kernel_is_asked_for_a_causal_mask(monkeypatch):
    seen = {}

    def spy(q, k, v, *rest, **more):
        seen.update(more, heads=k.shape[1], rest=rest)
        return q

    monkeypatch.setattr("agentrl.learner.attention.varlen_attn", spy)
    q, k = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    cu = torch.tensor([0, 3], dtype=torch.int32)
    for grouped, heads in ((True, 2), (False, 4)):
        monkeypatch.setattr("agentrl.learner.attention.HAS_GQA", grouped)
        torch_kernel(q, k, k, cu, cu, 128, 128, 0.5, -1)
        assert seen["window_size"] == (-1, 0)
        assert seen["scale"] == 0.5
        assert seen["heads"] == heads
        assert seen["rest"] == (cu, cu, 128, 128)
    torch_kernel(q, k, k, cu, cu, 128, 128, None, 2)
    assert seen["window_size"] == (2, 0)


def test_flash_attention_is_asked_for_a_causal_mask():
    seen = {}

    def spy(q, *rest, **more):
        seen.update(more)
        return q, None

    q = torch.randn(3, 4, 8)
    assert _flash(spy)(q, q, q, None, None, 128, 128, 0.5, 7) is q
    expected = {
        "softmax_scale": 0.5,
        "causal": True,
        "window_size": (7, 0),
        "deterministic": False,
    }
    assert seen == expected
    _flash(spy)(q, q, q, None, None, 128, 128, 0.5, 7, softcap=30.0)
    assert seen == {**expected, "softcap": 30.0}


@pytest.mark.slow
def test_sinks_are_compiled_into_one_graph(flash):
    """As part of a compiled decoder layer, with a shared prompt and windows."""
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, h, 17, 8, generator=g).requires_grad_() for h in (4, 2, 2)]
    sinks = torch.randn(4, generator=g).requires_grad_()

    def attend(q, k, v, sinks):
        return packed_attention(
            torch.nn.Identity(), q, k, v, None, layout=ready(SHARED), s_aux=sinks, sliding_window=3
        )[0]

    outputs = []
    for way in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)):
        out = way(*inputs, sinks)
        outputs.append([out, *torch.autograd.grad(out.square().sum(), [*inputs, sinks])])
    assert_close(outputs[1], outputs[0])


@pytest.mark.slow
def test_a_decoder_layer_is_one_graph_for_all_packs(monkeypatch):
    """So the second step of a run compiles nothing, whether its packs share prompts or not."""
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    model.set_attn_implementation(PACKED)
    decoder = model.get_decoder()

    def run(layout: Layout) -> list[Tensor]:
        length = sum(layout.pieces)
        ids = torch.arange(length)[None] % 32
        out = decoder(input_ids=ids, position_ids=ids, use_cache=False, layout=layout)
        model.zero_grad()
        out.last_hidden_state.square().sum().backward()
        gradient = decoder.layers[0].self_attn.k_proj.weight.grad
        return [out.last_hidden_state.detach(), gradient.clone()]

    packs = [
        Layout([9, 7], [1]),
        Layout([5, 3, 4], [2]),
        Layout([90, 60, 30], [2]),
        Layout([7, 9, 2, 6, 3, 8, 4], [3, 2]),
        Layout([200, 3, 4, 11, 2, 2], [2, 2]),
        Layout([4, 3, 4, 3, 2], [2, 1]),
        Layout([4, 3, 4, 3], [1, 1]),
        Layout([140, 3], [1]),
    ]
    expected = [run(p) for p in packs]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    how = {"backend": "aot_eager", "fullgraph": True}
    monkeypatch.setattr(torch, "compile", partial(torch.compile, **how))
    counts, outputs = [], []
    # pytest's monkeypatch would leave torch's option deleted.
    with torch.fx.experimental._config.patch(use_duck_shape=True):
        for layer in decoder.layers:
            compile_layer(layer)
        for pack in packs:
            outputs.append(run(ready(pack)))
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
    assert counts == [1] * len(packs)


def test_the_benchmark_runs_on_a_cpu(monkeypatch, capsys):
    script = Path(__file__).parents[2] / "benchmarks" / "learner_kernels.py"
    arguments = ["--tiny", "--parts", "attention", "prompts", "--repetitions", "1"]
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    monkeypatch.syspath_prepend(script.parent)
    runpy.run_path(str(script), run_name="__main__")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    errors = [x["value"] for x in lines if x["name"].endswith("_error")]
    assert len(errors) == 8
    assert max(errors) < 1e-5
