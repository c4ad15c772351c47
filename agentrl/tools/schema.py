"""From a Python signature to what the model is shown, and what its arguments are checked against.

One pydantic model per function, made once. Its JSON schema, cleaned for chat templates that print
it raw, is shown to the model and compiled into a validator: see `agentrl.tools.payloads`.

Parameters with certain names are agentrl's to fill, of the episode; no model ever sees these:

    state      a dictionary of the episode, shared by all of its tools that ask for it
    sample     the row
    messages   the conversation so far, to be read
    sandbox    where model-written code runs

A parameter of such a name is the model's all the same where its annotation is of something else:
`state: str`, of an address.
"""

from __future__ import annotations

import collections.abc as abc
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

import docstring_parser
import orjson
from pydantic import BaseModel, Field, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import is_typeddict

from agentrl.errors import UserError
from agentrl.sandbox import Sandbox
from agentrl.signatures import KEYWORD, locate
from agentrl.tools.payloads import Parameters, quick_check, shorten
from agentrl.tools.validation import DATA_KEYWORDS, NAMED_KEYWORDS, Validator
from agentrl.trajectory import Message, Sample


def describe(
    function: types.FunctionType, name: str, *, bound: bool, given: Collection[str] = ()
) -> tuple[str, Parameters]:
    """The description and parameters of a function, read from its docstring and signature.

    Google, NumPy and ReST docstrings are understood; what is not described has no description.

    Args:
        function: a plain function, or one as it stands in a class.
        name: what the model calls it.
        bound: leave out the first parameter (`self`).
        given: parameters to leave out, because no model fills them.

    Raises:
        UserError: a parameter that no JSON schema describes; `*args` or `**kwargs`, which a model
            could not fill.
    """
    where = f"the tool function {name!r} ({locate(function)})"
    docs = docstring_parser.parse(inspect.getdoc(function) or "")
    about = {p.arg_name: " ".join((p.description or "").split()) for p in docs.params}
    every = list(inspect.signature(function).parameters.values())[1 if bound else 0 :]
    taken = [p for p in every if p.name not in given]
    try:
        hints = _evaluated(function, {p.name for p in taken})
    except (NameError, TypeError, SyntaxError) as e:
        raise UserError(
            f"{where}: an annotation cannot be evaluated ({e}). Import or define what it names at"
            " the top of the file."
        ) from e
    fields: dict[str, Any] = {}
    for parameter in taken:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UserError(
                f"{where}: a model cannot fill {str(parameter).partition(':')[0]!r}: it passes the"
                " arguments that the schema names. Name each parameter. If a decorator wraps the"
                " function, use functools.wraps in it. A function may also take @tool(schema=...)."
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UserError(
                f"{where}: {parameter.name!r} is positional-only, and a model names what it passes."
                " Remove the '/'."
            )
        if isinstance(parameter.default, FieldInfo):
            raise UserError(
                f"{where}: `{parameter.name} = Field(...)` would be the value of an argument left"
                f" out. Write `{parameter.name}: Annotated[TYPE, Field(...)] = VALUE`."
            )
        annotation = hints.get(parameter.name, Any)
        # Fields are numbered and the names are aliases: any parameter name will do, `schema` too.
        default = ... if parameter.default is parameter.empty else parameter.default
        described: dict[str, Any] = {}
        if about.get(parameter.name) and not _described(annotation):
            described = {"description": about[parameter.name]}
        field = Field(default, alias=parameter.name, **described)
        fields[f"p{len(fields)}"] = (annotation, field)
    try:
        model = create_model("Arguments", **fields)
        raw = model.model_json_schema(schema_generator=_SchemaGenerator)
    except PydanticUserError as e:
        problem = str(e).splitlines()[0]
        raise UserError(f"{where} has a parameter that no JSON schema describes: {problem}") from e
    _refuse_python_patterns(model.__pydantic_core_schema__, where)
    schema = _clean(raw, raw.get("$defs", {}), (), where)
    # A function without parameters: templates and validators still want the key.
    schema = {"type": "object", "properties": {}, **schema, "additionalProperties": False}
    return (docs.description or "").strip(), _parameters(name, schema, model, where)


def adopt(schema: Mapping[str, Any], name: str, where: str) -> Parameters:
    """Parameters from a JSON schema written by hand; arguments reach the function as they come.

    Raises:
        UserError: it is no JSON schema of an object, or one that cannot be checked in bounded time.
    """
    parameters = _parameters(name, dict(schema), None, where)
    if schema.get("type") != "object":
        raise UserError(f'{where}: the "parameters" of its schema must have "type": "object"')
    return parameters


def _parameters(
    name: str, schema: dict[str, Any], model: type[BaseModel] | None, where: str
) -> Parameters:
    try:
        validator = Validator(schema)
    except ValueError as e:
        raise UserError(f"{where}: its schema cannot be used: {e}") from e
    return Parameters(schema, _usage(name, schema), quick_check(schema), validator, model)


def _refuse_python_patterns(core: Any, where: str, engine: str = "rust-regex") -> None:
    """Refuse patterns that pydantic searches by Python's `re`, which nothing can stop.

    Args:
        core: a schema of pydantic-core, or a part of one.
        where: of the function, for the message.
        engine: the `regex_engine` that holds for this part.

    Raises:
        UserError: there is one.
    """
    if isinstance(core, list | tuple):
        for part in core:
            _refuse_python_patterns(part, where, engine)
    if not isinstance(core, dict):
        return
    engine = (core.get("config") or {}).get("regex_engine", engine)
    pattern = core.get("pattern") if core.get("type") == "str" else None
    if isinstance(pattern, re.Pattern) or (
        pattern is not None and core.get("regex_engine", engine) == "python-re"
    ):
        text = getattr(pattern, "pattern", pattern)
        raise UserError(
            f"{where}: the pattern {text!r} would be searched by Python's `re`, which cannot be"
            " stopped when it takes too long. Give the pattern as text, without"
            " regex_engine='python-re'. If it needs look-around, write"
            f" Field(json_schema_extra={{'pattern': {text!r}}})"
        )
    for key, part in core.items():
        if key not in ("metadata", "serialization"):
            _refuse_python_patterns(part, where, engine)


class _SchemaGenerator(GenerateJsonSchema):
    """A default that JSON cannot hold is left out of the schema, in silence."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012


def _evaluated(function: Any, names: Collection[str]) -> dict[str, Any]:
    """The annotations of these parameters, evaluated. Others may name what is not there."""
    function = inspect.unwrap(function)
    annotations = {k: v for k, v in function.__annotations__.items() if k in names}
    holder = types.SimpleNamespace(__annotations__=annotations)
    return typing.get_type_hints(holder, function.__globals__, include_extras=True)


def _described(annotation: Any) -> bool:
    """Whether an `Annotated[..., Field(description=...)]` already says what it is."""
    if typing.get_origin(annotation) is not Annotated:
        return False
    return any(isinstance(m, FieldInfo) and m.description for m in annotation.__metadata__)


def _clean(schema: Any, defs: Mapping[str, Any], within: tuple[str, ...], where: str) -> Any:
    """The schema with `$defs` inlined, `title` and `discriminator` dropped, and objects closed."""
    if isinstance(schema, list):
        return [_clean(s, defs, within, where) for s in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        ref = schema["$ref"].removeprefix("#/$defs/")
        if ref in within:
            raise UserError(
                f"{where}: the type {ref!r} contains itself, and chat templates print schemas"
                " without references. Take text, or a fixed depth."
            )
        beside = {k: v for k, v in schema.items() if k != "$ref"}
        return _clean({**defs[ref], **beside}, defs, (*within, ref), where)
    clean: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("title", "$defs", "discriminator"):
            continue
        if key in DATA_KEYWORDS:
            clean[key] = value
        elif key in NAMED_KEYWORDS:
            clean[key] = {n: _clean(s, defs, within, where) for n, s in value.items()}
        else:
            clean[key] = _clean(value, defs, within, where)
    if "properties" in clean:
        clean.setdefault("additionalProperties", False)
    return clean


def _usage(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    parts = []
    for parameter, described in schema.get("properties", {}).items():
        default = ""
        if parameter not in required:
            default = f" = {orjson.dumps(described.get('default')).decode()}"
        parts.append(f"{parameter}: {_type(described)}{default}")
    return shorten(f"{name}({', '.join(parts)})", 160)


def _type(schema: Any) -> str:
    if "enum" in schema:
        return "|".join(orjson.dumps(v).decode() for v in schema["enum"])
    if "anyOf" in schema:
        return "|".join(_type(s) for s in schema["anyOf"])
    return str(schema.get("type", "any"))


# -- what agentrl gives ---------------------------------------------------------------------------

TO_CALLS = ("state", "sample", "messages", "sandbox")
TO_CONSTRUCTORS = ("state", "sample", "sandbox")

_SEQUENCES = {tuple, list, abc.Sequence, abc.Collection, abc.Iterable}


def injected(
    function: Callable[..., Any],
    names: Collection[str] = TO_CALLS,
    models_own: Collection[str] = (),
) -> tuple[str, ...]:
    """Which of these names a function, or a class's constructor, asks for.

    Args:
        function: as it is written.
        names: what there is to be had.
        models_own: names that a schema written by hand offers the model.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a constructor written in C, with no signature
        return ()
    return tuple(
        name
        for name in names
        if name in parameters
        and name not in models_own
        and parameters[name].kind in KEYWORD
        and _fits(name, _annotation(function, name))
    )


def _annotation(function: Callable[..., Any], name: str) -> Any:
    """A parameter's annotation; Any where it has none, or one that cannot be evaluated."""
    code = function.__init__ if isinstance(function, type) else function
    try:
        return _evaluated(code, {name}).get(name, Any)
    except (NameError, TypeError, SyntaxError, AttributeError):
        # Imported for type checkers only: the model could not be shown it either.
        return Any


def _fits(name: str, annotation: Any) -> bool:
    """Whether what stands under this name may be what agentrl gives under it."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _fits(name, typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return any(_fits(name, choice) for choice in typing.get_args(annotation))
    kind = origin or annotation
    if kind is Any or kind is object:
        return True
    if name == "state":
        return kind in (dict, abc.Mapping, abc.MutableMapping) or is_typeddict(kind)
    if name == "messages":
        items = [a for a in typing.get_args(annotation) if a is not ...]
        return kind in _SEQUENCES and all(i in (Message, Any) for i in items)
    return kind is (Sample if name == "sample" else Sandbox)
