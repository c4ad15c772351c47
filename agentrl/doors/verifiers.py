"""Environments of verifiers: `data.train='verifiers:my_env?n=500'`.

The package drives the episode, with the policy behind our gateway as its model, and its rubric
gives the outcome. So it is an agent loop (`verifiers`), not an `Environment`. Other options are
arguments of the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.agent_loops import Episode
from agentrl.doors.door import Door, Named, read_address
from agentrl.doors.episodes import package_loop, play_in_package
from agentrl.doors.program import call_once

NAME = "verifiers"

# An option may be the address of a judge, or the variable with its key.
_named = Named("environment")


async def verifiers(ep: Episode) -> None:
    """Let an environment of verifiers drive the episode."""
    task = ep.sample.extra.get(NAME) or {}
    _named.require(task.get("env"), settings=task.get("options"))
    await play_in_package(ep, NAME, "play", task)


def rows(address: str) -> list[Mapping[str, Any]]:
    """Return the rows of `verifiers:ENVIRONMENT?n=500&OPTION=VALUE`."""
    env, n, options = _read(address)
    made = call_once(NAME, "rows", env=env, n=n, options=options)
    return [
        {
            "prompt": row["prompt"],
            "data_source": f"{NAME}/{Path(env).stem}",
            "agent_name": NAME,
            "extra_info": {NAME: {"env": env, "options": options, "index": row["index"]}},
        }
        for row in made
    ]


def load(alias: str, address: str) -> None:
    """Register the loop, and allow rows to name this environment."""
    package_loop(alias)(verifiers)
    env, _, options = _read(address)
    _named.add(env, options)


def _read(address: str) -> tuple[str, int, dict[str, Any]]:
    env, options = read_address(address, {"n": 500})
    n = options.pop("n")
    return (str(Path(env).expanduser().resolve()) if env.endswith(".py") else env), n, options


DOOR = Door(
    NAME,
    "environments of the hub, and your own",
    load,
    rows,
    requirements=("verifiers>=0.3.1", "uv"),
)
