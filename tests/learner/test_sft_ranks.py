"""Imitation's gradient is the plain cross-entropy's, on any number of ranks, however rows are cut.

Real processes over gloo, everything in float64.
"""

from itertools import islice

import pytest
import torch
from support.processes import Processes
from support.trainer_fixtures import in_float64
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl import registry
from agentrl.chat import ChatTemplate
from agentrl.data import write_rows
from agentrl.demo.arithmetic import rows
from agentrl.learner.dispatch import BROADCAST, dispatch
from agentrl.learner.rank import LocalRankGroup, Rank
from agentrl.learner.sft import SFTLearner, init_causal_lm, make_sft_config
from agentrl.learner.sharding import full_tensor
from agentrl.testing.tokenizer import byte_tokenizer
from agentrl.trainer.sft import load_examples

EXACT = 1e-10
SHAPE = Qwen2Config(
    vocab_size=263,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    initializer_range=0.3,
)
TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4"},
]
BUDGETS = (100_000, 2_500, 1)
"""Tokens of a micro-batch: all rows in one, a few, each alone."""


class Exact(Rank):
    """A rank in float64 that tells its gradient, and can begin anew."""

    def __init__(self):
        pass

    @dispatch(BROADCAST)
    def begin(self, *args, **kwargs):
        super().__init__(*args, **kwargs, dtype=torch.float64)
        in_float64(self.policy.model)
        with torch.no_grad():  # else half of an adapter's first gradient is zero
            for name, p in self.optimizers["actor"].parameters.items():
                if "lora_B" in name:
                    p.add_(0.05)

    @dispatch(BROADCAST)
    def optimizer_step(self, learns, lr):
        learned = self.optimizers[learns].parameters
        self.gradient = {name: full_tensor(p.grad).clone() for name, p in learned.items()}
        return super().optimizer_step(learns, lr)

    @dispatch(BROADCAST)
    def seen(self):
        """The last step's gradient, and all weights after it."""
        named = self.policy.model.named_parameters()
        return self.gradient, {name: full_tensor(p.detach()) for name, p in named}


class Again:
    """A placement whose ranks are there already."""

    def __init__(self, group):
        self.group = group

    def start_ranks(self, cls, *args, **kwargs):
        assert cls is Rank
        self.group.begin(*args, **kwargs)
        return self.group

    def describe_threads(self):
        raise AssertionError("imitation prints no threads")

    def engine_slots(self):
        raise AssertionError("imitation has no servers")


@pytest.fixture(scope="module")
def groups():
    opened = {1: LocalRankGroup(Exact()), 2: Processes(2, Exact)}
    yield opened
    for group in opened.values():
        group.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("models")
    SHAPE.save_pretrained(made / "shape")
    init_causal_lm(made / "shape", seed=0).save_pretrained(made / "base")
    return made / "base"


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """A talk of two turns, and rows of all loops, with and without tools."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    registry.load_file("shelf:calculator")
    made = [row.as_dict("train") for row in islice(rows(0), 3)]
    write_rows(file, [*made, {"gold": TALK}])
    return load_examples(str(file), "gold", ChatTemplate(byte_tokenizer()), 4096)


def plain(folder, examples):
    """Loss and gradient of transformers' own forward, one row after the other."""
    model = in_float64(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval())
    loss = torch.zeros((), dtype=torch.float64)
    for e in examples:
        ids, mask = torch.tensor(e.ids).long(), torch.tensor(e.mask)
        labels = torch.where(mask.bool(), ids, -100)
        logits = model(input_ids=ids[None]).logits[0]
        loss = loss + cross_entropy(logits[:-1], labels[1:], reduction="sum")
    loss = loss / sum(sum(e.mask) for e in examples)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def run(group, folder, examples, budget=BUDGETS[0], *, fresh=False, overrides=(), **settings):
    """Loss, gradient (not clipped) and weights of one step."""
    overrides = ["trainer.device=cpu", "optim.max_grad_norm=1e6", *overrides]
    config = make_sft_config(
        folder, steps=4, lr=1e-3, micro_batch_tokens=budget, overrides=overrides, **settings
    )
    learner = SFTLearner(config, fresh=fresh, placement=Again(group))
    return learner.train_step(examples, 1), *group.seen()


def close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=EXACT, rtol=0, msg=name)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_gradient_is_the_plain_cross_entropy_s(groups, folder, examples, ranks):
    loss, gradient = plain(folder, examples)
    assert max(g.abs().max() for g in gradient.values()) > 1e-2
    assert len({sum(e.mask) for e in examples}) > 2  # a mean of rows' means is another loss
    for budget in BUDGETS:
        result = run(groups[ranks], folder, examples, budget)
        assert result[0] == pytest.approx(loss, abs=EXACT)
        close(result[1], gradient)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"lora_rank": 4}, {"fresh": True}, {"overrides": ["optim.recompute=true"]}],
    ids=str,
)
def test_ranks_change_nothing(groups, folder, examples, settings):
    expected = run(groups[1], folder, examples, **settings)
    for budget in BUDGETS:
        loss, gradient, weights = run(groups[2], folder, examples, budget, **settings)
        assert loss == pytest.approx(expected[0], abs=EXACT)
        close(gradient, expected[1])
        close(weights, expected[2])


def test_fewer_rows_than_ranks(groups, folder, examples):
    alone, both = (run(groups[n], folder, examples[-1:]) for n in (1, 2))
    assert both[0] == pytest.approx(alone[0], abs=EXACT)
    close(both[1], alone[1])
