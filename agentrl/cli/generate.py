"""`agentrl generate`: sample responses to rows.

Responses are appended to `OUTPUT.partial.jsonl` when they end: a line with the settings, then one
line per row. The same command reads this record and plays only the rows that are not in it. When
all are, it writes the output and removes the record.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from agentrl.cli.options import (
    ConfigFile,
    Files,
    Model,
    Overrides,
    PlayedDataset,
    describe_sampling,
    read_config_to_play,
)
from agentrl.errors import RunStopped, UserError
from agentrl.plural import plural
from agentrl.regular_files import open_lock
from agentrl.terminal import echo

if TYPE_CHECKING:
    from agentrl.config import Config
    from agentrl.data import Rows
    from agentrl.trajectory import Group

PER_ENGINE = 2048
"""The number of rollouts that are started together for each engine."""
SETTINGS = (
    *("data.agent_name", "data.prompt_key", "data.tools", "data.untrusted"),
    *("environments", "files", "interaction.kwargs", "model.path", "model.template_kwargs"),
    *("rollout.budget_policy", "rollout.history_thinking", "rollout.max_tool_calls"),
    *("rollout.max_trajectory_tokens", "rollout.max_turn_tokens", "rollout.max_turns"),
    *("rollout.name", "rollout.tool_format", "tools.max_result_tokens", "tools.truncate"),
    *("trainer.seed", "val.temperature", "val.top_k", "val.top_p"),
)
"""The config keys that must not change between the parts of an output."""


def generate(
    output: Annotated[Path, typer.Option()],
    overrides: Overrides = None,
    dataset: PlayedDataset = None,
    model: Model = None,
    file: Files = None,
    config: ConfigFile = None,
    n: Annotated[int, typer.Option("-n", min=1)] = 1,
) -> None:
    """Write the rows with an added column `responses`: the assistant's text of n episodes.

    The `val` keys set the sampling. A response contains the text of all assistant turns. All
    engines are used (`rollout.engines`, `rollout.urls`). If the command is stopped or killed, the
    same command continues; finished rows are in OUTPUT.partial.jsonl until the end.

    Args:
        output: The file to write, .parquet or .jsonl.
        n: Responses per row.

    Examples:
        agentrl generate --dataset rows.parquet --model tiny --output answers.parquet -n 4

        agentrl generate --dataset rows.parquet --model runs/a --output answers.parquet
        val.temperature=0.7 val.top_k=50 val.top_p=0.9
    """
    if output.suffix not in (".parquet", ".jsonl"):
        raise UserError(f"--output {output} must end in .parquet or .jsonl")
    if output.exists():
        if not _is_complete(output):
            raise UserError(f"--output {output} already exists: choose a new file")
        _record_path(output).unlink()
        echo(f"{output} is complete: the last command was killed after it had written the file")
        return

    from agentrl.cli.session import open_session
    from agentrl.config import file_names
    from agentrl.data import Rows, write_rows
    from agentrl.engine.base import Sampling
    from agentrl.trajectory import Group

    settings = read_config_to_play(config, overrides, dataset, model, file)
    val = settings.val
    sampling = Sampling.of(val)
    with open_session(settings) as (plan, rollouts):
        rows = plan.train
        assert isinstance(rows, Rows)  # `make_plan` reads them from files
        _check_json(output, rows)
        header = {"rows": rows.fingerprint, "n": n, **settings_of(plan.config)}
        with _open_record(output, header) as record:
            texts = record.texts
            echo(
                f"{file_names(settings.data.train)}: {plural(len(rows), 'row')} x {n}"
                f" ({describe_sampling(val)})"
            )
            if texts:
                echo(f"{plural(len(texts), 'row')} are in {_record_path(output)} already")
            engines = max(plan.config.rollout.engines, len(plan.config.rollout.urls))
            size = max(1, PER_ENGINE * engines // n)
            rest = [i for i in range(len(rows)) if i not in texts]
            for start in range(0, len(rest), size):
                samples = [rows[i] for i in rest[start : start + size]]
                groups = rollouts.collect(
                    samples, n=n, sampling=sampling, step=0, tag="val", record=record
                )
                played = {group.sample.row: group for group in groups}
                for sample in samples:
                    if sample.row not in texts:  # Rollouts were dropped.
                        record.add(played.get(sample.row, Group(sample, ())))
            incomplete = sum(len(responses) < n for responses in texts.values())
            write_rows(output, [{**row, "responses": texts[i]} for i, row in enumerate(rows.raw())])
            _record_path(output).unlink()
    echo(f"saved {plural(len(texts), 'row')} with {plural(n, 'response')} each to {output}")
    if incomplete:
        echo(
            f"note: {plural(incomplete, 'row')} of them have fewer responses: the others were"
            " dropped, for the reasons above",
            err=True,
        )


def _check_json(output: Path, rows: Rows) -> None:
    """Raise `UserError`, before anything is played, if the output cannot hold the first row."""
    from agentrl.data.files import dump_json

    try:
        if output.suffix == ".jsonl":
            dump_json(next(rows.raw(), {}))
    except TypeError as e:
        raise UserError(
            f"--output {output}: JSON cannot hold the rows, for example their images ({e}). Use a"
            " .parquet file"
        ) from None


class _Record:
    """The file with the responses so far; a `GroupRecord` of `agentrl.rollout`."""

    groups: Mapping[int, Group] = MappingProxyType({})

    def __init__(self, fd: int, path: Path, texts: dict[int, list[str]]):
        self._fd, self._path = fd, path
        self.texts = texts
        """The responses to each row."""

    def add(self, group: Group) -> None:
        """Add a row's responses.

        Raises:
            RunStopped: the disk is full or refuses to write.
        """
        row, responses = group.sample.row, [s.trajectory.assistant_text for s in group.scored]
        self.write({"row": row, "responses": responses})
        self.texts[row] = responses

    def write(self, line: Mapping[str, Any]) -> None:
        content = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
        try:
            while content:
                content = content[os.write(self._fd, content) :]
        except OSError as e:
            raise RunStopped(
                f"cannot write {self._path}: {e.strerror}. The rows until now are in it; the same"
                " command continues"
            ) from e


def _record_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.partial.jsonl")


def _is_complete(output: Path) -> bool:
    """Return whether an output has all rows of its record.

    The record is removed after the output is written, so a kill may leave both.
    """
    from agentrl.data import read_rows

    try:
        rows = len(_record_path(output).read_bytes().splitlines()) - 1
    except FileNotFoundError:
        return False
    return rows == len(read_rows(output))


def settings_of(config: Config, others: Sequence[str] = ()) -> dict[str, Any]:
    """Return what the responses depend on, as JSON has it; `others` are further config keys."""
    keys = sorted([*SETTINGS, *others])
    return orjson.loads(orjson.dumps({key: config.stored_value(key) for key in keys}, default=str))


@contextmanager
def _open_record(output: Path, header: Mapping[str, Any]) -> Iterator[_Record]:
    """Open the record of an output.

    Raises:
        UserError: the record has other rows or settings, is damaged, or another process writes it.
        RunStopped: it cannot be written.
    """
    path = _record_path(output)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = open_lock(path, os.O_APPEND)
    except OSError as e:
        raise RunStopped(f"cannot write {path}: {e.strerror}") from e
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process writes {path}. Wait until it ends") from None
        content = path.read_bytes()
        whole = content.rpartition(b"\n")[0] + b"\n" if b"\n" in content else b""
        os.ftruncate(fd, len(whole))  # a kill may have cut the last line
        try:
            lines = [orjson.loads(line) for line in whole.splitlines()]
            texts = {int(line["row"]): list(line["responses"]) for line in lines[1:]}
        except (ValueError, KeyError, TypeError) as e:
            raise UserError(f"{path} is damaged ({e}). Delete it to start over") from None
        record = _Record(fd, path, texts)
        if lines:
            check_settings(path, lines[0], header)
        else:
            record.write(header)
        yield record
    finally:
        os.close(fd)


def read_state(file: Path) -> dict[str, Any]:
    """Return the JSON object of a file that a command keeps in its folder.

    Raises:
        UserError: it is no JSON object.
    """
    try:
        state = json.loads(file.read_text())
        assert isinstance(state, dict)
    except (ValueError, AssertionError):
        advice = f"use another folder, or delete {file.parent} to start over"
        raise UserError(f"{file} is damaged, or of another program: {advice}") from None
    return state


def check_settings(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise `UserError` if responses were made with other settings."""
    changed = [
        f"  {key}: {before.get(key)!r} before, {value!r} now"
        for key, value in now.items()
        if before.get(key) != value
    ]
    if changed:
        raise UserError(
            f"{path} has responses that were made with other settings:\n"
            + "\n".join(changed)
            + "\nUse the same settings to continue, or another --output, or delete it to start over"
        )
