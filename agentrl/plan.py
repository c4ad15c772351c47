"""Load and check the rows, tools and rewards of a run before a model is loaded.

`agentrl check`, `train`, `eval`, `generate` and `play` all start here. So a typo in the last row of
the validation set costs seconds, and not the minutes that a model takes to load.
"""

from __future__ import annotations

import json
import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from textwrap import indent
from typing import TypeVar

from agentrl import registry, sandbox
from agentrl.agent_loops import AgentLoop
from agentrl.agent_loops.loops import Schemas, plain_opening, react_opening
from agentrl.chat import ChatTemplate
from agentrl.chat.formats import FORMATS
from agentrl.chat.formats.detect import (
    can_read_calls,
    detect_format,
    explain_unknown_format,
    render_probe_calls,
    shows_tools,
)
from agentrl.chat.turn_delta import PROBE_TOOL
from agentrl.chat.verify_template import (
    CALLS_ALONE,
    SHAPES,
    Verdict,
    format_verdicts,
    verify_template,
)
from agentrl.config import FIELDS, AlgorithmConfig, Config, file_names, row_files
from agentrl.config.environment import REFERENCE
from agentrl.data import (
    ColumnNames,
    Kind,
    Rows,
    describe_row,
    draw,
    find_kinds,
    load_checked,
    parts_to_check,
    prompt_bytes,
    row_order,
    sample_rows,
)
from agentrl.errors import ConfigError, DataError, TemplateError, UserError, user_code
from agentrl.gateway.agent import check_agent, describe_sample, has_slots
from agentrl.plural import plural
from agentrl.rewards import Scorer, check_graders
from agentrl.rewards.leaks import find_leaks
from agentrl.terminal import echo
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Message, Sample, token_array

T = TypeVar("T")

log = logging.getLogger("agentrl")

EXTERNAL = "external"
"""The loop whose agent is another program. It sends tools and messages of its own."""
SHIPPED_LOOPS = ("single_turn", "tool_agent", "react")
"""The shipped loops. They add no user messages, except for react, whose tool results are user
messages. A loop of the user may add user messages."""
ANSWER_NAMES = ("answer", "solution", "label", "target", "final_answer", "expected_answer")
"""Names of the column of ground truths in datasets of other projects."""
CANARY_TOKENS = 256
"""The length in tokens of the canary: the row that engines score after each weight update."""
CANARY_TOKENS_OF_FLOAT32 = 64
"""The length of the canary of a local engine in float32. Its noise is 5e-6 nats, so the mean over
few tokens is exact enough. On two CPU cores, 256 tokens of SmolLM2-135M took 8 % of the CPU time of
a step, and half of the CPU time of the start."""
MAX_COMPARE_SECONDS = 10.0
"""The time limit for comparing the tokens of prompts with the rendered template, in seconds. It is
enough for 40,000 short rows."""
NORMALIZED_GROWTH = 3
"""A tokenizer that normalizes text (NFC) may make it so many times longer, in bytes."""
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
        """A hash of the training rows; "" if they are not from files."""
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
    scorer = _make_scorer(config, problems)
    rows = _load_rows(config, problems, all_files_loaded)
    parts = [part for split in rows for part in parts_to_check(split)]
    names = {kind.sample.agent_name for split in rows for kind in find_kinds(split)}
    if EXTERNAL in names:
        _check_external(config, problems)
        every = chain.from_iterable(samples() for _, _, samples in parts)
        _attempt(partial(_check_agent_keys, config.agent.extra_info, every), problems)
    elif names and (config.agent.command or config.agent.python):
        key = "agent.command" if config.agent.command else "agent.python"
        problems.append(
            f"{key} is set, but no row has agent_name external: they have"
            f" {', '.join(sorted(names))}. Add the column, or set data.agent_name=external for rows"
            f" without one, or remove {key}"
        )
    if scorer and all_files_loaded:
        for file, first, samples in parts:
            graded = (s for s in samples() if not _reports_outcome(s, config))
            _attempt(partial(check_graders, graded, scorer, file, first), problems)
    if problems or scorer is None:
        raise DataError("\n".join(problems))
    for file, first, samples in parts:
        for leak in find_leaks(samples(), _tools_text(), file, first):
            log.warning("%s", leak)
    plan = Plan(config, rows[0], rows[1], scorer)
    _note_unread_answers(plan)
    _note_unused_tools(plan)
    sandbox.configure(config.sandbox)
    programs = _programs(plan)
    if programs and (problem := sandbox.probe(config.sandbox)):
        raise ConfigError(
            f"{', '.join(programs)} of these rows run programs, but"
            f" sandbox.backend={config.sandbox.backend} does not work here: {problem}"
        )
    return plan


