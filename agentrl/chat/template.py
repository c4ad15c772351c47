r"""Encode conversations as token ids, turn by turn, as a chat template writes them.

Training needs the tokens that the engine sampled, not tokens with the same text. So the row of an
episode only grows: the prompt, then the sampled tokens, then the *delta* of new messages, and so
on. A sampled token is never decoded and encoded again.

The delta is what the template writes between an assistant turn and the next one. It is read once
from a short probe conversation, with placeholders for contents. After that, a turn costs only the
encoding of its new text, however long the history is; if a user speaks, it also costs one rendering
of the probe, because some templates look at what users write. Contents are encoded separately from
the template's text, by a copy of the tokenizer without control tokens, so the text of a tool cannot
become a control token.

A template that drops the thinking of earlier turns changes earlier tokens. Then a row either keeps
the sampled tokens, or a new row begins (`conversation(..., strip=True)`). `verify_template.py`
finds out which of the two a template needs, or refuses it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import orjson

from agentrl.chat.encoding import Encoder
from agentrl.chat.formats import REACT_STOP
from agentrl.chat.images import TemplateImages, images_of, message_dict, require_rule
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
    markers,
    remove_markers,
    split_at_markers,
    split_rendering,
    strings,
)
from agentrl.chat.thinking import Thinking
from agentrl.chat.tokenizer import end_of_turn_ids, load_tokenizer
from agentrl.chat.turn_delta import PROBE_QUESTION, PROBE_TEXT, TemplateProbe, TurnDelta, probe_turn
from agentrl.errors import TemplateError
from agentrl.images import ImageRule
from agentrl.trajectory import Message, ToolCall, token_array

T = TypeVar("T")

MAX_CACHED = 512


class ChatTemplate:
    """A tokenizer's chat template, which encodes conversations.

    Attributes:
        stop_ids: the tokens that end a sampled turn: the template's token, the EOS, `end_ids`.
        closes: whether the template closes each turn with a closing token.
        close_id: the token that closes a turn or, if `closes` is false, begins the next role.
        images: how model and template read images; None: the model reads none.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_ids: Sequence[int] = (),
        *,
        variables: Mapping[str, Any] | None = None,
        untrusted: bool = False,
        images: ImageRule | None = None,
    ):
        """Find the tokens that close a turn, and the text that the template writes between turns.

        Args:
            tokenizer: a fast transformers tokenizer with a chat template.
            end_ids: further tokens that end the model's turns.
            variables: further variables of the template (`enable_thinking`).
            untrusted: whether prompts are untrusted, and may not contain tags such as `<think>`.
            images: how the model turns images into tokens; None: it reads none.

        Raises:
            TemplateError: if turns cannot be encoded with this template.
        """
        self.tokenizer = tokenizer
        self.encoder = Encoder(tokenizer)
        self.render = Renderer(tokenizer, variables or {})
        self._untrusted = untrusted
        self.images = images and TemplateImages(images, self.render, self.encoder)
        self._prompt_ids: dict[Any, array[int]] = {}
        """The tokens of whole prompts, because all rollouts of a row have the same prompt."""
        self._schema_tokens: dict[str | bytes, frozenset[str]] = {}
        """The control tokens in the text of tools' schemas, by the schemas."""
        self._prompt_parts: dict[Any, tuple[TemplateParts, int]] = {}
        """The parts of prompts, and the number of control tokens in their schemas."""
        self._deltas: dict[Any, TurnDelta] = {}
        self._ends = {i for i in (tokenizer.eos_token_id, *end_ids) if i is not None}
        self.probe = TemplateProbe(self.render, self.encoder, self._ends)
        user = self.probe.turn_delta((), (Message("user", ""),))
        if user.parts.first not in self.encoder.control_ids:
            raise TemplateError(
                f"the chat template writes {self._text_after_answer()!r} right after an assistant"
                " message. It does not begin with a control token, so the engine cannot detect the"
                " end of a turn. If it contains the end token, add this token to the tokenizer's"
                " added tokens."
            )
        self._probed = [user]
        self.closes = user.closes
        self.close_id = self.probe.last_close() if self.closes else user.parts.first
        self._ends.add(self.close_id)
        self._before_close = self.probe.space_before_close(
            [PROBE_QUESTION, probe_turn()], PROBE_TEXT
        )
        """The white space that the template writes before the token that closes a turn, or ""."""
        self._positional = False
        """True if the text between turns depends on earlier turns."""
        self._probe_tool_results()
        ends = (self.close_id, tokenizer.eos_token_id, *end_ids, *sorted(self._ends))
        self.stop_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
        self.thinking = Thinking.of(self.probe)
        thought = self.encoder.encode_trusted(self.thinking.begin + self.thinking.end)
        template_ids = {i for b in self._probed for i in b.parts.ids} | self._role_ids()
        self.encoder.restrict_tags((template_ids | self._ends) - set(thought))
        self._end_ids = self.stop_ids
        if images:
            # No engine can continue a row in which the policy has sampled a placeholder.
            self.stop_ids += (images.token_id,)

    def __reduce__(self) -> tuple[Any, ...]:
        """Make an equal template in another process."""
        rule = self.images and self.images.rule
        options = {
            "variables": self.render.variables,
            "untrusted": self._untrusted,
            "images": rule,
        }
        return partial(ChatTemplate, **options), (self.tokenizer, self._end_ids)

    @classmethod
    def load(cls, path: str | Path) -> ChatTemplate:
        """Load the chat template of a model folder or a hub name.

        Raises:
            UserError: if there is no tokenizer, or one that cannot be used.
        """
        return cls(load_tokenizer(path), end_of_turn_ids(path), images=ImageRule.load(path))

    # -- messages to ids --------------------------------------------------------------------------

    def prompt(
        self,
        messages: Sequence[Message],
        schemas: Schemas = (),
        is_from_row: Callable[[Message], bool] = bool,
        *,
        exact: bool = True,
    ) -> array[int]:
        """Return the tokens of a conversation, with the header of the next assistant turn.

        Contents are encoded separately from the template, and cannot become role tokens. Only
        assistant messages (few-shot turns of the dataset) may contain role tokens. The ids decode
        to the text that the template renders for this conversation.

        Args:
            messages: the conversation.
            schemas: the schemas of the tools that the template shows.
            is_from_row: returns whether a message is from the dataset row, and may contain tags
                (`<think>`).
            exact: whether the ids must decode to the rendered text. If false, a conversation for
                which this is impossible is encoded as if its contents were placeholders.

        Raises:
            TemplateError: if `exact` is true, and the template refuses the conversation or mixes
                its text with the contents.
        """
        may_tag = tuple([self._may_contain_tags(m) and is_from_row(m) for m in messages])
        contents = tuple([(m.role, m.content, m.images and _keys_of(m)) for m in messages])
        key = contents, may_tag, _key_of(schemas)
        ids = self._prompt_ids.get(key)
        if ids is None:
            marked = self._mark(messages)
            try:
                ids = self._encode_prompt(messages, marked, schemas, may_tag)
            except TemplateError:
                if exact:
                    raise
                ids = self._encode_unchecked(marked, schemas, may_tag)
                return self._expand(ids, messages)
            ids = self._expand(ids, messages)
            _cache(self._prompt_ids, key, ids)
        return ids[:]

    def length(self, messages: Sequence[Message], schemas: Schemas = ()) -> int:
        """Return the number of tokens of a prompt.

        This is faster than `prompt`, which also compares the tokens with the rendered text.
        """
        ids = self._encode_unchecked(self._mark(messages), schemas, [False] * len(messages))
        return len(self._expand(ids, messages))

    def control_tokens_of(self, schemas: Schemas) -> frozenset[str]:
        """Return the texts of the control tokens in the strings of tool schemas."""
        key = _key_of(schemas)
        if (found := self._schema_tokens.get(key)) is None:
            found = frozenset().union(*map(self.encoder.control_tokens_in, strings(schemas)))
            _cache(self._schema_tokens, key, found)
        return found

    def schema_control_tokens(self, messages: Sequence[Message], schemas: Schemas) -> int:
        """Return the number of control tokens in the tool schemas of a prompt, if there are any.

        In the prompt, they are plain text.
        """
        return self._parts_of_prompt(messages, schemas)[1] if schemas else 0

    def delta(
        self, history: Sequence[Message], messages: Sequence[Message], last_id: int
    ) -> array[int]:
        """Return the tokens between a sampled turn and the next turn.

        They are the closing token, the new messages, and the header of the next turn.

        Args:
            history: the conversation up to and including the assistant turn.
            messages: the new messages (tool, user), in order.
            last_id: the last sampled token. If it closes the turn, it is not repeated.
        """
        key: Any = tuple([m.role for m in messages])
        if self._positional:
            history = [*self.delta_history(history[:-1]), history[-1]]
            key = (key, _roles_of(history))
        delta = self._deltas.get(key)
        if delta is None:
            before = history[:-1] if self._positional else ()
            delta = _cache(self._deltas, key, self.probe.turn_delta(before, messages))
        marked = self._mark(messages)
        contents = [m.content for m in marked]
        if delta.names:
            calls = history[-1].tool_calls
            by_id = {c.id: c for c in calls if c.id}
            results = [m for m in messages if m.role == "tool"]
            for i, result in enumerate(results):
                call = by_id.get(result.tool_call_id) or (calls[i] if i < len(calls) else None)
                name, id = (call.name, call.id) if call else ("", result.tool_call_id)
                contents += [name or "tool", id or f"{i:09d}"]
        ids = delta.parts.fill(contents, self._encode_region)
        if not delta.names and any(m.role == "user" for m in messages):
            ids = self._adapt_to_contents(ids, delta, marked)
        if marked is not messages:
            self._check_images(ids, delta, messages)
        ids = self._expand(ids, messages)
        # A sampled token of the next role (GLM's `<|user|>`) stays, even if another role follows.
        if 0 <= last_id == delta.parts.first or (delta.closes and last_id in self._ends):
            return ids[1:]
        # A truncated turn lacks the white space that the model writes before the closing token.
        space = "" if history[-1].tool_calls else self._before_close
        if space and last_id >= 0 and self.decode([last_id]).endswith(space):
            space = ""
        return self.encoder.encode_plain(space) + ids if space else ids

    def delta_history(self, history: Sequence[Message]) -> list[Message]:
        """Return the messages on which a later `delta` depends, apart from its last turn.

        Args:
            history: the conversation, which does not end with an assistant turn.
        """
        return _drop_repeated_rounds(history) if self._positional else []

    def conversation(
        self,
        messages: Sequence[Message],
        schemas: Schemas = (),
        turn_ids: Mapping[int, Sequence[int]] | None = None,
        *,
        foreign: Container[int] = (),
        strip: bool = False,
        is_from_row: Callable[[Message], bool] = bool,
    ) -> array[int]:
        """Return the tokens of a conversation whose assistant turns have given ids.

        The header of the next assistant turn follows.

        Args:
            messages: the whole conversation; the last message is not the assistant's.
            schemas: the schemas of the tools in the prompt.
            turn_ids: the ids of assistant messages by their index in `messages`: those that the
                policy sampled, or those of `foreign_turn`. Assistant messages before the first of
                them are few-shot turns.
            foreign: the indices of the turns that the policy did not sample.
            strip: remove the thinking of earlier turns if the template drops it.
            is_from_row: as for `prompt`.
        """
        turn_ids = turn_ids or {}
        indices = [i for i, m in enumerate(messages) if m.role == "assistant" and i in turn_ids]
        if not indices:
            return self.prompt(messages, schemas, is_from_row, exact=False)
        history: Sequence[Message] = messages[: indices[0]]
        ids = self.prompt(history, schemas, is_from_row, exact=False)
        last = {(m.role, bool(m.tool_calls)): i for i, m in enumerate(messages)}
        last_user, last_answer = last.get(("user", False), -1), last.get(("assistant", False), -1)
        for i, end in zip(indices, [*indices[1:], len(messages)], strict=True):
            turn, start = turn_ids[i], len(ids)
            calls = bool(messages[i].tool_calls)
            if strip and self.thinking.drops(
                turn, calls, later_user=i < last_user, later_answer=i < last_answer
            ):
                start = self.thinking.strip(ids, turn, calls)
            elif i in foreign:
                start = self.append_foreign(ids, turn)
            else:
                ids.extend(turn)
            # An empty turn: the last token of the prompt may be an EOS (Phi's `<|assistant|>`).
            last_id = ids[-1] if len(ids) > start else -1
            history, new = [*history, messages[i]], messages[i + 1 : end]
            ids.extend(self.delta(history, new, last_id))
            history = self.delta_history([*history, *new])
        return ids

    def foreign_turn(self, content: str, calls: Sequence[ToolCall] = ()) -> array[int]:
        """Return the tokens of an assistant turn that the policy did not sample.

        They are what the template writes for an earlier turn, without its header and without the
        token that closes it. The strings of the turn cannot become role tokens.

        Args:
            content: the text of the turn without its calls.
            calls: its well-formed calls.

        Raises:
            TemplateError: if the template does not write the turn.
        """
        begin, end = markers(0)
        forms = [
            # Most templates write calls. DeepSeek's need the arguments as text.
            *(_marked_turn(content, calls, as_text) for as_text in (False, True)),
            # In other templates, calls are part of the text of turns.
            _marked_turn("\n".join([content, *map(_hermes, calls)]).strip(), (), False),
        ]
        for turn in forms:
            marks = "".join(strings(turn)).count(begin)
            has_both = content and turn.get("tool_calls")  # It may write the calls alone.
            rendered = self.render.attempt([PROBE_QUESTION, turn, PROBE_QUESTION]) or ""
            count, names = rendered.count(begin), [call.name for call in calls]
            if marks - bool(has_both) <= count <= marks and all(n in rendered for n in names):
                break
        else:
            raise TemplateError(
                f"the chat template does not write an assistant message with {len(calls)} tool"
                f" calls and the text {content[:60]!r}"
            )
        text = rendered[self.encoder.shared_length(self.render([PROBE_QUESTION]), rendered) :]
        head, last_mark, tail = text.rpartition(end)
        tokens = [*self.encoder.control.finditer(tail)]
        closing = [t for t in tokens if self.encoder.encode_trusted(t[0])[0] in self._ends]
        # gpt-oss ends a turn with calls by another token.
        text = head + last_mark + tail[: (closing or tokens)[0].start()]
        encode = partial(self._encode_region, tags=(True,))
        return encode_parts(self.encoder, [text], []).fill((), encode)

    def append_foreign(self, ids: array[int], turn: Sequence[int]) -> int:
        """Append a turn of `foreign_turn` after the header of an assistant turn.

        Text that the template writes only before new turns (`<think>`) is removed from the header.

        Returns:
            The index at which the turn begins.
        """
        self.thinking.remove_prefix(ids)
        start = len(ids)
        ids.extend(turn)
        return start

    def trace(
        self,
        messages: Sequence[Message],
        schemas: Schemas = (),
        stop: str = REACT_STOP,
        trained: Sequence[bool] | None = None,
    ) -> tuple[array[int], array[int]]:
        """Encode a finished conversation as a training row.

        Args:
            messages: the conversation; the last message is the assistant's.
            schemas: the schemas of the tools in the prompt.
            stop: a stop string. If an assistant text ends with it, the token that closes the turn
                is the template's, not the assistant's.
            trained: whether each message is trained, if it is the assistant's; None: all are.

        Returns:
            Token ids and a mask of the same length: 1 on the tokens of trained assistant turns,
            including their closing tokens.
        """
        ids, mask = token_array(), token_array()

        def append(new: Sequence[int], mask_value: int) -> None:
            ids.extend(new)
            mask.extend([mask_value] * len(new))

        last, history = -1, []
        for i, message in enumerate(messages):
            if message.role != "assistant":
                continue
            new = messages[last + 1 : i]
            if last < 0:
                append(self.prompt(new, schemas), 0)
            else:
                delta = self.delta(history, new, ids[-1])
                if not self.closes and ids[-1] == self.close_id != delta[0]:
                    # The turn ends with the token of the next role, which is not the usual one.
                    ids[-1], delta = delta[0], delta[1:]
                append(delta, 0)
            is_closed = not (stop and message.content.endswith(stop))
            content = message.content + self._before_close * is_closed
            turn = [*self.encoder.encode_trusted(content), *[self.close_id] * is_closed]
            append(turn, trained is None or trained[i])
            last, history = i, [*self.delta_history([*history, *new]), message]
        if last != len(messages) - 1 or not ids:
            raise ValueError("a trace must end with an assistant message")
        if ids[-1] != self.close_id:
            append([*self.encoder.encode_plain(self._before_close), self.close_id], 0)
        return ids, mask

    # -- ids and text -----------------------------------------------------------------------------

    def encode(self, text: str) -> array[int]:
        """Encode untrusted text. No id is a control token, whatever the text contains."""
        return self.encoder.encode_plain(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of sampled ids, with control tokens."""
        return self.encoder.decode(ids)

    def decode_plain(self, ids: Sequence[int]) -> str:
        """Return the text of ids from `encode`."""
        return self.encoder.decode_plain(ids)

    def count_control_tokens(self, message: Message, is_from_row: bool = False) -> int:
        """Count the control tokens in a message, except those that the message may contain.

        Args:
            message: a message that is not the assistant's.
            is_from_row: whether the message is from the dataset row.
        """
        may_tag = is_from_row and self._may_contain_tags(message)
        return self.encoder.count_control_tokens(
            message.content, self.encoder.tags if may_tag else frozenset()
        )

    def decode_turn(self, ids: Sequence[int]) -> str:
        """Return the text of one sampled turn, without the token that closes it."""
        is_closed = len(ids) > 0 and ids[-1] in self._ends
        return self.encoder.decode(ids[:-1] if is_closed else ids)

    def split_thinking(
        self, prompt_end: array[int], text: str, calls: Sequence[ToolCall]
    ) -> tuple[str, str]:
        """Split the text of a turn.

        Args:
            prompt_end: the last ids before the turn, which may begin a thought.
            text: the text of the turn.
            calls: calls of the turn, with their spans in its text.

        Returns:
            The thinking, and the rest of the text without these calls; both without control tokens
            and without white space at their ends. Without calls, the rest keeps its tags.
        """
        answer = self.thinking.answer_of(text, bool(self.thinking.opening(prompt_end)), bool(calls))
        first = len(text) - len(answer)
        for call in sorted(calls, key=lambda c: c.span or (0, len(text)), reverse=True):
            start, end = call.span or (0, len(text))
            answer = answer[: max(start - first, 0)] + answer[max(end - first, 0) :]
        # Tags around calls are not text; tags of a malformed call are what the policy wrote.
        kept = frozenset() if calls else self.encoder.tags
        return self._without_control_tokens(text[:first]), self._without_control_tokens(
            answer, kept
        )

    def _without_control_tokens(self, text: str, kept: Container[int] = ()) -> str:
        """Return a text, stripped, without its control tokens except those in `kept`."""

        def replace(match: Any) -> str:
            return match[0] if self.encoder.encode_trusted(match[0])[0] in kept else ""

        return self.encoder.control.sub(replace, text).strip()

    def _may_contain_tags(self, message: Message) -> bool:
        """Return whether a message may contain tags if it is from the dataset row."""
        return message.role != "tool" and not self._untrusted

    def _encode_region(
        self, text: str, inside: Sequence[int | None], tags: Sequence[bool] = ()
    ) -> array[int]:
        """Encode a region with contents. It may contain tags if all of its contents may.

        Args:
            text: the text of the region.
            inside: the indices of its contents; None for a string of a tool's schema.
            tags: for each content, whether it may contain tags; () if none may.
        """
        may_tag = bool(tags) and all(i is not None and tags[i] for i in inside)
        plain = self.encoder.encode_prompt_text if may_tag else self.encoder.encode_plain
        return self.images.encode(text, plain) if self.images else plain(text)

    # -- what the template writes -----------------------------------------------------------------

    def _mark(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages with a mark for each image in their texts; see `TemplateImages.mark`."""
        if self.images:
            return self.images.mark(messages)
        if images_of(messages):
            require_rule(self.images)
        return messages

    def _expand(self, ids: array[int], messages: Sequence[Message]) -> array[int]:
        return self.images.expand(ids, messages) if self.images else ids

    def _check_images(self, ids: array[int], delta: TurnDelta, messages: Sequence[Message]) -> None:
        """Raise `TemplateError` if the template writes messages with images in another way.

        Args:
            ids: the tokens between two turns, with one placeholder for each image.
            delta: the text that the template writes between the turns.
            messages: the messages between them.
        """
        text = delta.render([message_dict(m)["content"] for m in messages])
        if not delta.names and not self.encoder.decodes_to(ids, text):
            roles = ", ".join(m.role for m in messages if m.images)
            raise TemplateError(
                f"the chat template writes messages with images ({roles}) in another way than"
                f" texts: {text!r:.200} instead of {self.decode(ids)!r:.200}. Use the chat template"
                " of a model that reads images there"
            )

    def _encode_prompt(
        self,
        messages: Sequence[Message],
        marked: Sequence[Message],
        schemas: Schemas,
        may_tag: Sequence[bool],
    ) -> array[int]:
        """Return the tokens of a prompt, checked against the rendered text.

        Args:
            messages: the conversation.
            marked: the same, with a mark for each image.
            schemas: the schemas of the tools that the template shows.
            may_tag: for each message, whether it may contain tags.

        Raises:
            TemplateError: if the tokens do not decode to the rendered text.
        """
        text = self.render([message_dict(m) for m in messages], schemas)
        ids = self._encode_unchecked(marked, schemas, may_tag)
        if self.encoder.decodes_to(ids, text):
            return ids
        # The template branches on the contents, or on whether they are empty.
        parts, _ = self._make_parts(marked, schemas, with_contents=True)
        ids = parts.fill((), self._region_encoder(marked, may_tag))
        if not self.encoder.decodes_to(ids, text):
            decoded = self.decode(ids)
            index = self.encoder.shared_length(decoded, text)
            raise TemplateError(
                "agentrl cannot encode this prompt as the chat template renders it. The first"
                f" difference is at character {index}: the template writes"
                f" {text[index : index + 60]!r}, agentrl writes {decoded[index : index + 60]!r}."
                " Change the row, or use another template."
            )
        return ids

    def _encode_unchecked(
        self, messages: Sequence[Message], schemas: Schemas, may_tag: Sequence[bool]
    ) -> array[int]:
        """Return the tokens of a prompt, assuming that the template does not read contents."""
        parts, _ = self._parts_of_prompt(messages, schemas)
        contents = [m.content for m in messages if m.role != "assistant"]
        return parts.fill(contents, self._region_encoder(messages, may_tag))

    def _region_encoder(
        self, messages: Sequence[Message], may_tag: Sequence[bool]
    ) -> Callable[[str, Sequence[int | None]], array[int]]:
        """Return the function that encodes a region of a prompt."""
        tags = [may for m, may in zip(messages, may_tag, strict=True) if m.role != "assistant"]
        return partial(self._encode_region, tags=tags)

    def _parts_of_prompt(
        self, messages: Sequence[Message], schemas: Schemas
    ) -> tuple[TemplateParts, int]:
        """Return the parts of a prompt and the number of control tokens in its schemas.

        The result is cached. The date is part of the cache key, because templates may write it.
        """
        texts = tuple([m.content if m.role == "assistant" else "" for m in messages])
        key = (tuple([m.role for m in messages]), texts, _key_of(schemas), date.today())
        return self._prompt_parts.get(key) or _cache(
            self._prompt_parts, key, self._make_parts(messages, schemas)
        )

    def _make_parts(
        self, messages: Sequence[Message], schemas: Schemas, with_contents: bool = False
    ) -> tuple[TemplateParts, int]:
        """Return the parts of a prompt, and the number of control tokens in its schemas.

        Args:
            messages: the prompt. The messages that are not the assistant's have untrusted contents.
            schemas: the schemas of the tools that the template shows.
            with_contents: whether the parts have these contents, for a template that reads them.
                Otherwise they have slots for any contents.

        Raises:
            TemplateError: if the template does not write each content once, or if one of these
                contents cannot be located in the rendered text.
        """
        untrusted = [i for i, m in enumerate(messages) if m.role != "assistant"]

        def render(contents: Mapping[int, str], schemas: Schemas) -> str:
            as_dicts = [m.as_dict() for m in messages]
            for i, content in contents.items():
                as_dicts[untrusted[i]]["content"] = content
            return self.render(as_dicts, schemas)

        marks = {} if with_contents else {i: content_mark(i) for i in range(len(untrusted))}
        count = 0
        if schemas:
            schemas, count = guard_schemas(self.encoder, partial(render, marks), schemas)
        others = [messages[i] for i in untrusted]
        if with_contents:
            return self._locate(lambda contents: render(contents, schemas), others), count
        texts, slots = split_rendering(
            lambda contents: render(dict(enumerate(contents)), schemas), [m.role for m in others]
        )
        return encode_parts(self.encoder, texts, slots), count

    def _adapt_to_contents(
        self, ids: array[int], delta: TurnDelta, messages: Sequence[Message]
    ) -> array[int]:
        """Return the tokens between two turns as the template writes them for these contents.

        Args:
            ids: the tokens that a template writes if it does not depend on the contents. They are
                returned unchanged if this is such a template, if it refuses the contents, or if
                the place of the contents in its text cannot be found.
            delta: the text that the template writes between the turns.
            messages: the messages after the first turn.
        """

        def render(contents: Mapping[int, str]) -> str:
            return delta.render([contents.get(i, m.content) for i, m in enumerate(messages)])

        try:
            text = render({})
            if self.images:
                text = self.images.show(text)
            if self.encoder.decodes_to(ids, text):
                return ids
            adapted = self._locate(render, messages).fill((), self._encode_region)
        except TemplateError:
            return ids
        return adapted if self.encoder.decodes_to(adapted, text) else ids

    def _locate(
        self, render: Callable[[Mapping[int, str]], str], messages: Sequence[Message]
    ) -> TemplateParts:
        """Return the parts of a conversation with these contents, as one region per content.

        Args:
            render: renders the conversation with other contents, by the index of their message.
            messages: the messages with untrusted contents.

        Raises:
            TemplateError: if a content cannot be located in the rendered text.
        """
        contents = [m.content for m in messages]
        unsafe = [
            i for i, c in enumerate(contents) if not self.encoder.cannot_form_control_token(c)
        ]
        text = render({})
        marked = render({i: mark_core(contents[i], i) for i in unsafe})
        indices = [p.index for p in split_at_markers(marked) if isinstance(p, MarkedText)]
        all_marked = sorted(i for i in indices if i is not None) == unsafe
        if all_marked and remove_markers(marked) == remove_markers(text):
            return encode_parts(self.encoder, [marked], [])
        spans = []
        for i in unsafe:
            span = find_content(lambda changed, i=i: render({i: changed}), text, contents[i])
            if span is None:
                raise TemplateError(
                    f"agentrl cannot locate the content of this {messages[i].role} message in the"
                    " rendered prompt, because the chat template changes messages by their text:"
                    f" {contents[i][:80]!r}. Remove control tokens from it, or use another"
                    " template."
                )
            spans.append((*span, i))
        for start, end, index in sorted(spans, reverse=True):
            text = text[:start] + add_markers(text[start:end], index) + text[end:]
        return encode_parts(self.encoder, [text], [])

    def _text_after_answer(self) -> str:
        """Return the text between an assistant message and a user's, as the template writes it."""
        probe = [
            Message("user", "Q"),
            Message("assistant", PROBE_TEXT),
            Message("user", "zqnextqz"),
        ]
        text = self.render([m.as_dict() for m in probe])
        return text.partition(PROBE_TEXT)[2].partition("zqnextqz")[0]

    def _role_ids(self) -> set[int]:
        """Return the tokens that the template writes in prompts.

        They are role tokens, even if the tokenizer does not mark them as special (Cohere's does not
        mark all of them).
        """
        ids: set[int] = set()
        system, user = Message("system", ""), Message("user", "")
        for messages in ([user], [system, user]):
            with suppress(TemplateError):
                ids |= self._make_parts(messages, ())[0].ids
        return ids

    def _probe_tool_results(self) -> None:
        """Find out whether the text after a call depends on earlier turns."""
        call, result = ToolCall("zqa", {}, id="zq0000001"), Message("tool", "")
        try:
            first = self.probe.turn_delta((), (result,))
        except TemplateError:
            return  # the first tool result raises this error
        self._probed.append(first)
        if first.parts.first in self.encoder.control_ids:
            self._ends.add(first.parts.first)
        question, turn = Message("user", "Q"), Message("assistant", "", (call,))
        try:
            second = self.probe.turn_delta((question, turn, result), (result,))
        except TemplateError:
            return
        self._positional = first != second


def _marked_turn(content: str, calls: Sequence[ToolCall], as_text: bool) -> dict[str, Any]:
    """Return an assistant message for a template, with markers around its strings."""

    def mark(node: Any) -> Any:
        if isinstance(node, str):
            return mark_core(node, 0)
        if isinstance(node, Mapping):
            return {mark(key): mark(value) for key, value in node.items()}
        return [*map(mark, node)] if isinstance(node, list | tuple) else node

    message: dict[str, Any] = {"role": "assistant", "content": mark_core(content, 0)}
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id or f"{i:09d}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(arguments) if as_text else arguments,
                },
            }
            for i, call in enumerate(calls)
            for arguments in (mark(call.arguments),)
        ]
    return message


