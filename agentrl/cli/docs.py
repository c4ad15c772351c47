"""`agentrl docs`: the documentation of the installed version."""

from __future__ import annotations

from typing import Annotated

import typer

from agentrl.errors import UserError
from agentrl.registry import did_you_mean, shipped_path
from agentrl.terminal import echo

ASSISTANTS = "assistants"
"""The page for coding assistants, AGENTS.md."""


def docs(
    page: Annotated[str, typer.Argument()] = "index",
) -> None:
    """Print a page of the documentation of this version, as Markdown.

    `agentrl docs assistants` is a guide for coding assistants, and `agentrl docs llms.txt` lists
    the pages for them.

    Args:
        page: A page, such as rewards. By default: the list of pages.

    Examples:
        agentrl docs

        agentrl docs rewards | less
    """
    folder = shipped_path("_docs", "docs")
    files = {file.stem: file for file in folder.glob("*.md")}
    files["llms.txt"] = folder / "llms.txt"
    files[ASSISTANTS] = shipped_path("_assistants.md", "AGENTS.md")
    name = page.removesuffix(".md")
    if name not in files:
        known = ", ".join(sorted(files))
        raise UserError(f"no page {page!r}.{did_you_mean(name, [*files])} Pages: {known}")
    echo(files[name].read_text().rstrip())
