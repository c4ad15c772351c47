"""The base of all config sections, and the declaration of keys."""

from __future__ import annotations

from typing import Any, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator


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
        """Refuse a boolean for a number, and accept a single text for a list of texts."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and annotation in (int, float):
            raise ValueError
        return [value] if isinstance(value, str) and get_origin(annotation) is list else value
