"""An SGLang server of our own: its command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl.engine.server.process import (
    LOOPBACK,
    START_SECONDS,
    ServerProcess,
    package_folder,
    python_with,
    visible_gpus,
)
from agentrl.engine.sglang.sync.adapter import RESIDENT

CPU = (
    *("--device", "cpu"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle"),
    *("--mem-fraction-static", "0.5", "--max-total-tokens", "65536"),
)
"""How a server runs where there is no GPU; what others allot while it starts counts as its own."""
ON_POLICY_TARGET = "fsdp"
"""Of `--rl-on-policy-target`: a trainer of plain torch modules, such as ours."""


@dataclass(frozen=True, slots=True)
class Lora:
    """What a server must know of adapters before it sees one."""

    rank: int
    targets: Sequence[str]
    """Names of modules, or `all`."""


@dataclass(frozen=True, slots=True)
class SGLangLaunch:
    """How a server is started."""

    model: str
    """A folder in transformers' format, or a name on the hub."""
    python: str = ""
    """Of the environment that has SGLang; "" is this one."""
    dtype: str = "auto"
    gpus: Sequence[int] = ()
    """The GPUs it sees, one for each share of the model, as torch counts them here; none: a CPU."""
    memory: float = 0.5
    """Its share of a GPU's memory."""
    lora: Lora | None = None
    """None: weights alone are sent to it."""
    whole: bool = True
    """Whether updates send all its weights; those of merged LoRA leave the others as they were."""
    sleep: Literal["none", "kv_cache", "all"] = "none"
    deterministic: bool = False
    on_policy: bool = False
    """Whether it computes in the order and precision of a trainer of plain torch modules."""
    arguments: Sequence[str] = ()
    """Further ones, which win."""

    def start(self, start_seconds: float = START_SECONDS, *, host: str = LOOPBACK) -> ServerProcess:
        """Start it, listening on an address of this machine, and wait until it is healthy.

        Raises:
            ConfigError: there is no such Python, or no SGLang in it.
            EngineDead: it ended; with the last lines it said.
            EngineError: it is not healthy in time.
        """
        python = python_with("sglang", self.python)

        def command(server: ServerProcess) -> list[str]:
            # The command line of a process is read by everybody: the keys go by a file.
            keys = {"api-key": server.token, "admin-api-key": server.admin_token}
            file = server.folder / "keys.yaml"
            file.touch(0o600)
            file.write_text(json.dumps(keys))
            return [
                *(python, "-m", "sglang.launch_server", "--config", str(file)),
                *("--model-path", self.model, "--weight-version", "0"),
                *("--host", server.host, "--port", str(server.port)),
                *self._flags(),
                *self.arguments,
            ]

        return ServerProcess(
            "SGLang",
            command,
            host=host,
            environment=visible_gpus(self.gpus)
            | {
                "SGLANG_TIMEOUT_KEEP_ALIVE": "300",  # longer than a client keeps connections
            },
            start_seconds=start_seconds,
        )

    def knows_on_policy(self) -> bool:
        """Whether this SGLang has the option: its source says so faster than its help."""
        folder = package_folder(python_with("sglang", self.python), "sglang")
        source = folder / "srt/server_args.py"
        return source.is_file() and "rl_on_policy_target" in source.read_text()

    def _flags(self) -> list[str]:
        flags = ["--grammar-backend", "none", "--dtype", self.dtype]
        if not self.gpus:
            flags += CPU
        else:
            flags += ["--mem-fraction-static", f"{self.memory:g}", "--tp-size", str(len(self.gpus))]
        if self.lora:
            flags += [
                *("--enable-lora", "--max-lora-rank", str(self.lora.rank)),
                *("--lora-target-modules", *self.lora.targets),
                *("--max-loras-per-batch", str(RESIDENT), "--max-loaded-loras", str(RESIDENT)),
            ]
        if self.sleep != "none":
            flags.append("--enable-memory-saver")
            if self.sleep == "all" and (self.lora or not self.whole):
                flags.append("--enable-weights-cpu-backup")
        if self.deterministic:
            flags.append("--enable-deterministic-inference")
        if self.on_policy:
            flags += ["--rl-on-policy-target", ON_POLICY_TARGET]
        return flags
