"""Gemma 4 and FunctionGemma: calls in a special notation, with a tag before and after strings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from agentrl.chat.formats.scan import THINK_END, THINK_START, any_tag, read_calls
from agentrl.chat.formats.strict_json import MAX_DEPTH, invalid_call, is_valid_unicode, skip_space
from agentrl.trajectory import ToolCall

_HEAD = re.compile(r"\s*(?:call)?:([\w.\-]+)\s*(?={)")
# A key has no quotes, so it cannot contain delimiters. White space around it is ignored.
_KEY = re.compile(r'[^:,{}\[\]<>"]+')
_ATOM = re.compile(r"[0-9.eE+\-a-z]+|None")


@dataclass(frozen=True, slots=True)
class BracedCalls:
    """A parser of calls of the form `call:NAME{key:value,...}` between two tags.

    Calls in a thought do not count. A closing thought tag without an opening one ends a thought
    that the prompt began. A tag within a string of a call is text. A string cannot contain its
    quote. The word `call` is optional.

    Args:
        call: the tags around a call.
        quote: the tag before and after a string.
        thought: the tags around a thought.
    """

    call: tuple[str, str]
    quote: str
    thought: tuple[str, str] = (THINK_START, THINK_END)

    def __call__(self, text: str) -> list[ToolCall]:
        """Return the calls of one assistant turn."""
        return read_calls(text, self.call[:1], self.call[1], self._read, self.thought)

    def _read(self, text: str, start: int) -> tuple[list[ToolCall], int]:
        """Return the call whose opening tag is at `start`, and where to continue."""
        start += len(self.call[0])
        closing = self.call[1]
        head = _HEAD.match(text, start)
        name, error, error_position = "", "expected call:NAME{...}", start
        if head:
            name, parser = head[1], _ArgumentsParser(text, head.end(), self.quote, self.thought[1])
            try:
                arguments = parser.object()
                if not is_valid_unicode(text[start : parser.position]):
                    raise ValueError("invalid Unicode: lone surrogate")
                if text.startswith(closing, parser.position):
                    return [ToolCall(name, arguments)], parser.position + len(closing)
                error = f"unexpected text between the arguments and {closing}"
            except ValueError as e:
                error = str(e)
            error_position = (
                parser.position
            )  # a tag in a string that was read does not end the call
        tag = any_tag((*self.call, *self.thought)).search(text, error_position)
        stop = tag.start() if tag else len(text)
        is_closed = tag is not None and tag[0] == closing
        if not is_closed:
            error = f"missing {closing}"
        return [invalid_call(text[start:stop], error, name)], stop + is_closed * len(closing)


class _ArgumentsParser:
    """A recursive descent parser of one call's arguments. It reads each character once."""

    def __init__(self, text: str, position: int, quote: str, thought_end: str):
        self.text, self.position, self.depth = text, position, 0
        self.quote, self.thought_end = quote, thought_end

    def object(self) -> dict[str, Any]:
        """Parse `{key:value,...}`.

        Raises:
            ValueError: if the text is something else.
        """
        items: dict[str, Any] = {}
        for _ in self._items("{", "}"):
            key = self._key()
            self._expect(":")
            if key in items:
                raise ValueError(f"duplicate key {key!r}")
            items[key] = self._value()
        return items

    def _value(self) -> Any:
        text, position = self.text, self.position
        if text.startswith(self.quote, position):
            return self._string()
        if text.startswith("{", position):
            return self.object()
        if text.startswith("[", position):
            return [self._value() for _ in self._items("[", "]")]
        atom = _ATOM.match(text, position)
        if not atom:
            raise ValueError(f"missing value at {text[position : position + 20]!r}")
        self.position = atom.end()
        if atom[0] == "None":  # several templates write null like this
            return None
        try:  # null, true, false and numbers are written as in JSON
            value = orjson.loads(atom[0])
        except orjson.JSONDecodeError:
            raise ValueError(
                f"invalid value {atom[0][:40]!r}; a string must be between {self.quote} tags"
            ) from None
        if isinstance(value, float) and not set(atom[0]) & set(".eE"):
            raise ValueError(f"number out of range: {atom[0][:40]}")  # orjson would round it
        return value

    def _items(self, opening: str, closing: str) -> Iterator[None]:
        """Yield once for each item between brackets, at the start of the item."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        self._expect(opening)
        if not self.text.startswith(closing, self.position):
            while True:
                yield
                self._space()
                if not self.text.startswith(",", self.position):
                    break
                self._expect(",")
        self._expect(closing)
        self.depth -= 1

    def _key(self) -> str:
        if self.text.startswith(self.quote, self.position):
            return self._string()
        key = _KEY.match(self.text, self.position)
        if not key or not key[0].strip():
            raise ValueError(f"missing key at {self.text[self.position : self.position + 20]!r}")
        self.position = key.end()
        return key[0].strip()

    def _string(self) -> str:
        start = self.position + len(self.quote)
        end = self.text.find(self.quote, start)
        if end < 0:
            thought = self.text.find(self.thought_end, start)
            self.position = thought if thought >= 0 else len(self.text)
            raise ValueError(f"missing closing {self.quote} of a string")
        self.position = end + len(self.quote)
        return self.text[start:end]

    def _expect(self, character: str) -> None:
        """Skip one character and the white space around it."""
        self._space()
        if not self.text.startswith(character, self.position):
            text = self.text[self.position : self.position + 20]
            raise ValueError(f"{character!r} expected at {text!r}")
        self.position += len(character)
        self._space()

    def _space(self) -> None:
        self.position = skip_space(self.text, self.position)


parse_gemma = BracedCalls(
    ("<|tool_call>", "<tool_call|>"), quote='<|"|>', thought=("<|channel>", "<channel|>")
)
"""Gemma 4: `<|tool_call>call:calculator{expression:<|"|>3*4<|"|>,digits:2}<tool_call|>`."""

parse_functiongemma = BracedCalls(
    ("<start_function_call>", "<end_function_call>"), quote="<escape>"
)
"""FunctionGemma. Some templates write all values as strings (see `cast_arguments`).

    <start_function_call>call:calculator{expression:<escape>3*4<escape>,digits:2}<end_function_call>
"""
