"""Servers that this process starts. They listen on loopback, require a random key, and end with it.

If the run is on another machine, a server listens on an address of its own machine, with the same
kind of keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from agentrl.engine.remote import fp8, guard
from agentrl.errors import ConfigError, EngineDead, EngineError
from agentrl.http import fetch
from agentrl.installation import install_command
from agentrl.workers import parent_watch
from agentrl.workers.child_process import OUTPUT_GRACE_SECONDS, ChildProcess
from agentrl.workers.owned_folder import OwnedFolder

log = logging.getLogger("agentrl")

START_SECONDS = 1800.0
"""The time limit of a start; loading and compiling take long. A server that ends is noticed at
once."""
HEALTH_SECONDS = 30.0
TAIL_LINES = 25
LOWEST_PORT, HIGHEST_PORT = 20_000, 50_000
PORT_TRIES = 200
LOOPBACK = "127.0.0.1"


class ServerHandle(Protocol):
    """The interface of a server's process that an engine uses, on this or another machine."""

    url: str
    token: str
    admin_token: str

    @property
    def running(self) -> bool:
        """Return whether the process runs. Called often, so it does not wait."""
        ...

    def death_error(self) -> EngineDead:
        """Return the error for a server that ended, with the last lines that it printed."""
        ...

    def stop(self) -> None:
        """End the server and all processes that it started. Idempotent."""
        ...


