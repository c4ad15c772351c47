"""`agentrl play`: play episodes and print them with the sampled tokens marked."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.options import (
    ConfigFile,
    Files,
    Model,
    Overrides,
    PlayedDataset,
    describe_sampling,
    read_config_to_play,
)
from agentrl.images import show_row
from agentrl.plural import plural
from agentrl.terminal import echo

if TYPE_CHECKING:
    from agentrl.chat import ChatTemplate
    from agentrl.trajectory import Scored


def play(
    overrides: Overrides = None,
    dataset: PlayedDataset = None,
    model: Model = None,
    file: Files = None,
    config: ConfigFile = None,
    n: Annotated[int, typer.Option("-n", min=1)] = 1,
    agent: str = "",
) -> None:
    """Play rows and print them as transcripts, with the sampled tokens marked.

    Args:
        n: How many rows to play.
        agent: Only rows of this agent loop.

    Examples:
        agentrl play --dataset datasets/arithmetic_val.parquet --model tiny -n 3 --agent react

        agentrl play -c runs/a/config.yaml --model runs/a/model -n 3
    """
    from agentrl.cli.session import open_session
    from agentrl.config import file_names
    from agentrl.engine.base import Sampling
    from agentrl.errors import DataError
    from agentrl.registry import agent_loops

    settings = read_config_to_play(config, overrides, dataset, model, file)
    with open_session(settings) as (plan, rollouts):
        wanted = agent_loops.canonical(agent)
        rows = list(islice((s for s in plan.train if not agent or s.agent_name == wanted), n))
        files = file_names(settings.data.train)
        if not rows:
            raise DataError(f"no row of {files} has the agent loop {agent!r}")
        echo(
            f"{files}: {len(rows)} of {plural(len(plan.train), 'row')}"
            f" ({describe_sampling(settings.rollout)})\n"
        )
        sampling = Sampling.of(settings.rollout)
        for group in rollouts.collect(rows, n=1, sampling=sampling, step=0, tag="play"):
            for scored in group.scored:
                echo(transcript(scored, rollouts.runtime.template))


def transcript(scored: Scored, template: ChatTemplate) -> str:
    """Return an episode as text; lines that the policy sampled start with `▌`."""
    t = scored.trajectory
    lines = [f"── row {t.sample.row} · {t.sample.agent_name} · {t.episode_id}"]
    for segment in t.segments:
        images = deque(segment.images)
        lines += _marked(show_row(segment.prompt_ids, images, template.decode), " ")
        start = 0
        mask = segment.response_mask
        for end in range(1, len(mask) + 1):
            if end == len(mask) or mask[end] != mask[start]:
                ids = segment.response_ids[start:end]
                # A placeholder that the policy sampled is no image.
                text = show_row(ids, deque() if mask[start] else images, template.decode)
                lines += _marked(text, "▌" if mask[start] else " ")
                start = end
    for i, turn in enumerate(t.turns):
        for call, result in zip(turn.tool_calls, turn.tool_results, strict=False):
            state = "ok" if result.ok else result.error
            lines.append(
                f"  turn {i}: {call.name or '?'} -> {state}, {result.seconds * 1e3:.1f} ms"
            )
    rewards = ", ".join(f"{k} {v:g}" for k, v in scored.rewards.items())
    lines.append(
        f"── {_describe_end(t.stop_reason)} · {plural(len(t.turns), 'turn')} ·"
        f" {plural(t.sampled_tokens, 'sampled token')} ·"
        f" reward {scored.reward:g} ({rewards}) · ground truth {t.sample.ground_truth!r}\n"
    )
    return "\n".join(lines)


def _describe_end(stop_reason: str) -> str:
    """Return `done`, or the key of the budget that ended the episode."""
    from agentrl.config.sections import BUDGETS

    key = BUDGETS.get(stop_reason)
    return f"stopped: {key}" if key else stop_reason


def _marked(text: str, mark: str) -> list[str]:
    return [f"{mark} {line}" for line in text.splitlines()]
