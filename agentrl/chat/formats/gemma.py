"""Gemma 4 and FunctionGemma: calls in a notation of their own, strings between two same tags."""

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
# A key stands without quotes, and so without what delimits; space at its ends is not its own.
_KEY = re.compile(r'[^:,{}\[\]<>"]+')
_ATOM = re.compile(r"[0-9.eE+\-a-z]+|None")


@dataclass(frozen=True, slots=True)
class BracedCalls:
    """A parser of calls that are written `call:NAME{key:value,...}` between two tags.

    Calls between the tags around a thought are thoughts; the second of these tags alone ends a
    thought that the prompt began. A tag within a call's string is text. A string cannot hold its
    quote. The word `call` may be missing.

    Args:
        call: the tags around a call.
        quote: the tag that stands before and behind a string.
        thought: the tags around a thought.
    """

    call: tuple[str, str]
    quote: str
    thought: tuple[str, str] = (THINK_START, THINK_END)

    def __call__(self, text: str) -> list[ToolCall]:
        """Return the calls of one assistant turn."""
        return read_calls(text, self.call[:1], self.call[1], self._read, self.thought)

    def _read(self, text: str, start: int) -> tuple[list[ToolCall], int]:
        """Return the call whose opening tag stands at `start`, and where to go on."""
        start += len(self.call[0])
        closing = self.call[1]
        head = _HEAD.match(text, start)
        name, error, failed = "", "not call:NAME{...}", start
        if head:
            name, read = head[1], _Reader(text, head.end(), self.quote, self.thought[1])
            try:
                arguments = read.object()
                if not is_valid_unicode(text[start : read.position]):
                    raise ValueError("lone surrogate")
                if text.startswith(closing, read.position):
                    return [ToolCall(name, arguments)], read.position + len(closing)
                error = f"text between the arguments and {closing}"
            except ValueError as e:
                error = str(e)
            failed = read.position  # no tag in a string that was read ends the call
        tag = any_tag((*self.call, *self.thought)).search(text, failed)
        stop = tag.start() if tag else len(text)
        closed = tag is not None and tag[0] == closing
        if not closed:
            error = f"no {closing}"
        return [invalid_call(text[start:stop], error, name)], stop + closed * len(closing)


class _Reader:
    """A descent into one call's arguments: every character is looked at once."""

    def __init__(self, text: str, position: int, quote: str, thought_end: str):
        self.text, self.position, self.depth = text, position, 0
        self.quote, self.thought_end = quote, thought_end

    def object(self) -> dict[str, Any]:
        """`{key:value,...}`.

        Raises:
            ValueError: something else stands there.
        """
        items: dict[str, Any] = {}
        for _ in self._items("{", "}"):
            key = self._key()
            self._expect(":")
            if key in items:
                raise ValueError(f"{key!r} is given twice")
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
            raise ValueError(f"no value at {text[position : position + 20]!r}")
        self.position = atom.end()
        if atom[0] == "None":  # as several templates write null
            return None
        try:  # null, true, false and numbers are JSON's
            value = orjson.loads(atom[0])
        except orjson.JSONDecodeError:
            raise ValueError(
                f"{atom[0][:40]!r} is not a value; strings stand in {self.quote}"
            ) from None
        if isinstance(value, float) and not set(atom[0]) & set(".eE"):
            raise ValueError(f"number out of range: {atom[0][:40]}")  # it would come rounded
        return value

    def _items(self, opening: str, closing: str) -> Iterator[None]:
        """Once for each item between brackets, standing at the item."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
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
            raise ValueError(f"no key at {self.text[self.position : self.position + 20]!r}")
        self.position = key.end()
        return key[0].strip()

    def _string(self) -> str:
        start = self.position + len(self.quote)
        end = self.text.find(self.quote, start)
        if end < 0:
            thought = self.text.find(self.thought_end, start)
            self.position = thought if thought >= 0 else len(self.text)
            raise ValueError(f"a string without its closing {self.quote}")
        self.position = end + len(self.quote)
        return self.text[start:end]

    def _expect(self, what: str) -> None:
        """Pass one character and the space around it."""
        self._space()
        if not self.text.startswith(what, self.position):
            found = self.text[self.position : self.position + 20]
            raise ValueError(f"{what!r} expected at {found!r}")
        self.position += len(what)
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
"""FunctionGemma; some templates write all values as strings (`typed`).

    <start_function_call>call:calculator{expression:<escape>3*4<escape>,digits:2}<end_function_call>
"""
