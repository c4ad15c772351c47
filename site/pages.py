"""The pages of the documentation, as docs/index.md lists them.

python site/pages.py    # writes docs/llms.txt, the pages for language models (llmstxt.org)
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
HEAD = """# agentrl

> A Python toolkit for reinforcement learning of language-model agents that talk over several
> turns and call tools.

`agentrl docs PAGE` prints a page of the installed version, `agentrl docs assistants` the guide for
coding assistants.
"""


def sections() -> dict[str, list[tuple[str, str]]]:
    """Return the sections of docs/index.md: the file and the description of each page."""
    parts = re.split(r"^## (.+)$", (DOCS / "index.md").read_text(), flags=re.M)[1:]
    found: dict[str, list[tuple[str, str]]] = {}
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        found[title] = []
        for cell, description in re.findall(r"^- (\[.+?\)): (.+)$", text, flags=re.M):
            plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", description)
            found[title] += [(file, plain) for file in re.findall(r"\]\(([^)]+)\)", cell)]
    return found


def llms_text() -> str:
    """Return the content of docs/llms.txt."""
    lines = [HEAD]
    for title, pages in sections().items():
        lines.append(f"## {title}\n")
        lines += [f"- [{file.removesuffix('.md')}]({file}): {text}" for file, text in pages]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    (DOCS / "llms.txt").write_text(llms_text())
