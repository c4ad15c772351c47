r"""What a chat template makes of a turn's thinking once the conversation has gone on.

Qwen3, GLM, DeepSeek R1, gpt-oss and others show a turn with its thinking while it is the last, and
without it from the next user message on. How they do it is read off the template: two renderings
of one conversation, with and without something after the turn.
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
from agentrl.trajectory import Message

PROBE_THOUGHT = f"zq{SALT}thoughtqz"
_QUESTION = {"role": "user", "content": "zqaskedqz"}
_MORE = {"role": "user", "content": "Q"}
_TAGGED = "\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class Thinking:
    """The difference between a turn as it was sampled and as the template shows it later."""

    probe: TemplateProbe
    after_user: bool
    """The thinking of turns before the last user message is dropped."""
    always: bool = False
    """It is dropped as soon as anything follows."""
    until_answer: bool = False
    """That of a turn that calls stays until a later one does not (gpt-oss), whatever users say."""
    blank: bool = False
    """A turn without a thought is shown without the tags around it as soon as anything follows."""
    extra: str = ""
    """What the template puts before a turn to sample (`<think>\\n`) and not before an old one."""
    also: str = ""
    """The same after a tool's result, where it differs (Gemma 4)."""
    instead: str = ""
    """What it puts before an old turn instead."""
    end: str = "</think>"
    """What ends the thinking, and what stands between it and the answer."""
    gap: str = "\n\n"
    trims: bool = True
    """The answer is shown without the empty lines before it."""
    heads: Mapping[tuple[bool, bool], tuple[str, str]] = field(default_factory=dict)
    """Key: whether a turn has a text, whether it has calls. Value: the text after the end of a
    thought, and what the template writes later instead of the thought and this text."""
    call: str = ""
    """What begins a call that stands behind no text."""
    header: str = ""
    """What a turn begins with; a turn of several messages (gpt-oss) holds it again."""
    begin: str = "<think>\n"
    """What begins the thinking."""

    def drops(self, turn: Sequence[int], calls: bool, later: Sequence[Message]) -> bool:
        """Whether a turn that something followed is shown without its thinking.

        Args:
            turn: the sampled ids.
            calls: whether it calls tools.
            later: what came after it.
        """
        later_user = any(m.role == "user" for m in later)
        if self.until_answer and calls:
            return any(m.role == "assistant" and not m.tool_calls for m in later)
        if self.always or (self.after_user and later_user):
            return True
        return self.blank and not self._thought(turn)

    def opening(self, ids: array[int]) -> str:
        """What the prompt of a turn has begun to think, or ""."""
        end = self.probe.encoder.decode(ids[-16:]).rstrip()
        return self.begin if end.endswith(self.begin.strip()) else ""

    def may_drop(self, *, later_user: bool) -> bool:
        """Whether `drops` can hold for any turn."""
        return self.always or self.blank or (self.after_user and later_user)

    def _thought(self, turn: Sequence[int]) -> str:
        """What was thought in a turn, without the tags."""
        before, found, _ = self.probe.encoder.decode(turn).partition(self.end)
        if not found and (not self.extra or self.end in self.extra):
            return ""  # nothing opened a thought
        return self.probe.encoder.control.sub("", before).strip()

    def strip(self, ids: array[int], turn: Sequence[int], calls: bool) -> int:
        """Add a turn to a row as the template shows it later, without the token that closed it.

        Args:
            ids: the row, up to where the turn was sampled.
            turn: the sampled ids.
            calls: whether it calls tools.

        Returns:
            Where the turn begins in the row: what the prompt had opened is gone.
        """
        encoder = self.probe.encoder
        opened, prompted = bool(self.opening(ids)), len(ids)
        for text in (self.extra, self.also):
            extra = encoder.encode_template_text(text)
            if len(extra) and ids[-len(extra) :] == extra:
                del ids[-len(extra) :]
                break
        start = len(ids)
        body = list(turn[:-1] if len(turn) and turn[-1] in self.probe.ends else turn)
        said = self.probe.encoder.decode(body)
        answer, instead = self._answer(said, opened, calls)
        if answer != said or start < prompted:  # else nothing of it is dropped
            ids.extend(encoder.encode_template_text(instead))
        ids.extend(self._last(body, answer))
        return start

    def _answer(self, text: str, opened: bool, calls: bool) -> tuple[str, str]:
        """What is left of a turn's text, and what the template puts before it.

        Only a thought that was begun can end: an answer may speak of `</think>`.
        """
        begin = self.begin.strip()
        while opened or text.lstrip().startswith(begin):
            _, found, rest = text.partition(self.end)
            if not found:
                break
            opened = False
            spoken = not (calls and self.call and rest.lstrip().startswith(self.call))
            head = self.heads.get((spoken, calls))
            if head and rest.startswith(head[0]):
                return rest[len(head[0]) :], head[1]
            if self.gap.strip() and rest.startswith(self.gap):
                text = rest[len(self.gap) :]
                break
            if not (self.header and rest.startswith(self.header)):
                text = rest.lstrip("\n") if self.trims else rest
                break
            text = rest[len(self.header) :]
            if not text.lstrip().startswith(begin):  # a message of its own, with its own head
                return text, ""
        return text, "" if self.instead and text.startswith(self.instead) else self.instead

    def _last(self, ids: list[int], text: str) -> list[int]:
        """The ids that stand for the end of a turn: as sampled, where they begin with a token."""
        decode, low, high = self.probe.encoder.decode, 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if len(decode(ids[middle:])) > len(text):
                low = middle + 1
            else:
                high = middle
        said = decode(ids[low:])
        if not text.endswith(said):  # cut within a character
            return list(self.probe.encoder.encode_plain(text))
        return [*self.probe.encoder.encode_plain(text[: len(text) - len(said)]), *ids[low:]]

    @classmethod
    def of(cls, probe: TemplateProbe) -> Thinking:
        """Read it off a template."""

        def before_answer(text: str) -> str:
            return _after_question(text).partition(PROBE_TEXT)[0]

        fresh = _after_question(probe.render([_QUESTION]))
        old = before_answer(probe.render([_QUESTION, probe_turn(), _MORE]))
        shared = fresh[: probe.encoder.shared_length(fresh, old)]
        control = list(probe.encoder.control.finditer(shared))
        found: dict[str, Any] = {
            "after_user": not old.startswith(fresh),
            "extra": fresh[len(shared) :],
            "instead": old[len(shared) :],
            "header": shared[control[-1].start() :] if control else "",
        }
        end = "</think>"
        for turn in probe_turns_with_thought():
            alone = probe.render.attempt([_QUESTION, turn], add_generation_prompt=False)
            later = probe.render.attempt([_QUESTION, turn, _MORE])
            tagged = PROBE_THOUGHT in turn["content"]
            if alone is None or later is None or not (tagged or PROBE_THOUGHT in alone):
                continue  # the template does not read this key
            gap = "" if tagged else alone.partition(PROBE_THOUGHT)[2].partition(turn["content"])[0]
            gap = gap or _TAGGED
            mark = probe.encoder.control.search(gap)
            end = mark[0] if mark else end
            found |= {
                "begin": _begin(probe, alone, len(shared)),
                "end": end,
                "gap": gap.partition(end)[2],
            }
            if PROBE_THOUGHT not in later:
                found |= {
                    "after_user": True,
                    "always": PROBE_THOUGHT not in alone
                    or _outlives(probe, [], [_RESULT]) is False,
                    "trims": before_answer(later) == old,
                    **_heads(probe, end, shared),
                }
            break
        return cls(
            probe,
            **found,
            blank=_drops_empty_tags(probe, found["extra"], end),
            also=_after_a_result(probe),
            until_answer=found["after_user"]
            and _outlives(probe, [_RESULT], [_RESULT, _MORE]) is True,
        )


