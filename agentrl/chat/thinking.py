r"""Find out how a chat template changes the thinking of a turn when more messages follow.

Qwen3, GLM, DeepSeek R1, gpt-oss and others render the last turn with its thinking, and drop the
thinking from the next user message on. This module compares two renderings of a probe conversation:
one that ends with the turn, and one with further messages after it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from agentrl.chat.render import SALT
from agentrl.chat.turn_delta import (
    PROBE_ARGUMENT,
    PROBE_TEXT,
    TemplateProbe,
    probe_turn,
    probe_turns,
)
from agentrl.errors import TemplateError

PROBE_THOUGHT = f"zq{SALT}thoughtqz"
_QUESTION = {"role": "user", "content": "zqaskedqz"}
_MORE = {"role": "user", "content": "Q"}
_TAGGED = "\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class Thinking:
    """The difference between a turn as it is sampled and as the template renders it later."""

    probe: TemplateProbe
    after_user: bool
    """True if the thinking of turns before the last user message is dropped."""
    always: bool = False
    """True if thinking is dropped as soon as any message follows."""
    until_answer: bool = False
    """True if the thinking of a turn with calls stays until a later turn has none (gpt-oss)."""
    drops_empty_tags: bool = False
    """True if a turn without a thought loses its empty tags as soon as any message follows."""
    new_turn_prefix: str = ""
    """The text (`<think>\\n`) that the template writes before a new turn, not before old ones."""
    prefix_after_result: str = ""
    """The `new_turn_prefix` after a tool result, if it differs there (Gemma 4)."""
    old_turn_prefix: str = ""
    """The text that the template writes before old turns, but not before a new one."""
    end: str = "</think>"
    """The text that ends the thinking."""
    gap: str = "\n\n"
    """The text between the end of the thinking and the answer."""
    trims: bool = True
    """True if the template removes the empty lines before the answer."""
    heads: Mapping[tuple[bool, bool], tuple[str, str]] = field(default_factory=dict)
    """Key: whether a turn has a text, whether it has calls. Value: the text after the end of a
    thought, and the text that the template writes later in place of the thought and this text."""
    call: str = ""
    """The text that begins a call in a turn without other text."""
    header: str = ""
    """The text that begins a turn. A turn of several messages (gpt-oss) contains it again."""
    begin: str = "<think>\n"
    """The text that begins the thinking."""

    def drops(
        self, turn: Sequence[int], calls: bool, *, later_user: bool, later_answer: bool
    ) -> bool:
        """Return whether the template drops the thinking of a turn.

        Args:
            turn: the sampled ids.
            calls: whether the turn calls tools.
            later_user: whether a message after the turn is the user's.
            later_answer: whether a turn after it has no calls.
        """
        if self.until_answer and calls:
            return later_answer
        if self.always or (self.after_user and later_user):
            return True
        return self.drops_empty_tags and not self._thought(turn)

    def opening(self, ids: array[int]) -> str:
        """Return the beginning of a thought at the end of a prompt's ids, or ""."""
        end = self.probe.encoder.decode(ids[-16:]).rstrip()
        return self.begin if end.endswith(self.begin.strip()) else ""

    def may_drop(self, *, later_user: bool) -> bool:
        """Return whether `drops` can be true for any turn."""
        return self.always or self.drops_empty_tags or (self.after_user and later_user)

    def _thought(self, turn: Sequence[int]) -> str:
        """Return the thought in a turn, without its tags."""
        before, end, _ = self.probe.encoder.decode(turn).partition(self.end)
        if not end and (not self.new_turn_prefix or self.end in self.new_turn_prefix):
            return ""  # no thought was begun
        return self.probe.encoder.control.sub("", before).strip()

    def strip(self, ids: array[int], turn: Sequence[int], calls: bool) -> int:
        """Append a turn to a row as the template renders it later, without its closing token.

        Args:
            ids: the row before the sampled turn. It is changed in place.
            turn: the sampled ids.
            calls: whether the turn calls tools.

        Returns:
            The index of the turn in the row. If the prompt began a thought, this beginning was
            removed from the row.
        """
        encoder = self.probe.encoder
        is_open, prompt_length = bool(self.opening(ids)), len(ids)
        self.remove_prefix(ids)
        start = len(ids)
        body = list(turn[:-1] if len(turn) and turn[-1] in self.probe.ends else turn)
        sampled = self.probe.encoder.decode(body)
        answer, instead = self._answer(sampled, is_open, calls)
        if answer != sampled or start < prompt_length:  # otherwise nothing is dropped
            ids.extend(encoder.encode_trusted(instead))
        ids.extend(self._ids_of_end(body, answer))
        return start

    def remove_prefix(self, ids: array[int]) -> None:
        """Remove, from the end of a row, what the template writes before new turns only."""
        for text in (self.new_turn_prefix, self.prefix_after_result):
            prefix = self.probe.encoder.encode_trusted(text)
            if len(prefix) and ids[-len(prefix) :] == prefix:
                del ids[-len(prefix) :]
                break

    def answer_of(self, text: str, is_open: bool, calls: bool) -> str:
        """Return the end of a turn's text, after its thinking.

        Args:
            text: the text of the turn.
            is_open: whether the prompt has begun a thought.
            calls: whether the turn calls tools.
        """
        return self._answer(text, is_open, calls)[0]

    def _answer(self, text: str, is_open: bool, calls: bool) -> tuple[str, str]:
        """Return the rest of a turn's text, and the text that the template writes before it.

        Only a thought that was begun can end, because an answer may contain `</think>`.
        """
        begin = self.begin.strip()
        while is_open or text.lstrip().startswith(begin):
            _, end, rest = text.partition(self.end)
            if not end:
                break
            is_open = False
            has_text = not (calls and self.call and rest.lstrip().startswith(self.call))
            head = self.heads.get((has_text, calls))
            if head and rest.startswith(head[0]):
                return rest[len(head[0]) :], head[1]
            if self.gap.strip() and rest.startswith(self.gap):
                text = rest[len(self.gap) :]
                break
            if not (self.header and rest.startswith(self.header)):
                text = rest.lstrip("\n") if self.trims else rest
                break
            text = rest[len(self.header) :]
            if not text.lstrip().startswith(begin):  # a separate message, with its own header
                return text, ""
        return text, "" if self.old_turn_prefix and text.startswith(
            self.old_turn_prefix
        ) else self.old_turn_prefix

    def _ids_of_end(self, ids: list[int], text: str) -> list[int]:
        """Return ids of the text at the end of a turn: sampled ids, if they are whole tokens of it.

        Args:
            ids: the sampled ids of the turn.
            text: the end of the turn's text.
        """
        decode, low, high = self.probe.encoder.decode, 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if len(decode(ids[middle:])) > len(text):
                low = middle + 1
            else:
                high = middle
        rest = decode(ids[low:])
        if not text.endswith(rest):  # the text begins within a character
            return list(self.probe.encoder.encode_plain(text))
        return [*self.probe.encoder.encode_plain(text[: len(text) - len(rest)]), *ids[low:]]

    @classmethod
    def of(cls, probe: TemplateProbe) -> Thinking:
        """Return how a template changes thinking, found by rendering probe conversations."""

        def before_answer(text: str) -> str:
            return _after_question(text).partition(PROBE_TEXT)[0]

        fresh = _after_question(probe.render([_QUESTION]))
        old = before_answer(probe.render([_QUESTION, probe_turn(), _MORE]))
        shared = fresh[: probe.encoder.shared_length(fresh, old)]
        control = list(probe.encoder.control.finditer(shared))
        fields: dict[str, Any] = {
            "after_user": not old.startswith(fresh),
            "new_turn_prefix": fresh[len(shared) :],
            "old_turn_prefix": old[len(shared) :],
            "header": shared[control[-1].start() :] if control else "",
        }
        end = "</think>"
        for turn in thinking_turns():
            alone = probe.render.attempt([_QUESTION, turn], as_prompt=False)
            later = probe.render.attempt([_QUESTION, turn, _MORE])
            is_tagged = PROBE_THOUGHT in turn["content"]
            if alone is None or later is None or not (is_tagged or PROBE_THOUGHT in alone):
                continue  # the template does not read this key
            gap = (
                "" if is_tagged else alone.partition(PROBE_THOUGHT)[2].partition(turn["content"])[0]
            )
            gap = gap or _TAGGED
            mark = probe.encoder.control.search(gap)
            end = mark[0] if mark else end
            fields |= {
                "begin": _begin(probe, alone, len(shared)),
                "end": end,
                "gap": gap.partition(end)[2],
            }
            if PROBE_THOUGHT not in later:
                fields |= {
                    "after_user": True,
                    "always": PROBE_THOUGHT not in alone
                    or _keeps_thought(probe, [], [_RESULT]) is False,
                    "trims": before_answer(later) == old,
                    **_find_heads(probe, end, shared),
                }
            break
        return cls(
            probe,
            **fields,
            drops_empty_tags=_drops_empty_tags(probe, fields["new_turn_prefix"], end),
            prefix_after_result=_opening_after_result(probe),
            until_answer=fields["after_user"]
            and _keeps_thought(probe, [_RESULT], [_RESULT, _MORE]) is True,
        )


