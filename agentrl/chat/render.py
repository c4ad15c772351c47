"""Running a chat template, and cutting what it writes into its own text and the contents.

A chat template is a Jinja program over whole conversations. What it puts around a message is found
by giving it marks for contents and looking where they come out; what it does to contents (trims
them, writes them as JSON), by giving it contents that would show it.

A template also writes the schemas of tools into the prompt: names, descriptions, enum values. These
strings may come from others (an MCP server), and `<|im_end|>` in a description would end the turn.
They cannot simply be cut out as the contents of messages are: templates branch on types and names,
and show a name again among the required ones. So the prompt is rendered a second time with inert
strings. If both have the same control tokens, no string made one, not even one that begins in the
template's own text and ends in the string. Otherwise the strings at fault are marked, and are
encoded as plain text (`guard_schemas`).

A template takes any variable and says nothing of those that it never reads, so a misspelt name
would leave it as it is (`check_variables`).
"""

from __future__ import annotations

import json
import re
import secrets
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, UndefinedError, meta, nodes
from jinja2.exceptions import TemplateError as RaisedByTemplate

from agentrl.chat.encoding import Encoder
from agentrl.errors import ConfigError, TemplateError
from agentrl.registry import did_you_mean
from agentrl.trajectory import token_array

Schemas = Sequence[Mapping[str, Any]]
TemplateMessage = Mapping[str, Any]
"""A message as templates see it: `{"role": ..., "content": ..., ...}`."""
Write = Callable[[str], str]

SALT = secrets.token_hex(8)
"""Random, so that no text of a row, a tool or a user can be taken for a mark."""
_MARKED = re.compile(rf"zq{SALT}from(\d*)qz(.*?)zq{SALT}to\1qz", re.DOTALL)

WRITERS: tuple[Write, ...] = (
    str,
    str.strip,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text.strip(), ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
    str.rstrip,
    str.lstrip,
)
"""The changes that templates make to a content; the most frequent first."""


class Renderer:
    """A tokenizer's chat template, with the run's further variables."""

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any]):
        self._tokenizer = tokenizer
        self.variables = dict(variables)

    def __call__(
        self,
        messages: Sequence[TemplateMessage],
        schemas: Schemas = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as text; with `add_generation_prompt`, up to where the assistant speaks next.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        tools = list(schemas) or self._no_tools(messages)
        try:
            return self._render(messages, tools, add_generation_prompt)
        # Templates raise of their own, and fail in every way a program can.
        except Exception as e:
            if tools is None:  # a template for tools alone takes an empty list of them
                with suppress(Exception):
                    return self._render(messages, [], add_generation_prompt)
            if isinstance(e, UndefinedError) and (why := self._missing(tools, str(e))):
                raise TemplateError(why) from e
            roles = ", ".join(str(m["role"]) for m in messages)
            # Of exactly this class is what a template raises by itself (`raise_exception`).
            why = f'the template raised: "{e}"' if type(e) is RaisedByTemplate else str(e)
            raise TemplateError(f"the chat template fails on the roles ({roles}): {why}") from e

    def attempt(
        self,
        messages: Sequence[TemplateMessage],
        schemas: Schemas = (),
        add_generation_prompt: bool = True,
    ) -> str | None:
        """Return the conversation as text, or None if the template refuses it."""
        with suppress(TemplateError):
            return self(messages, schemas, add_generation_prompt)

    def _no_tools(self, messages: Sequence[TemplateMessage]) -> list[Any] | None:
        """Return `[]` if the tokenizer's template for tools is needed without tools, else None.

        Of a tokenizer's several templates, only that one writes calls and their results.
        """
        named = isinstance(self._tokenizer.chat_template, Mapping)
        calls = any(m["role"] == "tool" or m.get("tool_calls") for m in messages)
        return [] if named and calls else None

    def _missing(self, tools: list[Any] | None, error: str) -> str:
        """Return what to do if a template fails because variables have no value, or ""."""
        if not error.endswith(" is undefined"):  # an attribute: reading the template takes long
            return ""
        template = self._tokenizer.get_chat_template(tools=tools)
        missing, reads_tools = missing_variables(template, self.variables)
        if not any(error == f"{name!r} is undefined" for name in missing):
            return ""
        names = ", ".join(map(repr, missing))
        tools_as_text = (
            "" if reads_tools else " It does not read `tools`: a variable must hold them as text."
        )
        return (
            f"the chat template needs values for the variables {names}.{tools_as_text} Set them in"
            " model.template_kwargs (the same values for all rows), or use a model whose template"
            " does not need them."
        )

    def _render(
        self,
        messages: Sequence[TemplateMessage],
        tools: list[Any] | None,
        add_generation_prompt: bool,
    ) -> str:
        return self._tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self.variables,
        )