def _after_question(text: str) -> str:
    return text.partition(_QUESTION["content"])[2]


def _heads(probe: TemplateProbe, end: str, header: str) -> dict[str, Any]:
    """What stands before the answers of turns whose thought is dropped: `heads` and `call`.

    Args:
        probe: of the template that drops it.
        end: what ends a thought.
        header: what stands before any turn, sampled or old.
    """
    heads: dict[tuple[bool, bool], tuple[str, str]] = {}
    call = ""
    for calls, then in (([], []), (_CALL, [_RESULT])):
        for turn in probe_turns_with_thought(calls):
            spoken = bool(turn["content"])
            own = PROBE_TEXT if spoken else PROBE_ARGUMENT
            if (spoken, bool(calls)) in heads:
                continue
            alone = probe.render.attempt([_QUESTION, turn], add_generation_prompt=False)
            later = probe.render.attempt([_QUESTION, turn, *then, _MORE])
            if alone is None or later is None:
                continue
            before = _after_question(alone).partition(PROBE_THOUGHT)[2].partition(own)[0]
            shown = _after_question(later).partition(own)[0]
            ended, found, before = before.partition(end)
            if PROBE_THOUGHT in later or not found or ended.strip() or not shown.startswith(header):
                continue
            if spoken and PROBE_ARGUMENT in before:  # the text is shown behind the call
                continue
            shown = shown[len(header) :]
            same = probe.encoder.shared_length(before[::-1], shown[::-1])
            heads[spoken, bool(calls)] = before[: len(before) - same], shown[: len(shown) - same]
            if calls and not spoken:
                call = before.rpartition(_CALL[0][0])[0].strip()
    return {"heads": heads, "call": call}


