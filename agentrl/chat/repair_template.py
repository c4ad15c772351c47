"""Find the smallest change of a chat template that makes it append-only.

A template changes earlier turns because of conditions such as `if loop.index0 >
ns.last_query_index` around a thought. So each condition of the template, and each operand of one,
is replaced by true and by false, first one at a time and then in pairs. A change is accepted if
prompts, single turns and the text after a turn stay exactly the same, and if every turn is rendered
in the same way when more messages follow, with its thought.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from difflib import unified_diff
from itertools import combinations, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from agentrl.chat.render import MessageDict, Renderer, Schemas
from agentrl.chat.thinking import PROBE_THOUGHT, thinking_turns
from agentrl.chat.turn_delta import PROBE_ARGUMENT, PROBE_TEXT, probe_turns
from agentrl.chat.verify_template import PROBE_TOOL, THINKING_VARIABLE, verify_tokenizer
from agentrl.errors import TemplateError

_SYSTEM: MessageDict = {"role": "system", "content": "Be brief."}
_USER: MessageDict = {"role": "user", "content": "How much is 3*4?"}
_CALLS = [("probe", "000000000")]
_TOOL: MessageDict = {"role": "tool", "content": "12", "name": "probe", "tool_call_id": "000000000"}
_TAG = re.compile(r"\{#.*?#\}|\{%[-+]?(.*?)[-+]?%\}|\{\{[-+]?(.*?)[-+]?\}\}", re.DOTALL)
_WORD = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|\w+|\S", re.DOTALL)


class Edit(NamedTuple):
    """A replacement text for the characters of a template from `start` to `end`."""

    start: int
    end: int
    text: str

    @property
    def size(self) -> tuple[bool, int]:
        """Return the sort key of edits: deletions first, then the number of changed characters."""
        return bool(self.text), self.end - self.start + len(self.text)


def repair_template(
    tokenizer: Any,
    end_ids: Sequence[int] = (),
    schemas: Schemas = (PROBE_TOOL,),
    seconds: float = 20.0,
) -> str | None:
    """Return the tokenizer's chat template with the smallest change that makes it append-only.

    Args:
        tokenizer: a fast transformers tokenizer with a chat template.
        end_ids: as for `ChatTemplate`.
        schemas: the schemas of the tools in prompts.
        seconds: the time limit of the search.

    Returns:
        The source of the changed template, or None if no small change works.
    """
    deadline = time.monotonic() + seconds
    supported_shapes = {
        v.shape for v in verify_tokenizer(tokenizer, end_ids, schemas) if v.status != "unsupported"
    }
    for changed in _candidates(tokenizer, schemas, deadline):
        try:
            verdicts = verify_tokenizer(_with_template(tokenizer, changed), end_ids, schemas)
        except TemplateError:
            continue
        if supported_shapes <= {v.shape for v in verdicts if v.status == "append-only"}:
            return changed
    return None


def template_diff(before: str, after: str) -> str:
    """Return the difference of two templates as a unified diff."""
    name = "chat_template.jinja"
    lines = unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
    )
    no_newline = "\n\\ No newline at end of file\n"
    return "".join(line if line.endswith("\n") else line + no_newline for line in lines)


def _with_template(tokenizer: Any, template: str) -> Any:
    changed = copy.copy(tokenizer)
    changed.chat_template = template
    return changed


def _candidates(tokenizer: Any, schemas: Schemas, deadline: float) -> Iterator[str]:
    """Yield the changed templates that pass the fast checks, the smallest change first."""
    source: str = tokenizer.chat_template
    renderings = _Renderings(tokenizer, schemas)
    harmless = []
    for edit in sorted(set(_edits(source)), key=lambda e: (e.size, e.start)):
        if time.monotonic() > deadline:
            return
        changed = _apply(source, [edit])
        if renderings.changes(changed) and renderings.keeps(changed):
            harmless.append(edit)
            if renderings.grows(changed):
                yield changed
    pairs = [(a, b) for a, b in combinations(sorted(harmless), 2) if a.end <= b.start]
    for pair in sorted(pairs, key=lambda pair: sum(e.size[1] for e in pair)):
        if time.monotonic() > deadline:
            return
        changed = _apply(source, pair)
        if renderings.keeps(changed) and renderings.grows(changed):
            yield changed


def _apply(source: str, changes: Sequence[Edit]) -> str:
    for edit in sorted(changes, reverse=True):
        source = source[: edit.start] + edit.text + source[edit.end :]
    return source


# -- what a template shows ------------------------------------------------------------------------


class _Renderings:
    """Rendered probe conversations, to compare changed templates with the original one."""

    def __init__(self, tokenizer: Any, schemas: Schemas):
        self._tokenizer = tokenizer
        self._schemas = schemas
        self._variables: list[dict[str, Any]] = [{}]
        if THINKING_VARIABLE in tokenizer.chat_template:
            self._variables += [{THINKING_VARIABLE: True}, {THINKING_VARIABLE: False}]
        self._long = [
            (variables, chain)
            for variables in self._variables
            for chain in self._chains(variables)
            if self._text(tokenizer.chat_template, chain, variables) is not None
        ]
        self._unchanging = self._render_short(tokenizer.chat_template)
        self._long_texts = self._render_long(tokenizer.chat_template)

    def keeps(self, template: str) -> bool:
        """Return whether prompts, single turns and the text after a turn are rendered as before."""
        return self._render_short(template) == self._unchanging

    def changes(self, template: str) -> bool:
        """Return whether longer conversations are rendered differently."""
        return self._render_long(template) != self._long_texts

    def grows(self, template: str) -> bool:
        """Return whether each rendered conversation begins with the shorter ones before it."""
        for variables, chain in self._long:
            heads: list[str] = []
            for i, message in enumerate([*chain, None]):
                if message and message["role"] != "assistant":
                    continue
                prompt = self._text(template, chain[:i], variables)
                if prompt is None or not all(map(prompt.startswith, heads)):
                    return False
                if message is None:
                    break
                alone = self._text(template, chain[: i + 1], variables, as_prompt=False)
                placeholder = PROBE_ARGUMENT if message.get("tool_calls") else PROBE_TEXT
                if alone is None or placeholder not in alone:
                    return False
                heads += [prompt, alone[: alone.rindex(placeholder) + len(placeholder)]]
        return True

    def _render_short(self, template: str) -> list[str | None]:
        prompts = [[_USER], [_SYSTEM, _USER]]
        single = [
            *thinking_turns(),
            *thinking_turns(_CALLS),
            *probe_turns(()),
            *probe_turns(_CALLS),
        ]
        texts = [
            self._text(template, messages, variables, schemas, as_prompt)
            for variables in self._variables
            for conversations, schemas, as_prompt in (
                (prompts, (), True),
                (prompts, self._schemas, True),
                ([[_USER, turn] for turn in single], (), False),
            )
            for messages in conversations
        ]
        return texts + [
            self._after_last_turn(template, chain[:end], variables)
            for variables, chain in self._long
            for end in range(1, len(chain) + 1)
            if chain[end - 1]["role"] != "assistant" and _last_turn(chain[:end])
        ]

    def _after_last_turn(
        self, template: str, messages: Sequence[MessageDict], variables: Mapping[str, Any]
    ) -> str | None:
        """Return the text of a prompt after its last turn: closing token, new messages, header.

        A changed template may write more of earlier turns, but must write this text unchanged.
        """
        text, turn = self._text(template, messages, variables), _last_turn(messages)
        return text and text.rpartition(PROBE_ARGUMENT if turn.get("tool_calls") else PROBE_TEXT)[2]

    def _render_long(self, template: str) -> list[str | None]:
        return [self._text(template, chain, variables) for variables, chain in self._long]

    def _chains(self, variables: Mapping[str, Any]) -> list[list[MessageDict]]:
        answer, call = self._turn(variables, ()), self._turn(variables, _CALLS)
        tools = [_SYSTEM, _USER, call, _TOOL, call, _TOOL]
        return [
            [_USER, answer, _USER, answer, _USER],
            tools,
            [*tools, answer, _USER, answer, _USER],
        ]

    def _turn(self, variables: Mapping[str, Any], calls: Sequence[tuple[str, str]]) -> MessageDict:
        """Return the first form of a turn that the template shows completely, with its thought.

        Forms whose text begins with the prompt are preferred. If a prompt ends the thought, such a
        form has no thought.
        """
        source = self._tokenizer.chat_template
        prompt = self._text(source, [_USER], variables, ()) or ""
        candidates = []
        for turn in (*thinking_turns(calls), *probe_turns(calls)):
            text = self._text(source, [_USER, turn], variables, (), as_prompt=False)
            placeholders = [mark for mark in (PROBE_ARGUMENT, PROBE_THOUGHT) if mark in str(turn)]
            if text and all(placeholder in text for placeholder in placeholders):
                candidates.append((text.startswith(prompt), turn))
        return max(candidates, key=itemgetter(0), default=(False, probe_turns(calls)[0]))[1]

    def _text(
        self,
        template: str,
        messages: Sequence[MessageDict],
        variables: Mapping[str, Any],
        schemas: Schemas | None = None,
        as_prompt: bool = True,
    ) -> str | None:
        render = Renderer(_with_template(self._tokenizer, template), variables)
        return render.attempt(messages, self._schemas if schemas is None else schemas, as_prompt)


def _last_turn(messages: Sequence[MessageDict]) -> MessageDict:
    """Return the last assistant message, or an empty one."""
    return next((m for m in reversed(messages) if m["role"] == "assistant"), {})


# -- what can be changed --------------------------------------------------------------------------


class _Word(NamedTuple):
    text: str
    start: int
    end: int
    depth: int


def _edits(source: str) -> Iterator[Edit]:
    """Yield the edits that replace a condition, or a part of one, by true or false."""
    for tag in _TAG.finditer(source):
        group = 1 if tag[1] is not None else 2
        words = _words(tag[group] or "", tag.start(group))
        if not words or words[0].text == "for":
            continue
        for i, word in enumerate(words):
            if word.text in ("if", "elif"):
                yield from _edits_of_condition(_condition(words, i))


def _words(text: str, offset: int) -> list[_Word]:
    """Return the words of an expression, each with its depth of brackets."""
    words, depth = [], 0
    for match in _WORD.finditer(text):
        depth -= match[0] in ")]}"
        words.append(_Word(match[0], offset + match.start(), offset + match.end(), depth))
        depth += match[0] in "([{"
    return words


def _condition(words: Sequence[_Word], index: int) -> Sequence[_Word]:
    """Return the words after an `if`, up to its `else` or the end of the enclosing expression."""
    depth = words[index].depth
    end = next(
        (
            i
            for i, word in enumerate(words[index + 1 :], index + 1)
            if word.depth < depth or (word.depth == depth and word.text in ("else", ","))
        ),
        len(words),
    )
    return words[index + 1 : end]


def _edits_of_condition(words: Sequence[_Word]) -> Iterator[Edit]:
    """Yield edits: the condition as true, as false, and without each operand of `and` and `or`."""
    if words:
        yield Edit(words[0].start, words[-1].end, "true")
        yield Edit(words[0].start, words[-1].end, "false")
        yield from _without_operands(words)


def _without_operands(words: Sequence[_Word]) -> Iterator[Edit]:
    while _is_enclosed(words):
        words = words[1:-1]
    depth = min((word.depth for word in words), default=0)
    for operator in ("or", "and"):
        indices = [i for i, w in enumerate(words) if w.text == operator and w.depth == depth]
        if not indices:
            continue
        bounds = [-1, *indices, len(words)]
        operands = [words[a + 1 : b] for a, b in pairwise(bounds)]
        for before, operand, after in zip(
            [None, *operands], operands, [*operands[1:], None], strict=False
        ):
            yield from _without_operands(operand)
            start = before[-1].end if before else operand[0].start
            yield Edit(start, after[0].start if after and not before else operand[-1].end, "")
        return


def _is_enclosed(words: Sequence[_Word]) -> bool:
    """Return whether one pair of brackets encloses all words."""
    if len(words) < 3 or words[0].text != "(" or words[-1].text != ")":
        return False
    return all(word.depth > words[0].depth for word in words[1:-1])
