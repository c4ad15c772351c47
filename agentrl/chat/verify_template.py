"""Verify that the row of an episode can grow turn by turn with a chat template.

A *shape* says which messages follow the assistant turns: tool results, user messages, or both. A
*kind* says which parts a turn has: a text, a thought, calls, or several of these. Each shape is
tried with each kind, and each conversation is encoded twice: as an episode does it
(prompt, sampled turns, deltas), and by rendering all of it at once. If the ids are equal after
every turn, the template is append-only for that shape and kind: a row has the tokens that any
deployment would show to the model. If they are equal without the thinking of earlier turns, the
config key `rollout.history_thinking` decides. Anything else would train on tokens that no
deployment shows, and is refused.

The model chooses the kind, so a shape has the worst status of its kinds; kinds that the template
cannot write are reported. A *form* says how a message holds a turn: arguments as an object or as
text, no content as "" or None. Neither the model nor an episode chooses it, so the best form
counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from textwrap import indent
from typing import Any, Literal

from agentrl.chat.encoding import common_prefix_length, truncate
from agentrl.chat.render import MessageDict, Renderer, Schemas
from agentrl.chat.template import ChatTemplate
from agentrl.chat.thinking import PROBE_THOUGHT
from agentrl.chat.tokenizer import template_source
from agentrl.chat.turn_delta import (
    PROBE_ARGUMENT,
    PROBE_TEXT,
    PROBE_TOOL,
    TemplateProbe,
    probe_turn,
)
from agentrl.errors import TemplateError
from agentrl.trajectory import Message, ToolCall

Status = Literal["append-only", "drops thinking", "unsupported", "differs"]
_BEST_FIRST: tuple[Status, ...] = ("append-only", "drops thinking", "differs")
_NEVER_WRITTEN = "a model cannot write any turn that the template shows after these prompts"

_QUESTION = {"role": "user", "content": "How much is 3*4?"}
_THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
_UNICODE = "Zoë: 日本語 🙂👍🏽 \u00a0e\u0301 \u2028 ½"


@dataclass(frozen=True, slots=True)
class Shape:
    """The roles of a conversation: the messages that follow each turn of the assistant."""

    name: str
    after: tuple[tuple[str, ...], ...]
    """For each turn, `tool:TEXT` and `user:TEXT`. A turn has as many calls as tool results."""
    system: bool = True
    cut: int = 0
    """The token limit of a tool result; 0 for none."""

    @property
    def calls(self) -> bool:
        """True if turns of this shape call tools."""
        return any(text.startswith("tool:") for after in self.after for text in after)


SHAPES = (
    Shape("one tool", (("tool:12",),)),
    Shape("parallel tools", (("tool:12", "tool:13"), ("tool:14", "tool:15"))),
    Shape("five turns", (("tool:1",), ("tool:2",), ("user:3",), ("tool:4",), ("user:5",))),
    Shape("tool then user", (("tool:12", "user:Go on."),)),
    Shape("user only", (("user:Sure?",), ("user:Really?",)), system=False),
    Shape("unicode", ((f"tool:{_UNICODE}",), (f"user:{_UNICODE}",))),
    Shape("leading space and newline", (("tool: \n 12 \n\n",), ("user:\n  a \n",))),
    Shape("empty tool result", (("tool:",),)),
    Shape("long result cut", ((f"tool:{(_UNICODE + chr(10)) * 100}",),), cut=64),
)
CALLS_ALONE = Shape("calls alone", (("tool:1",), ("tool:2",), ("tool:3",)))
"""The shape of an episode with tools and without users."""
THINKING_VARIABLE = "enable_thinking"
"""The template variable that switches thinking on or off."""
THINKING_SHAPES = {
    True: Shape("thinking on", (("tool:12",), ("user:Sure?",))),
    False: Shape("thinking off", (("tool:12",), ("user:Sure?",))),
}
OPTIONAL = ("parallel tools", "tool then user", *(shape.name for shape in THINKING_SHAPES.values()))
"""The shapes that a template need not support. For example, tools can be called one at a time."""


@dataclass(frozen=True, slots=True)
class TurnKind:
    """The parts of a turn besides its calls. A turn without calls always has a text."""

    text: bool
    thought: bool

    def describe(self, calls: bool) -> str:
        """Return the parts of a turn, in the order in which a model writes them."""
        parts = {"thought": self.thought, "text": self.text or not calls, "call": calls}
        return " + ".join(part for part, written in parts.items() if written)


TURN_KINDS = tuple(TurnKind(text, thought) for thought in (False, True) for text in (False, True))


@dataclass(frozen=True, slots=True)
class MessageForm:
    """A representation of turns as messages."""

    arguments_as_text: bool
    """True if the arguments of a call are JSON text, not an object."""
    no_content: str | None
    """The content of a turn without text."""
    thought_in_tags: bool = False
    """True if a thought is in the content, between tags; otherwise it has a separate key."""


MESSAGE_FORMS = tuple(MessageForm(as_text, no) for no in ("", None) for as_text in (False, True))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of verifying a template for one kind of turns in one shape of conversation."""

    status: Status
    reason: str = ""
    """The first difference of the ids, or why the template cannot write these turns."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of verifying a template for one shape of conversation."""

    shape: str
    status: Status
    detail: str = ""
    """The first difference of the ids or why the shape is not supported, and the kinds of turns."""
    kinds: Mapping[str, Status] = field(default_factory=dict)
    """The status of each kind of turns that a model can write."""

    @property
    def ok(self) -> bool:
        """True if a run can train on episodes of this shape."""
        return self.status in ("append-only", "drops thinking")

    @property
    def fails(self) -> bool:
        """True if the template cannot be used because of this shape. Some shapes are optional."""
        return self.status == "differs" or (not self.ok and self.shape not in OPTIONAL)


