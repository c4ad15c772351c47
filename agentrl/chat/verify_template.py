"""Does a chat template let a row grow turn by turn? Shown on many shapes and kinds of turns.

A *shape* is what follows the turns of the assistant: results of tools, users, or both. A *kind* is
what a model writes into a turn: a text, a thought, calls, or several of these. Each shape is tried
with each kind, and each conversation is made twice: as an episode makes it, from a prompt, sampled
turns and deltas, and by rendering all of it at once. Where the ids are the same at every turn, the
template is append-only in that shape and kind, and a row holds what the model would be shown in any
other way. Where they are the same once the thinking of earlier turns is left out,
`history_thinking` decides. Anything else would train on what no deployment shows, and is refused.

A model chooses the kind. So a shape has the worst status of its kinds; kinds that the template
cannot write are named. A *form* is how a message holds a turn: arguments as an object or as
text, no content as "" or None. Neither the model nor an episode chooses it, so the best one counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from textwrap import indent
from typing import Any, Literal

from agentrl.chat.encoding import common_prefix_length
from agentrl.chat.render import Renderer, Schemas, TemplateMessage
from agentrl.chat.template import ChatTemplate
from agentrl.chat.thinking import PROBE_THOUGHT
from agentrl.chat.tokenizer import template_source
from agentrl.chat.truncate import truncate
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
_NEVER_WRITTEN = "after these prompts a model can write none of the turns that the template shows"

_QUESTION = {"role": "user", "content": "How much is 3*4?"}
_THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
_UNICODE = "Zoë: 日本語 🙂👍🏽 \u00a0e\u0301 \u2028 ½"


@dataclass(frozen=True, slots=True)
class Shape:
    """The roles of a conversation: the messages that follow each turn of the assistant."""

    name: str
    after: tuple[tuple[str, ...], ...]
    """Per turn, `tool:TEXT` and `user:TEXT`; a turn before tools makes that many calls."""
    system: bool = True
    cut: int = 0
    """Most tokens of a tool's text; 0: it is never cut."""

    @property
    def calls(self) -> bool:
        """Return whether a turn of this shape calls tools."""
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
"""What an episode with tools and nobody to talk to becomes."""
THINKING_VARIABLE = "enable_thinking"
"""The variable by which templates are told whether the model is to think."""
THINKING_SHAPES = {
    True: Shape("thinking on", (("tool:12",), ("user:Sure?",))),
    False: Shape("thinking off", (("tool:12",), ("user:Sure?",))),
}
OPTIONAL = ("parallel tools", "tool then user", *(shape.name for shape in THINKING_SHAPES.values()))
"""Shapes that a template may refuse: results can be shown one after another, and so on."""


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
    """How messages hold turns."""

    arguments_as_text: bool
    no_content: str | None
    thought_in_tags: bool = False
    """A thought stands in the content, between tags; else in a key of its own."""


MESSAGE_FORMS = tuple(MessageForm(as_text, no) for no in ("", None) for as_text in (False, True))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The status of one kind of turns in one shape."""

    status: Status
    reason: str = ""
    """Where the ids differ, or why the template cannot write such turns, or all of them."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a shape showed."""

    shape: str
    status: Status
    detail: str = ""
    """Where the ids differ, why it is not supported, and for which kinds of turns."""
    kinds: Mapping[str, Status] = field(default_factory=dict)
    """The status of each kind of turns that a model can write."""

    @property
    def ok(self) -> bool:
        """Whether episodes of this shape can be trained on."""
        return self.status in ("append-only", "drops thinking")

    @property
    def fails(self) -> bool:
        """Whether the template is at fault: a shape that it may well refuse is none."""
        return self.status == "differs" or (not self.ok and self.shape not in OPTIONAL)


class _EndsInside(TemplateError):
    """A turn cannot be sampled: it holds a token that ends turns before its end."""


class _NotShown(TemplateError):
    """The template does not show all that a turn of this kind holds, as a model writes it."""


class _ThoughtNotShown(_NotShown):
    """It does not show the thought of a turn, or where it stood."""


class _NotWritten(TemplateError):
    """No model writes a turn of this kind: the prompt has begun another one."""


def verify_template(
    template: ChatTemplate, schemas: Schemas = (PROBE_TOOL,), shapes: Sequence[Shape] = SHAPES
) -> list[Verdict]:
    """Judge a template on each shape, with these tools in the prompt."""
    proof = _Verifier(template, schemas)
    return [proof.verify(shape) for shape in shapes]


