"""Types for the values of formats that write all of them as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from typing import Any

import orjson

from agentrl.chat.formats.pythonic import literal_of
from agentrl.chat.formats.strict_json import find_loss
from agentrl.trajectory import ToolCall

_FITS: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
# Schemas that were written by hand name types as Python and C do.
_OTHER_NAMES = {"int": "integer", "float": "number", "double": "number", "bool": "boolean",
                "dict": "object", "list": "array", "str": "string"}  # fmt: skip
_COMBINATIONS = ("allOf", "anyOf", "oneOf")
# Chat templates are Jinja, which writes these as Python does; the models learn it from them.
_PYTHON = {"True": True, "False": False, "None": None}


def cast_arguments(
    calls: Sequence[ToolCall], schemas: Sequence[Mapping[str, Any]]
) -> list[ToolCall]:
    """Return the calls with the values that their tools' schemas ask for.

    A text is read as JSON if its schema wants an integer, number, boolean, object, array or null
    and no string. Lists and dictionaries may also be written as Python writes them, and `3.0` is an
    integer if the schema wants no other number. A text that does not become such a value stays a
    text, so that the validation of the arguments says what is wrong with it. A text without a
    schema stays a text.

    Args:
        calls: as `parse_qwen3_coder`, `parse_glm` and `parse_llama_pythonic` return them.
        schemas: the tools, as chat templates get them.
    """
    functions = (schema.get("function", schema) for schema in schemas)
    parameters = {f.get("name"): _mapping(f.get("parameters")) for f in functions}
    return [_typed(call, parameters.get(call.name) or {}) for call in calls]


def _typed(call: ToolCall, parameters: Mapping[str, Any]) -> ToolCall:
    if call.error or isinstance(call.arguments, str):
        return call
    values = {
        key: _value(value, _types(_parameter(key, parameters), parameters))
        if isinstance(value, str)
        else value
        for key, value in call.arguments.items()
    }
    return replace(call, arguments=values)


def _parameter(name: str, schema: Mapping[str, Any]) -> Any:
    """Return the schema of a parameter, or None if the parameter is unknown.

    Args:
        name: of the parameter.
        schema: of all parameters, an object or a combination of objects.
    """
    properties = _mapping(schema.get("properties"))
    if name in properties:
        return properties[name]
    parts = (_mapping(part) for word in _COMBINATIONS for part in schema.get(word) or ())
    choices = [choice for part in parts if (choice := _parameter(name, part)) is not None]
    return {"anyOf": choices} if choices else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _types(
    schema: Any, root: Mapping[str, Any], known: dict[str, set[str]] | None = None
) -> set[str]:
    """Return the JSON types that a value may have; empty where the schema does not say.

    Args:
        schema: of the value.
        root: what references in it point into.
        known: the types of references that were followed; one that leads to itself has none.
    """
    schema, known = _mapping(schema), {} if known is None else known
    types = schema.get("type") or ()
    found = {_OTHER_NAMES.get(t, t) for t in ((types,) if isinstance(types, str) else types)}
    if not found and schema.get("enum"):
        found = {_type_of(value) for value in schema["enum"]}
    if not found and schema.get("const") is not None:
        found = {_type_of(schema["const"])}
    reference = schema.get("$ref")
    if not found and isinstance(reference, str):
        if reference not in known:
            known[reference] = set()
            known[reference] = _types(_referred(reference, root), root, known)
        found = set(known[reference])
    for part in schema.get("allOf") or ():
        found = found or _types(part, root, known)
    # Without a type beside the choices, one that does not name a type may well be a text.
    unnamed = set() if found else {"string"}
    for choice in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        found |= _types(choice, root, known) or unnamed
    return found


def _type_of(value: Any) -> str:
    """Return the JSON type of a value that a schema allows."""
    if isinstance(value, bool):
        return "boolean"
    return next((name for name, types in _FITS.items() if isinstance(value, types)), "string")


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the part of a schema that a reference such as `#/$defs/Point` names, or None."""
    document, *path = reference.split("/")
    node: Any = root if document == "#" else None
    for key in path:
        node = _mapping(node).get(key.replace("~1", "/").replace("~0", "~"))
    return node


def _value(text: str, types: set[str]) -> Any:
    if not types or "string" in types:
        return text
    stripped = text.strip()
    if stripped in _PYTHON:
        value = _PYTHON[stripped]
    else:
        try:
            value = _json_or_literal(stripped)
        except ValueError:  # lone surrogates are one, too
            return text
    if isinstance(value, float) and "integer" in types and "number" not in types:
        value = _integer(value, stripped)
    fits = any(isinstance(value, _FITS.get(t, ())) for t in types)
    if isinstance(value, bool):
        fits = "boolean" in types
    return value if fits else text


def _integer(value: float, text: str) -> float | int:
    """Return `3.0` as 3, which JSON schema calls the same, and other numbers as they are.

    Args:
        value: as it was read, rounded.
        text: as it was written.
    """
    if not value.is_integer() or abs(value) >= 2**53:
        return value
    try:
        return int(value) if Decimal(text) == int(value) else value
    except InvalidOperation:  # such as -(3.0)
        return value


def _json_or_literal(text: str) -> Any:
    """Return the value that a text holds.

    Raises:
        ValueError: it is neither JSON nor a list or dictionary of Python's, or JSON lost a part.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return literal_of(text)
    if why := find_loss(text, value):
        raise ValueError(why)
    return value
