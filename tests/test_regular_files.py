"""Links, pipes and crafted files where agentrl reads, writes and locks files."""

from __future__ import annotations

import json
import os
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.compat.verl.files import load_yaml
from agentrl.config import load_config
from agentrl.data.files import read_rows, write_rows
from agentrl.errors import ConfigError, DataError, RunStopped, UserError
from agentrl.regular_files import atomic_file, staging_folder
from agentrl.report import load_run
from agentrl.trainer.checkpoint import find_checkpoint, make_private_folder, replace_file, run_lock

BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{y}: &{y} [{', '.join([f'*{x}'] * 9)}]\n" for x, y in pairwise("abcdefghijk")
)
YAML = {
    "a bomb": BOMB,
    "a list in itself": "trainer: &a [*a]\n",
    "deep": "[" * 5000,
    "a date": "trainer: 2020-13-45\n",
}


@pytest.fixture
def victim(tmp_path):
    """A file that nothing may change, and its mode."""
    file = tmp_path / "victim"
    file.write_text("precious")
    file.chmod(0o644)
    yield file
    assert file.read_text() == "precious" and file.stat().st_mode & 0o777 == 0o644


def test_a_lock_that_is_a_link_is_refused(tmp_path, victim):
    run = tmp_path / "run"
    make_private_folder(run)
    (run / ".lock").symlink_to(victim)
    with pytest.raises(RunStopped, match=r"\.lock: .*a link .*delete it"), run_lock(run):
        pass


def test_files_that_are_links_are_replaced(tmp_path, victim):
    names = ["report.html", "rows.jsonl", f".tmp-state-{os.getpid()}", ".report.html.tmp"]
    for name in names:
        (tmp_path / name).symlink_to(victim)
    replace_file(tmp_path / "report.html", "new")
    replace_file(tmp_path / "state.json", "new")
    write_rows(tmp_path / "rows.jsonl", [{"x": 1}])
    assert (tmp_path / "report.html").read_text() == "new"
    assert not (tmp_path / "report.html").is_symlink()


def test_an_error_leaves_the_old_content(tmp_path):
    file = tmp_path / "a"
    file.write_text("old")
    with pytest.raises(ValueError, match="x"), atomic_file(file) as staging:
        staging.write_text("new")
        raise ValueError("x")
    assert file.read_text() == "old" and [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize("text", YAML.values(), ids=YAML)
def test_yaml_that_cannot_be_read_is_a_clear_error(tmp_path, text):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"config\.yaml|trainer"):
        load_config(str(file))
    with pytest.raises(UserError, match=r"config\.yaml"):
        load_yaml(file)
    with pytest.raises(DataError, match=r"config\.yaml"):
        _ = load_run(tmp_path).config["trainer"]["output"]


def test_pipes_are_refused(tmp_path):
    for name in ("config.yaml", "metrics.jsonl", "changes.jsonl"):
        os.mkfifo(tmp_path / name)
    run = load_run(tmp_path)
    for table in ("config", "metrics", "changes"):
        with pytest.raises(DataError, match="not a regular file"):
            getattr(run, table)
    with pytest.raises(ConfigError, match="not a regular file"):
        load_config(str(tmp_path / "config.yaml"))
    with pytest.raises(UserError, match="not a regular file"):
        load_yaml(tmp_path / "config.yaml")


@pytest.mark.parametrize("number", ["Infinity", "NaN", "1e999", "[" * 3000])
def test_numbers_that_are_not_finite_are_refused_in_a_checkpoint(tmp_path, number):
    folder = tmp_path / "global_step_00000001"
    folder.mkdir()
    (folder / "meta.json").write_text(f'{{"step": {number}, "meta": {{}}, "files": {{}}}}')
    with pytest.raises(ConfigError, match=r"meta\.json cannot be read"):
        find_checkpoint(tmp_path, "auto")


@pytest.mark.parametrize(
    ("cell", "metadata"),
    [
        (pa.array([2**45], pa.timestamp("s")), None),
        (pa.array(["x"]), {b"agentrl.json_columns": b"[5]"}),
        (pa.array(["{"]), {b"agentrl.json_columns": json.dumps([["cell"]]).encode()}),
        (pa.array(["x"]), {b"agentrl.json_columns": json.dumps([["cell", "y"]]).encode()}),
    ],
    ids=["a year", "paths", "no JSON", "no mapping"],
)
def test_a_crafted_cell_is_a_clear_error(tmp_path, cell, metadata):
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"cell": cell}).replace_schema_metadata(metadata), file)
    with pytest.raises(DataError, match=r"rows\.parquet: damaged"):
        read_rows(file)


def test_folders_that_are_made_at_the_same_time_do_not_share_their_content(tmp_path):
    target = tmp_path / "deep" / "model"
    with staging_folder(target) as first, staging_folder(target) as second:
        assert first != second and first.parent == second.parent == target.parent
        (first / "whole").touch()
        assert not [*second.iterdir()]
        first.rename(target)
    assert [f.name for f in target.parent.iterdir()] == ["model"]
    assert (target / "whole").is_file()