def verify_tokenizer(
    tokenizer: Any, end_ids: Sequence[int] = (), schemas: Schemas = (PROBE_TOOL,)
) -> list[Verdict]:
    """Judge a tokenizer's template on every shape, and with its thinking switched on and off.

    Raises:
        TemplateError: no turns can be made with it at all.
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
    """A renderer that keeps its texts: shapes, kinds and forms share most of them."""

    def __init__(self, render: Renderer):
        self._from_template = render
        self._kept: dict[tuple[str, bool, bool], str | TemplateError] = {}

    def __call__(
        self,
        messages: Sequence[TemplateMessage],
        schemas: Schemas = (),
        add_generation_prompt: bool = True,
    ) -> str:
        key = (json.dumps(messages), bool(schemas), add_generation_prompt)
        if key not in self._kept:
            try:
                self._kept[key] = self._from_template(messages, schemas, add_generation_prompt)
            except TemplateError as e:
                self._kept[key] = e
        kept = self._kept[key]
        if isinstance(kept, TemplateError):
            raise kept
        return kept


@dataclass(frozen=True, slots=True)
class _Script:
    """A shape as messages."""

    system: bool
    rounds: Sequence[tuple[Sequence[str], Sequence[dict[str, Any]]]]
    """Per turn, the ids of its calls and what follows it."""
    calls: bool
    """Calls are `tool_calls`; else they are a part of the turns' texts."""


