"""Servers of our own: on loopback, with a random key, for as long as this process lives.

For a run on another machine a server listens on an address of its own, with the same keys.
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
from tempfile import TemporaryDirectory
from typing import ClassVar, Literal, Protocol

from agentrl.engine.remote import guard
from agentrl.errors import ConfigError, EngineDead, EngineError
from agentrl.http import fetch
from agentrl.workers import parent_watch
from agentrl.workers.child_process import OUTPUT_GRACE_SECONDS, ChildProcess

log = logging.getLogger("agentrl")

START_SECONDS = 1800.0
"""Loading and compiling take their time; a server that dies meanwhile is noticed at once."""
HEALTH_SECONDS = 30.0
TAIL_LINES = 25
LOWEST_PORT, HIGHEST_PORT = 20_000, 50_000
PORT_TRIES = 200
LOOPBACK = "127.0.0.1"
MAX_ADAPTERS = 2
"""How many adapters of a run a server holds: the last two, so that turns in flight can end."""


class ServerHandle(Protocol):
    """What an engine needs of its server's process, wherever that is."""

    url: str
    token: str
    admin_token: str

    @property
    def running(self) -> bool:
        """Whether it is there; asked often, so it does not wait."""
        ...

    def death(self) -> EngineDead:
        """What to raise of a server that ended: with the last lines it said."""
        ...

    def stop(self) -> None:
        """End it and all that it started. Idempotent."""
        ...


class ServerProcess:
    """A server's process, from its start to its end."""

    def __init__(
        self,
        name: str,
        command: Callable[[ServerProcess], Sequence[str]],
        *,
        host: str = LOOPBACK,
        environment: Mapping[str, str] | None = None,
        start_seconds: float = START_SECONDS,
    ):
        """Start a server and return once it is healthy (GET /health).

        Args:
            name: the server's, for messages.
            command: what to run, given `folder`, `host`, `port` and `token`. The token must go by a
                file in the folder or by the environment, since command lines are read by everybody.
            host: the address of this machine that it listens on.
            environment: variables beside our own.
            start_seconds: how long that may take.

        Raises:
            EngineDead: it ended; with the last lines it said.
            EngineError: it is not healthy in time.
        """
        self._name = name
        self.token = secrets.token_hex(32)
        """A random key that its endpoints ask for."""
        self.admin_token = secrets.token_hex(32)
        """Another, for those that manage it, where it tells the two apart."""
        self._folder = TemporaryDirectory(prefix="agentrl-engine-")
        self.folder = Path(self._folder.name)
        """For its files; gone after its end."""
        self.host, self.port = host, _free_port(host)
        self.url = f"http://{host}:{self.port}"
        self._process = ChildProcess(
            [sys.executable, "-I", parent_watch.__file__, str(self.folder), *command(self)],
            stops_at_eof=True,
            environment={
                "TMPDIR": str(self.folder),  # its sockets lie where they are cleared away
                "PYTHONSAFEPATH": "1",  # no file where we stand is a module
                **(environment or {}),
            },
        )
        try:
            self._wait_healthy(start_seconds)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """Of the process that holds the server, and of the process group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it is there."""
        return self._process.running

    def death(self) -> EngineDead:
        """What to raise of a server that ended: with the last lines it said."""
        self._process.wait(OUTPUT_GRACE_SECONDS)
        lines = list(self._process.tail)[-TAIL_LINES:]
        text = "\n".join(f"  | {line}" for line in lines)
        said = text.replace(self.token, "***").replace(self.admin_token, "***")
        return EngineDead(f"the {self._name} server at {self.url} ended. Its last lines:\n{said}")

    def stop(self) -> None:
        """End it and all that it started. Idempotent."""
        self._process.stop()
        self._folder.cleanup()

    def _wait_healthy(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not self.running:
                raise self.death()
            with contextlib.suppress(EngineError):
                status, _ = fetch(self.url, "/health", error=EngineError, timeout=HEALTH_SECONDS)
                if status == 200:
                    return
            time.sleep(0.1)
        raise EngineError(
            f"the {self._name} server at {self.url} is not healthy after {seconds:g} s"
        )


Start = Callable[[str], tuple[ServerProcess, bool]]
"""Starts a server that listens on an address; with a word on how (see `EngineSlot.run`)."""


def here(start: Start) -> tuple[ServerHandle, bool]:
    """On this machine, for this machine alone."""
    return start(LOOPBACK)


@dataclass(frozen=True, slots=True)
class EngineSlot:
    """One of a run's places for servers."""

    gpus: Sequence[int] = ()
    """Those of the server, as torch counts them there; none: a CPU."""
    shared: bool = False
    """Whether the first of them is the learner's."""
    near: bool = True
    """Whether the learner's weights are in this process's memory, or on a GPU that it sees."""
    run: Callable[[Start], tuple[ServerHandle, bool]] = here
    """Has a server started there, and hands back what this process needs of it."""


async def raise_if_dead(process: ServerHandle | None) -> None:
    """A connection breaks a moment before its process is seen to have ended.

    Raises:
        EngineDead: it did.
    """
    for _ in range(20):
        if process is None:
            return
        if not process.running:
            raise process.death() from None
        await asyncio.sleep(0.05)


def find_package(package: str, python: str) -> tuple[str, Path]:
    """Ask an interpreter for a package; importing one may take half a minute.

    Args:
        package: such as sglang.
        python: the interpreter's path; "" is this one.

    Returns:
        The interpreter's full path, and the package's folder.

    Raises:
        ConfigError: the interpreter does not run, or has no such package.
    """
    path = str(Path(python).absolute()) if python else sys.executable
    asks = (
        f"import importlib.util as u; print(u.find_spec('{package}').submodule_search_locations[0])"
    )
    try:
        found = subprocess.run(
            [path, "-c", asks], cwd="/", capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise ConfigError(f"rollout.python={python}: cannot run {path}: {e}") from None
    if found.returncode:
        raise ConfigError(
            f"rollout.name={package}: {path} has no {package}. Install it there (pip install"
            f' "agentrl[{package}]"), or name the Python of an environment that has it:'
            " rollout.python"
        )
    return path, Path(found.stdout.strip())


def visible_gpus(gpus: Sequence[int]) -> dict[str, str]:
    """The environment in which a process sees these of our GPUs only; none named: all as they are.

    Args:
        gpus: indices as torch counts them here.
    """
    if not gpus:
        return {}
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = ours.split(",") if ours else None
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[g] if names else str(g) for g in gpus)}


