"""Random tool calls, and the turns that chat templates render from them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from agentrl.chat import ChatTemplate
from agentrl.chat.formats import parser_of
from agentrl.chat.formats.detect import detect_format
from agentrl.chat.turn_delta import PROBE_ARGUMENT
from agentrl.errors import TemplateError

Call = tuple[str, dict[str, Any]]
"""The name of a tool and its arguments."""

QUESTION = {"role": "user", "content": "How much is 3*4?"}
NAMES = ("get_weather", "f", "runCode", "search2", "a1_b2", "calc.add", "my-tool", "_p")
KEYS = ("city", "x", "n1", "long_name_2", "camelCase", "_u", "k-1", "a.b")
TEXTS = (
    "", "x", "plain text", " lead and trail ", "\n lines \n", "one\ntwo\n", "tab\there",
    "\r\n crlf", "é ü 漢字 🎉", "\u2028x", "3", "3.5", "-1.5e3", "true", "null", "None", '"', "'",
    '"quoted"', "it's", 'say "it\'s"', "\\", '\\"', "C:\\dir\\new", "<b>x</b> & more",
    "a < b && c > d", "</x>", "&lt;&amp;", "<|x", "<tool>", "[1, 2]", '{"a": 1}', "{'a': 1}",
    "f(x=1)", "](){}", "a]b[c", "a, b", "k=v", "a,b;c=d", "%s {} $x", "$5 #tag @me", "`code`",
    "```json\n{}\n```", "a|b",
    'print("hi")\nif x:\n\treturn {\'a\': [1]}', "SELECT * FROM \"t\" WHERE a='b';",
    "to=functions.f",
)  # fmt: skip
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
         dict: "object", type(None): "null"}  # fmt: skip


def random_calls(chance: random.Random, several: bool) -> list[Call]:
    """Return one to three calls of different tools with hostile values."""
    count = chance.choice((1, 1, 2, 3)) if several else 1
    return [
        (name, {key: value(chance) for key in chance.sample(KEYS, chance.randrange(5))})
        for name in chance.sample(NAMES, count)
    ]


def value(chance: random.Random, depth: int = 0) -> Any:
    """Return a text, or another value that JSON can hold."""
    kind = chance.choice(("text",) * 5 + ("int", "float", "bool", "null", "list", "dict"))
    match kind if depth < 2 or kind not in ("list", "dict") else "text":
        case "int":
            return chance.choice((0, 1, -7, 42, 10**12, -(2**63)))
        case "float":
            return chance.choice((0.5, -3.25, 1e-7, 1e22, 2.0, 3.14159))
        case "bool":
            return chance.random() < 0.5
        case "null":
            return None
        case "list":
            return [value(chance, depth + 1) for _ in range(chance.randrange(4))]
        case "dict":
            return {chance.choice(KEYS): value(chance, depth + 1) for _ in range(3)}
        case _:
            return chance.choice(TEXTS)


def schemas_of(calls: list[Call]) -> list[dict[str, Any]]:
    """Return the tools that are called, with the types of the arguments that they get."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "Does it.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        k: {"type": TYPES[type(v)], "description": "A value."}
                        for k, v in arguments.items()
                    },
                },
            },
        }
        for name, arguments in calls
    ]


@dataclass(frozen=True)
class Way:
    """The message format in which a template accepts a turn with calls."""

    arguments_as_text: bool
    content: str | None

    def message(self, calls: list[Call]) -> dict[str, Any]:
        """Return the turn as a message for the template."""
        functions = (
            {"name": n, "arguments": json.dumps(a, ensure_ascii=False)}
            if self.arguments_as_text
            else {"name": n, "arguments": a}
            for n, a in calls
        )
        tool_calls = [
            {"type": "function", "id": f"{i:09}", "function": function}
            for i, function in enumerate(functions)
        ]
        return {"role": "assistant", "content": self.content, "tool_calls": tool_calls}


class CallTemplate:
    """A chat template, its format of calls, and the ways in which it takes calls."""

    def __init__(self, template: ChatTemplate):
        self.template, self.format = template, detect_format(template)
        self._probe = probe = [("probe", {"x": PROBE_ARGUMENT})]
        every = (Way(as_text, c) for as_text in (False, True) for c in ("", "Well.", None))
        ways = [way for way in every if self.format and self.reads(probe, way)]
        self.ways = [w for w in ways if w.arguments_as_text == ways[0].arguments_as_text]
        two = [*probe, ("again", {"x": PROBE_ARGUMENT})]
        self.takes_several = bool(self.ways) and self.reads(two, self.ways[0])

    def turns(self, calls: list[Call], way: Way) -> list[str]:
        """Return the turn as the model writes it, also with the thought that the prompt opens.

        The list is empty if the template does not take these calls, or does not show the turn after
        the prompt.
        """
        template, schemas = self.template, schemas_of(calls)
        try:
            end = self._end(way)
            prompt = template.render([QUESTION], schemas)
            shown = template.render([QUESTION, way.message(calls)], schemas, as_prompt=False)
        except TemplateError:
            return []
        start = template.encoder.shared_length(prompt, shown)
        if not shown.endswith(end) or len(shown) - len(end) < start:
            return []
        opened = template.thinking.opening(template.encoder.encode_trusted(prompt))
        text = shown[start : len(shown) - len(end)]
        return list(dict.fromkeys((opened + text, text)))

    def _end(self, way: Way) -> str:
        """Return the text that the template writes after the turn."""
        turn = [QUESTION, way.message(self._probe)]
        own, _ = self.template.probe.end_of_turn(turn)
        shown = self.template.render(turn, schemas_of(self._probe), as_prompt=False)
        return shown[shown.rindex(own) + len(own) :] if own in shown else ""

    def reads(self, calls: list[Call], way: Way) -> bool:
        """Return whether the format's parser reads exactly these calls in the rendered turn."""
        parse, schemas = parser_of(self.format), schemas_of(calls)
        parsed = (parse(text, schemas) for text in self.turns(calls, way))
        return any(
            exact((c.name, c.arguments) for c in result) == exact(calls)
            for result in parsed
            if not any(c.error for c in result)
        )


def exact(calls: Any) -> str:
    """Return calls as JSON: 1, 1.0 and true are equal in Python."""
    return json.dumps([list(call) for call in calls], sort_keys=True)