class _EndsInside(TemplateError):
    """A turn cannot be sampled, because it contains a stop token before its end."""


class _NotShown(TemplateError):
    """The template does not show all parts of a turn in the order in which a model writes them."""


class _ThoughtNotShown(_NotShown):
    """The template does not show the thought of a turn."""


class _NotWritten(TemplateError):
    """A model does not write a turn of this kind, because the prompt begins another kind."""


def verify_template(
    template: ChatTemplate, schemas: Schemas = (PROBE_TOOL,), shapes: Sequence[Shape] = SHAPES
) -> list[Verdict]:
    """Return a verdict on a template for each shape, with these tools in the prompt."""
    verifier = _Verifier(template, schemas)
    return [verifier.verify(shape) for shape in shapes]


def verify_tokenizer(
    tokenizer: Any, end_ids: Sequence[int] = (), schemas: Schemas = (PROBE_TOOL,)
) -> list[Verdict]:
    """Return verdicts on a tokenizer's template for every shape, with thinking on and off.

    Raises:
        TemplateError: if no turn can be encoded with the template.
    """
    verdicts = verify_template(ChatTemplate(tokenizer, end_ids), schemas)
    if THINKING_VARIABLE not in template_source(tokenizer):
        return verdicts
    for on, shape in THINKING_SHAPES.items():
        try:
            template = ChatTemplate(tokenizer, end_ids, variables={THINKING_VARIABLE: on})
        except TemplateError as e:
            verdicts.append(Verdict(shape.name, "unsupported", str(e)))
        else:
            verdicts += verify_template(template, schemas, [shape])
    return verdicts


class _RenderOnce(Renderer):
    """A renderer with a cache, because shapes, kinds and forms share most conversations."""

    def __init__(self, render: Renderer):
        self._from_template = render
        self._cache: dict[tuple[str, bool, bool], str | TemplateError] = {}

    def __call__(
        self, messages: Sequence[MessageDict], schemas: Schemas = (), as_prompt: bool = True
    ) -> str:
        key = (json.dumps(messages), bool(schemas), as_prompt)
        if key not in self._cache:
            try:
                self._cache[key] = self._from_template(messages, schemas, as_prompt)
            except TemplateError as e:
                self._cache[key] = e
        text = self._cache[key]
        if isinstance(text, TemplateError):
            raise text
        return text


