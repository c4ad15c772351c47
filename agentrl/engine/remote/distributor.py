"""Send an update of the policy to several servers at the same time.

The weights are gathered and sent once for all servers. Only the steps that concern one server (wake
up, load files, check) run once per server, all at the same time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from operator import methodcaller
from pathlib import Path
from tempfile import gettempdir
from threading import Timer

from safetensors import SafetensorError

from agentrl.engine.base import Update
from agentrl.engine.remote.admin import in_thread, reading
from agentrl.engine.remote.client import RemoteEngine
from agentrl.engine.remote.senders import FROM_FILES, Route, Sent
from agentrl.errors import EngineError
from agentrl.workers.owned_folder import OwnedFolder

log = logging.getLogger("agentrl")

SLOW_SECONDS = 20.0
"""After this time the log names the servers that have not loaded an update, or are not asleep."""

Calls = dict[Future[None], RemoteEngine]
"""The calls of a step, by engine."""
Errors = dict[RemoteEngine, EngineError]
"""The error of each engine that failed."""


class Distributor:
    """Sends updates to servers."""

    def __init__(self) -> None:
        """Send nothing yet."""
        self._adapters: list[OwnedFolder] = []
        """Folders of adapters that servers may read again."""

    def send(self, engines: Sequence[RemoteEngine], update: Update) -> tuple[int, Errors]:
        """Send an update; return when each server has loaded it or has failed.

        If the policy has not changed, the servers only get its version.

        Returns:
            The number of bytes of the update, and the error of each server that failed.

        Raises:
            ConfigError: the policy cannot be sent to a server of this kind.
        """
        if not update.is_changed:
            set_version = methodcaller("set_version", update.version)
            return 0, run_on_each(engines, set_version, {})
        size, errors = self._send_once(engines, update)
        if again := [e for e in errors if e.delivery.may_use_files and not e.has_received]:
            log.warning(
                "the policy did not arrive through memory at %s. From now on it is sent there"
                " through files, which is slower (as with rollout.sync=disk): %s",
                ", ".join(engine.url for engine in again),
                errors[again[0]],
            )
            for engine in again:
                del errors[engine]
                engine.delivery = FROM_FILES
            more, failed = self._send_once(again, update)
            size, errors = max(size, more), errors | failed
        for engine, error in errors.items():
            engine.fail_update(error)
        return size, errors

    def close(self) -> None:
        """Remove the folders of adapters."""
        while self._adapters:
            self._adapters.pop().cleanup()

    def _send_once(self, engines: Sequence[RemoteEngine], update: Update) -> tuple[int, Errors]:
        """Send an update, to each server by its `delivery`; see `send`."""
        calls: Calls = {}
        text = f"version {update.version} of the policy is not on every engine"
        with reporting_slow(text, calls), contextlib.ExitStack() as stack:
            errors = run_on_each(engines, methodcaller("begin_update"), calls)
            ready = [engine for engine in engines if engine not in errors]
            if not ready:
                return 0, errors
            route, sent, failed = self._send_to(ready, update, stack)
            ready = [engine for engine in ready if engine not in failed]
            late = run_on_each(ready, methodcaller("finish_update", route, sent), calls)
        return sent.size, errors | failed | late

    def _send_to(
        self, engines: Sequence[RemoteEngine], update: Update, stack: contextlib.ExitStack
    ) -> tuple[Route, Sent, Errors]:
        """Send the policy once, to all of these servers."""
        sources = {engine.delivery.source for engine in engines}
        (dtype,) = {engine.dtype for engine in engines}  # one launch for all servers
        try:
            folder = stack.enter_context(OwnedFolder("weights")) if "files" in sources else None
            adapter = self._make_adapter_folder(engines) if "adapter" in sources else None
            targets = tuple(e.target for e in engines if e.delivery.source == "memory")
            fp8 = any(e.delivery.fp8 for e in engines)
            route = Route(update.version, targets, folder, dtype, adapter_folder=adapter, fp8=fp8)
            sent = update.send(route)
        except (OSError, SafetensorError) as e:  # An engine error stops the run with a saved state.
            raise EngineError(
                f"the policy cannot be written to {gettempdir()}: {e}. Free space there, or set"
                " TMPDIR to another folder"
            ) from e
        if adapter is not None:
            sent.size += sum(file.stat().st_size for file in adapter.glob("*.safetensors"))
        failed: Errors = {}
        for engine in engines:
            name = str(folder) if engine.delivery.source == "files" else engine.url
            if name in sent.errors:
                failed[engine] = EngineError(sent.errors[name])
        return route, sent, failed

    def _make_adapter_folder(self, engines: Sequence[RemoteEngine]) -> Path:
        """Return a new folder for an adapter; remove those that no server reads again."""
        kept = max(engine.kept_folders for engine in engines)
        while len(self._adapters) > kept:
            self._adapters.pop(0).cleanup()
        self._adapters.append(OwnedFolder("weights"))
        return self._adapters[-1].path


def run_on_each(
    engines: Sequence[RemoteEngine], step: Callable[[RemoteEngine], object], calls: Calls
) -> Errors:
    """Run a step on all engines at the same time; return the error of each that failed.

    `calls` then has the calls of this step.

    Raises:
        AgentRLError: an error that is not an `EngineError`, after all have finished.
    """

    def run(engine: RemoteEngine) -> None:
        with reading("the server", engine.url):
            step(engine)

    calls.clear()
    calls |= {in_thread(partial(run, engine)): engine for engine in engines}
    errors: Errors = {}
    others = []
    for call, engine in calls.items():
        if isinstance(error := call.exception(), EngineError):
            errors[engine] = error
        elif error is not None:
            others.append(error)
    for error in others:
        raise error
    return errors


@contextlib.contextmanager
def reporting_slow(text: str, calls: Mapping[Future[None], RemoteEngine]) -> Iterator[None]:
    """Write one line to the log if the block takes longer than `SLOW_SECONDS`."""

    def report() -> None:
        waiting = [engine.url for call, engine in calls.items() if not call.done()]
        log.warning(
            "%s after %g s; %s",
            text,
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
