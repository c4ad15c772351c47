"""Convert each row of a file to a `Sample`. One error lists all mistakes in the rows.

Plain rows have their fields at the top level; verl's rows have them in `extra_info` and
`reward_model`. Both forms are accepted, also mixed, but the two must not contradict each other.
"""

from __future__ import annotations

import difflib
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

from agentrl import registry
from agentrl.data.files import Row, load_json
from agentrl.data.images import RowImages
from agentrl.errors import DataError
from agentrl.images import Image
from agentrl.plural import plural
from agentrl.trajectory import Message, Role, Sample, join_parts

INNER = ("tools_kwargs", "interaction_kwargs", "tool_selection", "need_tools_kwargs")
"""The keys of `extra_info` that are not copied to `Sample.extra`."""
REFUSED_MEDIA = ("videos", "audios")
COLUMNS = (
    *("id", "prompt", "agent_name", "data_source", "ground_truth", "reward_model", "extra_info"),
    *("tools", "tools_kwargs", "interaction", "interaction_kwargs"),
    *("environment", "environment_kwargs", "images", *REFUSED_MEDIA),
)
"""The known columns. All others are copied to `Sample.extra`."""
CALLS_ARE_TEXT = "write tool calls into the content, as the chat template shows them"
"""The message about `tool_calls`: prompts and examples are text as the model writes it."""
DEFAULT_INTERACTION = "gsm8k"
"""The interaction of verl's rows that do not name one, if a file of the run defines it."""
REPLACED_BY_ENVIRONMENT = ("tools", "tools_kwargs", "interaction", "interaction_kwargs")
"""The columns that a row with an environment cannot have."""
INNER_REPLACED = ("tool_selection", "tools_kwargs", "interaction_kwargs")
"""Those in verl's column `extra_info`."""
SHOWN = 20
"""The maximum number of different mistakes in a message."""
ROLES: tuple[str, ...] = get_args(Role)
TOOL_KEYS = ("tool_call_id", "name")
"""The keys of a tool message that name the call that it answers."""
FALSE_KEYS = ("weight", "train", "prefix")
"""The keys of a message that are accepted if they are 0 or false, as a prompt is not trained."""


@dataclass(frozen=True, slots=True)
class ColumnNames:
    """The columns of the files that have their own names: `data.prompt_key`, `reward_fn_key`."""

    prompt: str = "prompt"
    data_source: str = "data_source"


COLUMN_NAMES = ColumnNames()


class Origins:
    """Finds the file of a row by its index, which counts the rows of all files from 0."""

    def __init__(self, *paths: str):
        self._paths = list(paths)
        self._starts = [0] * len(paths)

    def append(self, path: str, start: int) -> None:
        """Add a file whose first row is row `start`."""
        self._paths.append(path)
        self._starts.append(start)

    @property
    def start(self) -> int:
        """The first row of the last file."""
        return self._starts[-1]

    def find(self, row: int) -> tuple[str, int]:
        """Return the file of a row, and the row's number in it, from 0."""
        i = bisect_right(self._starts, row) - 1
        return self._paths[i], row - self._starts[i]

    def describe(self, row: int) -> str:
        """Return `a.jsonl: row 3`."""
        path, number = self.find(row)
        return f"{path}: row {number}"


