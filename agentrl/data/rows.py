"""Convert each row of a file to a `Sample`. One error lists all mistakes in the rows.

Plain rows have their fields at the top level; verl's rows have them in `extra_info` and
`reward_model`. Both forms are accepted, also mixed, but the two must not contradict each other.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import orjson

from agentrl import registry
from agentrl.data.files import Row, read_rows
from agentrl.errors import DataError
from agentrl.trajectory import Message, Role, Sample

log = logging.getLogger("agentrl")

INNER = ("tools_kwargs", "interaction_kwargs", "tool_selection", "need_tools_kwargs")
"""The keys of `extra_info` that are not copied to `Sample.extra`."""
MEDIA = ("images", "videos", "audios")
COLUMNS = (
    *("id", "prompt", "agent_name", "data_source", "ground_truth", "reward_model", "extra_info"),
    *("tools", "tools_kwargs", "interaction", "interaction_kwargs", *MEDIA),
)
"""The known columns. All others are copied to `Sample.extra`."""
CALLS_ARE_TEXT = "write tool calls into the content, as the chat template shows them"
"""The message about `tool_calls`: prompts and examples are text as the model writes it."""
DEFAULT_INTERACTION = "gsm8k"
"""The interaction of verl's rows that do not name one, if a file of the run defines it."""
SHOWN = 20
"""The maximum number of different mistakes in a message."""


class Mistakes:
    """The mistakes in the rows of one file. The same mistake in many rows is listed once."""

    def __init__(self, path: str):
        self.path = path
        self.ignored = 0
        """The number of rows whose `interaction_kwargs` are ignored."""
        self._rows: dict[tuple[str, str], list[int]] = {}

    def add(self, row: int, field: str, what: str) -> None:
        """Add a mistake in `field` of row `row` (counted from 0); `what` is the message."""
        self._rows.setdefault((field, what), []).append(row)

    @property
    def rows(self) -> set[int]:
        """The rows that have mistakes."""
        return {row for rows in self._rows.values() for row in rows}

    def raise_any(self) -> None:
        """Raise an error if there are mistakes.

        Raises:
            DataError: it has the first `SHOWN` different mistakes and the number of the others.
        """
        if not self._rows:
            return
        lines = []
        for (field, what), rows in list(self._rows.items())[:SHOWN]:
            more = f" (and in {len(rows) - 1:,} more rows)" if len(rows) > 1 else ""
            lines.append(f"{self.path}: row {rows[0]}, {field}: {what}{more}")
        hidden = len(self._rows) - len(lines)
        if hidden:
            lines.append(f"and {hidden:,} more different mistakes")
        if len(lines) == 1:
            raise DataError(lines[0])
        wrong = len(self.rows)
        listed = "".join(f"\n  - {line}" for line in lines)
        raise DataError(f"{wrong:,} rows are wrong (rows count from 0):{listed}")


def load_samples(
    path: str,
    default_agent_name: str = "single_turn",
    check: Callable[[Sequence[Sample], Mistakes], None] | None = None,
) -> list[Sample]:
    """Read a dataset's rows.

    Args:
        path: a .parquet or .jsonl file.
        default_agent_name: the loop of rows without `agent_name`.
        check: a function that checks the well-formed rows and adds their mistakes.

    Raises:
        DataError: the file cannot be read, or rows have mistakes. The message has all of them.
    """
    mistakes = Mistakes(path)
    samples = [
        _Reader(row, number, mistakes).sample(default_agent_name)
        for number, row in enumerate(read_rows(path))
    ]
    first: dict[str, int] = {}
    for sample in samples:
        row = first.setdefault(sample.id, sample.row)
        if row != sample.row:
            mistakes.add(sample.row, "id", f"{sample.id!r} is already the id of row {row}")
    if check:
        malformed = mistakes.rows
        check([s for s in samples if s.row not in malformed], mistakes)
    mistakes.raise_any()
    if mistakes.ignored:
        log.warning(
            "%s: interaction_kwargs without a name are ignored, as in verl, because no file of the"
            " run (--file) defines an interaction (rows: %s)",
            path,
            f"{mistakes.ignored:,}",
        )
    return samples


