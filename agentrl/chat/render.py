"""Running a chat template, and cutting what it writes into its own text and the contents.

A chat template is a Jinja program over whole conversations. What it puts around a message is found
by giving it marks for contents and looking where they come out; what it does to contents (trims
them, writes them as JSON), by giving it contents that would show it.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.chat.encoding import Encoder
from agentrl.errors import TemplateError
from agentrl.trajectory import token_array

Schemas = Sequence[Mapping[str, Any]]
Said = Mapping[str, Any]
"""A message as templates see it: `{"role": ..., "content": ..., ...}`."""
Write = Callable[[str], str]

_SALT = f"{random.randrange(1 << 32):08x}"
"""So that no text of a row can be taken for a mark."""

# What templates do to a content, the commonest first.
_WRITERS: tuple[Write, ...] = (
    str,
    str.strip,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text.strip(), ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
    str.rstrip,
    str.lstrip,
)


class Renderer:
    """A tokenizer's chat template, with the run's further variables."""

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any]):
        self._tokenizer = tokenizer
        self.variables = dict(variables)

    def __call__(self, messages: Sequence[Said], schemas: Schemas = (), ask: bool = True) -> str:
        """The conversation as text; with `ask`, up to where the assistant speaks next.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(schemas) or None,
                tokenize=False,
                add_generation_prompt=ask,
                **self.variables,
            )
        # Templates raise of their own, and fail in every way a program can.
        except Exception as e:
            roles = ", ".join(str(m["role"]) for m in messages)
            raise TemplateError(f"the chat template fails on the roles ({roles}): {e}") from e


def mark(i: int) -> str:
    """A content that can be found again, whatever is done to it."""
    return f"zq{_SALT}{i}content{i}qz"


def _telling(i: int) -> str:
    """A content that shows what is done to it."""
    return f' \n\t zq{_SALT}{i}"telling"\\ é😀 <a>&\' {{{{ x }}}}{i}qz \n\n'


@dataclass(frozen=True, slots=True)
class Slot:
    """Where the content of a message stands, and how the template writes it."""

    index: int
    write: Write


@dataclass(frozen=True, slots=True)
class Frame:
    """What a template puts around contents: ids, and between them regions of text.

    A region reaches from one control token to the next and is encoded whole, as the tokenizer
    itself would: the contents' words may run into the template's.
    """

    parts: tuple[array[int] | tuple[str | Slot, ...], ...]

    def fill(
        self, contents: Sequence[str], encode: Callable[[str, Sequence[int]], array[int]]
    ) -> array[int]:
        """The ids with these contents.

        Args:
            contents: by the slots' indices.
            encode: a region's text, and which contents are in it, as ids.
        """
        ids = token_array()
        for part in self.parts:
            if isinstance(part, array):
                ids.extend(part)
                continue
            text, inside = [], []
            for piece in part:
                if isinstance(piece, str):
                    text.append(piece)
                else:
                    text.append(piece.write(contents[piece.index]))
                    inside.append(piece.index)
            ids.extend(encode("".join(text), inside))
        return ids

    @property
    def ids(self) -> set[int]:
        """The ids that do not depend on contents."""
        return {i for part in self.parts if isinstance(part, array) for i in part}

    @property
    def first(self) -> int:
        """The first id, or -1 where a region stands first."""
        head = self.parts[0] if self.parts else ()
        return head[0] if isinstance(head, array) and head else -1


def cut(
    render: Callable[[Sequence[str]], str], roles: Sequence[str], shown: str = ""
) -> tuple[list[str], list[Slot]]:
    """What a template writes around some contents, and how it writes them.

    Args:
        render: the conversation with these contents.
        roles: of the messages whose contents they are, for messages to people.
        shown: what comes before, for messages to people.

    Returns:
        The template's own texts, and between each two of them a slot.

    Raises:
        TemplateError: a content is not shown exactly once, or changed in an unknown way.
    """
    marks = [mark(i) for i in range(len(roles))]
    text = render(marks)
    for m, role in zip(marks, roles, strict=True):
        if text.count(m) != 1:
            times = f"{text.count(m)} times" if m in text else "not at all"
            raise TemplateError(
                f"the chat template shows a {role} message {times} in ({shown}{', '.join(roles)});"
                " agentrl needs each content exactly once."
            )
    order = sorted(range(len(marks)), key=lambda i: text.index(marks[i]))
    texts: list[str] = []
    for i in order:
        before, _, text = text.partition(marks[i])
        texts.append(before)
    texts.append(text)
    telling = render([_telling(i) for i in range(len(roles))])
    slots, position = [], len(texts[0])
    for i, after in zip(order, texts[1:], strict=True):
        for write in _WRITERS:
            written = write(_telling(i)) + after
            if telling.startswith(written, position):
                slots.append(Slot(i, write))
                position += len(written)
                break
        else:
            raise TemplateError(
                f"the chat template changes the content of a {roles[i]} message: of"
                f" {_telling(i)!r} it makes {telling[position : position + 60]!r}"
            )
    return texts, slots


def frame_of(encoder: Encoder, texts: Sequence[str], slots: Sequence[Slot]) -> Frame:
    """Encode what does not change, and leave the regions that do."""
    parts: list[array[int] | tuple[str | Slot, ...]] = []
    region: list[str | Slot] = []

    def add(ids: array[int]) -> None:
        if parts and isinstance(parts[-1], array):
            parts[-1] = parts[-1] + ids
        else:
            parts.append(ids)

    def close() -> None:
        if any(isinstance(piece, Slot) for piece in region):
            parts.append(tuple(region))
        elif text := "".join(map(str, region)):
            add(encoder.literal(text))
        region.clear()

    for i, text in enumerate(texts):
        before, ids, after = encoder.split(text)
        region += [before] * bool(before)
        if ids:
            close()
            add(ids)
            region += [after] * bool(after)
        if i < len(slots):
            region.append(slots[i])
    close()
    return Frame(tuple(parts))
