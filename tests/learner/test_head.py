from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentrl.learner.batch import KeptTokens
from agentrl.learner.head import TILE, Head, _blocks, _compiled, chosen_logprobs


def naive(hidden, weight, tokens, temperature):
    log_p = (hidden @ weight.T / temperature).log_softmax(-1)
    return log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def world(seed, n, vocabulary, width=5, scale=1.0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    hidden = (scale * normal(n, width)).to(dtype).requires_grad_()
    weight = normal(vocabulary, width).to(dtype).requires_grad_()
    tokens = torch.randint(vocabulary, (n,), generator=g)
    return hidden, weight, tokens, normal(n), normal(n)


def outcome(f, hidden, weight, upstream):
    """Values, and the gradients of their sum weighted by `upstream`."""
    values = f(hidden, weight)
    total = sum((u * x).sum() for u, x in zip(upstream, values, strict=True) if x.requires_grad)
    return (*values, *torch.autograd.grad(total, (hidden, weight)))


@given(
    seed=st.integers(0, 99),
    n=st.integers(0, 9),
    vocabulary=st.integers(1, 40),
    logits_at_once=st.integers(1, 400),
    temperature=st.sampled_from([1.0, 0.3, 2.5]),
    scale=st.sampled_from([0.1, 30.0]),
    entropy=st.booleans(),
)
@examples(150)
def test_values_and_gradients_are_those_of_log_softmax(
    seed, n, vocabulary, logits_at_once, temperature, scale, entropy
):
    """With logits that are all alike and with sure ones, in blocks and at once."""
    hidden, weight, tokens, u, e = world(seed, n, vocabulary, scale=scale)

    def ours(h, w):
        return chosen_logprobs(
            h, Head(w), tokens, temperature, entropy, block_bytes=8 * logits_at_once
        )

    def theirs(h, w):
        logprobs, entropies = naive(h, w, tokens, temperature)
        return logprobs, entropies if entropy else entropies.detach()

    actual, expected = (outcome(f, hidden, weight, (u, e)) for f in (ours, theirs))
    # Entropies near 0 are differences of numbers as large as the logits.
    assert_close(actual, expected, rtol=1e-12, atol=1e-12 * max(1.0, scale / temperature))


@pytest.mark.parametrize("at_once", [10**6, 64])
def test_entropy_alone_has_a_gradient(at_once):
    hidden, weight, tokens, _, e = world(0, 6, 11)
    entropy = chosen_logprobs(hidden, Head(weight), tokens, 0.7, True, block_bytes=at_once)[1]
    expected = naive(hidden, weight, tokens, 0.7)[1]
    gradients = torch.autograd.grad((e * entropy).sum(), (hidden, weight))
    assert_close(gradients, torch.autograd.grad((e * expected).sum(), (hidden, weight)))


@pytest.mark.parametrize("at_once", [10**6, 64])
def test_frozen_tensors_get_no_gradient(at_once):
    hidden, weight, tokens, u, _ = world(1, 6, 11)
    both = torch.autograd.grad((u * naive(hidden, weight, tokens, 1.0)[0]).sum(), (hidden, weight))
    for free, fixed, expected in ((hidden, weight, both[0]), (weight, hidden, both[1])):
        free.grad = fixed.grad = None
        fixed.requires_grad_(False)
        logprobs, _ = chosen_logprobs(hidden, Head(weight), tokens, 1.0, block_bytes=at_once)
        (u * logprobs).sum().backward()
        fixed.requires_grad_()
        assert fixed.grad is None
        assert_close(free.grad, expected)


def test_a_second_backward_pass_gives_the_same():
    """The second backward pass computes again the values that the first one overwrote."""
    hidden, weight, tokens, u, _ = world(2, 6, 11)
    total = (u * chosen_logprobs(hidden, Head(weight), tokens, 1.0)[0]).sum()
    first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(total, (hidden, weight))
    assert_close(second, first, rtol=0, atol=0)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns, and of the largest wide one."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *(x.numel() for x in tensors)])
        return out


def test_no_more_logits_than_a_block_are_in_memory():
    n, vocabulary, at_once = 64, 1000, 4000
    hidden, weight, tokens, u, e = world(3, n, vocabulary)
    with Largest() as seen:
        logprobs, entropy = chosen_logprobs(
            hidden, Head(weight), tokens, 1.0, True, block_bytes=8 * at_once
        )
        (u * logprobs + e * entropy).sum().backward()
    assert seen.elements <= max(at_once, weight.numel())
    with Largest() as seen:
        (u * naive(hidden, weight, tokens, 1.0)[0]).sum().backward()
    assert seen.elements >= n * vocabulary


def test_only_matrix_products_are_in_half_precision():
    """In bfloat16 the gradient is that of float32 up to rounding, in one block and in many."""
    hidden, weight, tokens, u, e = world(4, 32, 600, width=16, dtype=torch.float32)
    u, e = u.float(), e.float()

    def wide(h, w):
        return chosen_logprobs(h, Head(w), tokens, 0.8, True)

    expected = outcome(wide, hidden, weight, (u, e))
    for at_once in (10**9, 1000):

        def half(h, w, at_once=at_once):
            h, w = h.bfloat16(), w.bfloat16()
            return chosen_logprobs(h, Head(w), tokens, 0.8, True, block_bytes=at_once)

        actual = outcome(half, hidden, weight, (u, e))
        assert actual[0].dtype == actual[1].dtype == torch.float32
        for a, b in zip(actual, expected, strict=True):
            assert (a - b).norm() < 0.02 * b.norm()


def test_autocast_changes_nothing():
    hidden, weight, tokens, u, _ = world(5, 6, 11, dtype=torch.float32)

    def f(h, w):
        return chosen_logprobs(h, Head(w), tokens, 1.0, block_bytes=64)

    expected = outcome(f, hidden, weight, (u, u))
    with torch.autocast("cpu", torch.bfloat16):
        actual = outcome(f, hidden, weight, (u, u))
    assert_close(actual, expected, rtol=0, atol=0)


@given(st.integers(0, 400_000), st.integers(0, 50_000))
def test_blocks_cover_everything_once_within_their_size_limit(n, most):
    blocks = _blocks(n, max(most, n // 100))
    assert [b.start for b in blocks[1:]] == [b.stop for b in blocks[:-1]]
    if n:
        assert (blocks[0].start, blocks[-1].stop) == (0, n)
        assert max(b.stop - b.start for b in blocks) < max(1, most, n // 100) + TILE
        assert len({b.stop - b.start for b in blocks}) <= 2


@pytest.mark.slow
def test_compiled_results_are_equal_and_few_programs_are_compiled():
    torch._dynamo.reset()
    _compiled.cache_clear()
    torch._dynamo.utils.counters.clear()
    widths = set()
    for n in (7, 11, 13, 23, 29):
        widths |= {b.stop - b.start for b in _blocks(300, 3000 // n)}
        hidden, weight, tokens, u, e = world(n, n, 300, dtype=torch.float32)

        def f(h, w, fused, tokens=tokens):
            return chosen_logprobs(h, Head(w), tokens, 0.9, True, block_bytes=4 * 3000, fused=fused)

        actual, expected = (
            outcome(lambda h, w, x=x: f(h, w, x), hidden, weight, (u.float(), e.float()))
            for x in (True, False)
        )
        assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    # Two for scores, of one row and of more; for gradients one for each width that was met.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2 + len(widths)


@pytest.mark.parametrize("at_once", [8 * 3, 8 * 11 * 6])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("scale", [1.0, 0.25, 8.0])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_head_with_bias_scale_and_soft_cap(has_bias, scale, softcap, at_once):
    """The formulas of Phi, Granite, Cohere and Gemma 2, by torch's own gradients in float64."""
    hidden, weight, tokens, u, e = world(4, 6, 11)
    bias = torch.linspace(-1, 1, 11, dtype=hidden.dtype).requires_grad_() if has_bias else None
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    z = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    z = scale * z
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    log_p = torch.log_softmax(z / 0.7, -1)
    expected = log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    head = Head(weight, bias, scale, softcap)
    actual = chosen_logprobs(hidden, head, tokens, 0.7, True, block_bytes=at_once)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    gradients = [
        torch.autograd.grad((u * logprobs + e * entropy).sum(), inputs)
        for logprobs, entropy in (actual, expected)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-10)


def kept_tokens(tokens, vocabulary: int, seed: int = 0) -> tuple[KeptTokens, Tensor]:
    """Random kept tokens, the chosen one among them, and all where no token was dropped.

    Returns:
        Also where a token can be sampled, (N, V) bool.
    """
    g = torch.Generator().manual_seed(seed)
    is_kept = torch.rand((len(tokens), vocabulary), generator=g) < 0.4
    is_kept[range(len(tokens)), tokens] = True
    is_kept[::3] = False  # sampled from all
    rows, ids = is_kept.nonzero(as_tuple=True)
    order = torch.randperm(len(rows), generator=g)  # an engine's order is that of likelihood
    order = order[rows[order].argsort(stable=True)]
    kept = KeptTokens(ids[order].int(), is_kept.sum(1).int())
    is_kept[::3] = True
    return kept, is_kept


@pytest.mark.parametrize(
    ("softcap", "dtype", "at_once", "fused"),
    [
        *(
            (softcap, torch.float64, at_once, False)
            for softcap in (None, 2.0)
            for at_once in (8 * 3, 8 * 11 * 2, 8 * 11 * 6)
        ),
        (None, torch.float32, 8 * 11 * 2, True),
        # Compiled again, which takes seconds.
        pytest.param(2.0, torch.float32, 8 * 11 * 2, True, marks=pytest.mark.slow),
    ],
)
def test_the_softmax_over_kept_tokens_alone(softcap, at_once, fused, dtype):
    """Values and gradients, also of the entropy, are those of an enumerated distribution."""
    hidden, weight, tokens, u, e = world(4, 6, 11, dtype=dtype)
    u, e = u.to(dtype), e.to(dtype)
    kept, is_kept = kept_tokens(tokens, 11)
    assert 0 < is_kept.sum() < 66 and (kept.counts == 0).sum() == 2
    z = hidden @ weight.T
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    expected = [[], []]
    for row, chosen, allowed in zip(z / 0.7, tokens, is_kept, strict=True):
        log_p = row[allowed].log_softmax(0)
        expected[0].append(log_p[allowed[:chosen].sum()])
        expected[1].append(-(log_p.exp() * log_p).sum())
    expected = tuple(map(torch.stack, expected))
    actual = chosen_logprobs(
        hidden, Head(weight, softcap=softcap), tokens, 0.7, True,
        kept=kept, block_bytes=at_once, fused=fused,
    )  # fmt: skip
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    gradients = [
        torch.autograd.grad((u * logprobs + e * entropy).sum(), (hidden, weight))
        for logprobs, entropy in (actual, expected)
    ]
    assert_close(*gradients, rtol=10 * tolerance, atol=10 * tolerance)
