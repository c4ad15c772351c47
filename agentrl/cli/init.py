"""`agentrl init`: a starter project that trains."""

from __future__ import annotations

import contextlib
import runpy
import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from agentrl.terminal import echo


class Template(StrEnum):
    """The starter projects: folders of `starter`."""

    TOOL = "tool"
    INTERACTION = "interaction"
    ENVIRONMENT = "environment"
    JUDGE = "judge"


def init(
    folder: Annotated[Path, typer.Argument()] = Path("my_env"),
    template: Template = Template.TOOL,
) -> None:
    """Create a commented starter project: an environment, rows, a run config and tests.

    Args:
        folder: The folder to create.
        template: tool: tools, and a little of everything; environment: a game in one class;
            interaction: a simulated user; judge: answers graded by a judge model.

    Examples:
        agentrl init my_env && cd my_env && agentrl train -c run.yaml

        agentrl init my_game --template environment
    """
    from agentrl.errors import UserError

    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: choose a new folder")
    try:
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty: choose a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder, template)
    except OSError as e:
        raise UserError(f"{folder} cannot be written ({e.strerror}): choose another folder") from e
    echo(f"created {folder}. Next:\n  cd {shlex.quote(str(folder))}")
    echo("  agentrl check -c run.yaml\n  agentrl train -c run.yaml")


def _write(folder: Path, template: Template) -> None:
    """Write the files of a template, and its rows."""
    starter = Path(__file__).parent / "starter"
    for file in (starter / "README.md", *sorted((starter / template).iterdir())):
        if file.is_file():
            (folder / file.name).write_text(file.read_text("utf-8"), "utf-8")
    with contextlib.chdir(folder):
        runpy.run_path("rows.py")
