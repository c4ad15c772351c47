"""`agentrl doors`: adapters of other projects' environments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.terminal import echo

app = typer.Typer(help="Environments and tasks of other projects.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="A door, such as harbor. `list` shows all.")]


@app.command("list")
def list_() -> None:
    """List the doors, each with the installed version of its package."""
    from agentrl.doors.door import find_door
    from agentrl.doors.install import installed_version
    from agentrl.file_loaders import door_names

    doors = [find_door(name) for name in door_names()]
    width = max(len(door.description) for door in doors)
    for door in doors:
        version = installed_version(door) if door.requirements else "needs no package"
        version = version or f"agentrl doors install {door.name}"
        echo(f"{door.name:14} {door.description:{width}} {version}")


@app.command()
def install(
    name: Name,
    packages: Annotated[list[str] | None, typer.Argument()] = None,
    python: str = "",
) -> None:
    """Install a door's package into a virtual environment that only this door uses.

    Packages of other projects need other versions of agentrl's own dependencies, so each door runs
    in a process of its own Python.

    Args:
        packages: More packages to install with it, as arguments of pip.
        python: Make a new virtual environment of this Python. Default: one that fits.

    Examples:
        agentrl doors install reasoning-gym
        agentrl doors install verifiers 'verifiers<0.4' ./my_environment
    """
    from agentrl.doors.door import find_door
    from agentrl.doors.install import install as install_door

    door = find_door(name)
    if not door.requirements:
        echo(f"{name} needs no package: agentrl talks to a server of this project")
        return
    echo(f"installing {' '.join([*door.requirements, *(packages or ())])}: a few minutes", err=True)
    echo(f"{name} {install_door(door, packages or (), python)}")


@app.command()
def use(
    name: Name,
    folder: Path,
) -> None:
    """Let a door use a virtual environment of your own.

    Args:
        folder: A virtual environment that has the package.

    Examples:
        agentrl doors use verifiers ~/verifiers/.venv
    """
    from agentrl.doors.door import find_door
    from agentrl.doors.install import use as use_folder

    echo(f"{name} {use_folder(find_door(name), folder)}")