class _Verifier:
    """The conversations of shapes, kinds and forms with one template and its tools."""

    def __init__(self, template: ChatTemplate, schemas: Schemas):
        self.template = template
        self.schemas = schemas
        self.tool = schemas[0]["function"]["name"] if schemas else "probe"
        self._render = _RenderOnce(template.render)
        self._finder = TemplateProbe(self._render, template.encoder, template.probe.ends)
        prompt, asked = (
            template.render([_QUESTION]),
            template.render([_QUESTION], add_generation_prompt=False),
        )
        self.ends_thoughts = template.thinking.end in prompt[self._shared(asked, prompt) :]
        """Prompts end the thought of the turn to come: no kind has one."""
        self.begins_thoughts = self._begins_thought(prompt)
        in_tags = self._takes_tags()
        self.forms = [replace(s, thought_in_tags=in_tags) for s in MESSAGE_FORMS]

    def verify(self, shape: Shape) -> Verdict:
        """Return the worst of the kinds that the template can write."""
        script = self._script(shape)
        verdict = _verdict(shape, self._outcomes(script))
        if verdict.status != "unsupported" or not shape.calls:
            return verdict
        # To this template the calls of a turn are a part of its text, as they are to an episode.
        as_text = _verdict(shape, self._outcomes(replace(script, calls=False)))
        if as_text.ok:
            note = (
                "OK. Episodes store calls as text, and this works. The template does not render"
                f" structured `tool_calls` ({verdict.detail}); this does not matter for training."
            )
        else:
            note = verdict.detail if verdict.detail != as_text.detail else ""
        return replace(as_text, detail="\n".join(filter(None, (note, as_text.detail))))

    def render(
        self, messages: Sequence[TemplateMessage], add_generation_prompt: bool = True
    ) -> str:
        """Return the conversation as text, as `ChatTemplate.render` does."""
        return self._render(messages, self.schemas, add_generation_prompt)

    def _takes_tags(self) -> bool:
        """Return whether messages hold thoughts in their content, between tags.

        They do not if the template shows those of a key, if it does not show those between tags,
        or if it puts them behind a thought of its own that is empty.
        """

        def shown(form: MessageForm, *calls: str) -> str:
            turn = self._turn(TurnKind(text=True, thought=True), form, calls)
            text = (
                self._render.attempt([_QUESTION, turn], self.schemas, add_generation_prompt=False)
                or ""
            )
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
        """Return a shape as messages; a tool's text is cut as an episode cuts it."""
        encode, decode = self.template.encode, self.template.decode
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
        """Return what each kind showed that a model can write, by its description."""
        outcomes = {}
        for kind in TURN_KINDS:
            if (kind.text or script.calls) and not (kind.thought and self.ends_thoughts):
                outcome = self._best(script, kind)
                if outcome:
                    outcomes[kind.describe(script.calls)] = outcome
        return outcomes

    def _best(self, script: _Script, kind: TurnKind) -> Outcome | None:
        """Return what a kind showed in its best form; None if no model writes it."""
        differs: Outcome | None = None
        refused: list[TemplateError] = []
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
                refused.append(e)
                continue
            if outcome.status != "differs":
                return outcome
            differs = differs or outcome
        if refused and is_written and not differs:
            reason = next((e for e in refused if isinstance(e, _NotShown)), refused[0])
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
        """Make a conversation as an episode does, and compare it at every turn.

        A turn whose thought the template does not show has none, if another one of the
        conversation has one: some templates show those of turns with calls alone.
        """
        template = self.template
        said: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}] * script.system
        said.append(_QUESTION)
        messages = [Message(m["role"], m["content"]) for m in said]
        sampled: dict[int, Sequence[int]] = {}
        outcome, is_thought, hidden = Outcome("append-only"), False, None
        for ids, answers in script.rounds:
            calls = ids if script.calls else ()
            turn = self._turn(kind, form, calls)
            try:
                sampled[len(said)] = self._sampled(said, turn, kind, answers)
                is_thought = True
            except _ThoughtNotShown as e:
                hidden, quiet = e, replace(kind, thought=False)
                turn = self._turn(quiet, form, calls)
                sampled[len(said)] = self._sampled(said, turn, quiet, answers)
            said += [turn, *answers]
            named = tuple(ToolCall(self.tool, {"x": ""}, id=id) for id in ids)
            messages.append(Message("assistant", "", named))
            messages += [Message(m["role"], m["content"]) for m in answers]
            want = template.encoder.encode_template_text(self.render(said))
            rows = [template.conversation(messages, self.schemas, sampled)]
            if self._same(rows[0], want):
                continue
            rows.append(template.conversation(messages, self.schemas, sampled, strip=True))
            if self._same(rows[1], want):
                outcome = Outcome("drops thinking")
                continue
            # The row that goes further shows what is wrong; the other, that thinking is dropped.
            row = max(reversed(rows), key=lambda row: common_prefix_length(row, want))
            outcome = Outcome("differs", difference(template, row, want))
            break
        if hidden and not is_thought:
            raise hidden
        if hidden and outcome.status != "differs":
            return replace(
                outcome,
                reason="the chat template shows the thoughts of some turns only. Nothing to do: the"
                " other turns were compared without a thought. If the model writes one there, the"
                " row keeps it as it was sampled, but a deployment would not show it.",
            )
        return outcome

    def _same(self, got: Sequence[int], want: Sequence[int]) -> bool:
        """The same ids, or the same text: where a turn begins, one token may have become two."""
        decode = self.template.decode
        return list(got) == list(want) or decode(got) == decode(want)

    def _sampled(
        self,
        said: Sequence[TemplateMessage],
        turn: TemplateMessage,
        kind: TurnKind,
        more: Sequence[TemplateMessage],
    ) -> Sequence[int]:
        """Return the turn as the model writes it: as the template shows it to be imitated.

        A turn without a thought is what history shows of it, where the prompt opens no thought:
        some templates put empty tags into the last turn alone.

        Args:
            said: the conversation; what stands before its last user message does not matter.
            turn: what the model says next.
            kind: of the turn.
            more: what follows it.
        """
        template = self.template
        asked = said[max(i for i, m in enumerate(said) if m["role"] == "user") :]
        before = self.render(asked)
        alone = self.render([*asked, turn], add_generation_prompt=False)
        text, calls = PROBE_TEXT in (turn["content"] or ""), len(turn.get("tool_calls", ()))
        start = self._shared(before, alone)
        marks = alone.count(PROBE_TEXT, start) + alone.count(PROBE_ARGUMENT, start)
        if len(asked) > 1 and marks > text + calls:
            # Earlier turns are shown otherwise now: read it where there are none.
            return self._sampled(asked[:1], turn, kind, more)
        _require_order(alone[start:], text, calls)
        own, closes = self._finder.own_end([*asked, turn])
        shown = alone
        if not kind.thought and not (template.thinking.extra and alone.startswith(before)):
            shown = self.render([*asked, turn, *more])
        if own not in shown or own not in alone:
            raise TemplateError(
                "the chat template shows the end of a turn otherwise once more is said"
            )
        if not shown.startswith(before) and alone.startswith(before):
            shown = alone
        start, end = self._shared(before, shown), shown.rindex(own) + len(own)
        written = self._goes_on(before, shown[start:end], kind, start == len(before))
        ids = template.encoder.encode_template_text(written)
        if inside := [i for i in ids if i in template.stop_ids]:
            raise _EndsInside(
                f"the chat template writes the stop token {template.decode(inside[:1])!r} inside of"
                f" a turn, and sampling would stop there: {written!r}"
            )
        if closes:
            ids.append(template.encoder.split(alone[alone.rindex(own) + len(own) :])[1][0])
        if written.count(PROBE_ARGUMENT) != calls:
            raise _NotShown(
                f"the chat template shows {written.count(PROBE_ARGUMENT)} of {calls} calls"
            )
        return ids

    def _shared(self, before: str, text: str) -> int:
        """Return how far two texts are the same, in whole control tokens."""
        if text.startswith(before):
            return len(before)
        return self.template.encoder.shared_length(before, text)

    def _goes_on(self, prompt: str, shown: str, kind: TurnKind, continues: bool) -> str:
        """Return a turn so that it goes on from the prompt.

        Where prompts begin a thought, models think, whether the template shows it or not.

        Args:
            prompt: what the model reads.
            shown: what the template shows of the turn.
            kind: of the turn.
            continues: whether this stands right behind the prompt.
        """
        thinking, begun = self.template.thinking, self._begins_thought(prompt)
        if begun and not kind.thought and not continues:
            raise _NotWritten("the prompt has begun a thought")
        if PROBE_THOUGHT in shown and not begun and not continues:
            raise _NotWritten("the prompt has begun a turn without a thought")
        if PROBE_THOUGHT in shown or not kind.thought:
            return shown
        head, end, rest = shown.partition(thinking.end)
        if continues and end and PROBE_TEXT not in head and PROBE_ARGUMENT not in head:
            return f"{head}{PROBE_THOUGHT}{end}{rest}"  # an empty thought is shown
        if not begun and not self.begins_thoughts:
            raise _ThoughtNotShown("the chat template does not show the thought of such a turn")
        answer = shown.removeprefix(thinking.instead)
        # Empty lines before the answer are shown later where the template does not trim them.
        gap = thinking.gap if thinking.trims and not answer.startswith(thinking.gap) else ""
        begin = "" if begun else thinking.begin
        return f"{begin}{PROBE_THOUGHT}\n{thinking.end}{gap}{answer}"

    def _begins_thought(self, prompt: str) -> bool:
        """Return whether a prompt begins the thought of the turn to come."""
        return prompt.rstrip().endswith(self.template.thinking.begin.strip())


