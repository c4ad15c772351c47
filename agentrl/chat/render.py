"""Run a chat template, and split the rendered text into the template's text and the contents.

A chat template is a Jinja program over whole conversations. To see what it writes around a message,
we render placeholders as contents and search for them in the result. To see how a template changes
contents (it may trim them, or write them as JSON), we render contents that reveal each change.

A template also writes the schemas of tools into the prompt: names, descriptions, enum values. These
strings may be untrusted (an MCP server), and `<|im_end|>` in a description would end the turn. They
cannot be replaced by placeholders, because templates branch on types and names, and write a name
again in the list of required parameters. So the prompt is rendered a second time with harmless
strings. If both results have the same control tokens, no string forms a control token, not even one
that begins in the template's text and ends in the string. Otherwise the strings that form
control tokens are marked, and are encoded as plain text (`guard_schemas`).

A template accepts any variable and ignores those that it never reads, so a misspelt name would have
no effect (`check_variables`).
"""

from __future__ import annotations

import json
import re
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, UndefinedError, meta, nodes
from jinja2.exceptions import TemplateError as RaisedByTemplate

from agentrl.chat.encoding import Encoder
from agentrl.errors import ConfigError, TemplateError
from agentrl.registry import did_you_mean
from agentrl.trajectory import token_array

Schemas = Sequence[Mapping[str, Any]]
MessageDict = Mapping[str, Any]
"""A message in the form that templates read: `{"role": ..., "content": ..., ...}`."""
Writer = Callable[[str], str]

SALT = secrets.token_hex(8)
"""Random, so that no text of a row, a tool or a user can equal a placeholder."""
_CONTENT_MARK = re.compile(rf"zq{SALT}(\d+)content\1qz")
_MARKED_TEXT = re.compile(rf"zq{SALT}from(\d*)qz(.*?)zq{SALT}to\1qz", re.DOTALL)

WRITERS: tuple[Writer, ...] = (
    str,
    str.strip,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text.strip(), ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
    str.rstrip,
    str.lstrip,
)
"""The changes that templates make to a content, the most frequent first."""


class Renderer:
    """Renders conversations with a tokenizer's chat template and the run's template variables."""

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any]):
        self._tokenizer = tokenizer
        self.variables = dict(variables)

    def __call__(
        self, messages: Sequence[MessageDict], schemas: Schemas = (), as_prompt: bool = True
    ) -> str:
        """Return a conversation as text, by default with the header of the next assistant turn.

        Raises:
            TemplateError: if the template refuses the conversation.
        """
        tools = list(schemas) or self._default_tools(messages)
        apply = partial(self._tokenizer.apply_chat_template, list(messages), **self.variables)
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": as_prompt}
        try:
            return apply(tools=tools, **options)
        # A template is a program, so it can raise any exception.
        except Exception as e:
            if tools is None:  # a template for tools may require a list
                with suppress(Exception):
                    return apply(tools=[], **options)
            roles = ", ".join(str(m["role"]) for m in messages)
            # `raise_exception` in a template raises exactly this class.
            why = f'the template raised: "{e}"' if type(e) is RaisedByTemplate else str(e)
            if isinstance(e, UndefinedError) and why.endswith(" is undefined"):
                why += (
                    ". If it needs this variable, set it in model.template_kwargs (the same value"
                    " for all rows), or use a model whose template does not need it"
                )
            raise TemplateError(f"the chat template fails on the roles ({roles}): {why}") from e

    def attempt(
        self, messages: Sequence[MessageDict], schemas: Schemas = (), as_prompt: bool = True
    ) -> str | None:
        """Return the conversation as text, or None if the template refuses it."""
        with suppress(TemplateError):
            return self(messages, schemas, as_prompt)

    def _default_tools(self, messages: Sequence[MessageDict]) -> list[Any] | None:
        """Return the argument `tools` for a conversation without tools: `[]` or None.

        If a tokenizer has several templates, only the one for tools writes calls and results. `[]`
        selects that template.
        """
        has_named_templates = isinstance(self._tokenizer.chat_template, Mapping)
        has_calls = any(m["role"] == "tool" or m.get("tool_calls") for m in messages)
        return [] if has_named_templates and has_calls else None


def content_mark(i: int) -> str:
    """Return a placeholder for the content of message i. Templates do not change it."""
    return f"zq{SALT}{i}content{i}qz"


def _probe_content(i: int) -> str:
    """Return a placeholder that reveals how a template changes the content of message i."""
    return f' \n\t zq{SALT}{i}"probed"\\ é😀 <a>&\' {{{{ x }}}}{i}qz \n\n'


