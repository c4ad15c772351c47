"""Find what a chat template writes between two turns of the assistant.

The text is read from a rendered probe conversation: a question, an assistant turn (with calls if
tool results follow it), and then the new messages. The probe has no other messages than those, so
the template cannot write text for them that the real conversation lacks.
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
    MessageDict,
    Renderer,
    TemplateParts,
    encode_parts,
    split_rendering,
)
from agentrl.errors import TemplateError
from agentrl.trajectory import Message

PROBE_TEXT, PROBE_ARGUMENT = f"zq{SALT}spokenqz", f"zq{SALT}argumentqz"
_PLACEHOLDER = re.compile(r"zqname(\d+)qz|zq(\d{5})id")
"""A call's placeholder name or id. Mistral's templates require ids of nine letters or digits."""
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
"""The tool of probe conversations."""
PROBE_QUESTION: MessageDict = {"role": "user", "content": "Q"}


@dataclass(frozen=True, slots=True)
class TurnDelta:
    """The text that a template writes between two turns of the assistant, as tokens and regions.

    Attributes:
        parts: the tokens and regions. Their contents are those of the messages, then the name and
            the id of each call if `names` is true.
        closes: whether the first token closes the first turn; if not, it belongs to the next role.
        names: whether the template writes the names or ids of calls.
        render: returns the text between the turns with these contents of the messages.
    """

    parts: TemplateParts
    closes: bool
    names: bool
    render: Callable[[Sequence[str]], str] = field(compare=False)


class TemplateProbe:
    """Renders probe conversations to find the text that a template writes around turns.

    Args:
        render: renders a conversation.
        encoder: the encoder of the tokenizer.
        ends: the ids that are known to end a turn.
    """

    def __init__(self, render: Renderer, encoder: Encoder, ends: set[int]):
        self.render = render
        self.encoder = encoder
        self.ends = ends

    def turn_delta(self, before: Sequence[Message], messages: Sequence[Message]) -> TurnDelta:
        """Return the text that the template writes between an assistant turn and the next one.

        Args:
            before: the conversation before the turn, if the template depends on it.
            messages: the messages between the two turns.

        Raises:
            TemplateError: if the template refuses the conversation or does not write all of it.
        """
        roles = [m.role for m in messages]
        calls = [(f"zqname{i}qz", f"zq{i:05}id") for i in range(roles.count("tool"))]
        error = None
        for context, turn in self._conversations(before, probe_turns(calls)):
            try:
                end, closes = self.end_of_turn([*context, turn])

                def render(
                    contents: Sequence[str],
                    head: Sequence[MessageDict] = (*context, turn),
                    end: str = end,
                ) -> str:
                    added = [
                        {"role": r, "content": c} for r, c in zip(roles, contents, strict=True)
                    ]
                    results = (m for m in added if m["role"] == "tool")
                    for result, (name, id) in zip(results, calls, strict=True):
                        result |= {"tool_call_id": id, "name": name}
                    text = self.render([*head, *added])
                    if end not in text:
                        raise TemplateError(
                            "the chat template changes an assistant message when more messages"
                            f" follow: {end!r} is missing then"
                        )
                    return text[text.rindex(end) + len(end) :]

                texts, slots = _add_name_slots(
                    *split_rendering(render, roles, "user, assistant, "), len(roles)
                )
                names = len(slots) > len(roles)
                return TurnDelta(encode_parts(self.encoder, texts, slots), closes, names, render)
            except TemplateError as e:
                error = e
        assert error is not None
        raise error

    def _conversations(
        self, before: Sequence[Message], forms: Sequence[dict[str, Any]]
    ) -> Iterator[tuple[list[MessageDict], MessageDict]]:
        """Yield each conversation before the new messages, with its last turn in each form."""
        has_tool_results = any(m.role == "tool" for m in before)
        pairs = [
            (form, other)
            for form in range(len(forms))
            for other in (range(len(probe_turns([_CALL]))) if has_tool_results else [0])
        ]
        # The same form works for nearly all templates.
        for form, other in sorted(pairs, key=lambda pair: pair[0] != pair[1]):
            yield self._context(before, other), forms[form]

    def end_of_turn(self, head: Sequence[MessageDict]) -> tuple[str, bool]:
        """Return the end of the last turn's text, and whether a token closes the turn.

        The turn must be a `probe_turn`. The closing token is not part of the text. White space that
        the template writes before the closing token belongs to the turn, because the model samples
        it (Llama 4, Apriel).
        """
        text = self.render(head, as_prompt=False)
        calls = head[-1].get("tool_calls")
        last = PROBE_ARGUMENT if calls else PROBE_TEXT
        if last not in text:
            missing = "a call of an assistant message" if calls else "an assistant message"
            raise TemplateError(f"the chat template does not show {missing}")
        last, text = last, text[text.rindex(last) + len(last) :]
        control = [(m.start(), m[0]) for m in self.encoder.control.finditer(text)]
        if not calls:
            return last + self.space_before_close(head, last), bool(control)
        for at, token in control:
            if self.encoder.encode_trusted(token)[0] in self.ends:
                return last + text[:at], True
        if control and self._closes():
            return last + text[: control[-1][0]], True
        end = last + text
        return end + self.space_before_close(head, end), False

    def space_before_close(self, head: Sequence[MessageDict], end: str) -> str:
        """Return the white space between a turn and its closing token, or "".

        Args:
            head: a conversation that ends with the turn.
            end: the end of the turn's text.
        """
        calls = head[-1].get("tool_calls", ())
        results = [
            {"role": "tool", "content": "R", "tool_call_id": c["id"], "name": c["function"]["name"]}
            for c in calls
        ]
        later = self.render.attempt([*head, *(results or [PROBE_QUESTION])]) or ""
        later = later.rpartition(end)[2]
        token = self.encoder.control.search(later)
        if token is None or not (space := later[: token.start()]).isspace():
            return ""
        if self.encoder.encode_trusted(token[0])[0] in self.ends:
            return space
        # Otherwise the token may begin the next message; a last turn then has no such white space.
        last = self.render(head, as_prompt=False).rpartition(end)[2]
        return space if last.startswith(later[: token.end()]) else ""

    def last_close(self) -> int:
        """Return the token that closes a last turn. In gpt-oss, earlier turns have another one."""
        return self.encoder.split(self._text_after_last_turn())[1][0]

    def _closes(self) -> bool:
        """Return whether the template closes a last turn."""
        return self.encoder.control.search(self._text_after_last_turn()) is not None

    def _text_after_last_turn(self) -> str:
        return self.render([PROBE_QUESTION, probe_turn()], as_prompt=False).rpartition(PROBE_TEXT)[
            2
        ]

    def _context(self, before: Sequence[Message], form: int) -> list[MessageDict]:
        """Return a probe conversation with the same roles as `before`.

        Args:
            before: the conversation.
            form: the index in `probe_turns` of the form of turns with calls.
        """
        context: list[MessageDict] = []
        for i, m in enumerate(before):
            if m.role == "assistant":
                tools = len(list(takewhile(lambda m: m.role == "tool", before[i + 1 :])))
                context.append(probe_turns([_CALL] * tools)[form if tools else 0])
            else:
                message = {"role": m.role, "content": "Q"}
                context.append(message | ({"tool_call_id": _CALL[1]} if m.role == "tool" else {}))
        return context or [PROBE_QUESTION]


def probe_turn(
    calls: Sequence[tuple[str, str]] = (), arguments_as_text: bool = False, **more: Any
) -> dict[str, Any]:
    """Return an assistant message with placeholder text, and calls with these names and ids."""
    message: dict[str, Any] = {"role": "assistant", "content": PROBE_TEXT, **more}
    arguments = {"x": PROBE_ARGUMENT}
    if calls:
        message["tool_calls"] = [
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
    return message


def probe_turns(calls: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return an assistant turn in each form that a template may need, the most common first."""
    if not calls:
        return [probe_turn()]
    forms = [
        probe_turn(selected, as_text, content=content)
        for as_text in (False, True)  # DeepSeek's templates need the arguments as text
        for selected in (calls, calls[:1])
        for content in (PROBE_TEXT, "", None)
    ]
    return [*forms, probe_turn()]  # for templates without `tool_calls`: calls are part of the text


_CALL = ("tool", "000000000")


def _add_name_slots(
    texts: Sequence[str], slots: Sequence[ContentSlot], contents: int
) -> tuple[list[str], list[ContentSlot]]:
    """Add slots for the names and ids of calls, because the model chooses them."""
    more_texts, more_slots = [], []
    for i, text in enumerate(texts):
        position = 0
        for m in _PLACEHOLDER.finditer(text):
            more_texts.append(text[position : m.start()])
            is_id = m[1] is None
            more_slots.append(ContentSlot(contents + 2 * int(m[2] if is_id else m[1]) + is_id, str))
            position = m.end()
        more_texts.append(text[position:])
        more_slots += slots[i : i + 1]
    return more_texts, more_slots
