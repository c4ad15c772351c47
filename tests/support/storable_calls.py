"""Checks that hold for every call that a parser returns."""

from __future__ import annotations

import json
from collections.abc import Iterable

from agentrl.trajectory import ToolCall


def assert_storable(calls: Iterable[ToolCall]) -> None:
    """Assert that broken calls keep their arguments as text and that the others are valid JSON."""
    for call in calls:
        assert isinstance(call.arguments, str) == bool(call.error)
        if not call.error:
            assert call.name
            json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()
