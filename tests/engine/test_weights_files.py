"""Weights that pass from process to process in a folder."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.updates import update

from agentrl.engine.base import Update
from agentrl.engine.remote import files
from agentrl.engine.remote.files import (
    check_folder_visible,
    tensor_names,
    transfer_folder,
    write_update,
    write_weights,
)
from agentrl.errors import ConfigError

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(4), "c": torch.ones(1)}


def refused():
    raise AssertionError("weights that are written elsewhere are not fetched as well")


def test_an_update_is_written_by_this_process_or_by_the_process_with_the_weights(tmp_path):
    folders = []

    def write(folder, dtype):
        folders.append(folder)
        return 44

    assert write_update(update(WEIGHTS.items(), 1), tmp_path) == 44
    assert tensor_names(tmp_path) == set(WEIGHTS)
    assert write_update(Update(1, refused, write=write), tmp_path) == 44
    assert folders == [tmp_path]


def test_tensor_names_come_from_all_files(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "FILE_BYTES", 20)
    write_update(update(WEIGHTS.items(), 1), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert tensor_names(tmp_path) == set(WEIGHTS)


def test_a_machine_that_does_not_see_the_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with transfer_folder() as folder:
        assert Path(folder).is_relative_to(tmp_path)
        check_folder_visible(Path(folder))
    with pytest.raises(ConfigError, match=rf"files in {tmp_path} .* 10\.0\.0\.7 does not see"):
        check_folder_visible(Path(folder), "10.0.0.7")


def test_weights_are_written_in_the_requested_precision(tmp_path):
    assert write_weights({"a": torch.arange(3.0)}.items(), tmp_path, torch.bfloat16) == 6
    (file,) = tmp_path.iterdir()
    assert load_file(file)["a"].dtype == torch.bfloat16