def markers(index: int | None = None) -> tuple[str, str]:
    """Return the markers before and after an untrusted text.

    Args:
        index: the index of the message with this content; None for a string of a tool's schema.
    """
    number = "" if index is None else index
    return f"zq{SALT}from{number}qz", f"zq{SALT}to{number}qz"


def add_markers(text: str, index: int | None = None) -> str:
    """Return a text between its `markers`."""
    begin, end = markers(index)
    return begin + text + end


def _split_core(text: str) -> tuple[str, str, str]:
    """Split a text into leading white space, the rest, and trailing white space.

    If a text is only white space, all of it is "the rest".
    """
    core = text.strip() or text
    start = text.index(core)
    return text[:start], core, text[start + len(core) :]


def mark_core(text: str, index: int | None = None) -> str:
    """Return a text with markers inside of its leading and trailing white space.

    Templates trim the white space at the ends of a content.
    """
    before, core, after = _split_core(text)
    return before + add_markers(core, index) + after


def remove_markers(text: str) -> str:
    """Return a text without the markers of `add_markers`."""
    return _MARKED_TEXT.sub(lambda match: match[2], text)


@dataclass(frozen=True, slots=True)
class MarkedText:
    """An untrusted text within a rendered text."""

    text: str
    index: int | None
    """The index of the message with this content; None for a string of a tool's schema."""


def split_at_markers(text: str) -> Iterator[str | MarkedText]:
    """Yield the parts of a rendered text in order: the template's texts and the marked texts."""
    position = 0
    for match in _MARKED_TEXT.finditer(text):
        yield text[position : match.start()]
        yield MarkedText(match[2], int(match[1]) if match[1] else None)
        position = match.end()
    yield text[position:]


@dataclass(frozen=True, slots=True)
class ContentSlot:
    """The place of a message's content in a template's text, and how the template writes it."""

    index: int
    write: Writer


@dataclass(frozen=True, slots=True)
class TemplateParts:
    """The text that a template writes around contents, as token ids and regions of text.

    A region is the text from one control token to the next. It is encoded as a whole, as the
    tokenizer would do it, because a word may begin in the template's text and end in a content.
    """

    parts: tuple[array[int] | tuple[str | ContentSlot | MarkedText, ...], ...]

    def fill(
        self, contents: Sequence[str], encode: Callable[[str, Sequence[int | None]], array[int]]
    ) -> array[int]:
        """Return the ids with these contents.

        Args:
            contents: the contents by the index of their slot.
            encode: returns the ids of a region from its text and the indices of the contents in it.
                The index None is a string of a tool's schema.
        """
        ids = token_array()
        for part in self.parts:
            if isinstance(part, array):
                ids.extend(part)
                continue
            text: list[str] = []
            indices: list[int | None] = []
            for piece in part:
                if isinstance(piece, str):
                    text.append(piece)
                    continue
                is_marked = isinstance(piece, MarkedText)
                text.append(piece.text if is_marked else piece.write(contents[piece.index]))
                indices.append(piece.index)
            ids.extend(encode("".join(text), indices))
        return ids

    @property
    def ids(self) -> set[int]:
        """Return the ids that do not depend on contents."""
        return {i for part in self.parts if isinstance(part, array) for i in part}

    @property
    def first(self) -> int:
        """Return the first id, or -1 if a region comes first."""
        head = self.parts[0] if self.parts else ()
        return head[0] if isinstance(head, array) and head else -1


def split_rendering(
    render: Callable[[Sequence[str]], str], roles: Sequence[str], before: str = ""
) -> tuple[list[str], list[ContentSlot]]:
    """Split a rendered conversation into the template's texts and the slots of contents.

    Args:
        render: renders the conversation with these contents.
        roles: the roles of the messages with these contents, for error messages.
        before: the roles of the messages before them, for error messages.

    Returns:
        The template's texts, and one slot between each two of them.

    Raises:
        TemplateError: if the template does not write a content exactly once, or changes it in an
            unknown way.
    """
    texts = _CONTENT_MARK.split(render([content_mark(i) for i in range(len(roles))]))
    order = [int(i) for i in texts[1::2]]
    texts, counts = texts[::2], Counter(order)
    for i, role in enumerate(roles):
        if counts[i] != 1:
            shows = f"shows a {role} message {counts[i]} times"
            if not counts[i]:
                shows = f"does not show a {role} message"
            raise TemplateError(
                f"the chat template {shows} in ({before}{', '.join(roles)}); agentrl needs each"
                " content exactly once."
            )
    probed = render([_probe_content(i) for i in range(len(roles))])
    slots, position = [], len(texts[0])
    for i, after in zip(order, texts[1:], strict=True):
        for write in WRITERS:
            written = write(_probe_content(i)) + after
            if probed.startswith(written, position):
                slots.append(ContentSlot(i, write))
                position += len(written)
                break
        else:
            raise TemplateError(
                f"the chat template changes the content of a {roles[i]} message in an unknown way:"
                f" it writes {_probe_content(i)!r} as {probed[position : position + 60]!r}"
            )
    return texts, slots


