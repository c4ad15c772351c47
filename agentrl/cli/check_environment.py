"""`agentrl check environment`: tell a sound environment from a broken one, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import ConfigFile
from agentrl.plural import plural
from agentrl.terminal import echo


def check_environment(
    words: Annotated[list[str] | None, typer.Argument(metavar="[FILE] [KEY=VALUE]...")] = None,
    file: Annotated[list[str] | None, typer.Option("--file", "-f")] = None,
    config: ConfigFile = None,
    n: Annotated[int, typer.Option("-n", min=1)] = 3,
) -> None:
    """Play scripted policies on rows, and report whether the environment is sound.

    Needs no model and no GPU. A gold policy must earn the maximum. Policies that say nothing,
    repeat the prompt, deny the answer or address the judge must earn nothing, and random calls no
    more than chance. A row must start and score the same each time, also among concurrent episodes.
    Nothing may show the answer or the seed, hang, raise or stay open. The exit code is 1 if a check
    failed. "not checked" says what is missing.

    Args:
        words: Rows (.jsonl, .parquet, or those of a door), or a Python file with an environment
            whose constructor needs no arguments. Default: the rows of --config.
        file: A Python file of the rows' environment, or shelf:NAME.
        n: How many rows to play.

    Examples:
        agentrl check environment train.jsonl -f env.py

        agentrl check environment env.py

        agentrl check environment -c run.yaml -n 5
    """
    import asyncio

    from agentrl import registry
    from agentrl.config import load_config
    from agentrl.errors import UserError
    from agentrl.file_loaders import door_of
    from agentrl.preflight.environment import EnvironmentCheck, rows_of_code
    from agentrl.preflight.plan import load_files, make_plan
    from agentrl.rewards import Scorer
    from agentrl.testing import byte_tokenizer

    paths = [word for word in words or [] if "=" not in word or door_of(word)]
    overrides = [word for word in words or [] if word not in paths]
    if len(paths) > 1:
        raise UserError(f"check environment takes one file, not {', '.join(paths)}")
    target = paths[0] if paths else ""
    is_code = Path(target).suffix == ".py" and not door_of(target)
    files = [*(file or []), *([target] if is_code else [])]
    keys = {"files": files} if files else {}
    if target and not is_code:
        keys |= {"data.train": target, "data.val": ""}
    settings = load_config(str(config) if config else None, overrides, keys)
    if is_code:
        if problems := load_files(settings):
            raise UserError("\n".join(problems))
        samples, scorer = rows_of_code(), Scorer(settings.reward)
    else:
        plan = make_plan(settings)
        samples, scorer = [*plan.train[:n]] or [*plan.val[:n]], plan.scorer
    for sample in samples:
        if not registry.agent_loops.get(sample.agent_name).awaited:
            check = "`agentrl check agent`"
            if sample.agent_name != "external":
                check = "`agentrl check` and `agentrl play`"
            raise UserError(
                f"an agent plays the rows with agent_name {sample.agent_name}, so no script can."
                f" Use {check}"
            )
    checks = asyncio.run(EnvironmentCheck(settings, scorer, samples, byte_tokenizer()).run())
    for result in checks:
        echo(f"{result.status:12} {result.name}{': ' if result.detail else ''}{result.detail}")
        for played in result.evidence:
            echo("\n".join(f"             {line}" for line in played.lines()))
    failed = [result for result in checks if result.status == "failed"]
    unchecked = sum(result.status == "not checked" for result in checks)
    echo(
        f"{len(failed)} of {plural(len(checks), 'check')} failed, {unchecked} not checked"
        f" ({plural(len(samples), 'row')})"
    )
    raise typer.Exit(1 if failed else 0)
