"""The saved state of a learner: shards of many ranks that any number of ranks can load."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.exact_rank import EXACT, ExactRank
from support.processes import Processes
from support.trainer_fixtures import as_sampled_by, config, random_groups, tiny_folder, tiny_model
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoModelForCausalLM

from agentrl.errors import ConfigError, RunStopped
from agentrl.learner import state
from agentrl.learner.algorithms import make_targets
from agentrl.learner.batch import collate
from agentrl.learner.dispatch import BROADCAST, dispatch
from agentrl.learner.learner import Learner
from agentrl.learner.rank import ADAPTER_FOLDER, LocalRankGroup
from agentrl.learner.sharding import full_tensor
from agentrl.learner.state import read_state, shapes_in, write_state
from agentrl.trainer.checkpoint import find_checkpoint, save_checkpoint

RATES = {"optim__lr": 1e-2, "optim__critic_lr": 1e-2, "algorithm__ppo_epochs": 2}
WORLDS = {
    "full": {"algorithm__name": "ppo"},
    "lora": {"algorithm__name": "ppo", "model__lora_rank": 3},
    "offload": {"optim__offload": "all"},
}
"""A critic of its own, and one on the policy's base. Ranks hold unlike pieces, or none: of 3, 16
and 1 rows."""


class Saving(ExactRank):
    """A rank whose whole state is seen."""

    @dispatch(BROADCAST)
    def state(self):
        return {
            f"{who}.{name}": full_tensor(value).clone()
            for who, optimizer in self.optimizers.items()
            for name, value in (optimizer._parameters() | optimizer._moments()).items()
        }

    @dispatch(BROADCAST)
    def fill_disk(self, rank):
        """From now on a rank cannot write, as on a machine whose disk is full."""
        import os

        if int(os.environ.get("RANK", "0")) == rank:
            state.HuggingFaceStorageWriter.write_data = _refuse  # type: ignore[method-assign]


def _refuse(*_):
    raise OSError(28, "No space left on device")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def batch():
    return as_sampled_by(tiny_model(), collate(random_groups(3, groups=4, n=4), 31))


def learn(group, cfg, batch, steps):
    learner = Learner("", cfg, total_steps=4, group=group)
    for step in steps:
        old, values = learner.old_logprobs(batch), learner.values(batch)
        targets = make_targets(batch, cfg, old, values, learner.reference_logprobs(batch))
        learner.update(batch, targets, step)
    return learner


@pytest.fixture(scope="module")
def saved(folder, batch, tmp_path_factory):
    """By 4 ranks after two steps: where, what; and what the third step makes of it."""
    group, made = Processes(4, Saving, folder), {}
    try:
        for name, keys in WORLDS.items():
            root, cfg = tmp_path_factory.mktemp("saved"), config(**RATES, **keys)
            group.begin(cfg)
            learner = learn(group, cfg, batch, (1, 2))
            at = save_checkpoint(root, 2, learner.ranks.save, {"ranks": 4})
            state = group.state()
            learn(group, cfg, batch, (3,))
            made[name] = at, state, group.state()
        root = made["full"][0].parent
        group.fill_disk(2)
        with pytest.raises(AssertionError) as refused:  # as rank 0 tells it
            group.save(root)
        made["refused"] = str(refused.value).strip()
    finally:
        group.close()
    return made


@pytest.fixture(scope="module")
def groups(folder):
    two = Processes(2, Saving, folder)
    yield {1: LocalRankGroup(Saving(folder)), 2: two}
    two.close()


@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.slow
def test_fewer_ranks_load_the_state_of_four(saved, groups, batch, world, ranks, tmp_path):
    at, expected, following = saved[world]
    assert find_checkpoint(at.parent, "auto") is not None
    group, cfg = groups[ranks], config(**RATES, **WORLDS[world])
    group.begin(cfg)
    learn(group, cfg, batch, (1,))  # moments and gathered weights of its own, all to be forgotten
    group.load(at)
    same(group.state(), expected)
    again = tmp_path / "again"
    again.mkdir()
    group.save(again)
    learn(group, cfg, batch, (3,))
    state = group.state()
    assert state.keys() == following.keys()
    for name, value in following.items():
        torch.testing.assert_close(state[name], value, atol=EXACT, rtol=EXACT, msg=name)
    groups[1].begin(cfg)
    groups[1].load(again)  # 4 -> 2 -> 1
    same(groups[1].state(), expected)


def same(actual, expected):
    assert actual.keys() == expected.keys()
    assert any(".exp_avg_sq." in name for name in actual)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
        assert actual[name].dtype == value.dtype, name


@pytest.mark.slow
def test_every_rank_writes_its_pieces_and_no_pickle(saved):
    at, _, _ = saved["full"]
    assert len(list((at / "actor").iterdir())) == 4
    files = [f for f in at.rglob("*") if f.is_file() and f.name != "meta.json"]
    assert {f.suffix for f in files} == {".safetensors"}


@pytest.mark.slow
def test_any_number_of_ranks_saves_an_adapter_that_peft_loads(saved, folder):
    at, state, _ = saved["lora"]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    loaded = PeftModel.from_pretrained(base, str(at / ADAPTER_FOLDER), autocast_adapter_dtype=False)
    parameters = {n: p for n, p in loaded.named_parameters() if "lora_" in n}
    prefix = "actor.parameter."
    ours = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
    assert len(parameters) == len(ours) > 0
    for name, value in ours.items():
        assert torch.equal(parameters[f"base_model.model.{name}"].double(), value)
    # of the policy alone, and nothing of the base
    assert not [n for n in shapes_in(at / "actor") if "lora_" not in n or "critic" in n]
    assert not (saved["full"][0] / ADAPTER_FOLDER).exists()


@pytest.mark.slow
def test_a_rank_whose_disk_is_full_is_named_by_all(saved):
    message = saved["refused"].splitlines()[-1]
    assert message.startswith("agentrl.errors.RunStopped: rank 2 cannot write /")
    assert message.endswith("actor: [Errno 28] No space left on device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_state_is_loaded_to_the_device_where_it_was(folder, batch, tmp_path, device, offload):
    """Weights and moments on the device, or in the CPU's memory."""
    cfg = config(**RATES, **WORLDS["lora"], trainer__device=device, optim__offload=offload)
    ranks = [Saving(folder), Saving(folder)]
    first, second = (LocalRankGroup(rank) for rank in ranks)
    first.begin(cfg)
    learner = learn(first, cfg, batch, (1, 2))
    learner.ranks.save(tmp_path)
    second.begin(cfg)
    second.load(tmp_path)
    same(second.state(), first.state())
    moments = [rank.optimizers["actor"]._moments() for rank in ranks]
    assert [t.device for t in moments[0].values()] == [t.device for t in moments[1].values()]
    learn(second, cfg, batch, (3,))