def find_content(render: Callable[[str], str], text: str, content: str) -> tuple[int, int] | None:
    """Return the position of a content in a rendered text, for a template that reads contents.

    A template may branch on the beginning or the end of a content. A marker on that side would
    change the result, so only the other side is marked then.

    Args:
        render: renders the conversation with another content.
        text: the conversation rendered with the content itself.
        content: the content of one message.

    Returns:
        Start and end (exclusive) of the content in `text`; None if every marker changes the
        conversation, or if the template does not write the content.
    """
    begin, end = markers(0)
    before, core, after = _split_core(content)
    marked = render(mark_core(content, 0))
    if marked.count(begin) == marked.count(end) == 1:
        head, _, rest = marked.partition(begin)
        middle, _, tail = rest.partition(end)
        start, stop = len(head), len(text) - len(tail)
        # If the template removes a word, it may also remove the white space next to it.
        has_same_words = text[start:stop].split() == middle.split()
        if has_same_words and start <= stop and text.startswith(head) and text.endswith(tail):
            return start, stop
    for first, last in ((begin, ""), ("", end)):
        marked = render(before + first + core + last + after)
        head, mark, tail = marked.partition(first or last)
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
    """Encode the template's texts, and keep the regions with slots as text.

    Args:
        encoder: the encoder of the tokenizer.
        texts: the template's texts before, between and after the slots. Their parts between the
            markers of `add_markers` are encoded as plain text.
        slots: one slot between each two texts.
    """
    parts: list[array[int] | tuple[str | ContentSlot | MarkedText, ...]] = []
    region: list[str | ContentSlot | MarkedText] = []

    def add(ids: array[int]) -> None:
        if parts and isinstance(parts[-1], array):
            parts[-1] = parts[-1] + ids
        else:
            parts.append(ids)

    def close() -> None:
        constant = [p.text if isinstance(p, MarkedText) else p for p in region if _is_constant(p)]
        if len(constant) < len(region):
            parts.append(tuple(region))
        elif text := "".join(map(str, constant)):
            add(encoder.encode_plain(text))  # a region contains no control token of the template
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


def _is_constant(piece: str | ContentSlot | MarkedText) -> bool:
    """Return whether a piece has the same text and encoding in every conversation."""
    return isinstance(piece, str) or (isinstance(piece, MarkedText) and piece.index is None)


# -- schemas of tools ------------------------------------------------------------------------------

_PRIVATE, _LAST = 0xE000, "\x01"
"""Characters that no control token contains: the first one for private use, and one that sorts
before all others."""

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
"""The words of JSON Schema and of OpenAI's tool format, on which templates branch."""


def guard_schemas(
    encoder: Encoder, render: Callable[[Schemas], str], schemas: Schemas
) -> tuple[Schemas, int]:
    """Mark the strings of schemas that would become control tokens in the rendered prompt.

    Args:
        encoder: the encoder of the tokenizer.
        render: renders a prompt with these schemas.
        schemas: the schemas of the tools.

    Returns:
        The schemas, with markers (`add_markers`) in the strings that form control tokens; and the
        number of control tokens in these strings.

    Raises:
        TemplateError: if the template writes such a string differently when it has markers.
    """
    text = render(schemas)
    tokens = encoder.control_tokens_in(text)
    untrusted = sorted(set(strings(schemas)) - _KEYWORDS)
    harmless = {s: _make_harmless(encoder, s) for s in untrusted}
    safe_tokens = encoder.control_tokens_in(render(_replace_strings(schemas, harmless)))
    if tokens == safe_tokens:
        return schemas, 0

    def find_offending(candidates: Sequence[str]) -> list[str]:
        rendered_subset = render(_replace_strings(schemas, {s: harmless[s] for s in candidates}))
        if encoder.control_tokens_in(rendered_subset) == tokens:
            return []
        if len(candidates) == 1:
            return list(candidates)
        middle = len(candidates) // 2
        return find_offending(candidates[:middle]) + find_offending(candidates[middle:])

    def mark_strings(offending: Sequence[str]) -> Schemas | None:
        """Return the schemas with these strings marked, or None if this changes the prompt."""
        marked = _replace_strings(schemas, {s: mark_core(s) for s in offending})
        rendered = render(marked)
        parts = (p for p in split_at_markers(rendered) if isinstance(p, str))
        own = [token for part in parts for token in encoder.control_tokens_in(part)]
        return marked if remove_markers(rendered) == text and own == safe_tokens else None

    # Most of these strings contain a whole control token. The others are found by bisection.
    offending = [s for s in untrusted if encoder.control_tokens_in(s)]
    marked = mark_strings(offending)
    if marked is None:
        offending += find_offending([s for s in untrusted if s not in offending])
        marked = mark_strings(offending)
    if marked is None:
        shortened = ", ".join(repr(s if len(s) <= 60 else s[:57] + "...") for s in offending[:3])
        raise TemplateError(
            "strings of the tool schemas contain control tokens, and the chat template writes them"
            f" in a way that agentrl cannot encode as plain text: {shortened}. Change these names"
            " or descriptions."
        )
    return marked, max(len(tokens) - len(safe_tokens), 1)


