"""What a section of the config is made of."""

from __future__ import annotations

from typing import Any, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator


def key(default: Any, *, flag: str = "", allowed: str = "", **limits: float) -> Any:
    """A key's default, the `train` flag that sets it, and what it takes: in words, or as limits."""
    extra: dict[str, Any] = {"flag": flag, "allowed": allowed}
    return Field(default, json_schema_extra=extra, **limits)  # pyright: ignore


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values never change.

    The docstring below a key is its description in messages and in docs/config.md.
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
    def _plain(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true for a number; take one text for a list of texts."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and annotation in (int, float):
            raise ValueError
        return [value] if isinstance(value, str) and get_origin(annotation) is list else value