def _hermes(call: ToolCall) -> str:
    """Return a call in the format of models whose template has no format for it."""
    body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def _keys_of(message: Message) -> tuple[str, ...]:
    return tuple([image.key for image in message.images])


def _key_of(schemas: Schemas) -> str | bytes:
    """Return a text that is equal for equal schemas only."""
    try:
        return orjson.dumps(schemas) if schemas else b""
    except TypeError:  # a number of more than 64 bits, or half a surrogate pair
        return json.dumps(schemas)


def _roles_of(messages: Sequence[Message]) -> tuple[tuple[str, bool], ...]:
    return tuple([(m.role, bool(m.tool_calls)) for m in messages])


def _drop_repeated_rounds(history: Sequence[Message]) -> list[Message]:
    """Return a history without the rounds that have the same roles as the two rounds before."""
    starts = [i for i, m in enumerate(history) if m.role == "assistant"]
    rounds = [history[a:b] for a, b in pairwise([*starts, len(history)])]
    result = list(history[: starts[0]] if starts else history)
    shapes: list[Any] = []
    for messages in rounds:
        if shapes[-2:] != [shape := _roles_of(messages)] * 2:
            result += messages
            shapes.append(shape)
    return result


def _cache(cache: dict[Any, T], key: Any, value: T) -> T:
    if len(cache) >= MAX_CACHED:
        cache.clear()
    cache[key] = value
    return value
