"""`agentrl docs`."""

import runpy
from pathlib import Path

import pytest

from agentrl.cli import main

ROOT = Path(__file__).parents[2]


def docs(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["docs", *words])
    return ended.value.code or 0


@pytest.mark.parametrize(
    ("words", "file"),
    [
        ((), "docs/index.md"),
        (("rewards",), "docs/rewards.md"),
        (("rewards.md",), "docs/rewards.md"),
        (("llms.txt",), "docs/llms.txt"),
        (("assistants",), "AGENTS.md"),
    ],
)
def test_a_page_is_printed(words, file, capsys):
    assert docs(*words) == 0
    assert capsys.readouterr().out == (ROOT / file).read_text().rstrip() + "\n"


def test_an_unknown_page_is_answered_with_the_pages(capsys):
    assert docs("reward") == 1
    error = capsys.readouterr().err
    assert "no page 'reward'. Did you mean 'rewards'?" in error and "environments" in error


def test_the_list_for_language_models_is_up_to_date():
    pages = runpy.run_path(str(ROOT / "site/pages.py"))
    assert (ROOT / "docs/llms.txt").read_text() == pages["llms_text"]()