class Mistakes:
    """The mistakes in rows. The same mistake in many rows is listed once."""

    def __init__(self, path: str = ""):
        """Start without mistakes.

        Args:
            path: the file of the rows; "": `origins` gets all files.
        """
        self.origins = Origins(*([path] if path else []))
        self._rows: dict[tuple[str, str], list[int]] = {}

    def add(self, row: int, field: str, what: str) -> None:
        """Add a mistake in `field` of row `row` (counted from 0); `what` is the message."""
        self._rows.setdefault((field, what), []).append(row)

    def add_all(self, rows: Iterable[int], field: str, what: str) -> None:
        """Add the same mistake in several rows."""
        self._rows.setdefault((field, what), []).extend(rows)

    def merge(self, other: Mistakes) -> None:
        """Add the mistakes of another list about the same files."""
        for mistake, rows in other._rows.items():
            self._rows.setdefault(mistake, []).extend(rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> set[int]:
        """The rows that have mistakes. Each call computes the set again."""
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
            more = f" (and in {plural(len(rows) - 1, 'more row')})" if len(rows) > 1 else ""
            lines.append(f"{self.origins.describe(rows[0])}, {field}: {what}{more}")
        hidden = len(self._rows) - len(lines)
        if hidden:
            lines.append(f"and {plural(hidden, 'more different mistake')}")
        if len(lines) == 1:
            raise DataError(lines[0])
        listed = "".join(f"\n  - {line}" for line in lines)
        are = "is" if len(self.rows) == 1 else "are"
        wrong = f"{plural(len(self.rows), 'row')} {are} wrong (rows count from 0)"
        raise DataError(f"{wrong}:{listed}")


class RowReader:
    """Converts rows to samples. A value that it cannot read becomes a mistake."""

    def __init__(
        self,
        mistakes: Mistakes,
        names: ColumnNames = COLUMN_NAMES,
        agent_name: str = "single_turn",
        unnamed_interaction: str | None = None,
        default_tools: Callable[[str], Sequence[str]] = lambda agent_name: (),
    ):
        """Prepare for rows of the same kind of file.

        Args:
            mistakes: gets the mistakes.
            names: the names of columns.
            agent_name: the loop of rows without one.
            unnamed_interaction: the interaction of verl's rows whose `interaction_kwargs` have no
                name; None: they have no interaction (`find_unnamed_interaction`).
            default_tools: returns the tools that rows of a loop have if they do not name theirs.
        """
        self._mistakes = mistakes
        self._names = names
        self._agent_name = agent_name
        self._unnamed_interaction = unnamed_interaction
        self._default_tools = default_tools
        self.columns = tuple(
            {"prompt": names.prompt, "data_source": names.data_source}.get(name, name)
            for name in COLUMNS
        )
        """The columns that are not copied to `Sample.extra`."""
        self._known = frozenset(self.columns)
        self.folder: Path | None = None
        """The folder of the file that is read, in which the paths of images begin."""
        self.raises = False
        """True: an image that cannot be read raises `DataError`. False: it is added to the
        mistakes."""
        self.number = 0
        """The number of the row that is read, for messages."""
        self.row: Row = {}
        self.extra: Row = {}

    def wrong(self, field: str, what: str) -> None:
        self._mistakes.add(self.number, field, what)

    def read(self, row: Row, number: int) -> Sample:
        """Return the sample of a row.

        Args:
            row: the row, as `read_rows` returns it.
            number: the number of the row, from 0.
        """
        self.number = number
        self.row = row = {name: value for name, value in row.items() if value is not None}
        self.extra = extra = self.mapping("extra_info", row.get("extra_info"))
        known = self._known
        rest = {k: v for k, v in row.items() if k not in known}
        self.refuse_near_misses("", rest, self.columns)
        inner = {k: v for k, v in extra.items() if k not in INNER}
        self.refuse_near_misses("extra_info.", inner, INNER)
        for name in REFUSED_MEDIA:
            if row.get(name):
                self.wrong(
                    name, "agentrl trains on texts and images only. Remove the column, or the row"
                )
        tools_kwargs = self.mapping("tools_kwargs", self.either("tools_kwargs", "tools_kwargs"))
        for tool, kwargs in tools_kwargs.items():
            self.check_tool_kwargs(tool, kwargs)
        if extra.get("need_tools_kwargs") and not tools_kwargs:
            self.wrong(
                "extra_info.need_tools_kwargs",
                "is true, but there are no tools_kwargs. Add them, or set it to false",
            )
        interaction, interaction_kwargs = self.interaction()
        environment = self.environment(tools_kwargs)
        truth = self.mapping("reward_model", row.get("reward_model")).get("ground_truth")
        needs_loop = environment and self._agent_name == "single_turn"
        agent_name = self.text("agent_name", "tool_agent" if needs_loop else self._agent_name)
        rest.update(inner)
        if not row.get(self._names.prompt):  # They belong to a conversation in another column.
            rest |= {"images": row["images"]} if "images" in row else {}
        return Sample(
            id=self.id(),
            prompt=self.prompt(),
            agent_name=registry.agent_loops.canonical(agent_name),
            data_source=self.text(self._names.data_source, ""),
            ground_truth=self.same("ground_truth", row.get("ground_truth"), truth),
            tools=(environment,) if environment else self.tools(tools_kwargs, agent_name),
            tools_kwargs=tools_kwargs,
            interaction=interaction,
            interaction_kwargs=interaction_kwargs,
            environment=environment,
            extra=rest,
            row=number,
        )

    def id(self) -> str:
        """Return the row's id, or its number: verl's `extra_info.index` need not be unique."""
        own = self.row.get("id", self.number)
        if not isinstance(own, str | int):
            self.wrong("id", f"must be a string or an integer, not {own!r}")
        return str(own)

    def prompt(self) -> tuple[Message, ...]:
        field = self._names.prompt
        prompt = self.row.get(field, "")
        column = self.row.get("images") if prompt else None
        images = RowImages(column, self.folder, self.wrong_image)
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, list):
            self.wrong(field, f"must be a string or a list of messages, not {prompt!r:.60}")
            return ()
        messages = [self.message(field, i, message, images) for i, message in enumerate(prompt)]
        images.check()
        return tuple(messages)

    def message(self, prompt: str, i: int, message: Any, images: RowImages) -> Message:
        problems: list[str] = []
        read = read_message(message, problems, images=images, field=f"{prompt}[{i}]")
        for problem in problems:
            self.wrong(f"{prompt}[{i}]", problem)
        return read

    def wrong_image(self, field: str, what: str) -> None:
        if self.raises:
            raise DataError(f"row {self.number}, {field}: {what}")
        self.wrong(field, what)

    def tools(self, tools_kwargs: Row, agent_name: str) -> tuple[str, ...]:
        names = self.either("tools", "tool_selection")
        if names is None:
            return tuple(dict.fromkeys([*self._default_tools(agent_name), *tools_kwargs]))
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
            self.wrong(
                "interaction",
                "is missing, but there are interaction_kwargs. Name one, or remove them",
            )
        elif name is None and verl:
            name = self._unnamed_interaction
            if name is None:
                kwargs = {}
        if name is not None and not isinstance(name, str):
            self.wrong("interaction", f"must be a string, not {name!r:.60}")
        return str(name or ""), kwargs

    def environment(self, tools_kwargs: Row) -> str:
        """Return the name of the row's environment; add its arguments to `tools_kwargs`."""
        name = self.text("environment", "")
        kwargs = self.mapping("environment_kwargs", self.row.get("environment_kwargs"))
        if not name:
            if kwargs:
                self.wrong(
                    "environment",
                    "is missing, but there are environment_kwargs. Name one, or remove them",
                )
            return ""
        others = [field for field in REPLACED_BY_ENVIRONMENT if self.row.get(field)]
        others += [f"extra_info.{field}" for field in INNER_REPLACED if self.extra.get(field)]
        if others:
            self.wrong(
                "environment",
                f"{name!r} brings its own tools and replies, so the row cannot also have"
                f" {' and '.join(others)}. Remove them, or the environment",
            )
        tools_kwargs.clear()
        if kwargs:
            tools_kwargs[name] = {"create_kwargs": kwargs}
        return name

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
                value = load_json(value.encode(errors="surrogatepass"))
            except ValueError as e:
                problem = str(e).replace("is not JSON", "is neither a mapping nor JSON")
                self.wrong(field, f"{problem}: {value!r:.60}")
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
            self.wrong(
                field,
                f"has two values: {plain!r:.60} and, in verl's column, {verl!r:.60}. Remove one",
            )
        return verl if plain is None else plain

    def refuse_near_misses(self, prefix: str, row: Row, known: tuple[str, ...]) -> None:
        """Add a mistake for each misspelled column: it would become a field of `Sample.extra`."""
        for name in row:
            if meant := near_miss(name, known):
                self.wrong(f"{prefix}{name}", f"did you mean {meant!r}? Rename the column")


