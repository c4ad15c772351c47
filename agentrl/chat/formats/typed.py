"""Types for the values of formats that write all of them as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from agentrl.chat.formats.strict_json import lossy
from agentrl.trajectory import ToolCall

_FITS: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
# Chat templates are Jinja, which writes these as Python does; the models learn it from them.
_PYTHON = {"True": True, "False": False, "None": None}


def typed(calls: Sequence[ToolCall], schemas: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
    """Calls whose texts are the values that their tools' schemas ask for.

    A text is read as JSON where its schema wants an integer, number, boolean, object, array or
    null and no string. What does not become such a value stays a text, so that validating the
    arguments says what is wrong with it; so does everything that has no schema.

    Args:
        calls: as `parse_qwen3_coder` and `parse_glm` return them.
        schemas: the tools, as chat templates get them.
    """
    functions = (schema.get("function", schema) for schema in schemas)
    properties = {f.get("name"): _mapping(_mapping(f.get("parameters")).get("properties"))
                  for f in functions}  # fmt: skip
    return [_typed(call, properties.get(call.name) or {}) for call in calls]


def _typed(call: ToolCall, properties: Mapping[str, Any]) -> ToolCall:
    if call.error or isinstance(call.arguments, str):
        return call
    values = {
        key: _value(value, _types(properties.get(key))) if isinstance(value, str) else value
        for key, value in call.arguments.items()
    }
    return replace(call, arguments=values)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _types(schema: Any) -> set[str]:
    """The JSON types that a value may have; empty where the schema does not say."""
    schema = _mapping(schema)
    types = schema.get("type") or ()
    found: set[str] = {types} if isinstance(types, str) else set(types)
    for choice in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        found |= _types(choice) or {"string"}  # one that does not say may well be a text
    return found


def _value(text: str, types: set[str]) -> Any:
    if not types or "string" in types:
        return text
    stripped = text.strip()
    if stripped in _PYTHON:
        value = _PYTHON[stripped]
    else:
        try:
            value = orjson.loads(stripped)
        except ValueError:  # lone surrogates are one, too
            return text
    fits = any(isinstance(value, _FITS.get(t, ())) for t in types)
    if isinstance(value, bool):
        fits = "boolean" in types
    return value if fits and not lossy(stripped, value) else text
