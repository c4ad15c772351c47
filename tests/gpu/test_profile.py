"""Profiles on a GPU: kernels and named ranges."""

import gzip
import json

import pytest
import torch

from agentrl.learner.profile import NSIGHT, RankProfile, annotate

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("is_under_nsight", [False, True])
def test_kernels_are_recorded_unless_nsight_records_them(tmp_path, monkeypatch, is_under_nsight):
    if is_under_nsight:
        monkeypatch.setenv(NSIGHT, "1")
    x = torch.ones(256, 256, device="cuda")
    rank = RankProfile(gpu=True)
    with annotate("forward"):
        x = x @ x
    rank.stop()
    assert rank.write(tmp_path / "rank_0.json.gz") == ""
    events = json.loads(gzip.decompress((tmp_path / "rank_0.json.gz").read_bytes()))["traceEvents"]
    kinds = {event.get("cat") for event in events}
    assert ("kernel" in kinds) == (not is_under_nsight)
    names = [e["name"] for e in events if e.get("cat") == "user_annotation"]
    assert names == ["forward"]