# --- files --------------------------------------------------------------------------------------


def test_large_states_are_cut_into_files(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "FILE_BYTES", 100)
    tensors = {f"t{i}": torch.randn(i, 5) for i in range(9)} | {"step": torch.tensor(3.0)}
    write_state(tmp_path / "s", tensors)
    assert len(list((tmp_path / "s").iterdir())) == 6
    loaded = {name: torch.full_like(t, -1) for name, t in tensors.items()}
    read_state(tmp_path / "s", loaded)
    assert all(torch.equal(loaded[n], t) for n, t in tensors.items())
    assert shapes_in(tmp_path / "s") == {n: tuple(t.shape) for n, t in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_tensors_come_back_bit_for_bit(tmp_path, dtype):
    saved = {"a": (torch.randn(4, 6) * 100).to(dtype).T, "b": torch.ones(2, 0, dtype=dtype)}
    write_state(tmp_path / "s", saved)
    loaded = {name: torch.zeros_like(t) for name, t in saved.items()}
    read_state(tmp_path / "s", loaded)
    assert all(torch.equal(loaded[n], t) and loaded[n].dtype == dtype for n, t in saved.items())


class Coarse(torch.Tensor):
    """Quantised: a wrapper around codes, as 8-bit moments are."""

    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore

    def __init__(self, codes):
        self.codes = codes

    def dequantize(self):
        return self.codes.float() / 8

    def copy_(self, numbers):  # type: ignore[override]
        self.codes.copy_((numbers * 8).round())
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def test_quantized_tensors_are_written_as_plain_tensors(tmp_path):
    codes = torch.randint(0, 100, (5, 4), dtype=torch.uint8)
    write_state(tmp_path / "s", {"m": Coarse(codes)})
    [file] = (tmp_path / "s").iterdir()
    assert torch.equal(load_file(file)["m"], codes.float() / 8)
    loaded = Coarse(torch.zeros_like(codes))
    read_state(tmp_path / "s", {"m": loaded})
    assert torch.equal(loaded.codes, codes)


class Boom:
    def __reduce__(self):
        return Path.write_text, (Path("ran"), "code")


def test_a_planted_pickle_is_never_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, tensors = tmp_path / "s", {"a": torch.randn(3)}
    write_state(folder, tensors)
    spoilt = pickle.dumps(Boom())
    pickle.loads(spoilt)
    Path("ran").unlink()  # so it would have
    for name in (".metadata", "__0_0.distcp", "optimizer.pt", "pytorch_model.bin", "a.pkl"):
        (folder / name).write_bytes(spoilt)
    loaded = {"a": torch.zeros(3)}
    read_state(folder, loaded)
    assert torch.equal(loaded["a"], tensors["a"])
    (folder / "model.safetensors").write_bytes(spoilt)
    for read in (lambda: read_state(folder, loaded), lambda: shapes_in(folder)):
        with pytest.raises(ConfigError, match=f"cannot read {folder}"):
            read()
    assert not Path("ran").exists()


def test_missing_tensors_are_named(tmp_path):
    write_state(tmp_path / "s", {"a": torch.randn(3)})
    with pytest.raises(ConfigError, match=r"cannot read .*\bb\b"):
        read_state(tmp_path / "s", {"b": torch.zeros(3)})
    assert shapes_in(tmp_path / "nothing") == {}


def test_a_rank_does_not_make_a_folder_that_it_does_not_see(tmp_path):
    with pytest.raises(RunStopped, match=r"trainer\.output must be on a file system"):
        write_state(tmp_path / "elsewhere" / "actor", {"a": torch.zeros(1)})
    assert not (tmp_path / "elsewhere").exists()


def test_ctrl_c_while_saving_is_raised_unchanged(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(state.HuggingFaceStorageWriter, "write_data", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_state(tmp_path / "s", {"a": torch.zeros(1)})


def test_a_full_disk_is_an_error_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(state.HuggingFaceStorageWriter, "write_data", _refuse)
    with pytest.raises(RunStopped, match=r"^cannot write .*No space left on device$") as e:
        write_state(tmp_path / "s", {"a": torch.zeros(1)})
    assert not isinstance(e.value.__cause__, CheckpointException)
    save = lambda at: write_state(at / "actor", {"a": torch.zeros(1)})  # noqa: E731
    with pytest.raises(RunStopped, match="the checkpoint of step 1"):
        save_checkpoint(tmp_path / "run", 1, save, {})
    assert list((tmp_path / "run").iterdir()) == []


def test_files_of_other_programs_are_read_if_the_names_match(tmp_path):
    """Plain safetensors, without places in the header: whole tensors."""
    (tmp_path / "s").mkdir()
    save_file({"a": torch.arange(4.0)}, tmp_path / "s" / "a.safetensors")
    loaded = {"a": torch.zeros(4)}
    read_state(tmp_path / "s", loaded)
    assert loaded["a"].tolist() == [0, 1, 2, 3]