def _after_question(text: str) -> str:
    return text.partition(_QUESTION["content"])[2]


def _find_heads(probe: TemplateProbe, end: str, header: str) -> dict[str, Any]:
    """Return the fields `heads` and `call` of `Thinking`.

    Args:
        probe: the probe of a template that drops thinking.
        end: the text that ends a thought.
        header: the text before every turn, new or old.
    """
    heads: dict[tuple[bool, bool], tuple[str, str]] = {}
    call = ""
    for calls, results in (([], []), (_CALL, [_RESULT])):
        for turn in thinking_turns(calls):
            has_text = bool(turn["content"])
            own = PROBE_TEXT if has_text else PROBE_ARGUMENT
            if (has_text, bool(calls)) in heads:
                continue
            alone = probe.render.attempt([_QUESTION, turn], as_prompt=False)
            later = probe.render.attempt([_QUESTION, turn, *results, _MORE])
            if alone is None or later is None:
                continue
            before = _after_question(alone).partition(PROBE_THOUGHT)[2].partition(own)[0]
            shown = _after_question(later).partition(own)[0]
            rest, mark, before = before.partition(end)
            if PROBE_THOUGHT in later or not mark or rest.strip() or not shown.startswith(header):
                continue
            if has_text and PROBE_ARGUMENT in before:  # the template writes the text after the call
                continue
            shown = shown[len(header) :]
            same = probe.encoder.shared_length(before[::-1], shown[::-1])
            heads[has_text, bool(calls)] = before[: len(before) - same], shown[: len(shown) - same]
            if calls and not has_text:
                call = before.rpartition(_CALL[0][0])[0].strip()
    return {"heads": heads, "call": call}


