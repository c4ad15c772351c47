"""`agentrl check`: check a run without training."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from agentrl.cli.options import (
    ConfigFile,
    Dataset,
    Deterministic,
    Files,
    Model,
    Overrides,
    ValDataset,
    read_config,
    with_model_folder,
)
from agentrl.plural import plural

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from agentrl.chat import ChatTemplate, ForeignParser
    from agentrl.config import Config
    from agentrl.plan import Plan
    from agentrl.tools import Toolbox
    from agentrl.trajectory import ToolCall


def check(
    overrides: Overrides = None,
    dataset: Dataset = None,
    val_dataset: ValDataset = None,
    model: Model = None,
    file: Files = None,
    config: ConfigFile = None,
    deterministic: Deterministic = False,
) -> None:
    """Check config, rows, tools, rewards and the chat template, and describe the run.

    Loads no weights and trains nothing. Asks the servers of rewards and interactions whether they
    answer, estimates the memory of a GPU, and lists what was not checked. `train --dry-run` does
    the same, and also checks the run's folder and the checkpoint of `trainer.resume`.

    Examples:
        agentrl check --dataset rows.jsonl --model tiny -f my_tools.py
    """
    check_run(
        read_config(
            config,
            overrides,
            dataset=dataset,
            val_dataset=val_dataset,
            model=model,
            file=file,
            deterministic=deterministic,
        )
    )


def check_run(settings: Config, *, checks_start: bool = False) -> None:
    """Check a run and print a description of it; see `check`.

    Args:
        settings: the config of the run.
        checks_start: also check that the run can start in `trainer.output`, and from the checkpoint
            of `trainer.resume`. This reads every byte of the checkpoint, and writes nothing.
    """
    from agentrl.agent_loops.attempt import load_template
    from agentrl.capacity import check_open_files
    from agentrl.plan import (
        check_model_fits,
        check_policy_learns,
        describe_history,
        describe_run,
        longest_prompt,
        make_plan,
        render_first_prompts,
    )
    from agentrl.tools import open_toolbox

    plan = make_plan(settings)
    check_policy_learns(plan)
    check_open_files(plan)
    settings = with_model_folder(settings)
    start = _describe_start(settings, plan) if checks_start else []
    template = load_template(settings)
    # This import takes seconds, so it comes after the checks.
    from agentrl.engine.local.decoder import check_config
    from agentrl.engine.local.load import load_model_config
    from agentrl.trainer.modes import describe_mode, find_mode
    from agentrl.trainer.policy import describe_targets

    model = load_model_config(settings.model.path)
    max_length = model.get_text_config().max_position_embeddings
    check_model_fits(plan, template, max_length)
    if settings.rollout.name == "local":
        check_config(model)
    learning = [describe_mode(*find_mode(model), settings.rollout.n)] if plan.train else []
    if plan.train and settings.model.lora_rank:
        learning.append(describe_targets(settings.model))
    _print_tool_format(settings.rollout.tool_format, template, settings.rollout.python)
    with open_toolbox(settings.tools, settings.files) as toolbox:
        _check_tools(plan, toolbox)
        typer.echo(describe_run(plan))
        typer.echo(_describe_rewards(plan))
        typer.echo(describe_history(plan, template))
        typer.echo(render_first_prompts(plan, template))
        typer.echo(f"tools: {toolbox.where}")
    for line in filter(None, learning):
        typer.echo(line)
    row_tokens = longest_prompt(plan, template) + settings.rollout.max_trajectory_tokens
    row_tokens = min(row_tokens, max_length)
    unchecked = [
        *_ask_servers(plan),
        *_check_gpus(plan, model, row_tokens),
        *_list_unchecked(plan),
    ]
    typer.echo("config keys that differ from the defaults:")
    for line in settings.diff():
        typer.echo(f"  {line}")
    for line in start:
        typer.echo(line)
    print_notes(plan)
    typer.echo("all checks passed")
    typer.echo("Not checked here:")
    for line in unchecked:
        typer.echo(f"  {line}")


def _describe_start(settings: Config, plan: Plan) -> list[str]:
    """Return lines about the state that the run starts from.

    Raises:
        ConfigError: the run cannot start from that state.
    """
    from agentrl.trainer.resume import find_start

    start = find_start(settings, plan.fingerprint, plan.total_steps)
    return start.describe() or [f"{settings.trainer.output}: the run starts from the base model"]


def _ask_servers(plan: Plan) -> list[str]:
    """Print what the servers of rewards, interactions and engines answer; return the unusable."""
    from agentrl.servers import ask_servers

    unusable = []
    for server, text, is_usable in ask_servers(plan):
        line = f"{server.key}: {server.url} {text}"
        typer.echo(line if is_usable else f"note: {line}", err=not is_usable)
        if not is_usable:
            unusable.append(f"replies of {server.url} ({server.key})")
    return unusable


def _check_gpus(plan: Plan, model: PretrainedConfig, row_tokens: int) -> list[str]:
    """Print an estimate of the memory of a GPU; return what is not known about GPUs."""
    t, unknown = plan.config.trainer, []
    if t.device == "cpu" or not plan.train or t.val_only:
        return []
    from agentrl.errors import ConfigError
    from agentrl.trainer import memory

    gpu = memory.find_gpu()
    if gpu is None:
        fallback = "" if t.device == "cuda" else "; trainer.device=auto would use the CPU here"
        unknown.append(f"GPUs: torch finds none on this machine{fallback}")
    elif not t.ray_address and gpu.count < t.n_gpus_per_node:
        unknown.append(f"{t.n_gpus_per_node} GPUs (trainer.n_gpus_per_node): {gpu.count} here")
    ranks = t.nnodes * t.n_gpus_per_node
    total = gpu.total_bytes if gpu else memory.ASSUMED_GPU_BYTES

    def estimate(config: Config) -> memory.MemoryEstimate:
        return memory.estimate_memory(
            model,
            config,
            ranks,
            row_tokens=row_tokens,
            gpu_bytes=total,
            gpus=gpu.count if gpu else 0,
        )

    try:
        of_run = estimate(plan.config)
    except ConfigError as e:
        return [*unknown, f"memory of a GPU: {e}"]
    subject = f"each of {ranks} ranks" if ranks > 1 else "the learner"
    shown = of_run.describe(total if gpu else None)
    device = gpu.name if gpu else "no GPU is here; one of 80 GiB is assumed"
    typer.echo(f"GPU memory of {subject}, estimated: {shown} ({device})")
    limit = memory.SAFE_SHARE * total
    if gpu and of_run.total > limit:
        advice = next(
            (
                f": {keys} needs {memory.gib(smaller)}"
                for keys, config in memory.smaller_settings(plan.config)
                if (smaller := estimate(config).total) <= limit
            ),
            ". Use more GPUs, a smaller model or a lower rollout.gpu_memory_utilization",
        )
        is_over = "exceeds the memory of" if of_run.total > total else "is at the limit of"
        typer.echo(f"note: the estimate {is_over} the GPU{advice}", err=True)
    return unknown


def _list_unchecked(plan: Plan) -> list[str]:
    """Return what `check` never does: run user code, load weights, start servers or a cluster."""
    from agentrl import registry
    from agentrl.engine.remote.launch import find_package
    from agentrl.errors import ConfigError
    from agentrl.registry import is_shipped

    config = plan.config
    r, t = config.rollout, config.trainer
    samples = [kind.sample for kind in plan.kinds]
    used = {
        "tool": (registry.tools, {name for s in samples for name in s.tools}),
        "interaction": (registry.interactions, {s.interaction for s in samples}),
        "agent loop": (registry.agent_loops, {s.agent_name for s in samples}),
    }
    code = [
        f"{kind} {name}"
        for kind, (entries, names) in used.items()
        for name in sorted(names & {*entries.user_names()})
        if not _is_on_shelf(entries.get(name))
    ]
    sources = {s.data_source for s in samples}
    graders = [grader for source in sources for grader in plan.scorer.graders(source)]
    code += sorted({f"reward {g.name}" for g in graders if not is_shipped(g.function)})
    unchecked = []
    if code:
        words = "`agentrl play` with the same options calls them in an episode"
        unchecked.append(f"what your code does when it is called ({', '.join(code)}): {words}")
    unchecked.append(f"weights of {config.model.path}: only its config and tokenizer were loaded")
    if r.name != "local" and not r.urls:
        try:
            _, folder = find_package(r.name, r.python)
            unchecked.append(f"{r.name}: it is installed ({folder}), but was not started")
        except ConfigError as e:
            unchecked.append(f"{r.name}: it was not started. {e}")
    if t.ray_address or t.nnodes > 1:
        unchecked.append(f"the Ray cluster (trainer.ray_address={t.ray_address}), its machines")
    if t.logger:
        unchecked.append(f"trackers: {', '.join(t.logger)}")
    return unchecked


def _is_on_shelf(entry: Any) -> bool:
    """Return whether an entry is a shipped tool, `shelf:NAME`."""
    from pathlib import Path

    from agentrl.registry import shelf_folder

    module = sys.modules.get(getattr(entry, "target", entry).__module__)
    return Path(getattr(module, "__file__", None) or "?").parent == shelf_folder()


def print_notes(plan: Plan, warn: Callable[[str], object] = partial(typer.echo, err=True)) -> None:
    """Pass notes on settings that are valid but probably not intended to `warn`."""
    from agentrl.capacity import shared_connections
    from agentrl.config import file_names, without_effect
    from agentrl.config.checks import doubtful

    notes = [*without_effect(plan.config), *doubtful(plan.config)]
    rows, size = plan.epoch_rows, plan.config.data.batch_size
    if 0 < rows < size:
        notes.append(
            f"data.batch_size={size} is more than the {plural(rows, 'row')} of"
            f" {file_names(plan.config.data.train)}:"
            " a step plays some of them more than once"
        )
    if shared := shared_connections(plan):
        notes.append(shared)
    for note in notes:
        warn(f"note: {note}")


def _print_tool_format(name: str, template: ChatTemplate, python: str) -> None:
    """Print how tool calls are parsed; `python` is `rollout.python`.

    Raises:
        UserError: the parser is unknown or not installed.
    """
    from agentrl.chat import ForeignParser, open_reader
    from agentrl.chat.formats.detect import detect_format, is_rendered_call, render_probe_calls

    if name == "auto":
        detected = detect_format(template)
        label = (
            f"{detected} (auto)" if detected else "no supported format (auto); no row shows tools"
        )
    else:
        label = f"{name} (rollout.tool_format)"
        reader = open_reader(name, template, python)
        if isinstance(reader, ForeignParser):
            try:
                calls = asyncio.run(_parse_all(reader, render_probe_calls(template)))
            finally:
                reader.close()
            if not any(map(is_rendered_call, calls)):
                typer.echo(
                    f"note: rollout.tool_format={name} cannot parse a call as the chat template"
                    " writes it: calls of the model may be lost",
                    err=True,
                )
    typer.echo(f"tool calls are parsed as: {label}")


async def _parse_all(reader: ForeignParser, turns: Sequence[str]) -> list[list[ToolCall]]:
    from agentrl.chat.turn_delta import PROBE_TOOL

    return [await reader(text, [PROBE_TOOL]) for text in turns]


def _check_tools(plan: Plan, toolbox: Toolbox) -> None:
    """Refuse a toolbox that lacks tools of the rows: a tool server may have loaded other files."""
    from agentrl.errors import ConfigError, RegistryError

    for names in sorted({kind.sample.tools for kind in plan.kinds}):
        try:
            toolbox.schemas(names)
        except RegistryError as e:
            raise ConfigError(f"the tools {toolbox.where}: {e}") from None


def _describe_rewards(plan: Plan) -> str:
    """Return the reward function of each data source, with the number of rows."""
    sources: Counter[str] = Counter()
    for kind in plan.kinds:
        sources[kind.sample.data_source] += len(kind.rows)
    return "\n".join(
        f"{plan.scorer.describe(source)}: {plural(count, 'row')}"
        f" {f'of data_source {source}' if source else 'without data_source'}"
        for source, count in sorted(sources.items())
    )
