"""`agentrl docs`: the documentation of the installed version."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.errors import UserError
from agentrl.registry import did_you_mean
from agentrl.terminal import echo

ASSISTANTS = "assistants"
"""The page for coding assistants, AGENTS.md."""


def docs(
    page: Annotated[
        str, typer.Argument(help="A page, such as rewards. By default: the list of pages.")
    ] = "index",
) -> None:
    """Print a page of the documentation of this version, as Markdown.

    `agentrl docs assistants` is a guide for coding assistants, and `agentrl docs llms.txt` lists
    the pages for them.

    Examples:
        agentrl docs

        agentrl docs rewards | less
    """
    package = Path(__file__).parents[1]
    folder = package / "_docs"
    if not folder.is_dir():  # a checkout
        folder = package.parent / "docs"
    files = {file.stem: file for file in folder.glob("*.md")} | {"llms.txt": folder / "llms.txt"}
    guide = folder / "AGENTS.md"
    files[ASSISTANTS] = guide if guide.is_file() else package.parent / "AGENTS.md"
    name = page.removesuffix(".md")
    if name not in files:
        known = ", ".join(sorted(files))
        raise UserError(f"no page {page!r}.{did_you_mean(name, [*files])} Pages: {known}")
    echo(files[name].read_text().rstrip())
