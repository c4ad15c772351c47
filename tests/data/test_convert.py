"""Rows of other libraries' files become datasets: written by datasets, pandas, csv and json."""

from __future__ import annotations

import csv
import json
import sys

import pytest

from agentrl.cli import main
from agentrl.data import convert_rows, load_samples, read_rows
from agentrl.errors import DataError

ROWS = [
    {"question": "How much is 2+2?", "answer": "4", "meta": {"level": 1, "tags": ["a", "b"]}},
    {"question": 'A "quoted"\nline, with commas', "answer": "5", "meta": {"level": 2, "tags": []}},
]
NAMES = {"question": "prompt", "answer": "ground_truth"}


@pytest.fixture(params=[".parquet", ".jsonl"])
def output(request, tmp_path):
    return tmp_path / f"rows{request.param}"


def check(output, count=2):
    samples = load_samples(str(output))
    assert [s.prompt[0].content for s in samples] == [r["question"] for r in ROWS][:count]
    assert [s.ground_truth for s in samples] == ["4", "5"][:count]
    return samples


def test_a_folder_that_datasets_saved(output, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(tmp_path / "saved", num_shards=2)
    datasets.DatasetDict(train=made, test=made.select([1])).save_to_disk(tmp_path / "splits")
    monkeypatch.setitem(sys.modules, "datasets", None)  # it is not needed to read them
    assert convert_rows(tmp_path / "saved", output, rename=NAMES) == 2
    assert [s.extra["meta"] for s in check(output)] == [r["meta"] for r in ROWS]
    output.unlink()
    with pytest.raises(DataError, match=r"several splits\. Choose one of train, test"):
        convert_rows(tmp_path / "splits", output)
    with pytest.raises(DataError, match="no split 'val'"):
        convert_rows(tmp_path / "splits", output, split="val")
    assert convert_rows(tmp_path / "splits", output, split="train", rename=NAMES) == 2
    check(output)
    made.filter(lambda row: row["answer"] == "5").save_to_disk(tmp_path / "some")
    assert convert_rows(tmp_path / "some", tmp_path / "some.jsonl", rename=NAMES) == 1


def test_a_dataset_object(output):
    datasets = pytest.importorskip("datasets")
    assert convert_rows(datasets.Dataset.from_list(ROWS), output, rename=NAMES) == 2
    assert [s.extra["meta"] for s in check(output)] == [r["meta"] for r in ROWS]


def test_a_data_frame(output):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(ROWS)
    frame["score"] = pandas.array([1, None], dtype="Int64")
    frame["weight"] = [0.5, float("nan")]
    assert convert_rows(frame, output, rename=NAMES) == 2
    first, second = check(output)
    assert first.extra["score"] == 1 and first.extra["weight"] == 0.5
    assert "score" not in second.extra and "weight" not in second.extra
    with pytest.raises(DataError, match="Timestamp, which JSON does not have"):
        convert_rows(pandas.DataFrame({"t": [pandas.Timestamp(0)]}), output.with_name("t.jsonl"))


def test_csv_and_json(output, tmp_path):
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(ROWS)
    convert_rows(tmp_path / "rows.csv", output, rename=NAMES)
    check(output)
    for content in (ROWS, {"version": 1, "data": ROWS}):
        output.unlink()
        (tmp_path / "rows.json").write_text(json.dumps(content))
        convert_rows(str(tmp_path / "rows.json"), output, rename=NAMES)
        check(output)
    with pytest.raises(DataError, match="already exists"):
        convert_rows(tmp_path / "rows.csv", output)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "a,b\n1,2\n1,2,3\n", "Row #3: Expected 2 columns, got 3"),
        ("a.csv", "a,b\n1\n", "Row #2: Expected 2 columns, got 1"),
        ("a.csv", "a,a\n1,2\n", "two columns have the same name: a, a"),
        ("a.csv", "a,b\n", "has no rows"),
        ("a.json", '{"a": 1}\n{"a": 2}', "not JSON: .* One object per line is a .jsonl file"),
        ("a.json", f'[{{"a": {2**64}}}]', "an integer that needs more than 64 bits"),
        ("a.json", '[{"a": 1, "a": 2}]', "the key 'a' twice. Remove one$"),
        ("a.json", '{"a": 1}', "must be a list of objects"),
        ("a.xlsx", "", r"unknown format. Choices: hf://OWNER/NAME, .* \.csv, \.json"),
    ],
)
def test_files_that_cannot_be_converted(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        convert_rows(tmp_path / name, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_the_hub_needs_the_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs Hugging Face's datasets: pip install .*\[hf\]"):
        convert_rows("hf://openai/gsm8k", tmp_path / "out.jsonl")


def test_a_dataset_of_the_hub(output, tmp_path):
    """The library's own loader, with a folder in place of a name."""
    pytest.importorskip("datasets")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    assert convert_rows(f"hf://{tmp_path / 'hub'}", output, rename=NAMES) == 2
    check(output)


def test_the_command(tmp_path, capsys):
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, ROWS)))

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main(["data", "convert", str(source), str(tmp_path / "out.parquet"), *words])
        printed = capsys.readouterr()
        assert bool(ended.value.code) == ("error:" in printed.err)
        return printed.out + printed.err

    assert "no column 'quest'; found: question, answer, meta. Did you mean" in run(
        "--rename", "quest=prompt"
    )
    assert "'answer' cannot become 'question'" in run("--rename", "answer=question")
    assert "write OLD=NEW" in run("--rename", "question")
    output = run("--rename", "question=prompt", "--rename", "answer=ground_truth")
    assert output == f"saved 2 rows to {tmp_path / 'out.parquet'}\n"
    assert list(read_rows(tmp_path / "out.parquet")[0]) == ["prompt", "ground_truth", "meta"]