@dataclass(frozen=True, slots=True)
class _Script:
    """The messages of a probe conversation of one shape, without the assistant turns."""

    system: bool
    rounds: Sequence[tuple[Sequence[str], Sequence[dict[str, Any]]]]
    """For each turn, the ids of its calls and the messages after it."""
    calls: bool
    """True if calls are `tool_calls`; otherwise they are part of the text of turns."""


class _Verifier:
    """Verifies one template with some tools."""

    def __init__(self, template: ChatTemplate, schemas: Schemas):
        self.template = template
        self.schemas = schemas
        self.tool = schemas[0]["function"]["name"] if schemas else "probe"
        self._render = _RenderOnce(template.render)
        self._probe = TemplateProbe(self._render, template.encoder, template.probe.ends)
        prompt, recent = (
            template.render([_QUESTION]),
            template.render([_QUESTION], as_prompt=False),
        )
        self.ends_thoughts = template.thinking.end in prompt[self._shared(recent, prompt) :]
        """True if a prompt ends the thought of the next turn; then no kind has a thought."""
        self.begins_thoughts = self._begins_thought(prompt)
        in_tags = self._writes_thought_in_tags()
        self.forms = [replace(s, thought_in_tags=in_tags) for s in MESSAGE_FORMS]

    def verify(self, shape: Shape) -> Verdict:
        """Return the worst status of the kinds that the template can write."""
        script = self._script(shape)
        verdict = _verdict(shape, self._outcomes(script))
        if verdict.status != "unsupported" or not shape.calls:
            return verdict
        # For this template the calls of a turn are part of its text, as in an episode.
        as_text = _verdict(shape, self._outcomes(replace(script, calls=False)))
        if as_text.ok:
            note = (
                "OK. Episodes store calls as text, and this works. The template does not render"
                f" structured `tool_calls` ({verdict.detail}); this does not matter for training."
            )
        else:
            note = verdict.detail if verdict.detail != as_text.detail else ""
        return replace(as_text, detail="\n".join(filter(None, (note, as_text.detail))))

    def render(self, messages: Sequence[MessageDict], as_prompt: bool = True) -> str:
        """Return a conversation as text, with the tools."""
        return self._render(messages, self.schemas, as_prompt)

    def _writes_thought_in_tags(self) -> bool:
        """Return whether thoughts must be written into the content of messages, between tags.

        False if the template shows the thought in a key of the message, if it does not show
        thoughts in the content, or if it writes an empty thought before the content.
        """

        def shown(form: MessageForm, *calls: str) -> str:
            turn = self._turn(TurnKind(text=True, thought=True), form, calls)
            text = self._render.attempt([_QUESTION, turn], self.schemas, as_prompt=False) or ""
            return text.partition(_QUESTION["content"])[2]

        if any(
            PROBE_THOUGHT in shown(form, *calls)
            for calls, form in product(((), ("000000000",)), MESSAGE_FORMS)
        ):
            return False
        before, thought, _ = shown(replace(MESSAGE_FORMS[0], thought_in_tags=True)).partition(
            PROBE_THOUGHT
        )
        return bool(thought) and self.template.thinking.end not in before

    def _script(self, shape: Shape) -> _Script:
        """Return the messages of a shape. Tool results are truncated as in an episode."""
        encode, decode = self.template.encode, self.template.decode_plain
        rounds = []
        for n, after in enumerate(shape.after):
            ids, answers = [], []
            for i, text in enumerate(after):
                role, _, content = text.partition(":")
                if shape.cut:
                    content = truncate(content, shape.cut, "middle", encode, decode)
                answers.append({"role": role, "content": content})
                if role == "tool":
                    ids.append(f"{n:04d}{i:05d}")
                    answers[-1] |= {"name": self.tool, "tool_call_id": ids[-1]}
            rounds.append((ids, answers))
        return _Script(shape.system, rounds, shape.calls)

    def _outcomes(self, script: _Script) -> dict[str, Outcome]:
        """Return the outcome of each kind of turns that a model can write, by kind."""
        outcomes = {}
        for kind in TURN_KINDS:
            if (kind.text or script.calls) and not (kind.thought and self.ends_thoughts):
                outcome = self._best(script, kind)
                if outcome:
                    outcomes[kind.describe(script.calls)] = outcome
        return outcomes

    def _best(self, script: _Script, kind: TurnKind) -> Outcome | None:
        """Return the outcome of a kind in its best form; None if no model writes this kind."""
        differs: Outcome | None = None
        errors: list[TemplateError] = []
        is_written = True
        for form in self.forms:
            if form.no_content is None and kind.text:
                break  # the same turns again
            if form.arguments_as_text and not script.calls:
                continue
            try:
                outcome = self._compare(script, kind, form)
            except _NotWritten:
                is_written = False
                continue
            except _EndsInside as e:
                outcome = Outcome("differs", str(e))
            except TemplateError as e:
                errors.append(e)
                continue
            if outcome.status != "differs":
                return outcome
            differs = differs or outcome
        if errors and is_written and not differs:
            reason = next((e for e in errors if isinstance(e, _NotShown)), errors[0])
            return Outcome("unsupported", str(reason))
        return differs

    def _turn(self, kind: TurnKind, form: MessageForm, calls: Sequence[str]) -> dict[str, Any]:
        """Return a turn as a message, with calls of these ids."""
        text = PROBE_TEXT if kind.text or not calls else form.no_content
        keys: dict[str, Any] = {}
        if kind.thought and form.thought_in_tags:
            text = f"<think>\n{PROBE_THOUGHT}\n</think>\n\n{text or ''}"
        elif kind.thought:
            keys = dict.fromkeys(_THOUGHT_KEYS, PROBE_THOUGHT)
        named = [(self.tool, id) for id in calls]
        return probe_turn(named, form.arguments_as_text, content=text, **keys)

    def _compare(self, script: _Script, kind: TurnKind, form: MessageForm) -> Outcome:
        """Encode a conversation as an episode does, and compare it with the template's rendering.

        The two are compared after every turn. Some templates show thoughts only in turns with
        calls. If a template shows the thoughts of some turns, the other turns are compared without
        a thought.
        """
        template = self.template
        history: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}] * script.system
        history.append(_QUESTION)
        messages = [Message(m["role"], m["content"]) for m in history]
        sampled: dict[int, Sequence[int]] = {}
        outcome, is_thought, hidden = Outcome("append-only"), False, None
        for ids, answers in script.rounds:
            calls = ids if script.calls else ()
            turn = self._turn(kind, form, calls)
            try:
                sampled[len(history)] = self._sample_turn(history, turn, kind, answers)
                is_thought = True
            except _ThoughtNotShown as e:
                hidden, quiet = e, replace(kind, thought=False)
                turn = self._turn(quiet, form, calls)
                sampled[len(history)] = self._sample_turn(history, turn, quiet, answers)
            history += [turn, *answers]
            tool_calls = tuple(ToolCall(self.tool, {"x": ""}, id=id) for id in ids)
            messages.append(Message("assistant", "", tool_calls))
            messages += [Message(m["role"], m["content"]) for m in answers]
            expected = template.encoder.encode_trusted(self.render(history))
            rows = [template.conversation(messages, self.schemas, sampled)]
            if self._same(rows[0], expected):
                continue
            rows.append(template.conversation(messages, self.schemas, sampled, strip=True))
            if self._same(rows[1], expected):
                outcome = Outcome("drops thinking")
                continue
            # The row with the longer common prefix shows the fault; the other only that thinking is
            # dropped.
            row = max(reversed(rows), key=lambda row: common_prefix_length(row, expected))
            outcome = Outcome("differs", describe_difference(template, row, expected))
            break
        if hidden and not is_thought:
            raise hidden
        if hidden and outcome.status != "differs":
            return replace(
                outcome,
                reason="the chat template shows the thoughts of some turns only. You need not do"
                " anything: the other turns were compared without a thought. If the model writes a"
                " thought there, the row keeps the sampled tokens, but a deployment would not show"
                " them.",
            )
        return outcome

    def _same(self, actual: Sequence[int], expected: Sequence[int]) -> bool:
        """Return whether two rows of ids decode to the same text."""
        decode = self.template.decode
        return list(actual) == list(expected) or decode(actual) == decode(expected)

    def _sample_turn(
        self,
        history: Sequence[MessageDict],
        turn: MessageDict,
        kind: TurnKind,
        more: Sequence[MessageDict],
    ) -> Sequence[int]:
        """Return the ids of a turn as a model would sample it, from a rendered conversation.

        If a turn has no thought and the prompt does not begin one, the conversation is rendered
        with the messages after the turn, because some templates write empty tags into the last turn
        only.

        Args:
            history: the conversation before the turn. Only its last user message and the messages
                after it matter.
            turn: the turn, as a message.
            kind: the kind of the turn.
            more: the messages after the turn.
        """
        template = self.template
        recent = history[max(i for i, m in enumerate(history) if m["role"] == "user") :]
        before = self.render(recent)
        alone = self.render([*recent, turn], as_prompt=False)
        text, calls = PROBE_TEXT in (turn["content"] or ""), len(turn.get("tool_calls", ()))
        start = self._shared(before, alone)
        marks = alone.count(PROBE_TEXT, start) + alone.count(PROBE_ARGUMENT, start)
        if len(recent) > 1 and marks > text + calls:
            # The template renders the earlier turns differently now: read the turn without them.
            return self._sample_turn(recent[:1], turn, kind, more)
        _require_order(alone[start:], text, calls)
        end_of_turn, closes = self._probe.end_of_turn([*recent, turn])
        shown = alone
        if not kind.thought and not (
            template.thinking.new_turn_prefix and alone.startswith(before)
        ):
            shown = self.render([*recent, turn, *more])
        if end_of_turn not in shown or end_of_turn not in alone:
            raise TemplateError(
                "the chat template changes the end of a turn when more messages follow"
            )
        if not shown.startswith(before) and alone.startswith(before):
            shown = alone
        start, end = self._shared(before, shown), shown.rindex(end_of_turn) + len(end_of_turn)
        turn_text = self._continue_prompt(before, shown[start:end], kind, start == len(before))
        ids = template.encoder.encode_trusted(turn_text)
        if stop_tokens := [i for i in ids if i in template.stop_ids]:
            raise _EndsInside(
                "the chat template writes the stop token"
                f" {template.decode(stop_tokens[:1])!r} inside of a turn, where sampling would"
                f" stop: {turn_text!r}"
            )
        if closes:
            ids.append(
                template.encoder.split(alone[alone.rindex(end_of_turn) + len(end_of_turn) :])[1][0]
            )
        if turn_text.count(PROBE_ARGUMENT) != calls:
            raise _NotShown(
                f"the chat template shows {turn_text.count(PROBE_ARGUMENT)} of {calls} calls"
            )
        return ids

    def _shared(self, before: str, text: str) -> int:
        """Return the length of the common prefix of two texts, without part of a control token."""
        if text.startswith(before):
            return len(before)
        return self.template.encoder.shared_length(before, text)

    def _continue_prompt(self, prompt: str, shown: str, kind: TurnKind, continues: bool) -> str:
        """Return the text of a turn as the continuation of the prompt.

        After a prompt that begins a thought, the model writes a thought, even if the template does
        not show it.

        Args:
            prompt: the prompt that the model reads.
            shown: the turn as the template renders it.
            kind: the kind of the turn.
            continues: whether `shown` directly follows the prompt.
        """
        thinking, begins_thought = self.template.thinking, self._begins_thought(prompt)
        if begins_thought and not kind.thought and not continues:
            raise _NotWritten("the prompt begins a thought, and the turn has none")
        if PROBE_THOUGHT in shown and not begins_thought and not continues:
            raise _NotWritten("the prompt begins a turn without a thought, and the turn has one")
        if PROBE_THOUGHT in shown or not kind.thought:
            return shown
        head, end, rest = shown.partition(thinking.end)
        if continues and end and PROBE_TEXT not in head and PROBE_ARGUMENT not in head:
            return f"{head}{PROBE_THOUGHT}{end}{rest}"  # the template writes an empty thought
        if not begins_thought and not self.begins_thoughts:
            raise _ThoughtNotShown(
                "the chat template does not show the thought of a turn of this kind"
            )
        answer = shown.removeprefix(thinking.old_turn_prefix)
        # If the template does not trim the empty lines before the answer, it shows them later.
        gap = thinking.gap if thinking.trims and not answer.startswith(thinking.gap) else ""
        begin = "" if begins_thought else thinking.begin
        return f"{begin}{PROBE_THOUGHT}\n{thinking.end}{gap}{answer}"

    def _begins_thought(self, prompt: str) -> bool:
        """Return whether a prompt begins the thought of the next turn."""
        return prompt.rstrip().endswith(self.template.thinking.begin.strip())


