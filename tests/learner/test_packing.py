from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.trainer_fixtures import (
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

from agentrl.learner.batch import Batch, collate
from agentrl.learner.packing import make_micro_batch, pack
from agentrl.learner.policy import Policy


def all_rows(batch: Batch):
    return pack(batch, arange(len(batch.rollout)), batch.response_mask)


def test_a_prompt_is_packed_once_before_all_responses_to_it():
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


@given(st.integers(0, 999), st.integers(0, 2**31))
@examples(60)
def test_a_micro_batch_has_the_chosen_rows(seed, chance):
    """Rows and tokens of these are left out; some rows have no chosen token."""
    batch = collate(random_groups(seed, groups=3, n=3), 31)
    g = torch.Generator().manual_seed(chance)
    rows = (torch.rand(9, generator=g) < 0.6).nonzero()[:, 0]
    mask = batch.response_mask & (torch.rand(batch.response_mask.shape, generator=g) < 0.6)
    column = torch.rand(mask.shape, generator=g)
    made = make_micro_batch(batch, rows, mask, {"column": column})
    here = mask[rows]
    assert torch.equal(made.packed.tokens, batch.response_ids[rows][here])
    assert len(made.packed.states) == len(made.packed.tokens) == made.mask.sum()
    assert torch.equal(made.columns["column"], column[rows][here])
    laid_out = made.rows(made.columns["column"])
    assert laid_out.shape == made.mask.shape and not laid_out[~made.mask].any()
    if len(rows):
        lists = [column[b][mask[b]].tolist() for b in rows.tolist()]
        assert [r[m].tolist() for r, m in zip(laid_out, made.mask, strict=True)] == lists
        assert laid_out.shape[1] == max(map(len, lists))


def test_a_pass_over_no_rows_has_zero_gradients_for_every_weight():
    """The other ranks wait for its gradient, which is zero."""
    batch = collate(random_groups(0, groups=1, n=2), 31)
    model = tiny_model()
    empty = make_micro_batch(batch, arange(0), batch.response_mask, {"x": batch.rollout_logprobs})
    logprobs, entropy = Policy(model, 1.0).logprobs(empty.packed, entropy_gradient=True)
    assert logprobs.shape == entropy.shape == empty.columns["x"].shape == (0,)
    assert empty.rows(logprobs).shape == empty.mask.shape == (1, 0)
    (logprobs.sum() + entropy.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_other_rows_of_a_prompt_share_it_with_their_gradients():
    """Eight rows of one prompt, together and one by one: the same logprobs, the same gradient."""
    batch = collate(random_groups(3, groups=1, n=8), 31)
    results = []
    for pieces in ([arange(8)], [tensor([b]) for b in range(8)]):
        model = in_float64(tiny_model())
        policy = Policy(model, 1.0)
        logprobs = torch.cat(
            [policy.logprobs(pack(batch, p, batch.response_mask[p]))[0] for p in pieces]
        )
        logprobs.square().sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore
        results.append((logprobs.detach(), gradient))
    torch.testing.assert_close(results[0], results[1], atol=1e-10, rtol=1e-10)


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
        logprobs = Policy(packed, 1.0).logprobs(all_rows(batch))[0]
    torch.testing.assert_close(logprobs, expected[batch.response_mask], atol=1e-5, rtol=1e-5)


def test_the_switch_to_packed_attention_is_not_written_with_the_model(tmp_path):
    Policy(tiny_model(), 1.0).save_pretrained(tmp_path)
    assert "agentrl" not in (tmp_path / "config.json").read_text()
