"""`agentrl sweep`: a run for each combination of values, and one table.

The trainer is `agentrl train` in a child process, so a run resumes there as it does alone. The runs
are trained one after the other, or as tasks of a Ray cluster.

    runs/sweep/
      sweep.json        the config of each run, and the runs that are finished
      kl=0-seed=1/      the folder of a run
      kl=0-seed=1.log   with --ray: its output
      compare.svg       the picture of `agentrl compare`, with compare.json
"""

from __future__ import annotations

import json
import multiprocessing
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import count, product, repeat
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.cli.generate import read_state
from agentrl.cli.restarts import FORWARDED, run_supervised
from agentrl.errors import AgentRLError, ConfigError, UserError
from agentrl.plural import plural
from agentrl.terminal import echo

STATE = "sweep.json"
KEYS = ("config", "output", "grid", "runs")
SET_BY_SWEEP = "trainer.output"
MAX_CHECKS = 4
"""The most processes that check configs at once."""
MAX_NAME = 120

Run = Mapping[str, Any]
"""The config keys of a run."""


def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.YAML")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    ray: Annotated[str, typer.Option(metavar="ADDRESS")] = "",
) -> None:
    """Train one run for each combination of config values and seeds, and compare them.

    The file has `output`, the folder of the sweep; `config`, a YAML file of config keys; and `grid`
    (lists of values by key: all combinations) or `runs` (a list of mappings), or both: each of
    `runs` with each of `grid`. Runs that differ in trainer.seed alone are one line of the table.

    All configs are checked before the first run starts. The same command continues after a kill:
    finished runs are skipped, and the unfinished one resumes. A run that fails does not stop the
    others; the exit code is then 1.

    Args:
        file: The runs.
        overrides: Config keys of all runs.
        ray: Train at the same time what fits on a Ray cluster, each run with GPUs of its own:
            HOST:PORT, `auto`, or `local` for this machine. Default: one run after the other.

    Examples:
        agentrl sweep recipes/sweeps/kl.yaml

        agentrl sweep recipes/sweeps/tools.yaml trainer.total_steps=20

        agentrl sweep recipes/sweeps/kl.yaml --ray local
    """
    from agentrl.cli.comparison import print_comparison
    from agentrl.config.sources import assignment
    from agentrl.trainer.checkpoint import run_lock

    config, output, runs = read_sweep(file)
    values = [[assignment(key, value) for key, value in run.items()] for run in runs]
    names = [_name_of(of_run) for of_run in values]
    if len(set(names)) < len(names):
        names = [f"{i}-{name}" for i, name in enumerate(names)]
    words = {n: [*(overrides or ()), *v] for n, v in zip(names, values, strict=True)}
    settings = _check_all(config, output, words)
    with run_lock(output):
        finished = _read_state(output / STATE, settings)
        _write_state(output / STATE, settings, finished)
        for name in finished:
            echo(f"{_title(words, name)} is finished")
        failed: list[str] = []
        pending = {name: settings[name] for name in words if name not in finished}
        train = partial(_train, config, output, words, settings)
        ended = ((name, train(name)) for name in pending)
        if ray and pending:
            from agentrl.cluster.runs import train_runs

            echo(f"the output of each run is in {output}/NAME.log")
            ended = train_runs(ray, pending, train, output)
        for name, code in ended:
            if code - 128 in FORWARDED and not ray:  # A signal that stops a run stops the sweep.
                raise typer.Exit(code)
            (failed if code else finished).append(name)
            _write_state(output / STATE, settings, finished)
            if code:
                echo(f"error: the run {name} failed (exit code {code})", err=True)
            elif ray:
                echo(f"{_title(words, name)} is finished")
        if len(finished) > 1:
            # Runs with validation rows of their own have prompts of their own.
            same_prompts = not any("data.val" in run for run in runs)
            folders = [output / name for name in words if name in finished]
            echo("")
            print_comparison(folders, None, output / "compare.svg", same_prompts=same_prompts)
    if failed:
        raise UserError(
            f"{len(failed)} of {plural(len(words), 'run')} failed: {', '.join(failed)}. The same"
            " command tries them again"
        )


# -- the file -------------------------------------------------------------------------------------


def read_sweep(file: Path) -> tuple[Path | None, Path, Sequence[Run]]:
    """Return the base config, the folder and the runs of a sweep.

    Raises:
        ConfigError: the file has mistakes.
    """
    from agentrl.config.sources import read_yaml
    from agentrl.registry import did_you_mean

    mistakes: list[str] = []
    found = {s.path: s for s in read_yaml(str(file), KEYS, mistakes)}
    for path, setting in found.items():
        if path not in KEYS:
            hint = did_you_mean(path.partition(".")[0], KEYS)
            mistakes.append(f"{setting.source}: no key {path!r}.{hint} Keys: {', '.join(KEYS)}")
    values = {path: setting.value for path, setting in found.items()}
    if not mistakes:
        for key in ("config", "output"):
            if not isinstance(values.get(key, ""), str):
                mistakes.append(f"{file}: {key}={values[key]!r} must be a path")
        if not values.get("output"):
            mistakes.append(f"{file}: no output: write `output: runs/NAME`, the sweep's folder")
        mistakes += [f"{file}: {problem}" for problem in _problems(values)]
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    lists = values.get("grid", {})
    cells = [dict(zip(lists, chosen, strict=True)) for chosen in product(*lists.values())]
    runs = [{**run, **cell} for run, cell in product(values.get("runs", [{}]), cells)]
    config = values.get("config")
    return Path(config) if config else None, Path(values["output"]), runs