class ServerProcess:
    """The process of a server on this machine."""

    def __init__(
        self,
        name: str,
        command: Callable[[ServerProcess], Sequence[str]],
        *,
        host: str = LOOPBACK,
        environment: Mapping[str, str] | None = None,
        start_seconds: float = START_SECONDS,
    ):
        """Start a server and return when it is healthy (GET /health).

        Args:
            name: the name of the server, for messages.
            command: returns the command from `folder`, `host`, `port` and `token`. Pass the token
                in a file in the folder or in the environment, because all users can read command
                lines.
            host: the address of this machine on which the server listens.
            environment: environment variables in addition to those that agentrl sets.
            start_seconds: the time limit for the start.

        Raises:
            EngineDead: the server ended; the message has the last lines that it printed.
            EngineError: the server was not healthy in time.
        """
        self._name = name
        self.token = secrets.token_hex(32)
        """A random key that the server's endpoints require."""
        self.admin_token = secrets.token_hex(32)
        """A second key for management endpoints, for servers that have two keys."""
        self._folder = OwnedFolder("engine")
        self.folder = self._folder.path
        """A folder for the server's files, removed when the server has ended."""
        self.host, self.port = host, free_port(host)
        self.url = f"http://{host}:{self.port}"
        self._process = ChildProcess(
            [sys.executable, "-I", parent_watch.__file__, str(self.folder), *command(self)],
            stops_at_eof=True,
            environment={
                "TMPDIR": str(self.folder),  # Its sockets are removed with the folder.
                "PYTHONSAFEPATH": "1",  # Import no module from the working directory.
                **(environment or {}),
            },
        )
        try:
            self._wait_healthy(start_seconds)
            parent_watch.record_shared_memory(self.folder, self.pid)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """Return the id of the process that runs the server, which is also its process group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Return whether the process runs."""
        return self._process.running

    def death_error(self) -> EngineDead:
        """Return the error for a server that ended, with the last lines that it printed."""
        self._process.wait(OUTPUT_GRACE_SECONDS)
        lines = list(self._process.tail)[-TAIL_LINES:]
        text = "\n".join(f"  | {line}" for line in lines)
        last_lines = text.replace(self.token, "***").replace(self.admin_token, "***")
        return EngineDead(
            f"the {self._name} server at {self.url} ended. Its last lines:\n{last_lines}"
        )

    def stop(self) -> None:
        """End the server and all processes that it started. Idempotent."""
        if self.running:
            parent_watch.record_shared_memory(self.folder, self.pid)
        self._process.stop()
        self._folder.cleanup()

    def _wait_healthy(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not self.running:
                raise self.death_error()
            with contextlib.suppress(EngineError):
                status, _ = fetch(self.url, "/health", error=EngineError, timeout=HEALTH_SECONDS)
                if status == 200:
                    return
            time.sleep(0.1)
        raise EngineError(
            f"the {self._name} server at {self.url} is not healthy after {seconds:g} s"
        )


StartServer = Callable[[str], tuple[ServerProcess, bool]]
"""Starts a server that listens on an address. Returns its process, and whether it computes in the
order and precision of the trainer."""


def start_here(start: StartServer) -> tuple[ServerHandle, bool]:
    """Start a server on this machine that only this machine can reach."""
    return start(LOOPBACK)


@dataclass(frozen=True, slots=True)
class EngineSlot:
    """The GPUs and the machine of one server of a run."""

    gpus: Sequence[int] = ()
    """The indices of the server's GPUs, as torch counts them on that machine; none: a CPU."""
    ranks: tuple[int, ...] = ()
    """For each of these GPUs the rank of the learner that also uses it, or whose GPU the server can
    read; none: the learner uses other GPUs."""
    run: Callable[[StartServer], tuple[ServerHandle, bool]] = start_here
    """Starts a server there, and returns a handle for this process."""


async def raise_if_dead(process: ServerHandle | None) -> None:
    """Wait a moment and raise an error if the server has ended.

    Its connections break shortly before its process is seen to have ended.

    Raises:
        EngineDead: the server has ended.
    """
    for _ in range(20):
        if process is None:
            return
        if not process.running:
            raise process.death_error() from None
        await asyncio.sleep(0.05)


def find_package(package: str, python: str) -> tuple[str, Path]:
    """Ask a Python interpreter for the folder of a package, without importing the package.

    Args:
        package: such as "sglang".
        python: the path of the interpreter; "": this process's interpreter.

    Returns:
        The full path of the interpreter, and the folder of the package.

    Raises:
        ConfigError: the interpreter does not run, or does not have the package.
    """
    path = str(Path(python).absolute()) if python else sys.executable
    code = (
        f"import importlib.util as u; print(u.find_spec('{package}').submodule_search_locations[0])"
    )
    try:
        completed = subprocess.run(
            [path, "-c", code], cwd="/", capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise ConfigError(f"rollout.python={python}: cannot run {path}: {e}") from None
    if completed.returncode:
        raise ConfigError(
            f"rollout.name={package}: {path} has no {package}. Install it there ({path} -m"
            f" {install_command(package)}), set rollout.python to the Python of an environment that"
            " has it, or use rollout.name=local (for CPUs and small models)"
        )
    return path, Path(completed.stdout.strip())


def visible_gpus(gpus: Sequence[int]) -> dict[str, str]:
    """Return the environment variables that show a process only these GPUs; none for no index.

    Args:
        gpus: indices as torch counts them here.
    """
    if not gpus:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else None
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[g] if names else str(g) for g in gpus)}


def free_port(host: str = LOOPBACK) -> int:
    """Return a free port below `HIGHEST_PORT`: SGLang also uses ports up to 10,000 higher.

    Raises:
        EngineError: no such port is free.
    """
    for _ in range(PORT_TRIES):
        port = LOWEST_PORT + secrets.randbelow(HIGHEST_PORT - LOWEST_PORT)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind((host, port))
            return port
    raise EngineError(f"no port below {HIGHEST_PORT} is free for a server")