def _free_port(host: str = LOOPBACK) -> int:
    """A port that nobody listens on, with room above: SGLang takes others up to 10,000 higher.

    Raises:
        EngineError: none is found.
    """
    for k in range(2 * PORT_TRIES):
        # The system's choice, and where its range lies too high, our own.
        span = HIGHEST_PORT - LOWEST_PORT
        wanted = 0 if k < PORT_TRIES else LOWEST_PORT + secrets.randbelow(span)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind((host, wanted))
            if (port := s.getsockname()[1]) < HIGHEST_PORT:
                return port
    raise EngineError(f"no port below {HIGHEST_PORT} is free for a server")


@dataclass(frozen=True, slots=True)
class Launch(ABC):
    """How a server is started."""

    name: ClassVar[str]
    """The server's, for messages."""
    package: ClassVar[str]

    model: str
    """A folder in transformers' format, or a name on the hub."""
    python: str = ""
    """Of the environment that has the server; "" is this one."""
    dtype: str = "auto"
    gpus: Sequence[int] = ()
    """The GPUs it sees, one for each share of the model, as torch counts them here; none: a CPU."""
    memory: float = 0.5
    """Its share of a GPU's memory."""
    deterministic: bool = False
    lora_rank: int = 0
    """Of the policy's LoRA; 0: all weights learn."""
    arguments: Sequence[str] = ()
    """Further ones, which win."""

    def start(self, start_seconds: float = START_SECONDS, *, host: str = LOOPBACK) -> ServerProcess:
        """Start it, listening on an address of this machine, and wait until it is healthy.

        Raises:
            ConfigError: there is no such Python, or no such server in it.
            EngineDead: it ended; with the last lines it said.
            EngineError: it is not healthy in time.
        """
        python, folder = find_package(self.package, self.python)

        def command(server: ServerProcess) -> list[str]:
            return [
                *self._command(server, python),
                *("--host", server.host, "--port", str(server.port)),
                *self._flags(folder),
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
        """Start it; also says whether it computes in the order and precision of our trainer."""
        return self.start(host=host), False

    @abstractmethod
    def _command(self, server: ServerProcess, python: str) -> list[str]:
        """The program, its model and its keys.

        The command line of a process is read by everybody: the keys go by a file.
        """

    @abstractmethod
    def _flags(self, package: Path) -> list[str]: ...

    @abstractmethod
    def _environment(self) -> dict[str, str]: ...


SGLANG_CPU = (
    *("--device", "cpu"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle"),
    *("--mem-fraction-static", "0.5", "--max-total-tokens", "65536"),
)
"""How a server runs where there is no GPU; what others allot while it starts counts as its own."""
ON_POLICY_TARGET = "fsdp"
"""Of `--rl-on-policy-target`: a trainer of plain torch modules, such as ours."""


@dataclass(frozen=True, slots=True)
class SGLangLaunch(Launch):
    """How an SGLang server is started."""

    name, package = "SGLang", "sglang"

    lora_targets: Sequence[str] = ()
    """The modules that adapters adapt, or `all`. None: it is sent weights, with LoRA merged into
    those that LoRA adapts, and the others stay as they were."""
    sleep: Literal["none", "kv_cache", "all"] = "none"
    on_policy: bool = False
    """Whether it computes in the order and precision of a trainer of plain torch modules."""

    def start_for_trainer(self, host: str) -> tuple[ServerProcess, bool]:
        """See `Launch`: where it is deterministic, on a GPU. Not every model can."""
        if self.deterministic and self.gpus and self.has_on_policy_option():
            try:
                return replace(self, on_policy=True).start(host=host), True
            except EngineDead as e:
                why = str(e).splitlines()[1:]
                log.warning(
                    "this model does not start with --rl-on-policy-target: rollouts are"
                    " deterministic, but not as near to the trainer as could be. SGLang said:\n%s",
                    "\n".join(line for line in why if "Error" in line)[:500],
                )
        return self.start(host=host), False

    def has_on_policy_option(self) -> bool:
        """Whether this SGLang has the option: its source says so faster than its help."""
        source = find_package("sglang", self.python)[1] / "srt/server_args.py"
        return source.is_file() and "rl_on_policy_target" in source.read_text()

    def _command(self, server: ServerProcess, python: str) -> list[str]:
        keys = {"api-key": server.token, "admin-api-key": server.admin_token}
        file = server.folder / "keys.yaml"
        file.touch(0o600)
        file.write_text(json.dumps(keys))
        return [
            *(python, "-m", "sglang.launch_server", "--config", str(file)),
            *("--model-path", self.model, "--weight-version", "0"),
        ]

    def _flags(self, package: Path) -> list[str]:
        flags = ["--grammar-backend", "none", "--dtype", self.dtype]
        if not self.gpus:
            flags += SGLANG_CPU
        else:
            flags += ["--mem-fraction-static", f"{self.memory:g}", "--tp-size", str(len(self.gpus))]
        if self.lora_targets:
            flags += [
                *("--enable-lora", "--max-lora-rank", str(self.lora_rank)),
                *("--lora-target-modules", *self.lora_targets),
                *(
                    "--max-loras-per-batch",
                    str(MAX_ADAPTERS),
                    "--max-loaded-loras",
                    str(MAX_ADAPTERS),
                ),
            ]
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
        return {"SGLANG_TIMEOUT_KEEP_ALIVE": "300"}  # longer than a client keeps connections


GUARD = "agentrl_vllm_guard"
"""The module's name in the server's environment."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The greatest ranks of adapters that vLLM makes room for."""
VLLM_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""How a server runs where there is no GPU: a GiB of cache, and threads that share the cores."""
VLLM_ALWAYS = {
    # What manages it: weights, pauses, the cache.
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    # Longer than a client keeps connections.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300",
    # Nobody is told what is trained here.
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True)
class VLLMLaunch(Launch):
    """How a vLLM server is started."""

    name, package = "vLLM", "vllm"

    def _command(self, server: ServerProcess, python: str) -> list[str]:
        shutil.copy(guard.__file__, server.folder / f"{GUARD}.py")
        key = server.folder / guard.KEY_FILE
        key.touch(0o600)
        key.write_text(server.token)
        return [
            *("/usr/bin/env", f"PYTHONPATH={server.folder}"),
            *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model),
            *("--middleware", f"{GUARD}.Guard"),
        ]

    def _flags(self, package: Path) -> list[str]:
        flags = [
            *("--dtype", self.dtype),
            # Of what was sampled, after the temperature; the default is before it.
            *("--logprobs-mode", "processed_logprobs"),
            *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
        ]
        # Whether it has an option: from its source, since importing it takes half a minute.
        sources = (package / "entrypoints").rglob("cli_args.py")
        if any("enable_scale_out" in file.read_text() for file in sources):
            flags.append("--enable-scale-out")  # no /inference/v1/generate without it
        if self.gpus:
            flags += [
                *("--gpu-memory-utilization", f"{self.memory:g}"),
                *("--tensor-parallel-size", str(len(self.gpus))),
            ]
        else:
            flags.append("--enforce-eager")
        if self.lora_rank:
            room = next((rank for rank in RANKS if rank >= self.lora_rank), self.lora_rank)
            flags += [
                *("--enable-lora", "--max-lora-rank", str(room)),
                *("--max-loras", str(MAX_ADAPTERS), "--max-cpu-loras", str(MAX_ADAPTERS)),
            ]
        return flags

    def _environment(self) -> dict[str, str]:
        batch = {"VLLM_BATCH_INVARIANT": "1"} if self.deterministic else {}
        return VLLM_ALWAYS | ({} if self.gpus else VLLM_CPU) | batch
