"""Load and check the rows, tools and rewards of a run before a model is loaded.

`agentrl check`, `train`, `eval`, `generate` and `play` all start here. So a typo in the last row of
the validation set costs seconds, and not the minutes that a model takes to load.
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
from pathlib import Path
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
from agentrl.data import load_checked
from agentrl.errors import ConfigError, DataError, TemplateError, UserError, user_code
from agentrl.plural import plural
from agentrl.rewards import Scorer, check_graders
from agentrl.rewards.leaks import find_leaks
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Message, Sample, token_array

T = TypeVar("T")

log = logging.getLogger("agentrl")

SHIPPED_LOOPS = ("single_turn", "tool_agent", "react")
"""The shipped loops. They add no user messages, except for react, whose tool results are user
messages. A loop of the user may add user messages."""
CANARY_TOKENS = 256
"""The length in tokens of the canary: the row that engines score after each weight update."""
MAX_COMPARE_SECONDS = 30.0
"""The time limit for comparing the tokens of prompts with the rendered template, in seconds. It is
enough for 200,000 short rows."""
MAX_VERIFIED_KINDS = 8
"""The number of kinds of rows for which the template is verified. The most common kinds are."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run after its checks: the config, the rows and the scorer."""

    config: Config
    train: Sequence[Sample]
    val: Sequence[Sample]
    scorer: Scorer

    @property
    def samples(self) -> Sequence[Sample]:
        """All rows, those for training first."""
        return [*self.train, *self.val]

    @property
    def total_steps(self) -> int:
        """The number of training steps: `trainer.total_steps`, or as many as `total_epochs` take.

        A step counts as one batch, even if more rows are played to fill it.
        """
        trainer, size = self.config.trainer, self.config.data.batch_size
        return trainer.total_steps or trainer.total_epochs * max(1, len(self.train) // size)


def make_plan(config: Config) -> Plan:
    """Load the user's files and rows, and check all of them.

    Raises:
        UserError: the message lists all mistakes.
    """
    if not config.data.train and not config.data.val:
        raise ConfigError("no rows: set --dataset FILE (data.train), .parquet or .jsonl")
    problems: list[str] = []
    _load_files(config, problems)
    all_files_loaded = not problems
    for name, where in registry.interactions.replaced().items():
        log.warning("the interaction %r is that of %s, not the shipped one", name, where)
    if all_files_loaded:
        algorithm = config.algorithm
        references = [
            ("algorithm.adv_estimator", registry.advantage_estimators, algorithm.adv_estimator),
            ("algorithm.policy_loss", registry.policy_losses, algorithm.policy_loss),
            *(("interaction.kwargs", registry.interactions, n) for n in config.interaction.kwargs),
        ]
        problems += [
            f"{key}: {kind.explain_unknown(n)}" for key, kind, n in references if n not in kind
        ]
    rollout = config.rollout
    scorer = _attempt(
        partial(Scorer, config.reward, rollout.budget_policy, rollout.max_trajectory_tokens),
        problems,
    )
    rows = _load_rows(config, problems)
    if scorer and all_files_loaded:
        for path, samples in zip((config.data.train, config.data.val), rows, strict=True):
            _attempt(partial(check_graders, samples, scorer, path), problems)
    if problems or scorer is None:
        raise DataError("\n".join(problems))
    for path, samples in zip((config.data.train, config.data.val), rows, strict=True):
        for leak in find_leaks(samples, _tools_text(), path):
            log.warning("%s", leak)
    plan = Plan(config, rows[0], rows[1], scorer)
    sandbox.configure(config.sandbox)
    programs = _programs(plan)
    if programs and (problem := sandbox.probe(config.sandbox)):
        raise ConfigError(
            f"{', '.join(programs)} of these rows run programs, but"
            f" sandbox.backend={config.sandbox.backend} does not work here: {problem}"
        )
    return plan


def find_problems(config: Config) -> list[str]:
    """Return the mistakes in the user's files and rows that do not depend on other keys.

    A command reports them together with the mistakes of a config that is not valid as a whole.
    """
    problems: list[str] = []
    _load_files(config, problems)
    _load_rows(config, problems)
    return problems


def _attempt(work: Callable[[], T], problems: list[str]) -> T | None:
    """Call `work` and return its result; add a `UserError` to `problems` and return None."""
    try:
        return work()
    except UserError as e:
        problems.append(str(e))
        return None


def _load_files(config: Config, problems: list[str]) -> None:
    for file in config.files:
        _attempt(partial(registry.load_file, file), problems)


def _load_rows(config: Config, problems: list[str]) -> list[Sequence[Sample]]:
    """Load and check the rows for training and for validation; `problems` are those of the files.

    If a file does not load, its names are missing in the rows. Then a note says so.
    """
    rows: list[Sequence[Sample]] = []
    have_files_failed = bool(problems)
    load = partial(load_checked, configured=config.interaction.kwargs)
    for path in (config.data.train, config.data.val):
        known = len(problems)
        load_path = partial(load, path, config.data.agent_name)
        rows.append((_attempt(load_path, problems) if path else None) or [])
        if have_files_failed and len(problems) > known and Path(path).is_file():
            problems[-1] += "\n(A name may be unknown because a file above could not be loaded.)"
    return rows


def _programs(plan: Plan) -> list[str]:
    """Return the tools and rewards of the rows that run programs in this machine's sandbox.

    With `tools.url`, the tools use the sandbox of that server, so they are left out.
    """
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
        with suppress(DataError):  # `make_plan` refuses rows without a reward
            names += [g.name for g in plan.scorer.graders(source) if g.options.sandbox]
    return list(dict.fromkeys(names))


def _tools_text() -> Callable[[Sample], str]:
    """Return a function from a row to the text of its tools that the model reads."""
    toolbox = LocalToolbox()

    @cache
    def text(names: tuple[str, ...]) -> str:
        return json.dumps(toolbox.schemas(names), ensure_ascii=False).replace("\\\\", "\\")

    return lambda sample: text(sample.tools) if sample.tools else ""


def check_policy_learns(plan: Plan) -> None:
    """Refuse a run that ends before the first optimizer step of its policy.

    Raises:
        ConfigError: all steps train the critic alone.
    """
    warmup, steps = plan.config.algorithm.critic_only_steps, plan.total_steps
    if plan.train and not plan.config.trainer.val_only and warmup >= steps:
        raise ConfigError(
            f"algorithm.critic_warmup={warmup} of {steps} steps: the policy would never be"
            " trained. Set it lower, or train for more steps (trainer.total_steps,"
            " trainer.total_epochs)"
        )


def check_model_fits(plan: Plan, template: ChatTemplate, max_length: int) -> None:
    """Refuse rows that the model's chat template or context length does not support.

    Args:
        plan: the run.
        template: the policy's chat template.
        max_length: the model's context length, in tokens.

    Raises:
        TemplateError: the template changes earlier turns of such rows, or no parser can read its
            tool calls. The message names the kinds of rows and the first token that differs.
        DataError: prompts are too long. The message names the rows and their lengths.
    """
    failures = [
        (name, count, fails)
        for name, count, verdicts in verify_rows(plan, template)
        if (fails := [v for v in verdicts if v.fails])
    ]
    if failures:
        lines = [
            line
            for name, count, fails in failures
            for line in format_verdicts(fails, f"{plural(count, 'row')} of {name}, ")
        ]
        react = any(name == "react" for name, _, _ in failures)
        raise TemplateError(
            "the model's chat template renders conversations of these rows differently from the"
            " tokens of an episode:\n"
            + indent("\n".join(lines), "  ")
            + "\nUse another model or template"
            f" (`agentrl check-template {plan.config.model.path} --fix` looks for a small change)"
            + (
                ". The loop react starts its rows with a system message."
                if react
                else ", or for rows with tools the loop react, which shows tools as text."
            )
        )
    loops = check_prompts(plan, template, max_length)
    check_tool_format(plan, template, loops)
    if loops and not shows_tools(template):
        log.warning(
            "%d rows have tools, but the chat template of %s does not show them: the policy sees a"
            " tool only if the row's prompt describes it. agent_name=react shows tools as text",
            loops.total(),
            plan.config.model.path,
        )


def check_tool_format(plan: Plan, template: ChatTemplate, loops: Counter[str]) -> None:
    """Refuse rows with tools if no parser can read the model's tool calls.

    Args:
        plan: the run.
        template: the policy's chat template.
        loops: the number of rows that show tools, by agent loop.

    Raises:
        TemplateError: no parser can read a call as the chat template writes it.
    """
    name = plan.config.rollout.tool_format
    if not loops or name not in ("auto", *FORMATS):
        return
    detected = detect_format(template)
    if name == "auto" and not detected:
        problem = (
            f"{loops.total()} rows show tools, but agentrl cannot parse the tool calls of"
            f" {plan.config.model.path}: {explain_unknown_format(template)}"
        )
        if any(loop in SHIPPED_LOOPS for loop in loops):
            raise TemplateError(problem)
        log.warning("%s. (Your own loop may parse them: `ep.generate(parse=...)`)", problem)
        return
    rendered = render_probe_calls(template)
    writes_calls = bool(detected or rendered)
    if writes_calls and name not in ("auto", detected) and not can_read_calls(name, rendered):
        log.warning(
            "rollout.tool_format=%s, but the chat template writes calls in %s: these are not"
            " parsed%s",
            name,
            f"the format {detected}" if detected else "a format that agentrl does not support",
            ". rollout.tool_format=auto uses the format of the template" if detected else "",
        )


def check_prompts(plan: Plan, template: ChatTemplate, max_length: int) -> Counter[str]:
    """Refuse rows whose prompt is too long, or cannot be encoded as the template renders it.

    The tokens of every prompt are compared with the rendered template for `MAX_COMPARE_SECONDS`.
    After that, they are compared for the first row of each shape only.

    Returns:
        The number of rows that show tools, by agent loop.

    Raises:
        TemplateError: the message names the rows and why they cannot be encoded.
        DataError: prompts are too long. The message names the rows and their lengths.
    """
    toolbox, deadline = LocalToolbox(), time.monotonic() + MAX_COMPARE_SECONDS
    refused, too_long, compared_rows = [], [], 0
    loops: Counter[str] = Counter()
    for path, samples in ((plan.config.data.train, plan.train), (plan.config.data.val, plan.val)):
        shapes = set()
        for sample in samples:
            messages, schemas = _opening(sample, toolbox)
            if schemas:
                loops[sample.agent_name] += 1
            roles = tuple((m.role, bool(m.content.strip())) for m in messages)
            shape = (sample.agent_name, sample.tools, roles)
            compared = shape not in shapes or time.monotonic() < deadline
            shapes.add(shape)
            compared_rows += compared
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
            f"{len(refused)} of {compared_rows} compared rows cannot be encoded as the chat"
            f" template of {plan.config.model.path} renders them. The first:\n{shown}\nChange or"
            " remove such rows."
        )
    if too_long:
        shown = "\n".join(too_long[:20])
        raise DataError(
            f"{len(too_long)} prompts are longer than the model's context of {max_length} tokens:\n"
            f"{shown}\nShorten or remove these rows."
        )
    return loops


