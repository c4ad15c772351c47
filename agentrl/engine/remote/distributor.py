"""Send an update of the policy to several servers at the same time.

The weights are gathered and sent once for all servers. Only the steps that concern one server (wake
up, load files, check) run once per server, all at the same time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from threading import Timer

from safetensors import SafetensorError

from agentrl.engine.base import Update
from agentrl.engine.remote.admin import in_thread
from agentrl.engine.remote.client import RemoteEngine
from agentrl.engine.remote.files import transfer_folder
from agentrl.engine.remote.loaders import Loader
from agentrl.engine.remote.senders import Route, Sent
from agentrl.errors import AgentRLError, EngineError, InvalidEngineResponse

log = logging.getLogger("agentrl")

SLOW_SECONDS = 20.0
"""After this time the log names the servers that have not loaded an update, or are not asleep."""


class Distributor:
    """Sends updates to servers."""

    def __init__(self) -> None:
        """Send nothing yet."""
        self._adapters: list[TemporaryDirectory[str]] = []
        """Folders of adapters that servers may read again."""

    def send(
        self, engines: Sequence[RemoteEngine], update: Update
    ) -> tuple[int, dict[RemoteEngine, EngineError]]:
        """Send an update; return when each server has loaded it or has failed.

        Returns:
            The number of bytes of the update, and the error of each server that failed.

        Raises:
            ConfigError: the policy cannot be sent to a server of this kind.
        """
        size, errors = self._send_once(engines, update)
        if again := _use_files(errors):
            first = {engine: errors.pop(engine) for engine in again}
            log.warning(
                "the policy did not arrive through memory at %s. From now on it is sent there"
                " through files, which is slower (as with rollout.sync=disk): %s",
                ", ".join(engine.url for engine in again),
                next(iter(first.values())),
            )
            more, failed = self._send_once(again, update)
            size = max(size, more)
            for engine, error in failed.items():
                errors[engine] = type(error)(f"{error}\nBefore that: {first[engine]}")
        for engine, error in errors.items():
            engine.fail_update(error)
        return size, errors

    def _send_once(
        self, engines: Sequence[RemoteEngine], update: Update
    ) -> tuple[int, dict[RemoteEngine, EngineError]]:
        """Send an update, to each server in the way of its loader; see `send`."""
        attempt = _Attempt(engines)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._reporting_slow(attempt, update.version))
            attempt.run(lambda engine: engine.begin_update())
            sent = Sent()
            if attempt.remaining:
                route, sent = self._send_to(attempt, update, stack)
                attempt.run(lambda engine: engine.finish_update(route, sent))
        return sent.size, attempt.errors

    def set_version(
        self, engines: Sequence[RemoteEngine], version: int
    ) -> dict[RemoteEngine, EngineError]:
        """Give the policy that servers hold another version; return the error of each that failed.

        Nothing is sent.
        """
        attempt = _Attempt(engines)
        with self._reporting_slow(attempt, version):
            attempt.run(lambda engine: engine.set_version(version))
        return attempt.errors

    def close(self) -> None:
        """Remove the folders of adapters."""
        while self._adapters:
            self._adapters.pop().cleanup()

    def _send_to(
        self, attempt: _Attempt, update: Update, stack: contextlib.ExitStack
    ) -> tuple[Route, Sent]:
        """Send the policy once, to all servers that have not failed."""
        engines = attempt.remaining
        loaders = [engine.loader for engine in engines]
        sources = {loader.source for loader in loaders}
        targets = {engine.loader.target: engine for engine in engines if engine.loader.target}
        (dtype,) = {engine.dtype for engine in engines}  # one launch for all servers
        with _as_write_errors():
            folder = Path(stack.enter_context(transfer_folder())) if "files" in sources else None
            adapter = self._make_adapter_folder(loaders) if "adapter" in sources else None
            route = Route(
                update.version,
                tuple(targets),
                folder,
                dtype,
                adapter_folder=adapter,
                adapter_readers=sum(loader.readers for loader in loaders),
            )
            sent = update.send(route)
        # The errors are by the URL of a target, or by the folder of files.
        names = {engine: target.url for target, engine in targets.items()}
        names |= {engine: str(folder) for engine in engines if engine.loader.source == "files"}
        for engine, name in names.items():
            if name in sent.errors:
                attempt.errors[engine] = EngineError(sent.errors[name])
        if sent.adapter is not None:
            sent.size = max(sent.size, sent.adapter.size)
        elif adapter is not None:
            sent.size += sum(file.stat().st_size for file in adapter.iterdir())
        return route, sent

    def _make_adapter_folder(self, loaders: Sequence[Loader]) -> Path:
        """Return a new folder for an adapter; remove those that no server reads again."""
        kept = max(loader.kept_folders for loader in loaders)
        while len(self._adapters) > kept:
            self._adapters.pop(0).cleanup()
        self._adapters.append(transfer_folder())
        return Path(self._adapters[-1].name)

    @contextlib.contextmanager
    def _reporting_slow(self, attempt: _Attempt, version: int) -> Iterator[None]:
        """Write one line to the log if the block takes longer than `SLOW_SECONDS`."""

        def report() -> None:
            waiting = [engine.url for call, engine in attempt.calls.items() if not call.done()]
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


class _Attempt:
    """The servers of one update: which ones have failed, and which ones are busy."""

    def __init__(self, engines: Sequence[RemoteEngine]):
        self._engines = engines
        self.errors: dict[RemoteEngine, EngineError] = {}
        self.calls: dict[Future[None], RemoteEngine] = {}
        """The calls of the current step."""

    @property
    def remaining(self) -> list[RemoteEngine]:
        """The servers that have not failed."""
        return [engine for engine in self._engines if engine not in self.errors]

    def run(self, step: Callable[[RemoteEngine], None]) -> None:
        """Run a step for all remaining servers at the same time.

        Raises:
            AgentRLError: an error that is not an `EngineError`, after all have finished.
        """
        self.calls = {in_thread(partial(_run, step, engine)): engine for engine in self.remaining}
        failed = {engine: e for call, engine in self.calls.items() if (e := call.exception())}
        self.errors |= {e: error for e, error in failed.items() if isinstance(error, EngineError)}
        for error in failed.values():
            if not isinstance(error, EngineError):
                raise error


def _run(step: Callable[[RemoteEngine], None], engine: RemoteEngine) -> None:
    with as_engine_errors(engine):
        step(engine)


def _use_files(engines: Iterable[RemoteEngine]) -> list[RemoteEngine]:
    """Let servers that never received weights through memory read files; return these servers."""
    changed = []
    for engine in engines:
        if (files := engine.loader.files) is not None and not engine.loader.has_loaded:
            engine.loader = files
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
def as_engine_errors(engine: RemoteEngine) -> Iterator[None]:
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
