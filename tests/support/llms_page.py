"""docs/llms.txt: the pages for language models (llmstxt.org). `make docs` writes it."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
HEAD = """# agentrl

> A Python toolkit for reinforcement learning of language-model agents that talk over several
> turns and call tools.

`agentrl docs PAGE` prints a page of the installed version, `agentrl docs assistants` the guide for
coding assistants.
"""


def text() -> str:
    """Return the file: the sections of docs/index.md, a line for each page."""
    parts = re.split(r"^## (.+)$", (DOCS / "index.md").read_text(), flags=re.M)[1:]
    lines = [HEAD]
    for title, section in zip(parts[::2], parts[1::2], strict=True):
        lines.append(f"## {title}\n")
        for cells in re.findall(r"^\| (\[.+?\)) \| (.+) \|$", section, flags=re.M):
            plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cells[1])
            lines += [f"- [{n.removesuffix('.md')}]({p}): {plain}"
                      for n, p in re.findall(r"\[([^]]+)\]\(([^)]+)\)", cells[0])]  # fmt: skip
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    (DOCS / "llms.txt").write_text(text())
