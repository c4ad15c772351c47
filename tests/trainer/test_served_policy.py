"""A run's policy is the one that was validated, whatever command loads it: in its precision."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentrl.chat import load_tokenizer
from agentrl.cli import main
from agentrl.cli.options import resolve_model
from agentrl.config import load_config
from agentrl.engine.local import LocalEngine
from agentrl.engine.local.load import load_causal_lm
from agentrl.learner.learner import Learner
from agentrl.store import TrajectoryStore
from agentrl.trainer import Trainer
from agentrl.trainer.export import export

ENV = """
from agentrl import reward

@reward("letters_{kind}")
def letters(trajectory) -> float:
    return len(set(trajectory.assistant_text)) / 10
"""
KINDS = {"full": [], "lora": ["model.lora_rank=2", "optim.lr=1e-5"]}


# The commands find and load a policy in the same way: with an adapter, some of them are enough.
SLOW_WITH_LORA = ("global_step_00000003", "best", "play", "generate", "chat", "train")
each_kind = pytest.mark.parametrize("kind", KINDS)


def each_kind_and(name: str, values: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize a test by the kinds of runs and by the values of an argument."""
    slow = pytest.mark.slow
    cases = [
        pytest.param(kind, v, marks=slow if kind == "lora" and v in SLOW_WITH_LORA else ())
        for kind in KINDS
        for v in values
    ]
    return pytest.mark.parametrize(("kind", name), cases)


@pytest.fixture(scope="module")
def runs(random_model, tmp_path_factory):
    """Return a function that trains a run of a kind once, and returns its folder."""
    return cache(partial(train, random_model, tmp_path_factory))


@pytest.fixture
def run(runs, kind: str) -> Path:
    """The folder of the run of a kind."""
    return runs(kind)


