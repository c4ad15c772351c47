"""The table of parsers in benchmarks/templates.md is true for agentrl and for other projects."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.parsers_page import (
    BEGIN,
    END,
    PAGE,
    PEER_CASES,
    WHY,
    WHY_NOT_READ,
    peer_columns,
    rendered,
    runs_as_expected,
    with_table,
)

import agentrl.chat.formats
from agentrl.chat.formats import FORMATS

CASES = PEER_CASES["cases"]


@pytest.mark.parametrize("format", sorted({case["format"] for case in CASES}))
def test_a_parser_differs_from_a_peer_for_a_stated_reason_only(format):
    for case in CASES:
        if case["format"] == format:
            assert runs_as_expected(case) != ("why" in case), case


def test_the_cases_of_the_peers_are_different_tests_and_all_reasons_are_used():
    tests = [(case["format"], case["peer"], case["test"]) for case in CASES]
    assert len(set(tests)) == len(tests) > 500
    assert {case["why"] for case in CASES if "why" in case} == set(WHY)


@pytest.mark.parametrize("format", FORMATS)
def test_the_page_lists_the_cases_that_the_peers_agree_on(format):
    table = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    line = next(line for line in table.splitlines() if line.startswith(f"| `{format}` |"))
    assert line.endswith(peer_columns(format)), "run `make docs`"


@pytest.mark.slow
def test_the_table_in_the_docs_is_up_to_date():
    page = PAGE.read_text("utf-8")
    assert page == with_table(page), "run `make docs`"


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_rendered_calls_are_read(format):
    count = rendered()[format]
    assert count["templates"]
    assert (count["read"] == count["turns"]) != (format in WHY_NOT_READ), count


# It reads the tools and the turns, and writes the calls of each turn.
CHILD = """
import json, signal, sys
task = json.load(sys.stdin)
sys.path.insert(0, task["folder"])
import foreign

def late(*args):
    raise TimeoutError

signal.signal(signal.SIGALRM, late)
parsers, results = {}, []
for name, turn in task["turns"]:
    if name not in parsers:
        parsers[name] = foreign._load({"kind": "sglang", "name": name})
    signal.setitimer(signal.ITIMER_REAL, 1)
    answer = foreign._answer(parsers[name], turn, task["tools"])
    signal.setitimer(signal.ITIMER_REAL, 0)
    calls = answer.get("calls", [])
    results.append([[call["name"], json.loads(call["arguments"])] for call in calls])
print(json.dumps(results))
"""


@pytest.mark.slow
@pytest.mark.sglang
def test_sglang_itself_reads_the_cases_as_the_table_says(sglang_python):
    """A turn on which a parser of SGLang's does not end within a second has no calls."""
    cases = [case for case in CASES if case["peer"] == "sglang"]
    turns = []
    for case in cases:
        turn = case["turn"]
        if case["format"] == "gpt_oss":  # it also reads the tokens around the turn
            turn = f"<|start|>assistant{turn}<|call|>"
        turns.append((case["parser"], turn))
    folder = Path(agentrl.chat.formats.__file__).parent
    task = {"folder": str(folder), "tools": PEER_CASES["tools"], "turns": turns}
    child = subprocess.run(
        [sglang_python, "-c", CHILD],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    results = json.loads(child.stdout.splitlines()[-1])
    for case, calls in zip(cases, results, strict=True):
        assert calls == case.get("installed", case["calls"]), case
        assert case.get("installed") != case["calls"]
