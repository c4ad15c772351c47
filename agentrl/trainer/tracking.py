"""Writes the metrics of a run: always to `metrics.jsonl`, and to trackers if configured.

Trackers are optional; if one fails, training continues.
"""

from __future__ import annotations

import importlib.util
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import orjson

from agentrl.config.sections import TRACKERS, other_trackers
from agentrl.engine.local.load import without_launcher_variables
from agentrl.errors import ConfigError, RunStopped
from agentrl.installation import install_command
from agentrl.record import METRICS, metric_lines, read_metrics
from agentrl.registry import did_you_mean
from agentrl.regular_files import atomic_file
from agentrl.terminal import echo
from agentrl.trainer.resume import flatten_config
from agentrl.trainer.traces import (
    MAX_TRACES,
    as_message,
    operations,
    reply_messages,
    summary,
    times,
)
from agentrl.trajectory import Scored

EARLY_STOP = "training/early_stop"
"""The metric: 1 in the last step of a run that `trainer.patience` ended."""
Data = Mapping[str, float]


class Tracker:
    """Writes one line per step, and passes the metrics to trackers."""

    def __init__(
        self,
        folder: Path,
        loggers: Sequence[str] = (),
        *,
        config: Mapping[str, Any] | None = None,
        resumed_step: int = -1,
        warn: Callable[[str], None] = partial(echo, err=True),
    ):
        """Open the record of a run.

        Args:
            folder: the run's folder.
            loggers: names of trackers (`trainer.logger`).
            config: the config that trackers show. They take the names of project and run, and the
                tags, from its section `trainer`.
            resumed_step: the step of the checkpoint that the run resumes from; later lines are
                removed. A fresh run removes all.
            warn: called once for each tracker that fails.

        Raises:
            ConfigError: a logger is unknown or not installed.
            RunStopped: the folder cannot be written.
        """
        check_loggers(loggers)
        self._path = folder / METRICS
        self._warn = warn
        self._last = resumed_step
        try:
            folder.mkdir(parents=True, exist_ok=True)
            is_rewound = _truncate_after(self._path, resumed_step)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as e:
            raise RunStopped(f"cannot write {self._path}: {e.strerror}") from e
        self._sinks: dict[str, Sink] = {}
        for name in loggers:
            with self._disable_on_error(name):
                arguments = folder, config or {}, resumed_step
                if name in TRACKERS:
                    self._sinks[name] = _AccelerateSink(name, *arguments, is_rewound)
                else:
                    self._sinks[name] = other_trackers()[name].load()(*arguments)

    def log(self, step: int, data: Data) -> None:
        """Record a step: once, in order, and before its checkpoint is published.

        Args:
            step: the number of the step, larger than that of the last record.
            data: all numbers of the step and of its validation. NaN and infinity become null in the
                file.

        Raises:
            RunStopped: the file cannot be written, for example because the disk is full.
        """
        if step <= self._last:
            raise ValueError(f"step {step} was logged after step {self._last}")
        self._last = step
        line = orjson.dumps(
            {"step": step, "data": dict(data)},
            default=float,
            option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE,
        )
        try:
            while line:
                line = line[os.write(self._fd, line) :]
            os.fsync(self._fd)
        except OSError as e:
            raise RunStopped(f"cannot write {self._path}: {e.strerror}") from e
        for name, sink in list(self._sinks.items()):
            with self._disable_on_error(name):
                sink.log(step, data)

    def trace(self, step: int, episodes: Sequence[Scored]) -> None:
        """Pass some episodes of a step to the trackers that show them, at most `MAX_TRACES`."""
        for name, sink in list(self._sinks.items()):
            if isinstance(sink, TraceSink) and episodes:
                with self._disable_on_error(name):
                    sink.trace(step, episodes[:MAX_TRACES])

    def close(self) -> None:
        """Flush and close everything. Closing twice does nothing."""
        for name, sink in list(self._sinks.items()):
            with self._disable_on_error(name):
                sink.close()
        self._sinks = {}
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @contextmanager
    def _disable_on_error(self, name: str) -> Iterator[None]:
        """Warn if a tracker fails in the block, and stop using it."""
        try:
            yield
        except Exception as e:
            self._sinks.pop(name, None)
            self._warn(
                f"{name} failed and gets no more metrics ({type(e).__name__}: {e});"
                f" {self._path} has them all"
            )


