from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.trainer_fixtures import (
    group,
    plain_logprobs,
    random_groups,
    scored,
    segment,
    tiny_folder,
    tiny_model,
)
from torch import arange, tensor

from agentrl.chat import load_tokenizer
from agentrl.engine.local.load import load_causal_lm, load_model_config
from agentrl.errors import ConfigError, UserError
from agentrl.learner.batch import Batch, collate
from agentrl.learner.modes import hidden_states
from agentrl.learner.packing import pack
from agentrl.learner.policy import ACTOR, CRITIC, Critic, Policy


def rows_of(batch: Batch, *which: int):
    rows = tensor(which) if which else arange(len(batch.rollout))
    return pack(batch, rows, batch.response_mask[rows])


def chosen(batch: Batch, full: torch.Tensor) -> torch.Tensor:
    return full[batch.response_mask]


def digest(tensors) -> str:
    return hashlib.sha256(
        b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)
    ).hexdigest()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_a_plain_forward_alone_and_in_a_batch(temperature):
    policy = Policy(tiny_model(), temperature)
    batch = collate(random_groups(0, groups=3, n=4), 31)
    expected = chosen(batch, plain_logprobs(tiny_model(), batch, temperature))
    with torch.no_grad():
        together = policy.logprobs(rows_of(batch))[0]
        alone = torch.cat([policy.logprobs(rows_of(batch, b))[0] for b in range(12)])
    torch.testing.assert_close(together, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(alone, expected, atol=1e-5, rtol=1e-5)


def test_a_rows_logprobs_do_not_depend_on_its_neighbours_tokens():
    policy = Policy(tiny_model(), 1.0)
    steady = scored([segment([1, 2], ("A", [3, 4, 5]))], 0.0)
    logprobs = []
    for other in ([6, 7, 8], [9, 10, 11]):
        batch = collate([group(scored([segment(other, ("A", other))], 0.0), steady)], 31)
        with torch.no_grad():
            logprobs.append(policy.logprobs(rows_of(batch))[0][3:])
    assert torch.equal(*logprobs)


def test_only_positions_before_a_sampled_token_get_gradients():
    """One off in either direction, and tool tokens would train or sampled ones would not."""
    policy = Policy(tiny_model(layers=1), 1.0)
    batch = collate(
        [
            group(
                scored([segment([1, 2, 3], ("A", [4]), ("E", [5, 6]), ("A", [7, 8]))], 1.0),
                scored([segment([9], ("E", [1]), ("A", [2]), ("E", [3]))], 1.0),
            )
        ],
        31,
    )
    seen = []

    def keep(module, args, output):
        output.last_hidden_state.retain_grad()
        seen.append(output.last_hidden_state)

    hook = policy.model.get_decoder().register_forward_hook(keep)
    policy.logprobs(rows_of(batch))[0].sum().backward()
    hook.remove()
    assert seen[0].grad is not None
    touched = (seen[0].grad != 0).any(-1)
    #            P  P  P  A  E  E  A  A    P  E  A  E
    expected = [0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 0]
    assert touched.int().tolist() == [expected]


def test_entropy_has_a_gradient_only_on_request():
    policy = Policy(tiny_model(), 1.0)
    rows = rows_of(collate(random_groups(0, 1, 2), 31))
    assert not policy.logprobs(rows)[1].requires_grad
    assert policy.logprobs(rows, entropy_gradient=True)[1].requires_grad


# --- LoRA ---------------------------------------------------------------------------------------


def with_adapter(rank: int = 4, targets: str | list[str] = "all-linear", seed: int = 0):
    policy = Policy(tiny_model(), 1.0)
    policy.add_adapter(ACTOR, rank, 8, targets, seed)
    return policy, policy.parameters(ACTOR)


def shake(parameters) -> None:
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in parameters.values():
            p.add_(0.1 * torch.randn(p.shape, generator=g))


def test_a_new_adapter_changes_nothing_and_can_be_turned_off():
    plain = Policy(tiny_model(), 1.0)
    policy, learns = with_adapter()
    rows = rows_of(collate(random_groups(0, 2, 2), 31))
    with torch.no_grad():
        before = plain.logprobs(rows)[0]
        assert torch.equal(policy.logprobs(rows)[0], before)
        shake(learns)
        assert not torch.equal(policy.logprobs(rows)[0], before)
        with policy.adapter(None):
            assert torch.equal(policy.logprobs(rows)[0], before)
        assert not torch.equal(policy.logprobs(rows)[0], before)
    assert all(p.requires_grad for p in learns.values())
    trained = {n for n, p in policy.model.named_parameters() if p.requires_grad}
    assert trained == set(learns)


def test_the_seed_of_an_adapter_changes_no_other_random_number():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = digest(with_adapter(seed=1)[1].values())
    torch.manual_seed(3)
    tiny_model()  # draws from the global stream, as with_adapter did
    after = torch.get_rng_state()
    assert not torch.equal(state, after)
    assert digest(with_adapter(seed=1)[1].values()) == first
    assert torch.equal(torch.get_rng_state(), after)
    assert digest(with_adapter(seed=2)[1].values()) != first


def test_only_the_named_modules_get_an_adapter():
    _, learns = with_adapter(targets=["q_proj"])
    assert {n.split(".lora_")[0].rsplit(".", 1)[1] for n in learns} == {"q_proj"}
    _, learns = with_adapter(targets=["layers.1.self_attn.q_proj", "down_proj"])
    assert len(learns) == 2 * 3


@pytest.mark.parametrize("wrong", ["lm_head", "embed_tokens", "norm", "mlp", "q_porj", "proj"])
def test_modules_that_cannot_learn_or_be_published_get_no_adapter(wrong):
    choices = "all-linear, or from down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj."
    for targets in (wrong, ["q_proj", wrong]):
        with pytest.raises(ConfigError, match=f"{wrong} cannot be adapted. Choose {choices}"):
            with_adapter(targets=targets)
    with pytest.raises(
        ConfigError, match=r"lora_target_modules=\[\]: an empty list cannot be adapted"
    ):
        with_adapter(targets=[])


def test_the_exported_merge_scores_as_the_adapter_does_and_leaves_the_base_alone():
    policy, learns = with_adapter()
    base = [p for n, p in policy.model.named_parameters() if "lora_" not in n]
    untouched = digest(base)
    shake(learns)
    exported = dict(policy.export())
    plain = tiny_model()
    names = set(dict(plain.named_parameters()))
    assert set(exported) <= names and len(exported) == 14  # seven projections in two layers
    plain.load_state_dict(exported, strict=False)
    rows = rows_of(collate(random_groups(0, 2, 2), 31))
    with torch.no_grad():
        torch.testing.assert_close(
            Policy(plain, 1.0).logprobs(rows)[0], policy.logprobs(rows)[0], atol=1e-5, rtol=1e-5
        )
    assert digest(base) == untouched


def test_the_export_of_a_whole_model_is_all_of_it():
    model = tiny_model()
    exported = dict(Policy(model, 1.0).export())
    assert set(exported) == {n for n, _ in model.named_parameters()}
    assert not any(t.requires_grad for t in exported.values())


# --- critic -------------------------------------------------------------------------------------


def test_a_critic_starts_at_zero_and_reads_the_state_before_the_token():
    critic = Critic(Policy(tiny_model(), 1.0).packed_model)
    rows = rows_of(collate(random_groups(0, 2, 2), 31))
    assert not critic.values(rows).any()
    torch.nn.init.ones_(critic.head.weight)
    with torch.no_grad():
        states = hidden_states(critic.packed_model.model, rows)
        torch.testing.assert_close(critic.values(rows), states.sum(-1), atol=1e-5, rtol=1e-5)


def test_a_critic_of_its_own_learns_all_but_the_output_layer():
    """A weight without a gradient would be an optimizer's to carry along for nothing."""
    critic = Critic(Policy(untied_model(), 1.0).packed_model)
    torch.nn.init.ones_(critic.head.weight)
    critic.values(rows_of(collate(random_groups(0, 2, 2), 31))).sum().backward()
    named = dict(critic.packed_model.model.named_parameters())
    assert named.keys() - critic.decoder_parameters().keys() == {"lm_head.weight"}
    assert all(p is named[n] and p.grad is not None for n, p in critic.decoder_parameters().items())


def untied_model():
    model = tiny_model()
    model.config.tie_word_embeddings = False
    return type(model)(model.config).eval()


def test_a_saved_adapter_has_the_policys_tensors_alone(tmp_path):
    policy, learns = with_adapter()
    policy.add_adapter(CRITIC, 4, 8, "all-linear", 1)
    policy.save_adapter(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    named = {n.replace(f".{ACTOR}.", "."): p for n, p in learns.items()}
    assert {n.removeprefix("base_model.model.") for n in saved} == named.keys()
    assert all(torch.equal(saved[f"base_model.model.{n}"], p) for n, p in named.items())


def test_policy_and_critic_share_a_base_and_nothing_else():
    policy, learns = with_adapter()
    policy.add_adapter(CRITIC, 4, 8, "all-linear", 1)
    critic_learns = policy.parameters(CRITIC)
    critic = Critic(policy.packed_model)
    torch.nn.init.ones_(critic.head.weight)
    rows = rows_of(collate(random_groups(0, 2, 2), 31))
    assert learns.keys() == policy.parameters(ACTOR).keys() and critic_learns
    assert not learns.keys() & critic_learns.keys()

    policy.logprobs(rows)[0].sum().backward()
    assert all(p.grad is None for p in critic_learns.values())
    assert any(p.grad.any() for p in learns.values())  # type: ignore[union-attr]
    policy.model.zero_grad(set_to_none=True)
    with policy.adapter(CRITIC):
        critic.values(rows).sum().backward()
    assert all(p.grad is None for p in learns.values())
    assert any(p.grad.any() for p in critic_learns.values())  # type: ignore[union-attr]

    def values():
        with policy.adapter(CRITIC):
            return critic.values(rows)

    with torch.no_grad():
        before = policy.logprobs(rows)[0]
        shake(critic_learns)
        assert torch.equal(policy.logprobs(rows)[0], before)
        seen = values()
        shake(learns)
        assert torch.equal(values(), seen)
    assert all(p.requires_grad for p in (learns | critic_learns).values())


# --- loading ------------------------------------------------------------------------------------


def test_only_safetensors_are_read(tmp_path):
    folder = tiny_folder(tmp_path / "model")
    assert load_causal_lm(folder, torch.float32).dtype == torch.float32
    torch.save(tiny_model().state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        load_causal_lm(folder, torch.float32)
    with pytest.raises(ConfigError, match=r"cannot load a model from .*nowhere'"):
        load_causal_lm(tmp_path / "nowhere", torch.float32)


@pytest.mark.parametrize(
    "load", [load_model_config, lambda path: load_causal_lm(path, "auto"), load_tokenizer]
)
def test_code_of_a_models_repository_is_never_run(tmp_path, monkeypatch, load):
    """transformers would ask on the terminal, and run it after a "y"."""
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")
    mine: dict = {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}
    mine["AutoTokenizer"] = ["mine.T", "mine.T"]
    config = {"model_type": "mine", "tokenizer_class": "T", "auto_map": mine}
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError, match="contains custom code which must be executed"):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()


def adapter_folder(folder: Path) -> tuple[Path, Policy]:
    """A PEFT adapter's folder beside its base, and the policy that it was made of."""
    policy = Policy(load_causal_lm(tiny_folder(folder / "base"), torch.float32), 1.0)
    policy.add_adapter(ACTOR, 4, 8, "all-linear", 0)
    shake(policy.parameters(ACTOR))
    policy.save_pretrained(folder / "adapter")
    return folder / "adapter", policy


def test_an_adapter_is_loaded_as_a_plain_model(tmp_path):
    path, policy = adapter_folder(tmp_path)
    merged = load_causal_lm(path, torch.float32)
    plain = tiny_model()
    assert type(merged) is type(plain) and not merged.training
    assert [n for n, _ in merged.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert all(p.requires_grad for p in merged.parameters())
    rows = rows_of(collate(random_groups(0, 2, 2), 31))
    with torch.no_grad():
        expected = policy.logprobs(rows)[0]
        logprobs = Policy(merged, 1.0).logprobs(rows)[0]
        base = Policy(plain, 1.0).logprobs(rows)[0]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    assert (logprobs - base).abs().max() > 0.01
    assert load_causal_lm(path, torch.bfloat16).dtype == torch.bfloat16


def test_an_adapter_on_an_adapter_is_loaded_too(tmp_path):
    """Others write them: PEFT takes any folder for a base."""
    first, _ = adapter_folder(tmp_path / "1")
    merged = load_causal_lm(first, torch.float32)
    merged.name_or_path = str(first)
    policy = Policy(merged, 1.0)
    policy.add_adapter(ACTOR, 2, 8, ["q_proj"], 1)
    shake(policy.parameters(ACTOR))
    policy.save_pretrained(tmp_path / "2")
    rows = rows_of(collate(random_groups(0, 2, 2), 31))
    with torch.no_grad():
        expected = policy.logprobs(rows)[0]
        logprobs = Policy(load_causal_lm(tmp_path / "2", torch.float32), 1.0).logprobs(rows)[0]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


def test_an_adapter_without_a_base_that_it_fits_is_refused(tmp_path):
    path, _ = adapter_folder(tmp_path)
    file = path / "adapter_config.json"
    written = file.read_text()

    def refused(why: str) -> None:
        with pytest.raises(ConfigError, match=why):
            load_causal_lm(path, torch.float32)

    (tmp_path / "base").rename(tmp_path / "moved")
    refused(r"cannot load a model from .*base', the base of the adapter .*adapter'")
    tiny_model(layers=1).save_pretrained(tmp_path / "base")
    refused(r"adapter' cannot be merged into .*base', its base: .*layers\.1\..* is in only one")
    for base in (None, str(path)):
        file.write_text(json.dumps(json.loads(written) | {"base_model_name_or_path": base}))
        refused(r"adapter' does not name its base model: base_model_name_or_path is")
    file.write_text("{")
    refused(r"PEFT cannot read the config of the adapter")
    file.write_text(written)
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    refused(r"adapter' cannot be merged .*adapter_model.safetensors")
