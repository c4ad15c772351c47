"""Do rows name things that exist and fit together? Asked before a model is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from agentrl import registry
from agentrl.data.rows import Mistakes, load_samples
from agentrl.signatures import INTERACTION_GIVEN, argument_problems, merged_arguments
from agentrl.trajectory import Sample

Configured = Mapping[str, Mapping[str, Any]]
"""Arguments of interactions that the config gives (`interaction.kwargs`), by name."""


def check_samples(
    samples: Sequence[Sample], path: str, configured: Configured | None = None
) -> None:
    """Judge samples against what is registered.

    Args:
        samples: the rows.
        path: where they are from, for messages.
        configured: arguments of interactions that rows need not give.

    Raises:
        DataError: unknown loops, tools or interactions; tools or an interaction that the row's loop
            cannot use; arguments that a tool's or interaction's constructor does not take; prompts
            that nothing can answer. All of them at once.
    """
    mistakes = Mistakes(path)
    _judge(samples, mistakes, configured or {})
    mistakes.raise_any()


def load_checked(
    path: str, default_agent_name: str = "single_turn", configured: Configured | None = None
) -> list[Sample]:
    """`load_samples` and `check_samples` in one: what either finds is said at once.

    Raises:
        DataError: see both.
    """
    return load_samples(path, default_agent_name, partial(_judge, configured=configured or {}))


def _judge(samples: Sequence[Sample], mistakes: Mistakes, configured: Configured) -> None:
    checks = (_prompt, _loop, _tools, partial(_interaction, configured=configured))
    for sample in samples:
        for check in checks:
            for field, what in check(sample):
                mistakes.add(sample.row, field, what)


Found = Iterator[tuple[str, str]]
"""Fields and what is wrong with them."""


def _prompt(sample: Sample) -> Found:
    if not any(m.content.strip() for m in sample.prompt):
        yield "prompt", "is empty"
    elif sample.prompt[-1].role == "assistant":
        yield "prompt", "ends with an assistant message: there is nothing left to answer"


def _loop(sample: Sample) -> Found:
    if sample.agent_name not in registry.agent_loops:
        yield "agent_name", registry.agent_loops.unknown(sample.agent_name)
        return

    def unusable(name: str) -> list[str]:
        loop = registry.agent_loops.get(name)
        uses = {"tools": loop.uses_tools, "interaction": loop.uses_interaction}
        return [field for field, used in uses.items() if getattr(sample, field) and not used]

    if carried := unusable(sample.agent_name):
        able = [name for name in registry.agent_loops.names() if not unusable(name)]
        yield (
            "agent_name",
            f"{sample.agent_name!r} cannot use the row's {' and '.join(carried)}. Loops that can:"
            f" {', '.join(able) or 'none'}. Name one in the row, or for rows that name none in"
            " data.agent_name",
        )


def _tools(sample: Sample) -> Found:
    offered: Counter[str] = Counter()
    for name in sample.tools:
        if name not in registry.tools:
            yield "tools", f"{registry.tools.unknown(name)}. {registry.where_to_load(name)}"
            continue
        tool = registry.tools.get(name)
        offered.update(function.name for function in tool.functions)
        kwargs = sample.tools_kwargs.get(name, {}).get("create_kwargs", {})
        if tool.is_class:
            for problem in argument_problems(tool.target, kwargs, given=tool.made_with):
                yield "tools_kwargs", f"tool {name!r}: {problem}"
        elif kwargs:
            yield "tools_kwargs", f"tool {name!r} is a function: only a class takes create_kwargs"
    for function, count in offered.items():
        if count > 1:
            yield "tools", f"several of {list(sample.tools)} offer {function!r}. Choose one"


def _interaction(sample: Sample, configured: Configured) -> Found:
    name = sample.interaction
    if not name:
        return
    if name not in registry.interactions:
        yield "interaction", registry.interactions.unknown(name) + ". Load its file with --file"
        return
    cls = registry.interactions.get(name)
    kwargs, problems = merged_arguments(
        f"interaction.kwargs.{name}",
        sample.interaction_kwargs,
        configured.get(name, {}),
        cls.config_only,
    )
    problems += argument_problems(cls, kwargs, given=INTERACTION_GIVEN)
    for problem in problems or cls.problems(kwargs):
        yield "interaction_kwargs", f"interaction {name!r}: {problem}"
