from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_world import (
    group,
    in_float64,
    plain_logprobs,
    random_groups,
    scored,
    segment,
    tiny_model,
)
from torch import arange, tensor
from transformers import MistralConfig, MistralForCausalLM

from agentrl.trainer.batch import Batch, collate
from agentrl.trainer.model import Policy
from agentrl.trainer.packing import micro_batches, pack

CPU = torch.device("cpu")


def all_rows(batch: Batch):
    return pack(batch, arange(len(batch.rollout)), batch.response_mask, CPU)


def test_a_prompt_stands_once_before_all_responses_to_it():
    a = scored([segment([1, 2, 3], ("A", [4, 5]), ("E", [6]), ("A", [7]))], 1.0)
    b = scored([segment([1, 2, 3], ("E", [8]), ("A", [9]))], 0.0)
    c = scored([segment([2, 3], ("A", [10]), ("E", [11]))], 0.0)
    packed = all_rows(collate([group(a, b), group(c)], 31))
    #                                   1  2  3  4  5  6  7  8  9  2  3 10 11
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 10, 11]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 3, 4, 0, 1, 2, 3]]
    assert packed.layout.pieces == [3, 4, 2, 2, 2]
    assert packed.layout.responses == [2, 1]
    assert packed.tokens.tolist() == [4, 5, 7, 9, 10]
    assert packed.states.tolist() == [2, 3, 5, 7, 10]


def test_a_prompt_that_begins_with_padding_ids_is_no_shorter_prompt():
    """Padded to one width, [31, 1] and [1] look alike."""
    a = scored([segment([31, 1], ("A", [4]))], 1.0)
    b = scored([segment([1], ("A", [4]))], 0.0)
    packed = all_rows(collate([group(a, b)], 31))
    assert packed.input_ids.tolist() == [[31, 1, 4, 1, 4]]
    assert packed.layout.responses == [1, 1]


@given(st.integers(0, 2**31), st.integers(1, 60), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_micro_batches_hold_every_row_once_within_the_budget(seed, budget, drop):
    batch = collate(random_groups(seed % 1000, groups=4, n=3), 31)
    kept = torch.rand(12, generator=torch.Generator().manual_seed(drop)) < 0.7
    rows = kept.nonzero()[:, 0]
    pieces = micro_batches(batch, rows, budget)
    assert [r for piece in pieces for r in piece.tolist()] == rows.tolist()
    for i, piece in enumerate(pieces):
        size = pack(batch, piece, batch.response_mask[piece], CPU).input_ids.numel()
        assert size <= budget or len(piece) == 1
        if i + 1 < len(pieces):
            more = torch.cat([piece, pieces[i + 1][:1]])
            assert pack(batch, more, batch.response_mask[more], CPU).input_ids.numel() > budget


def test_other_rows_of_a_prompt_share_it_with_their_gradients():
    """Eight rows of one prompt, together and one by one: the same logprobs, the same gradient."""
    batch = collate(random_groups(3, groups=1, n=8), 31)
    found = []
    for pieces in ([arange(8)], [tensor([b]) for b in range(8)]):
        model = in_float64(tiny_model())
        policy = Policy(model, 1.0)
        logprobs = torch.cat(
            [policy.logprobs(pack(batch, p, batch.response_mask[p], CPU))[0] for p in pieces]
        )
        logprobs.square().sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore
        found.append((logprobs.detach(), gradient))
    torch.testing.assert_close(found[0], found[1], atol=1e-10, rtol=1e-10)


def test_a_sliding_window_is_kept():
    windowed = MistralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=3,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    plain = MistralForCausalLM(windowed).eval()
    packed = MistralForCausalLM(windowed).eval()
    packed.load_state_dict(plain.state_dict())
    batch = collate(random_groups(0, groups=2, n=3), 31)
    expected = plain_logprobs(plain, batch)
    with torch.no_grad():
        found = Policy(packed, 1.0).logprobs(all_rows(batch))[0]
    torch.testing.assert_close(found, expected[batch.response_mask], atol=1e-5, rtol=1e-5)


def test_the_switch_to_packed_attention_is_not_written_with_the_model(tmp_path):
    Policy(tiny_model(), 1.0).save_pretrained(tmp_path)
    assert "agentrl" not in (tmp_path / "config.json").read_text()