def _require_order(shown: str, text: bool, calls: int) -> None:
    """Raise `_NotShown` if the text of a turn is missing or comes after a call.

    Args:
        shown: the turn as the template renders it.
        text: whether the turn has a text.
        calls: the number of its calls.
    """
    if text and PROBE_TEXT not in shown:
        raise _NotShown("the chat template does not show a text before a call")
    if text and calls and -1 < shown.find(PROBE_ARGUMENT) < shown.find(PROBE_TEXT):
        raise _NotShown("the chat template moves the text before a call to a place after the call")


def _verdict(shape: Shape, outcomes: Mapping[str, Outcome]) -> Verdict:
    """Return the worst status of the kinds that the template can write, with all details."""
    kinds: dict[str, Status] = {name: outcome.status for name, outcome in outcomes.items()}
    statuses = set(kinds.values()) - {"unsupported"}
    if not statuses:
        reasons = [outcome.reason for outcome in outcomes.values()]
        return Verdict(shape.name, "unsupported", (reasons or [_NEVER_WRITTEN])[0], kinds)
    lines = []
    if differing := [name for name, status in kinds.items() if status == "differs"]:
        lines.append(f"{', '.join(differing)}: {outcomes[differing[0]].reason}")
    others = {n: o for n, o in outcomes.items() if o.reason and o.status != "differs"}
    for outcome in dict.fromkeys(others.values()):
        names = ", ".join(name for name in others if others[name] == outcome)
        refused = "not with " if outcome.status == "unsupported" else ""
        lines.append(f"{refused}{names}: {outcome.reason}")
    return Verdict(shape.name, max(statuses, key=_BEST_FIRST.index), "\n".join(lines), kinds)


def format_verdicts(verdicts: Sequence[Verdict], before: str = "") -> list[str]:
    """Return the details of verdicts as lines: each detail once, after the names of its shapes.

    Args:
        verdicts: the verdicts.
        before: a text before the names of shapes.
    """
    lines = []
    for detail in dict.fromkeys(v.detail or v.status for v in verdicts):
        shapes = ", ".join(v.shape for v in verdicts if (v.detail or v.status) == detail)
        lines += [f"{before}{shapes}:", indent(detail, "  ")]
    return lines


def describe_difference(
    template: ChatTemplate, actual: Sequence[int], expected: Sequence[int]
) -> str:
    """Return a text about the first token in which two rows differ, with its neighbors."""
    index = common_prefix_length(actual, expected)
    before = template.decode(actual[max(0, index - 8) : index])
    episode_text, template_text = (
        template.decode(ids[index : index + 8]) for ids in (actual, expected)
    )
    return (
        f"token {index} differs (zq... are placeholders for the contents of messages)"
        f"\n    after:    {before!r}\n    episode:  {episode_text!r}"
        f"\n    template: {template_text!r}"
    )
