"""The record of a run: each step once, whatever happened between two starts."""

from __future__ import annotations

import json
import resource

import numpy as np
import pytest

from agentrl.errors import RunStopped
from agentrl.record import METRICS, Record, read_metrics


def steps(folder) -> list[int]:
    return [step for step, _ in read_metrics(folder / METRICS)]


def write(folder, first: int, last: int, last_step: int = -1) -> None:
    record = Record(folder, last_step)
    for step in range(first, last + 1):
        record.write(step, {"critic/score/mean": step / 10})
    record.close()


def test_each_step_is_one_line_in_verls_format(tmp_path):
    record = Record(tmp_path / "run")
    record.write(0, {"val/reward/mean@1": 0.25})
    record.write(1, {"critic/score/mean": 0.5, "n": 3, "bad": float("nan")})
    lines = (tmp_path / "run" / METRICS).read_text().splitlines()
    assert lines == [
        '{"step":0,"data":{"val/reward/mean@1":0.25}}',
        '{"step":1,"data":{"critic/score/mean":0.5,"n":3,"bad":null}}',
    ]
    record.close()
    record.close()


def test_array_scalars_are_numbers(tmp_path):
    record = Record(tmp_path)
    record.write(1, {"a": np.float32(0.5), "b": np.int64(2), "c": np.array(1.5)})
    record.close()
    assert read_metrics(tmp_path / METRICS) == [(1, {"a": 0.5, "b": 2, "c": 1.5})]


@pytest.mark.parametrize("resumed", [-1, 0, 3, 5])
def test_a_resumed_run_has_each_step_once(tmp_path, resumed):
    write(tmp_path, 0, 5)
    write(tmp_path, resumed + 1, 8, last_step=resumed)
    assert steps(tmp_path) == list(range(9))
    write(tmp_path / "unbroken", 0, 8)
    assert (tmp_path / METRICS).read_bytes() == (tmp_path / "unbroken" / METRICS).read_bytes()


@pytest.mark.parametrize("torn", [b'{"step":6,"da', b'{"step":6,"data":{}}', b"\xff\n", b"[]\n"])
def test_an_incomplete_line_is_dropped(tmp_path, torn):
    write(tmp_path, 0, 5)
    with open(tmp_path / METRICS, "ab") as f:
        f.write(torn)
    assert steps(tmp_path) == list(range(6))
    write(tmp_path, 6, 7, last_step=5)
    assert steps(tmp_path) == list(range(8))
    assert torn not in (tmp_path / METRICS).read_bytes().splitlines(keepends=True)


def test_a_step_is_never_recorded_twice(tmp_path):
    record = Record(tmp_path, 3)
    record.write(4, {})
    with pytest.raises(ValueError, match="step 4 was recorded after step 4"):
        record.write(4, {})
    record.close()


def test_a_disk_that_refuses_names_the_file_and_leaves_whole_lines(tmp_path):
    record = Record(tmp_path)
    record.write(0, {"x": 1.0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))
    try:
        with pytest.raises(RunStopped, match=rf"{METRICS}: File too large"):
            record.write(1, {"x": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    record.close()
    assert (tmp_path / METRICS).stat().st_size == 40  # half of a second line
    write(tmp_path, 1, 2, last_step=0)
    assert steps(tmp_path) == [0, 1, 2]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunStopped, match="file/run"):
        Record(tmp_path / "file" / "run")


def test_metrics_are_selected_by_name(tmp_path):
    record = Record(tmp_path)
    for step in range(3):
        record.write(step, {"a": step, "b": 1.0})
    record.close()
    assert read_metrics(tmp_path / METRICS, "a".__eq__) == [
        (0, {"a": 0}),
        (1, {"a": 1}),
        (2, {"a": 2}),
    ]


def test_lines_are_json(tmp_path):
    write(tmp_path, 0, 2)
    for line in (tmp_path / METRICS).read_text().splitlines():
        assert set(json.loads(line)) == {"step", "data"}