def content_mark(i: int) -> str:
    """A content that can be found again, whatever is done to it."""
    return f"zq{SALT}{i}content{i}qz"


def _telling(i: int) -> str:
    """A content that shows what is done to it."""
    return f' \n\t zq{SALT}{i}"telling"\\ é😀 <a>&\' {{{{ x }}}}{i}qz \n\n'


def markers(index: int | None = None) -> tuple[str, str]:
    """Return what stands before and behind a text that others wrote, to find it again.

    Args:
        index: of the message whose content it is; None: it is a string of a tool's schema.
    """
    number = "" if index is None else index
    return f"zq{SALT}from{number}qz", f"zq{SALT}to{number}qz"


def add_markers(text: str, index: int | None = None) -> str:
    """Return a text between its `markers`."""
    begin, end = markers(index)
    return begin + text + end


def _split_core(text: str) -> tuple[str, str, str]:
    """Split a text into white space, the rest, and white space. White space alone is the rest."""
    core = text.strip() or text
    start = text.index(core)
    return text[:start], core, text[start + len(core) :]


def mark_core(text: str, index: int | None = None) -> str:
    """Return a text with markers around all but the white space at its ends: templates trim it."""
    before, core, after = _split_core(text)
    return before + add_markers(core, index) + after


def remove_markers(text: str) -> str:
    """Return a text without the marks of `add_markers`."""
    return _MARKED.sub(lambda found: found[2], text)


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A text that others wrote, as it stands in what the template writes."""

    text: str
    index: int | None
    """Of the message whose content it is; None: it is a string of a tool's schema."""


def split_at_markers(text: str) -> Iterator[str | MarkedText]:
    """Yield the template's own parts of a text, and between them what `add_markers` has marked."""
    position = 0
    for found in _MARKED.finditer(text):
        yield text[position : found.start()]
        yield MarkedText(found[2], int(found[1]) if found[1] else None)
        position = found.end()
    yield text[position:]


@dataclass(frozen=True, slots=True)
class ContentSlot:
    """Where the content of a message stands, and how the template writes it."""

    index: int
    write: Write


@dataclass(frozen=True, slots=True)
class TemplateParts:
    """What a template puts around contents: ids, and between them regions of text.

    A region reaches from one control token to the next and is encoded whole, as the tokenizer
    itself would: the contents' words may run into the template's.
    """

    parts: tuple[array[int] | tuple[str | ContentSlot | MarkedText, ...], ...]

    def fill(
        self,
        contents: Sequence[str],
        encode: Callable[[str, Sequence[int | None]], array[int]],
    ) -> array[int]:
        """The ids with these contents.

        Args:
            contents: by the slots' indices.
            encode: a region's text, and which contents are in it, as ids; None among these stands
                for a string of a tool's schema.
        """
        ids = token_array()
        for part in self.parts:
            if isinstance(part, array):
                ids.extend(part)
                continue
            text: list[str] = []
            inside: list[int | None] = []
            for piece in part:
                if isinstance(piece, str):
                    text.append(piece)
                    continue
                enclosed = isinstance(piece, MarkedText)
                text.append(piece.text if enclosed else piece.write(contents[piece.index]))
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


def split_rendering(
    render: Callable[[Sequence[str]], str], roles: Sequence[str], shown: str = ""
) -> tuple[list[str], list[ContentSlot]]:
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
    marks = [content_mark(i) for i in range(len(roles))]
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
        for write in WRITERS:
            written = write(_telling(i)) + after
            if telling.startswith(written, position):
                slots.append(ContentSlot(i, write))
                position += len(written)
                break
        else:
            raise TemplateError(
                f"the chat template changes the content of a {roles[i]} message: of"
                f" {_telling(i)!r} it makes {telling[position : position + 60]!r}"
            )
    return texts, slots


