"""Attention over packed rows: one call of a varlen kernel, compared with one call for each piece.

The kernel of these tests is written in torch, in a custom operator that compilers treat as opaque.
So the tests check the inputs that a real kernel would get, and how its outputs are used.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.trainer.attention import (
    PACKED,
    Layout,
    _flash,
    _Gather,
    kernel_for,
    packed_attention,
    torch_kernel,
    varlen,
)

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
    out = torch.empty_like(q)
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
)
@settings(max_examples=80, deadline=None)
def test_one_packed_call_equals_one_call_for_each_piece(layout, seed, window, scale, heads):
    """Checks values and gradients, for prompts with one or several responses, windows and GQA."""
    g = torch.Generator().manual_seed(seed)
    length = sum(layout.pieces)
    shapes = [(1, h, length, 8) for h in (heads[0], heads[1], heads[1])]
    qkv = [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]
    upstream = torch.randn((1, length, heads[0], 8), generator=g, dtype=torch.float64)
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
    assert at.sharing is None
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


def test_soft_caps_and_sinks_are_refused():
    qkv = [torch.randn(1, 2, 4, 8) for _ in range(3)]
    for wish in ({"softcap": 30.0}, {"s_aux": torch.zeros(2)}):
        with pytest.raises(NotImplementedError, match="soft cap or with sinks"):
            packed_attention(torch.nn.Identity(), *qkv, None, layout=Layout([2, 2], [1]), **wish)


def test_there_is_no_kernel_for_a_cpu():
    assert kernel_for(CPU) is None
    assert Layout([2, 2], [1]).to(CPU).varlen is None


def test_torchs_own_kernel_is_asked_for_a_causal_mask(monkeypatch):
    seen = {}

    def spy(q, k, v, *rest, **more):
        seen.update(more, heads=k.shape[1], rest=rest)
        return q

    monkeypatch.setattr("agentrl.trainer.attention.varlen_attn", spy)
    q, k = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    cu = torch.tensor([0, 3], dtype=torch.int32)
    for grouped, heads in ((True, 2), (False, 4)):
        monkeypatch.setattr("agentrl.trainer.attention.HAS_GQA", grouped)
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
    assert seen == {
        "softmax_scale": 0.5,
        "causal": True,
        "window_size": (7, 0),
        "deterministic": False,
    }


@pytest.mark.slow
def test_a_decoder_layer_is_one_graph_for_packs_that_share_prompts_and_one_for_others():
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
        Layout([5, 3, 4], [2]),
        Layout([7, 9, 2, 6, 3, 8, 4], [3, 2]),
        Layout([200, 3, 4, 11, 2, 2], [2, 2]),
        Layout([4, 3, 4, 3, 2], [2, 1]),
        Layout([4, 3, 4, 3], [1, 1]),
        Layout([140, 3], [1]),
    ]
    expected = [run(p) for p in packs]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in decoder.layers:
        layer.compile(dynamic=True, backend="aot_eager", fullgraph=True)
    outputs = [run(ready(p)) for p in packs]
    assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


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