def check_loggers(names: Sequence[str]) -> None:
    """Check that the trackers exist and are installed, before anything is loaded.

    Raises:
        ConfigError: the message lists the choices, or the command that installs a tracker.
    """
    for name in names:
        if name not in TRACKERS:
            others = other_trackers()
            if name in others:
                continue
            choices = [*TRACKERS, *others]
            raise ConfigError(
                f"trainer.logger: no tracker named {name!r}.{did_you_mean(name, choices)}"
                f" Choices: {', '.join(choices)} ({METRICS} is always written)"
            )
        spec = importlib.util.find_spec(name)
        # A spec without origin is a plain folder: wandb creates a folder named wandb where it runs.
        if spec is None or spec.origin is None:
            command = install_command(name)
            raise ConfigError(f"trainer.logger: {name} is not installed: {command}")


class Best:
    """Finds the best validation of a run, and ends a run that no longer improves.

    Its state is computed from `metrics.jsonl`, from which a resumed run removes later steps.
    """

    def __init__(self, metric: str, patience: int, n: int):
        """Start with an empty record.

        Args:
            metric: `trainer.keep_best`. Larger is better.
            patience: `trainer.patience`.
            n: `val.n`, which is in the name of the metric that patience has by default.
        """
        self._keep, self._patience = metric, patience
        self._metric = metric or (f"val/reward/mean@{n}" if patience else "")
        self._values: dict[int, float] = {}
        self._since = 0
        """The number of validations since the best one."""

    @property
    def is_over(self) -> bool:
        """True if the run ends because the metric has not improved."""
        return bool(self._patience) and self._since >= self._patience

    def add(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Count a step of the record; a step without the metric was not validated.

        Returns:
            Whether the step has a new highest value of `trainer.keep_best`.
        """
        value = metrics.get(self._metric)
        if value is None or value != value:
            return False
        is_best = all(value > other for other in self._values.values())
        self._values[step] = float(value)
        self._since = 0 if is_best else self._since + 1
        return is_best and bool(self._keep)

    def best_of(self, steps: Iterable[int]) -> int | None:
        """Return the step with the highest value; None if no metric is kept, or no step has it."""
        known = [step for step in sorted(steps) if step in self._values]
        return max(known, key=self._values.__getitem__, default=None) if self._keep else None

    def check_metric(self, metrics: Mapping[str, Any]) -> None:
        """Check that a validation has the metric.

        Raises:
            RunStopped: the validation does not have it; the message lists the metrics it has.
        """
        if self._metric and self._metric not in metrics:
            key = "trainer.keep_best" if self._keep else "trainer.patience"
            raise RunStopped(
                f"{key}: validations have no metric {self._metric}."
                f"{did_you_mean(self._metric, list(metrics))} They have: {', '.join(metrics)}"
            )

    def describe_stop(self) -> str:
        """Return a line that says why the run ends here."""
        step, value = max(self._values.items(), key=lambda item: (item[1], -item[0]))
        return (
            f"the run ends early: {self._metric} has not risen above {value:.4g} (step {step}) in"
            f" {self._since} validations (trainer.patience={self._patience})"
        )


def _truncate_after(path: Path, step: int) -> bool:
    """Remove all lines after `step`, and an incomplete line; return whether there were any.

    The file is replaced atomically.
    """
    if not path.exists():
        return False
    content = b"".join(line for s, _, line in metric_lines(path) if s <= step)
    if content == path.read_bytes():
        return False
    with atomic_file(path) as staging:
        staging.write_bytes(content)
    return True


class Sink(Protocol):
    """A tracker. If it raises, the error is reported once and the tracker is not used again."""

    def log(self, step: int, data: Data) -> None:
        """Record the metrics of a step."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


@runtime_checkable
class TraceSink(Sink, Protocol):
    """A tracker that also shows episodes."""

    def trace(self, step: int, episodes: Sequence[Scored]) -> None:
        """Record episodes of a step, with their messages and tool calls."""
        ...


RUN_IDS = {"mlflow": "info.run_id", "aim": "hash"} | dict.fromkeys(
    ("wandb", "swanlab", "clearml", "comet_ml"), "id"
)
"""The attribute of a tracker's run with the id by which it is continued."""
PROJECT_VARIABLES = {"mlflow": "MLFLOW_EXPERIMENT_NAME", "comet_ml": "COMET_PROJECT_NAME"}
"""The environment variables that name the project, if they are not `<TRACKER>_PROJECT`."""
MAX_METRICS, MAX_TEXT = 1000, 6000
"""The most metrics of a call, and the longest parameter, that MLflow takes."""


class _AccelerateSink:
    """One of accelerate's trackers. A run that resumes continues the tracker's run."""

    def __init__(
        self, name: str, folder: Path, config: Mapping[str, Any], resumed: int, is_rewound: bool
    ):
        """Open the tracker.

        Args:
            name: one of `TRACKERS`.
            folder: the run's folder. It has the id of the tracker's run.
            config: the run's config.
            resumed: the step that the run resumes from; -1: from the beginning.
            is_rewound: whether the run has logged later steps before.
        """
        from accelerate.state import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        with without_launcher_variables():
            PartialState(cpu=True)  # accelerate's log needs it
        self._name = name
        trainer = config.get("trainer", {})
        variable = PROJECT_VARIABLES.get(name, f"{name.upper()}_PROJECT")
        project = trainer.get("project_name") or os.environ.get(variable, "agentrl")
        run, tags = trainer.get("experiment_name") or folder.name, trainer.get("tags") or []
        id_file = folder / f"{name}_run_id.txt"
        known = id_file.read_text() if resumed >= 0 and id_file.exists() else None
        run_id = known or uuid.uuid4().hex
        # MLflow cannot remove steps, so a run that has later ones is replaced.
        replaced = known if is_rewound and name == "mlflow" else None
        known = None if replaced else known
        texts = {key: str(value)[:MAX_TEXT] for key, value in flatten_config(config)}
        shown = {"run_name": project, "name": run, "config": texts}
        arguments: dict[str, dict[str, Any]] = {
            "tensorboard": {"run_name": name, "logging_dir": folder, "purge_step": resumed + 1},
            "wandb": {**shown, "tags": tags, "config": dict(config), "dir": str(folder),
                "id": run_id, "resume": "allow"},
            "mlflow": {"experiment_name": project, "run_name": run, "run_id": known,
                "tags": dict.fromkeys(tags, "true")},
            "trackio": {**shown, "embed": False, "resume": "never" if resumed < 0 else "allow"},
            "swanlab": {**shown, "tags": tags, "log_dir": str(folder / name), "id": run_id,
                "resume": "allow"},
            # With an offset of 0, steps keep their numbers.
            "clearml": {"project_name": project, "task_name": run, "tags": tags,
                "reuse_last_task_id": known or False, "continue_last_task": 0 if known else False,
                "auto_connect_frameworks": False},  # It would upload what torch saves.
            "aim": {"run_name": run, "logging_dir": str(folder), "experiment": project,
                "run_hash": known},
            "comet_ml": {"run_name": project, "experiment_key": run_id},
        }  # fmt: skip
        self._tracker: Any = LOGGER_TYPE_TO_CLASS[name](**arguments[name])
        if name == "mlflow":  # The config has priority over the environment.
            self._tracker.experiment_name = project
        self._tracker.start()
        if name == "comet_ml":
            self._tracker.tracker.set_name(run)
        if not known and name in ("mlflow", "clearml", "aim", "comet_ml"):
            self._tracker.store_init_configuration(texts)
        if name in RUN_IDS:
            id_file.write_text(attrgetter(RUN_IDS[name])(self._tracker.tracker))
        if replaced:
            from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

            for step, data in read_metrics(folder / METRICS):
                self.log(step, data)
            MlflowClient().delete_run(replaced)

    def log(self, step: int, data: Data) -> None:
        rename = _mlflow_name if self._name == "mlflow" else str
        values = [(rename(key), float(value)) for key, value in data.items() if value is not None]
        for start in range(0, len(values), MAX_METRICS):
            self._tracker.log(dict(values[start : start + MAX_METRICS]), step=step)

    def trace(self, step: int, episodes: Sequence[Scored]) -> None:
        if self._name == "mlflow":
            _trace_mlflow(self._tracker.tracker.info, step, episodes)
        if self._name == "trackio":
            _trace_trackio(self._tracker.tracker, step, episodes)

    def close(self) -> None:
        if self._name == "mlflow":
            from mlflow import flush_trace_async_logging  # pyright: ignore[reportMissingImports]

            flush_trace_async_logging()
        self._tracker.finish()


def _mlflow_name(key: str) -> str:
    """Return a metric's name as MLflow accepts it, with `_at_` for `@`, as verl writes it."""
    return re.sub(r"[^\w\-./ ]", "_", key.replace("@", "_at_"))


def _trace_mlflow(run: Any, step: int, episodes: Sequence[Scored]) -> None:
    from mlflow import start_span_no_context  # pyright: ignore[reportMissingImports]

    for scored in episodes:
        trajectory, facts = scored.trajectory, summary(scored)
        start, end = times(trajectory)
        root = start_span_no_context(
            trajectory.sample.agent_name,
            span_type="AGENT",
            inputs={"messages": [as_message(m) for m in trajectory.sample.prompt]},
            attributes=facts,
            tags={"step": str(step), "sample_id": trajectory.sample.id},
            metadata={"mlflow.sourceRun": run.run_id},
            experiment_id=run.experiment_id,
            start_time_ns=int(start * 1e9),
        )
        for part in operations(trajectory):
            span = start_span_no_context(
                part.name or "unknown",
                span_type="CHAT_MODEL" if part.kind == "generation" else "TOOL",
                parent_span=root,
                inputs=part.input,
                start_time_ns=int(part.start * 1e9),
            )
            span.set_outputs(part.output)
            if part.error:
                span.set_attribute("error", part.error)
            span.set_status("ERROR" if part.error else "OK")
            span.end(end_time_ns=int(part.end * 1e9))
        root.set_outputs({"messages": [as_message(m) for m in reply_messages(trajectory)]})
        root.end(end_time_ns=int(end * 1e9))


def _trace_trackio(run: Any, step: int, episodes: Sequence[Scored]) -> None:
    from trackio import Trace  # pyright: ignore[reportMissingImports]

    traces = []
    for scored in episodes:
        trajectory = scored.trajectory
        start, end = times(trajectory)
        spans = [
            {
                "id": str(i),
                "name": part.name or "unknown",
                "kind": part.kind,
                "start_time": datetime.fromtimestamp(part.start, UTC).isoformat(),
                "end_time": datetime.fromtimestamp(part.end, UTC).isoformat(),
                "duration_ms": 1000 * (part.end - part.start),
                "status": "error" if part.error else "ok",
                "input": part.input,
                "output": part.output,
                **({"error": part.error} if part.error else {}),
            }
            for i, part in enumerate(operations(trajectory))
        ]
        facts = summary(scored) | {"step": step, "duration_ms": 1000 * (end - start)}
        messages = [as_message(message) for message in trajectory.messages]
        traces.append(Trace(messages, metadata=facts, spans=spans))
    run.log({"episodes": traces}, step=step)
