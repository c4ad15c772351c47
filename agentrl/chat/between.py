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
from agentrl.chat.render import SALT, Frame, Renderer, Said, Slot, cut, frame_of
from agentrl.errors import TemplateError
from agentrl.trajectory import Message

SPOKEN, ARGUMENT = f"zq{SALT}spokenqz", f"zq{SALT}argumentqz"
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
ASKED: Said = {"role": "user", "content": "Q"}


@dataclass(frozen=True, slots=True)
class Between:
    """What a template writes between two turns of the assistant, and whether it closes the first.

    Where it does not, the first token already belongs to the next role. The frame's contents are
    those of the messages, then each call's name and id, where `names` says that it shows them.
    """

    frame: Frame
    closes: bool
    names: bool
    render: Callable[[Sequence[str]], str] = field(compare=False)
    """Returns the text between the turns, for the given contents of the messages."""


class Finder:
    """Looks for what stands between turns; `ends` are the ids that end one, as far as known."""

    def __init__(self, render: Renderer, encoder: Encoder, ends: set[int]):
        self.render = render
        self.encoder = encoder
        self.ends = ends

    def between(self, before: Sequence[Message], messages: Sequence[Message]) -> Between:
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
        for context, turn in self._heads(before, turns(named)):
            try:
                own, closes = self.own_end([*context, turn])

                def render(
                    contents: Sequence[str],
                    head: Sequence[Said] = (*context, turn),
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

                texts, slots = _with_names(*cut(render, roles, "user, assistant, "), len(roles))
                names = len(slots) > len(roles)
                return Between(frame_of(self.encoder, texts, slots), closes, names, render)
            except TemplateError as e:
                error = e
        assert error is not None
        raise error

    def _heads(
        self, before: Sequence[Message], ways: Sequence[dict[str, Any]]
    ) -> Iterator[tuple[list[Said], Said]]:
        """What may stand before the new messages, its turns written in any of the ways."""
        called = any(m.role == "tool" for m in before)
        for way, turn in enumerate(ways):
            others = range(len(turns([_OTHER]))) if called else [0]
            for other in sorted(others, key=lambda o: o != way):  # mostly all in the same way
                yield self._context(before, other), turn

    def own_end(self, head: Sequence[Said]) -> tuple[str, bool]:
        """The end of the turn that ends `head`, less its close; and whether there is one.

        The turn's content is that of `spoken`, and so are its arguments. White space that the
        template writes before the close belongs to the turn: the model writes it (Llama 4, Apriel).
        """
        text = self.render(head, ask=False)
        calls = head[-1].get("tool_calls")
        last = ARGUMENT if calls else SPOKEN
        if last not in text:
            what = "a call of an assistant message" if calls else "an assistant message"
            raise TemplateError(f"the chat template does not show {what}")
        last, text = last, text[text.rindex(last) + len(last) :]
        control = [(m.start(), m[0]) for m in self.encoder.control.finditer(text)]
        if not calls:
            return last + self.space_before_close(head, last), bool(control)
        for at, token in control:
            if self.encoder.literal(token)[0] in self.ends:
                return last + text[:at], True
        if control and self._closes():
            return last + text[: control[-1][0]], True
        own = last + text
        return own + self.space_before_close(head, own), False

    def space_before_close(self, head: Sequence[Said], own: str) -> str:
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
        later = self.render.attempt([*head, *(results or [ASKED])]) or ""
        later = later.rpartition(own)[2]
        token = self.encoder.control.search(later)
        if token is None or not (space := later[: token.start()]).isspace():
            return ""
        if self.encoder.literal(token[0])[0] in self.ends:
            return space
        # Else the token may begin the next message: then a turn that stands last has none.
        last = self.render(head, ask=False).rpartition(own)[2]
        return space if last.startswith(later[: token.end()]) else ""

    def last_close(self) -> int:
        """What the model closes a turn with: gpt-oss has a token for it that no history shows."""
        return self.encoder.split(self._after_the_last())[1][0]

    def _closes(self) -> bool:
        """Whether a turn that stands last is closed."""
        return self.encoder.control.search(self._after_the_last()) is not None

    def _after_the_last(self) -> str:
        return self.render([ASKED, spoken()], ask=False).rpartition(SPOKEN)[2]

    def _context(self, before: Sequence[Message], way: int) -> list[Said]:
        """A conversation of the same shape, its turns written in one of the ways of `turns`."""
        context: list[Said] = []
        for i, m in enumerate(before):
            if m.role == "assistant":
                tools = len(list(takewhile(lambda m: m.role == "tool", before[i + 1 :])))
                context.append(turns([_OTHER] * tools)[way if tools else 0])
            else:
                said = {"role": m.role, "content": "Q"}
                context.append(said | ({"tool_call_id": _OTHER[1]} if m.role == "tool" else {}))
        return context or [ASKED]


def spoken(
    calls: Sequence[tuple[str, str]] = (), arguments_as_text: bool = False, **more: Any
) -> dict[str, Any]:
    """An assistant message that can be found again, with calls of these names and ids."""
    said: dict[str, Any] = {"role": "assistant", "content": SPOKEN, **more}
    arguments = {"x": ARGUMENT}
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


def turns(calls: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """An assistant's turn in the ways that templates want it, the commonest first."""
    if not calls:
        return [spoken()]
    ways = [
        spoken(some, as_text, content=content)
        for as_text in (False, True)  # DeepSeek's templates want the arguments as text
        for some in (calls, calls[:1])
        for content in (SPOKEN, "", None)
    ]
    return [*ways, spoken()]  # where calls are text of the turn


_OTHER = ("tool", "000000000")


def _with_names(
    texts: Sequence[str], slots: Sequence[Slot], contents: int
) -> tuple[list[str], list[Slot]]:
    """Slots for the calls' names and ids too: the model wrote them, not the template."""
    more, found = [], []
    for i, text in enumerate(texts):
        position = 0
        for m in _NAMED.finditer(text):
            more.append(text[position : m.start()])
            is_id = m[1] is None
            found.append(Slot(contents + 2 * int(m[2] if is_id else m[1]) + is_id, str))
            position = m.end()
        more.append(text[position:])
        found += slots[i : i + 1]
    return more, found
