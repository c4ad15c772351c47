"""An exported checkpoint gives the learner's logprobs in each library that loads it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from support.trainer_fixtures import as_sampled_by, config, plain_logprobs, random_groups
from transformers import AutoModelForCausalLM

from agentrl.chat import load_tokenizer
from agentrl.cli import main
from agentrl.cli.options import resolve_model
from agentrl.engine.local.load import load_causal_lm
from agentrl.errors import ConfigError, RunStopped, UserError
from agentrl.learner.algorithms import make_targets
from agentrl.learner.batch import collate
from agentrl.learner.learner import Learner
from agentrl.learner.policy import Policy
from agentrl.trainer.checkpoint import save_checkpoint
from agentrl.trainer.export import export

FULL = {"optim__lr": 1e-2, "algorithm__name": "ppo"}
LORA = FULL | {"model__lora_rank": 4}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module")
def batch(random_model):
    model = AutoModelForCausalLM.from_pretrained(random_model).eval()
    return as_sampled_by(model, collate(random_groups(3, groups=2, n=4), 31))


def trained(root: Path, base: Path, batch, keys):
    """A run's folder with a checkpoint of step 1, and the learner that is in it."""
    cfg = config(**keys, model__path=str(base))
    learner = Learner(base, cfg, total_steps=2)
    old, values = learner.logprobs(batch), learner.values(batch)
    learner.update(batch, make_targets(batch, cfg, old, values, None), 1)
    assert not torch.allclose(learner.logprobs(batch), old, **CLOSE)
    save_checkpoint(
        root, 1, learner.ranks.save, {"config": cfg.model_dump(mode="json"), "dtype": "float32"}
    )
    return root, learner


@pytest.fixture(scope="module")
def full(random_model, batch, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("full"), random_model, batch, FULL)


@pytest.fixture(scope="module")
def lora(random_model, batch, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("lora"), random_model, batch, LORA)


def says_the_same(model, learner, batch) -> None:
    logprobs = plain_logprobs(model.eval(), batch)
    torch.testing.assert_close(logprobs, learner.logprobs(batch), **CLOSE)


def has_the_tokenizer(out: Path, base: Path) -> None:
    ours, theirs = load_tokenizer(out), load_tokenizer(base)
    assert ours.chat_template == theirs.chat_template
    assert ours.get_vocab() == theirs.get_vocab()


@pytest.mark.parametrize("merge", [False, True])
def test_a_full_training_becomes_a_model(full, batch, random_model, tmp_path, merge):
    root, learner = full
    made = export(root, tmp_path / "out", merge=merge)
    assert (made.checkpoint.step, made.adapter) == (1, False)
    says_the_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), learner, batch)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in learner.export())
    has_the_tokenizer(tmp_path / "out", random_model)
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


def test_lora_becomes_an_adapter_that_finds_its_base(lora, batch, random_model, tmp_path):
    root, learner = lora
    made = export(root / "global_step_00000001", tmp_path / "new" / "out")
    assert made.adapter
    out = tmp_path / "new" / "out"
    says_the_same(AutoPeftModelForCausalLM.from_pretrained(out), learner, batch)
    has_the_tokenizer(out, random_model)
    assert not (out / "model.safetensors").exists()


def test_lora_is_merged_into_its_base_as_published(lora, batch, random_model, tmp_path):
    root, learner = lora
    export(root, tmp_path / "out", merge=True)
    says_the_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), learner, batch)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    published = dict(learner.export())
    assert all(torch.equal(weights[name], tensor) for name, tensor in published.items())
    base = load_file(random_model / "model.safetensors")
    assert weights.keys() == base.keys()
    kept = weights.keys() - published.keys()
    assert kept and all(torch.equal(weights[name], base[name]) for name in kept)


def test_a_checkpoint_holds_a_peft_folder(lora, batch, random_model):
    root, learner = lora
    base = AutoModelForCausalLM.from_pretrained(random_model)
    adapter = root / "global_step_00000001" / "adapter"
    says_the_same(PeftModel.from_pretrained(base, str(adapter)), learner, batch)


