"""Derive the schema that the model sees, and the validation of arguments, from a signature.

Each function has one pydantic model. Its JSON schema is cleaned, because chat templates print it as
it is. The model sees this schema, and a validator is compiled from it: see
`agentrl.tools.payloads`.

agentrl itself passes parameters with these names, and the model does not see them:

    state      a dictionary of the episode, shared by all its tools that have the parameter
    sample     the dataset row
    messages   the conversation so far, read-only
    sandbox    runs code that a model wrote

A parameter with such a name and another type is an ordinary parameter that the model fills, such as
`state: str` of a postal address.
"""

from __future__ import annotations

import collections.abc as abc
import inspect
import json
import logging
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from typing import Annotated, Any, Literal

import docstring_parser
import orjson
from pydantic import BaseModel, BeforeValidator, FailFast, Field, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticSerializationError, SchemaError
from typing_extensions import is_typeddict

from agentrl.errors import UserError
from agentrl.sandbox import Sandbox
from agentrl.signatures import KEYWORD, locate
from agentrl.tools.payloads import ANNOTATIONS, Parameters, kinds_of, shorten
from agentrl.tools.validation import DATA_KEYWORDS, LOOP_SECONDS, NAMED_KEYWORDS, Validator
from agentrl.trajectory import Message, Sample

log = logging.getLogger("agentrl.tools")


def describe_function(
    function: types.FunctionType, name: str, *, bound: bool, excluded: Collection[str] = ()
) -> tuple[str, Parameters]:
    """Return the description and the parameters of a function, from its docstring and signature.

    Docstrings in the styles of Google, NumPy and ReST are understood. A parameter that the
    docstring does not mention has no description.

    Args:
        function: a plain function, or a method as defined in its class.
        name: the name that the model calls.
        bound: leave out the first parameter (`self`).
        excluded: parameters to leave out, because agentrl fills them.

    Raises:
        UserError: no JSON schema describes a parameter, or the function has `*args` or `**kwargs`.
    """
    where = f"the tool function {name!r} ({locate(function)})"
    description, descriptions = _read_docstring(inspect.getdoc(function) or "")
    signature = inspect.signature(function).parameters
    if unknown := [n for n in descriptions if n not in signature]:
        log.warning(
            "%s: the model does not see what its docstring says about %s, because no parameter has"
            " that name. Its parameters are: %s",
            where,
            ", ".join(map(repr, unknown)),
            ", ".join(signature) or "none",
        )
    all_parameters = list(signature.values())[1 if bound else 0 :]
    parameters = [p for p in all_parameters if p.name not in excluded]
    try:
        hints = _evaluate_annotations(function, {p.name for p in parameters})
    except (NameError, TypeError, SyntaxError) as e:
        raise UserError(
            f"{where}: an annotation cannot be evaluated ({e}). Import or define what it names at"
            " the top of the file."
        ) from e
    try:
        fields = _make_fields(parameters, hints, descriptions, where)
        model = create_model("Arguments", **fields)
        raw = model.model_json_schema(schema_generator=_SchemaGenerator)
    except PydanticUserError as e:
        problem = str(e).splitlines()[0]
        raise UserError(f"{where} has a parameter that no JSON schema describes: {problem}") from e
    except SchemaError as e:
        raise UserError(
            f"{where}: pydantic cannot check its arguments: {e}. If a pattern needs look-around or"
            " backreferences, write Field(json_schema_extra={'pattern': PATTERN})"
        ) from e
    _refuse_python_patterns(model.__pydantic_core_schema__, where)
    schema = clean_schema(raw, raw.get("$defs", {}), (), where)
    # Templates and validators need the key even if there are no parameters.
    schema = {"type": "object", "properties": {}, **schema, "additionalProperties": False}
    omitted = _allow_null_defaults(schema["properties"])
    return description, replace(_parameters(name, schema, model, where), omitted=omitted)


