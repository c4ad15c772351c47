"""Trackers that show the metrics of a run, such as TensorBoard. Without one, nothing is lost.

A tracker comes from accelerate or an installed package. If it fails, training continues.
"""

from __future__ import annotations

import importlib.util
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, Protocol, runtime_checkable

from agentrl.callbacks import Event, Observer
from agentrl.config import Config
from agentrl.config.trackers import TRACKERS, other_trackers
from agentrl.engine.local.load import without_launcher_variables
from agentrl.errors import ConfigError
from agentrl.installation import install_command
from agentrl.observers.traces import as_message, operations
from agentrl.record import METRICS, read_metrics
from agentrl.trainer.resume import flatten_config
from agentrl.trajectory import Scored

MAX_TRACES = 8
"""The largest number of episodes of a step that trackers get: those of its first group."""
Data = Mapping[str, float]


class Tracker(Observer):
    """Passes the metrics and some episodes of each step to a tracker.

    A tracker that fails prints one warning and is not used again.
    """

    is_dropped = True
    after_error = f"It gets no more metrics; {METRICS} has them all"

    def __init__(self, logger: str, config: Config):
        """Check that the tracker is installed. It opens when the run begins.

        Args:
            logger: one of `trainer.logger`.
            config: the config that the tracker shows. It has the names of project and run, and the
                tags, in its section `trainer`.

        Raises:
            ConfigError: it is not installed; the message has the command that installs it.
        """
        self.name, self._logger, self._config = f"the tracker {logger}", logger, config
        self._sink: Sink | None = None
        self._last = -1
        if logger in TRACKERS:
            spec = importlib.util.find_spec(logger)
            # A spec without origin is a plain folder: wandb creates one named wandb where it runs.
            if spec is None or spec.origin is None:
                command = install_command(logger)
                raise ConfigError(f"trainer.logger: {logger} is not installed: {command}")

    def on_begin(self, event: Event) -> None:
        if self._logger in TRACKERS:
            self._sink = _AccelerateSink(self._logger, self._config, event)
        else:
            open_sink = other_trackers()[self._logger].load()
            self._sink = open_sink(event.folder, self._config.model_dump(), event.recorded)

    def on_step(self, event: Event) -> None:
        assert self._sink
        self._last = event.step
        self._sink.log(event.step, event.metrics)
        if isinstance(self._sink, TraceSink) and event.episodes:
            self._sink.trace(event.step, event.episodes[:MAX_TRACES])

    def on_validation(self, event: Event) -> None:
        if event.step != self._last:  # the validation before training, which is no step
            self.on_step(event)

    def on_end(self, event: Event) -> None:
        if self._sink:
            self._sink.close()


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

    def __init__(self, name: str, config: Config, begin: Event):
        """Open the tracker.

        Args:
            name: one of `TRACKERS`.
            config: the run's config.
            begin: the event `on_begin`. The run's folder has the id of the tracker's run.
        """
        from accelerate.state import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        with without_launcher_variables():
            PartialState(cpu=True)  # accelerate's log needs it
        self._name, folder, first = name, begin.folder, begin.recorded + 1
        keys = config.model_dump()
        variable = PROJECT_VARIABLES.get(name, f"{name.upper()}_PROJECT")
        project = config.trainer.project_name or os.environ.get(variable, "agentrl")
        run, tags = config.trainer.experiment_name or folder.name, config.trainer.tags
        id_file = folder / f"{name}_run_id.txt"
        known = id_file.read_text() if first and id_file.exists() else None
        run_id = known or uuid.uuid4().hex
        # MLflow cannot remove steps, so a run that has later ones is replaced.
        replaced = known if begin.is_rewound and name == "mlflow" else None
        known = None if replaced else known
        texts = {key: str(value)[:MAX_TEXT] for key, value in flatten_config(keys)}
        shown = {"run_name": project, "name": run, "config": texts}
        arguments: dict[str, dict[str, Any]] = {
            "tensorboard": {"run_name": name, "logging_dir": folder, "purge_step": first},
            "wandb": {**shown, "tags": tags, "config": keys, "dir": str(folder),
                "id": run_id, "resume": "allow"},
            "mlflow": {"experiment_name": project, "run_name": run, "run_id": known,
                "tags": dict.fromkeys(tags, "true")},
            "trackio": {**shown, "embed": False, "resume": "allow" if first else "never"},
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
        trajectory = scored.trajectory
        root = start_span_no_context(
            trajectory.sample.agent_name,
            span_type="AGENT",
            inputs={"messages": [as_message(m) for m in trajectory.sample.prompt]},
            attributes=scored.summary(),
            tags={"step": str(step), "sample_id": trajectory.sample.id},
            metadata={"mlflow.sourceRun": run.run_id},
            experiment_id=run.experiment_id,
            start_time_ns=int(trajectory.started * 1e9),
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
        replies = trajectory.messages[len(trajectory.sample.prompt) :]
        root.set_outputs({"messages": [as_message(message) for message in replies]})
        root.end(end_time_ns=int(trajectory.ended * 1e9))


def _trace_trackio(run: Any, step: int, episodes: Sequence[Scored]) -> None:
    from trackio import Trace  # pyright: ignore[reportMissingImports]

    traces = []
    for scored in episodes:
        trajectory = scored.trajectory
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
        duration = 1000 * (trajectory.ended - trajectory.started)
        facts = scored.summary() | {"step": step, "duration_ms": duration}
        messages = [as_message(message) for message in trajectory.messages]
        traces.append(Trace(messages, metadata=facts, spans=spans))
    run.log({"episodes": traces}, step=step)
