"""Check that rows name loops, tools and interactions that exist and fit together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from agentrl import registry
from agentrl.data.dataset import Rows, Source, draw, open_rows, sample_rows
from agentrl.data.rows import COLUMN_NAMES, ColumnNames, Mistakes
from agentrl.signatures import INJECTED_INTO_INTERACTIONS, find_argument_problems, merge_arguments
from agentrl.trajectory import Sample, copy_value

PROMPT_NAMES = ("messages", "question", "problem", "query", "instruction", "input", "conversations")
"""Names of the column of prompts in datasets of other projects."""
Configured = Mapping[str, Mapping[str, Any]]
"""The config's `interaction.kwargs`: the arguments of interactions, by name."""


def check_samples(
    samples: Sequence[Sample], path: str, configured: Configured | None = None
) -> None:
    """Check samples against the registered loops, tools and interactions.

    Args:
        samples: the rows.
        path: the file of the rows, for messages.
        configured: the config's `interaction.kwargs`.

    Raises:
        DataError: a row names an unknown loop, tool or interaction; or its loop cannot use its
            tools or its interaction; or a constructor does not take its arguments; or its prompt
            is empty or already answered. The message has all mistakes.
    """
    mistakes = Mistakes(path)
    _check_all(samples, mistakes, configured or {})
    mistakes.raise_any()


def load_checked(
    source: Source,
    default_agent_name: str = "single_turn",
    configured: Configured | None = None,
    names: ColumnNames = COLUMN_NAMES,
    *,
    are_files_loaded: bool = True,
    tools: str = "row",
) -> Rows:
    """Open a dataset's rows and check them, as `open_rows` and `check_samples` do.

    Of more than `SAMPLED_ABOVE` rows, `check_samples` checks those of `sample_rows`; `open_rows`
    checks the structure of all rows in any case. If the user's files could not be loaded
    (`are_files_loaded`), loops, tools and interactions are not checked: they may be in these files.

    Raises:
        DataError: as `open_rows` and `check_samples` do. The message has all mistakes.
    """

    def check(rows: Rows, mistakes: Mistakes) -> None:
        wrong = mistakes.rows
        wrong |= _check_columns(rows, wrong, mistakes)
        samples = (sample for sample in draw(rows, sample_rows(rows)) if sample.row not in wrong)
        _check_all(samples, mistakes, configured or {}, are_files_loaded)

    return open_rows(source, default_agent_name, names, check, tools)


def _check_columns(rows: Rows, known: set[int], mistakes: Mistakes) -> set[int]:
    """Add a mistake for each file that lacks a column; return the rows without a prompt.

    A file whose first row is wrong already is left out: its column may be misspelled.
    """
    wrong: set[int] = set()
    for _, indices in rows.files:
        if indices[0] in known:
            continue
        of_file = [kind.sample for kind in rows.kinds if kind.rows[0] in indices]
        found = rows.columns(indices[0])
        names, listed = rows.names, f"found: {', '.join(found)}"
        if names.prompt not in found and not any(m.content for s in of_file for m in s.prompt):
            likely = next((name for name in PROMPT_NAMES if name in found), "NAME")
            hint = f"Name the column of the prompts: data.prompt_key={likely}"
            mistakes.add_all(indices, names.prompt, f"no column {names.prompt!r}; {listed}. {hint}")
            wrong.update(indices)
        source = names.data_source
        if source not in ("data_source", *found) and not any(s.data_source for s in of_file):
            mistakes.add_all(indices, source, f"no column {source!r}; {listed}")
    return wrong


def _check_all(
    samples: Iterable[Sample],
    mistakes: Mistakes,
    configured: Configured,
    are_files_loaded: bool = True,
) -> None:
    check_interaction = partial(_check_interaction, configured=configured)
    checks = (_check_prompt, _check_loop, _check_tools, check_interaction)
    if not are_files_loaded:
        checks = (_check_prompt,)
    for sample in samples:
        for check in checks:
            for field, problem in check(sample):
                mistakes.add(sample.row, field, problem)


Problems = Iterator[tuple[str, str]]
"""Pairs of a field and the problem with it."""