def find_content(render: Callable[[str], str], text: str, content: str) -> tuple[int, int] | None:
    """Find where a template writes a content, if the template may look at what it holds.

    Marks around the content would change what the template does if it looks at the content's
    beginning or end: then there is one mark, at the other side.

    Args:
        render: the conversation with this content instead.
        text: the conversation with the content itself.
        content: of one message.

    Returns:
        The content's first character in `text` and the one behind its last; None if the template
        writes another conversation whatever is marked, or the content not at all.
    """
    begin, end = markers(0)
    before, core, after = _split_core(content)
    shown = render(mark_core(content, 0))
    if shown.count(begin) == shown.count(end) == 1:
        head, _, rest = shown.partition(begin)
        middle, _, tail = rest.partition(end)
        start, stop = len(head), len(text) - len(tail)
        # The white space that was beside a word which the template took out may be gone.
        same = text[start:stop].split() == middle.split()
        if same and start <= stop and text.startswith(head) and text.endswith(tail):
            return start, stop
    for first, last in ((begin, ""), ("", end)):
        shown = render(before + first + core + last + after)
        head, mark, tail = shown.partition(first or last)
        if not mark or head + tail != text:
            continue
        for write in WRITERS:
            written = write(core)
            start = len(head) if first else len(head) - len(written)
            if written and start >= 0 and text.startswith(written, start):
                return start, start + len(written)
    return None


def encode_parts(
    encoder: Encoder, texts: Sequence[str], slots: Sequence[ContentSlot]
) -> TemplateParts:
    """Encode what does not change, and leave the regions that do.

    Args:
        encoder: the tokenizer's.
        texts: what the template writes before, between and after the slots. What `add_markers` has
            marked in them is never a control token, nor part of one.
        slots: one between each two texts.
    """
    parts: list[array[int] | tuple[str | ContentSlot | MarkedText, ...]] = []
    region: list[str | ContentSlot | MarkedText] = []

    def add(ids: array[int]) -> None:
        if parts and isinstance(parts[-1], array):
            parts[-1] = parts[-1] + ids
        else:
            parts.append(ids)

    def close() -> None:
        constant = [p.text if isinstance(p, MarkedText) else p for p in region if _constant(p)]
        if len(constant) < len(region):
            parts.append(tuple(region))
        elif text := "".join(map(str, constant)):
            add(encoder.encode_plain(text))  # the template's control tokens stand between regions
        region.clear()

    for i, text in enumerate(texts):
        for piece in split_at_markers(text):
            if isinstance(piece, MarkedText):
                region.append(piece)
                continue
            before, ids, after = encoder.split(piece)
            region += [before] * bool(before)
            if ids:
                close()
                add(ids)
                region += [after] * bool(after)
        if i < len(slots):
            region.append(slots[i])
    close()
    return TemplateParts(tuple(parts))


def _constant(piece: str | ContentSlot | MarkedText) -> bool:
    """Return whether a piece is the same text, encoded in the same way, in every conversation."""
    return isinstance(piece, str) or (isinstance(piece, MarkedText) and piece.index is None)


# -- schemas of tools ------------------------------------------------------------------------------

_PRIVATE, _LAST = 0xE000, "\x01"
"""Characters that stand in no control token: private ones, and one that sorts before all others."""

