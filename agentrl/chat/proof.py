"""Does a chat template let a row grow turn by turn? Shown on conversations of many shapes.

Each conversation is made twice: as an episode makes it, from a prompt, sampled turns and deltas,
and by rendering all of it at once. Where the ids are the same at every turn, the template is
append-only in that shape, and a row holds what the model would be shown in any other way. Where
they are the same once the thinking of earlier turns is left out, `history_thinking` decides.
Anything else would train on what no deployment shows, and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from agentrl.chat.between import ARGUMENT, SPOKEN, spoken
from agentrl.chat.render import Schemas
from agentrl.chat.template import ChatTemplate
from agentrl.chat.thinking import thoughtful
from agentrl.errors import TemplateError
from agentrl.trajectory import Message, ToolCall

Status = Literal["append-only", "drops thinking", "unsupported", "differs"]

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
_WAYS = 7
_UNICODE = "Zoë: 日本語 🙂👍🏽 \u00a0e\u0301 \u2028 ½"


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of conversation: what follows each turn of the assistant."""

    name: str
    after: tuple[tuple[str, ...], ...]
    """Per turn, `tool:TEXT` and `user:TEXT`; a turn before tools makes that many calls."""
    thinks: bool = False
    system: bool = True


SHAPES = (
    Shape("one tool", (("tool:12",),)),
    Shape("parallel tools", (("tool:12", "tool:13"),)),
    Shape("five turns", (("tool:1",), ("tool:2",), ("user:3",), ("tool:4",), ("user:5",))),
    Shape("tool then user", (("tool:12", "user:Go on."),)),
    Shape("user only", (("user:Sure?",), ("user:Really?",)), system=False),
    Shape("thinking", (("tool:12",), ("user:Sure?",)), thinks=True),
    Shape("unicode", ((f"tool:{_UNICODE}",), (f"user:{_UNICODE}",))),
    Shape("leading space and newline", (("tool: \n 12 \n\n",), ("user:\n  a \n",))),
    Shape("empty tool result", (("tool:",),)),
    Shape("long result cut", (("tool:" + "word 12 " * 400 + "\n(400 of 900 tokens shown)",),)),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a shape showed."""

    shape: str
    status: Status
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether episodes of this shape can be trained on."""
        return self.status in ("append-only", "drops thinking")


def prove(
    template: ChatTemplate, schemas: Schemas = (PROBE_TOOL,), shapes: Sequence[Shape] = SHAPES
) -> list[Verdict]:
    """Judge a template on each shape, with these tools in the prompt."""
    return [_verdict(template, schemas, shape) for shape in shapes]


def require(template: ChatTemplate, schemas: Schemas, names: Sequence[str]) -> None:
    """Refuse a template that a run cannot be played with.

    Args:
        template: the policy's.
        schemas: the tools of the rows.
        names: the shapes that the run's loops make.

    Raises:
        TemplateError: naming the shape, and where the ids differ first.
    """
    bad = [v for v in prove(template, schemas, [s for s in SHAPES if s.name in names]) if not v.ok]
    if bad:
        raise TemplateError(
            "the model's chat template cannot be used for this run:\n"
            + "\n".join(f"  {v.shape}: {v.detail}" for v in bad)
            + "\nTake the model's training variant of it, a loop that does not need this (react"
            " shows tools as text), or see `agentrl check-template MODEL --fix`."
        )


def _verdict(template: ChatTemplate, schemas: Schemas, shape: Shape) -> Verdict:
    """The best of the ways in which an assistant's turn can be written down for a template."""
    said = "no turn of this shape is shown"
    worst: Verdict | None = None
    if template.thinking.end in template.thinking.extra:  # thinking is off: the prompt closes it
        shape = replace(shape, thinks=False)
    for way in range(_WAYS):
        try:
            verdict = _compare(template, schemas, shape, way)
        except TemplateError as e:
            said = str(e)
            continue
        if verdict.ok:
            return verdict
        worst = worst or verdict
    return worst or Verdict(shape.name, "unsupported", said)


def _turn(calls: int, thinks: bool, way: int) -> dict[str, Any]:
    """An assistant's turn: with its content or calls alone, arguments as object or text, ...

    ... thoughts in a key or in tags; and at last as nothing but text.
    """
    if way == _WAYS - 1:
        return thoughtful()[-1] if thinks else spoken()
    named = [("probe", f"{i:09d}") for i in range(calls)]
    if thinks:
        forms = thoughtful(named)
        turn = forms[way % 3 % len(forms)]
    else:
        turn = spoken(named)
        turn["content"] = (SPOKEN, "", None)[way % 3] if calls else SPOKEN
    if way >= 3:
        for c in turn.get("tool_calls", ()):
            c["function"]["arguments"] = '{"x": "' + ARGUMENT + '"}'
    return turn


def _compare(template: ChatTemplate, schemas: Schemas, shape: Shape, way: int) -> Verdict:
    said: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}] * shape.system
    said.append({"role": "user", "content": "How much is 3*4?"})
    messages = [Message(m["role"], m["content"]) for m in said]
    sampled: dict[int, list[int]] = {}
    status: Status = "append-only"
    for after in shape.after:
        tools = sum(text.startswith("tool:") for text in after)
        calls = tuple(ToolCall("probe", {"x": ""}, id=f"{i:09d}") for i in range(tools))
        turn, more = _turn(tools, shape.thinks, way), []
        for i, text in enumerate(after):
            role, _, content = text.partition(":")
            keys = {"name": "probe", "tool_call_id": f"{i:09d}"} if role == "tool" else {}
            more.append({"role": role, "content": content, **keys})
        sampled[len(said)] = _sampled(template, schemas, turn, () if shape.thinks else more)
        said += [turn, *more]
        messages.append(Message("assistant", "", calls))
        messages += [Message(m["role"], m["content"]) for m in more]
        want = template.encoder.literal(template.render(said, schemas))
        got = list(template.conversation(messages, schemas, sampled))
        if _same(template, got, want):
            continue
        if _same(template, template.conversation(messages, schemas, sampled, strip=True), want):
            status = "drops thinking"
            continue
        return Verdict(shape.name, "differs", difference(template, got, want))
    return Verdict(shape.name, status)