def test_a_run_from_an_adapter_becomes_a_model(lora, batch, tmp_path):
    """Of its checkpoint no adapter's folder could be made: its base is nowhere."""
    export(lora[0], tmp_path / "adapter")
    root, learner = trained(tmp_path / "run", tmp_path / "adapter", batch, LORA)
    with pytest.raises(ConfigError, match=r"merged.*Add --merge"):
        export(root, tmp_path / "out")
    export(root, tmp_path / "out", merge=True)
    says_the_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), learner, batch)


def test_precision(full, random_model, tmp_path):
    base = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.bfloat16).save_pretrained(base)
    load_tokenizer(random_model).save_pretrained(base)
    root, learner = full
    exact = dict(learner.export())
    for dtype, model, kind in (
        ("auto", "", torch.float32),
        ("bfloat16", "", torch.bfloat16),
        ("auto", str(base), torch.float32),  # it is not said how the engine sampled
        ("float32", str(base), torch.float32),
    ):
        out = tmp_path / f"{dtype}-{bool(model)}"
        export(root, out, dtype=dtype, model=model)
        weights = load_file(out / "model.safetensors")
        assert all(torch.equal(weights[n], t.to(kind)) for n, t in exact.items())
        assert json.loads((out / "config.json").read_text())["dtype"] == str(kind)[6:]


# --- errors -------------------------------------------------------------------------------------


