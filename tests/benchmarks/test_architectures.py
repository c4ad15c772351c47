"""The benchmark of architectures counts the weights of one token, and prints a line for each."""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "architectures", raising=False)
    import architectures

    return architectures


def test_a_token_runs_some_of_the_experts(module, tmp_path):
    few = {**module.SMALL, "num_hidden_layers": 2, "num_experts": 16}
    total, active = module.save_model("qwen3-moe", few, "cpu", tmp_path / "model")
    hidden, expert, idle, layers, vocabulary = 64, 64, 16 - 8, 2, 512
    lookups = vocabulary * hidden  # The embeddings are not those of the output layer.
    assert total - active == layers * idle * 3 * hidden * expert + lookups
    total, active = module.save_model("qwen2.5", few, "cpu", tmp_path / "dense")
    assert total == active


def test_a_line_for_each_architecture(module, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["architectures.py", "--small", "--only", "qwen2.5", "qwen3", "--peak", "1e12"]
    )
    module.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"]
    assert [line["name"] for line in lines] == ["architectures/qwen2.5", "architectures/qwen3"]
    first, second = (line["context"] for line in lines)
    mfu = 6 * second["active_weights"] * lines[1]["value"] / 1e12
    assert second["mfu"] == pytest.approx(mfu, abs=1e-4)
    assert first["of_qwen2_5"] == 1.0 and second["mode"] == "packed"
