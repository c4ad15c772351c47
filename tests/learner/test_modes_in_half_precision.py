"""In half precision, a mode in which rows see each other or gradients are wrong is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.architectures import architecture, make_model
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.learner import attention, modes
from agentrl.learner.attention import Layout, Scores
from agentrl.learner.modes import prove_mode
from agentrl.learner.packing import Mode


def visible(layout: Layout, fault: str) -> Tensor:
    """Return which keys each query of the flat row sees, by a kernel with a fault."""
    piece, prompt, is_response = [], [], []
    p = 0
    for count in layout.responses:
        for i in range(count + 1):
            n = layout.pieces[p + i]
            piece += [p + i] * n
            prompt += [p] * n
            is_response += [i] * n
        p += count + 1
    piece, prompt, number = (torch.tensor(x) for x in (piece, prompt, is_response))
    causal = torch.ones(len(piece), len(piece), dtype=torch.bool).tril()
    if fault in ("ignores where sequences begin", "sees a little of the rows before"):
        return causal
    same = piece[:, None] == piece
    of_prompt = prompt[:, None] == piece
    if fault == "lets a response read the one before it":
        of_prompt |= (prompt[:, None] == prompt) & (number[:, None] == number + 1)
    if fault == "forgets the prompt of later responses":
        of_prompt &= number[:, None] < 2
    if fault == "sees 200 tokens back":
        at = torch.arange(len(piece))
        of_prompt |= at[:, None] - at == 200
    return causal & (same | of_prompt)


class _Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def emulate(fault: str, noise: float = 0.0) -> Callable[..., Tensor]:
    """Return a kernel that computes in float32 and rounds its result to half precision."""
    right = attention._attend_per_response
    random = torch.Generator().manual_seed(0)

    def kernel(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scores: Scores) -> Tensor:
        if q.dtype not in attention.HALF:
            return right(q, k, v, layout, scores)
        dtype, group = q.dtype, q.shape[1] // k.shape[1]
        q, k, v = q.float(), *(x.float().repeat_interleave(group, 1) for x in (k, v))
        if fault == "has no gradient of values":
            v = v.detach()
        scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
        if fault == "has a wrong scale":
            scale *= 1.5
        x = q @ k.mT * scale
        if fault == "sees a little of the rows before":
            x = x - 10 * ~visible(layout, "")
        x = x.masked_fill(~visible(layout, fault), -torch.inf)
        if scores.sinks is not None:
            sinks = scores.sinks[None, :, None, None].expand(1, -1, x.shape[2], 1)
            x = torch.cat([x, sinks], -1)
        out = x.softmax(-1)[..., : k.shape[2]] @ v
        out = out * (1 + noise * torch.randn(out.shape, generator=random))
        factor = {"triples gradients": 3.0, "has gradients that are 1.5 times as large": 1.5}
        return _Times.apply(out, factor.get(fault, 1.0)).to(dtype).transpose(1, 2).contiguous()

    return kernel


def qwen3() -> PreTrainedModel:
    return architecture("Qwen3").to(torch.bfloat16)


def experts() -> PreTrainedModel:
    values = {"num_hidden_layers": 8, "num_experts": 64, "num_experts_per_tok": 8}
    shape = {"head_dim": 16, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return make_model("qwen3_moe", values | shape).to(torch.bfloat16)


def run(monkeypatch, model, fault, noise=0.0):
    monkeypatch.setattr(attention, "_attend_per_response", emulate(fault, noise))
    monkeypatch.setattr(modes, "_results", {})
    return prove_mode(model)


FAULTS = {
    "ignores where sequences begin": "logits",
    "lets a response read the one before it": "logits",
    "forgets the prompt of later responses": "logits",
    "sees 200 tokens back": "logits",
    "sees a little of the rows before": "depend on the tokens of other rows",
    "has a wrong scale": "logits",
    "has no gradient of values": "other gradients",
    "triples gradients": "other gradients",
    "has gradients that are 1.5 times as large": "other gradients",
}
SHARED_PROMPTS = "lets a response read the one before it", "forgets the prompt of later responses"
"""These kernels compute a response right if it has its own copy of the prompt."""


WEAKEST_FAULTS = ("sees a little of the rows before",)
"""The faults that `make test` tries with experts, which round more. `make test-all` tries all."""


@pytest.mark.parametrize(
    ("fault", "make"),
    [
        *((fault, qwen3) for fault in FAULTS),
        *((fault, experts) for fault in WEAKEST_FAULTS),
        *(
            pytest.param(fault, experts, marks=pytest.mark.slow)
            for fault in FAULTS
            if fault not in WEAKEST_FAULTS
        ),
    ],
)
def test_a_kernel_with_a_fault_is_refused(fault, make, monkeypatch):
    mode, reason = run(monkeypatch, make(), fault)
    assert mode is not Mode.PACKED and FAULTS[fault] in reason
    assert mode is (Mode.WHOLE if fault in SHARED_PROMPTS else Mode.PADDED)


@pytest.mark.parametrize("fault", SHARED_PROMPTS)
def test_a_fault_of_shared_prompts_has_no_effect_on_whole_rows(fault):
    shared = Layout([3, 2, 2, 4, 1], [2, 1])
    whole = Layout([3, 2, 3, 2, 4, 1], [1, 1, 1], whole=True)
    assert not torch.equal(visible(shared, fault), visible(shared, ""))
    assert torch.equal(visible(whole, fault), visible(whole, ""))


@pytest.mark.parametrize("noise", [pytest.param(0.0, marks=pytest.mark.slow), 2**-8])
@pytest.mark.parametrize("make", [qwen3, pytest.param(experts, marks=pytest.mark.slow)])
def test_a_right_kernel_may_round(make, noise, monkeypatch):
    assert run(monkeypatch, make(), "", noise) == (Mode.PACKED, "")
