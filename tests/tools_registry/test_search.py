"""The shelf's search: passages by their words, the same whenever asked."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Infrastructure, ToolError, UserError
from agentrl.errors import DataError
from agentrl.registry import load_file

PASSAGES = [
    {"id": "b1", "title": "Bees", "text": "Bees gather nectar and live on honey in winter."},
    {"id": "b2", "title": "Bears", "text": "Bears sleep in winter. Some like honey."},
    {"id": 3, "text": "The mill by the river grinds rye."},
    {"id": "4", "title": "Long", "text": "salt " + "and water " * 100},
    {"id": "5", "title": "Twin", "text": "Copper bell."},
    {"id": "6", "title": "Twin", "text": "Copper bell."},
]  # fmt: skip


def write(file, passages):
    file.write_text("".join(json.dumps(p) + "\n" for p in passages))
    return file


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    monkeypatch.delenv("AGENTRL_SEARCH_CORPUS", raising=False)
    module = load_file("shelf:search")
    module.use_corpus(write(tmp_path / "passages.jsonl", PASSAGES))
    return module


def test_the_best_passages_come_first(shelf):
    assert shelf.search("honey of bees", k=2) == (
        "[b1] Bees\nBees gather nectar and live on honey in winter.\n\n"
        "[b2] Bears\nBears sleep in winter. Some like honey."
    )
    assert shelf.search("RIVER mill?", k=1) == "[3] The mill by the river grinds rye."
    assert shelf.search("copper bell", k=10) == "[5] Twin\nCopper bell.\n\n[6] Twin\nCopper bell."


def test_long_passages_are_cut_and_can_be_read(shelf):
    results = shelf.search("salt")
    assert results.endswith(" ...") and 400 < len(results) < 420
    assert shelf.read_passage("4") == f"[4] Long\n{PASSAGES[3]['text']}"
    assert shelf.read_passage(" [b2] ").startswith("[b2] Bears\n")


@pytest.mark.parametrize(
    "query", ["", "   ", "zeppelin", "the of and", "?!", "\x00", "ground_truth"]
)
def test_a_search_without_results(shelf, query):
    assert shelf.search(query) == "No passages found. Try other words."


@given(query=st.text(max_size=60), k=st.integers(1, 10))
def test_any_text_is_a_valid_query(tmp_path_factory, query, k):
    module = load_file("shelf:search")
    if module._file is None:
        module.use_corpus(write(tmp_path_factory.mktemp("c") / "passages.jsonl", PASSAGES))
    assert module.search(query, k) == module.search(query, k)


def test_what_is_refused(shelf):
    with pytest.raises(ToolError, match="has 501 characters, maximum 500"):
        shelf.search("x" * 501)
    with pytest.raises(ToolError, match=r"no passage with id 'b11'\. Did you mean 'b1'\?"):
        shelf.read_passage("b11")
    with pytest.raises(ToolError, match=r"no passage with id \'\.\./\.\./etc/passwd\'"):
        shelf.read_passage("../../etc/passwd")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "holds no passages"),
        ('{"id": "1", "text": "a"}\n{"id": "1", "text": "b"}\n', ":2: the id '1' comes twice"),
        ('{"id": "1", "text": "a"}\nnonsense\n', ":2: b'nonsense.*' is no passage, such as"),
        ('{"id": "1"}\n', ":1: .* is no passage"),
        ('{"id": "1", "text": " "}\n', ":1: .* is no passage"),
        ('["1", "a"]\n', ":1: .* is no passage"),
    ],
)
def test_files_that_are_not_a_corpus(shelf, tmp_path, lines, message):
    file = tmp_path / "broken.jsonl"
    file.write_text(lines)
    with pytest.raises(DataError, match=message):
        list(shelf.read_passages(file))
    if ":2:" in message:
        shelf.use_corpus(file)
        with pytest.raises(Infrastructure, match=message):
            shelf.search("a")
    else:
        with pytest.raises(DataError, match=message):
            shelf.use_corpus(file)


def test_a_missing_corpus_is_an_error_with_advice(shelf, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"no corpus at nowhere\.jsonl"):
        shelf.use_corpus("nowhere.jsonl")
    monkeypatch.setattr(shelf, "_file", None)
    monkeypatch.setattr(shelf, "_index", None)
    with pytest.raises(Infrastructure, match=r"set AGENTRL_SEARCH_CORPUS to a \.jsonl file"):
        shelf.search("bees")


def test_the_variable_names_the_corpus(tmp_path, monkeypatch):
    file = write(tmp_path / "passages.jsonl", PASSAGES)
    monkeypatch.setenv("AGENTRL_SEARCH_CORPUS", str(file))
    assert load_file("shelf:search").search("rye").startswith("[3] The mill")


@pytest.mark.timing
def test_many_passages_at_once(shelf, tmp_path):
    """One index is made for all that ask at the same time, and asking is quick."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=5)) for _ in range(5000)]
    many = [{"id": i, "text": " ".join(rng.choices(words, k=40))} for i in range(10_000)]
    many.append({"id": "needle", "text": "a quicksilver needle"})
    shelf.use_corpus(write(tmp_path / "many.jsonl", many))
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda: results.append(shelf.search("needle"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["[needle] a quicksilver needle"] * 8
    began = time.thread_time()
    for _ in range(50):
        shelf.search(" ".join(rng.choices(words, k=5)))
    assert (time.thread_time() - began) / 50 < 0.02


def test_jax_reserves_no_gpu_memory(tmp_path):
    """bm25s imports JAX if it is installed."""
    (tmp_path / "jax").mkdir()
    code = "import os; print(os.environ.get('XLA_PYTHON_CLIENT_PREALLOCATE')); raise ImportError"
    (tmp_path / "jax/__init__.py").write_text(code)
    script = "from agentrl.registry import load_file; load_file('shelf:search')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    environment.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == {"false"}
