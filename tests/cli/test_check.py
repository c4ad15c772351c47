"""The report of `agentrl check` about servers and GPUs, and its list of unchecked things."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer, Gemma3TextConfig, Qwen3_5Config
from typer.testing import CliRunner

from agentrl import registry
from agentrl.cli import app
from agentrl.config import load_config
from agentrl.data.table import hash_file
from agentrl.engine.local.decoder import CannotDecode
from agentrl.trainer import memory
from agentrl.trainer.checkpoint import save_checkpoint

ROW = {
    "prompt": "How much is 3*4?",
    "data_source": "openai/gsm8k",
    "ground_truth": "12",
}


@pytest.fixture
def check(tmp_path, random_model):
    """Return what `agentrl check` prints, with the settings of the words."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW))

    def run(*words: str) -> str:
        rows = ["--dataset", str(tmp_path / "rows.jsonl"), "--model", str(random_model)]
        result = CliRunner().invoke(app, ["check", *rows, *words], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    return run


@pytest.fixture
def gpus(monkeypatch):
    """Set the GPUs that torch finds."""

    def set_gpus(gpu: memory.Gpu | None) -> None:
        monkeypatch.setattr(memory, "find_gpu", lambda: gpu)

    set_gpus(None)
    return set_gpus


def unchecked(output: str) -> list[str]:
    """Return the lines of the last section."""
    _, title, lines = output.partition("all checks passed\nNot checked here:\n")
    assert title, output
    return [line.strip() for line in lines.splitlines()]


USERS = """
from agentrl import Interaction, Reply, interaction, reward, tool

@tool
def lookup(word: str) -> str:
    "Look a word up."
    raise AssertionError

@interaction("pupil")
class Pupil(Interaction):
    async def respond(self, messages):
        raise AssertionError

@reward("mine")
def mine(trajectory):
    raise AssertionError
"""


def test_code_of_the_user_that_is_not_called_is_listed(check, gpus, tmp_path):
    assert not any("your code" in line for line in unchecked(check("-f", "shelf:calculator")))
    (tmp_path / "env.py").write_text(USERS)
    row = {**ROW, "agent_name": "tool_agent", "tools": ["lookup", "calculator"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps({**row, "interaction": "pupil"}))
    files = ["-f", str(tmp_path / "env.py"), "-f", "shelf:calculator"]
    with registry.interactions.isolated(), registry.tools.isolated(), registry.rewards.isolated():
        lines = unchecked(check(*files, "reward.function=mine"))
    assert (
        "what your code does when it is called (tool lookup, interaction pupil, reward mine):"
        " `agentrl play` with the same options calls them in an episode"
    ) in lines


def test_a_config_for_gpus_and_servers_on_a_machine_without(check, gpus):
    output = check(
        "rollout.name=sglang",
        "trainer.n_gpus_per_node=4",
        "trainer.ray_address=auto",
        "reward.function=judge",
        "reward.kwargs.url=http://127.0.0.1:9/v1",
    )
    assert (
        "note: reward.kwargs.url: http://127.0.0.1:9/v1 does not answer (GET"
        " http://127.0.0.1:9/v1/models: ConnectError: "
    ) in output
    # Half of the assumed GPU is the server's.
    assert "GPU memory of each of 4 ranks, estimated: 41 GiB (update, passes of" in output
    assert ": engine 40.0, CUDA 1.0" in output
    assert "(no GPU is here; one of 80 GiB is assumed)" in output
    judge, found, weights, sglang, ray = unchecked(output)
    assert judge == "replies of http://127.0.0.1:9/v1 (reward.kwargs.url)"
    assert found == (
        "GPUs: torch finds none on this machine; trainer.device=auto would use the CPU here"
    )
    assert weights.startswith("weights of ") and sglang.startswith("sglang: it ")
    assert "started" in sglang and ray == (
        "the Ray cluster (trainer.ray_address=auto), its machines"
    )


def test_a_config_for_a_gpu_on_a_machine_without(check, gpus):
    assert unchecked(check("trainer.device=cuda"))[0] == "GPUs: torch finds none on this machine"


def test_a_laptop_with_a_cpu(check):
    output = check("trainer.device=cpu")
    assert "GPU" not in output and len(unchecked(output)) == 1


def test_a_gpu_that_is_too_small(check, gpus, random_model):
    gpus(memory.Gpu("Toy GPU", 2**30, 1))
    output = check("trainer.n_gpus_per_node=2")
    assert "of 1.0 GiB (update, passes of" in output and "(Toy GPU)" in output
    assert "note: the estimate exceeds the memory of the GPU. Use more GPUs, a smaller" in output
    assert unchecked(output)[0] == "2 GPUs (trainer.n_gpus_per_node): 1 here"


def test_advice_that_would_fit(check, gpus, monkeypatch):
    """The first setting that fits is named, with what it needs."""
    gpus(memory.Gpu("Toy GPU", 100 * 2**30, 1))
    needs = {False: 200, True: 50}

    def estimate(model, config, ranks, **_):
        tokens = config.optim.micro_batch_tokens
        return memory.MemoryEstimate(
            "update", {"activations": needs[config.optim.recompute] * 2**30}, tokens
        )

    monkeypatch.setattr(memory, "estimate_memory", estimate)
    assert (
        "note: the estimate exceeds the memory of the GPU: optim.recompute=true needs 50 GiB\n"
    ) in check()
    needs[False] = 95
    assert "note: the estimate is at the limit of the GPU: optim.recompute=true" in check()
    needs[False] = 90
    assert "note: the estimate" not in check()


def test_several_datasets_are_read_as_one(check, gpus, tmp_path):
    (tmp_path / "more.jsonl").write_text((json.dumps(ROW) + "\n") * 2)
    more = tmp_path / "more.jsonl"
    assert "3 rows" in check("--dataset", str(more))
    weighted = check("--dataset", f"[{{path: {more}, weight: 2}}]")
    assert "2 rows of" in weighted and "2 times per epoch" in weighted


def test_rows_without_ground_truth_but_with_answers_are_noted(check, gpus, tmp_path, caplog):
    """TRL's rows. A reward that reads `extra_info` needs nothing else, so it is no mistake."""
    (tmp_path / "env.py").write_text(USERS)
    options = ["-f", str(tmp_path / "env.py"), "reward.function=mine"]
    with registry.interactions.isolated(), registry.tools.isolated(), registry.rewards.isolated():
        for row, is_noted in (
            ({"prompt": "How much is 3*4?", "answer": "12"}, True),
            ({"prompt": "How much is 3*4?", "answer": "12", "ground_truth": "12"}, False),
            ({"prompt": "How much is 3*4?", "difficulty": 2}, False),
        ):
            caplog.clear()
            (tmp_path / "rows.jsonl").write_text(json.dumps(row))
            check(*options)
            assert ("--rename answer=ground_truth" in caplog.text) == is_noted, row


def test_a_dry_run_checks_the_checkpoint_and_writes_nothing(tmp_path, random_model):
    rows, run = tmp_path / "rows.jsonl", tmp_path / "run"
    rows.write_text(json.dumps(ROW))

    def dry_run(*words: str, output=run) -> str:
        common = ["--dataset", str(rows), "--model", str(random_model), "--output", str(output)]
        before = sorted(tmp_path.rglob("*"))
        result = CliRunner().invoke(app, ["train", "--dry-run", *common, *words])
        assert sorted(tmp_path.rglob("*")) == before
        return result.output if result.exit_code == 0 else str(result.exception)

    assert f"{run}: the run starts from the base model" in dry_run()
    assert f"trainer.resume={run}/best: " in dry_run(f"trainer.resume={run}/best")

    settings = {
        "data.train": str(rows), "model.path": str(random_model), "trainer.output": str(run),
    }  # fmt: skip
    config = load_config(None, [f"{key}={value}" for key, value in settings.items()])
    meta = {"config": config.model_dump(mode="json"), "rows": hash_file(str(rows))}
    folder = save_checkpoint(run, 1, lambda staging: None, meta)
    assert "  rollout.n: 8 -> 16" in dry_run("rollout.n=16")
    fork = (f"trainer.resume={run}", "rollout.n=16", "trainer.total_steps=2")
    shown = dry_run(*fork, output=tmp_path / "fork")
    assert f"fork of {folder}" in shown and "all checks passed" in shown


def test_a_model_that_the_local_engine_cannot_run(tmp_path, random_model):
    config = Gemma3TextConfig(**SMALL, sliding_window=8, layer_types=["sliding_attention"] * 2)
    with pytest.raises(CannotDecode, match=r"Gemma3ForCausalLM: its config limits.*name=sglang"):
        check_config_of(tmp_path, random_model, config)
    result = check_config_of(tmp_path, random_model, config, "rollout.name=sglang")
    assert result.exit_code == 0 and "rows: packed" in result.output


def test_a_config_with_parts_for_text_and_images(tmp_path, random_model):
    config = Qwen3_5Config(text_config=SMALL, vision_config={"depth": 1})
    result = check_config_of(tmp_path, random_model, config, "rollout.name=sglang")
    assert result.exit_code == 0, result.output
    assert "rows: padded" in result.output


SMALL = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}


def check_config_of(tmp_path, random_model, config, *words):
    """Return the result of `agentrl check` for a folder with a config and a tokenizer."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW))
    config.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(random_model).save_pretrained(tmp_path / "model")
    arguments = ["--dataset", tmp_path / "rows.jsonl", "--model", tmp_path / "model", *words]
    return CliRunner().invoke(app, ["check", *map(str, arguments)], catch_exceptions=False)
