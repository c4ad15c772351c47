"""What a chat template writes between two turns of the assistant.

Found by rendering a conversation that stands where the true one does: a question, a turn that calls
where tools answer it and does not where a user does, and then the new messages. Nothing is put in
front of them that the true conversation lacks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from agentrl.chat.encoding import Encoder
from agentrl.chat.render import (
    SALT,
    ContentSlot,
    Renderer,
    TemplateMessage,
    TemplateParts,
    encode_parts,
    split_rendering,
)
from agentrl.errors import TemplateError
from agentrl.trajectory import Message

PROBE_TEXT, PROBE_ARGUMENT = f"zq{SALT}spokenqz", f"zq{SALT}argumentqz"
_NAMED = re.compile(r"zqname(\d+)qz|zq(\d{5})id")
"""A call's name or id, to be found again; Mistral's templates want nine letters or digits."""
PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "Anything."}},
            "required": ["x"],
        },
    },
}
"""A tool for conversations that only try a template."""
PROBE_QUESTION: TemplateMessage = {"role": "user", "content": "Q"}


@dataclass(frozen=True, slots=True)
class TurnDelta:
    """What a template writes between two turns of the assistant, and whether it closes the first.

    Where it does not, the first token already belongs to the next role. The frame's contents are
    those of the messages, then each call's name and id, where `names` says that it shows them.
    """

    parts: TemplateParts
    closes: bool
    names: bool
    render: Callable[[Sequence[str]], str] = field(compare=False)
    """Returns the text between the turns, for the given contents of the messages."""


class TemplateProbe:
    """Looks for what stands between turns; `ends` are the ids that end one, as far as known."""

    def __init__(self, render: Renderer, encoder: Encoder, ends: set[int]):
        self.render = render
        self.encoder = encoder
        self.ends = ends

    def between(self, before: Sequence[Message], messages: Sequence[Message]) -> TurnDelta:
        """What stands between an assistant's turn and its next one.

        Args:
            before: the conversation before the turn, where that matters.
            messages: what follows it.

        Raises:
            TemplateError: the template does not show this, or fails on it.
        """
        roles = [m.role for m in messages]
        # Names and ids that are found again.
        named = [(f"zqname{i}qz", f"zq{i:05}id") for i in range(roles.count("tool"))]
        error = None
        for context, turn in self._heads(before, probe_turns(named)):
            try:
                own, closes = self.own_end([*context, turn])

                def render(
                    contents: Sequence[str],
                    head: Sequence[TemplateMessage] = (*context, turn),
                    own: str = own,
                ) -> str:
                    said = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
                    results = (m for m in said if m["role"] == "tool")
                    for result, (name, id) in zip(results, named, strict=True):
                        result |= {"tool_call_id": id, "name": name}
                    text = self.render([*head, *said])
                    if own not in text:
                        raise TemplateError(f"the chat template changes {own!r} when more is said")
                    return text[text.rindex(own) + len(own) :]

                texts, slots = _with_names(
                    *split_rendering(render, roles, "user, assistant, "), len(roles)
                )
                names = len(slots) > len(roles)
                return TurnDelta(encode_parts(self.encoder, texts, slots), closes, names, render)
            except TemplateError as e:
                error = e
        assert error is not None
        raise error

    def _heads(
        self, before: Sequence[Message], ways: Sequence[dict[str, Any]]
    ) -> Iterator[tuple[list[TemplateMessage], TemplateMessage]]:
        """What may stand before the new messages, its turns written in any of the ways."""
        called = any(m.role == "tool" for m in before)
        for way, turn in enumerate(ways):
            others = range(len(probe_turns([_OTHER]))) if called else [0]
            for other in sorted(others, key=lambda o: o != way):  # mostly all in the same way
                yield self._context(before, other), turn

    def own_end(self, head: Sequence[TemplateMessage]) -> tuple[str, bool]:
        """The end of the turn that ends `head`, less its close; and whether there is one.

        The turn's content is that of `spoken`, and so are its arguments. White space that the
        template writes before the close belongs to the turn: the model writes it (Llama 4, Apriel).
        """
        text = self.render(head, add_generation_prompt=False)
        calls = head[-1].get("tool_calls")
        last = PROBE_ARGUMENT if calls else PROBE_TEXT
        if last not in text:
            what = "a call of an assistant message" if calls else "an assistant message"
            raise TemplateError(f"the chat template does not show {what}")
        last, text = last, text[text.rindex(last) + len(last) :]
        control = [(m.start(), m[0]) for m in self.encoder.control.finditer(text)]
        if not calls:
            return last + self.space_before_close(head, last), bool(control)
        for at, token in control:
            if self.encoder.encode_template_text(token)[0] in self.ends:
                return last + text[:at], True
        if control and self._closes():
            return last + text[: control[-1][0]], True
        own = last + text
        return own + self.space_before_close(head, own), False

    def space_before_close(self, head: Sequence[TemplateMessage], own: str) -> str:
        """Return the white space between a turn and the token that closes it, or "".

        Args:
            head: a conversation that ends with the turn.
            own: the end of the turn.
        """
        calls = head[-1].get("tool_calls", ())
        results = [
            {"role": "tool", "content": "R", "tool_call_id": c["id"], "name": c["function"]["name"]}
            for c in calls
        ]
        later = self.render.attempt([*head, *(results or [PROBE_QUESTION])]) or ""
        later = later.rpartition(own)[2]
        token = self.encoder.control.search(later)
        if token is None or not (space := later[: token.start()]).isspace():
            return ""
        if self.encoder.encode_template_text(token[0])[0] in self.ends:
            return space
        # Else the token may begin the next message: then a turn that stands last has none.
        last = self.render(head, add_generation_prompt=False).rpartition(own)[2]
        return space if last.startswith(later[: token.end()]) else ""

    def last_close(self) -> int:
        """What the model closes a turn with: gpt-oss has a token for it that no history shows."""
        return self.encoder.split(self._after_the_last())[1][0]

    def _closes(self) -> bool:
        """Whether a turn that stands last is closed."""
        return self.encoder.control.search(self._after_the_last()) is not None

    def _after_the_last(self) -> str:
        return self.render([PROBE_QUESTION, probe_turn()], add_generation_prompt=False).rpartition(
            PROBE_TEXT
        )[2]

    def _context(self, before: Sequence[Message], way: int) -> list[TemplateMessage]:
        """A conversation of the same shape, its turns written in one of the ways of `turns`."""
        context: list[TemplateMessage] = []
        for i, m in enumerate(before):
            if m.role == "assistant":
                tools = len(list(takewhile(lambda m: m.role == "tool", before[i + 1 :])))
                context.append(probe_turns([_OTHER] * tools)[way if tools else 0])
            else:
                said = {"role": m.role, "content": "Q"}
                context.append(said | ({"tool_call_id": _OTHER[1]} if m.role == "tool" else {}))
        return context or [PROBE_QUESTION]


def probe_turn(
    calls: Sequence[tuple[str, str]] = (), arguments_as_text: bool = False, **more: Any
) -> dict[str, Any]:
    """An assistant message that can be found again, with calls of these names and ids."""
    said: dict[str, Any] = {"role": "assistant", "content": PROBE_TEXT, **more}
    arguments = {"x": PROBE_ARGUMENT}
    if calls:
        said["tool_calls"] = [
            {
                "id": id,
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": json.dumps(arguments) if arguments_as_text else arguments,
                },
            }
            for name, id in calls
        ]
    return said


def probe_turns(calls: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """An assistant's turn in the ways that templates want it, the commonest first."""
    if not calls:
        return [probe_turn()]
    ways = [
        probe_turn(some, as_text, content=content)
        for as_text in (False, True)  # DeepSeek's templates want the arguments as text
        for some in (calls, calls[:1])
        for content in (PROBE_TEXT, "", None)
    ]
    return [*ways, probe_turn()]  # where calls are text of the turn


_OTHER = ("tool", "000000000")


def _with_names(
    texts: Sequence[str], slots: Sequence[ContentSlot], contents: int
) -> tuple[list[str], list[ContentSlot]]:
    """Slots for the calls' names and ids too: the model wrote them, not the template."""
    more, found = [], []
    for i, text in enumerate(texts):
        position = 0
        for m in _NAMED.finditer(text):
            more.append(text[position : m.start()])
            is_id = m[1] is None
            found.append(ContentSlot(contents + 2 * int(m[2] if is_id else m[1]) + is_id, str))
            position = m.end()
        more.append(text[position:])
        found += slots[i : i + 1]
    return more, found
