"""JSON objects within text, found in linear time and read strictly."""

from __future__ import annotations

import re
from typing import Any

import orjson

MAX_DEPTH = 64

# One token of a JSON value: a string, a bracket, or a run of what may stand outside of strings. A
# tag's `<` is none of these, so that a scan can pass a tag only within a string; that keeps the sum
# of all scans linear.
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]|[\s:,0-9.eE+\-a-z]+', re.DOTALL)


def end_of_object(text: str, start: int) -> int:
    """Where the JSON object at `start` ends (exclusive), or 0 where there is none."""
    if not text.startswith("{", start):
        return 0
    depth, position = 0, start
    while token := _JSON_TOKEN.match(text, position):
        position = token.end()
        first = text[token.start()]
        if first in "{[":
            depth += 1
            if depth > MAX_DEPTH:
                return 0
        elif first in "}]":
            depth -= 1
            if depth == 0:
                return position
    return 0


def read_object(body: str) -> tuple[dict[str, Any], str]:
    """A JSON object and no error, or an empty one and why."""
    try:
        # orjson refuses what later breaks HTTP, parquet and tokenizers: NaN, lone surrogates.
        value = orjson.loads(body)
    except orjson.JSONDecodeError as e:
        return {}, f"not JSON: {str(e)[:120]}"
    except UnicodeEncodeError:
        return {}, "not JSON: lone surrogate"
    if not isinstance(value, dict):
        return {}, "not a JSON object"
    return value, ""
