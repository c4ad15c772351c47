"""`agentrl init`: a starter project that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ROWS = {"train.jsonl": (11, 192), "val.jsonl": (12, 48)}
"""File -> seed and number of rows."""


def init(
    folder: Annotated[Path, typer.Argument(help="The folder to create.")] = Path("my_env"),
) -> None:
    """Create a commented starter project: an environment, rows, a run config and tests.

    Examples:
        agentrl init my_env && cd my_env && agentrl train -c run.yaml
    """
    from itertools import islice

    from agentrl.data import write_rows
    from agentrl.demo.arithmetic import TOOL, rows
    from agentrl.errors import UserError

    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: choose a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted((Path(__file__).parent / "starter").iterdir()):
        if file.is_file():
            (folder / file.name).write_text(file.read_text())
    for name, (seed, count) in ROWS.items():
        samples = (r.sample for r in rows(seed) if r.sample.agent_name == "tool_agent")
        write_rows(
            folder / name,
            [
                {
                    "prompt": [m.as_dict() for m in sample.prompt],
                    "agent_name": sample.agent_name,
                    "tools": [TOOL],
                    "ground_truth": sample.ground_truth,
                    **(_with_coach(sample.ground_truth) if i % 4 == 3 else {}),
                }
                for i, sample in enumerate(islice(samples, count))
            ],
        )
    typer.echo(f"created {folder}. Next:\n  cd {folder}\n  agentrl check -c run.yaml")
    typer.echo("  agentrl train -c run.yaml")


def _with_coach(ground_truth: str) -> dict[str, object]:
    return {"interaction": "coach", "interaction_kwargs": {"ground_truth": ground_truth}}