def _begin(probe: TemplateProbe, alone: str, header: int) -> str:
    """What stands before the thought in a turn, after the turn's header."""
    before = _after_question(alone).partition(PROBE_THOUGHT)[0]
    control = [m.start() for m in probe.encoder.control.finditer(before)]
    if PROBE_THOUGHT not in alone or not control:
        return "<think>\n"
    # Where a template puts empty tags before every old turn, the header seems to hold the first.
    return before[min(header, control[-1]) :]


def probe_turns_with_thought(calls: Sequence[tuple[str, str]] = ()) -> list[dict[str, Any]]:
    """A turn with a thought, in the ways that templates take it."""
    keys = ("reasoning_content", "reasoning", "thinking")
    thought = dict.fromkeys(keys, PROBE_THOUGHT)
    tagged = probe_turn(calls, content=f"<think>\n{PROBE_THOUGHT}{_TAGGED}{PROBE_TEXT}")
    silent = [probe_turn(calls, content="", **thought)] if calls else []
    return [probe_turn(calls, **thought), *silent, tagged]


_CALL = [("tool", "000000000")]
_RESULT = {"role": "tool", "content": "R", "tool_call_id": "000000000", "name": "tool"}


def _outlives(
    probe: TemplateProbe, first: list[dict[str, Any]], then: list[dict[str, Any]]
) -> bool | None:
    """Whether a call's thought that is shown before some messages is shown before others, too.

    None where no way of writing the turn shows it before the first.
    """
    for turn in probe_turns_with_thought(_CALL):
        with suppress(TemplateError):
            if PROBE_THOUGHT in probe.render(
                [_QUESTION, turn, *first], add_generation_prompt=bool(first)
            ):
                return PROBE_THOUGHT in probe.render([_QUESTION, turn, *then])
    return None


def _after_a_result(probe: TemplateProbe) -> str:
    """What the template puts before a turn to sample after a tool's result, but not later."""
    for turn in probe_turns(_CALL):
        with suppress(TemplateError):
            head = [_QUESTION, turn, {**_RESULT, "content": PROBE_THOUGHT}]
            fresh = probe.render(head).partition(PROBE_THOUGHT)[2]
            old = probe.render([*head, probe_turn(), _MORE]).partition(PROBE_THOUGHT)[2]
            if PROBE_TEXT in old and PROBE_TEXT not in fresh:
                return fresh[probe.encoder.shared_length(fresh, old.partition(PROBE_TEXT)[0]) :]
    return ""


def _drops_empty_tags(probe: TemplateProbe, extra: str, end: str) -> bool:
    """Return whether the tags of a turn without a thought go as soon as a tool's result follows.

    Args:
        probe: of the template.
        extra: what the prompt of a turn begins with; without it, the template may write the tags
            into the last turn alone.
        end: what ends a thought.
    """
    for turn in probe_turns(_CALL):
        with suppress(TemplateError):
            shown = probe.render([_QUESTION, turn, _RESULT])
            if extra:
                return not shown.startswith(probe.render([_QUESTION]))
            alone = probe.render([_QUESTION, turn], add_generation_prompt=False)
            return end in _after_question(alone) and end not in _after_question(shown)
    return False
