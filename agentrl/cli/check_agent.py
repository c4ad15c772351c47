"""`agentrl check agent`: play your own agent against a scripted policy."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from agentrl.cli.options import ConfigFile, PlayedDataset
from agentrl.terminal import echo

QUESTION = "How much is 3*4?"
OVERRIDE = re.compile(r"\w+(\.\w+)+=")
"""The beginning of a config key with its value."""


def check_agent(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]... [-- COMMAND...]")
    ] = None,
    python: str = "",
    dataset: PlayedDataset = None,
    model: str | None = None,
    config: ConfigFile = None,
    n: Annotated[int, typer.Option("-n", min=1)] = 3,
    rollouts: Annotated[int, typer.Option(min=1)] = 2,
    reward: str | None = None,
    env: list[str] | None = None,
    timeout: float | None = None,
) -> None:
    """Play your agent against a scripted policy, and report what would train.

    Needs no model and no GPU. The policy calls each tool that the agent offers once, with one
    malformed call among them, and then answers. The report says which requests continue a
    conversation cleanly, and which begin a new row of tokens and why; what the run decides instead
    of the agent; and which requests and episodes are lost. Exit code 0 if everything trains
    cleanly, 1 if there are problems.

    Args:
        command: Config keys, e.g. rollout.timeout_s=60; after `--` the command of the agent.
        python: Instead of a command: path.py:function (agent.python).
        model: A model folder or hub name, for its chat template. Default: a ChatML template.
        n: How many rows to play.
        rollouts: Episodes per row.
        reward: grader, post or exit (agent.reward).
        env: A variable of this shell that the agent gets. It may be repeated.
        timeout: The time of an episode, in seconds. Default: 30, or that of --config.

    Examples:
        agentrl check agent -- python my_agent.py

        agentrl check agent --dataset rows.jsonl -n 3 --model Qwen/Qwen3-8B -- python my_agent.py

        agentrl check agent rollout.max_turns=4 -- python my_agent.py
    """
    import asyncio
    import shlex
    from dataclasses import replace
    from itertools import islice

    from agentrl.agent_loops.attempt import load_template, make_template
    from agentrl.cli.options import resolve_model
    from agentrl.config import load_config
    from agentrl.data import load_samples
    from agentrl.gateway.agent import check_agent as check_settings
    from agentrl.gateway.check import check_agent_against_script
    from agentrl.testing import byte_tokenizer
    from agentrl.trajectory import Message, Sample

    words = command or []
    # click removes the `--`. No command begins with a word such as `rollout.n=2`.
    keys_end = next((i for i, word in enumerate(words) if not OVERRIDE.match(word)), len(words))
    command, overrides = words[keys_end:], words[:keys_end]
    overrides += [f"agent.reward={reward}"] if reward else []
    has_limit = any(word.startswith("rollout.timeout_s=") for word in overrides)
    if timeout is not None or not (config or has_limit):
        overrides.append(f"rollout.timeout_s={30.0 if timeout is None else timeout}")
    keys = {
        "agent.command": shlex.join(command),
        "agent.python": python,
        "agent.env": env or [],
        "model.path": resolve_model(model) if model else "",
    }
    settings = load_config(
        str(config) if config else None, overrides, {k: v for k, v in keys.items() if v}
    )
    check_settings(settings.agent)
    if settings.model.path:
        template = load_template(settings)
    else:
        template = make_template(byte_tokenizer(), settings)
    if dataset:
        samples = [*islice((s for file in dataset for s in load_samples(file)), n)]
    else:
        samples = [Sample("question", (Message("user", QUESTION),))]
    samples = [replace(s, agent_name="external", tools=(), interaction="") for s in samples]
    report = asyncio.run(check_agent_against_script(settings, template, samples, rollouts))
    for line in report.lines():
        echo(line)
    raise typer.Exit(0 if report.is_clean else 1)
