"""Attention over packed rows on a GPU: bfloat16, compared with float32."""

import pytest
import torch

from agentrl.trainer.attention import Layout, packed_attention

pytestmark = pytest.mark.gpu

LAYOUTS = {
    "one response per prompt": Layout([400, 700, 400, 90, 400, 1500], [1, 1, 1]),
    "shared prompts": Layout([400, 700, 90, 1500, 300, 5], [3, 1]),
    # With cuDNN, the gradient of the second piece of a length would be that of the first.
    "repeated lengths": Layout([400, 90, 700, 400, 700, 700], [2, 2]),
    "a long prompt": Layout([4096, 500, 500], [2]),
}


@pytest.mark.parametrize("head", [64, 128, 100])
@pytest.mark.parametrize("way", ["piece by piece", "one call"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_values_and_gradients_are_those_of_float32(layout, way, head):
    g = torch.Generator().manual_seed(0)
    length = sum(layout.pieces)
    drawn = [torch.randn(1, length, h, head, generator=g) for h in (14, 2, 2, 14)]

    def outcome(dtype):
        q, k, v, upstream = (x.to("cuda", dtype).transpose(1, 2) for x in drawn)
        qkv = [x.requires_grad_() for x in (q, k, v)]
        made = layout if way == "piece by piece" else layout.to(q.device)
        out = packed_attention(torch.nn.Identity(), *qkv, None, layout=made)[0]
        return out, *torch.autograd.grad((out * upstream.transpose(1, 2)).sum(), qkv)

    for rounded, exact in zip(outcome(torch.bfloat16), outcome(torch.float32), strict=True):
        assert (rounded.float() - exact).norm() < 0.02 * exact.norm()
