"""A cluster to work in: one that runs already, or one of our own on this machine.

Ray's ports listen on every interface, and whoever may speak to them runs code here: what keeps
others out is the token. A cluster of ours has its own, in a file that only the user reads, and its
sockets lie in a folder that only the user enters. The processes of such a cluster end with the
thread that started it, by whatever death (Linux: the kernel sees to it).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentrl.errors import ConfigError
from agentrl.workers.variables import environment_variables

log = logging.getLogger("agentrl")

MIN_VERSION = (2, 52)
"""The first Ray with tokens."""
CONNECT_SECONDS = 5.0
MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nobody is told what is trained here
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's coming default; unset it warns
}


@contextlib.contextmanager
def open_cluster(address: str = "", *, cpus: int = 1, gpus: bool = True) -> Iterator[None]:
    """Be in a cluster for the duration of the block.

    What is started here is ended here, with all its processes; a cluster that was joined, and one
    that this process was in before, go on.

    Args:
        address: `HOST:PORT` of a cluster, `auto` for the one that this machine is part of, or "" to
            start one of this machine alone.
        cpus: what a cluster that is started has at least: how many processes want one.
        gpus: whether it has this machine's GPUs.

    Raises:
        ConfigError: there is no Ray, or one too old; or no such cluster, or it refuses us.
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
    """Look for Ray without importing it.

    Raises:
        ConfigError: there is none, or one too old.
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
            f"Ray {installed} lets everybody in who reaches its ports: it knows no tokens. Install a"
            f' newer one: pip install "ray>={oldest}"'
        )


@contextlib.contextmanager
def _start(ray: Any, cpus: int, gpus: bool) -> Iterator[None]:
    # Sockets have short names: not below a TMPDIR of any length. Ray opens its own folder to all,
    # the one around it is ours alone.
    with TemporaryDirectory(prefix="agentrl-ray-", dir="/tmp") as folder:
        token = Path(folder) / "token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        with environment_variables({MODE: "token", TOKEN_PATH: str(token), TOKEN: None}):
            _reset_token_cache()
            try:
                with _keep_sigterm():
                    ray.init(
                        address="local",  # whatever RAY_ADDRESS says
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
            "trainer.ray_address=%s is joined without a token: a cluster that asks for none runs"
            " the code of whoever reaches its ports (RAY_AUTH_MODE=token)",
            address,
        )
    with environment_variables({MODE: os.environ.get(MODE) or ("token" if has_token else None)}):
        _reset_token_cache()
        try:
            with _keep_sigterm():
                ray.init(address=address, logging_level=logging.WARNING)
        except (Exception, SystemExit) as e:  # Ray ends the process where nobody answers
            ray.shutdown()
            raise ConfigError(
                f"trainer.ray_address={address}: cannot join the cluster: {e}\nThis machine must be"
                f" part of it (ray start --address=...), with its token: {TOKEN} is"
                f" {'set' if os.environ.get(TOKEN) else 'not set'}, {token_path()} is"
                f" {'there' if token_path().is_file() else 'not there'}"
            ) from None
        try:
            yield
        finally:
            ray.shutdown()


def token_path() -> Path:
    """Where Ray looks for a token, unless the environment has it."""
    return Path(os.environ.get(TOKEN_PATH) or Path.home() / ".ray/auth_token")


def check_reachable(address: str) -> None:
    """Ray itself would wait for minutes, then end the process.

    Raises:
        ConfigError: nobody listens there.
    """
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal()) or "/" in host:
        raise ConfigError(
            f"trainer.ray_address={address} is not auto, nor HOST:PORT as `ray start` prints it"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as e:
        raise ConfigError(f"trainer.ray_address={address}: nobody answers there: {e}") from None


@contextlib.contextmanager
def _keep_sigterm() -> Iterator[None]:
    """`ray.init` takes SIGTERM for itself; a run has its own way to end."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _reset_token_cache() -> None:
    """Ray reads mode and token once a process; a second cluster has others."""
    with contextlib.suppress(ImportError, AttributeError):
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