@dataclass(frozen=True, slots=True)
class Launch(ABC):
    """The options with which a server is started."""

    name: ClassVar[str]
    """The name of the server, for messages."""
    package: ClassVar[str]

    model: str
    """A folder in the format of transformers, or a hub name."""
    python: str = ""
    """The Python of the environment that has the server; "": this process's Python."""
    dtype: str = "auto"
    gpus: Sequence[int] = ()
    """The GPUs that the server sees, one per part of the model, as torch counts them here; none: a
    CPU."""
    memory: float = 0.5
    """The server's share of a GPU's memory."""
    deterministic: bool = False
    lora_rank: int = 0
    """The rank of the policy's LoRA; 0: all weights are trained."""
    adapters: int = 2
    """How many adapters of the policy the server keeps; see `AdapterLoader`."""
    arguments: Sequence[str] = ()
    """Additional arguments, which override those of agentrl."""

    def start(self, start_seconds: float = START_SECONDS, *, host: str = LOOPBACK) -> ServerProcess:
        """Start the server on an address of this machine, and wait until it is healthy.

        Raises:
            ConfigError: there is no such Python, or it lacks the server's package.
            EngineDead: the server ended; the message has the last lines that it printed.
            EngineError: the server was not healthy in time.
        """
        python, _ = find_package(self.package, self.python)

        def command(server: ServerProcess) -> list[str]:
            return [
                *self._command(server, python),
                *("--host", server.host, "--port", str(server.port)),
                *self.flags(),
                *self.arguments,
            ]

        return ServerProcess(
            self.name,
            command,
            host=host,
            environment=visible_gpus(self.gpus) | self._environment(),
            start_seconds=start_seconds,
        )

    def start_for_trainer(self, host: str) -> tuple[ServerProcess, bool]:
        """Start the server.

        Returns:
            The server's process, and whether it computes in the order and precision of the trainer.
        """
        return self.start(host=host), False

    @abstractmethod
    def _command(self, server: ServerProcess, python: str) -> list[str]:
        """Return the program, its model and its keys.

        All users can read the command line of a process, so the keys are passed in a file.
        """

    @abstractmethod
    def flags(self) -> list[str]:
        """Return the flags of the server, without its address, its keys and `arguments`."""

    @abstractmethod
    def _environment(self) -> dict[str, str]: ...


