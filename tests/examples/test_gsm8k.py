"""The example on rows of GSM8K's published shape, made up here."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

import agentrl.agent_loops  # noqa: F401  (registers the loops)
from agentrl.config import load_config, without_effect
from agentrl.data import check_samples, load_samples
from agentrl.interactions import Gsm8kInteraction, build_interaction
from agentrl.registry import load_file
from agentrl.rewards import Scorer, check_graders
from agentrl.trajectory import Sample

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k"
CONFIGS = sorted(EXAMPLE.glob("*.yaml"))
VARIANTS = ("tool", "interaction", "plain")
ROWS = 40


def problem(rng: random.Random) -> dict[str, str]:
    """A problem as GSM8K publishes them: calculations in << >>, the answer behind ####."""
    boxes, each, price = rng.randint(2, 9), rng.randint(2, 12), rng.choice([3, 250, 1000])
    eggs = boxes * each
    earned = eggs * price
    return {
        "question": f"Ann’s {boxes} boxes hold {each} eggs each.\u2028At ${price} an egg, how much"
        " does she earn?",
        "answer": f"She has {boxes}*{each}=<<{boxes}*{each}={eggs}>>{eggs} eggs.\n"
        f"She earns {eggs}*{price}=$<<{eggs}*{price}={earned}>>{earned:,}.\n#### {earned:,}",
    }


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[Path, list[dict[str, str]]]:
    rng = random.Random(0)
    problems = [problem(rng) for _ in range(ROWS)]
    file = tmp_path_factory.mktemp("gsm8k") / "train.jsonl"
    lines = [json.dumps(p, ensure_ascii=False) for p in problems]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file, problems


def convert(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLE / "convert.py", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_published_problems_become_rows(published, tmp_path, variant, suffix):
    file, problems = published
    output = tmp_path / "new" / f"rows.{suffix}"
    done = convert(file, output, "--variant", variant)
    assert (done.returncode, done.stdout) == (0, f"{ROWS} rows, {variant}: {output}\n"), done.stderr

    if variant == "tool":
        load_file("shelf:calculator")
    samples = load_samples(str(output))
    check_samples(samples, str(output))
    check_graders(samples, Scorer(load_config().reward), str(output))

    assert len(samples) == ROWS
    for sample, one in zip(samples, problems, strict=True):
        truth = one["answer"].split("#### ")[1].replace(",", "")
        assert sample.ground_truth == truth and "," not in truth
        assert sample.agent_name == ("single_turn" if variant == "plain" else "tool_agent")
        assert sample.tools == (("calculator",) if variant == "tool" else ())
        assert sample.extra["answer"] == one["answer"]
        assert_the_answer_is_hidden(sample, one)
        teacher = build_interaction(sample)
        if variant == "interaction":
            assert isinstance(teacher, Gsm8kInteraction) and teacher.ground_truth == truth
        else:
            assert teacher is None


def assert_the_answer_is_hidden(sample: Sample, one: dict[str, str]) -> None:
    """The model sees the question and how to answer, nothing of the published solution."""
    (message,) = sample.prompt
    assert message.content.startswith(one["question"] + "\n")
    assert "<<" not in message.content and one["answer"] not in message.content


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"question": "How many?"}', "train.jsonl:2: not a JSON object with question and answer"),
        ("not json", "train.jsonl:2: not a JSON object"),
        ('{"question": "How many?", "answer": "12"}', "train.jsonl:2: the answer has no ####"),
    ],
)
def test_a_file_that_is_not_as_published(published, tmp_path, line, says):
    good = published[0].read_text(encoding="utf-8").split("\n")[0]
    file = tmp_path / "train.jsonl"
    file.write_text(f"{good}\n{line}\n", encoding="utf-8")
    done = convert(file, tmp_path / "rows.jsonl")
    assert done.returncode == 1
    assert says in done.stderr and "Traceback" not in done.stderr


def test_a_file_that_is_not_there(tmp_path):
    done = convert(tmp_path / "nowhere.jsonl", tmp_path / "rows.jsonl")
    assert done.returncode == 1 and done.stderr.startswith("no such file: ")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_the_configs_load_and_every_key_has_an_effect(path):
    config = load_config(str(path))
    assert without_effect(config) == []
    assert config.diff(), "the file sets something"
    rollouts = config.data.batch_size * config.rollout.n
    assert rollouts % (config.algorithm.mini_batch_size or rollouts) == 0
    Scorer(config.reward, config.rollout.budget_policy).grader("openai/gsm8k")


def test_there_are_two_configs():
    assert [p.stem for p in CONFIGS] == ["gsm8k_1gpu", "gsm8k_8gpu"]
