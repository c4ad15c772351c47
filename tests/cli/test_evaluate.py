"""`agentrl eval --responses` scores stored answers; `agentrl generate` continues after a kill."""

from __future__ import annotations

import json
import math
import time

import pytest
from support.forked_python import ForkedPython

from agentrl.cli import main
from agentrl.cli.generate import _open_record
from agentrl.data import read_rows, write_rows
from agentrl.errors import UserError
from agentrl.rollout import Rollouts

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
    assert "several turns" not in output
    write_rows(tmp_path / "b.jsonl", [stored("1", ["call\n1"], "", bonus=0, interaction="gsm8k")])
    output = run("eval", "--responses", "b.jsonl", "-f", "mine.py", "reward.function=length")
    assert "1 row may have responses of several turns" in output and "final_text: length" in output


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


# -- generate -------------------------------------------------------------------------------------

COUNT = 40
COMMAND = [
    *("generate", "--dataset", "rows.jsonl", "--model", "tiny", "-n", "2"),
    *("val.temperature=0.8", "val.top_k=50", "val.top_p=0.9", "rollout.max_trajectory_tokens=24"),
]


@pytest.fixture
def folder(tmp_path, tiny_model):
    rows = [
        {"prompt": f"How much is {i}+1?", "ground_truth": str(i + 1), "data_source": "openai/gsm8k"}
        for i in range(COUNT)
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    return tmp_path


@pytest.mark.slow
def test_generate_continues_after_kills(run, folder):
    """Killed with SIGKILL again and again, it writes what one undisturbed command writes."""
    run(*COMMAND, "--output", "whole.jsonl")
    record = folder / "killed.jsonl.partial.jsonl"
    lines_before: list[str] = []
    kills = 0
    while not (folder / "killed.jsonl").exists():
        command = ["-m", "agentrl", *COMMAND, "--output", "killed.jsonl"]
        child = ForkedPython(command, cwd=folder)
        while child.poll() is None:
            lines = record.read_text().splitlines() if record.exists() else []
            if kills < 3 and len(lines) > len(lines_before) + 5:
                child.kill()
                child.wait()
                kills += 1
            time.sleep(0.01)
        if record.exists():
            lines = record.read_text().splitlines()
            assert lines[: len(lines_before)] == lines_before, "what was written stays"
            lines_before = lines[:-1]  # the last line may be cut
            if kills == 1:
                with record.open("a") as file:
                    file.write('{"row": 3, "respon')
        assert kills or child.returncode == 0
    assert kills >= 1, "on a loaded machine the program may end before the third"
    whole, killed = (read_rows(folder / f"{name}.jsonl") for name in ("whole", "killed"))
    assert [row["prompt"] for row in killed] == [f"How much is {i}+1?" for i in range(COUNT)]
    assert all(len(row["responses"]) == 2 for row in killed)
    # Seeds depend on the row alone; batches of another size may round a logit differently.
    same = sum(a == b for a, b in zip(whole, killed, strict=True))
    assert same > 0.8 * COUNT
    assert not record.exists()


def test_rows_that_json_cannot_hold_need_a_parquet_file(run, folder):
    """It is said before anything is played."""
    row = {"prompt": "How much is 1+1?", "ground_truth": "2", "data_source": "openai/gsm8k"}
    write_rows(folder / "bytes.parquet", [row | {"sound": b"\x89PNG"}])
    command = [*COMMAND, "--output", "o.jsonl"]
    command[2] = "bytes.parquet"
    assert "error: --output o.jsonl: JSON cannot hold the rows" in run(*command)
    assert not (folder / "o.jsonl.partial.jsonl").exists()


def test_nothing_is_played_twice(run, folder, monkeypatch):
    played = []
    collect = Rollouts.collect

    def interrupted(self, samples, **kwargs):
        is_last = len(played) >= 20
        samples = samples if is_last else samples[:10]
        played.extend(sample.row for sample in samples)
        groups = collect(self, samples, **kwargs)
        if not is_last:
            raise KeyboardInterrupt
        return groups

    monkeypatch.setattr(Rollouts, "collect", interrupted)
    words = [*COMMAND, "--output", "a.parquet"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 130 and not (folder / "a.parquet").exists()
    with pytest.raises(SystemExit):
        main(words)
    output = run(*words)
    assert "20 rows are in a.parquet.partial.jsonl already" in output
    assert sorted(played) == list(range(COUNT))
    assert len(read_rows(folder / "a.parquet")) == COUNT
    record = folder / "a.parquet.partial.jsonl"
    for lines, answer in ((COUNT, "already exists"), (COUNT + 1, "is complete")):
        record.write_text("{}\n" * lines)  # a kill after the output was written leaves its record
        assert answer in run(*words)
    assert not record.exists()
    scores = run("eval", "--responses", "a.parquet")
    assert scores.splitlines()[1].split()[:3] == ["openai/gsm8k", str(COUNT), str(2 * COUNT)]


def test_responses_of_other_settings_are_not_mixed(tmp_path):
    output, header = tmp_path / "a.jsonl", {"rows": "x", "val.temperature": 0.5}
    with _open_record(output, header) as record:
        assert record.texts == {}
        record.write({"row": 7, "responses": ["one", "two"]})
        with pytest.raises(UserError, match="another process writes"), _open_record(output, header):
            pass
    with _open_record(output, header) as record:
        assert record.texts == {7: ["one", "two"]}
    changed = {"rows": "x", "val.temperature": 0.8}
    message = r"made with other settings:\n  val.temperature: 0.5 before, 0.8 now\n"
    with pytest.raises(UserError, match=message), _open_record(output, changed):
        pass
    path = tmp_path / "a.jsonl.partial.jsonl"
    path.write_text(path.read_text() + "{\n")
    with pytest.raises(UserError, match="is damaged"), _open_record(output, header):
        pass