class _Reader:
    """Converts one row. A value that it cannot read becomes a mistake."""

    def __init__(self, row: Row, number: int, mistakes: Mistakes):
        self.number = number
        self.mistakes = mistakes
        self.row = {name: value for name, value in row.items() if value is not None}
        self.extra = self.mapping("extra_info", self.row.get("extra_info"))
        self.refuse_near_misses("", self.row, COLUMNS)
        self.refuse_near_misses("extra_info.", self.extra, INNER)

    def wrong(self, field: str, what: str) -> None:
        self.mistakes.add(self.number, field, what)

    def sample(self, default_agent_name: str) -> Sample:
        for name in MEDIA:
            if self.row.get(name):
                self.wrong(name, "agentrl trains on text only. Remove the column, or the row")
        tools_kwargs = self.mapping("tools_kwargs", self.either("tools_kwargs", "tools_kwargs"))
        for tool, kwargs in tools_kwargs.items():
            self.check_tool_kwargs(tool, kwargs)
        if self.extra.get("need_tools_kwargs") and not tools_kwargs:
            self.wrong("extra_info.need_tools_kwargs", "is true, but there are no tools_kwargs")
        interaction, interaction_kwargs = self.interaction()
        truth = self.mapping("reward_model", self.row.get("reward_model")).get("ground_truth")
        agent_name = self.text("agent_name", default_agent_name)
        return Sample(
            id=self.id(),
            prompt=tuple(self.prompt()),
            agent_name=registry.agent_loops.canonical(agent_name),
            data_source=self.text("data_source", ""),
            ground_truth=self.same("ground_truth", self.row.get("ground_truth"), truth),
            tools=self.tools(tools_kwargs),
            tools_kwargs=tools_kwargs,
            interaction=interaction,
            interaction_kwargs=interaction_kwargs,
            extra={
                **{k: v for k, v in self.row.items() if k not in COLUMNS},
                **{k: v for k, v in self.extra.items() if k not in INNER},
            },
            row=self.number,
        )

    def id(self) -> str:
        """Return the row's id, or its number: verl's `extra_info.index` need not be unique."""
        own = self.row.get("id", self.number)
        if not isinstance(own, str | int):
            self.wrong("id", f"must be a string or an integer, not {own!r}")
        return str(own)

    def prompt(self) -> Iterable[Message]:
        prompt = self.row.get("prompt", "")
        if isinstance(prompt, str):
            yield Message("user", prompt)
        elif isinstance(prompt, list):
            for i, message in enumerate(prompt):
                yield self.message(f"prompt[{i}]", message)
        else:
            self.wrong("prompt", f"must be a string or a list of messages, not {prompt!r:.60}")

    def message(self, field: str, message: Any) -> Message:
        if not isinstance(message, dict):
            self.wrong(field, f'must be {{"role": ..., "content": ...}}, not {message!r:.60}')
            return Message("user", "")
        role: Any = message.get("role")
        content = message.get("content")
        if role not in get_args(Role):
            self.wrong(field, f"role {role!r} must be one of {', '.join(get_args(Role))}")
            role = "user"
        if message.get("tool_calls"):
            self.wrong(field, CALLS_ARE_TEXT)
        if isinstance(content, list) and all(isinstance(p, dict) for p in content):
            if any(part.get("type") != "text" for part in content):
                self.wrong(field, "agentrl trains on text only, but a part is not text")
            content = "".join(str(part.get("text") or "") for part in content)
        if not isinstance(content, str):
            self.wrong(field, f"content must be a string, not {content!r:.60}")
            content = ""
        return Message(role, content)

    def tools(self, tools_kwargs: Row) -> tuple[str, ...]:
        names = self.either("tools", "tool_selection")
        if names is None:
            return tuple(tools_kwargs)
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            self.wrong("tools", f"must be a list of strings, not {names!r:.60}")
            return ()
        if len(set(names)) < len(names):
            self.wrong("tools", f"{names} has a name twice")
        for name in tools_kwargs:
            if name not in names:
                self.wrong("tools_kwargs", f"{name!r} is not one of the row's tools {names}")
        return tuple(names)

    def check_tool_kwargs(self, tool: str, kwargs: Any) -> None:
        inner = kwargs.get("create_kwargs", {}) if isinstance(kwargs, dict) else None
        others = ("execute_kwargs", "calc_reward_kwargs", "release_kwargs")
        if not isinstance(inner, dict) or any(k not in ("create_kwargs", *others) for k in kwargs):
            self.wrong(
                "tools_kwargs",
                f'{tool!r} must map to {{"create_kwargs": {{...}}}}, the arguments of its'
                f" constructor, not {kwargs!r:.60}",
            )
        elif any(kwargs.get(k) for k in others):
            self.wrong("tools_kwargs", f"{tool!r}: only create_kwargs are used. Remove the others")

    def interaction(self) -> tuple[str, Row]:
        own = self.mapping("interaction_kwargs", self.row.get("interaction_kwargs"))
        verl = self.mapping("extra_info.interaction_kwargs", self.extra.get("interaction_kwargs"))
        kwargs = dict(self.same("interaction_kwargs", own or None, verl or None) or {})
        name = self.same("interaction", self.row.get("interaction"), kwargs.pop("name", None))
        if name is None and own:
            self.wrong("interaction", "is missing, but there are interaction_kwargs")
        elif name is None and verl:
            name = self.unnamed_interaction()
            if name is None:
                kwargs = {}
        if name is not None and not isinstance(name, str):
            self.wrong("interaction", f"must be a string, not {name!r:.60}")
        return str(name or ""), kwargs

    def unnamed_interaction(self) -> str | None:
        """Return the interaction of a verl row that names no interaction; None for no interaction.

        verl's preprocessing scripts write the arguments of an interaction also for runs without
        one. verl ignores them unless the run configures interactions. agentrl ignores them unless a
        file of the run defines an interaction.
        """
        defined = registry.interactions.user_names()
        if defined and DEFAULT_INTERACTION not in defined:
            self.wrong(
                "extra_info.interaction_kwargs",
                f"has no name, and the files of the run define {', '.join(defined)}. Add one of"
                " these as its name",
            )
        if DEFAULT_INTERACTION in defined:
            return DEFAULT_INTERACTION
        self.mistakes.ignored += not defined
        return None

    # -- fields in general ------------------------------------------------------------------------

    def text(self, field: str, default: str) -> str:
        value = self.row.get(field, default)
        if not isinstance(value, str):
            self.wrong(field, f"must be a string, not {value!r:.60}")
        return str(value)

    def mapping(self, field: str, value: Any) -> Row:
        """Return a value as a mapping; parse it if it is JSON text."""
        if value is None:
            return {}
        if isinstance(value, str):
            try:
                value = orjson.loads(value)
            except orjson.JSONDecodeError as e:
                self.wrong(field, f"is neither a mapping nor JSON ({e.msg}): {value!r:.60}")
                return {}
        if not isinstance(value, dict):
            self.wrong(field, f"must be a mapping, not {value!r:.60}")
            return {}
        return value

    def either(self, plain: str, verl: str) -> Any:
        """Return a field from the row or, with verl's name, from `extra_info`."""
        return self.same(plain, self.row.get(plain), self.extra.get(verl))

    def same(self, field: str, plain: Any, verl: Any) -> Any:
        """Return the value that is not None; add a mistake if both are set and differ."""
        if plain is not None and verl is not None and plain != verl:
            self.wrong(field, f"has two values: {plain!r:.60} and, in verl's place, {verl!r:.60}")
        return verl if plain is None else plain

    def refuse_near_misses(self, prefix: str, row: Row, known: Iterable[str]) -> None:
        """Add a mistake for each misspelled column: it would become a field of `Sample.extra`."""
        for name in row:
            if name not in known:
                for meant in difflib.get_close_matches(name, known, n=1, cutoff=0.85):
                    self.wrong(f"{prefix}{name}", f"did you mean {meant!r}? Rename the column")
