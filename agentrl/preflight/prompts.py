"""Check that the chat template and the context of a model fit the rows of a run."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from textwrap import indent

from agentrl import registry
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
from agentrl.chat.images import images_of, require_rule, without_images
from agentrl.chat.turn_delta import PROBE_TOOL
from agentrl.chat.verify_template import (
    CALLS_ALONE,
    SHAPES,
    Verdict,
    format_verdicts,
    verify_template,
)
from agentrl.data import (
    describe_row,
    draw,
    find_kinds,
    prompt_bytes,
    sample_rows,
)
from agentrl.engine.checks import check_image_servers
from agentrl.errors import ConfigError, DataError, TemplateError, user_code
from agentrl.images import FAMILIES, Image, ImageError
from agentrl.plural import plural
from agentrl.preflight.plan import Plan
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Message, Sample, token_array

log = logging.getLogger("agentrl")


SHIPPED_LOOPS = ("single_turn", "tool_agent", "react")
"""The shipped loops. They add no user messages, except for react, whose tool results are user
messages. A loop of the user may add user messages."""
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
    refuse_images(plan, template)
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
            if opening_of(kind.sample, self._toolbox)[1]:
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
            has_images = any(m.images for m in kind.sample.prompt)  # An image has many tokens.
            if not has_images and loop.opening in (plain_opening, react_opening):
                rows = rows[sizes[rows] + added >= max_length]
            for row in rows.tolist():
                self._measure(row, self._samples[row], exact=False)

    def _measure(self, row: int, sample: Sample, *, exact: bool) -> None:
        if row in self.lengths or row in self.errors:
            return
        messages, schemas = opening_of(sample, self._toolbox)
        try:
            if exact:
                if images := images_of(messages):
                    asyncio.run(_decode(self._template, images))
                self.lengths[row] = len(self._template.prompt(messages, schemas))
            else:
                self.lengths[row] = self._template.length(messages, schemas)
        except (TemplateError, ImageError) as e:
            self.errors[row] = str(e)


async def _decode(template: ChatTemplate, images: Sequence[Image]) -> None:
    for image in images:
        await require_rule(template.images).prepare(image)


def refuse_images(plan: Plan, template: ChatTemplate) -> None:
    """Refuse rows with images if the model reads none, and servers that cannot run one that does.

    Raises:
        ConfigError: the message says how many rows these are, and which models read images; or
            which value of `rollout` is not supported.
    """
    if template.images:
        return check_image_servers(plan.config)
    kinds = [kind for _, samples in plan.splits for kind in find_kinds(samples)]
    with_images = [k for k in kinds if any(m.images for m in k.sample.prompt)]
    if with_images:
        raise ConfigError(
            f"{plural(sum(len(kind.rows) for kind in with_images), 'row')} with images, but"
            f" agentrl gives {plan.config.model.path} text alone. It trains these models on images:"
            f" {', '.join(FAMILIES)} (the model_type in config.json). Use one of them, or remove"
            " the rows"
        )


def longest_prompt(plan: Plan, template: ChatTemplate) -> tuple[int, int]:
    """Return the tokens of the prompt with the most bytes, and how many of them are of images."""
    sizes = [(sizes, samples) for _, samples in plan.splits if len(sizes := prompt_bytes(samples))]
    sizes, samples = max(sizes, key=lambda split: split[0].max())
    messages, schemas = opening_of(samples[int(sizes.argmax())], LocalToolbox())
    image_tokens = sum(map(template.images.tokens, images_of(messages))) if template.images else 0
    return template.length(messages, schemas), image_tokens


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
    """Yield the tokens of the prompt of each row, without its images."""
    toolbox = LocalToolbox()
    for sample in samples:
        messages, schemas = opening_of(sample, toolbox)
        yield template.prompt([*map(without_images, messages)], schemas, exact=False)


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
        messages, schemas = opening_of(first[shown], toolbox)
        shows_system = any(m.role == "system" for m in messages)
        has_user = has_interaction or name not in SHIPPED_LOOPS
        is_agent = not registry.agent_loops.get(name).awaited
        if is_agent:
            schemas = [PROBE_TOOL]
        has_tools = bool(tools and schemas) or is_agent
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


def opening_of(sample: Sample, toolbox: LocalToolbox) -> tuple[Sequence[Message], Schemas]:
    """Return the first messages of a row's episodes, and the schemas that the template shows."""
    loop: AgentLoop = registry.agent_loops.get(sample.agent_name)
    with user_code(f"agent loop {loop.name!r}: its opening"):
        return loop.opening(sample, toolbox.schemas(sample.tools))
