"""What a run is made of, checked before a model is loaded.

`agentrl check`, `train`, `eval`, `generate` and `play` all begin here, so that a typo in the last
row of the validation set costs seconds, not a GPU's bring-up.
"""

from __future__ import annotations

import json
import logging
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from textwrap import indent
from typing import TypeVar

from agentrl import registry, sandbox
from agentrl.agent_loops import AgentLoop
from agentrl.agent_loops.loops import Schemas
from agentrl.chat import ChatTemplate
from agentrl.chat.formats import FORMATS
from agentrl.chat.formats.detect import (
    can_read_calls,
    detect_format,
    explain_unknown_format,
    render_probe_calls,
    shows_tools,
)
from agentrl.chat.verify_template import (
    CALLS_ALONE,
    SHAPES,
    Verdict,
    format_verdicts,
    verify_template,
)
from agentrl.config import AlgorithmConfig, Config
from agentrl.data import load_checked, load_samples
from agentrl.errors import ConfigError, DataError, TemplateError, UserError, user_code
from agentrl.rewards import Scorer, check_graders, make_scorer
from agentrl.rewards.leaks import leaks
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Message, Sample, token_array

T = TypeVar("T")

log = logging.getLogger("agentrl")

SHIPPED = ("single_turn", "tool_agent", "react")
"""Loops that are known to say nothing of their own; any other may observe a user at any time."""
FIXED_ROW = 256
"""Tokens of the row that an engine is asked about after each update."""
COMPARE_SECONDS = 30.0
"""How long prompts are compared with the template's own text before a run: 200,000 short rows."""
MAX_PROVEN = 8
"""Kinds of rows that a template is proven on, those with the most rows first."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked run: its rows and its reward."""

    config: Config
    train: Sequence[Sample]
    val: Sequence[Sample]
    scorer: Scorer

    @property
    def samples(self) -> Sequence[Sample]:
        """The rows of training and validation."""
        return [*self.train, *self.val]

    @property
    def total_steps(self) -> int:
        """Training steps: `trainer.total_steps`, or what `total_epochs` make of the rows.

        Each is counted as one batch, also where more rows are played to fill it.
        """
        trainer, size = self.config.trainer, self.config.data.batch_size
        return trainer.total_steps or trainer.total_epochs * max(1, len(self.train) // size)


def make_plan(config: Config) -> Plan:
    """Load the user's files and rows and check all of them.

    Raises:
        UserError: everything that is wrong, in one message.
    """
    if not config.data.train and not config.data.val:
        raise ConfigError("no rows: give --dataset FILE (data.train), .parquet or .jsonl")
    problems: list[str] = []

    def noted(work: Callable[[], T]) -> T | None:
        try:
            return work()
        except UserError as e:
            problems.append(str(e))
            return None

    for file in config.files:
        noted(partial(registry.load_file, file))
    # What a file would have defined is missing in every row: say the cause, not the effects.
    files_load = not problems
    if files_load:
        algorithm = config.algorithm
        named = [
            ("algorithm.adv_estimator", registry.advantage_estimators, algorithm.adv_estimator),
            ("algorithm.policy_loss", registry.policy_losses, algorithm.policy_loss),
            *(("interaction.kwargs", registry.interactions, n) for n in config.interaction.kwargs),
        ]
        problems += [f"{key}: {kind.unknown(n)}" for key, kind, n in named if n not in kind]
    rollout = config.rollout
    scorer = noted(
        partial(make_scorer, config.reward, rollout.budget_policy, rollout.max_trajectory_tokens)
    )
    rows: list[Sequence[Sample]] = []
    checked = partial(load_checked, configured=config.interaction.kwargs)
    load = checked if files_load else load_samples
    for path in (config.data.train, config.data.val):
        samples = (noted(partial(load, path, config.data.agent_name)) if path else None) or []
        if scorer and files_load:
            noted(partial(check_graders, samples, scorer, path))
        rows.append(samples)
    if problems or scorer is None:
        raise DataError("\n".join(problems))
    for path, samples in zip((config.data.train, config.data.val), rows, strict=True):
        for leak in leaks(samples, _tools_text(), path):
            log.warning("%s", leak)
    plan = Plan(config, rows[0], rows[1], scorer)
    sandbox.configure(config.sandbox)
    programs = _programs(plan)
    if programs and (problem := sandbox.probe(config.sandbox)):
        raise ConfigError(
            f"{', '.join(programs)} of these rows run programs, which cannot be done with"
            f" sandbox.backend={config.sandbox.backend}: {problem}"
        )
    return plan


def _programs(plan: Plan) -> list[str]:
    """Return the tools and rewards of the rows that run programs; a server's tools are its own."""
    names = {name for sample in plan.samples for name in sample.tools}
    tools = [
        f"the tool {name}"
        for name in sorted(names if not plan.config.tools.url else ())
        if "sandbox" in registry.tools.get(name).injected
    ]
    return tools + [f"the reward {name}" for name in rewards_with_programs(plan)]


def rewards_with_programs(plan: Plan) -> list[str]:
    """Return the names of the rewards of the rows that run programs."""
    names = []
    for source in sorted({sample.data_source for sample in plan.samples}):
        with suppress(DataError):  # `make_plan` refuses rows that nothing judges
            names += [g.name for g in plan.scorer.graders(source) if g.options.sandbox]
    return list(dict.fromkeys(names))


def _tools_text() -> Callable[[Sample], str]:
    """What the model of a row reads of its tools."""
    toolbox = LocalToolbox()

    @cache
    def text(names: tuple[str, ...]) -> str:
        return json.dumps(toolbox.schemas(names), ensure_ascii=False).replace("\\\\", "\\")

    return lambda sample: text(sample.tools) if sample.tools else ""


def check_policy_learns(plan: Plan) -> None:
    """Refuse a run that would be over before its policy's first step.

    Raises:
        ConfigError: all of its steps are the critic's alone.
    """
    warmup, steps = plan.config.algorithm.critic_only_steps, plan.total_steps
    if plan.train and not plan.config.trainer.val_only and warmup >= steps:
        raise ConfigError(
            f"algorithm.critic_warmup={warmup} of {steps} steps: the policy would never"
            " learn. Set it lower, or play more steps (trainer.total_steps, trainer.total_epochs)"
        )


def check_model_fits(plan: Plan, template: ChatTemplate, max_length: int) -> None:
    """Refuse rows that the template rewrites, whose calls are not read, or that leave no room.

    Args:
        plan: the run.
        template: the policy's.
        max_length: the model's context, tokens.

    Raises:
        TemplateError: naming the kinds of rows, and the first token that differs, or the format of
            tool calls that is missing.
        DataError: naming the rows and their lengths.
    """
    bad = {
        f"{count} rows of {name}": fails
        for name, count, verdicts in proven(plan, template)
        if (fails := [v for v in verdicts if v.fails])
    }
    if bad:
        lines = [
            line for rows, fails in bad.items() for line in format_verdicts(fails, f"{rows}, ")
        ]
        react = any(" rows of react" in rows for rows in bad)
        raise TemplateError(
            "the model's chat template does not show these rows' conversations as they are"
            " played:\n" + indent("\n".join(lines), "  ") + "\nTake a model or template that does"
            f" (`agentrl check-template {plan.config.model.path} --fix` looks for a small change)"
            + (
                ". The loop react begins its rows with a system message."
                if react
                else ", or for rows with tools the loop react, which shows them as text."
            )
        )
    loops = check_prompts(plan, template, max_length)
    check_tool_format(plan, template, loops)
    if loops and not shows_tools(template):
        log.warning(
            "%d rows have tools, but the chat template of %s does not show them: the policy knows"
            " of a tool only if the row's own prompt describes it. agent_name=react shows tools as"
            " text",
            loops.total(),
            plan.config.model.path,
        )


def check_tool_format(plan: Plan, template: ChatTemplate, loops: Counter[str]) -> None:
    """Refuse rows that show tools if the model's calls could not be read.

    Args:
        plan: the run.
        template: the policy's.
        loops: how many rows show tools, by agent loop.

    Raises:
        TemplateError: no parser reads a call as the chat template writes it.
    """
    name = plan.config.rollout.tool_format
    if not loops or name not in ("auto", *FORMATS):
        return
    taught = detect_format(template)
    if name == "auto" and not taught:
        problem = (
            f"{loops.total()} rows show tools, but the calls of {plan.config.model.path} cannot be"
            f" read: {explain_unknown_format(template)}"
        )
        if any(loop in SHIPPED for loop in loops):
            raise TemplateError(problem)
        log.warning("%s. (A loop of your own may read them: `ep.generate(parse=...)`)", problem)
        return
    rendered = render_probe_calls(template)
    shown = bool(taught or rendered)
    if shown and name not in ("auto", taught) and not can_read_calls(name, rendered):
        log.warning(
            "rollout.tool_format=%s, but the chat template writes calls in %s: these are not"
            " parsed%s",
            name,
            f"the format {taught}" if taught else "a format that agentrl does not read",
            ". rollout.tool_format=auto takes what the template writes" if taught else "",
        )


def check_prompts(plan: Plan, template: ChatTemplate, max_length: int) -> Counter[str]:
    """Refuse rows whose prompt cannot be encoded as the template renders it, or is too long.

    All rows are compared, as far as `COMPARE_SECONDS` allow; then the first of each shape.

    Returns:
        How many rows show tools, by agent loop.

    Raises:
        TemplateError: naming the rows, and why they cannot be shown.
        DataError: naming the rows and their lengths.
    """
    toolbox, until = LocalToolbox(), time.monotonic() + COMPARE_SECONDS
    refused, too_long, all_compared = [], [], 0
    loops: Counter[str] = Counter()
    for path, samples in ((plan.config.data.train, plan.train), (plan.config.data.val, plan.val)):
        shapes = set()
        for sample in samples:
            messages, schemas = _opening(sample, toolbox)
            if schemas:
                loops[sample.agent_name] += 1
            roles = tuple((m.role, bool(m.content.strip())) for m in messages)
            shape = (sample.agent_name, sample.tools, roles)
            compared = shape not in shapes or time.monotonic() < until
            shapes.add(shape)
            all_compared += compared
            try:
                if compared:
                    length = len(template.prompt(messages, schemas))
                else:
                    length = template.length(messages, schemas)
            except TemplateError as e:
                refused.append(f"{path}: row {sample.row}: {e}")
                continue
            if length >= max_length:
                too_long.append(f"{path}: row {sample.row}: the prompt has {length} tokens")
    if refused:
        shown = "\n".join(refused[:20])
        raise TemplateError(
            f"{len(refused)} of {all_compared} compared rows cannot be encoded as the chat template"
            f" of {plan.config.model.path} renders them. The first:\n{shown}\nChange or drop such"
            " rows."
        )
    if too_long:
        shown = "\n".join(too_long[:20])
        raise DataError(
            f"{len(too_long)} prompts do not fit the model's context of {max_length} tokens:\n"
            f"{shown}\nShorten or drop these rows."
        )
    return loops


def fixed_row(plan: Plan, template: ChatTemplate, max_length: int) -> array[int]:
    """Token ids of the run's own prompts, one after the other: what its canary scores.

    Of rows, since those are the tokens that matter; of several, since a mean over more is less
    noisy.
    """
    row, toolbox = token_array(), LocalToolbox()
    for sample in islice(plan.samples, FIXED_ROW):
        row.extend(template.prompt(*_opening(sample, toolbox), exact=False))
        if len(row) >= FIXED_ROW:
            break
    return row[: min(FIXED_ROW, max_length - 1)]


def proven(plan: Plan, template: ChatTemplate) -> list[tuple[str, int, list[Verdict]]]:
    """What the template does to the kinds of conversations that the rows may become.

    A loop that opens with schemas answers calls with tool messages, any other (react) with user
    messages, as an interaction does, and as a loop of the user's own may after any turn.

    Returns:
        For each kind of rows: its loop, how many rows it has, and the verdicts.
    """
    kinds: dict[tuple[str, tuple[str, ...], bool, bool], list[Sample]] = defaultdict(list)
    for sample in plan.samples:
        told = any(m.role == "system" for m in sample.prompt)
        kinds[sample.agent_name, sample.tools, bool(sample.interaction), told].append(sample)
    most = sorted(kinds.items(), key=lambda kind: -len(kind[1]))[:MAX_PROVEN]
    found, toolbox = [], LocalToolbox()
    for (name, tools, heard, _), samples in most:
        messages, schemas = _opening(samples[0], toolbox)
        system = any(m.role == "system" for m in messages)
        user = heard or name not in SHIPPED  # user messages may follow a turn
        shown = bool(tools and schemas)
        names = {
            "user only": user or (tools and not schemas),
            "one tool": shown,
            "parallel tools": shown,
            "five turns": shown and user,
            "tool then user": shown and user,
        }
        shapes = [s for s in SHAPES if names.get(s.name)]
        if shown and not heard:
            shapes.append(CALLS_ALONE)
        if shapes:
            shapes = [replace(shape, system=system) for shape in shapes]
            found.append((name, len(samples), verify_template(template, schemas, shapes)))
    return found


def history(plan: Plan, template: ChatTemplate) -> str:
    """What becomes of the thinking of earlier turns in this run."""
    verdicts = [v for _, _, verdicts in proven(plan, template) for v in verdicts if v.ok]
    if not verdicts:
        return "chat template: nothing follows a turn of these rows"
    kinds = [kind for v in verdicts for kind, status in v.kinds.items() if status == "unsupported"]
    but = ""
    if kinds:
        but = (
            f"; it cannot write turns of {', '.join(dict.fromkeys(kinds))}: rows keep them as they"
            " were sampled (`agentrl check-template` shows why)"
        )
    if all(v.status == "append-only" for v in verdicts):
        return f"chat template: append-only on these rows: an episode is one row of tokens{but}"
    meaning = {
        "keep": "all of it stays in one row, as it was sampled",
        "strip": "it is left out, as the template does, and a new row of tokens begins there",
    }
    chosen = plan.config.rollout.history_thinking
    return (
        "chat template: drops the thinking of earlier turns;"
        f" rollout.history_thinking={chosen}: {meaning[chosen]}{but}"
    )


def wiring(plan: Plan) -> str:
    """Who plays what with which tools, and what a step is."""
    lines = []
    for path, samples in ((plan.config.data.train, plan.train), (plan.config.data.val, plan.val)):
        if not samples:
            continue
        lines.append(f"{path}: {len(samples)} rows")
        kinds = Counter((s.agent_name, s.tools, s.interaction) for s in samples)
        for (agent, tools, interaction), count in sorted(kinds.items()):
            heard = f", interaction {interaction}" if interaction else ""
            lines.append(f"  {count:6d} x {agent}: tools {', '.join(tools) or 'none'}{heard}")
    config = plan.config
    talking = {sample.interaction for sample in plan.samples}
    lines += [
        f"interaction.kwargs.{name}: no row has this interaction"
        for name in config.interaction.kwargs
        if name not in talking
    ]
    if programs := _programs(plan):
        backend = config.sandbox.backend
        how = "NOT ISOLATED, as you" if backend == "unsafe-subprocess" else f"in {backend}"
        lines.append(f"programs of {', '.join(programs)} run {how} (sandbox.backend={backend})")
    if plan.train:
        size = config.data.batch_size * config.rollout.n
        mini = config.algorithm.mini_batch_size or size
        updates = -(-size // mini) * config.algorithm.ppo_epochs
        ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
        spread = f" on {ranks} ranks" if ranks > 1 else ""
        lines.append(
            f"a step: {config.data.batch_size} prompts x {config.rollout.n} rollouts = {size}"
            f" trajectories -> {updates} optimizer steps of {min(mini, size)}"
            f"{spread} ({_named(config.algorithm)}); {plan.total_steps} steps"
        )
        lines += _beside(config)
    return "\n".join(lines)


def _named(config: AlgorithmConfig) -> str:
    """An algorithm's name, and which of its parts are others than the name says."""
    row = AlgorithmConfig(name=config.name)
    parts = ("adv_estimator", "policy_loss", "loss_agg_mode")
    values = {part: getattr(config, part) for part in parts}
    others = [f"{part}={value}" for part, value in values.items() if value != getattr(row, part)]
    return f"{config.name} with {', '.join(others)}" if others else config.name


def _beside(config: Config) -> Iterator[str]:
    """What a step plays beside what it trains on."""
    a, d = config.algorithm, config.data
    if a.filter_groups:
        yield (
            "  where a prompt's rollouts teach nothing, further prompts are played: at most"
            f" {a.max_gen_batches} x {d.gen_batch_size or d.batch_size} a step"
        )
    if a.adv_estimator == "remax":
        yield "  and a greedy rollout of each prompt, the baseline of the others"


def first_prompts(plan: Plan, template: ChatTemplate) -> str:
    """What the model reads first, once for each loop."""
    first = {s.agent_name: s for s in reversed(plan.samples)}
    lines = []
    for agent, sample in sorted(first.items()):
        opening = _opening(sample, LocalToolbox())
        prompt = template.decode(template.prompt(*opening))
        lines.append(f"first prompt of {agent} (row {sample.row}):")
        lines += ["  | " + line for line in prompt.splitlines()]
    return "\n".join(lines)


def _opening(sample: Sample, toolbox: LocalToolbox) -> tuple[Sequence[Message], Schemas]:
    loop: AgentLoop = registry.agent_loops.get(sample.agent_name)
    with user_code(f"agent loop {loop.name!r}: its opening"):
        return loop.opening(sample, toolbox.schemas(sample.tools))
