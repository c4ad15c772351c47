"""Describe a run for `agentrl check`: its rows, the size of a step, its first prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from agentrl.chat import ChatTemplate
from agentrl.config import AlgorithmConfig, Config
from agentrl.config.teacher import POLICY, TeacherConfig, is_url
from agentrl.data import (
    Rows,
    find_kinds,
    sample_rows,
)
from agentrl.gateway.agent import has_slots
from agentrl.plural import plural
from agentrl.preflight.plan import EXTERNAL, Plan, programs_of
from agentrl.preflight.prompts import opening_of, verify_rows
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Sample


def describe_history(plan: Plan, template: ChatTemplate) -> str:
    """Return a sentence: does the template keep earlier turns, and what happens to thinking?"""
    verdicts = [v for _, _, verdicts in verify_rows(plan, template) for v in verdicts if v.ok]
    if not verdicts:
        return "chat template: these rows have one turn only"
    kinds = [kind for v in verdicts for kind, status in v.kinds.items() if status == "unsupported"]
    exception = ""
    if kinds:
        exception = (
            f"; it cannot render turns of {', '.join(dict.fromkeys(kinds))}: rows keep them as they"
            " were sampled (`agentrl check template` shows why)"
        )
    if all(v.status == "append-only" for v in verdicts):
        return (
            "chat template: append-only on these rows: an episode is one row of tokens" + exception
        )
    meaning = {
        "keep": "it stays in the row of tokens, as it was sampled",
        "strip": "it is removed, as in the template, and a new row of tokens starts there",
    }
    choice = plan.config.rollout.history_thinking
    return (
        "chat template: drops the thinking of earlier turns;"
        f" rollout.history_thinking={choice}: {meaning[choice]}{exception}"
    )


def describe_run(plan: Plan) -> str:
    """Return lines about the rows by loop and tools, the sandbox, and the size of a step."""
    lines = []
    for path, samples in plan.splits:
        if not samples:
            continue
        lines.append(f"{path}: {plural(len(samples), 'row')}")
        if isinstance(samples, Rows):
            lines += _describe_files(samples)
        kinds: Counter[tuple[str, str]] = Counter()
        for kind in find_kinds(samples):
            s = kind.sample
            kinds[s.agent_name, _describe_world(s)] += len(kind.rows)
        for (agent, world), count in sorted(kinds.items()):
            lines.append(f"  {count:6d} x {agent}: {world}")
    config = plan.config
    interactions = {kind.sample.interaction for kind in plan.kinds}
    lines += [
        f"interaction.kwargs.{name}: no row has this interaction"
        for name in config.interaction.kwargs
        if name not in interactions
    ]
    if programs := programs_of(plan):
        backend = config.sandbox.backend
        isolation = (
            "NOT ISOLATED, with your rights" if backend == "unsafe-subprocess" else f"in {backend}"
        )
        lines.append(
            f"programs of {', '.join(programs)} run {isolation} (sandbox.backend={backend})"
        )
    if plan.train:
        size, mini = config.rollouts_of_step, config.rollouts_of_update
        updates = -(-size // mini) * config.algorithm.ppo_epochs
        ranks = config.trainer.ranks
        on_ranks = f" on {ranks} ranks" if ranks > 1 else ""
        lines.append(
            f"a step: {plural(config.data.batch_size, 'prompt')} x"
            f" {plural(config.rollout.n, 'rollout')} = {size} trajectories ->"
            f" {plural(updates, 'optimizer step')} of {mini}"
            f"{on_ranks} ({_describe_algorithm(config.algorithm)});"
            f" {plural(plan.total_steps, 'step')}"
        )
        lines += _describe_teacher(config.teacher)
        left_out = plan.rows_of_epochs - plan.total_steps * config.data.batch_size
        ends_early = config.data.drop_last and not config.trainer.total_steps and left_out > 0
        if ends_early and not config.data.curriculum:
            epochs = plural(config.trainer.total_epochs, "epoch")
            lines.append(f"data.drop_last=true leaves out {plural(left_out, 'row')} of {epochs}")
        lines += _describe_extra_rollouts(config)
    if any(kind.sample.agent_name == EXTERNAL for kind in plan.kinds):
        agent = config.stored_value("agent.command") or config.agent.python
        limit = f"at most {config.agent.slots}" if has_slots(config.agent) else "any number"
        lines.append(
            f"external: each episode is played by {agent} ({limit} at the same time); such a run"
            " cannot be repeated bit for bit"
        )
    return "\n".join(lines)


def _describe_world(sample: Sample) -> str:
    """Return what an episode of a row acts in: its environment, or its tools and interaction."""
    if sample.environment:
        return f"environment {sample.environment}"
    suffix = f", interaction {sample.interaction}" if sample.interaction else ""
    return f"tools {', '.join(sample.tools) or 'none'}{suffix}"


def _describe_files(rows: Rows) -> Iterator[str]:
    """Yield what else is known about the rows: their files, and which rows were checked."""
    if len(rows.files) > 1:
        for (file, indices), weight in zip(rows.files, rows.weights, strict=True):
            suffix = f", {weight:g} times per epoch" if weight != 1 else ""
            yield f"  {len(indices):6d} row{'s' * (len(indices) != 1)} of {file}{suffix}"
    checked = sample_rows(rows)
    if checked is not None:
        yield (
            f"  the structure of all rows was checked. Names, arguments, ground truths and leaks:"
            f" {len(checked):,} rows at equal distances, and the first of each kind"
        )


def _describe_algorithm(config: AlgorithmConfig) -> str:
    """Return the algorithm's name, and its parts that differ from the name's defaults."""
    defaults = AlgorithmConfig(name=config.name)
    parts = ("adv_estimator", "policy_loss", "loss_agg_mode")
    values = {part: getattr(config, part) for part in parts}
    changed = [f"{p}={value}" for p, value in values.items() if value != getattr(defaults, p)]
    return f"{config.name} with {', '.join(changed)}" if changed else config.name


def _describe_teacher(teacher: TeacherConfig) -> Iterator[str]:
    """Yield lines about the teacher: its models, who holds them, and what it reads."""
    model = teacher.model
    sources = {"": model} if isinstance(model, str) else model
    for source, name in sources.items():
        if not name:
            return
        kind = "the present policy" if name == POLICY else name
        kind += " (a server)" if is_url(name) else " (held by the learner)"
        rows = f" of rows of data_source {source}" if source else ""
        yield f"teacher{rows}: {kind}; weight {teacher.weight:g}, clip {teacher.clip:g} nats"
    if teacher.prompt:
        yield f"  it reads the last user message as {teacher.prompt!r}"


def _describe_extra_rollouts(config: Config) -> Iterator[str]:
    """Yield a line for each kind of rollouts that a step plays but does not train on."""
    a, d = config.algorithm, config.data
    if a.filter_groups:
        yield (
            "  groups without a learning signal are replaced by further prompts: at most"
            f" {a.max_gen_batches} x {plural(d.gen_batch_size or d.batch_size, 'prompt')} per step"
        )
    if a.adv_estimator == "remax":
        yield "  plus one greedy rollout per prompt, the baseline of the others"


def render_first_prompts(plan: Plan, template: ChatTemplate) -> str:
    """Return the first prompt of each loop, as the model reads it."""
    first = {kind.sample.agent_name: kind.sample for kind in reversed(plan.kinds)}
    lines = []
    for agent, sample in sorted(first.items()):
        messages, schemas = opening_of(sample, LocalToolbox())
        prompt = template.decode(template.prompt(messages, schemas))
        if template.images:  # Hundreds of placeholders tell a reader nothing.
            prompt = template.images.describe(prompt, messages)
        lines.append(f"first prompt of {agent} (row {sample.row}):")
        lines += ["  | " + line for line in prompt.splitlines()]
    return "\n".join(lines)