_KEYWORDS = frozenset(
    [
        *("function", "name", "description", "parameters", "strict", "return", "type", "title"),
        *("string", "integer", "number", "boolean", "object", "array", "null", "nullable"),
        *("properties", "required", "additionalProperties", "patternProperties", "items"),
        *("prefixItems", "enum", "const", "default", "examples", "format", "pattern"),
        *("anyOf", "allOf", "oneOf", "not", "$ref", "$defs", "definitions", "uniqueItems"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minLength", "maxLength", "minItems", "maxItems", "response"),
        *("STRING", "INTEGER", "NUMBER", "BOOLEAN", "OBJECT", "ARRAY", "NULL"),
    ]
)
"""Words of JSON Schema and of OpenAI's tool format: templates branch on them."""


def guard_schemas(
    encoder: Encoder, render: Callable[[Schemas], str], schemas: Schemas
) -> tuple[Schemas, int]:
    """Mark the strings of schemas that a template would turn into control tokens.

    Args:
        encoder: the tokenizer's.
        render: a prompt with these schemas.
        schemas: of the tools.

    Returns:
        The schemas, in which `add_markers` marks the strings at fault; and how many control tokens
        these spell.

    Raises:
        TemplateError: the template writes such a string in another way once it is marked.
    """
    text = render(schemas)
    tokens = encoder.control_tokens_in(text)
    free = sorted(set(strings(schemas)) - _KEYWORDS)
    inert = {s: _inert(encoder, s) for s in free}
    safe = encoder.control_tokens_in(render(_replaced(schemas, inert)))
    if tokens == safe:
        return schemas, 0

    def at_fault(some: Sequence[str]) -> list[str]:
        changed = render(_replaced(schemas, {s: inert[s] for s in some}))
        if encoder.control_tokens_in(changed) == tokens:
            return []
        if len(some) == 1:
            return list(some)
        middle = len(some) // 2
        return at_fault(some[:middle]) + at_fault(some[middle:])

    def with_marks(bad: Sequence[str]) -> Schemas | None:
        """The schemas with these strings marked, or None if that does not do."""
        marked = _replaced(schemas, {s: mark_core(s) for s in bad})
        shown = render(marked)
        parts = (p for p in split_at_markers(shown) if isinstance(p, str))
        own = [token for part in parts for token in encoder.control_tokens_in(part)]
        return marked if remove_markers(shown) == text and own == safe else None

    # Most of the strings at fault spell a token by themselves: the search is for the others alone.
    bad = [s for s in free if encoder.control_tokens_in(s)]
    marked = with_marks(bad)
    if marked is None:
        bad += at_fault([s for s in free if s not in bad])
        marked = with_marks(bad)
    if marked is None:
        shortened = ", ".join(repr(s if len(s) <= 60 else s[:57] + "...") for s in bad[:3])
        raise TemplateError(
            "strings of the tool schemas contain control tokens, and the chat template writes them"
            f" in a way that agentrl cannot encode as plain text: {shortened}. Change these names"
            " or descriptions."
        )
    return marked, max(len(tokens) - len(safe), 1)


def _inert(encoder: Encoder, text: str) -> str:
    """Return a text of the same shape that is no part of a control token beside any other text.

    It holds no character that begins or ends one, its last is in none, and it sorts as before.
    """
    private = {ord(c): _PRIVATE + i for i, c in enumerate(encoder.ends)}
    return text.translate(private) + _LAST if text else text


def strings(node: Any) -> Iterator[str]:
    """Yield every string of a JSON value, its keys included."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield key
            yield from strings(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from strings(value)


def _replaced(node: Any, by: Mapping[str, str]) -> Any:
    """Return a JSON value with other strings, its keys included."""
    if isinstance(node, str):
        return by.get(node, node)
    if isinstance(node, Mapping):
        return {by.get(key, key): _replaced(value, by) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_replaced(value, by) for value in node]
    return node


# -- variables -------------------------------------------------------------------------------------

# Transformers has tags of its own for what the assistant says; they read nothing.
_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}
_GIVEN |= {"raise_exception", "strftime_now"}
"""Variables that transformers sets, besides the special tokens (`bos_token`)."""


def check_variables(template: str, names: Iterable[str]) -> None:
    """Refuse names that a chat template never reads.

    Args:
        template: its text.
        names: of the variables that it is to be given.

    Raises:
        ConfigError: it does not read one of them; with those that it does.
    """
    names = list(names)
    if not names:
        return
    program = _parse(template)
    if program is None:
        return
    read = meta.find_undeclared_variables(program)
    if unread := [name for name in names if name not in read]:
        known = sorted(n for n in read - _own(program) - _GIVEN if not n.endswith("_token"))
        wrong = ", ".join(f"{n!r}.{did_you_mean(n, known)}".rstrip(".") for n in unread)
        stop = "" if wrong.endswith("?") else "."
        raise ConfigError(
            f"model.template_kwargs: the chat template never reads {wrong}{stop} It reads:"
            f" {', '.join(known) or 'no variables but its own'}"
        )


def missing_variables(template: str, variables: Iterable[str]) -> tuple[list[str], bool]:
    """Return the variables that a chat template needs and that have no value.

    A variable that the template tests with `is defined`, or gives a default, is not needed.

    Args:
        template: its text.
        variables: the names of those that have one.

    Returns:
        Their names, and whether the template reads `tools`.
    """
    program = _parse(template)
    if program is None:
        return [], True
    read = meta.find_undeclared_variables(program)
    needed = read - _own(program) - _optional(program) - _GIVEN - set(variables)
    return sorted(name for name in needed if not name.endswith("_token")), "tools" in read


def _parse(template: str) -> nodes.Template | None:
    """Return a template's program; None if it has a fault, which its first use reports."""
    try:
        return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
            _GENERATION.sub("", template)
        )
    except TemplateSyntaxError:  # or it has an extension's tags
        return None


def _own(program: nodes.Template) -> set[str]:
    """What the template sets itself, in one branch or another, without asking for a value."""
    names = list(program.find_all(nodes.Name))
    kept = {name.name for name in names if name.ctx == "store"} - _optional(program)
    return kept | {name.name for name in names if name.ctx == "param"}


def _optional(program: nodes.Template) -> set[str]:
    """Return the variables that the template tests with `is defined`, or gives a default."""
    tests = [t for t in program.find_all(nodes.Test) if t.name in ("defined", "undefined")]
    filters = [f for f in program.find_all(nodes.Filter) if f.name in ("default", "d")]
    return {x.node.name for x in (*tests, *filters) if isinstance(x.node, nodes.Name)}
