"""`agentrl check`: check a run without training."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.options import (
    ConfigFile,
    Dataset,
    Deterministic,
    Files,
    Model,
    Output,
    Overrides,
    ValDataset,
    read_config,
    with_model_folder,
    with_teacher_folders,
)
from agentrl.plural import plural
from agentrl.terminal import echo

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from agentrl.chat import ChatTemplate, ForeignParser
    from agentrl.config import Config
    from agentrl.config.sections import TrainerConfig
    from agentrl.learner.memory import Gpu, MemoryEstimate, ModelShape
    from agentrl.preflight import Plan
    from agentrl.tools import Toolbox
    from agentrl.trajectory import ToolCall


MAX_MEASURED = 3 * 10**8
"""The parameters of the largest model whose speed on a CPU is measured. This takes seconds."""


def check(
    overrides: Overrides = None,
    dataset: Dataset = None,
    val_dataset: ValDataset = None,
    model: Model = None,
    output: Output = None,
    file: Files = None,
    config: ConfigFile = None,
    deterministic: Deterministic = False,
    gpu_memory: Annotated[float | None, typer.Option(min=1, max=10**6)] = None,
) -> None:
    """Check config, rows, tools, rewards and the chat template, and describe the run.

    Checks that the run can start in its folder, and verifies the checkpoint from which it would
    continue (it reads the whole checkpoint). Asks the servers of rewards and interactions whether
    they answer, estimates the memory of a GPU or of a run on the CPU, and lists what was not
    checked. Loads the weights of a small model on the CPU, to measure how long a step takes; loads
    no others. Writes nothing.

    Args:
        gpu_memory: Size the run for GPUs of so many GiB, also if none is here.

    Examples:
        agentrl check --dataset rows.jsonl --model tiny -f my_tools.py

        agentrl check -c run.yaml --gpu-memory 24
    """
    settings = read_config(
        config,
        overrides,
        dataset=dataset,
        val_dataset=val_dataset,
        model=model,
        output=output,
        file=file,
        deterministic=deterministic,
    )
    _check_run(settings, gpu_memory)


def _check_run(settings: Config, gpu_memory: float | None) -> None:
    """Check a run and print a description of it.

    Args:
        settings: the config of the run.
        gpu_memory: the memory of a GPU in GiB; None: the memory of this machine's first GPU.
    """
    from agentrl.agent_loops.attempt import load_template
    from agentrl.preflight import (
        check_model_fits,
        check_open_files,
        check_policy_learns,
        check_tokenizers,
        describe_history,
        describe_run,
        make_plan,
        render_first_prompts,
    )
    from agentrl.tools import open_toolbox

    plan = make_plan(settings)
    check_policy_learns(plan)
    check_open_files(plan)
    settings = with_teacher_folders(with_model_folder(settings))
    folders = plan.config.with_values("teacher", model=settings.teacher.model)
    plan = replace(plan, config=folders.with_values("model", path=settings.model.path))
    start = _describe_start(settings, plan)
    template = load_template(settings)
    check_tokenizers(settings, template.tokenizer)
    # This import takes seconds, so it comes after the checks.
    from agentrl.engine.local.decoder import check_config
    from agentrl.engine.local.load import load_model_config, max_row_length
    from agentrl.engine.local.routers import choices_of_a_token
    from agentrl.learner.modes import check_context, describe_mode, find_mode
    from agentrl.learner.policy import describe_targets

    model = load_model_config(settings.model.path)
    max_length = max_row_length(model)
    check_model_fits(plan, template, max_length)
    if settings.rollout.name == "local":
        check_config(model)
    learning = []
    if plan.train:
        if settings.rollout.router_replay:
            choices_of_a_token(model)
        mode, reason = find_mode(model)
        check_context(model, mode, settings.trainer.context_parallel_size)
        learning.append(describe_mode(mode, reason, settings.rollout.n))
    if plan.train and settings.model.lora_rank:
        learning.append(describe_targets(settings.model))
    _print_tool_format(settings.rollout.tool_format, template, settings.rollout.python)
    with open_toolbox(settings.tools, settings.all_files) as toolbox:
        _check_tools(plan, toolbox)
        echo(describe_run(plan))
        echo(_describe_rewards(plan))
        echo(describe_history(plan, template))
        echo(render_first_prompts(plan, template))
        echo(f"tools: {toolbox.where}")
    for line in filter(None, learning):
        echo(line)
    unchecked = _ask_servers(plan)
    unknown, problem = _check_machine(plan, model, template, max_length, gpu_memory)
    unchecked += [*unknown, *_list_unchecked(plan)]
    changed = [f"  {line}" for line in settings.diff()]
    echo("\n".join(["config keys that differ from the defaults:", *changed, *start]))
    print_notes(plan)
    verdict = "all checks passed"
    if problem:
        verdict = f"no errors, but the run may end for lack of memory: {problem} (see the note)"
    echo(verdict)
    if unchecked:
        echo("\n".join(["Not checked here:", *(f"  {line}" for line in unchecked)]))


def _describe_start(settings: Config, plan: Plan) -> list[str]:
    """Return lines about the state that the run starts from.

    Raises:
        ConfigError: the run cannot start from the checkpoint that `trainer.resume` names.
    """
    from agentrl.errors import ConfigError
    from agentrl.trainer.resume import find_start

    folder = settings.trainer.output
    try:
        start = find_start(settings, plan.fingerprint, plan.total_steps)
    except ConfigError as e:
        if settings.trainer.resume != "auto":
            raise
        return [f"{folder}: `agentrl train` refuses to resume the run in this folder: {e}"]
    return start.describe() or [f"{folder}: the run starts from the base model"]


def _ask_servers(plan: Plan) -> list[str]:
    """Print what the servers of rewards, interactions and engines answer; return the unusable."""
    from agentrl.preflight import ask_servers

    unusable = []
    for server, text, is_usable in ask_servers(plan):
        line = f"{server.key}: {server.url} {text}"
        echo(line if is_usable else f"note: {line}", err=not is_usable)
        if not is_usable:
            unusable.append(f"replies of {server.url} ({server.key})")
    return unusable


def _check_machine(
    plan: Plan,
    model: PretrainedConfig,
    template: ChatTemplate,
    max_length: int,
    gpu_memory: float | None,
) -> tuple[list[str], str]:
    """Print an estimate of the memory of a GPU or of RAM, and of the time of a run on the CPU.

    Returns:
        What was not checked; and what does not fit into the memory, or "".
    """
    from agentrl.errors import ConfigError
    from agentrl.learner import memory
    from agentrl.preflight import longest_prompt, longest_response

    config, t, gpu = plan.config, plan.config.trainer, memory.find_gpu()
    weights = f"weights of {config.model.path}: only its config and tokenizer were loaded"
    has_cpu = t.device == "cpu" or (t.device == "auto" and gpu is None and not t.spread)
    on_cpu = has_cpu and not gpu_memory
    if not plan.train or t.val_only or (on_cpu and t.spread):
        return [weights], ""
    unchecked = _list_missing_gpus(t, gpu) if gpu_memory or t.device != "cpu" else []
    if gpu_memory:
        gpu = memory.Gpu("--gpu-memory", int(gpu_memory * memory.GIB), 0)
    try:
        shape = memory.read_shape(model)
        memory.teacher_parameters(config)
    except ConfigError as e:
        return [*unchecked, f"memory of a {'run' if on_cpu else 'GPU'}: {e}", weights], ""
    prompt, images = longest_prompt(plan, template)
    response = min(longest_response(plan), max_length - prompt)
    if not on_cpu:
        problem = _check_gpu(config, shape, gpu, prompt + response, images)
    else:
        problem = _check_ram(plan, shape, prompt, response, images)
        if not problem and not images and _is_measured(config, shape):
            _measure_time(plan, template, prompt, response)
            return unchecked, ""
    return [*unchecked, weights], problem


def _list_missing_gpus(trainer: TrainerConfig, gpu: Gpu | None) -> list[str]:
    """Return a line if this machine lacks GPUs of the run."""
    if gpu is None:
        fallback = "; trainer.device=auto would use the CPU here" * (trainer.device == "auto")
        return [f"GPUs: torch finds none on this machine{fallback}"]
    needed = trainer.n_gpus_per_node
    if trainer.ray_address or gpu.count >= needed:
        return []
    return [f"{needed} GPUs (trainer.n_gpus_per_node): {gpu.count} here"]


def _measure_time(plan: Plan, template: ChatTemplate, prompt: int, response: int) -> None:
    """Measure a few rows on this CPU, and print how long a step and the run take.

    Args:
        plan: the run's plan.
        template: renders the prompts.
        prompt: the tokens of the longest prompt.
        response: the tokens of the longest response.
    """
    from transformers.utils import logging

    from agentrl.engine.local import LocalEngine
    from agentrl.errors import EngineError
    from agentrl.preflight import encode_prompts
    from agentrl.trainer import speed

    config, steps = plan.config, plan.total_steps
    logging.disable_progress_bar()
    samples = islice(plan.train, min(config.data.batch_size, speed.LEARNED_ROWS))
    prompts = [*encode_prompts(samples, template)]
    with closing(LocalEngine.load(config.model.path, template.tokenizer, device="cpu")) as engine:
        try:
            sampling = asyncio.run(speed.measure_sampling(engine, prompts))
        except EngineError as e:  # A slow or busy machine is no mistake of the run.
            echo(f"time on this CPU: not measured ({e})")
            return
    del engine  # The learner needs the memory.
    learning = speed.measure_learning(config, prompts)
    minutes = speed.step_seconds(config, sampling, learning, prompt, response) / 60
    echo(
        f"time on this CPU, from a few measured rows: the engine samples"
        f" {sampling.tokens_per_s:.0f} tokens/s, the learner runs {learning.tokens_per_s:.0f}"
        f" tokens/s. If all responses have {response} tokens, a step takes {minutes:.2g} minutes"
        f" and the run of {plural(steps, 'step')} {steps * minutes:.2g} minutes, without"
        " validations, tools and rewards"
    )


def _is_measured(config: Config, shape: ModelShape) -> bool:
    """Return whether the speed of a model on this CPU is measured.

    It is not for servers, for a large model, which would take more than seconds, and for one whose
    weights are not here: nothing is downloaded.
    """
    from huggingface_hub import try_to_load_from_cache
    from transformers.utils import SAFE_WEIGHTS_NAME

    from agentrl.engine.local.load import base_and_adapters

    if config.rollout.name != "local" or shape.parameters > MAX_MEASURED:
        return False
    base = config.model.path
    if Path(base).is_dir():
        base, _ = base_and_adapters(base)
    if Path(base).is_dir():
        return any(Path(base).glob("*.safetensors"))
    return isinstance(try_to_load_from_cache(base, SAFE_WEIGHTS_NAME), str)


def _check_ram(plan: Plan, shape: ModelShape, prompt: int, response: int, images: int) -> str:
    """Print an estimate of the RAM of a run on the CPU; return what does not fit, or ""."""
    from agentrl.learner import memory
    from agentrl.process_memory import find_process_bytes

    config = plan.config
    if config.trainer.device == "auto":
        echo("device: the CPU, as torch finds no GPU here (--gpu-memory 24 sizes a GPU of 24 GiB)")
    estimate = partial(
        memory.estimate_cpu_memory,
        shape,
        prompt_tokens=prompt,
        response_tokens=response,
        val_rollouts=len(plan.val) * config.val.n,
        process_bytes=find_process_bytes(),
        image_tokens=images,
    )
    ram, of_run = memory.find_ram(), estimate(config)
    echo(f"RAM of the run, estimated: {of_run.describe(ram)}")
    settings = memory.smaller_settings(config, on_cpu=True)
    return _compare(of_run, estimate, settings, ram, "this machine")


def _check_gpu(
    config: Config, shape: ModelShape, gpu: Gpu | None, row_tokens: int, images: int
) -> str:
    """Print an estimate of the memory of a GPU; return what does not fit, or ""."""
    from agentrl.learner import memory

    total = gpu.total_bytes if gpu else memory.ASSUMED_GPU_BYTES
    estimate = partial(
        memory.estimate_memory,
        shape,
        row_tokens=row_tokens,
        gpu_bytes=total,
        gpus=gpu.count if gpu else 0,
        image_tokens=images,
    )
    of_run, ranks = estimate(config), config.trainer.ranks
    subject = f"each of {ranks} ranks" if ranks > 1 else "the learner"
    shown = of_run.describe(total if gpu else None)
    device = gpu.name if gpu else "no GPU is here; one of 80 GiB is assumed"
    echo(f"GPU memory of {subject}, estimated: {shown} ({device})")
    echo("  in use; PyTorch's allocator reserves 8 to 85 % more than it uses (see nvidia-smi)")
    if not gpu:
        return ""
    return _compare(of_run, estimate, memory.smaller_settings(config), total, "the GPU")


def _compare(
    of_run: MemoryEstimate,
    estimate: Callable[[Config], MemoryEstimate],
    settings: Iterator[tuple[str, Config]],
    total: int,
    device: str,
) -> str:
    """Print notes if a run does not fit into a device. Return the problem, or "".

    Args:
        of_run: the memory that the run needs.
        estimate: returns the memory that a run with another config needs.
        settings: settings that need less memory, as of `smaller_settings`.
        total: the memory of the device, in bytes.
        device: its name in the note.
    """
    from agentrl.learner.memory import SAFE_SHARE, gib

    limit, advice = SAFE_SHARE * total, []
    if of_run.small_share:
        echo(f"note: {of_run.small_share}", err=True)
    if of_run.total <= limit:
        return "a server's share of the GPU is too small" if of_run.small_share else ""
    gpus = 1
    for keys, other in settings:
        smaller, gpus = estimate(other), other.trainer.n_gpus_per_node
        if smaller.total > limit or (advice and not other.model.lora_rank):
            continue
        text = f"{keys} needs {gib(smaller.total)}"
        if smaller.offloaded:
            text += f" and {gib(smaller.offloaded)} of RAM per rank"
        if smaller.small_share and not of_run.small_share:  # The note above names it.
            text += f". Then {smaller.small_share}"
        advice.append(text)
        # Offloading is slow, and more GPUs may not be there: an adapter may need neither.
        if other.model.lora_rank or not (smaller.offloaded or "n_gpus" in keys):
            break
    more = f" and {gpus} GPUs" if gpus > 1 else ""
    no_advice = f", also with all settings that save memory{more}. Use a smaller model"
    is_over = "exceeds the memory of" if of_run.total > total else "is at the limit of"
    problem = f"the estimate {is_over} {device}"
    echo(f"note: {problem}{': ' + '; '.join(advice) if advice else no_advice}", err=True)
    return problem


def _list_unchecked(plan: Plan) -> list[str]:
    """Return what `check` never does: run user code, start servers or a cluster."""
    from agentrl import registry
    from agentrl.engine.remote.launch import find_package
    from agentrl.errors import ConfigError
    from agentrl.preflight.plan import reports_outcome
    from agentrl.registry import is_shipped

    config = plan.config
    r, t = config.rollout, config.trainer
    samples = [kind.sample for kind in plan.kinds]
    used = {
        "tool": (registry.tools, {n for s in samples for n in s.tools if not s.environment}),
        "environment": (registry.tools, {s.environment for s in samples}),
        "interaction": (registry.interactions, {s.interaction for s in samples}),
        "agent loop": (registry.agent_loops, {s.agent_name for s in samples}),
    }
    code = [
        f"{kind} {name}"
        for kind, (entries, names) in used.items()
        for name in sorted(names & {*entries.user_names()})
        if not _is_on_shelf(entries.get(name))
    ]
    sources = {s.data_source for s in samples if not reports_outcome(s, config)}
    graders = [grader for source in sources for grader in plan.scorer.graders(source)]
    code += sorted({f"reward {g.name}" for g in graders if not is_shipped(g.function)})
    unchecked = []
    if code:
        words = "`agentrl play` with the same options calls them in an episode"
        unchecked.append(f"what your code does when it is called ({', '.join(code)}): {words}")
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
    from agentrl.registry import shelf_folder

    module = sys.modules.get(getattr(entry, "target", entry).__module__)
    return Path(getattr(module, "__file__", None) or "?").parent == shelf_folder()


def print_notes(plan: Plan, warn: Callable[[str], object] = partial(echo, err=True)) -> None:
    """Pass notes on settings that are valid but probably not intended to `warn`."""
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
                echo(
                    f"note: rollout.tool_format={name} cannot parse a call as the chat template"
                    " writes it: calls of the model may be lost",
                    err=True,
                )
    echo(f"tool calls are parsed as: {label}")


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
    """Return what gives the outcome of each kind of rows, with the number of rows."""
    from agentrl.preflight.plan import reports_outcome

    sources: Counter[tuple[str, str]] = Counter()
    for kind in plan.kinds:
        source, rows = kind.sample.data_source, ""
        if not reports_outcome(kind.sample, plan.config):
            reward = plan.scorer.describe(source)
            rows = f" of data_source {source}" if source else " without data_source"
        elif kind.sample.environment:
            reward = f"reward of the environment {kind.sample.environment}"
        else:
            reward = f"reward of the agent (agent.reward={plan.config.agent.reward})"
        sources[reward, rows] += len(kind.rows)
    return "\n".join(
        f"{reward}: {plural(count, 'row')}{rows}"
        for (reward, rows), count in sorted(sources.items())
    )
