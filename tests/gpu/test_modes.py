"""The modes of rows on a GPU, with the kernel that trains and at the length of a micro-batch."""

import time

import pytest
import torch
from support.architectures import ARCHITECTURES, make_model

from agentrl.learner import attention, modes
from agentrl.learner.modes import prove_mode
from agentrl.learner.packing import Mode

pytestmark = pytest.mark.gpu

TOKENS = 16384
WIDE = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}


def prove(name, monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))
    monkeypatch.setattr(modes, "_results", {})
    kind, values = ARCHITECTURES[name]
    model = make_model(kind, values | WIDE).to("cuda", torch.bfloat16)
    start = time.monotonic()
    found = prove_mode(model, torch.bfloat16, TOKENS)
    print(f"{name}: {found} in {time.monotonic() - start:.1f} s")
    return found


@pytest.mark.parametrize("name", ["Qwen3", "Qwen3-MoE", "gpt-oss", "Gemma 3", "Llama 3"])
def test_right_kernels_are_packed_and_the_second_start_compares_no_copy(
    name, monkeypatch, tmp_path
):
    assert prove(name, monkeypatch, tmp_path) == (Mode.PACKED, "")
    monkeypatch.setattr(modes._Copy, "_compare", None)
    assert prove(name, monkeypatch, tmp_path) == (Mode.PACKED, "")


def test_a_kernel_that_is_wrong_far_back_is_refused(monkeypatch, tmp_path):
    """It forgets the first keys of all sequences behind the first 9,000 keys."""
    right = attention.torch_kernel

    def wrong(q, k, v, cu_q, cu_k, *others):
        late = torch.arange(len(k), device=k.device)[:, None, None] >= 9000
        return right(q, k, v.where(~late, -v), cu_q, cu_k, *others)

    monkeypatch.setattr(attention, "kernel_for", lambda device: wrong)
    mode, reason = prove("Qwen3", monkeypatch, tmp_path)
    assert mode is Mode.PADDED and "for longer rows packed logits differ" in reason