def _make_harmless(encoder: Encoder, text: str) -> str:
    """Return a replacement of a text such that no control token can contain a part of it.

    The replacement has no character that begins or ends a control token, and no control token
    contains its last character. It sorts like the text itself.
    """
    private = {ord(c): _PRIVATE + i for i, c in enumerate(encoder.ends)}
    return text.translate(private) + _LAST if text else text


def strings(node: Any) -> Iterator[str]:
    """Yield every string of a JSON value, including keys."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield key
            yield from strings(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from strings(value)


def _replace_strings(node: Any, by: Mapping[str, str]) -> Any:
    """Return a JSON value with some strings replaced, including keys."""
    if isinstance(node, str):
        return by.get(node, node)
    if isinstance(node, Mapping):
        return {by.get(key, key): _replace_strings(value, by) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_replace_strings(value, by) for value in node]
    return node


# -- variables -------------------------------------------------------------------------------------

# Transformers adds a Jinja tag for the assistant's text (`{% generation %}`); it reads no variable.
_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
_SET_BY_TRANSFORMERS = {"messages", "tools", "documents", "add_generation_prompt"}
_SET_BY_TRANSFORMERS |= {"raise_exception", "strftime_now"}
"""The variables that transformers sets, in addition to the special tokens (`bos_token`)."""


def check_variables(template: str, names: Iterable[str]) -> None:
    """Raise `ConfigError` if a chat template does not read one of these variables.

    Args:
        template: the source text of the template.
        names: the names of the variables.

    Raises:
        ConfigError: the message names these variables, and lists the variables that it reads.
    """
    names = list(names)
    if not names:
        return
    program = _parse(template)
    if program is None:
        return
    names_read = meta.find_undeclared_variables(program)
    if unread := [name for name in names if name not in names_read]:
        choices = sorted(
            n
            for n in names_read - _assigned_variables(program) - _SET_BY_TRANSFORMERS
            if not n.endswith("_token")
        )
        wrong = ", ".join(f"{n!r}.{did_you_mean(n, choices)}".rstrip(".") for n in unread)
        stop = "" if wrong.endswith("?") else "."
        raise ConfigError(
            f"model.template_kwargs: the chat template never reads {wrong}{stop} It reads:"
            f" {', '.join(choices) or 'no variables but its own'}"
        )


def _parse(template: str) -> nodes.Template | None:
    """Return the syntax tree of a template; None on a syntax error.

    The first rendering reports the syntax error.
    """
    try:
        return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
            _GENERATION.sub("", template)
        )
    except TemplateSyntaxError:  # also for the tags of an unknown extension
        return None


def _assigned_variables(program: nodes.Template) -> set[str]:
    """Return the variables that the template sets itself, in any branch.

    A variable that it tests with `is defined`, or gives a default, may also be set by the user.
    """
    names = list(program.find_all(nodes.Name))
    tests = [t for t in program.find_all(nodes.Test) if t.name in ("defined", "undefined")]
    filters = [f for f in program.find_all(nodes.Filter) if f.name in ("default", "d")]
    optional = {x.node.name for x in (*tests, *filters) if isinstance(x.node, nodes.Name)}
    assigned = {name.name for name in names if name.ctx == "store"} - optional
    return assigned | {name.name for name in names if name.ctx == "param"}
