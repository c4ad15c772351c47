"""Rows become the input of a model in the first mode that computes what the model itself does."""

from __future__ import annotations

import random
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.architectures import (
    ARCHITECTURES,
    NAMES,
    architecture,
    make_model,
    mode_of,
    model_of_kind,
)
from support.exact_rank import EXACT, ExactRank
from support.models_page import KINDS
from support.needs import needs_newest_models
from support.processes import Processes
from support.trainer_fixtures import (
    as_sampled_by,
    config,
    group,
    random_groups,
    scored,
    segment,
    tiny_model,
)
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.gptj.modeling_gptj import GPTJPreTrainedModel

from agentrl.engine.local.decoder import CannotDecode, Decoder
from agentrl.engine.local.windows import NoSmallCopy
from agentrl.errors import ConfigError
from agentrl.learner import attention, modes
from agentrl.learner.algorithms import make_targets
from agentrl.learner.batch import Batch, collate
from agentrl.learner.learner import Learner
from agentrl.learner.modes import describe_mode, prove_mode
from agentrl.learner.packing import Mode, assign_rows, make_micro_batch
from agentrl.learner.policy import ACTOR, Policy
from agentrl.learner.rank import LocalRankGroup

SEED = 20
MODES = {
    "mamba2": Mode.PADDED,
    "opt": Mode.PACKED,
    "gptj": Mode.PACKED if GPTJPreTrainedModel._supports_attention_backend else Mode.WHOLE,
    "gpt_neo": Mode.PADDED,
    "gemma2": Mode.PACKED,
    "cohere2": Mode.PACKED,
    "granite": Mode.PACKED,
    "phi": Mode.PACKED,
    "llama4": Mode.PACKED,
}
"""The mode of the models in `OTHERS` on a CPU."""
PLAIN_MODELS = ("opt", "cohere2", "granite", "phi")
"""They are packed as the architectures that `make test` tries. `make test-all` tries them, too."""
OTHERS = {
    "mamba2": (
        "mamba2",
        {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    ),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    # Its attention uses the interface since transformers 5.24. The mask separated flat rows before
    # that, too.
    "gptj": ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 99}),
    # Flat rows are longer than its masks, whose size is that of its positions.
    "gpt_neo": (
        "gpt_neo",
        {"attention_types": [[["global", "local"], 2]], "window_size": 16,
         "max_position_embeddings": 99},
    ),
    "gemma2": ("gemma2", {"head_dim": 8, "sliding_window": 16, "final_logit_softcapping": 3.0}),
    "cohere2": ("cohere2", {"head_dim": 8, "sliding_window": 16, "logit_scale": 0.25}),
    "granite": ("granite", {"logits_scaling": 8.0}),
    "phi": ("phi", {}),
    # `get_decoder` returns the whole model.
    "llama4": (
        "llama4_text",
        {
            "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4,
            "attention_chunk_size": 16, "attn_temperature_tuning": False,
        },
    ),
}  # fmt: skip


def model_of(name: str) -> PreTrainedModel:
    return make_model(*OTHERS[name]) if name in OTHERS else architecture(name)


def random_batch() -> Batch:
    """12 rollouts of 3 prompts."""
    return collate(random_groups(3, groups=3, n=4), 31)


def longer_batch() -> Batch:
    """As `random_batch`, and two rows that are longer than the 64 tokens of a step of the gated
    delta net, with tool tokens."""
    draw = random.Random(5)

    def tokens(n: int) -> list[int]:
        return [draw.randrange(32) for _ in range(n)]

    prompt = tokens(30)
    rows = [
        scored([segment(prompt, ("A", tokens(n)), ("E", tokens(3)), ("A", tokens(9)))], reward)
        for n, reward in ((41, 1.0), (28, 0.0))
    ]
    return collate([*random_groups(3, groups=3, n=4), group(*rows)], 31)


