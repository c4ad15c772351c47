r"""What a chat template puts around messages, as token ids, turn by turn.

Training needs the tokens that the engine sampled, not tokens that look like them. So an episode's
row only ever grows: the prompt, then what was sampled, then the *delta* of new messages, and so on.
A sampled token is never decoded and encoded again.

The delta is what the template writes between an assistant's turn and the next: found once, by
rendering a conversation that stands where the true one does, with marks for contents. From then on,
a turn costs the encoding of its new text, however long the history, and where a user speaks one
rendering of that short conversation: some templates look at what users say. Contents are encoded
apart from the template's text, by a copy of the tokenizer that owns no control tokens: a tool's
text cannot become one.

Templates that drop the thinking of earlier turns rewrite what was said. There a row either keeps
what was sampled, or a new row begins (`conversation(..., strip=True)`). `proof.py` shows for a
template which of the two it needs, or refuses it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from agentrl.chat.encoding import Encoder
from agentrl.chat.formats import REACT_STOP
from agentrl.chat.render import (
    MarkedText,
    Renderer,
    Schemas,
    TemplateParts,
    add_markers,
    content_mark,
    encode_parts,
    find_content,
    guard_schemas,
    mark_core,
    remove_markers,
    split_at_markers,
    split_rendering,
    strings,
)
from agentrl.chat.thinking import Thinking
from agentrl.chat.tokenizer import end_of_turn_ids, load_tokenizer
from agentrl.chat.turn_delta import PROBE_QUESTION, PROBE_TEXT, TemplateProbe, TurnDelta, probe_turn
from agentrl.errors import TemplateError
from agentrl.trajectory import Message, ToolCall, token_array

T = TypeVar("T")

MAX_CACHED = 512


class ChatTemplate:
    """A tokenizer's chat template.

    Attributes:
        stop_ids: the tokens that end a sampled turn: the template's, the EOS, `end_ids`.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_ids: Sequence[int] = (),
        *,
        variables: Mapping[str, Any] | None = None,
        untrusted: bool = False,
    ):
        """Find what closes a turn and what stands between turns.

        Args:
            tokenizer: a fast transformers tokenizer with a chat template.
            end_ids: tokens that end the model's turns besides the template's and the tokenizer's.
            variables: further variables of the template (`enable_thinking`).
            untrusted: whether prompts may not hold tags such as `<think>` either.

        Raises:
            TemplateError: no turns can be made with this template.
        """
        self.tokenizer = tokenizer
        self.encoder = Encoder(tokenizer)
        self.render = Renderer(tokenizer, variables or {})
        self._untrusted = untrusted
        self._prompt_ids: dict[Any, array[int]] = {}
        """The tokens of whole prompts: all rollouts of a row begin with the same."""
        self._prompt_parts: dict[Any, tuple[TemplateParts, int]] = {}
        """The frames of prompts, and how many control tokens the schemas in them spell."""
        self._deltas: dict[Any, TurnDelta] = {}
        self._ends = {i for i in (tokenizer.eos_token_id, *end_ids) if i is not None}
        self.probe = TemplateProbe(self.render, self.encoder, self._ends)
        user = self.probe.between((), (Message("user", ""),))
        if user.parts.first not in self.encoder.control_ids:
            raise TemplateError(
                f"the chat template writes {self._after_an_answer()!r} right after an assistant"
                " message. It does not begin with a control token, so the engine cannot detect the"
                " end of a turn. If it contains the end token, add this token to the tokenizer's"
                " added tokens."
            )
        self._shown = [user]
        self.closes = user.closes
        self.close_id = self.probe.last_close() if self.closes else user.parts.first
        self._ends.add(self.close_id)
        self._before_close = self.probe.space_before_close(
            [PROBE_QUESTION, probe_turn()], PROBE_TEXT
        )
        """White space, in templates that write some before the token that closes a turn."""
        self._positional = False
        self._look_at_tools()
        ends = (self.close_id, tokenizer.eos_token_id, *end_ids, *sorted(self._ends))
        self.stop_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
        self.thinking = Thinking.of(self.probe)
        thought = self.encoder.encode_template_text(self.thinking.begin + self.thinking.end)
        shown = {i for b in self._shown for i in b.parts.ids} | self._roles()
        self.encoder.guard((shown | self._ends) - set(thought))

    @classmethod
    def load(cls, path: str | Path) -> ChatTemplate:
        """The template of a model's folder or hub name.

        Raises:
            UserError: no tokenizer there, or one that cannot be used.
        """
        return cls(load_tokenizer(path), end_of_turn_ids(path))

    # -- messages to ids --------------------------------------------------------------------------

    def prompt(
        self,
        messages: Sequence[Message],
        schemas: Schemas = (),
        given: Callable[[Message], bool] = bool,
        *,
        exact: bool = True,
    ) -> array[int]:
        """The tokens of a conversation up to where the assistant speaks next.

        Contents are encoded apart from the template, free of its role and turn tokens; only
        assistant messages (few-shot turns the user wrote) may hold those. Decoded, the tokens are
        what the template writes for this very conversation.

        Args:
            messages: the conversation.
            schemas: the tools that the template shows.
            given: whether a message is a dataset row's own, and may speak of tags (`<think>`).
            exact: if False, a conversation that the template refuses, or writes in a way in which
                its own text cannot be told from the messages', is encoded as one with other texts.

        Raises:
            TemplateError: there is such a conversation, and `exact`.
        """
        may_tag = tuple([self._may_hold_tags(m) and given(m) for m in messages])
        key = (tuple([(m.role, m.content) for m in messages]), may_tag, _key_of(schemas))
        ids = self._prompt_ids.get(key)
        if ids is None:
            try:
                ids = self._encode_prompt(messages, schemas, may_tag)
            except TemplateError:
                if exact:
                    raise
                return self._filled(messages, schemas, may_tag)
            _keep(self._prompt_ids, key, ids)
        return ids[:]

    def length(self, messages: Sequence[Message], schemas: Schemas = ()) -> int:
        """Return how many tokens a prompt has.

        Faster than `prompt`, which also renders the conversation and compares.
        """
        return len(self._filled(messages, schemas, [False] * len(messages)))

    def control_tokens_of(self, schemas: Schemas) -> frozenset[str]:
        """Return the control tokens that the strings of tools' schemas spell, as texts."""
        return frozenset().union(*map(self.encoder.control_tokens_in, strings(schemas)))

    def schema_control_tokens(self, messages: Sequence[Message], schemas: Schemas) -> int:
        """Return how many control tokens the tools' schemas spell in a prompt; none becomes one."""
        return self._frame(messages, schemas)[1] if schemas else 0

    def delta(
        self, history: Sequence[Message], messages: Sequence[Message], last_id: int
    ) -> array[int]:
        """The tokens between a sampled turn and the next: its close, new messages, the new header.

        Args:
            history: the conversation, up to and with the assistant's turn.
            messages: what was said since (tool, user), in order.
            last_id: the last sampled token; where it closes the turn itself, it is not repeated.
        """
        key: Any = tuple([m.role for m in messages])
        if self._positional:
            history = [*_without_repeats(history[:-1]), history[-1]]
            key = (key, _shape(history))
        between = self._deltas.get(key)
        if between is None:
            before = history[:-1] if self._positional else ()
            between = _keep(self._deltas, key, self.probe.between(before, messages))
        contents = [m.content for m in messages]
        if between.names:
            calls = history[-1].tool_calls
            by_id = {c.id: c for c in calls if c.id}
            results = [m for m in messages if m.role == "tool"]
            for i, result in enumerate(results):
                call = by_id.get(result.tool_call_id) or (calls[i] if i < len(calls) else None)
                name, id = (call.name, call.id) if call else ("", "")
                contents += [name or "tool", id or f"{i:09d}"]
        ids = between.parts.fill(contents, self._encode_foreign)
        if not between.names and any(m.role == "user" for m in messages):
            ids = self._compare(ids, between, messages)
        # A token of the next role (GLM's `<|user|>`) is left standing where another role follows.
        if last_id == between.parts.first or (between.closes and last_id in self._ends):
            return ids[1:]
        # A turn that was cut lacks what the model writes before the token that closes it.
        space = "" if history[-1].tool_calls else self._before_close
        if space and last_id >= 0 and self.decode([last_id]).endswith(space):
            space = ""
        return self.encoder.encode_plain(space) + ids if space else ids

    def conversation(
        self,
        messages: Sequence[Message],
        schemas: Schemas = (),
        sampled: Mapping[int, Sequence[int]] | None = None,
        *,
        strip: bool = False,
        given: Callable[[Message], bool] = bool,
    ) -> array[int]:
        """The tokens of a conversation with sampled turns, up to where the assistant speaks next.

        Args:
            messages: all of it, not ending with an assistant message.
            schemas: the tools shown in the prompt.
            sampled: the ids of assistant messages by their place in `messages`; those before the
                first of them are few-shot turns.
            strip: leave out what the template drops of earlier turns (their thinking).
            given: see `prompt`.
        """
        sampled = sampled or {}
        own = [i for i, m in enumerate(messages) if m.role == "assistant" and i in sampled]
        if not own:
            return self.prompt(messages, schemas, given, exact=False)
        ids = self.prompt(messages[: own[0]], schemas, given, exact=False)
        for i, end in zip(own, [*own[1:], len(messages)], strict=True):
            turn, start = sampled[i], len(ids)
            calls = bool(messages[i].tool_calls)
            if strip and self.thinking.drops(turn, calls, messages[i + 1 :]):
                start = self.thinking.strip(ids, turn, calls)
            else:
                ids.extend(turn)
            # A turn of no tokens: what the prompt ends with may be Phi's `<|assistant|>`, an EOS.
            last_id = ids[-1] if len(ids) > start else -1
            ids.extend(self.delta(messages[: i + 1], messages[i + 1 : end], last_id))
        return ids

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

        spoken = -1
        for i, message in enumerate(messages):
            if message.role != "assistant":
                continue
            if spoken < 0:
                append(self.prompt(messages[:i], schemas), 0)
            else:
                delta = self.delta(messages[: spoken + 1], messages[spoken + 1 : i], ids[-1])
                if not self.closes and ids[-1] == self.close_id != delta[0]:
                    # Written for one role, but another follows: its token is what ends the turn.
                    ids[-1], delta = delta[0], delta[1:]
                append(delta, 0)
            closed = not (stop and message.content.endswith(stop))
            content = message.content + self._before_close * closed
            append([*self.encoder.encode_template_text(content), *[self.close_id] * closed], 1)
            spoken = i
        if spoken != len(messages) - 1 or not ids:
            raise ValueError("a trace must end with an assistant message")
        if ids[-1] != self.close_id:
            append([*self.encoder.encode_plain(self._before_close), self.close_id], 0)
        return ids, mask

    # -- ids and text -----------------------------------------------------------------------------

    def encode(self, text: str) -> array[int]:
        """Foreign text as ids, free of control tokens whatever it contains."""
        return self.encoder.encode_plain(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, control tokens included."""
        return self.encoder.decode(ids)

    def decode_plain(self, ids: Sequence[int]) -> str:
        """The text that `encode` was given."""
        return self.encoder.decode_plain(ids)

    def count_control_tokens(self, message: Message, given: bool = False) -> int:
        """How many control tokens a message spells that it must not have.

        Args:
            message: not the assistant's.
            given: whether it is a dataset row's own.
        """
        may_tag = given and self._may_hold_tags(message)
        return self.encoder.count_control_tokens(
            message.content, self.encoder.tags if may_tag else frozenset()
        )

    def decode_turn(self, ids: Sequence[int]) -> str:
        """The text of one sampled turn, less the token that closed it."""
        closed = len(ids) > 0 and ids[-1] in self._ends
        return self.encoder.decode(ids[:-1] if closed else ids)

    def _may_hold_tags(self, message: Message) -> bool:
        """Whether a row's own message may hold tags."""
        return message.role != "tool" and not self._untrusted

    def _encode_foreign(self, text: str, inside: Sequence[int | None]) -> array[int]:
        return self.encoder.encode_plain(text)

    # -- what the template writes -----------------------------------------------------------------

    def _encode_prompt(
        self, messages: Sequence[Message], schemas: Schemas, may_tag: Sequence[bool]
    ) -> array[int]:
        """The tokens of a prompt, compared with what the template writes for it.

        Args:
            messages: the conversation.
            schemas: the tools that the template shows.
            may_tag: by message, whether it may hold tags.
        """
        text = self.render([m.as_dict() for m in messages], schemas)
        ids = self._filled(messages, schemas, may_tag)
        if self.encoder.decodes_to(ids, text):
            return ids
        # The template looks at what contents hold, or at whether there are any.
        frame = self._make_frame_of_row(messages, schemas)
        ids = frame.fill((), self._region_encoder(messages, may_tag))
        if not self.encoder.decodes_to(ids, text):
            shown = self.decode(ids)
            at = self.encoder.shared_length(shown, text)
            raise TemplateError(
                "agentrl cannot encode this prompt as the chat template renders it. The first"
                f" difference is at character {at}: the template writes {text[at : at + 60]!r},"
                f" agentrl {shown[at : at + 60]!r}. Change the row, or use another template."
            )
        return ids

    def _filled(
        self, messages: Sequence[Message], schemas: Schemas, may_tag: Sequence[bool]
    ) -> array[int]:
        """The tokens of a prompt, if the template does not look at what contents hold."""
        frame, _ = self._frame(messages, schemas)
        contents = [m.content for m in messages if m.role != "assistant"]
        return frame.fill(contents, self._region_encoder(messages, may_tag))

    def _region_encoder(
        self, messages: Sequence[Message], may_tag: Sequence[bool]
    ) -> Callable[[str, Sequence[int | None]], array[int]]:
        """How the text of a prompt's regions is encoded, by whose contents are in them."""
        tags = [may for m, may in zip(messages, may_tag, strict=True) if m.role != "assistant"]

        def encode(text: str, inside: Sequence[int | None]) -> array[int]:
            if all(i is not None and tags[i] for i in inside):
                return self.encoder.encode_prompt_text(text)
            return self.encoder.encode_plain(text)

        return encode

    def _frame(self, messages: Sequence[Message], schemas: Schemas) -> tuple[TemplateParts, int]:
        """The frame of a prompt from the cache; templates may write the date, so it is in the key.

        Args:
            messages: the conversation.
            schemas: the tools that the template shows.
        """
        texts = tuple([m.content if m.role == "assistant" else "" for m in messages])
        key = (tuple([m.role for m in messages]), texts, _key_of(schemas), date.today())
        return self._prompt_parts.get(key) or _keep(
            self._prompt_parts, key, self._make_frame(messages, schemas)
        )

    def _make_frame(
        self, messages: Sequence[Message], schemas: Schemas
    ) -> tuple[TemplateParts, int]:
        """The frame of a prompt; its slots are the messages that are not the assistant's.

        The number says how many control tokens the schemas spell.
        """
        foreign = [i for i, m in enumerate(messages) if m.role != "assistant"]

        def render(contents: Sequence[str], schemas: Schemas) -> str:
            said = [m.as_dict() for m in messages]
            for i, content in zip(foreign, contents, strict=True):
                said[i]["content"] = content
            return self.render(said, schemas)

        contents, attempts = [content_mark(i) for i in range(len(foreign))], 0
        if schemas:
            schemas, attempts = guard_schemas(
                self.encoder, lambda schemas: render(contents, schemas), schemas
            )
        roles = [messages[i].role for i in foreign]
        texts, slots = split_rendering(lambda contents: render(contents, schemas), roles)
        return encode_parts(self.encoder, texts, slots), attempts

    def _make_frame_of_row(self, messages: Sequence[Message], schemas: Schemas) -> TemplateParts:
        """The frame of this very conversation, for a template that looks at contents.

        Raises:
            TemplateError: it cannot be seen where a content stands.
        """
        said = [m.as_dict() for m in messages]
        if schemas:
            schemas, _ = guard_schemas(self.encoder, lambda s: self.render(said, s), schemas)
        foreign = [i for i, m in enumerate(messages) if m.role != "assistant"]

        def render(contents: Mapping[int, str]) -> str:
            changed = [{"role": m["role"], "content": m["content"]} for m in said]
            for i, content in contents.items():
                changed[foreign[i]]["content"] = content
            return self.render(changed, schemas)

        return self._locate(render, [messages[i] for i in foreign])

    def _compare(
        self, ids: array[int], between: TurnDelta, messages: Sequence[Message]
    ) -> array[int]:
        """Return the tokens between two turns as the template writes them for these contents.

        Args:
            ids: those that it writes if it does not look at what contents hold. They are returned
                if it does not, refuses the contents, or writes them where they cannot be found.
            between: what stands between the turns.
            messages: what follows the first turn.
        """

        def render(contents: Mapping[int, str]) -> str:
            return between.render([contents.get(i, m.content) for i, m in enumerate(messages)])

        try:
            text = render({})
            if self.encoder.decodes_to(ids, text):
                return ids
            found = self._locate(render, messages).fill((), self._encode_foreign)
        except TemplateError:
            return ids
        return found if self.encoder.decodes_to(found, text) else ids

    def _locate(
        self, render: Callable[[Mapping[int, str]], str], messages: Sequence[Message]
    ) -> TemplateParts:
        """The frame of a conversation with these contents.

        Args:
            render: the conversation, with other contents by the messages' indices.
            messages: those whose contents are not the template's.

        Raises:
            TemplateError: it cannot be seen where a content stands.
        """
        contents = [m.content for m in messages]
        bare = [i for i, c in enumerate(contents) if not self.encoder.cannot_form_control_token(c)]
        text = render({})
        marked = render({i: mark_core(contents[i], i) for i in bare})
        found = [p.index for p in split_at_markers(marked) if isinstance(p, MarkedText)]
        once = sorted(i for i in found if i is not None) == bare
        if once and remove_markers(marked) == remove_markers(text):
            return encode_parts(self.encoder, [marked], [])
        spans = []
        for i in bare:
            span = find_content(lambda changed, i=i: render({i: changed}), text, contents[i])
            if span is None:
                raise TemplateError(
                    f"agentrl cannot locate the content of this {messages[i].role} message in the"
                    " rendered prompt, because the chat template changes messages by what they"
                    f" say: {contents[i][:80]!r}. Remove control tokens from it, or use another"
                    " template."
                )
            spans.append((*span, i))
        for start, end, index in sorted(spans, reverse=True):
            text = text[:start] + add_markers(text[start:end], index) + text[end:]
        return encode_parts(self.encoder, [text], [])

    def _after_an_answer(self) -> str:
        """The text that the template writes behind an assistant message that a user answers."""
        said = [Message("user", "Q"), Message("assistant", PROBE_TEXT), Message("user", "zqnextqz")]
        text = self.render([m.as_dict() for m in said])
        return text.partition(PROBE_TEXT)[2].partition("zqnextqz")[0]

    def _roles(self) -> set[int]:
        """The template's own tokens in prompts: Cohere's for the system is not called special."""
        ids: set[int] = set()
        system, user = Message("system", ""), Message("user", "")
        for messages in ([user], [system, user]):
            with suppress(TemplateError):
                ids |= self._make_frame(messages, ())[0].ids
        return ids

    def _look_at_tools(self) -> None:
        """Whether what follows a call depends on earlier turns."""
        call, result = ToolCall("zqa", {}, id="zq0000001"), Message("tool", "")
        try:
            once = self.probe.between((), (result,))
        except TemplateError:
            return  # said when a tool's result is to be shown
        self._shown.append(once)
        if once.parts.first in self.encoder.control_ids:
            self._ends.add(once.parts.first)
        asked, called = Message("user", "Q"), Message("assistant", "", (call,))
        try:
            later = self.probe.between((asked, called, result), (result,))
        except TemplateError:
            return
        self._positional = once != later


def _key_of(schemas: Schemas) -> str:
    return json.dumps(schemas) if schemas else ""


def _shape(messages: Sequence[Message]) -> tuple[tuple[str, bool], ...]:
    return tuple([(m.role, bool(m.tool_calls)) for m in messages])


def _without_repeats(history: Sequence[Message]) -> list[Message]:
    """A history less its third round and later ones that are like the two before."""
    starts = [i for i, m in enumerate(history) if m.role == "assistant"]
    rounds = [history[a:b] for a, b in pairwise([*starts, len(history)])]
    kept = list(history[: starts[0]] if starts else history)
    last: list[Any] = []
    for messages in rounds:
        if last[-2:] != [shape := _shape(messages)] * 2:
            kept += messages
            last.append(shape)
    return kept


def _keep(cache: dict[Any, T], key: Any, value: T) -> T:
    if len(cache) >= MAX_CACHED:
        cache.clear()
    cache[key] = value
    return value