def _make_fields(
    parameters: Iterable[inspect.Parameter],
    hints: Mapping[str, Any],
    descriptions: Mapping[str, str],
    where: str,
) -> dict[str, Any]:
    """Return the fields of a pydantic model of the parameters.

    Raises:
        UserError: a model cannot fill a parameter, or its default is a `Field`.
    """
    fields: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UserError(
                f"{where}: a model cannot fill {str(parameter).partition(':')[0]!r}: it only passes"
                " arguments that the schema names. Name each parameter. If a decorator wraps the"
                " function, use functools.wraps in it. A function may also take @tool(schema=...)."
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UserError(
                f"{where}: {parameter.name!r} is positional-only, but a model passes arguments by"
                " name. Remove the '/'."
            )
        if isinstance(parameter.default, FieldInfo):
            raise UserError(
                f"{where}: `{parameter.name} = Field(...)` would make the Field object the"
                f" default value. Write `{parameter.name}: Annotated[TYPE, Field(...)] = VALUE`."
            )
        annotation = _with_json_values(hints.get(parameter.name, Any))
        # Fields are numbered and have the names as aliases, so every name is allowed, even
        # `schema`.
        default = ... if parameter.default is parameter.empty else parameter.default
        field_options: dict[str, Any] = {}
        if descriptions.get(parameter.name) and not _has_description(annotation):
            field_options = {"description": descriptions[parameter.name]}
        field = Field(default, alias=parameter.name, **field_options)
        fields[f"p{len(fields)}"] = (annotation, field)
    return fields


_PARAMETER_DOCS = re.compile(
    r"""^(?:Args|Arguments|Params|Parameters):[ ]*\n(?:[ ]*\n|[ ]+.*\n)+  # Google
    |^Parameters[ ]*\n-{3,}[ ]*\n(?:(?!.*\n-{3,}[ ]*\n).*\n)+  # NumPy
    |(?:^[:@](?:param|parameter|arg|argument|key|keyword|type)[ ].*\n(?:[ ]+.*\n|[ ]*\n)*)+  # ReST
    """,
    re.MULTILINE | re.VERBOSE,
)


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return a docstring without the sections of its parameters, and the texts of these."""
    descriptions: dict[str, str] = {}

    def read(section: re.Match[str]) -> str:
        # Without an empty line, the parser removes the indentation.
        parameters = docstring_parser.parse(f"\n{section[0]}").params
        for parameter in parameters:
            for name in parameter.arg_name.split(","):
                texts = (parameter.description or "").split()
                descriptions[name.strip(" `*-")] = " ".join(texts)
        return "" if parameters else section[0]

    rest = _PARAMETER_DOCS.sub(read, f"{text}\n")
    return re.sub(r"\n{3,}", "\n\n", rest).strip(), descriptions


class _FailFast(FailFast):
    __hash__ = object.__hash__  # type: ignore  # Types in a union are hashed.


_FAIL_FAST = _FailFast()
_CONTAINERS: Collection[Any] = (list, set, frozenset, tuple, dict, abc.Sequence, abc.Mapping)


def _with_json_values(annotation: Any) -> Any:
    """Return a type that accepts what its JSON schema describes.

    pydantic accepts the enum members in a `Literal` only as objects, and makes a generator of an
    `Iterable`, which has no length and can be read once. To list all errors of a long list would
    block the event loop.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        members = [a for a in args if isinstance(a, Enum)]
        to_member = BeforeValidator(lambda x: next((m for m in members if m.value == x), x))
        return Annotated[annotation, to_member] if members else annotation
    if abc.Iterable in (annotation, origin):
        return list[_with_json_values(args[0])] if args else list
    if origin is Annotated:
        return Annotated[_with_json_values(args[0]), *annotation.__metadata__]
    if origin in (typing.Union, types.UnionType):
        return typing.Union[*map(_with_json_values, args)]
    if args and origin is list:
        return Annotated[list[_with_json_values(args[0])], _FAIL_FAST]
    if args and origin in _CONTAINERS:
        return origin[*map(_with_json_values, args)]
    return annotation


def _allow_null_defaults(properties: dict[str, Any]) -> frozenset[str]:
    """Let parameters be null if this is their default, and return those that could not be null."""
    refused = {
        name: schema
        for name, schema in properties.items()
        if schema.get("default", ...) is None and Validator(schema).errors(None, LOOP_SECONDS)
    }
    for name, schema in refused.items():
        notes = {k: schema[k] for k in ANNOTATIONS if k in schema}
        rule = {k: v for k, v in schema.items() if k not in notes}
        properties[name] = {"anyOf": [rule, {"type": "null"}], **notes}
    return frozenset(refused)


def parameters_from_schema(schema: Mapping[str, Any], name: str, where: str) -> Parameters:
    """Return the parameters for a JSON schema that the user wrote. Arguments are not converted.

    Raises:
        UserError: it is not the JSON schema of an object, or validation cannot be bounded in time.
    """
    parameters = _parameters(name, dict(schema), None, where)
    if schema.get("type") != "object":
        raise UserError(f'{where}: the "parameters" of its schema must have "type": "object"')
    return parameters


def _parameters(
    name: str, schema: dict[str, Any], model: type[BaseModel] | None, where: str
) -> Parameters:
    if not _is_json(schema):
        raise UserError(
            f"{where}: its schema has a value that JSON cannot hold, such as an infinity, NaN or an"
            " integer beyond 64 bits. Leave it out"
        )
    try:
        validator = Validator(schema)
    except ValueError as e:
        raise UserError(f"{where}: its schema cannot be used: {e}") from e
    core: Any = model and model.__pydantic_core_schema__
    is_plain = core is not None and _is_plain(core["schema"])
    return Parameters(schema, _usage(name, schema), validator, model, is_plain)


_PLAIN = {"model-fields", "model-field", "default", "nullable", "union", "list", "any"}
_PLAIN |= {"str", "int", "float", "bool", "none"}


def _is_plain(core: Any) -> bool:
    """Return whether pydantic's strict mode accepts only what the JSON schema accepts.

    This is not so for types with code of the user, for other objects, which may have more keys, and
    for a JSON schema that the user has changed. A union that is tried from left to right has
    another value in strict mode: `int | str` makes an integer of "3" otherwise.

    Args:
        core: a schema of pydantic-core.
    """
    changed = {"pydantic_js_extra", "pydantic_js_functions", "pydantic_js_annotation_functions"}
    return not any(
        # True is equal to 1.
        any(type(value) is not str for value in node["expected"])
        if node.get("type") == "literal"
        else node.get("type", "any") not in _PLAIN
        or node.get("mode") == "left_to_right"
        or changed & node.get("metadata", {}).keys()
        for node, _ in _core_nodes(core)
    )


def _core_nodes(core: Any, engine: str = "rust-regex") -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the dictionaries in a schema of pydantic-core, each with its `regex_engine`."""
    if isinstance(core, list | tuple):
        for part in core:
            yield from _core_nodes(part, engine)
    elif isinstance(core, dict):
        engine = (core.get("config") or {}).get("regex_engine", engine)
        yield core, core.get("regex_engine", engine)
        for key, part in core.items():
            if key not in ("metadata", "serialization", "default", "expected"):
                yield from _core_nodes(part, engine)


def _is_json(value: Any) -> bool:
    """Return whether JSON can hold a value: no NaN, infinity or integer beyond 64 bits."""
    try:
        return bool(json.dumps(value, allow_nan=False) and orjson.dumps(value))
    except (TypeError, ValueError):
        return False


def _refuse_python_patterns(core: Any, where: str) -> None:
    """Refuse patterns that pydantic matches with Python's `re`, which cannot be interrupted.

    Args:
        core: a schema of pydantic-core.
        where: the location of the function, for the message.

    Raises:
        UserError: there is such a pattern.
    """
    for node, engine in _core_nodes(core):
        pattern = node.get("pattern") if node.get("type") == "str" else None
        if isinstance(pattern, re.Pattern) or (pattern is not None and engine == "python-re"):
            text = getattr(pattern, "pattern", pattern)
            raise UserError(
                f"{where}: the pattern {text!r} would be matched by Python's `re`, which cannot be"
                " interrupted. Write the pattern as text, without"
                " regex_engine='python-re'. If it needs look-around, write"
                f" Field(json_schema_extra={{'pattern': {text!r}}})"
            )


class _SchemaGenerator(GenerateJsonSchema):
    """A schema generator that leaves out defaults that JSON does not support, without a warning."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def encode_default(self, dft: Any) -> Any:
        encoded = super().encode_default(dft)
        if not _is_json(encoded):
            raise PydanticSerializationError(f"JSON cannot hold {dft!r}")
        return encoded


def _evaluate_annotations(function: Any, names: Collection[str]) -> dict[str, Any]:
    """Return the types of some parameters. The annotations of others are not evaluated."""
    function = inspect.unwrap(function)
    annotations = {k: v for k, v in function.__annotations__.items() if k in names}
    holder = types.SimpleNamespace(__annotations__=annotations)
    return typing.get_type_hints(holder, function.__globals__, include_extras=True)


def _has_description(annotation: Any) -> bool:
    """Return whether an annotation is `Annotated[..., Field(description=...)]`."""
    if typing.get_origin(annotation) is not Annotated:
        return False
    return any(isinstance(m, FieldInfo) and m.description for m in annotation.__metadata__)


def clean_schema(schema: Any, defs: Mapping[str, Any], within: tuple[str, ...], where: str) -> Any:
    """Inline `$defs`, remove `title` and `discriminator`, and forbid unknown keys of objects."""
    if isinstance(schema, list):
        return [clean_schema(s, defs, within, where) for s in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        ref = schema["$ref"].removeprefix("#/$defs/")
        if ref in within:
            raise UserError(
                f"{where}: the type {ref!r} contains itself, and chat templates print schemas"
                " without references. Use a string, or a type with a fixed depth."
            )
        if ref not in defs:
            raise UserError(f"{where}: the schema refers to {ref!r}, but its $defs do not have it")
        siblings = {k: v for k, v in schema.items() if k != "$ref"}
        return clean_schema({**defs[ref], **siblings}, defs, (*within, ref), where)
    clean: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("title", "$defs", "discriminator"):
            continue
        if key in DATA_KEYWORDS:
            clean[key] = value
        elif key in NAMED_KEYWORDS:
            clean[key] = {n: clean_schema(s, defs, within, where) for n, s in value.items()}
        else:
            clean[key] = clean_schema(value, defs, within, where)
    if "properties" in clean:
        clean.setdefault("additionalProperties", False)
    return clean


def _usage(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    parts = []
    for parameter, field_options in schema.get("properties", {}).items():
        default = ""
        if parameter not in required:
            known = field_options.get("default", ...)
            default = f" = {'...' if known is ... else orjson.dumps(known).decode()}"
        parts.append(f"{parameter}: {'|'.join(kinds_of(field_options))}{default}")
    return shorten(f"{name}({', '.join(parts)})", 160)


# -- parameters that agentrl fills ----------------------------------------------------------------

CALL_PARAMETERS = ("state", "sample", "messages", "sandbox")
CONSTRUCTOR_PARAMETERS = ("state", "sample", "sandbox")

_SEQUENCES = {tuple, list, abc.Sequence, abc.Collection, abc.Iterable}


def injected_parameters(
    function: Callable[..., Any],
    names: Collection[str] = CALL_PARAMETERS,
    schema_names: Collection[str] = (),
) -> tuple[str, ...]:
    """Return which parameters of a function, or of a class's constructor, agentrl fills.

    Args:
        function: the function or class.
        names: the names that agentrl can fill.
        schema_names: names in a schema that the user wrote; the model fills these.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a constructor in C without a signature
        return ()
    return tuple(
        name
        for name in names
        if name in parameters
        and name not in schema_names
        and parameters[name].kind in KEYWORD
        and _accepts(name, _annotation(function, name))
    )


def _annotation(function: Callable[..., Any], name: str) -> Any:
    """Return the annotation of a parameter; Any if it has none or it cannot be evaluated."""
    code = function.__init__ if isinstance(function, type) else function
    try:
        return _evaluate_annotations(code, {name}).get(name, Any)
    except (NameError, TypeError, SyntaxError, AttributeError):
        # For example, the type is imported under TYPE_CHECKING only.
        return Any


def _accepts(name: str, annotation: Any) -> bool:
    """Return whether an annotation accepts the value that agentrl passes under this name."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _accepts(name, typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return any(_accepts(name, choice) for choice in typing.get_args(annotation))
    kind = origin or annotation
    if kind is Any or kind is object:
        return True
    if name == "state":
        return kind in (dict, abc.Mapping, abc.MutableMapping) or is_typeddict(kind)
    if name == "messages":
        items = [a for a in typing.get_args(annotation) if a is not ...]
        return kind in _SEQUENCES and all(i in (Message, Any) for i in items)
    return kind is (Sample if name == "sample" else Sandbox)