def own_logprobs(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Return (N,) logprobs of the sampled tokens: one plain forward pass for each row."""
    found = []
    for i in range(len(batch.response_ids)):
        prompt, response = int(batch.prompt_lengths[i]), int(batch.response_lengths[i])
        ids = torch.cat([batch.prompt_ids[i, -prompt:], batch.response_ids[i, :response]])
        logits = model(input_ids=ids[None], use_cache=False).logits[0, prompt - 1 : -1]
        row = logits.log_softmax(-1).gather(1, ids[prompt:, None])[:, 0]
        found.append(row[batch.response_mask[i, :response]])
    return torch.cat(found)


@needs_newest_models
@pytest.mark.parametrize(
    "name",
    [
        *NAMES,
        *(pytest.param(m, marks=pytest.mark.slow) if m in PLAIN_MODELS else m for m in MODES),
    ],
)
def test_logprobs_and_gradients_are_those_of_one_row_after_the_other(name):
    model = model_of(name)
    policy = check_rows(model, longer_batch())
    assert policy.packed_model.mode is (MODES[name] if name in MODES else mode_of(name))
    text = model.config.get_text_config()
    assert len(policy.packed_model.layers()) == text.num_hidden_layers


def check_rows(model: PreTrainedModel, batch: Batch) -> Policy:
    """Compare a policy with plain forward passes, with rows in micro-batches of several sizes."""
    weights = [p for p in model.parameters() if p.requires_grad]
    expected = own_logprobs(model, batch)
    noise = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    own = torch.autograd.grad((expected * noise).sum(), weights, allow_unused=True)

    policy = Policy(model, 1.0)
    mode = policy.packed_model.mode
    rows = torch.arange(len(batch.response_ids))
    for budget in (1, 200, 10_000):
        total = [torch.zeros_like(w) for w in weights]
        [share] = assign_rows(batch, rows, 1, budget, mode)
        assert torch.equal(torch.cat(share).sort().values, rows)
        assert mode is not Mode.ALONE or all(len(piece) == 1 for piece in share)
        for piece in share:
            columns = {"noise": torch.zeros(batch.response_mask.shape)}
            columns["noise"][batch.response_mask] = noise
            columns["expected"] = torch.zeros(batch.response_mask.shape)
            columns["expected"][batch.response_mask] = expected.detach()
            made = make_micro_batch(batch, piece, batch.response_mask, columns, mode)
            if not mode.is_flat and len(piece) > 1:
                assert made.packed.input_ids.numel() <= budget
            logprobs, _ = policy.logprobs(made.packed)
            torch.testing.assert_close(logprobs, made.columns["expected"], atol=1e-4, rtol=1e-4)
            found = torch.autograd.grad(
                (logprobs * made.columns["noise"]).sum(), weights, allow_unused=True
            )
            total = [t if g is None else t + g for t, g in zip(total, found, strict=True)]
        largest = max(g.norm() for g in own if g is not None)
        for a, b in zip(total, own, strict=True):
            b = torch.zeros_like(a) if b is None else b
            assert (a - b).norm() <= 1e-3 * b.norm() + 1e-5 * largest
    return policy


@pytest.mark.slow
def test_five_other_causal_models_are_run_right_and_no_other_is_accepted():
    """The first five of transformers' own list, in an order that a fixed seed draws. Those before
    them must be refused if they are not causal or have an output layer of their own; those of which
    `SMALL` makes no model are left out."""
    tested = {kind for kind, _ in (*ARCHITECTURES.values(), *OTHERS.values())}
    kinds = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING) - tested)
    random.Random(SEED).shuffle(kinds)
    modes: dict[str, str] = {}
    while len(modes) < 5:
        kind = kinds.pop(0)
        try:
            model = model_of_kind(kind)
        except Exception as e:
            print(f"{kind}: no tiny model ({type(e).__name__}: {e})")
            continue
        if type(model.get_output_embeddings()) is not torch.nn.Linear:
            with pytest.raises(ConfigError, match="the logits of the output layer differ"):
                Policy(model, 1.0)
            print(f"{kind}: refused")
            continue
        if is_causal(model):
            modes[kind] = check_rows(model, longer_batch()).packed_model.mode.value
            print(f"{kind}: {modes[kind]}")
            continue
        with pytest.raises(ConfigError, match="cannot be trained here: ") as caught:
            Policy(model, 1.0)
        assert "a token changes the logits of earlier tokens" in str(caught.value)
        print(f"{kind}: refused")


@torch.no_grad()
def is_causal(model: PreTrainedModel) -> bool:
    ids = torch.arange(1, 31)[None]
    short, whole = (model(input_ids=x, use_cache=False).logits[0, :9] for x in (ids[:, :9], ids))
    return bool((short - whole).abs().max() < 1e-3)


def test_a_scored_row_is_that_of_the_plain_model():
    """The canary scores a row in the mode of the policy."""
    for name in ("Qwen3", "Qwen3.5", "Phi-4-mini"):
        model = model_of(name)
        row = torch.arange(1, 40)
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]
        rank = object.__new__(ExactRank)
        rank.policy, rank.device = Policy(model, 0.5), torch.device("cpu")
        rank._context = None
        torch.testing.assert_close(rank.score(row.tolist()), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("mode", Mode)
def test_every_row_is_run_once_and_ranks_run_equally_many_micro_batches(mode, ranks):
    batch = random_batch()
    rows = torch.arange(1, 12)
    for budget in (1, 60, 150, 10_000):
        shares = assign_rows(batch, rows, ranks, budget, mode)
        assert len({len(share) for share in shares}) == 1
        assert torch.cat([piece for share in shares for piece in share]).sort()[0].equal(rows)
        for piece in (piece for share in shares for piece in share if len(piece) > 1):
            made = make_micro_batch(batch, piece, batch.response_mask, {}, mode)
            assert made.packed.input_ids.numel() <= budget
            assert mode is not Mode.ALONE


def test_rows_of_like_length_are_padded_together():
    batch = random_batch()
    batch = replace(batch, response_lengths=torch.tensor([31, 1] * 6))
    [share] = assign_rows(batch, torch.arange(12), 1, 250, Mode.PADDED)
    for piece in share:
        lengths = (batch.prompt_lengths + batch.response_lengths)[piece]
        assert lengths.max() <= 2 * lengths.min()


@pytest.mark.parametrize("name", ["Qwen2.5", "Phi-4-mini"])
def test_a_model_in_which_tokens_see_later_ones_is_refused(name):
    model = architecture(name)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ConfigError, match="a token changes the logits of earlier tokens"):
        prove_mode(model)


@needs_newest_models
def test_damaged_weights_are_not_called_another_attention():
    model = tiny_model()
    with torch.no_grad():
        model.get_output_embeddings().weight[0] = float("nan")
    with pytest.raises(ConfigError, match="its own logits are NaN, so its weights or their files"):
        prove_mode(model)


def test_rotary_positions_that_depend_on_earlier_passes_are_refused():
    """The logits of a row change for good once a longer row has run."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = make_model("llama", {"rope_parameters": rope, "max_position_embeddings": 16})
    ids = torch.arange(1, 60)[None]
    with torch.no_grad():
        before = model(input_ids=ids[:, :20]).logits
        model(input_ids=ids)
        assert (model(input_ids=ids[:, :20]).logits - before).abs().max() > 0.1
    with pytest.raises(
        ConfigError, match=r"rotary positions \(dynamic\) depend on the longest row"
    ):
        prove_mode(model)


@needs_newest_models
@pytest.mark.parametrize(
    ("name", "left_out"), [("Nemotron-H", "out_proj"), ("llama4", "router"), ("LFM2", None)]
)
def test_all_linear_leaves_out_what_cannot_have_an_adapter(name, left_out):
    policy = Policy(model_of(name), 1.0)
    policy.add_adapter(ACTOR, 2, 4, "all-linear", 0)
    adapted = {n.split(".lora_")[0].rpartition(".")[2] for n in policy.parameters(ACTOR)}
    assert "q_proj" in adapted
    assert left_out not in adapted
    assert ("out_proj" in adapted) == (name == "LFM2")
    batch = random_batch()
    rows = torch.arange(1)
    mode = policy.packed_model.mode
    made = make_micro_batch(batch, rows, batch.response_mask, {}, mode)
    policy.logprobs(made.packed)[0].sum().backward()
    b = [p.grad for n, p in policy.parameters(ACTOR).items() if "lora_B" in n and "expert" not in n]
    assert all(g is not None and g.any() for g in b)


@needs_newest_models
def test_the_reason_of_a_slower_mode_is_kept_and_the_model_keeps_its_own_attention():
    model = model_of("Qwen3.5")
    own = model.config._attn_implementation
    mode, reason = prove_mode(model)
    assert mode is Mode.PADDED and reason.startswith("packed: packed logits differ")
    assert "; packed whole: packed rows fail" in reason and "causal_conv1d" in reason
    assert model.config._attn_implementation == own
    assert prove_mode(tiny_model()) == (Mode.PACKED, "")


class _CoarseGradient(torch.autograd.Function):
    """Multiplies gradients by noise that depends on their bits, as kernels with TF32 round."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        [g] = gradients
        seed = int(g.contiguous().view(torch.int32).sum())
        noise = torch.randn(g.shape, generator=torch.Generator().manual_seed(seed))
        return g * (1 + 0.005 * noise)


class _Coarse(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return _CoarseGradient.apply(x)


@pytest.mark.parametrize("wrong", [False, True])
def test_gradients_may_differ_by_the_rounding_of_the_model_itself(wrong, monkeypatch):
    """Kernels of linear attention on a GPU; a mode that leaves a gradient out is still refused."""
    model = tiny_model()
    for layer in model.model.layers:
        layer.mlp = nn.Sequential(layer.mlp, _Coarse())
    monkeypatch.setattr(modes, "small_copy", deepcopy)
    monkeypatch.setattr(modes, "_results", {})
    if wrong:
        original = modes.hidden_states
        monkeypatch.setattr(
            modes, "hidden_states", lambda m, packed: original(m, packed).detach().requires_grad_()
        )
        with pytest.raises(ConfigError, match="other gradients"):
            prove_mode(model)
    else:
        assert prove_mode(deepcopy(model)) == (Mode.PACKED, "")
        monkeypatch.setattr(modes, "ROUNDING_FACTOR", 0.0)
        modes._results.clear()
        assert prove_mode(model)[0] is Mode.ALONE


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TypeError("no such argument"), "packed rows fail (TypeError: no such argument)"),
        (NotImplementedError("this layer ignores it"), "this layer ignores it"),
        (NotImplementedError(), "NotImplementedError"),
    ],
)
def test_the_reason_of_a_mode_that_fails_is_its_error(error, reason, monkeypatch):
    model = tiny_model()
    own = type(model.model).forward

    def forward(self, *args, layout=None, **kwargs):
        if layout is not None:
            raise error
        return own(self, *args, **kwargs)

    monkeypatch.setattr(modes, "_results", {})
    monkeypatch.setattr(type(model.model), "forward", forward)
    assert prove_mode(model) == (Mode.PADDED, reason)


@pytest.mark.parametrize("sinks", [True, False])
def test_rounding_that_sends_tokens_to_other_experts_is_no_difference(sinks, monkeypatch):
    """A GPU's kernel rounds at other places than the model's own attention."""
    model = make_model(
        "gpt_oss",
        {
            **{"num_hidden_layers": 24, "hidden_size": 128, "intermediate_size": 128},
            **{"num_local_experts": 64, "num_experts_per_tok": 8, "head_dim": 16},
        },
    ).to(torch.bfloat16)
    own = attention._attend_per_response

    def rounded(q, k, v, layout, scores):
        out = own(q, k, v, layout, scores if sinks else replace(scores, sinks=None))
        noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
        # With 2**-8, the step of bfloat16, right passes differ by 0.155 on some CPUs.
        return out * (1 + 2**-10 * noise).to(out.dtype)

    monkeypatch.setattr(attention, "_attend_per_response", rounded)
    comparison = modes._Comparison(model, modes.SHORT_ROW)
    assert (comparison.compare(Mode.PACKED) == "") == sinks


class _Mixed(nn.Module):
    """Adds the state of the token so many tokens back."""

    def __init__(self, layer: nn.Module, distance: int):
        super().__init__()
        self.layer, self.distance = layer, distance

    def forward(self, x):
        far = nn.functional.pad(x, (0, 0, self.distance, 0))[:, : x.shape[1]]
        return self.layer(x) + far


@pytest.mark.parametrize("has_copy", [True, False])
@pytest.mark.parametrize("distance", [16, 180, 500])
def test_rows_that_see_tokens_far_back_in_the_flat_row_are_padded(distance, has_copy, monkeypatch):
    def copy(model, device=None):
        if has_copy:
            return deepcopy(model)
        raise NoSmallCopy("there is none")

    model = tiny_model()
    model.model.layers[0].mlp = _Mixed(model.model.layers[0].mlp, distance)
    monkeypatch.setattr(modes, "small_copy", copy)
    monkeypatch.setattr(modes, "_results", {})
    mode, reason = prove_mode(model)
    assert mode is Mode.PADDED and "for longer rows packed logits differ" in reason


@needs_newest_models
@pytest.mark.parametrize("heads", [4, 8])
def test_positions_in_bfloat16_are_not_packed(heads):
    """Falcon computes ALiBi with the positions in the flat row: they are exact up to 256."""
    values = {"alibi": True, "num_attention_heads": heads, "new_decoder_architecture": False}
    mode, reason = prove_mode(make_model("falcon", values | {"hidden_size": 64}))
    assert mode is Mode.PADDED and "packed whole: for longer rows packed logits differ" in reason


SIMILAR = ("Gemma 3n", "HunYuan V1 MoE")
"""`make test` tries a model of the same kind in their place."""
RIGHT = (
    KINDS["layers that share keys and values"]
    | KINDS["rotary positions with a fixed base that the config calls `dynamic`"]
)


@needs_newest_models
@pytest.mark.parametrize(
    "name",
    [
        *(n for n in RIGHT if n not in SIMILAR),
        *(pytest.param(n, marks=pytest.mark.slow) for n in SIMILAR),
    ],
)
def test_what_a_config_says_of_layers_is_true_in_the_copy(name):
    """A static base that is called dynamic; layers that read the keys and values of others."""
    model = make_model(*RIGHT[name])
    assert modes.find_mode(model.config) == (Mode.PACKED, "")
    packed_model = check_rows(model, random_batch()).packed_model
    assert (packed_model.mode, packed_model.mode_reason) == (Mode.PACKED, "")


@needs_newest_models
def test_the_logits_of_inkling_have_their_factor():
    kind, values = KINDS["a bias of relative positions"]["Inkling"]
    model = make_model(kind, values | {"logits_mup_width_multiplier": 24.0})
    assert modes.find_scale_and_softcap(model) == (1 / 24, None)
    assert prove_mode(model)[0] is Mode.PADDED


def test_what_the_copy_shows_is_stored_for_the_next_run(tmp_path, monkeypatch, caplog):
    """A damaged file is ignored, and so is what other code has found."""
    runs, own = [], modes._Comparison._own_logits
    monkeypatch.setattr(modes._Comparison, "_own_logits", lambda *a: runs.append(a) or own(*a))
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))
    counts = []

    def start(tokens: int | None = 16384) -> None:
        monkeypatch.setattr(modes, "_results", {})
        runs.clear()
        assert prove_mode(tiny_model(), tokens=tokens) == (Mode.PACKED, "")
        counts.append(len(runs))

    start()
    start()
    [file] = (tmp_path / "modes").iterdir()
    for damaged in ("[]", '{"packed"', "", "3", '{"packed": 3}', "null"):
        file.write_text(damaged)
        start()
    start()
    start(tokens=None)
    monkeypatch.setattr(modes, "_describe_machine", lambda device: ["another"])
    start()
    (tmp_path / "modes").chmod(0o777)  # Others may have written its files.
    start()
    assert counts == [3, 1, *[3] * 6, 1, 3, 3, 3]
    (tmp_path / "modes").rename(tmp_path / "theirs")
    (tmp_path / "modes").symlink_to(tmp_path / "theirs")
    start()
    assert counts[-1] == 3 and "modes is not used, because it is a link" in caplog.text


@pytest.mark.slow
def test_a_run_of_a_hybrid_learns_the_same_on_two_ranks(tmp_path):
    """In float64, with fewer rows than ranks in some passes."""
    model = architecture("LFM2")
    model.save_pretrained(tmp_path)
    batch = as_sampled_by(model, collate(random_groups(3, groups=2, n=2, dead=[1]), 31))
    results = []
    for open_group in (lambda: LocalRankGroup(ExactRank(tmp_path)), two_ranks(tmp_path)):
        with closing(open_group()) as ranks:
            cfg = config(optim__lr=1e-3, optim__micro_batch_tokens=60)
            ranks.begin(cfg)
            learner = Learner("", cfg, total_steps=4, group=ranks)
            assert learner.mode is Mode.PADDED
            old = learner.old_logprobs(batch)
            targets = make_targets(batch, cfg, old, None, None)
            metrics, _ = learner.update(batch, targets, 1)
            results.append((metrics, learner.logprobs(batch), ranks.weights()))
    (metrics, logprobs, weights), (metrics_2, logprobs_2, weights_2) = results
    assert metrics["actor/grad_norm"] > 1e-3
    torch.testing.assert_close(logprobs_2, logprobs, atol=EXACT, rtol=0)
    for name, value in weights.items():
        torch.testing.assert_close(weights_2[name], value, atol=EXACT, rtol=EXACT, msg=name)
    assert metrics_2["actor/grad_norm"] == pytest.approx(metrics["actor/grad_norm"], rel=1e-9)


def two_ranks(folder):
    return lambda: Processes(2, ExactRank, folder)


def test_a_model_whose_logits_are_not_those_of_its_head_is_refused(monkeypatch):
    model = tiny_model()
    own = type(model).forward

    def strange(self, *args, **kwargs):
        output = own(self, *args, **kwargs)
        output.logits = output.logits.sin()
        return output

    monkeypatch.setattr(type(model), "forward", strange)
    with pytest.raises(ConfigError, match="cannot be trained here: the logits of the output layer"):
        prove_mode(model)


@pytest.mark.parametrize("name", ["granite", "Qwen3"])
def test_an_output_layer_that_does_more_than_its_class_is_refused(name):
    """The learner computes the logits from its weight and its bias only."""

    class Scaled(torch.nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden) * torch.linspace(0.5, 2, self.out_features)

    model = model_of(name)
    model.lm_head.__class__ = Scaled
    with pytest.raises(ConfigError, match="the logits of the output layer differ from the model's"):
        Policy(model, 1.0)


@pytest.mark.parametrize("name", ["granite", "gemma2", "Qwen3"])
def test_a_model_whose_forward_pass_fails_is_refused_with_the_cause(name, monkeypatch):
    """Also if its config has a scale or a cap, which are found by forward passes."""
    model = model_of(name)

    def fail(*args, **kwargs):
        raise ValueError("no such kernel")

    monkeypatch.setattr(type(model), "forward", fail)
    cause = r"cannot be trained here: the model's own forward pass fails \(ValueError: no such kern"
    with pytest.raises(ConfigError, match=cause):
        Policy(model, 1.0)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
@pytest.mark.parametrize("calls", [0, 1, 3, 5])
def test_a_full_memory_is_not_the_model(error, calls, monkeypatch):
    """Neither is the model refused, nor a slower mode taken and remembered for the next run."""
    model, count = model_of("Qwen3"), iter(range(1000))

    def fail_after_calls(own):
        def forward(*args, **kwargs):
            if next(count) >= calls:
                raise error
            return own(*args, **kwargs)

        return forward

    for part in (type(model), type(model.get_decoder())):
        monkeypatch.setattr(part, "forward", fail_after_calls(part.forward))
    with pytest.raises(ConfigError, match="the memory is full before the first step"):
        Policy(model, 1.0)


@pytest.mark.parametrize("name", ["granite", "Qwen3"])
def test_a_model_without_a_linear_output_layer_is_refused(name):
    for layer, cause in (
        (None, "it has no output layer"),
        (torch.nn.Identity(), r"its output layer is a Identity, not a torch\.nn\.Linear"),
    ):
        model = model_of(name)
        model.lm_head = layer
        with pytest.raises(ConfigError, match=f"cannot be trained here: {cause}"):
            Policy(model, 1.0)


def test_own_passes_are_run_once_for_all_modes(monkeypatch):
    """Once for a few tokens, and twice for the long rows of the small copy."""
    runs, own = [], modes._Comparison._own_logits
    monkeypatch.setattr(modes._Comparison, "_own_logits", lambda *a: runs.append(a) or own(*a))
    monkeypatch.setattr(modes, "_results", {})
    model = make_model("phimoe", {"sliding_window": 4096, "num_local_experts": 4})
    mode, reason = prove_mode(model)
    assert mode is Mode.PADDED and "for longer rows packed logits differ" in reason
    assert len(runs) == 3


@needs_newest_models
@pytest.mark.parametrize("name", ["Nemotron-H", "Granite 4 hybrid"])
def test_the_steps_of_mamba_layers_are_not_called_limits(name):
    with pytest.raises(CannotDecode) as caught:
        Decoder(model_of(name))
    assert "limits which tokens a token sees" not in str(caught.value)
    assert "limits which" not in prove_mode(model_of(name))[1]


def test_the_cost_of_a_mode_is_what_it_computes():
    """Eight responses as long as their prompt: 16 pieces instead of 9."""
    rows = collate(random_groups(3, groups=1, n=8), 31)
    even = replace(
        rows,
        prompt_ids=rows.prompt_ids[:, -2:],
        prompt_lengths=torch.full((8,), 2),
        response_lengths=torch.full((8,), 2),
    )
    for mode in (Mode.WHOLE, Mode.PADDED, Mode.ALONE):
        [share] = assign_rows(even, torch.arange(8), 1, 10_000, mode)
        made = [make_micro_batch(even, piece, even.response_mask, {}, mode) for piece in share]
        tokens = sum(one.packed.input_ids.numel() for one in made)
        packed = make_micro_batch(even, torch.arange(8), even.response_mask, {}).packed
        line = describe_mode(mode, "it mixes tokens", 8)
        assert f"runs {tokens / packed.input_ids.numel():.1f} times the tokens" in line
        assert ("padding" in line) == (mode is Mode.PADDED)
        assert ("micro-batches of one row" in line) == (len(made) == 8)