def _begin(probe: TemplateProbe, alone: str, header: int) -> str:
    """Return the text between a turn's header and its thought."""
    before = _after_question(alone).partition(PROBE_THOUGHT)[0]
    control = [m.start() for m in probe.encoder.control.finditer(before)]
    if PROBE_THOUGHT not in alone or not control:
        return "<think>\n"
    # If a template writes empty tags before every old turn, the header seems to contain the first.
    return before[min(header, control[-1]) :]


def thinking_turns(calls: Sequence[tuple[str, str]] = ()) -> list[dict[str, Any]]:
    """Return a turn with a thought, in each form that a template may need."""
    keys = ("reasoning_content", "reasoning", "thinking")
    thought = dict.fromkeys(keys, PROBE_THOUGHT)
    tagged = probe_turn(calls, content=f"<think>\n{PROBE_THOUGHT}{_TAGGED}{PROBE_TEXT}")
    silent = [probe_turn(calls, content="", **thought)] if calls else []
    return [probe_turn(calls, **thought), *silent, tagged]


_CALL = [("tool", "000000000")]
_RESULT = {"role": "tool", "content": "R", "tool_call_id": "000000000", "name": "tool"}


def _keeps_thought(
    probe: TemplateProbe, shown_before: list[dict[str, Any]], later: list[dict[str, Any]]
) -> bool | None:
    """Return whether a call's thought is still rendered if other messages follow the call.

    Args:
        probe: the probe of the template.
        shown_before: messages after the call with which the thought is rendered.
        later: the messages after the call for which the question is asked.

    Returns:
        None if no form of the turn renders the thought before the messages `shown_before`.
    """
    for turn in thinking_turns(_CALL):
        with suppress(TemplateError):
            if PROBE_THOUGHT in probe.render(
                [_QUESTION, turn, *shown_before], as_prompt=bool(shown_before)
            ):
                return PROBE_THOUGHT in probe.render([_QUESTION, turn, *later])
    return None


def _opening_after_result(probe: TemplateProbe) -> str:
    """Return the text that the template writes after a tool result, before a new turn.

    The template does not write this text before earlier turns. "" if there is none.
    """
    for turn in probe_turns(_CALL):
        with suppress(TemplateError):
            head = [_QUESTION, turn, {**_RESULT, "content": PROBE_THOUGHT}]
            fresh = probe.render(head).partition(PROBE_THOUGHT)[2]
            old = probe.render([*head, probe_turn(), _MORE]).partition(PROBE_THOUGHT)[2]
            if PROBE_TEXT in old and PROBE_TEXT not in fresh:
                return fresh[probe.encoder.shared_length(fresh, old.partition(PROBE_TEXT)[0]) :]
    return ""


def _drops_empty_tags(probe: TemplateProbe, new_turn_prefix: str, end: str) -> bool:
    """Return whether a turn without a thought loses its empty tags when a tool result follows.

    Args:
        probe: the probe of the template.
        new_turn_prefix: see `Thinking`. If it is "", the template may write empty tags in the last
            turn only.
        end: the text that ends a thought.
    """
    for turn in probe_turns(_CALL):
        with suppress(TemplateError):
            shown = probe.render([_QUESTION, turn, _RESULT])
            if new_turn_prefix:
                return not shown.startswith(probe.render([_QUESTION]))
            alone = probe.render([_QUESTION, turn], as_prompt=False)
            return end in _after_question(alone) and end not in _after_question(shown)
    return False
