"""`agentrl eval --responses` scores stored answers; `agentrl generate` continues after a kill."""

from __future__ import annotations

import json
import math

import pytest

from agentrl.cli import main
from agentrl.data import write_rows

pytestmark = pytest.mark.usefixtures("shipped_registries")


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, words)))
        out, err = capsys.readouterr()
        assert bool(ended.value.code) == ("error:" in err), err
        return out + err

    return run


def stored(truth, responses, source="openai/gsm8k", **columns):
    """A row as verl's generation writes it."""
    return {
        "prompt": [{"role": "user", "content": "How much?"}],
        "data_source": source,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "responses": responses,
        **columns,
    }


ROWS = [
    stored("12", ["It is #### 12", "It is #### 13"]),
    stored("5", ["#### 5", "so #### 5"]),
    stored("7", ["no", "#### 8"]),
    stored("7", ["\\boxed{7}"], "lighteval/MATH"),
]


def test_stored_responses_are_scored_by_data_source(run, tmp_path):
    write_rows(tmp_path / "answers.parquet", ROWS)
    output = run("eval", "--responses", "answers.parquet", "--output", "scores")
    lines = {line.split()[0]: line.split() for line in output.splitlines()[1:]}
    # gsm8k: the rows score 0.5, 1 and 0: mean 0.5, s = 0.5, t(0.975, 2) = 4.302653.
    half = 4.302653 * 0.5 / math.sqrt(3)
    interval = [f"[{0.5 - half:.3f},", f"{0.5 + half:.3f}]"]
    assert lines["openai/gsm8k"][1:] == ["3", "6", "0.500", "±", "0.289", *interval, "0.500"]
    assert lines["lighteval/MATH"][1:] == ["1", "1", "1.000", "-", "1.000"]
    assert lines["all"][1:4] == ["4", "7", "0.625"]
    metrics = json.loads((tmp_path / "scores" / "metrics.json").read_text())
    assert metrics["test_score/openai/gsm8k"] == 0.5
    assert (tmp_path / "scores").stat().st_mode & 0o777 == 0o700


def test_the_columns_may_have_other_names(run, tmp_path):
    row = {
        "question": "How much?",
        "answer": "#### 12",
        "source": "openai/gsm8k",
        "truth": {"ground_truth": "12"},
    }
    write_rows(tmp_path / "a.jsonl", [row, {**row, "answer": "#### 1"}])
    words = ["eval", "--responses", "a.jsonl", "--response-key", "answer"]
    keys = ["data.prompt_key=question", "data.reward_fn_key=source"]
    output = run(*words, "--reward-model-key", "truth", *keys)
    assert output.splitlines()[1].split()[:4] == ["openai/gsm8k", "2", "2", "0.500"]


def test_the_reward_of_the_training_scores(run, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from agentrl import reward\n\n\n@reward('length')\ndef length(trajectory):\n"
        "    assert 'responses' not in trajectory.sample.extra\n"
        "    return float(len(trajectory.final_text)) + trajectory.sample.extra['bonus']\n"
    )
    write_rows(
        tmp_path / "a.jsonl",
        [stored("1", ["abc", "a"], "", bonus=10), stored("1", [], "", bonus=0)],
    )
    output = run("eval", "--responses", "a.jsonl", "-f", "mine.py", "reward.function=length")
    assert output.splitlines()[1].split()[:4] == ["none", "1", "2", "12.000"]
    assert "note: 1 row without responses: left out" in output


def test_rows_that_cannot_be_scored_are_listed(run, tmp_path):
    write_rows(tmp_path / "a.jsonl", [stored("1", ["x"]), {**stored("1", None), "answers": ["x"]}])
    output = run("eval", "--responses", "a.jsonl")
    assert "a.jsonl: row 1, responses: is missing; found: prompt" in output
    assert "--response-key NAME" in output
    write_rows(tmp_path / "b.jsonl", [stored("1", [1, 2])])
    assert "must be a list of texts, not [1, 2]" in run("eval", "--responses", "b.jsonl")
    write_rows(tmp_path / "c.jsonl", [stored("1", ["x"], "my/source")])
    assert "my/source" in run("eval", "--responses", "c.jsonl")
    words = ["eval", "--responses", "a.jsonl"]
    assert "leave out --model and --dataset" in run(*words, "--model", "tiny")
    write_rows(tmp_path / "d.jsonl", [stored("1", [])])
    assert "no row has a response" in run("eval", "--responses", "d.jsonl")
