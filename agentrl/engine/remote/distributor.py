"""Send an update of the policy to several servers at the same time.

The weights are gathered and sent once for all servers. Only the steps that concern one server (wake
up, load files, check) run once per server, all at the same time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from threading import Timer
from typing import Generic, Protocol, TypeVar

import torch
from safetensors import SafetensorError

from agentrl.engine.base import Update
from agentrl.engine.remote.admin import in_thread
from agentrl.engine.remote.files import transfer_folder
from agentrl.engine.remote.loaders import Loader
from agentrl.engine.remote.senders import Route, Sent, SharedAdapter, WeightsSender
from agentrl.errors import AgentRLError, EngineError, InvalidEngineResponse

log = logging.getLogger("agentrl")

SLOW_SECONDS = 20.0
"""After this time the log names the servers that have not loaded an update, or are not asleep."""


class Server(Protocol):
    """The client of a server, as an update needs it (`RemoteEngine`)."""

    url: str
    loader: Loader
    dtype: torch.dtype | None

    def begin_update(self) -> None: ...

    def finish_update(self, version: int, sent: Sent, folder: Path | None) -> None: ...

    def fail_update(self, error: EngineError) -> None: ...


S = TypeVar("S", bound=Server)


class Distributor:
    """Sends updates to servers."""

    def __init__(self) -> None:
        """Send nothing yet."""
        self._weights = WeightsSender()
        self._adapters: list[TemporaryDirectory[str]] = []
        """Folders of adapters that servers may read again."""

    def publish(self, engines: Sequence[S], update: Update) -> tuple[int, dict[S, EngineError]]:
        """Send an update; return when each server has loaded it or has failed.

        Returns:
            The number of bytes of the update, and the error of each server that failed.

        Raises:
            ConfigError: the policy cannot be sent to a server of this kind.
        """
        size, errors = self._publish_once(engines, update)
        if again := _use_files(errors):
            first = {engine: errors.pop(engine) for engine in again}
            log.warning(
                "the policy did not arrive through memory at %s. From now on it is sent there"
                " through files, which is slower (as with rollout.sync=disk): %s",
                ", ".join(engine.url for engine in again),
                next(iter(first.values())),
            )
            more, failed = self._publish_once(again, update)
            size = max(size, more)
            for engine, error in failed.items():
                errors[engine] = type(error)(f"{error}\nBefore that: {first[engine]}")
        for engine, error in errors.items():
            engine.fail_update(error)
        return size, errors

    def _publish_once(
        self, engines: Sequence[S], update: Update
    ) -> tuple[int, dict[S, EngineError]]:
        """Send an update, to each server in the way of its loader; see `publish`."""
        attempt = _Attempt(engines)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._reporting_slow(attempt, update.version))
            attempt.run(lambda engine: engine.begin_update())
            sent = Sent()
            folders: dict[str, Path | None] = {"memory": None, "shared adapter": None}
            sources = {engine.loader.source for engine in attempt.remaining}
            if "adapter" in sources:
                folders["adapter"], sent.size = self._write_adapter(attempt, update)
            if "shared adapter" in sources:
                sent.adapter = self._share_adapter(attempt, update)
                sent.size = sent.adapter.size
            if sources & {"memory", "files"}:
                if "files" in sources:
                    with _as_write_errors():
                        folders["files"] = Path(stack.enter_context(transfer_folder()))
                sent = self._send_weights(attempt, update, folders.get("files"))
            attempt.run(
                lambda engine: engine.finish_update(
                    update.version, sent, folders[engine.loader.source]
                )
            )
        return sent.size, attempt.errors

    def close(self) -> None:
        """Leave the group of broadcasts, and remove the folders of adapters."""
        self._weights.close()
        while self._adapters:
            self._adapters.pop().cleanup()

    def _send_weights(self, attempt: _Attempt, update: Update, folder: Path | None) -> Sent:
        """Send the weights once, to all servers that have not failed."""
        targets = {
            engine.loader.target: engine
            for engine in attempt.remaining
            if engine.loader.target is not None
        }
        (dtype,) = {engine.dtype for engine in attempt.remaining}  # one launch for all servers
        route = Route(update.version, tuple(targets), folder, dtype)
        try:
            if update.send is not None:
                sent = update.send(route)
            else:
                weights = update.published or update.weights
                sent = self._weights.send(weights(), route)
        except OSError as e:
            raise EngineError(f"the weights cannot be read: {e}") from e
        for target, engine in targets.items():
            if target.url in sent.errors:
                attempt.errors[engine] = EngineError(sent.errors[target.url])
        if folder is not None and str(folder) in sent.errors:
            for engine in attempt.remaining:
                if engine.loader.source == "files":
                    attempt.errors[engine] = EngineError(sent.errors[str(folder)])
        return sent

    def _share_adapter(self, attempt: _Attempt, update: Update) -> SharedAdapter:
        """Put the adapter into shared memory, once for each process that reads it."""
        assert update.share_adapter is not None, "only a policy with LoRA has an adapter"
        readers = [getattr(engine.loader, "processes", 0) for engine in attempt.remaining]
        return update.share_adapter(sum(readers))

    def _write_adapter(self, attempt: _Attempt, update: Update) -> tuple[Path, int]:
        """Write the adapter once for all servers; return its folder and its size."""
        assert update.adapter is not None, "only a policy with LoRA has an adapter"
        kept = max(getattr(engine.loader, "kept_folders", 0) for engine in attempt.remaining)
        while len(self._adapters) > kept:
            self._adapters.pop(0).cleanup()
        with _as_write_errors():
            self._adapters.append(transfer_folder())
            folder = Path(self._adapters[-1].name)
            update.adapter(folder)
            return folder, sum(file.stat().st_size for file in folder.iterdir())

    @contextlib.contextmanager
    def _reporting_slow(self, attempt: _Attempt, version: int) -> Iterator[None]:
        """Write one line to the log if the block takes longer than `SLOW_SECONDS`."""

        def report() -> None:
            waiting = [engine.url for engine in attempt.unfinished()]
            log.warning(
                "version %d of the policy is not on every engine after %g s; %s",
                version,
                SLOW_SECONDS,
                f"waiting for {', '.join(waiting)}" if waiting else "the weights are being sent",
            )

        timer = Timer(SLOW_SECONDS, report)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


class _Attempt(Generic[S]):
    """The servers of one update: which ones have failed, and which ones are busy."""

    def __init__(self, engines: Sequence[S]):
        self._engines = engines
        self.errors: dict[S, EngineError] = {}
        self._busy: set[S] = set()

    @property
    def remaining(self) -> list[S]:
        """The servers that have not failed."""
        return [engine for engine in self._engines if engine not in self.errors]

    def unfinished(self) -> list[S]:
        """Return the servers that have not finished the current step."""
        return [engine for engine in self._engines if engine in self._busy]

    def run(self, step: Callable[[S], None]) -> None:
        """Run a step for all remaining servers at the same time.

        Raises:
            AgentRLError: an error that is not an `EngineError`, after all have finished.
        """
        engines = self.remaining
        self._busy = set(engines)
        futures = {engine: in_thread(partial(self._run_one, step, engine)) for engine in engines}
        fatal: Exception | None = None
        for engine, future in futures.items():
            try:
                future.result()
            except EngineError as e:
                self.errors[engine] = e
            except Exception as e:
                fatal = fatal or e
        if fatal is not None:
            raise fatal

    def _run_one(self, step: Callable[[S], None], engine: S) -> None:
        try:
            with as_engine_errors(engine):
                step(engine)
        finally:
            self._busy.discard(engine)


def _use_files(engines: Iterable[S]) -> list[S]:
    """Let servers that never received weights through memory read files; return these servers."""
    changed = []
    for engine in engines:
        if engine.loader.can_use_files() and engine.loader.files is not None:
            engine.loader = engine.loader.files
            changed.append(engine)
    return changed


@contextlib.contextmanager
def _as_write_errors() -> Iterator[None]:
    """Raise errors of the disk as engine errors, which stop the run with a saved state.

    Raises:
        EngineError: a folder cannot be created or written.
    """
    try:
        yield
    except (OSError, SafetensorError) as e:
        raise EngineError(
            f"the policy cannot be written to {gettempdir()}: {e}. Free space there, or set TMPDIR"
            " to another folder"
        ) from e


@contextlib.contextmanager
def as_engine_errors(engine: Server) -> Iterator[None]:
    """Raise other exceptions of an engine's client as engine errors.

    Otherwise they would stop the run.

    Raises:
        InvalidEngineResponse: an answer, or the data to send, was not what the client expected.
        EngineError: a file or a socket failed.
    """
    try:
        yield
    except AgentRLError:
        raise
    except (OSError, SafetensorError) as e:
        raise EngineError(f"{engine.url}: {type(e).__name__}: {e}") from e
    except (AttributeError, LookupError, TypeError, ValueError) as e:
        raise InvalidEngineResponse(f"{engine.url}: {type(e).__name__}: {e}") from e
