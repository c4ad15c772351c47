"""The report of `agentrl check` about servers and GPUs, and its list of unchecked things."""

from __future__ import annotations

import json
import re
from pathlib import Path
from shutil import copytree

import pytest
from huggingface_hub import constants
from transformers import (
    AutoTokenizer,
    Gemma3TextConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3MoeConfig,
)
from typer.testing import CliRunner

from agentrl import registry
from agentrl.cli import app
from agentrl.cli import check as check_module
from agentrl.config import load_config
from agentrl.data.table import hash_file
from agentrl.engine.local.decoder import CannotDecode
from agentrl.errors import UserError
from agentrl.learner import memory
from agentrl.trainer import speed
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
        rows += ["tools.transport=in_process"]
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
    _, title, lines = output.partition("\nNot checked here:\n")
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


@pytest.mark.parametrize("size", ["0", "nan", "inf"])
def test_a_gpu_of_an_impossible_size_is_refused(size):
    result = CliRunner().invoke(app, ["check", "--gpu-memory", size])
    assert result.exit_code == 2 and "--gpu-memory" in result.output


def test_a_laptop_with_a_cpu(check):
    output = check("trainer.device=cpu")
    assert "GPU" not in output and "\nall checks passed\n" in output
    assert f"GiB of {memory.gib(memory.find_ram())} (update, passes of" in output
    measured = re.search(
        r"time on this CPU, from a few measured rows: the engine samples (\d+) tokens/s, the"
        r" learner runs (\d+) tokens/s\. If all responses have 460 tokens, a step takes (\S+)"
        r" minutes and the run of 3 steps (\S+) minutes, without",
        check("trainer.device=cpu", "trainer.total_steps=3", "rollout.max_trajectory_tokens=460"),
    )
    assert measured and float(measured[4]) == pytest.approx(3 * float(measured[3]), rel=0.1)


def test_a_model_with_a_name_is_measured(check, tiny_model):
    output = check("--model", "tiny", "trainer.device=cpu", "trainer.total_steps=3")
    assert "time on this CPU, from a few measured rows" in output
    assert "only its config" not in output


def test_a_folder_without_weights_is_checked_without_a_measurement(gpus, tmp_path, random_model):
    result = check_config_of(tmp_path, random_model, Qwen2Config(**SMALL))
    assert result.exit_code == 0 and "time on this CPU" not in result.output
    assert f"weights of {tmp_path / 'model'}: only its config" in unchecked(result.output)[-1]


@pytest.mark.parametrize("is_here", [True, False])
def test_nothing_is_downloaded_to_be_measured(tmp_path, monkeypatch, is_here):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--owner--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("a1")
    (folder / "snapshots/a1").mkdir(parents=True)
    if is_here:
        (folder / "snapshots/a1/model.safetensors").touch()
    (folder / "snapshots/a1/config.json").write_text("{}")
    config = load_config(overrides=["model.path=owner/name"])
    assert check_module._is_measured(config, memory.read_shape(Qwen2Config(**SMALL))) == is_here


def test_a_model_of_unknown_size_is_not_measured(gpus, tmp_path, random_model):
    config = Qwen3MoeConfig(**SMALL, num_experts=2, num_experts_per_tok=1)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").touch()  # It is not read.
    result = check_config_of(tmp_path, random_model, config)
    assert result.exit_code == 0 and "RAM of the run" not in result.output
    assert "memory of a run: Qwen3MoeForCausalLM is a mixture of experts" in unchecked(
        result.output
    )


def test_a_machine_that_is_too_slow_to_be_measured(check, monkeypatch):
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    output = check("trainer.device=cpu")
    assert "time on this CPU: not measured (episode " in output and "deadline passed" in output
    assert output.endswith("all checks passed\n")


def test_a_run_that_would_use_the_cpu_here_is_not_sized_for_a_gpu(check, gpus):
    output = check()
    assert "device: the CPU, as torch finds no GPU here (--gpu-memory 24 sizes a GPU" in output
    assert "RAM of the run, estimated: " in output and "80 GiB" not in output


def test_several_ranks_on_cpus_are_not_sized(check, gpus):
    output = check("trainer.device=cpu", "trainer.n_gpus_per_node=2")
    assert "estimated" not in output and "time on this CPU" not in output


