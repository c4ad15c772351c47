"""Convert the values of formats that write all values as text."""

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
# Hand-written schemas use the type names of Python and C.
_OTHER_NAMES = {"int": "integer", "float": "number", "double": "number", "bool": "boolean",
                "dict": "object", "list": "array", "str": "string"}  # fmt: skip
_COMBINATIONS = ("allOf", "anyOf", "oneOf")
# Jinja templates write these words as Python does, and models learn them from templates.
_PYTHON = {"True": True, "False": False, "None": None}


def cast_arguments(
    calls: Sequence[ToolCall], schemas: Sequence[Mapping[str, Any]]
) -> list[ToolCall]:
    """Convert the values of calls to the types of their tools' schemas.

    A text is parsed as JSON if its schema has the type integer, number, boolean, object, array or
    null, and not string. Lists and dictionaries may also have Python's syntax, and `3.0` becomes an
    integer if the schema has no type number. A text that cannot be converted stays a text, and the
    validation of the arguments reports it. A text without a schema stays a text.

    Args:
        calls: the calls from `parse_qwen3_coder`, `parse_glm`, `parse_llama_pythonic` and others.
        schemas: the schemas of the tools in the prompt.
    """
    functions = (schema.get("function", schema) for schema in schemas)
    parameters = {f.get("name"): _mapping(f.get("parameters")) for f in functions}
    return [_cast_call(call, parameters.get(call.name) or {}) for call in calls]


def _cast_call(call: ToolCall, parameters: Mapping[str, Any]) -> ToolCall:
    if call.error or isinstance(call.arguments, str):
        return call
    values = {
        key: _cast_value(value, _types(_parameter(key, parameters), parameters))
        if isinstance(value, str)
        else value
        for key, value in call.arguments.items()
    }
    return replace(call, arguments=values)


def _parameter(name: str, schema: Mapping[str, Any]) -> Any:
    """Return the schema of a parameter, or None if the parameter is unknown.

    Args:
        name: the name of the parameter.
        schema: the schema of all parameters, an object or a combination of objects.
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
    schema: Any, root: Mapping[str, Any], types_by_reference: dict[str, set[str]] | None = None
) -> set[str]:
    """Return the JSON types that a value may have; an empty set if the schema does not say.

    Args:
        schema: the schema of the value.
        root: the whole schema, which references point into.
        types_by_reference: the types of the references that were resolved so far. A reference that
            contains itself has no types.
    """
    schema = _mapping(schema)
    types_by_reference = {} if types_by_reference is None else types_by_reference
    types = schema.get("type") or ()
    names = {_OTHER_NAMES.get(t, t) for t in ((types,) if isinstance(types, str) else types)}
    if not names and schema.get("enum"):
        names = {_type_of(value) for value in schema["enum"]}
    if not names and schema.get("const") is not None:
        names = {_type_of(schema["const"])}
    reference = schema.get("$ref")
    if not names and isinstance(reference, str):
        if reference not in types_by_reference:
            types_by_reference[reference] = set()
            types_by_reference[reference] = _types(
                _resolve_reference(reference, root), root, types_by_reference
            )
        names = set(types_by_reference[reference])
    for part in schema.get("allOf") or ():
        names = names or _types(part, root, types_by_reference)
    # If there is no other type, a choice without a type may be a string.
    default = set() if names else {"string"}
    for choice in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        names |= _types(choice, root, types_by_reference) or default
    return names


def _type_of(value: Any) -> str:
    """Return the JSON type of a value that a schema allows."""
    if isinstance(value, bool):
        return "boolean"
    return next((name for name, types in _FITS.items() if isinstance(value, types)), "string")


def _resolve_reference(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the part of a schema that a reference such as `#/$defs/Point` names, or None."""
    document, *path = reference.split("/")
    node: Any = root if document == "#" else None
    for key in path:
        node = _mapping(node).get(key.replace("~1", "/").replace("~0", "~"))
    return node


def _cast_value(text: str, types: set[str]) -> Any:
    if not types or "string" in types:
        return text
    stripped = text.strip()
    if stripped in _PYTHON:
        value = _PYTHON[stripped]
    else:
        try:
            value = _json_or_literal(stripped)
        except ValueError:  # UnicodeEncodeError (lone surrogates) is a ValueError, too
            return text
    if isinstance(value, float) and "integer" in types and "number" not in types:
        value = _to_integer(value, stripped)
    fits = any(isinstance(value, _FITS.get(t, ())) for t in types)
    if isinstance(value, bool):
        fits = "boolean" in types
    return value if fits else text


def _to_integer(value: float, text: str) -> float | int:
    """Convert `3.0` to 3, because JSON schema treats both as integers; keep other numbers.

    Args:
        value: the parsed number, which may be rounded.
        text: the text of the number.
    """
    if not value.is_integer() or abs(value) >= 2**53:
        return value
    try:
        return int(value) if Decimal(text) == int(value) else value
    except InvalidOperation:  # such as -(3.0)
        return value


def _json_or_literal(text: str) -> Any:
    """Parse a text as JSON, or as a list or dictionary in Python's syntax.

    Raises:
        ValueError: if it is neither, or if parsing would lose a part of it.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return literal_of(text)
    if why := find_loss(text, value):
        raise ValueError(why)
    return value