def train(random_model, tmp_path_factory, kind: str) -> Path:
    """Train a run whose base is in bfloat16, with updates far below its precision."""
    home = tmp_path_factory.mktemp("served")
    half = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.bfloat16)
    half.save_pretrained(home / "base")
    load_tokenizer(random_model).save_pretrained(home / "base")
    (home / "env.py").write_text(ENV.replace("{kind}", kind))
    rows = [{"prompt": f"Say {i}.", "ground_truth": "1"} for i in range(4)]
    (home / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    overrides = [
        "trainer.total_steps=3", "trainer.test_freq=3", "trainer.device=cpu", "val.n=2",
        "data.batch_size=4", "rollout.n=4", "rollout.max_turn_tokens=8", "optim.lr=2e-5",
        "tools.transport=in_process", f"reward.function=letters_{kind}",
        "trainer.keep_best=val/reward/mean@2", *KINDS[kind],
    ]  # fmt: skip
    flags = {
        "data.train": str(home / "rows.jsonl"),
        "data.val": str(home / "rows.jsonl"),
        "model.path": str(home / "base"),
        "trainer.output": str(home / "run"),
        "files": [str(home / "env.py")],
    }
    Trainer(load_config(None, overrides, flags)).run()
    return home / "run"


@pytest.fixture(scope="module")
def weights_of():
    """Return a function that loads, once, the weights that a run's last validation sampled from."""
    return cache(load_engine_weights)


@pytest.fixture
def engine_weights(run, weights_of) -> dict[str, torch.Tensor]:
    """The weights that the last validation of the run sampled from."""
    return weights_of(run)


def load_engine_weights(run: Path) -> dict[str, torch.Tensor]:
    """Return the weights that the last validation sampled from."""
    config = load_config(str(run / "config.yaml"))
    learner = Learner(config.model.path, config, total_steps=3)
    learner.ranks.load(run / "global_step_00000003")
    with torch.no_grad():
        model = load_causal_lm(config.model.path, torch.float32)
        weights = model.state_dict()
        for name, tensor in learner.export():
            weights[name].copy_(tensor)
    return {name: tensor.clone() for name, tensor in weights.items()}


def same(weights, others) -> bool:
    return weights.keys() == others.keys() and all(
        torch.equal(weights[name], others[name].float()) for name in weights
    )


PATHS = ("", "global_step_00000003", "best", "model")


@each_kind_and("path", PATHS)
def test_the_evaluation_of_a_run_equals_its_last_validation(run, tmp_path, path):
    """Token for token, sampled and greedy, with the same logprobs."""
    words = ["eval", "-c", run / "config.yaml", "--model", run / path, "--output", tmp_path / "e"]
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert not ended.value.code
    trained = TrajectoryStore(run / "trajectories")
    played = TrajectoryStore(tmp_path / "e" / "trajectories")
    for split in ("val", "greedy"):
        rows = [
            [
                [
                    (segment.response_ids, segment.logprobs)
                    for segment in r.scored.trajectory.segments
                ]
                for r in store.read(step, split=split)
            ]
            for store, step in ((trained, 3), (played, 0))
        ]
        assert rows[0] == rows[1] and len(rows[0]) == (8 if split == "val" else 4)
    metrics = json.loads((tmp_path / "e" / "metrics.json").read_text())
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["data"]
    assert metrics.items() <= last.items()


COMMANDS = {
    "eval": ["eval", "-c", "{run}/config.yaml"],
    "play": ["play", "-c", "{run}/config.yaml", "-n", "1"],
    "generate": ["generate", "-c", "{run}/config.yaml", "--output", "{out}/answers.parquet"],
    "chat": ["play", "chat", "-c", "{run}/config.yaml"],
    "serve": ["serve", "-c", "{run}/config.yaml", "--check", "1"],
    "train": ["train", "-c", "{run}/config.yaml", "--output", "{out}/new", "trainer.val_only=true"],
}


@pytest.mark.slow
@each_kind_and("command", COMMANDS)
def test_each_command_samples_from_the_validated_policy(
    run, engine_weights, tmp_path, monkeypatch, command
):
    engines, load = [], LocalEngine.load.__func__

    def record(cls, *args, **kwargs):
        engines.append(load(cls, *args, **kwargs))
        return engines[-1]

    monkeypatch.setattr(LocalEngine, "load", classmethod(record))
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    words = [word.format(run=run, out=tmp_path) for word in COMMANDS[command]]
    lora = ["model.lora_rank=0"] if command == "train" else []
    with pytest.raises(SystemExit) as ended:
        main([*words, *lora, "--model", str(run)])
    assert not ended.value.code
    [engine] = engines
    assert same(engine_weights, engine._decoder.model.state_dict())


@each_kind
def test_an_export_has_the_weights_of_the_engine(run, engine_weights, tmp_path):
    result = export(run, tmp_path / "out", merge=True)
    assert not result.rounding_note
    for folder in (tmp_path / "out", run / "model", resolve_model(str(run))):
        assert same(engine_weights, load_causal_lm(folder, torch.float32).state_dict())


@each_kind
def test_the_cost_of_a_precision_is_measured(run, engine_weights, tmp_path):
    before = load_causal_lm(load_config(str(run / "config.yaml")).model.path, torch.float32)
    base, trained = before.state_dict(), engine_weights
    result = export(run, tmp_path / "out", merge=True, dtype="bfloat16")
    rounded = dict(load_causal_lm(tmp_path / "out", "auto").named_parameters())
    update, kept = (
        torch.cat([(weights[n].float() - base[n]).flatten().double() for n in rounded])
        for weights in (trained, rounded)
    )
    share = (kept != 0).sum().item() / (update != 0).sum().item()
    cosine = torch.nn.functional.cosine_similarity(update, kept, 0).item()
    assert share < 0.5 and cosine < 0.9, "else nothing here would show a loss"
    numbers = re.search(
        r"bfloat16 loses .*: (.*)% of .* update is (.*)\. --dtype", result.rounding_note
    )
    assert numbers is not None, result.rounding_note
    assert float(numbers[1]) / 100 == pytest.approx(share, abs=2e-3)
    assert float(numbers[2]) == pytest.approx(cosine, abs=2e-3)
    assert not export(run, tmp_path / "all", merge=True, dtype="float32").rounding_note


@each_kind
def test_a_run_that_sampled_in_bfloat16_is_exported_so(run, engine_weights, tmp_path):
    """As an engine on a GPU does it: it gets the weights of the learner, rounded once."""
    copy = Path(shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("exported")))
    file = copy / "global_step_00000003" / "meta.json"
    record = json.loads(file.read_text())
    assert record["meta"]["dtype"] == "float32"
    record["meta"]["dtype"] = "bfloat16"
    file.write_text(json.dumps(record))
    result = export(copy, tmp_path / "out", merge=True)
    rounded = {n: t.bfloat16() for n, t in engine_weights.items()}
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(rounded[name], t) for name, t in weights.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    is_adapter = (copy / "model" / "adapter_config.json").exists()
    assert bool(result.rounding_note) == is_adapter, "an engine may have applied the adapter apart"
    config = load_config(str(run / "config.yaml"))
    learner = Learner(config.model.path, config, total_steps=3)
    learner.ranks.load(copy / "global_step_00000003")
    assert learner.rank is not None
    learner.rank.policy.save_whole(tmp_path / "model", "bfloat16")
    for name, tensor in load_file(tmp_path / "model" / "model.safetensors").items():
        assert torch.equal(tensor, weights[name])
    # An adapter is merged in the same way: the sum is rounded, not the change.
    merged = load_causal_lm(resolve_model(str(run)), torch.bfloat16).state_dict()
    assert all(torch.equal(rounded[name], tensor) for name, tensor in merged.items())
