"""Attention over packed rows on a GPU: bfloat16, compared with float32."""

import pytest
import torch
from torch import Tensor, nn
from transformers import Llama4TextConfig

from agentrl.learner.attention import Layout, packed_attention

pytestmark = pytest.mark.gpu

LAYOUTS = {
    "one response per prompt": Layout([400, 700, 400, 90, 400, 1500], [1, 1, 1]),
    "shared prompts": Layout([400, 700, 90, 1500, 300, 5], [3, 1]),
    # With cuDNN, the gradient of the second piece of a length would be that of the first.
    "repeated lengths": Layout([400, 90, 700, 400, 700, 700], [2, 2]),
    "a long prompt": Layout([4096, 500, 500], [2]),
}
SHARED = LAYOUTS["shared prompts"]


def inputs(layout: Layout, dtype: torch.dtype, size: int, out_size: int) -> list[Tensor]:
    """Return q, k, v, the incoming gradient and the sinks of 14 heads, 2 of them with keys.

    The gradient is (1, L, 14, out_size); the sinks are float32.
    """
    g = torch.Generator().manual_seed(0)
    length = sum(layout.pieces)
    shapes = ((14, size), (2, size), (2, out_size), (14, out_size))
    drawn = [torch.randn(1, length, h, d, generator=g).to("cuda", dtype) for h, d in shapes]
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in drawn[:3])
    sinks = (2 * torch.randn(14, generator=g)).to("cuda").requires_grad_()
    return [q, k, v, drawn[3], sinks]


def outcome(
    layout: Layout,
    dtype: torch.dtype,
    size: int,
    out_size: int | None = None,
    sinks: bool = False,
    module: nn.Module | None = None,
    compiled: bool = False,
    **wish: object,
) -> list[Tensor]:
    """Return the output, and the gradients of q, k, v and, if there are any, the sinks."""
    *qkv, upstream, scores = inputs(layout, dtype, size, out_size or size)
    learned = [*qkv, scores] if sinks else qkv

    def attend(q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> Tensor:
        s_aux = scores if sinks else None
        layer = module or nn.Identity()
        return packed_attention(layer, q, k, v, None, layout=layout, s_aux=s_aux, **wish)[0]

    if compiled:
        attend = torch.compile(attend, dynamic=True, fullgraph=True)
    out = attend(*qkv, scores)
    return [out, *torch.autograd.grad((out * upstream).sum(), learned)]


def assert_close(rounded: list[Tensor], exact: list[Tensor]) -> None:
    for x, y in zip(rounded, exact, strict=True):
        assert (x.float() - y).norm() < 0.02 * y.norm()


@pytest.mark.parametrize("head", [64, 128, 100])
@pytest.mark.parametrize("way", ["piece by piece", "one call"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_values_and_gradients_are_those_of_float32(layout, way, head):
    made = layout if way == "piece by piece" else layout.to(torch.device("cuda"))
    assert_close(outcome(made, torch.bfloat16, head), outcome(made, torch.float32, head))


def chunked(size: int) -> nn.Module:
    layer = nn.Identity()
    layer.config = Llama4TextConfig(attention_chunk_size=size)
    layer.layer_idx = layer.config.layer_types.index("chunked_attention")
    return layer


@pytest.mark.parametrize(
    "wish",
    [
        {"sinks": True},
        {"sinks": True, "sliding_window": 128},
        {"sinks": True, "size": 100},
        {"softcap": 2.0},
        {"softcap": 2.0, "sliding_window": 700},
        {"size": 192, "out_size": 128},
        {"size": 192, "out_size": 128, "sinks": True},
        {"module": chunked(512)},
        {"module": chunked(8192)},
    ],
    ids=lambda wish: ", ".join(wish),
)
def test_scores_that_a_model_changes_are_those_of_float32(wish):
    """float32 is computed piece by piece; sinks and soft caps in plain operations."""
    layout = SHARED.to(torch.device("cuda"))
    wish = {"size": 64, **wish}
    assert_close(outcome(layout, torch.bfloat16, **wish), outcome(SHARED, torch.float32, **wish))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_sinks_change_the_result_by_the_sigmoid_of_their_distance_to_the_lse(layout):
    """out' = out * sigmoid(lse - sink), with the lse of plain operations in float32."""
    made = layout.to(torch.device("cuda"))
    with_sinks = outcome(made, torch.bfloat16, 64, sinks=True)[0].float()
    without = outcome(made, torch.bfloat16, 64)[0].float()
    q, k, _, _, sinks = inputs(layout, torch.float32, 64, 64)
    # Every row begins with its prompt, so the lse of the first prompt needs no other tokens.
    n = layout.pieces[0]
    keys = k[0, :, :n].repeat_interleave(7, 0)
    x = q[0, :, :n] @ keys.mT / 8
    lse = x.masked_fill(torch.ones(n, n, device="cuda").triu(1).bool(), -torch.inf).logsumexp(-1)
    expected = without[0, :n] * torch.sigmoid(lse - sinks[:, None]).T[:, :, None]
    assert (with_sinks[0, :n] - expected).norm() < 0.02 * expected.norm()


def test_sinks_are_the_same_in_a_compiled_layer():
    layout = SHARED.to(torch.device("cuda"))
    wish = {"size": 64, "sinks": True, "sliding_window": 128}
    compiled = outcome(layout, torch.bfloat16, compiled=True, **wish)
    assert_close(compiled, [x.float() for x in outcome(layout, torch.bfloat16, **wish)])
