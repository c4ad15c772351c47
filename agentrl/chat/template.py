r"""What a chat template puts around messages, as token ids, turn by turn.

Training needs the tokens that the engine sampled, not tokens that look like them. So an episode's
row only ever grows: the prompt, then what was sampled, then the *delta* of new messages, and so on.
A sampled token is never decoded and encoded again.

The template is a Jinja program over whole conversations; the delta is found by rendering it with a
sentinel in place of every content and cutting at the sentinels. What is left are the template's
own *literals* (`<|im_end|>\n<|im_start|>user\n` ...), which are cached by the roles they stand
between; the contents are encoded apart from them, by a copy of the tokenizer that owns no added
tokens. A tool's text can therefore not become a control token, and the cost of a turn is that of
its new text, however long the history.

All of that holds only for templates that render what was said the same way when more is said. The
constructor proves it on probe conversations, or refuses the template and shows where it breaks.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from agentrl.chat.formats import REACT_STOP
from agentrl.chat.tokenizer import end_of_turn_ids, load_tokenizer
from agentrl.errors import TemplateError
from agentrl.trajectory import Message, token_array

Schemas = Sequence[Mapping[str, Any]]

_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string"}},
            "required": ["x"],
        },
    },
}
# Contents that templates are known to trim, escape or take for something else.
_PROBE_TEXTS = ("plain", " leading and trailing ", "\nline\n\n", "", '{"a": "ü😀"}', "{{ x }}")
# What may follow an assistant turn.
_DELTAS = (("user",), ("tool",), ("tool", "tool"), ("tool", "user"))


class ChatTemplate:
    """A tokenizer's chat template, proven append-only.

    Attributes:
        close_id: the token with which the template closes an assistant turn.
        stop_ids: the tokens that end a sampled turn: `close_id`, the tokenizer's EOS, `end_ids`.
    """

    def __init__(self, tokenizer: Any, end_ids: Sequence[int] = ()):
        """Find the literals and prove them.

        Args:
            tokenizer: a fast transformers tokenizer with a chat template.
            end_ids: tokens that end the model's turns besides the template's and the tokenizer's.

        Raises:
            TemplateError: the template changes what was said before, or its contents.
        """
        self.tokenizer = tokenizer
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._opaque = _without_added_tokens(self._backend)
        self._control_ids = frozenset(self._backend.get_added_tokens_decoder())
        self._prompts: dict[tuple[tuple[str, ...], str], list[list[int]]] = {}
        self._deltas: dict[tuple[str, ...], list[list[int]]] = {}
        self.close_id = self._find_close()
        ends = (self.close_id, tokenizer.eos_token_id, *end_ids)
        self.stop_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
        self._prove()

    def prompt(self, messages: Sequence[Message], schemas: Schemas = ()) -> array[int]:
        """The tokens of a conversation up to where the assistant speaks next.

        Contents are encoded apart from the template; only assistant messages (few-shot turns the
        user wrote) may hold control tokens such as `<tool_call>`.
        """
        roles = tuple(m.role for m in messages)
        key = (roles, json.dumps(schemas, sort_keys=True) if schemas else "")
        literals = self._prompts.get(key)
        if literals is None:
            texts = self._literals(roles, schemas)
            literals = self._prompts[key] = [self._encode_literal(t) for t in texts]
        return self._join(literals, messages)

    def delta(self, messages: Sequence[Message], last_id: int) -> array[int]:
        """The tokens between a sampled turn and the next: its close, new messages, the new header.

        Args:
            messages: what was said since the assistant's turn (tool, user), in order.
            last_id: the last sampled token; where it closes the turn itself, it is not repeated.
        """
        roles = tuple(m.role for m in messages)
        literals = self._deltas.get(roles)
        if literals is None:
            context = ("user", "assistant")
            texts = self._literals(context + roles, ())[len(context) :]
            literals = self._deltas[roles] = [self._encode_literal(t) for t in texts]
        ids = self._join(literals, messages)
        return ids[1:] if last_id == self.close_id else ids

    @classmethod
    def load(cls, path: str | Path) -> ChatTemplate:
        """The template of a model's folder or hub name.

        Raises:
            UserError: no tokenizer there, or one that cannot be used.
        """
        return cls(load_tokenizer(path), end_of_turn_ids(path))

    def trace(
        self, messages: Sequence[Message], schemas: Schemas = (), stop: str = REACT_STOP
    ) -> tuple[array[int], array[int]]:
        """A finished conversation as a training row.

        Args:
            messages: ending with an assistant message.
            schemas: the tools shown in the prompt.
            stop: an assistant text that ends with it was stopped there; its close is the
                template's, not the assistant's.

        Returns:
            Token ids and a mask of the same length: 1 on every assistant turn's own tokens, its
            closing token included.
        """
        ids, mask = token_array(), token_array()

        def append(new: Sequence[int], own: int) -> None:
            ids.extend(new)
            mask.extend([own] * len(new))

        waiting: list[Message] = []
        for message in messages:
            if message.role != "assistant":
                waiting.append(message)
                continue
            if ids:
                append(self.delta(waiting, ids[-1]), 0)
            else:
                append(self.prompt(waiting, schemas), 0)
            waiting = []
            closed = not (stop and message.content.endswith(stop))
            append(self._encode_trusted(message.content) + [self.close_id] * closed, 1)
        if waiting or not ids:
            raise ValueError("a trace must end with an assistant message")
        if ids[-1] != self.close_id:
            append([self.close_id], 0)
        return ids, mask

    def encode(self, text: str) -> list[int]:
        """Foreign text as ids, free of control tokens whatever it contains."""
        return self._opaque.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, control tokens included."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def decode_turn(self, ids: Sequence[int]) -> str:
        """The text of one sampled turn, less the token that closed it."""
        closed = len(ids) > 0 and ids[-1] in self.stop_ids
        return self.decode(ids[:-1] if closed else ids)

    # -- literals ---------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message], schemas: Schemas, generation: bool) -> str:
        from jinja2.exceptions import TemplateError as JinjaError

        try:
            return self.tokenizer.apply_chat_template(
                [m.as_dict() for m in messages],
                tools=list(schemas) or None,
                tokenize=False,
                add_generation_prompt=generation,
            )
        except JinjaError as e:
            roles = ", ".join(m.role for m in messages)
            raise TemplateError(f"the chat template fails on the roles ({roles}): {e}") from e

    def _literals(self, roles: Sequence[str], schemas: Schemas) -> list[str]:
        """The template's text around each content: one more piece than there are messages."""
        marks = [f"zq{i}content{i}qz" for i in range(len(roles))]
        messages = [Message(r, m) for r, m in zip(roles, marks, strict=True)]  # type: ignore[arg-type]
        rest, pieces = self._render(messages, schemas, True), []
        for mark, role in zip(marks, roles, strict=True):
            if rest.count(mark) != 1:
                raise TemplateError(
                    f"the chat template shows a {role} message {rest.count(mark)} times after"
                    f" ({', '.join(roles)}); agentrl needs each content exactly once, in order."
                )
            piece, _, rest = rest.partition(mark)
            pieces.append(piece)
        return [*pieces, rest]

    def _join(self, literals: list[list[int]], messages: Sequence[Message]) -> array[int]:
        ids = token_array(literals[0])
        for message, literal in zip(messages, literals[1:], strict=True):
            if message.role == "assistant":
                ids.extend(self._encode_trusted(message.content))
            else:
                content = self.encode(message.content)
                if not self._control_ids.isdisjoint(content):
                    raise TemplateError(
                        f"the tokenizer turns text of a {message.role} message into control tokens"
                        " even without its added tokens; agentrl cannot keep such text harmless."
                    )
                ids.extend(content)
            ids.extend(literal)
        return ids

    def _encode_literal(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    _encode_trusted = _encode_literal

    # -- the proof --------------------------------------------------------------------------------

    def _find_close(self) -> int:
        literal = self._literals(("user", "assistant", "user"), ())[2]
        ids = self._encode_literal(literal)
        if not ids or ids[0] not in self._control_ids:
            raise TemplateError(
                f"the chat template puts {literal[:40]!r} after an assistant message, which does"
                " not begin with a control token: nothing tells the engine that a turn is over."
            )
        return ids[0]

    def _prove(self) -> None:
        tool_sets: tuple[Schemas, ...] = ((), (_PROBE_TOOL,))
        for schemas in tool_sets:
            for after in _DELTAS:
                self._prove_append_only(schemas, after)
            for text in _PROBE_TEXTS:
                self._prove_contents(schemas, text)
        for text in _PROBE_TEXTS:
            if self._opaque.decode(self.encode(text), skip_special_tokens=False) != text:
                raise TemplateError(
                    f"the tokenizer does not give back {text!r} after encoding and decoding it;"
                    " tool results would reach the model changed."
                )

    def _prove_append_only(self, schemas: Schemas, after: tuple[str, ...]) -> None:
        """What was rendered before a turn, and the turn itself, stay when more is said."""
        asked = [Message("system", "Be brief."), Message("user", "Q1")]
        said = [*asked, Message("assistant", "A1")]
        more = [Message(r, f"N{i}") for i, r in enumerate(after)]  # type: ignore[arg-type]
        before = self._render(asked, schemas, True) + "A1"
        later = self._render([*said, *more], schemas, True)
        _same_start(before, later, f"an assistant turn followed by ({', '.join(after)})")
        again = self._render([*said, *more, Message("assistant", "A2"), *more], schemas, True)
        _same_start(later + "A2", again, "the second assistant turn")
        # The delta is cut from a shorter conversation without tools: it must be the same here.
        delta = "".join(
            part
            for pair in zip(
                self._literals(("user", "assistant", *after), ())[2:],
                [*(m.content for m in more), ""],
                strict=True,
            )
            for part in pair
        )
        _same_start(before + delta, later, "the delta")
        _same_start(before + delta, again, "the delta")

    def _prove_contents(self, schemas: Schemas, text: str) -> None:
        """Contents reach the prompt as they are."""
        roles = ("system", "user", "assistant", "tool", "user")
        messages = [Message(r, text) for r in roles]  # type: ignore[arg-type]
        pieces = self._literals(roles, schemas)
        ours = pieces[0] + "".join(text + piece for piece in pieces[1:])
        _same_start(ours, self._render(messages, schemas, True), f"a content of {text!r}")


def _same_start(expected: str, rendered: str, what: str) -> None:
    if rendered.startswith(expected):
        return
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, rendered, strict=False)) if a != b),
        min(len(expected), len(rendered)),
    )
    raise TemplateError(
        f"the chat template is not append-only: {what} renders differently later. At character"
        f" {at}: first {expected[max(0, at - 20) : at + 20]!r}, then"
        f" {rendered[max(0, at - 20) : at + 20]!r}. Such a template would train on tokens that"
        " were never sampled; take the model's training variant of it, or a ChatML one."
    )


def _without_added_tokens(backend: Tokenizer) -> Tokenizer:
    """A copy of the tokenizer for which `<|im_end|>` is ten characters of text."""
    state = json.loads(backend.to_str())
    state["added_tokens"] = []
    state["post_processor"] = None
    return Tokenizer.from_str(json.dumps(state))