def _check_external(config: Config, problems: list[str]) -> None:
    """Check the agent of the rows with the loop `external`; add mistakes to `problems`."""
    _attempt(partial(check_agent, config.agent), problems)
    if config.rollout.deterministic:
        problems.append(
            "rollout.deterministic=true: rows with agent_name external cannot be repeated bit for"
            " bit, because the time at which an agent sends a request decides which turns are"
            " computed together. Set rollout.deterministic=false"
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


def _reports_outcome(sample: Sample, config: Config) -> bool:
    """Return whether no grader scores a row, because its agent reports the outcome."""
    return sample.agent_name == EXTERNAL and config.agent.reward != "grader"


def _note_unread_answers(plan: Plan) -> None:
    """Warn if no row has a ground truth, but a column has the name of one (TRL's rows)."""
    for path, samples in plan.splits:
        firsts = [kind.sample for kind in find_kinds(samples)]
        if any(sample.ground_truth is not None for sample in firsts):
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
    names = ", ".join(name for name, _ in registry.tools.items())
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


def load_files(config: Config) -> list[str]:
    """Load the user's files, and return the mistakes in them. A loaded file is not run again."""
    problems: list[str] = []
    for file in config.files:
        _attempt(partial(registry.load_file, file), problems)
    return problems


CODE_KEYS = ("reward.function", "agent.command", "agent.python", "rollout.python", "sandbox.python")
"""The keys, apart from `files`, that name code or programs."""


def find_code(config: Config, run: Config) -> list[str]:
    """Return the code and programs of a config that come from the config of a run."""
    keys = [key for key in CODE_KEYS if run.value(key) != Config().value(key)]
    return [file for file in config.files if file in run.files] + [
        config.stored_value(key) for key in keys if config.value(key) == run.value(key)
    ]


def announce_files(config: Path, files: Sequence[str]) -> None:
    """Print which files are loaded because the config of a run names them, not the user."""
    if files:
        echo(f"loads {', '.join(files)}: {config} names them", err=True)


def find_problems(
    config: Config, *, are_files_loaded: bool, is_reward_valid: bool = True
) -> list[str]:
    """Return the mistakes in rewards, names and rows that do not depend on other keys.

    A command reports them together with the mistakes of a config that is not valid as a whole.

    Args:
        config: the config; its files were loaded.
        are_files_loaded: False if a file did not load. Names are not checked then, because the file
            may define them.
        is_reward_valid: whether the section `reward` is valid as a whole. If not, rewards are not
            checked.
    """
    problems: list[str] = []
    if are_files_loaded:
        problems += _find_unknown_names(config)
        if is_reward_valid:
            _make_scorer(config, problems)
    _load_rows(config, problems, are_files_loaded)
    return problems


def _find_unknown_names(config: Config) -> list[str]:
    """Return the mistakes in the config's names of estimators, losses and interactions."""
    algorithm = config.algorithm
    references = [
        ("algorithm.adv_estimator", registry.advantage_estimators, algorithm.adv_estimator),
        ("algorithm.policy_loss", registry.policy_losses, algorithm.policy_loss),
        *(("interaction.kwargs", registry.interactions, n) for n in config.interaction.kwargs),
    ]
    return [f"{key}: {kind.explain_unknown(n)}" for key, kind, n in references if n not in kind]


def _make_scorer(config: Config, problems: list[str]) -> Scorer | None:
    """Return the run's rewards; add their mistakes to `problems` and return None."""
    rollout = config.rollout
    return _attempt(
        partial(Scorer, config.reward, rollout.budget_policy, rollout.max_trajectory_tokens),
        problems,
    )


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


def _programs(plan: Plan) -> list[str]:
    """Return the tools and rewards of the rows that run programs in this machine's sandbox.

    With `tools.url`, the tools use the sandbox of that server, so they are left out.
    """
    names = {name for kind in plan.kinds for name in kind.sample.tools}
    tools = [
        f"the tool {name}"
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
    check_template_fits(plan, template)
    check_rows_fit(plan, template, max_length)


def check_template_fits(plan: Plan, template: ChatTemplate) -> None:
    """Refuse rows that the model's chat template does not support; see `check_model_fits`."""
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
            f" (`agentrl check template {plan.config.model.path} --fix` looks for a small change)"
            + (
                ". The loop react starts its rows with a system message."
                if react
                else ", or for rows with tools the loop react, which shows tools as text."
            )
        )


def check_rows_fit(plan: Plan, template: ChatTemplate, max_length: int) -> None:
    """Refuse prompts that are too long, and calls that no parser reads; see `check_model_fits`."""
    loops = check_prompts(plan, template, max_length)
    check_tool_format(plan, template, loops)
    if loops and not shows_tools(template):
        log.warning(
            "%s with tools, but the chat template of %s does not show them: the policy sees a tool"
            " only if the row's prompt describes it. agent_name=react shows tools as text",
            plural(loops.total(), "row"),
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
            f"{plural(loops.total(), 'row')} with tools, but agentrl cannot parse the tool calls of"
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

    The tokens of the first prompt of each kind are compared with the rendered template, and those
    of all prompts for `MAX_COMPARE_SECONDS` (of a sample of them, if there are very many rows).
    Other prompts are tokenized only if they may be too long.

    Returns:
        The number of rows that show tools, by agent loop.

    Raises:
        TemplateError: the message names the rows and why they cannot be encoded.
        DataError: prompts are too long. The message names the rows and their lengths.
    """
    deadline = time.monotonic() + MAX_COMPARE_SECONDS
    refused: list[str] = []
    too_long: list[str] = []
    compared_rows = 0
    loops: Counter[str] = Counter()
    for path, samples in plan.splits:
        prompts = _Prompts(samples, template)
        loops += prompts.count_rows_with_tools()
        compared_rows += prompts.compare(deadline)
        prompts.measure_long(max_length)
        where = partial(describe_row, samples, path)
        refused += [f"{where(row)}: {error}" for row, error in sorted(prompts.errors.items())]
        too_long += [
            f"{where(row)}: the prompt has {length} tokens"
            for row, length in sorted(prompts.lengths.items())
            if length >= max_length
        ]
    if refused:
        shown = "\n".join(refused[:20])
        raise TemplateError(
            f"{len(refused)} of {plural(compared_rows, 'compared row')} cannot be encoded as the"
            f" chat template of {plan.config.model.path} renders them. The first:\n{shown}\n"
            "Change or remove such rows."
        )
    if too_long:
        shown = "\n".join(too_long[:20])
        raise DataError(
            f"{plural(len(too_long), 'prompt')} too long for the model's context of"
            f" {max_length} tokens:\n{shown}\nShorten or remove such rows."
        )
    return loops


class _Prompts:
    """The lengths of prompts in tokens, by row, and why prompts cannot be encoded."""

    def __init__(self, samples: Sequence[Sample], template: ChatTemplate):
        self.lengths: dict[int, int] = {}
        self.errors: dict[int, str] = {}
        self._samples, self._template = samples, template
        self._toolbox = LocalToolbox()

    def count_rows_with_tools(self) -> Counter[str]:
        """Return the number of rows that show tools, by agent loop."""
        counts: Counter[str] = Counter()
        for kind in find_kinds(self._samples):
            if _opening(kind.sample, self._toolbox)[1]:
                counts[kind.sample.agent_name] += len(kind.rows)
        return counts

    def compare(self, deadline: float) -> int:
        """Compare tokens with the rendered template: the first row of each kind, and more rows.

        Args:
            deadline: the time, by `time.monotonic`, after which no further rows are compared.

        Returns:
            The number of rows that were compared.
        """
        for kind in find_kinds(self._samples):
            self._measure(int(kind.rows[0]), kind.sample, exact=True)
        rows = sample_rows(self._samples)
        numbers = range(len(self._samples)) if rows is None else rows.tolist()
        for row, sample in zip(numbers, draw(self._samples, rows), strict=True):
            if time.monotonic() >= deadline:
                break
            self._measure(row, sample, exact=True)
        return len(self.lengths) + len(self.errors)

    def measure_long(self, max_length: int) -> None:
        """Count the tokens of the prompts that may have `max_length`.

        A text has at most as many tokens as bytes. The template adds as many tokens to each row of
        a kind, and the first row of each kind was measured. Only a loop with an opening of its own
        may add any text to a row, so its rows are read.
        """
        sizes = prompt_bytes(self._samples)
        if self._template.encoder.plain_tokenizer.normalizer:
            sizes = NORMALIZED_GROWTH * sizes
        for kind in find_kinds(self._samples):
            first = int(kind.rows[0])
            added = self.lengths.get(first, max_length)
            loop = registry.agent_loops.get(kind.sample.agent_name)
            rows = kind.rows
            if loop.opening in (plain_opening, react_opening):
                rows = rows[sizes[rows] + added >= max_length]
            for row in rows.tolist():
                self._measure(row, self._samples[row], exact=False)

    def _measure(self, row: int, sample: Sample, *, exact: bool) -> None:
        if row in self.lengths or row in self.errors:
            return
        messages, schemas = _opening(sample, self._toolbox)
        try:
            if exact:
                self.lengths[row] = len(self._template.prompt(messages, schemas))
            else:
                self.lengths[row] = self._template.length(messages, schemas)
        except TemplateError as e:
            self.errors[row] = str(e)


def longest_prompt(plan: Plan, template: ChatTemplate) -> int:
    """Return the tokens of the prompt with the most bytes."""
    sizes = [(sizes, samples) for _, samples in plan.splits if len(sizes := prompt_bytes(samples))]
    sizes, samples = max(sizes, key=lambda split: split[0].max())
    return template.length(*_opening(samples[int(sizes.argmax())], LocalToolbox()))


def longest_response(plan: Plan) -> int:
    """Return the most tokens that follow a prompt: one turn's, if no row can have more turns."""
    r = plan.config.rollout
    has_one_turn = all(
        kind.sample.agent_name == "single_turn"
        or (
            kind.sample.agent_name == "tool_agent"
            and not (kind.sample.tools or kind.sample.interaction)
        )
        for kind in plan.kinds
    )
    if has_one_turn:
        return min(r.max_trajectory_tokens, r.max_turn_tokens)
    return r.max_trajectory_tokens


def encode_prompts(samples: Iterable[Sample], template: ChatTemplate) -> Iterator[array[int]]:
    """Yield the tokens of the prompt of each row."""
    toolbox = LocalToolbox()
    for sample in samples:
        yield template.prompt(*_opening(sample, toolbox), exact=False)


def make_canary_row(plan: Plan, template: ChatTemplate, tokens: int) -> array[int]:
    """Return the canary, the row that engines score after each update: the first prompts, joined.

    The canary consists of the run's prompts because the policy is trained on such tokens.

    Args:
        plan: the run's plan.
        template: renders the prompts.
        tokens: the length of the row, unless the run has too few prompts.
    """
    row = token_array()
    for prompt in encode_prompts(islice(chain(plan.train, plan.val), tokens), template):
        row.extend(prompt)
        if len(row) >= tokens:
            break
    return row[:tokens]


def verify_rows(plan: Plan, template: ChatTemplate) -> list[tuple[str, int, list[Verdict]]]:
    """Verify the template for the shapes of conversation that episodes of these rows may have.

    A loop that shows schemas adds tool messages after a turn with calls. Other loops (react),
    interactions and the user's own loops add user messages.

    Returns:
        For each kind of rows: its loop, the number of rows, and the verdicts.
    """
    counts: Counter[tuple[str, tuple[str, ...], bool, bool]] = Counter()
    first: dict[tuple[str, tuple[str, ...], bool, bool], Sample] = {}
    for kind in plan.kinds:
        sample = kind.sample
        shown = sample.agent_name, sample.tools, bool(sample.interaction), kind.has_system
        counts[shown] += len(kind.rows)
        first.setdefault(shown, sample)
    verdicts, toolbox = [], LocalToolbox()
    for shown, count in counts.most_common(MAX_VERIFIED_KINDS):
        name, tools, has_interaction, _ = shown
        messages, schemas = _opening(first[shown], toolbox)
        shows_system = any(m.role == "system" for m in messages)
        has_user = has_interaction or name not in SHIPPED_LOOPS
        if name == EXTERNAL:
            schemas = [PROBE_TOOL]
        has_tools = bool(tools and schemas) or name == EXTERNAL
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
            verdicts.append((name, count, verify_template(template, schemas, shapes)))
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
        kinds: Counter[tuple[str, tuple[str, ...], str]] = Counter()
        for kind in find_kinds(samples):
            s = kind.sample
            kinds[s.agent_name, s.tools, s.interaction] += len(kind.rows)
        for (agent, tools, interaction), count in sorted(kinds.items()):
            suffix = f", interaction {interaction}" if interaction else ""
            lines.append(f"  {count:6d} x {agent}: tools {', '.join(tools) or 'none'}{suffix}")
    config = plan.config
    interactions = {kind.sample.interaction for kind in plan.kinds}
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
        played = plan.total_steps * config.data.batch_size
        left_out = plan.rows_of_epochs - played
        if config.data.drop_last and not config.trainer.total_steps and left_out > 0:
            never = len(plan.train) - _count_different_rows(plan, played)
            lines.append(
                f"data.drop_last=true leaves out {plural(left_out, 'row')} of"
                f" {plural(config.trainer.total_epochs, 'epoch')}: {plural(never, 'row')}"
                f" {'is' if never == 1 else 'are'} never played"
            )
        lines += _describe_extra_rollouts(config)
    if any(kind.sample.agent_name == EXTERNAL for kind in plan.kinds):
        agent = config.stored_value("agent.command") or config.agent.python
        limit = f"at most {config.agent.slots}" if has_slots(config.agent) else "any number"
        lines.append(
            f"external: each episode is played by {agent} ({limit} at the same time); such a run"
            " cannot be repeated bit for bit"
        )
    return "\n".join(lines)


def _count_different_rows(plan: Plan, played: int) -> int:
    """Return the number of different rows among the first `played` rows of the run."""
    order = row_order(plan.train, plan.config.trainer.seed, plan.config.data.shuffle)
    seen: set[int] = set()
    for position in range(0, played, order.epoch_rows):
        if len(seen) == len(plan.train):
            break
        seen.update(order.take(position, min(order.epoch_rows, played - position)))
    return len(seen)


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
        prompt = template.decode(template.prompt(*_opening(sample, LocalToolbox())))
        lines.append(f"first prompt of {agent} (row {sample.row}):")
        lines += ["  | " + line for line in prompt.splitlines()]
    return "\n".join(lines)


def _opening(sample: Sample, toolbox: LocalToolbox) -> tuple[Sequence[Message], Schemas]:
    """Return the first messages of a row's episodes, and the schemas that the template shows."""
    loop: AgentLoop = registry.agent_loops.get(sample.agent_name)
    with user_code(f"agent loop {loop.name!r}: its opening"):
        return loop.opening(sample, toolbox.schemas(sample.tools))