def test_too_little_ram(check, gpus, monkeypatch):
    monkeypatch.setattr(memory, "find_ram", lambda: memory.GIB // 2)
    output = check("trainer.device=cpu")
    assert "memory of this machine, also with all settings that save memory. Use a" in output
    verdict = "no errors, but the run may end for lack of memory: the estimate exceeds the"
    assert (
        f"{verdict} memory of this machine (see the note)\n" in output
        and "all checks passed" not in output
    )
    assert "time on this CPU" not in output  # Nothing that does not fit is loaded.


@pytest.mark.slow
def test_the_advice_for_a_small_gpu_names_lora(check, gpus, tmp_path, random_model):
    """7B fits into 24 GiB with weights in RAM; an adapter needs less."""
    model = tmp_path / "model"
    copytree(random_model, model)
    (model / "config.json").write_text(json.dumps(QWEN_7B))
    output = check("--gpu-memory", "48", "--model", str(model), "rollout.name=sglang")
    (note,) = [x for x in output.splitlines() if x.startswith("note: the estimate exceeds the")]
    whole, adapter = note.split("; ")
    assert "optim.offload=all needs" in whole and "lora" not in whole
    assert "model.lora_rank=32 needs" in adapter and "n_gpus_per_node" not in adapter
    assert "no errors, but the run may end for lack of memory: the estimate exceeds the" in output


QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064,
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "dtype": "bfloat16",
    "tie_word_embeddings": False, "max_position_embeddings": 32768,
}  # fmt: skip


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_a_gpu_that_is_not_here(check, gpus, tmp_path, random_model, device):
    """7B in bfloat16 has 14.2 GiB: half of 24 GiB holds no server."""
    model = tmp_path / "model"
    copytree(random_model, model)
    (model / "config.json").write_text(json.dumps(QWEN_7B))
    words = ["--gpu-memory", "24", "--model", str(model), f"trainer.device={device}"]
    words += ["rollout.name=sglang", "model.lora_rank=32", "rollout.max_turn_tokens=4096"]
    output = check(*words)
    assert (
        "note: rollout.gpu_memory_utilization=0.5 gives a server 12 GiB, but the weights and"
        in (output)
    )
    assert "set rollout.gpu_memory_utilization=0.61 or more" in output
    assert " GiB of 24 GiB (update, passes of" in output and "(--gpu-memory)" in output
    assert "weights 14.5, engine 14.4, gathered weights 14.3, " in output
    page = (Path(__file__).parents[2] / "docs/gpu.md").read_text()
    notes = [line for line in output.splitlines() if line.startswith("note: ") and "GiB" in line]
    assert len(notes) == 2 and all(note in page for note in notes), notes
    assert "allocator reserves 8 to 85 % more than it uses" in output
    if device != "auto":
        return  # the memory of a server does not depend on the device
    assert "15 GiB of RAM per rank. Then rollout.gpu_memory_utilization=0.5 gives a" in check(
        *words, "rollout.name=local"
    )
    output = check(*words, "rollout.gpu_memory_utilization=0.7")
    assert "engine 16.8" in output and "gives a server" not in output
    assert "gives a server 5.6 GiB, but" in check(
        *words[2:], "--gpu-memory=7", "rollout.gpu_memory_utilization=0.8"
    )


def test_tokens_that_the_model_does_not_know(check, tmp_path, random_model):
    model = tmp_path / "model"
    copytree(random_model, model)
    config = json.loads((model / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<image_soft_token>"], special_tokens=True)
    tokenizer.save_pretrained(model)
    config["vocab_size"] = len(tokenizer) - 1
    (model / "config.json").write_text(json.dumps(config))
    assert "all checks passed" in check("--model", str(model))
    config["vocab_size"] = 200
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"has \d+ tokens that .* is 200\. Use"):
        check("--model", str(model))


def test_a_gpu_that_is_too_small(check, gpus, random_model):
    gpus(memory.Gpu("Toy GPU", 2**30, 1))
    output = check("trainer.n_gpus_per_node=2")
    assert "of 1.0 GiB (update, passes of" in output and "(Toy GPU)" in output
    assert "exceeds the memory of the GPU, also with all settings that save memory and" in output
    assert unchecked(output)[0] == "2 GPUs (trainer.n_gpus_per_node): 1 here"


def test_advice_that_would_fit(check, gpus, monkeypatch):
    """The first setting that fits is named, with what it needs."""
    gpus(memory.Gpu("Toy GPU", 100 * 2**30, 1))
    needs = {False: 200, True: 50}

    def estimate(model, config, **_):
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


def test_it_checks_the_checkpoint_and_writes_nothing(tmp_path, random_model):
    rows, run = tmp_path / "rows.jsonl", tmp_path / "run"
    rows.write_text(json.dumps(ROW))

    def check(*words: str, output=run) -> str:
        common = ["--dataset", str(rows), "--model", str(random_model), "--output", str(output)]
        common += ["tools.transport=in_process"]
        before = sorted(tmp_path.rglob("*"))
        result = CliRunner().invoke(app, ["check", *common, *words])
        assert sorted(tmp_path.rglob("*")) == before
        return result.output if result.exit_code == 0 else str(result.exception)

    assert f"{run}: the run starts from the base model" in check()
    assert f"trainer.resume={run}/best: " in check(f"trainer.resume={run}/best")

    settings = {
        "data.train": str(rows), "model.path": str(random_model), "trainer.output": str(run),
    }  # fmt: skip
    config = load_config(None, [f"{key}={value}" for key, value in settings.items()])
    meta = {"config": config.model_dump(mode="json"), "rows": hash_file(str(rows))}
    meta |= {"position": 1, "order_start": 0, "changes": []}
    folder = save_checkpoint(run, 1, lambda staging: None, meta)
    assert "  rollout.n: 8 -> 16" in check("rollout.n=16")
    fork = (f"trainer.resume={run}", "rollout.n=16", "trainer.total_steps=2")
    shown = check(*fork, output=tmp_path / "fork")
    assert f"fork of {folder}" in shown and "all checks passed" in shown


def test_a_model_that_the_local_engine_cannot_run(tmp_path, random_model):
    config = Gemma3TextConfig(**SMALL, sliding_window=8, layer_types=["sliding_attention"] * 2)
    with pytest.raises(CannotDecode, match=r"Gemma3ForCausalLM: its config limits.*name=sglang"):
        check_config_of(tmp_path, random_model, config)
    result = check_config_of(tmp_path, random_model, config, "rollout.name=sglang")
    assert result.exit_code == 0 and "rows: packed" in result.output


@pytest.mark.slow
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
    arguments = ["--dataset", tmp_path / "rows.jsonl", "--model", tmp_path / "model"]
    arguments += ["tools.transport=in_process", *words]
    return CliRunner().invoke(app, ["check", *map(str, arguments)], catch_exceptions=False)
