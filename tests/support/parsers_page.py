"""Writes the table of parsers in benchmarks/templates.md: `make docs`."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from support.any_template import templates_of_trl, tokenizer_for, tokenizer_of_trl
from support.calls_in_jinja import PYTHONIC, template_with, with_calls
from support.family_calls import CALLS_IN_JINJA, jinja
from support.family_facts import FAMILY_FACTS
from support.pages import PAGE, with_text_between
from support.rendered_calls import CallTemplate, exact, random_calls
from support.template_from_facts import tokenizer_from_facts

from agentrl.chat import ChatTemplate
from agentrl.chat.formats import FORMATS, parser_of
from agentrl.errors import TemplateError

BEGIN, END = "<!-- table of parsers: make docs -->\n", "<!-- end of the table of parsers -->\n"
PEERS = {"vllm": "vLLM", "sglang": "SGLang"}
CALLS_EACH = 24
"""Random calls that each template renders, or more where a turn holds several."""

PEER_CASES: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "peer_cases.json").read_text("utf-8")
)
"""Turns built as those in the unit tests of vLLM and SGLang are, with the calls that these expect.

`tools` are the tools of all turns. A case has the `format`, the `peer`, the name of its `test`, our
own `turn` of the same structure, the `calls` that the test expects (`[name, arguments]`; a text for
arguments that are passed on unread), the `parser` of SGLang, the calls that the `installed` SGLang
reads if they are others, and `why` our parser differs (a key of `WHY`), if it does.
"""

WHY = {
    "behind": "drops text that should not be there",
    "cut": "runs a call that is cut off",
    "fence": "skips calls in code fences and quotes",
    "first": "reads the first list only",
    "half": "runs a name without arguments, or arguments without a name",
    "literal": "reads a set as a list",
    "mark": "goes by the schema against the attribute `string`",
    "noschema": "decodes values without a schema",
    "outside": "runs a call outside of its message",
    "positional": "drops positional arguments",
    "prose": "searches prose for calls",
    "quotes": "guesses the end of a string with unescaped quotes",
    "raw": "passes on arguments that it cannot read",
    "separator": "skips a name without a line break",
    "tag": "takes a misspelled closing tag for the right one",
    "twice": "decodes JSON within JSON",
    "unknown": "drops calls to unknown tools",
    "whole": "makes `5.0` the integer 5",
    "words": "makes `yes`, `1` or `null` values",
    "wrapper": "unpacks a lone `arguments` or `input`",
}
"""The behaviour of another project's parser where agentrl's parser differs."""

WHY_NOT_READ = {
    "lfm2": "LFM2.5's templates escape neither quotes nor backslashes",
    "llama_pythonic": "templates that put all values between quotes escape nothing in them",
}
"""The reasons why a parser does not read all rendered calls."""


def templates() -> Iterator[tuple[str, ChatTemplate]]:
    """Yield the chat templates: TRL's, those in `tests/fixtures/templates`, and `FAMILY_FACTS`."""
    tokenizers = {name: tokenizer_of_trl(name) for name in templates_of_trl()}
    for file in sorted((Path(__file__).parents[1] / "fixtures" / "templates").glob("*.jinja")):
        tokenizers[file.stem] = tokenizer_for(file.read_text("utf-8"))
    tokenizers |= {name: tokenizer_from_facts(facts) for name, facts in FAMILY_FACTS.items()}
    for name, tokenizer in tokenizers.items():
        try:
            yield name, ChatTemplate(tokenizer)
        except TemplateError:  # images alone, or nothing that ends a turn
            continue
    # Formats that few of these templates teach: ChatML with calls in that format.
    for name, parts in CALLS_IN_JINJA.items():
        yield f"{name}, its calls alone", template_with(jinja(*parts))
    yield "llama_pythonic, its calls alone", with_calls(PYTHONIC)


@cache
def rendered() -> dict[str, Counter[str]]:
    """Count, by format, the templates that teach it, the rendered turns, and those that are read.

    A turn is read if the format's parser returns exactly the calls that were rendered.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for name, source in templates():
        template = CallTemplate(source)
        if not template.ways:
            continue
        count, chance = counts[template.format], random.Random(name)
        count["templates"] += 1
        for i in range(CALLS_EACH):
            calls = random_calls(chance, template.takes_several)
            count["turns"] += 1
            count["read"] += template.reads(calls, template.ways[i % len(template.ways)])
    return counts


def runs_as_expected(case: dict[str, Any]) -> bool:
    """Return whether our parser reads the calls that the peer's test expects, and no others.

    Broken calls do not count: a peer drops them or keeps them as text; agentrl returns an error to
    the model.
    """
    calls = parser_of(case["format"])(case["turn"], PEER_CASES["tools"])
    return exact((c.name, c.arguments) for c in calls if not c.error) == exact(case["calls"])


def peer_columns(format: str) -> str:
    """Return the columns of a row that need no template."""
    columns, reasons = [], []
    if format in WHY_NOT_READ:
        reasons.append(WHY_NOT_READ[format])
    for peer, name in PEERS.items():
        cases = [c for c in PEER_CASES["cases"] if (c["format"], c["peer"]) == (format, peer)]
        agreed = sum(map(runs_as_expected, cases))
        columns.append(f"{agreed} of {len(cases)}" if cases else "no cases")
        why = dict.fromkeys(WHY[c["why"]] for c in cases if "why" in c)
        if why:
            reasons.append(f"{name} {', '.join(why)}")
    return f" {columns[0]} | {columns[1]} | {'; '.join(reasons)} |"


def row(format: str) -> str:
    """Return a format's line."""
    count = rendered()[format]
    templates = f"{count['templates']} template" + "s" * (count["templates"] != 1)
    read = f"{count['read']} of {count['turns']} ({templates})"
    return f"| `{format}` | {read} |{peer_columns(format)}"


def table() -> str:
    """Return the table in Markdown."""
    head = (
        "| format | rendered turns read | vLLM's cases agreed | SGLang's cases agreed | why not |\n"
        "|---|---|---|---|---|\n"
    )
    return head + "".join(f"{row(format)}\n" for format in sorted(FORMATS))


def with_table(page: str) -> str:
    """Return the page with the table of this version."""
    return with_text_between(page, BEGIN, END, table())


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), encoding="utf-8")
