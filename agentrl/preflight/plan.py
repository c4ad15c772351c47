"""Load and check the rows, tools and rewards of a run before a model is loaded.

`agentrl check`, `train`, `eval`, `generate` and `play` all start here. So a typo in the last row of
the validation set costs seconds, and not the minutes that a model takes to load.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from agentrl import registry, sandbox
from agentrl.config import FIELDS, Config, file_names, row_files
from agentrl.config.environment import REFERENCE
from agentrl.data import (
    ColumnNames,
    Kind,
    Rows,
    find_kinds,
    load_checked,
    parts_to_check,
    row_order,
)
from agentrl.data.recorded import identify_records
from agentrl.doors.door import check_doors
from agentrl.errors import ConfigError, DataError, UserError
from agentrl.gateway.agent import check_agent, describe_sample
from agentrl.plural import plural
from agentrl.preflight.teacher import check_teacher_rows
from agentrl.rewards import Scorer, check_graders
from agentrl.rewards.leaks import find_leaks
from agentrl.terminal import echo
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Sample

T = TypeVar("T")
log = logging.getLogger("agentrl")
EXTERNAL = "external"
"""The loop whose agent is another program. It sends tools and messages of its own."""
ANSWER_NAMES = ("answer", "solution", "label", "target", "final_answer", "expected_answer")
"""Names of the column of ground truths in datasets of other projects."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run after its checks: the config, the rows and the scorer."""

    config: Config
    train: Sequence[Sample]
    val: Sequence[Sample]
    scorer: Scorer

    @property
    def kinds(self) -> list[Kind]:
        """The kinds of rows, those for training first."""
        return [*find_kinds(self.train), *find_kinds(self.val)]

    @property
    def splits(self) -> list[tuple[str, Sequence[Sample]]]:
        """The rows for training and those for validation, with the names of their files."""
        data = self.config.data
        return [(file_names(data.train), self.train), (file_names(data.val), self.val)]

    @property
    def fingerprint(self) -> str:
        """A hash of the training rows; "" if they are not from files.

        Recorded answers are the same rows when their users have sent more scores.
        """
        if self.config.data.is_recorded:
            return identify_records(file_names(self.config.data.train))
        return self.train.fingerprint if isinstance(self.train, Rows) else ""

    @property
    def epoch_rows(self) -> int:
        """The number of rows in an epoch: files with a weight are played more or less often."""
        return row_order(self.train, self.config.trainer.seed).epoch_rows

    @property
    def total_steps(self) -> int:
        """The number of training steps: `trainer.total_steps`, or as many as `total_epochs` take.

        A step counts as one batch, even if more rows are played to fill it. The last batch may
        contain rows of one more epoch; with `data.drop_last`, only whole batches of each epoch
        count.
        """
        trainer, data = self.config.trainer, self.config.data
        if trainer.total_steps:
            return trainer.total_steps
        if data.is_recorded:  # Each score is used once.
            return max(1, len(self.train) // data.batch_size)
        if data.drop_last:
            return trainer.total_epochs * (self.epoch_rows // data.batch_size or 1)
        return max(1, -(-self.rows_of_epochs // data.batch_size))

    @property
    def rows_of_epochs(self) -> int:
        """The number of rows in `trainer.total_epochs` epochs."""
        return row_order(self.train, 0).first(self.config.trainer.total_epochs)


def make_plan(config: Config) -> Plan:
    """Load the user's files and rows, and check all of them.

    Raises:
        UserError: the message lists all mistakes.
    """
    for path in FIELDS:
        if match := REFERENCE.search(str(config.value(path))):
            raise ConfigError(f"{path}: the environment variable {match[1]} is not set")
    if not config.data.train and not config.data.val:
        raise ConfigError("no rows: set --dataset FILE (data.train), .parquet or .jsonl")
    problems = load_files(config)
    all_files_loaded = not problems
    for name, where in registry.interactions.replaced().items():
        log.warning("the interaction %r is that of %s, not the shipped one", name, where)
    if all_files_loaded:
        problems += _find_unknown_names(config)
    r = config.rollout
    make = partial(Scorer, config.reward, r.budget_policy, r.max_trajectory_tokens)
    scorer = _attempt(make, problems) if all_files_loaded else None
    rows = _load_rows(config, problems, all_files_loaded)
    parts = [part for split in rows for part in parts_to_check(split)]
    names = {kind.sample.agent_name for split in rows for kind in find_kinds(split)}
    _check_deterministic(config, names, problems)
    every = chain.from_iterable(samples() for _, _, samples in parts)
    _check_external(config, names, every, problems)
    if scorer:
        unscored = _check_outcomes(rows, config, scorer, problems)
        for file, first, samples in parts:
            graded = (
                s
                for s in samples()
                if not reports_outcome(s, config) and s.environment not in unscored
            )
            _attempt(partial(check_graders, graded, scorer, file, first), problems)
    problems += check_teacher_rows(config, rows[0])
    if problems or scorer is None:
        raise DataError("\n".join(dict.fromkeys(problems)))
    for file, first, samples in parts:
        for leak in find_leaks(samples(), _tools_text(), file, first):
            log.warning("%s", leak)
    plan = Plan(config, rows[0], rows[1], scorer)
    _note_unread_answers(plan)
    _note_unused_tools(plan)
    if config.val.without_tools:
        _note_named_tools(plan.val or plan.train)
    check_doors(config)
    sandbox.configure(config.sandbox)
    programs = programs_of(plan)
    if programs and (problem := sandbox.probe(config.sandbox)):
        raise ConfigError(
            f"{', '.join(programs)} of these rows run programs, but"
            f" sandbox.backend={config.sandbox.backend} does not work here: {problem}"
        )
    return plan


def _check_external(
    config: Config, names: Set[str], samples: Iterable[Sample], problems: list[str]
) -> None:
    """Add the mistakes of the user's agent to `problems`.

    Args:
        config: the config.
        names: the agent loops of all rows.
        samples: all rows.
        problems: gets a message for each mistake.
    """
    agent = config.agent
    if EXTERNAL in names:
        _attempt(partial(check_agent, agent), problems)
        _attempt(partial(_check_agent_keys, agent.extra_info, samples), problems)
    elif (
        names
        and (agent.command or agent.python)
        and not config.data.is_recorded  # The config is often that of the run that was served.
    ):
        key = "agent.command" if agent.command else "agent.python"
        problems.append(
            f"{key} is set, but no row has agent_name external: they have"
            f" {', '.join(sorted(names))}. Add the column, or set data.agent_name=external for rows"
            f" without one, or remove {key}"
        )


def _check_deterministic(config: Config, loops: Iterable[str], problems: list[str]) -> None:
    """Add a mistake to `problems` if a run cannot be repeated bit for bit but shall be."""
    for name in sorted(loops):
        awaited = name not in registry.agent_loops or registry.agent_loops.get(name).awaited
        if config.rollout.deterministic and not awaited:
            problems.append(
                f"rollout.deterministic=true: rows with agent_name {name} cannot be repeated bit"
                " for bit, because the time at which an agent sends a request decides which turns"
                " are computed together. Set rollout.deterministic=false"
            )


def _check_agent_keys(keys: Sequence[str], samples: Iterable[Sample]) -> None:
    """Raise `DataError` if agents cannot get the keys of `agent.extra_info`, or no row has one."""
    known: set[str] = set()
    for sample in samples if keys else ():
        if sample.agent_name == EXTERNAL:
            describe_sample(sample, keys)
            known |= {*sample.extra}
    if unknown := [key for key in keys if key not in known]:
        raise DataError(
            f"agent.extra_info names {', '.join(unknown)}, but no row with agent_name external has"
            f" it in its extra_info. Keys of the rows: {', '.join(sorted(known)) or 'none'}"
        )


def reports_outcome(sample: Sample, config: Config) -> bool:
    """Return whether a row's environment or agent reports the outcome, so that no grader does."""
    if sample.agent_name == EXTERNAL:
        return config.agent.reward != "grader"
    if sample.agent_name in registry.agent_loops and (
        registry.agent_loops.get(sample.agent_name).reports_outcome
    ):
        return True
    return bool(sample.environment) and "reward" in registry.tools.get(sample.environment).hooks


def _check_outcomes(
    rows: Sequence[Sequence[Sample]], config: Config, scorer: Scorer, problems: list[str]
) -> set[str]:
    """Add a mistake if nothing scores an environment, or if no row uses the run's reward.

    Returns:
        The environments that nothing scores.
    """
    firsts = [kind.sample for split in rows for kind in find_kinds(split)]
    firsts = [s for s in firsts if s.environment in registry.tools or not s.environment]
    unscored = set()
    for sample in firsts:
        if sample.environment and not reports_outcome(sample, config):
            try:
                scorer.grader(sample.data_source)
            except DataError:
                unscored.add(sample.environment)
    problems += [
        f"environment {name!r} has no method `reward`, and nothing else scores its rows. Write"
        " `async def reward(self)`, or set reward.function"
        for name in sorted(unscored)
    ]
    key = next((k for k in ("function", "functions") if getattr(config.reward, k)), "")
    names = sorted({s.environment for s in firsts})
    if key and firsts and all(s.environment and reports_outcome(s, config) for s in firsts):
        problems.append(
            f"reward.{key} is set, but all rows have an environment with a method `reward`"
            f" ({', '.join(names)}), which gives the outcome. Remove one of the two"
        )
    return unscored


def _note_unread_answers(plan: Plan) -> None:
    """Warn if no row has a ground truth, but a column has the name of one (TRL's rows)."""
    for path, samples in plan.splits:
        firsts = [kind.sample for kind in find_kinds(samples)]
        if any(s.ground_truth is not None or s.environment for s in firsts):
            continue
        names = {name for sample in firsts for name in sample.extra}
        for name in [name for name in ANSWER_NAMES if name in names][:1]:
            log.warning(
                "%s: no row has a ground_truth. The column %r is in extra_info only. If rewards"
                " need it as the ground truth, rename it:"
                " agentrl data convert FILE OUTPUT --rename %s=ground_truth",
                path,
                name,
                name,
            )


def _note_unused_tools(plan: Plan) -> None:
    """Warn of rows whose loop uses tools, but which have none although files define some."""
    names = ", ".join(name for name, tool in registry.tools.items() if not tool.is_environment)
    for path, samples in plan.splits:
        kinds = [kind for kind in find_kinds(samples) if not kind.sample.tools]
        uses_tools = [registry.agent_loops.get(k.sample.agent_name).uses_tools for k in kinds]
        count = sum(len(k.rows) for k, uses in zip(kinds, uses_tools, strict=True) if uses)
        if names and count:
            log.warning(
                "%s: %s without tools, whose agent loop uses tools, although the files define %s:"
                " the policy sees no tool in these rows. Name a row's tools in its column tools;"
                " data.tools=all gives all of them to each row without this column",
                path,
                plural(count, "row"),
                names,
            )


def _note_named_tools(samples: Sequence[Sample]) -> None:
    """Warn of rows whose prompts name tools that they do not have without tools."""
    named = [
        (sample, name)
        for sample in samples
        for name in sample.tools
        if any(re.search(rf"\b{re.escape(name)}\b", m.content) for m in sample.prompt)
    ]
    for sample, name in named[:1]:
        log.warning(
            "val.without_tools: the prompts of %s name their tools (row %s: %r), also where they"
            " are played without them. Then val/tool_dependence is too large: the policy looks for"
            " a tool that it does not have. The chat template describes the tools: leave them out",
            *(plural(len({s.row for s, _ in named}), "row"), sample.row, name),
        )


def load_files(config: Config) -> list[str]:
    """Load the user's files, and return the mistakes in them. A loaded file is not run again."""
    problems: list[str] = []
    for file in config.all_files:
        _attempt(partial(registry.load_file, file), problems)
    return problems


CODE_KEYS = ("reward.function", "agent.command", "agent.python", "rollout.python", "sandbox.python")
"""The keys, apart from `files`, that name code or programs."""


def find_code(config: Config, run: Config) -> list[str]:
    """Return the code and programs of a config that come from the config of a run."""
    keys = [key for key in CODE_KEYS if run.value(key) != Config().value(key)]
    return [file for file in config.all_files if file in run.all_files] + [
        config.stored_value(key) for key in keys if config.value(key) == run.value(key)
    ]


def announce_files(config: Path, files: Sequence[str]) -> None:
    """Print which files are loaded because the config of a run names them, not the user."""
    if files:
        echo(f"loads {', '.join(files)}: {config} names them", err=True)


def _find_unknown_names(config: Config) -> list[str]:
    """Return the mistakes in the config's names of estimators, losses and interactions."""
    algorithm = config.algorithm
    references = [
        ("algorithm.adv_estimator", registry.advantage_estimators, algorithm.adv_estimator),
        ("algorithm.policy_loss", registry.policy_losses, algorithm.policy_loss),
        *(("interaction.kwargs", registry.interactions, n) for n in config.interaction.kwargs),
    ]
    return [f"{key}: {kind.explain_unknown(n)}" for key, kind, n in references if n not in kind]


def _attempt(work: Callable[[], T], problems: list[str]) -> T | None:
    """Call `work` and return its result; add a `UserError` to `problems` and return None."""
    try:
        return work()
    except UserError as e:
        problems.append(str(e))
        return None


def _load_rows(
    config: Config, problems: list[str], are_files_loaded: bool
) -> list[Sequence[Sample]]:
    """Load and check the rows for training and for validation; add mistakes to `problems`.

    If a file does not load, its names are missing, so the names in the rows are not checked.
    """
    rows: list[Sequence[Sample]] = []
    data = config.data
    names = ColumnNames(data.prompt_key, data.reward_fn_key)
    for source in (data.train, data.val):
        load = partial(
            load_checked,
            row_files(source),
            data.agent_name,
            config.interaction.kwargs,
            names,
            are_files_loaded=are_files_loaded,
            tools=data.tools,
        )
        rows.append((_attempt(load, problems) if source else None) or [])
    return rows


def programs_of(plan: Plan) -> list[str]:
    """Return what runs programs in this machine's sandbox: tools, environments and rewards of rows.

    With `tools.url`, the tools use the sandbox of that server, so they are left out.
    """
    names = {name for kind in plan.kinds for name in kind.sample.tools}
    tools = [
        f"the {'environment' if registry.tools.get(name).is_environment else 'tool'} {name}"
        for name in sorted(names if not plan.config.tools.url else ())
        if "sandbox" in registry.tools.get(name).injected
    ]
    return tools + [f"the reward {name}" for name in rewards_with_programs(plan)]


def rewards_with_programs(plan: Plan) -> list[str]:
    """Return the names of the rewards of the rows that run programs."""
    names = []
    for source in sorted({kind.sample.data_source for kind in plan.kinds}):
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