def _check_prompt(sample: Sample) -> Problems:
    if not any(m.content.strip() for m in sample.prompt):
        yield "prompt", "is empty"
    elif sample.prompt[-1].role == "assistant":
        yield "prompt", "ends with an assistant message, so there is nothing to answer"


def _check_loop(sample: Sample) -> Problems:
    if sample.agent_name not in registry.agent_loops:
        yield "agent_name", registry.agent_loops.explain_unknown(sample.agent_name)
        return

    def unusable(name: str) -> list[str]:
        loop = registry.agent_loops.get(name)
        uses = {"tools": loop.uses_tools, "interaction": loop.uses_interaction}
        return [field for field, is_used in uses.items() if getattr(sample, field) and not is_used]

    if unused := unusable(sample.agent_name):
        usable = [name for name in registry.agent_loops.names() if not unusable(name)]
        yield (
            "agent_name",
            f"{sample.agent_name!r} cannot use the row's {' and '.join(unused)}. Loops that can:"
            f" {', '.join(usable) or 'none'}. Set one as the row's agent_name, or as"
            " data.agent_name for rows without one",
        )


def _check_tools(sample: Sample) -> Problems:
    counts: Counter[str] = Counter()
    wants_row = False
    column = "environment" if sample.environment else "tools"
    for name in sample.tools:
        if name not in registry.tools:
            yield column, _explain_unknown(column, name)
            continue
        tool = registry.tools.get(name)
        if tool.is_environment != bool(sample.environment):
            kinds = (
                "an environment, not a tool" if tool.is_environment else "a tool, no environment"
            )
            right = "environment" if tool.is_environment else "tools"
            yield column, f"{name!r} is {kinds}. Name it in the column {right!r}"
            continue
        counts.update(function.name for function in tool.functions)
        kwargs = sample.tools_kwargs.get(name, {}).get("create_kwargs", {})
        if tool.is_class:
            cls, injected = tool.target, tool.constructor_injected
            problems = find_argument_problems(cls, kwargs, injected=injected)
            for problem in problems or (cls._problems(kwargs) if tool.is_environment else ()):
                yield f"{column}_kwargs", f"{tool.label}: {problem}"
        elif kwargs:
            yield "tools_kwargs", f"tool {name!r} is a function; only a class takes create_kwargs"
        wants_row = wants_row or tool.spec.wants_row
    for path, value in sample.find_non_json(*([] if wants_row else ["tools_kwargs"])):
        yield (
            path,
            f"is {value!r:.60}, which JSON cannot hold, so it cannot be sent to the row's {column}."
            " Write it as a text, a number or a list, or remove it",
        )
    for function, count in counts.items():
        if count > 1:
            yield "tools", f"several of {list(sample.tools)} define {function!r}. Keep one of them"


def _explain_unknown(column: str, name: str) -> str:
    """Return the problem with a name of the column `tools` or `environment`."""
    if column == "tools":
        return f"{registry.tools.explain_unknown(name)}. {registry.where_to_load(name)}"
    names = sorted(n for n, tool in registry.tools.items() if tool.is_environment)
    return (
        f"no environment named {name!r}.{registry.did_you_mean(name, names)}"
        f" Registered: {', '.join(names) or 'none'}. {registry.where_to_load()}, or name its"
        f' server: environments={{{name}: "openenv://HOST:PORT"}} (docs/doors.md)'
    )


def _check_interaction(sample: Sample, configured: Configured) -> Problems:
    name = sample.interaction
    if not name:
        return
    if name not in registry.interactions:
        yield (
            "interaction",
            f"{registry.interactions.explain_unknown(name)}."
            f" {registry.where_to_load(verls_base='BaseInteraction')}",
        )
        return
    cls = registry.interactions.get(name)
    key, others = f"interaction.kwargs.{name}", configured.get(name, {})
    kwargs, problems = merge_arguments(key, sample.interaction_kwargs, others, cls.config_only)
    problems += find_argument_problems(cls, kwargs, injected=INJECTED_INTO_INTERACTIONS)
    for problem in problems or cls.problems(copy_value(kwargs)):
        yield "interaction_kwargs", f"interaction {name!r}: {problem}"
