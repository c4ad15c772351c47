"""Weights that pass from process to process in a folder."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentrl.engine.remote.senders import Route, WeightsSender, check_folder_visible
from agentrl.errors import ConfigError
from agentrl.workers.owned_folder import OwnedFolder

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(4), "c": torch.ones(1)}


@pytest.mark.parametrize("bucket_bytes, files", [(2**20, 1), (20, 2), (1, 3)])
def test_each_bucket_is_a_file(tmp_path, bucket_bytes, files):
    sent = WeightsSender().send(
        WEIGHTS.items(), Route(1, folder=tmp_path, bucket_bytes=bucket_bytes)
    )
    assert sent.size == 44 and sent.names == [*WEIGHTS] and not sent.errors
    written = [load_file(file) for file in sorted(tmp_path.iterdir())]
    assert len(written) == files
    for name, tensor in WEIGHTS.items():
        (copy,) = [part[name] for part in written if name in part]
        assert torch.equal(copy, tensor)


def test_weights_are_written_in_the_requested_precision(tmp_path):
    route = Route(1, folder=tmp_path, dtype=torch.bfloat16)
    assert WeightsSender().send({"a": torch.arange(3.0)}.items(), route).size == 6
    (file,) = tmp_path.iterdir()
    assert load_file(file)["a"].dtype == torch.bfloat16


def test_a_folder_that_cannot_be_written_is_an_error_of_the_folder(tmp_path):
    folder = tmp_path / "missing"
    sent = WeightsSender().send(WEIGHTS.items(), Route(1, folder=folder))
    assert list(sent.errors) == [str(folder)] and "cannot write" in sent.errors[str(folder)]


def test_a_machine_that_does_not_see_the_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with OwnedFolder("weights") as folder:
        assert Path(folder).is_relative_to(tmp_path)
        check_folder_visible(Path(folder))
    with pytest.raises(ConfigError, match=rf"files in {tmp_path} .* 10\.0\.0\.7 does not see"):
        check_folder_visible(Path(folder), "10.0.0.7")