def test_nothing_is_overwritten(full, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("out", "link"):
        with pytest.raises(UserError, match=f"{name} already exists"):
            export(full[0], tmp_path / name)
    assert not list((tmp_path / "out").iterdir())


def test_a_folder_that_is_no_checkpoint_is_an_error(tmp_path, full):
    (tmp_path / "empty").mkdir()
    for name, why in (("none", "no such folder"), ("empty", r"no meta\.json in it")):
        with pytest.raises(ConfigError, match=f"{name} is not a checkpoint: {why}"):
            export(tmp_path / name, tmp_path / "out")
    shutil.copytree(full[0], tmp_path / "run")
    [file] = (tmp_path / "run" / "global_step_00000001" / "actor").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(ConfigError, match=r"actor/.*has changed since it was saved"):
        export(tmp_path / "run", tmp_path / "out")
    save_checkpoint(tmp_path / "bare", 1, lambda folder: None, {})
    with pytest.raises(ConfigError, match="has no config"):
        export(tmp_path / "bare", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_base_model_that_moved_must_be_named(random_model, batch, tmp_path, monkeypatch):
    shutil.copytree(random_model, tmp_path / "base")
    root, learner = trained(tmp_path / "run", tmp_path / "base", batch, LORA)
    (tmp_path / "base").rename(tmp_path / "moved")
    for merge in (False, True):
        with pytest.raises(ConfigError, match=r"model\.path='.*base'.*--model FOLDER"):
            export(root, tmp_path / "out", merge=merge)
    monkeypatch.chdir(tmp_path)
    export(root, tmp_path / "out", model="moved")
    monkeypatch.chdir("/")
    says_the_same(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out"), learner, batch)


def test_another_base_is_refused_with_names_and_shapes(full, tmp_path, random_model):
    model = AutoModelForCausalLM.from_pretrained(random_model)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    model.save_pretrained(tmp_path / "other")
    load_tokenizer(random_model).save_pretrained(tmp_path / "other")
    width = model.config.vocab_size
    with pytest.raises(
        ConfigError,
        match=rf"embed_tokens\.weight is \[{width - 8}, 32\] in the checkpoint and \[{width}, 32\]",
    ):
        export(full[0], tmp_path / "out", model=str(tmp_path / "other"))
    assert sorted(f.name for f in tmp_path.iterdir()) == ["other"]


def test_a_full_disk_leaves_nothing(full, tmp_path, monkeypatch):
    def half(self, folder, dtype):
        (folder / "half").write_bytes(b"x")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Policy, "save_whole", half)
    with pytest.raises(RunStopped, match=r"cannot write .*out: .*No space"):
        export(full[0], tmp_path / "out")
    assert not list(tmp_path.iterdir())


# --- the command --------------------------------------------------------------------------------


@pytest.fixture
def run_export(monkeypatch, capsys):
    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main(["export", *map(str, words)])
        out, err = capsys.readouterr()
        assert bool(ended.value.code) == ("error:" in err), err
        return out + err

    return run


def test_the_command(run_export, lora, random_model, tmp_path):
    root, _ = lora
    output = run_export(root, tmp_path / "a")
    assert output == f"{tmp_path / 'a'}: an adapter for {random_model}, trained for 1 step\n"
    output = run_export(root, tmp_path / "b", "--merge", "--dtype", "bfloat16")
    line, loss = output.splitlines()
    assert line == f"{tmp_path / 'b'}: a model, trained for 1 step"
    assert loss.startswith("note: rounding to bfloat16 loses a part of the training: ")
    output = run_export(root, tmp_path / "c", "--merge")
    assert output == f"{tmp_path / 'c'}: a model, trained for 1 step\n"
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "bfloat16"
    assert run_export(root, tmp_path / "a").startswith("error: ")


def test_options_without_effect_are_noted(run_export, lora, full, tmp_path):
    output = run_export(lora[0], tmp_path / "a", "--dtype", "bfloat16")
    assert "note: --dtype bfloat16 has no effect without --merge" in output
    output = run_export(full[0], tmp_path / "b", "--merge", "--dtype", "bfloat16")
    assert "note: --merge has no effect: there is no adapter" in output
    assert "--dtype bfloat16" not in output


def test_a_damaged_checkpoint_is_skipped_with_a_note(run_export, full, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(full[0], run)
    shutil.copytree(run / "global_step_00000001", run / "global_step_00000002")
    (run / "global_step_00000002" / "meta.json").unlink()
    first, second = run_export(run, tmp_path / "out").splitlines()
    assert first.startswith("skipped: ") and "global_step_00000002 is incomplete" in first
    assert second.endswith("a model, trained for 1 step")


# --- files that do not belong to a checkpoint ----------------------------------------------------


@pytest.fixture
def strange_run(lora, tmp_path):
    """A copy of a LoRA run, and a private key outside of it."""
    shutil.copytree(lora[0], tmp_path / "run")
    (tmp_path / "id_rsa").write_text("PRIVATE KEY")
    return tmp_path / "run"


def test_only_files_that_the_checkpoint_lists_are_exported(strange_run, tmp_path):
    checkpoint = strange_run / "global_step_00000001"
    (checkpoint / "adapter" / "key").symlink_to(tmp_path / "id_rsa")
    (checkpoint / "adapter" / "folder").symlink_to(tmp_path)
    (checkpoint / "adapter" / "notes.txt").write_text("PRIVATE KEY")
    os.mkfifo(checkpoint / "adapter" / "pipe")
    export(strange_run, tmp_path / "out")
    files = [f for f in (tmp_path / "out").rglob("*") if f.is_file()]
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {f.name for f in files}
    assert not {"key", "folder", "notes.txt", "pipe"} & {f.name for f in files}
    assert not any(f.is_symlink() or b"PRIVATE KEY" in f.read_bytes() for f in files)


def with_file(checkpoint: Path, name: str, target: Path) -> None:
    """Add a file to the list of a checkpoint, with its true size and hash."""
    meta = json.loads((checkpoint / "meta.json").read_text())
    content = target.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    meta["files"][name] = {"bytes": len(content), "sha256": digest}
    (checkpoint / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize("how", ["link", "absolute", "above", "linked folder", "pipe"])
def test_a_list_that_leads_out_of_the_checkpoint_is_refused(strange_run, tmp_path, how):
    checkpoint, key = strange_run / "global_step_00000001", tmp_path / "id_rsa"
    name = {
        "absolute": str(key),
        "above": "adapter/../../../id_rsa",
        "linked folder": "adapter/x/id_rsa",
    }
    name = name.get(how, "adapter/key")
    if how == "link":
        (checkpoint / name).symlink_to(key)
    if how == "linked folder":
        (checkpoint / "adapter" / "x").symlink_to(tmp_path)
    if how == "pipe":
        os.mkfifo(checkpoint / name)
    with_file(checkpoint, name, key)
    with pytest.raises(ConfigError, match=r"outside of it|not a regular file"):
        export(strange_run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tensors_that_a_checkpoint_does_not_list_are_refused(full, tmp_path):
    shutil.copytree(full[0], tmp_path / "run")
    [shard] = (tmp_path / "run" / "global_step_00000001" / "actor").iterdir()
    shard.with_name("z.safetensors").symlink_to(shard)
    with pytest.raises(ConfigError, match=r"meta\.json does not list z\.safetensors"):
        export(tmp_path / "run", tmp_path / "out")


# --- a run or a checkpoint as --model ------------------------------------------------------------


def ignore(line: str) -> None:
    pass


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_run_is_a_model(kind, batch, tmp_path, request):
    root, learner = request.getfixturevalue(kind)
    run = shutil.copytree(root, tmp_path / "run")
    lines: list[str] = []
    first = resolve_model(str(run), lines.append)
    says_the_same(load_causal_lm(first, torch.float32), learner, batch)
    assert len(lines) == 1 and first in lines[0]
    assert resolve_model(str(run / "global_step_00000001"), lines.append) == first
    assert len(lines) == 1, "it is exported once"
    assert Path(first).parent == run / "exported"
    assert load_tokenizer(first)


def test_a_run_means_its_newest_whole_checkpoint(full, tmp_path):
    run = shutil.copytree(full[0], tmp_path / "run")
    first = resolve_model(str(run), ignore)
    second = shutil.copytree(run / "global_step_00000001", run / "global_step_00000002")
    lines: list[str] = []
    assert Path(resolve_model(str(run), lines.append)).name.startswith("global_step_00000002-")
    shutil.rmtree(run / "exported")
    (second / "meta.json").write_text("{")
    assert resolve_model(str(run), lines.append) == first
    assert "skipped: " in "".join(lines) and "global_step_00000002" in "".join(lines)


def test_the_best_checkpoint_of_a_run(full, tmp_path):
    run = shutil.copytree(full[0], tmp_path / "run")
    for step in (2, 3):
        shutil.copytree(run / "global_step_00000001", run / f"global_step_{step:08d}")
    values = {1: 0.5, 2: 0.7, 3: 0.6, 4: 0.9}  # there is no checkpoint of step 4
    lines = [json.dumps({"step": s, "data": {"val/acc/mean@1": v}}) for s, v in values.items()]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match=r"trainer\.keep_best is empty.*global_step_00000003"):
        export(run / "best", tmp_path / "out")
    file = run / "global_step_00000003" / "meta.json"
    meta = json.loads(file.read_text())
    meta["meta"]["config"]["trainer"]["keep_best"] = "val/acc/mean@1"
    file.write_text(json.dumps(meta))
    assert export(run / "best", tmp_path / "out").checkpoint.folder.name == "global_step_00000002"
    assert Path(resolve_model(str(run / "best"), ignore)).name.startswith("global_step_00000002-")


def test_a_run_whose_base_is_an_adapter_is_a_model(lora, batch, tmp_path):
    export(lora[0], tmp_path / "adapter")
    root, learner = trained(tmp_path / "run", tmp_path / "adapter", batch, LORA)
    says_the_same(load_causal_lm(resolve_model(str(root), ignore), torch.float32), learner, batch)


def test_a_folder_without_a_checkpoint_is_no_model(tmp_path):
    (tmp_path / "config.yaml").touch()
    for name in (tmp_path, tmp_path / "best"):
        with pytest.raises(UserError, match=r"it has no checkpoint|no model folder"):
            resolve_model(str(name), ignore)
