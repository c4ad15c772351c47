"""The base of all config sections, and the declaration of keys."""

from __future__ import annotations

import re
from typing import Annotated, Any, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from agentrl.registry import suggest_door

_URL = re.compile(r"\s*(?!mcp\+)[A-Za-z][\w+.-]+:/")
"""A scheme of two letters or more: `C:/runs` is a path. `mcp+` begins the address of a server."""


def refuse_url(path: str) -> str:
    """Return a path.

    Raises:
        ValueError: it is a URL. `Path("s3://b/run")` would be the local folder `s3:/b/run`.
    """
    if _URL.match(path):
        raise ValueError(
            f"{path!r} is a URL, but only paths on this machine are supported. Mount the storage,"
            f" or copy the files, and name the local path.{suggest_door(path)}"
        )
    return path


LocalPath = Annotated[str, AfterValidator(refuse_url)]
"""The type of keys whose values are paths, or contain one."""


def key(default: Any, *, flag: str = "", allowed: str = "", **limits: float) -> Any:
    """Declare a key.

    Args:
        default: the default value.
        flag: the option of `agentrl train` that sets the key, or "".
        allowed: a description of the accepted values, if the type alone does not describe them.
        limits: `ge`, `gt`, `le`, `lt` of a number.
    """
    extra: dict[str, Any] = {"flag": flag, "allowed": allowed}
    return Field(default, json_schema_extra=extra, **limits)  # pyright: ignore


def types_in(annotation: Any) -> set[Any]:
    """Return the types that a key's annotation names, also within lists, mappings and unions."""
    return {annotation}.union(*map(types_in, get_args(annotation)))


def _has_bool(value: Any) -> bool:
    """Return whether a value is a boolean, or has one within lists and mappings."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, bool) or any(map(_has_bool, inner))


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, and values cannot be changed.

    The docstring below a key is its description in error messages and in docs/config.md.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _coerce(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse booleans for numbers, and accept a single text for a list of texts."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        types = types_in(annotation)
        if types & {int, float} and not types & {bool, Any} and _has_bool(value):
            raise ValueError
        is_item = isinstance(value, str) and not value.lstrip().startswith("[")
        return [value] if is_item and get_origin(annotation) is list else value