def _require_order(shown: str, text: bool, calls: int) -> None:
    """Raise `_NotShown` unless a turn is shown with all it holds, as a model writes it.

    Args:
        shown: the turn as the template shows it.
        text: whether it has a text.
        calls: how many calls it has.
    """
    if text and PROBE_TEXT not in shown:
        raise _NotShown("the chat template does not show a text before a call")
    if text and calls and -1 < shown.find(PROBE_ARGUMENT) < shown.find(PROBE_TEXT):
        raise _NotShown("the chat template shows a text that stands before a call behind the call")


def _verdict(shape: Shape, outcomes: Mapping[str, Outcome]) -> Verdict:
    """Return the worst status of the kinds that the template can write, and what is not so."""
    kinds: dict[str, Status] = {name: outcome.status for name, outcome in outcomes.items()}
    taken = set(kinds.values()) - {"unsupported"}
    if not taken:
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
    return Verdict(shape.name, max(taken, key=_BEST_FIRST.index), "\n".join(lines), kinds)


def format_verdicts(verdicts: Sequence[Verdict], before: str = "") -> list[str]:
    """Return what is said of verdicts as lines: each detail once, under the shapes it holds for."""
    lines = []
    for detail in dict.fromkeys(v.detail or v.status for v in verdicts):
        shapes = ", ".join(v.shape for v in verdicts if (v.detail or v.status) == detail)
        lines += [f"{before}{shapes}:", indent(detail, "  ")]
    return lines


def difference(template: ChatTemplate, got: Sequence[int], want: Sequence[int]) -> str:
    """The first token in which two rows differ, with what stands around it."""
    at = common_prefix_length(got, want)
    before = template.decode(got[max(0, at - 8) : at])
    ours, theirs = (template.decode(ids[at : at + 8]) for ids in (got, want))
    return (
        f"token {at} differs (zq... are placeholders for what messages say)"
        f"\n    after:    {before!r}\n    episode:  {ours!r}\n    template: {theirs!r}"
    )
