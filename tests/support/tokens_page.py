"""Writes the table of chat templates in benchmarks/templates.md: `make docs`."""

from __future__ import annotations

from typing import Any

from support.any_template import templates_of_trl, tokenizer_of_trl
from support.families import TOOLS
from support.family_facts import FAMILY_FACTS
from support.pages import PAGE, with_text_between
from support.template_from_facts import tokenizer_from_facts
from support.template_outcomes import outcomes

from agentrl.chat import ChatTemplate
from agentrl.chat.formats.detect import detect_format
from agentrl.chat.verify_template import verify_template
from agentrl.errors import TemplateError

BEGIN, END = "<!-- table of templates: make docs -->\n", "<!-- end of the table -->\n"


def row(name: str, source: str, tokenizer: Any) -> str:
    """Return a template's line: verdict, format of calls, number of compared conversations."""
    try:
        template = ChatTemplate(tokenizer)
    except TemplateError as e:
        why = "nothing ends a turn" if "control token" in str(e) else "it takes no plain texts"
        return f"| {name} | {source} | refused: {why} | | |"
    verdicts = verify_template(template, TOOLS)
    ok = {v.shape: v.status for v in verdicts if v.ok}
    fails = [v.shape for v in verdicts if v.fails]
    dropped = [shape for shape, status in ok.items() if status == "drops thinking"]
    if not ok:
        verdict = "refused"
    elif "one tool" not in ok:
        verdict = "text only: tools need `react`"
    else:
        verdict = "drops thinking" if dropped else "append-only"
        if fails:
            verdict += f"; refused: {', '.join(fails)}"
    format = detect_format(template)
    reads = f"`{format}`" if format else "not read"
    counts = outcomes(template)
    same = counts["same"]
    other = sum(n for what, n in counts.items() if what.startswith(("other", "ends inside")))
    compared = f"{same} of {same + other}" if same + other else "none"
    return f"| {name} | {source} | {verdict} | {reads} | {compared} |"


def table() -> str:
    """Return the table in Markdown."""
    head = (
        "| family | template | verdict | calls | rows equal to the rendered text |\n"
        "|---|---|---|---|---|\n"
    )
    rows = [row(name, "TRL's", tokenizer_of_trl(name)) for name in templates_of_trl()]
    rows += [
        row(name, "rebuilt", tokenizer_from_facts(FAMILY_FACTS[name]))
        for name in sorted(FAMILY_FACTS)
    ]
    return head + "".join(f"{line}\n" for line in rows)


def with_table(page: str) -> str:
    """Return the page with the table of this version."""
    return with_text_between(page, BEGIN, END, table())


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), encoding="utf-8")
