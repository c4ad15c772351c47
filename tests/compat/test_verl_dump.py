"""`agentrl data dump`: the rollouts of a run in the files of verl's `trainer.rollout_data_dir`."""

from __future__ import annotations

import dataclasses
import json

import pytest
from PIL import Image as PIL
from support.recorded import play_with_images

from agentrl.cli import main
from agentrl.images import Image
from agentrl.store import TrajectoryStore
from agentrl.testing import byte_tokenizer
from agentrl.trajectory import Group, Sample, Scored, token_array

from .conftest import played


def dumped(segments: int, reward: float, truth, **metrics: float) -> Scored:
    trajectory = played(["Four ü"], ground_truth=truth)
    [segment] = trajectory.segments
    trajectory = dataclasses.replace(trajectory, segments=(segment,) * segments)
    return Scored(trajectory, {"outcome": reward}, reward, metrics)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of two steps and a validation, and the command."""
    monkeypatch.chdir(tmp_path)
    byte_tokenizer().save_pretrained("run/tokenizer")
    store = TrajectoryStore(tmp_path / "run/trajectories")
    first = [dumped(1, 0.5, "4", acc=1.0), dumped(2, 0.0, ["4", {"x": None}])]
    steps = {"train-1": first, "train-2": [dumped(1, 1.0, None)], "val-0": [dumped(1, 0.25, "5")]}
    for name, rollouts in steps.items():
        split, _, step = name.partition("-")
        store.write(int(step), [Group(Sample("s", ()), tuple(rollouts))], split=split)

    def command(*words: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["data", "dump", *words])
        return ended.value.code or 0

    return command, steps


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_rollout_is_a_line_with_verls_keys(run, tmp_path):
    command, steps = run
    assert command("run", "out") == 0
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == ["1.jsonl", "2.jsonl"]
    [one, several] = [s.trajectory.episode_id for s in steps["train-1"]]
    text = {"input": "user\nGo.\nassistant\n", "output": "Four ü"}
    assert lines_of(tmp_path / "out/1.jsonl") == [
        {**text, "gts": "4", "score": 0.5, "step": 1, "acc": 1.0, "request_id": one},
        *(
            {**text, "gts": ["4", {"x": None}], "score": 0.0, "step": 1, "request_id": several,
             "segment": i}
            for i in (0, 1)
        ),
    ]  # fmt: skip
    assert "ü" in (tmp_path / "out/1.jsonl").read_text(), "not escaped, as verl writes it"
    [line] = lines_of(tmp_path / "out/2.jsonl")
    assert [*line] == ["input", "output", "gts", "score", "step", "request_id"]
    assert line["gts"] is None


def test_a_validation_is_a_file_of_its_step(run, tmp_path):
    command, _ = run
    assert command("run", "out", "--split", "val") == 0
    [line] = lines_of(tmp_path / "out/0.jsonl")
    assert (line["score"], line["reward"], line["step"]) == (0.25, 0.25, 0)


def test_what_cannot_be_dumped_is_explained(run, tmp_path, capsys):
    command, _ = run
    assert command("run", "out", "--split", "greedy") == 1
    assert "has no trajectories of the split 'greedy'" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert command("run", "file") == 1
    assert "cannot write to file" in capsys.readouterr().err
    assert command("missing", "out") == 1
    assert "there is no folder missing" in capsys.readouterr().err


def test_verls_keys_name_the_command(capsys):
    with pytest.raises(SystemExit):
        main(["train", "trainer.rollout_data_dir=x", "--dataset", "rows.jsonl", "--model", "m"])
    assert "agentrl data dump RUN FOLDER" in capsys.readouterr().err


def test_images_are_files_beside_the_lines(run, tmp_path):
    command, _ = run
    images = [Image.of(PIL.new("RGB", (56, 28), color)) for color in ("red", "blue")]
    scored = play_with_images(*images)
    encode = byte_tokenizer().encode
    [segment] = scored.trajectory.segments
    segment = dataclasses.replace(
        segment,
        prompt_ids=token_array([*encode("In "), 99, 99, *encode("?")]),
        response_ids=token_array([*encode("no"), 99, 99, *encode(".")]),
    )
    trajectory = dataclasses.replace(scored.trajectory, segments=(segment,))
    group = Group(trajectory.sample, (dataclasses.replace(scored, trajectory=trajectory),))
    TrajectoryStore(tmp_path / "run/trajectories").write(3, [group])
    assert command("run", "out") == 0
    [line] = lines_of(tmp_path / "out/3.jsonl")
    assert (line["input"], line["output"]) == ("In <image>?", "no<image>.")
    read = [Image.of(path, tmp_path / "out") for path in line["images"]]
    assert read == images
    assert "images" not in lines_of(tmp_path / "out/1.jsonl")[0]