def longest_prompt(plan: Plan, template: ChatTemplate) -> int:
    """Return the tokens of the prompt with the most characters."""
    longest = max(plan.samples, key=lambda sample: sum(len(m.content) for m in sample.prompt))
    return template.length(*_opening(longest, LocalToolbox()))


def make_canary_row(plan: Plan, template: ChatTemplate, max_length: int) -> array[int]:
    """Return the canary, the row that engines score after each update: the first prompts, joined.

    The canary consists of the run's prompts because the policy is trained on such tokens. It has
    several prompts because a mean over more tokens has less noise.
    """
    row, toolbox = token_array(), LocalToolbox()
    for sample in islice(plan.samples, CANARY_TOKENS):
        row.extend(template.prompt(*_opening(sample, toolbox), exact=False))
        if len(row) >= CANARY_TOKENS:
            break
    return row[: min(CANARY_TOKENS, max_length - 1)]


def verify_rows(plan: Plan, template: ChatTemplate) -> list[tuple[str, int, list[Verdict]]]:
    """Verify the template for the shapes of conversation that episodes of these rows may have.

    A loop that shows schemas adds tool messages after a turn with calls. Other loops (react),
    interactions and the user's own loops add user messages.

    Returns:
        For each kind of rows: its loop, the number of rows, and the verdicts.
    """
    kinds: dict[tuple[str, tuple[str, ...], bool, bool], list[Sample]] = defaultdict(list)
    for sample in plan.samples:
        has_system = any(m.role == "system" for m in sample.prompt)
        kinds[sample.agent_name, sample.tools, bool(sample.interaction), has_system].append(sample)
    most_common = sorted(kinds.items(), key=lambda kind: -len(kind[1]))[:MAX_VERIFIED_KINDS]
    verdicts, toolbox = [], LocalToolbox()
    for (name, tools, has_interaction, _), samples in most_common:
        messages, schemas = _opening(samples[0], toolbox)
        shows_system = any(m.role == "system" for m in messages)
        has_user = has_interaction or name not in SHIPPED_LOOPS
        has_tools = bool(tools and schemas)
        is_possible = {
            "user only": has_user or (tools and not schemas),
            "one tool": has_tools,
            "parallel tools": has_tools,
            "five turns": has_tools and has_user,
            "tool then user": has_tools and has_user,
        }
        shapes = [s for s in SHAPES if is_possible.get(s.name)]
        if has_tools and not has_interaction:
            shapes.append(CALLS_ALONE)
        if shapes:
            shapes = [replace(shape, system=shows_system) for shape in shapes]
            verdicts.append((name, len(samples), verify_template(template, schemas, shapes)))
    return verdicts


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
            " were sampled (`agentrl check-template` shows why)"
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
    for path, samples in ((plan.config.data.train, plan.train), (plan.config.data.val, plan.val)):
        if not samples:
            continue
        lines.append(f"{path}: {plural(len(samples), 'row')}")
        kinds = Counter((s.agent_name, s.tools, s.interaction) for s in samples)
        for (agent, tools, interaction), count in sorted(kinds.items()):
            suffix = f", interaction {interaction}" if interaction else ""
            lines.append(f"  {count:6d} x {agent}: tools {', '.join(tools) or 'none'}{suffix}")
    config = plan.config
    interactions = {sample.interaction for sample in plan.samples}
    lines += [
        f"interaction.kwargs.{name}: no row has this interaction"
        for name in config.interaction.kwargs
        if name not in interactions
    ]
    if programs := _programs(plan):
        backend = config.sandbox.backend
        isolation = (
            "NOT ISOLATED, with your rights" if backend == "unsafe-subprocess" else f"in {backend}"
        )
        lines.append(
            f"programs of {', '.join(programs)} run {isolation} (sandbox.backend={backend})"
        )
    if plan.train:
        size = config.data.batch_size * config.rollout.n
        mini = config.algorithm.mini_batch_size or size
        updates = -(-size // mini) * config.algorithm.ppo_epochs
        ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
        on_ranks = f" on {ranks} ranks" if ranks > 1 else ""
        lines.append(
            f"a step: {plural(config.data.batch_size, 'prompt')} x"
            f" {plural(config.rollout.n, 'rollout')} = {size} trajectories ->"
            f" {plural(updates, 'optimizer step')} of {min(mini, size)}"
            f"{on_ranks} ({_describe_algorithm(config.algorithm)});"
            f" {plural(plan.total_steps, 'step')}"
        )
        lines += _describe_extra_rollouts(config)
    return "\n".join(lines)


def _describe_algorithm(config: AlgorithmConfig) -> str:
    """Return the algorithm's name, and its parts that differ from the name's defaults."""
    defaults = AlgorithmConfig(name=config.name)
    parts = ("adv_estimator", "policy_loss", "loss_agg_mode")
    values = {part: getattr(config, part) for part in parts}
    changed = [f"{p}={value}" for p, value in values.items() if value != getattr(defaults, p)]
    return f"{config.name} with {', '.join(changed)}" if changed else config.name


def _describe_extra_rollouts(config: Config) -> Iterator[str]:
    """Yield a line for each kind of rollouts that a step plays but does not train on."""
    a, d = config.algorithm, config.data
    if a.filter_groups:
        yield (
            "  groups without a learning signal are replaced by further prompts: at most"
            f" {a.max_gen_batches} x {d.gen_batch_size or d.batch_size} prompts per step"
        )
    if a.adv_estimator == "remax":
        yield "  plus one greedy rollout per prompt, the baseline of the others"


def render_first_prompts(plan: Plan, template: ChatTemplate) -> str:
    """Return the first prompt of each loop, as the model reads it."""
    first = {s.agent_name: s for s in reversed(plan.samples)}
    lines = []
    for agent, sample in sorted(first.items()):
        prompt = template.decode(template.prompt(*_opening(sample, LocalToolbox())))
        lines.append(f"first prompt of {agent} (row {sample.row}):")
        lines += ["  | " + line for line in prompt.splitlines()]
    return "\n".join(lines)


def _opening(sample: Sample, toolbox: LocalToolbox) -> tuple[Sequence[Message], Schemas]:
    """Return the first messages of a row's episodes, and the schemas that the template shows."""
    loop: AgentLoop = registry.agent_loops.get(sample.agent_name)
    with user_code(f"agent loop {loop.name!r}: its opening"):
        return loop.opening(sample, toolbox.schemas(sample.tools))
