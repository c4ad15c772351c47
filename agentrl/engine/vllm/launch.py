"""A vLLM server of our own: its command line."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.engine.server.process import (
    LOOPBACK,
    START_SECONDS,
    ServerProcess,
    package_folder,
    python_with,
    visible_gpus,
)
from agentrl.engine.vllm import guard
from agentrl.engine.vllm.sync import RESIDENT

GUARD = "agentrl_vllm_guard"
"""The module's name in the server's environment."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The greatest ranks of adapters that vLLM makes room for."""
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""How a server runs where there is no GPU: a GiB of cache, and threads that share the cores."""
ALWAYS = {
    # What manages it: weights, pauses, the cache.
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    # Longer than a client keeps connections.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300",
    # Nobody is told what is trained here.
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True)
class VLLMLaunch:
    """How a server is started."""

    model: str
    """A folder in transformers' format, or a name on the hub."""
    python: str = ""
    """Of the environment that has vLLM; "" is this one."""
    dtype: str = "auto"
    gpus: Sequence[int] = ()
    """The GPUs it sees, one for each share of the model, as torch counts them here; none: a CPU."""
    memory: float = 0.5
    """Its share of a GPU's memory."""
    lora_rank: int = 0
    """Of the adapters that will be sent to it; 0: weights alone are."""
    deterministic: bool = False
    arguments: Sequence[str] = ()
    """Further ones, which win."""

    def start(self, start_seconds: float = START_SECONDS, *, host: str = LOOPBACK) -> ServerProcess:
        """Start it, listening on an address of this machine, and wait until it is healthy.

        Raises:
            ConfigError: there is no such Python, or no vLLM in it.
            EngineDead: it ended; with the last lines it said.
            EngineError: it is not healthy in time.
        """
        python = python_with("vllm", self.python)

        def command(server: ServerProcess) -> list[str]:
            shutil.copy(guard.__file__, server.folder / f"{GUARD}.py")
            key = server.folder / guard.KEY_FILE
            key.touch(0o600)
            key.write_text(server.token)
            return [
                *("/usr/bin/env", f"PYTHONPATH={server.folder}"),
                *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model),
                *("--host", server.host, "--port", str(server.port)),
                *("--middleware", f"{GUARD}.Guard"),
                *self._flags(python),
                *self.arguments,
            ]

        return ServerProcess(
            "vLLM",
            command,
            host=host,
            environment=visible_gpus(self.gpus)
            | ALWAYS
            | ({} if self.gpus else CPU)
            | ({"VLLM_BATCH_INVARIANT": "1"} if self.deterministic else {}),
            start_seconds=start_seconds,
        )

    def _flags(self, python: str) -> list[str]:
        flags = [
            *("--dtype", self.dtype),
            # Of what was sampled, after the temperature; the default is before it.
            *("--logprobs-mode", "processed_logprobs"),
            *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
        ]
        if _knows(python, "enable_scale_out"):  # /inference/v1/generate is not there without it
            flags.append("--enable-scale-out")
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
                *("--max-loras", str(RESIDENT), "--max-cpu-loras", str(RESIDENT)),
            ]
        return flags


def _knows(python: str, option: str) -> bool:
    """Whether vLLM has an option: from its source, since importing it takes half a minute."""
    entrypoints = package_folder(python, "vllm") / "entrypoints"
    return any(option in file.read_text() for file in entrypoints.rglob("cli_args.py"))