@lru_cache(10_000)
def near_miss(name: str, known: tuple[str, ...]) -> str:
    """Return the known column that an unknown name resembles, or ""."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    return close[0] if close and name not in COLUMNS else ""


def tools_of_files(agent_name: str) -> Sequence[str]:
    """Return all registered tools, or none if the loop does not use tools (`data.tools=all`).

    Environments are not among them: a row has only one.
    """
    loops = registry.agent_loops
    uses_tools = agent_name in loops and loops.get(agent_name).uses_tools
    every = registry.tools.items() if uses_tools else []
    return [name for name, tool in every if not tool.is_environment]


def read_message(
    message: Any,
    problems: list[str],
    other_keys: Collection[str] = (),
    images: RowImages | None = None,
    field: str = "",
) -> Message:
    """Return a message of a row.

    Args:
        message: the message, as the row has it.
        problems: gets a text for each part of the message that `Message` cannot hold.
        other_keys: the keys that the caller reads.
        images: the images of the row; None: it has none.
        field: the message in the row, for mistakes in its images.
    """
    if not isinstance(message, dict):
        problems.append(f'must be {{"role": ..., "content": ...}}, not {message!r:.60}')
        return Message("user", "")
    role: Any = message.get("role")
    content = message.get("content")
    if role not in ROLES:
        problems.append(f"role {role!r} must be one of {', '.join(ROLES)}")
        role = "user"
    for key, value in message.items():
        # Parquet gives all messages of a column the same keys.
        if key in ("role", "content", *other_keys) or value in (None, "", [], {}):
            continue
        if (key in TOOL_KEYS and role == "tool" and isinstance(value, str)) or (
            key in FALSE_KEYS and not value
        ):
            continue
        problems.append(
            CALLS_ARE_TEXT
            if key in ("tool_calls", "function_call")
            else f"the key {key!r} is not read. Write what the model reads or writes into the"
            f" content, as the chat template shows it, and remove {key!r}: {value!r:.60}"
        )
    parts = images and images.split(field, message)
    found: tuple[Image, ...] = ()
    if parts is not None:
        content, found = join_parts(parts)
    elif isinstance(content, list):
        texts = [_read_text_part(part) for part in content]
        if None in texts:
            problems.append("a part is neither text nor an image that agentrl reads")
        content = "".join(text or "" for text in texts)
    if not isinstance(content, str):
        problems.append(f"content must be a string, not {content!r:.60}")
        content = ""
    call_id = message.get("tool_call_id") if role == "tool" else ""
    return Message(
        role, content, tool_call_id=call_id if isinstance(call_id, str) else "", images=found
    )


def _read_text_part(part: Any) -> str | None:
    """Return the text of a part `{"type": "text", "text": ...}`; None if it has anything else."""
    match {k: v for k, v in part.items() if v is not None} if isinstance(part, dict) else part:
        case {"type": "text", "text": str(text), **others} if not others:
            return text
    return None


def find_unnamed_interaction() -> tuple[str | None, str]:
    """Return the interaction of verl's rows that name no interaction, and why they are refused.

    verl's preprocessing scripts write the arguments of an interaction also for runs without one.
    verl ignores them unless the run configures interactions. agentrl ignores them unless a file of
    the run defines an interaction.

    Returns:
        The interaction, or None if the arguments are ignored; and a mistake of such rows, or "".
    """
    defined = registry.interactions.user_names()
    if not defined or DEFAULT_INTERACTION in defined:
        return DEFAULT_INTERACTION if defined else None, ""
    return None, (
        f"has no name, and the files of the run define {', '.join(defined)}. Add one of these as"
        " its name"
    )