def _same(template: ChatTemplate, got: Sequence[int], want: Sequence[int]) -> bool:
    """The same ids, or the same text: where a turn begins, one token may have become two."""
    return list(got) == list(want) or template.decode(got) == template.decode(want)


def _sampled(
    template: ChatTemplate,
    schemas: Schemas,
    turn: Mapping[str, Any],
    more: Sequence[Any],
) -> list[int]:
    """The turn as the model writes it: as the template shows it to be imitated.

    Where the prompt opens no thought, a turn without one is what history shows: some templates put
    empty tags into the last turn alone.
    """
    asked = [{"role": "user", "content": "How much is 3*4?"}]
    before = template.render(asked, schemas)
    alone = template.render([*asked, turn], schemas, ask=False)
    shown = alone
    if more and not (template.thinking.extra and alone.startswith(before)):
        shown = template.render([*asked, turn, *more], schemas)
    own, closes = template.finder.own_end([*asked, turn])
    if own not in shown or own not in alone:
        raise TemplateError(f"the chat template changes {own!r} when more is said")
    start, end = template.encoder.shared(before, shown), shown.rindex(own) + len(own)
    if turn["content"] and not start <= shown.rfind(SPOKEN) < end:
        raise TemplateError("the chat template does not show a text before a call")
    ids = template.encoder.literal(shown[start:end])
    if closes:
        ids.append(template.encoder.split(alone[alone.rindex(own) + len(own) :])[1][0])
    return ids


def difference(template: ChatTemplate, got: Sequence[int], want: Sequence[int]) -> str:
    """The first token in which two rows differ, with what stands around it."""
    at = next(
        (i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b),
        min(len(got), len(want)),
    )
    before = template.decode(got[max(0, at - 8) : at])
    ours, theirs = (template.decode(ids[at : at + 8]) for ids in (got, want))
    return (
        f"token {at} differs: after {before!r} an episode has {ours!r}, the template, once more is"
        f" said, {theirs!r}"
    )
