"""The images of a row: the column `images`, and their places in the messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentrl.images import Image, ImageError
from agentrl.plural import plural

PLACE_IN_TEXT = "<image>"
"""The place of an image in the texts of rows with the column `images`, as in verl's rows."""

Wrong = Callable[[str, str], None]
"""Adds a mistake in a field."""


class RowImages:
    """Puts the images of a row into its messages."""

    def __init__(self, column: Any, folder: Path | None, wrong: Wrong):
        """Read the column.

        Args:
            column: the value of `images`; None if the row has none: `<image>` is text then.
            folder: the folder of the data file, in which relative paths begin.
            wrong: gets the mistakes.
        """
        self._folder = folder
        self._wrong = wrong
        self._has_column = column is not None
        values = column if isinstance(column, list | tuple) else [column] * self._has_column
        self._images = [self._read(f"images[{i}]", value) for i, value in enumerate(values)]
        self._places = 0

    def split(self, field: str, message: dict[str, Any]) -> list[str | Image] | None:
        """Return the texts and images of a message of the row; None if it has no image.

        Args:
            field: the message in the row, for mistakes.
            message: the message, as the row has it.
        """
        content = message.get("content")
        if isinstance(content, str) and self._has_column and message.get("role") != "assistant":
            first, *texts = content.split(PLACE_IN_TEXT)
            parts = [first, *(part for text in texts for part in (self._next(), text))]
            return [p for p in parts if p] if texts else None
        if not isinstance(content, list) or not any(map(_is_image_part, content)):
            return None
        if is_answer := message.get("role") == "assistant":
            self._wrong(field, "an assistant message has images; the policy writes text alone")
        parts = self._parts(field, content)
        return [part for part in parts if not is_answer or isinstance(part, str)]

    def check(self) -> None:
        """Add a mistake if there are more or fewer images than places."""
        if self._places != len(self._images):
            self._wrong(
                "images",
                f"the messages have {plural(self._places, 'place')} of images, but the column has"
                f" {plural(len(self._images), 'image')}. Write {PLACE_IN_TEXT}, or a part"
                ' {"type": "image"}, once for each image',
            )

    def _parts(self, field: str, content: list[Any]) -> Iterator[str | Image]:
        for i, part in enumerate(content):
            match {k: v for k, v in part.items() if v is not None} if isinstance(part, dict) else 0:
                case {"type": "text", "text": str(text), **others} if not others:
                    yield text
                case {"type": "image", **values} if len(values) <= 1:
                    found = self._next() if not values else self._read(field, values)
                    yield found or ""
                case {"type": "image_url", "image_url": {"url": url}}:
                    yield self._read(f"{field}.content[{i}]", url) or ""
                case _:
                    self._wrong(field, f"a part is neither text nor image: {part!r:.60}")

    def _next(self) -> Image | str:
        i, self._places = self._places, self._places + 1
        return (self._images[i] if i < len(self._images) else None) or ""

    def _read(self, field: str, value: Any) -> Image | None:
        try:
            return Image.of(value, self._folder)
        except ImageError as e:
            self._wrong(field, str(e))
        return None


def raise_wrong(field: str, what: str) -> None:
    """Raise `ValueError` for a mistake."""
    raise ValueError(f"{field}: {what}")


def _is_image_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")
