"""The exported file: its bounds and its policy. `test_page.py` opens one in a browser."""

from __future__ import annotations

import json
import re

import pytest
from support.recorded import write_run

from agentrl.cli import main
from agentrl.errors import UserError
from agentrl.view import export
from agentrl.view.export import export_page


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


def test_the_file_contains_what_the_query_finds(folder):
    page = export_page([folder], "step=2 split=train")
    [block] = re.findall('<script type="application/json" id="bundle">(.*)</script>', page)
    answers = json.loads(block)
    assert "<" not in block and "window.ran=1" in block
    assert answers["/api/runs?"][0]["steps"] == [2]
    [list_, _] = answers["/api/runs/0/episodes?after=0&q="]
    assert [row["episode"] for row in list_["rows"]] == ["../../x", "e2-0-1"]
    assert "/api/runs/0/episode?id=e2-0-1" in answers
    assert answers["/api/runs/0/tokens?from=0&id=e2-0-1&segment=0&to=500"]["mask"] == [1, 1, 0]
    assert not [key for key in answers if "e1-0-0" in key]


def test_the_file_loads_nothing_and_names_its_scripts_by_hash(folder):
    page = export_page([folder], "step=2")
    assert not re.search(
        r"<script[^>]* src=|<link[^>]*stylesheet|https?://(?!www\.w3\.org|engine)", page
    )
    [policy] = re.findall('Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert policy.count("'sha256-") == page.count("<script>") + page.count("<style>") == 8


@pytest.mark.parametrize(
    ("name", "limit", "query", "message"),
    [
        ("MAX_EPISODES", 3, "", r"would have 7 episodes of .*, more than 3\. Choose fewer"),
        (
            "MAX_EXPORT",
            10_000,
            "",
            r"more than 0\.01 MB of data\. Choose fewer .* --query 'step=12'",
        ),
        ("MAX_EXPORT", 10_000_000, "step=99", "matches 'step=99', so nothing is exported"),
        ("MAX_EXPORT", 10_000_000, "stp=1", "unknown field 'stp'"),
    ],
)
def test_what_is_too_large_or_empty_is_refused(folder, monkeypatch, name, limit, query, message):
    monkeypatch.setattr(export, name, limit)
    with pytest.raises(UserError, match=message):
        export_page([folder], query)


def test_a_query_without_a_file_is_a_mistake(folder, capsys):
    with pytest.raises(SystemExit) as end:
        main(["view", str(folder), "--query", "step=1"])
    assert end.value.code == 1 and "add --export FILE" in capsys.readouterr().err