SGLANG_CPU = (
    *("--device", "cpu"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle"),
    *("--mem-fraction-static", "0.5", "--max-total-tokens", "65536"),
)
"""The flags for a machine without a GPU. SGLang counts memory that other processes allocate during
its start as its own."""
SGLANG_IMAGES = {
    # Keep the ids of a row with images: its text, tokenized again, may have others.
    "SGLANG_MM_AVOID_RETOKENIZE": "1",
    # Keep no vectors of images: SGLang would use those of earlier weights, flushed or not.
    "SGLANG_VLM_CACHE_SIZE_MB": "0",
}
"""The environment for a model that reads images."""
ON_POLICY_TARGET = "fsdp"
"""The value of `--rl-on-policy-target` for a trainer of plain torch modules, such as agentrl's."""


@dataclass(frozen=True, slots=True)
class SGLangLaunch(Launch):
    """The options with which an SGLang server is started."""

    name, package = "SGLang", "sglang"

    lora_targets: Sequence[str] = ()
    """The modules that adapters adapt, or `all`. Empty: the policy is sent as the weights that LoRA
    adapts, with LoRA merged into them, and not as an adapter."""
    sleep: Literal["none", "kv_cache", "all"] = "none"
    returns_experts: bool = False
    """True if it returns the experts that it chooses."""
    fp8: bool = False
    """True if the matrices of layers have 8 bits."""
    reads_images: bool = False
    """True if the model reads images (`agentrl.images`)."""
    on_policy: bool = False
    """True if it computes in the order and precision of a trainer of plain torch modules."""

    def start_for_trainer(self, host: str) -> tuple[ServerProcess, bool]:
        """Start the server; if it is deterministic and on a GPU, try `on_policy` first.

        SGLang does not support this for every model.
        """
        if self.deterministic and self.gpus:
            try:
                return replace(self, on_policy=True).start(host=host), True
            except EngineDead as e:
                error_lines = str(e).splitlines()[1:]
                log.warning(
                    "this model does not start with --rl-on-policy-target: rollouts are"
                    " deterministic, but their logprobs differ more from the trainer's. SGLang's"
                    " error:\n%s",
                    "\n".join(line for line in error_lines if "Error" in line)[:500],
                )
        return self.start(host=host), False

    def _command(self, server: ServerProcess, python: str) -> list[str]:
        keys = {"api-key": server.token, "admin-api-key": server.admin_token}
        file = server.folder / "keys.yaml"
        file.touch(0o600)
        file.write_text(json.dumps(keys))
        return [
            *(python, "-m", "sglang.launch_server", "--config", str(file)),
            *("--model-path", self.model, "--weight-version", "0"),
        ]

    def flags(self) -> list[str]:
        flags = ["--grammar-backend", "none", "--dtype", self.dtype]
        if not self.gpus:
            flags += SGLANG_CPU
            flags += ["--mm-attention-backend", "sdpa"] if self.reads_images else []
        else:
            flags += ["--mem-fraction-static", f"{self.memory:g}", "--tp-size", str(len(self.gpus))]
        if self.lora_targets:
            flags += [
                *("--enable-lora", "--max-lora-rank", str(self.lora_rank)),
                *("--lora-target-modules", *self.lora_targets),
                *("--max-loras-per-batch", str(self.adapters)),
                *("--max-loaded-loras", str(self.adapters)),
            ]
        if self.returns_experts:
            flags.append("--enable-return-routed-experts")
        if self.fp8:
            flags += fp8.launch_flags(base_is_sent=not self.lora_targets)
        if self.sleep != "none":
            flags.append("--enable-memory-saver")
            if self.sleep == "all" and self.lora_rank:
                flags.append("--enable-weights-cpu-backup")
        if self.deterministic:
            flags.append("--enable-deterministic-inference")
        if self.on_policy:
            flags += ["--rl-on-policy-target", ON_POLICY_TARGET]
        return flags

    def _environment(self) -> dict[str, str]:
        # Longer than a client keeps connections.
        environment = {"SGLANG_TIMEOUT_KEEP_ALIVE": "300"}
        if self.reads_images:
            environment |= SGLANG_IMAGES
        if self.sleep != "none":
            # The learner may use these segments; SGLang's memory saver does not start with them.
            for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
                options = os.environ.get(name, "").split(",")
                kept = [o for o in options if not o.strip().startswith("expandable_segments")]
                if kept != options:
                    environment[name] = ",".join(kept)
        return environment


GUARD = "agentrl_vllm_guard"
"""The name of the guard's module in the environment of the server."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The maximum ranks of adapters that vLLM supports."""
VLLM_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""The environment without a GPU: 1 GiB of cache, and threads that share the cores."""
VLLM_ALWAYS = {
    # Enable the management endpoints: weights, pauses, the cache.
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    # Longer than a client keeps connections.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300",
    # Send no usage statistics.
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True)
class VLLMLaunch(Launch):
    """The options with which a vLLM server is started."""

    name, package = "vLLM", "vllm"

    def _command(self, server: ServerProcess, python: str) -> list[str]:
        shutil.copy(guard.__file__, server.folder / f"{GUARD}.py")
        key = server.folder / guard.KEY_FILE
        key.touch(0o600)
        key.write_text(server.token)
        return [
            *("/usr/bin/env", f"PYTHONPATH={server.folder}"),
            *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model),
            *("--middleware", f"{GUARD}.KeyGuard"),
        ]

    def flags(self) -> list[str]:
        flags = [
            *("--dtype", self.dtype),
            # Logprobs after the temperature; by default they are before it.
            *("--logprobs-mode", "processed_logprobs"),
            *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
            "--enable-scale-out",  # Needed for /inference/v1/generate.
        ]
        if self.gpus:
            flags += [
                *("--gpu-memory-utilization", f"{self.memory:g}"),
                *("--tensor-parallel-size", str(len(self.gpus))),
            ]
        else:
            flags.append("--enforce-eager")
        if self.lora_rank:
            max_rank = next((rank for rank in RANKS if rank >= self.lora_rank), self.lora_rank)
            flags += [
                *("--enable-lora", "--max-lora-rank", str(max_rank)),
                *("--max-loras", str(self.adapters), "--max-cpu-loras", str(self.adapters)),
            ]
        return flags

    def _environment(self) -> dict[str, str]:
        batch = {"VLLM_BATCH_INVARIANT": "1"} if self.deterministic else {}
        return VLLM_ALWAYS | ({} if self.gpus else VLLM_CPU) | batch
