"""The Ray cluster of a run: an existing one, or a new one on this machine.

Ray's ports listen on every interface, and any process that connects can run code on this machine.
A token prevents that. A cluster that a run starts has its own token, in a file that only the user
can read, and its sockets are in a folder that only the user can enter. On Linux, the processes of
such a cluster end with the thread that started it, however that thread ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.workers import parent_watch
from agentrl.workers.child_process import ChildProcess
from agentrl.workers.owned_folder import OwnedFolder
from agentrl.workers.variables import environment_variables

log = logging.getLogger("agentrl")

MIN_VERSION = (2, 52)
"""The first Ray version with token authentication."""
CONNECT_SECONDS = 5.0
MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # do not report usage to Ray
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # default of later versions; Ray warns without
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a thread that calls Ray after the end starts no new cluster
}


@contextlib.contextmanager
def open_cluster(address: str = "", *, cpus: int = 1, gpus: bool = True) -> Iterator[None]:
    """Connect this process to a cluster within the block.

    A cluster that is started here ends with the block, with all its processes. A cluster that was
    joined, or that this process was already connected to, continues.

    Args:
        address: `HOST:PORT` of a cluster, `auto` for the cluster of this machine, or "" to start
            one on this machine.
        cpus: the number of processes that need a CPU; a new cluster has at least as many.
        gpus: True if a new cluster has this machine's GPUs.

    Raises:
        ConfigError: Ray is not installed or too old, there is no such cluster, or it rejects the
            connection.
    """
    check_ray()
    with environment_variables(QUIET):
        import ray

        if ray.is_initialized():
            yield
        elif address:
            with _join(ray, address):
                yield
        else:
            with _start(ray, max(cpus, os.cpu_count() or 1), gpus):
                yield


def check_ray() -> None:
    """Check that Ray is installed, without importing it.

    Raises:
        ConfigError: Ray is not installed, or it is too old.
    """
    oldest = ".".join(map(str, MIN_VERSION))
    try:
        installed = version("ray")
    except PackageNotFoundError:
        raise ConfigError(
            f'more than one process needs Ray. Install it: pip install "ray>={oldest}"'
        ) from None
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < MIN_VERSION:
        raise ConfigError(
            f"Ray {installed} has no token authentication: any process that reaches its ports can"
            f' run code. Install a newer version: pip install "ray>={oldest}"'
        )


@contextlib.contextmanager
def _start(ray: Any, cpus: int, gpus: bool) -> Iterator[None]:
    # Paths of sockets must be short, so a long TMPDIR cannot be used. All users can enter Ray's own
    # folder, but only this user can enter its parent.
    with contextlib.ExitStack() as stack:
        stack.callback(parent_watch.remove_abandoned)  # Folders of actors that were killed.
        folder = stack.enter_context(OwnedFolder("ray", "/tmp"))
        watch = [sys.executable, "-I", parent_watch.__file__, str(folder)]
        stack.callback(ChildProcess(watch, stops_at_eof=True).stop)
        token = folder / "token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        with environment_variables({MODE: "token", TOKEN_PATH: str(token), TOKEN: None}):
            _reset_token_cache()
            try:
                with _keep_sigterm():
                    ray.init(
                        address="local",  # ignore RAY_ADDRESS
                        num_cpus=cpus,
                        num_gpus=None if gpus else 0,
                        include_dashboard=False,
                        logging_level=logging.WARNING,
                        _temp_dir=f"{folder}/r",
                    )
                yield
            finally:
                ray.shutdown()
    _reset_token_cache()


@contextlib.contextmanager
def _join(ray: Any, address: str) -> Iterator[None]:
    check_reachable(address)
    has_token = bool(os.environ.get(TOKEN) or token_path().is_file())
    if not has_token:
        log.warning(
            "trainer.ray_address=%s is joined without a token: everybody who reaches the ports of a"
            " cluster without tokens can run code there. Start it with RAY_AUTH_MODE=token",
            address,
        )
    with environment_variables({MODE: os.environ.get(MODE) or ("token" if has_token else None)}):
        _reset_token_cache()
        try:
            with _keep_sigterm():
                ray.init(address=address, logging_level=logging.WARNING)
        except (Exception, SystemExit) as e:  # Ray exits if there is no answer
            ray.shutdown()
            raise ConfigError(
                f"trainer.ray_address={address}: cannot join the cluster: {e}\nThis machine must be"
                f" part of it (ray start --address=...) and have its token: {TOKEN} is"
                f" {'set' if os.environ.get(TOKEN) else 'not set'}, {token_path()} is"
                f" {'there' if token_path().is_file() else 'missing'}"
            ) from None
        try:
            yield
        finally:
            ray.shutdown()


def token_path() -> Path:
    """Return where Ray looks for a token, unless the environment has it."""
    return Path(os.environ.get(TOKEN_PATH) or Path.home() / ".ray/auth_token")


def check_reachable(address: str) -> None:
    """Check that a process listens at the address.

    Otherwise Ray would wait for minutes, then end this process.

    Raises:
        ConfigError: no process listens there.
    """
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal()) or "/" in host:
        raise ConfigError(
            f"trainer.ray_address={address} is neither auto nor HOST:PORT as `ray start` prints it"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as e:
        raise ConfigError(f"trainer.ray_address={address}: no process answers there: {e}") from None


@contextlib.contextmanager
def _keep_sigterm() -> Iterator[None]:
    """Keep the handler of SIGTERM within the block: `ray.init` would replace it."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _reset_token_cache() -> None:
    """Make Ray read mode and token again; it reads them once per process."""
    with contextlib.suppress(ImportError, AttributeError):
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
