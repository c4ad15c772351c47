"""The turns of `fixtures/hostile_*.json`: texts that almost are tool calls, by format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parents[1] / "fixtures"


def hostile_turns(formats: Iterable[str]) -> Iterator:
    """Yield the format and the case of each turn, as parameters of a test."""
    for name in formats:
        table = json.loads((FIXTURES / f"hostile_{name}.json").read_text())
        for case in table["cases"]:
            yield pytest.param(name, case, id=f"{name}-{case['name']}")