def _problems(values: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with `grid` and `runs`."""
    grid, runs = values.get("grid", {}), values.get("runs", [{}])
    if not {"grid", "runs"} & values.keys():
        return ["no grid and no runs: write `grid: {trainer.seed: [0, 1, 2]}`"]
    if not isinstance(grid, dict) or ("grid" in values and not grid):
        return [f"grid={grid!r} must map config keys to lists of values"]
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) for run in runs):
        return [f"runs={runs!r:.100} must be a list of mappings of config keys to values"]
    both = [key for key in grid if any(key in run for run in runs)]
    return [f"{key} is set by grid and by runs: leave out one" for key in both] + [
        f"grid.{key}={value!r} must be a list with at least one value"
        for key, value in grid.items()
        if not isinstance(value, list) or not value
    ]


def _name_of(words: Sequence[str]) -> str:
    """Return a name for the folder of a run: the last parts of its keys, with the values.

    It is "base" for a run without values of its own.
    """
    texts = [re.sub(r"^[^=]*[.](?=[^=]*=)", "", word) for word in words]
    return re.sub(r"[^\w.=+-]+", "_", "-".join(texts))[:MAX_NAME] or "base"


# -- the checks -----------------------------------------------------------------------------------


def _check_all(
    config: Path | None, output: Path, words: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Any]]:
    """Return the values of all config keys of each run.

    Each config is checked in a process of its own, because the files of two runs may register the
    same names.

    Raises:
        ConfigError: configs have mistakes, or two runs are the same.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(MAX_CHECKS, context, max_tasks_per_child=1) as processes:
        folders = [output / name for name in words]
        checked = [*processes.map(_check, repeat(config), words.values(), folders)]
    mistakes: dict[str, list[str]] = {}
    settings: dict[str, dict[str, Any]] = {}
    first: dict[str, str] = {}
    for name, (mistake, values) in zip(words, checked, strict=True):
        if not mistake and (other := first.setdefault(repr(values), name)) != name:
            mistake = f"the same run as {other}"
        if mistake:
            mistakes.setdefault(mistake, []).append(name)
        settings[name] = values
    if mistakes:
        lines = [f"{', '.join(names)}: {mistake}" for mistake, names in mistakes.items()]
        raise ConfigError("\n".join(lines))
    return settings


def _check(config: Path | None, words: Sequence[str], folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the mistakes in the config of a run, and the values of all its keys."""
    from agentrl.cli.options import read_config
    from agentrl.config import FIELDS
    from agentrl.preflight import make_plan

    if any(word.startswith(f"{SET_BY_SWEEP}=") for word in words):
        return f"{SET_BY_SWEEP} is set by the sweep: its `output` is the folder of all runs", {}
    try:
        settings = read_config(config, [*words], output=str(folder))
        make_plan(settings)  # the rows, too
    except AgentRLError as e:
        return str(e), {}
    if not settings.data.val:
        return "no validation rows, which a sweep compares: set data.val", {}
    values = {key: settings.stored_value(key) for key in FIELDS if key != SET_BY_SWEEP}
    return "", json.loads(json.dumps(values, default=str))


def _read_state(file: Path, settings: dict[str, dict[str, Any]]) -> list[str]:
    """Return the names of the runs that are finished.

    Raises:
        UserError: the folder has the runs of another sweep; the message says what differs.
    """
    if not file.exists():
        return []
    state = read_state(file)
    before: dict[str, dict[str, Any]] = state.get("runs", {})
    if not any((file.parent / name).exists() for name in before):  # No run has started.
        return []
    changes: list[str] = []
    for name in settings | before:
        old, now = before.get(name), settings.get(name)
        if old is None or now is None:
            changes.append(f"{name}: not there {'before' if old is None else 'now'}")
            continue
        keys = (key for key in now if key in old and old[key] != now[key])
        changes += [f"{key}: {old[key]!r} before, {now[key]!r} now" for key in keys]
    if changes:
        raise UserError(
            f"{file} is from a sweep with other runs:\n  "
            + "\n  ".join(dict.fromkeys(changes))
            + "\nUse the same file to continue, or another `output`"
        )
    return state["finished"]


def _write_state(file: Path, settings: Mapping[str, Any], finished: Sequence[str]) -> None:
    from agentrl.trainer.checkpoint import replace_file

    replace_file(file, json.dumps({"finished": finished, "runs": settings}, indent=1) + "\n")


# -- the runs -------------------------------------------------------------------------------------


def _title(words: Mapping[str, Sequence[str]], name: str) -> str:
    return f"run {[*words].index(name) + 1} of {len(words)}: {name}"


def _train(
    config: Path | None,
    output: Path,
    words: Mapping[str, Sequence[str]],
    settings: Mapping[str, Mapping[str, Any]],
    name: str,
) -> int:
    """Train or resume a run in a child process, and report on it; return its exit code."""
    from agentrl.cli.report import report

    echo(_title(words, name))
    folder, values = output / name, settings[name]
    base = ["--config", str(config)] if config else []
    # `never` would delete what the run has made before a kill.
    resume = ["trainer.resume=auto"] if values["trainer.resume"] == "never" else []
    command = ["train", *base, "--output", str(folder), "--", *words[name], *resume]
    _wait_until_free(folder)
    code = run_supervised(command, folder, values["trainer.max_restarts"])
    if code == 0:
        try:
            report(folder)
        except AgentRLError as e:
            echo(f"warning: no report of {folder}: {e}", err=True)
    return code


def _wait_until_free(folder: Path) -> None:
    """Wait for a run that a killed sweep has left: it saves its state and ends."""
    from agentrl.trainer.checkpoint import run_lock

    for attempt in count():
        try:
            with run_lock(folder):
                return
        except UserError as e:
            if attempt == 0:
                echo(f"waiting: {e}", err=True)
        time.sleep(0.5)
