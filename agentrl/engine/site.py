"""Where a run's servers stand, and how the policy goes to each of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from transformers import AutoConfig

from agentrl.config import Config
from agentrl.engine.pool import PooledEngine
from agentrl.engine.sglang import Lora, SGLangEngine, SGLangLaunch
from agentrl.engine.sglang.control import Control
from agentrl.engine.sglang.sync.adapter import AdapterSender
from agentrl.engine.sglang.sync.disk import DiskSender
from agentrl.engine.sglang.sync.ipc import IpcSender
from agentrl.engine.sglang.sync.nccl import NcclSender
from agentrl.engine.sglang.sync.sender import Sender
from agentrl.engine.vllm import open as vllm
from agentrl.errors import ConfigError

TOKEN, ADMIN_TOKEN = "AGENTRL_ENGINE_TOKEN", "AGENTRL_ENGINE_ADMIN_TOKEN"
"""Environment variables with the keys of servers that run already."""


class Site:
    """The servers of a run, not started yet."""

    def __init__(self, config: Config, base: str, *, cpu: bool):
        """Read the model's config.

        Args:
            config: the run's.
            base: the plain model that servers load.
            cpu: whether they do without a GPU.
        """
        self._config, self._rollout, self._base, self._cpu = config, config.rollout, base, cpu
        model = AutoConfig.from_pretrained(base).get_text_config()
        self._vocabulary: int = model.vocab_size
        half = torch.float16 if model.dtype == torch.float16 else torch.bfloat16
        self._dtype = torch.float32 if cpu else half

    def openers(self) -> list[Callable[[], PooledEngine]]:
        """What starts each server, or finds it.

        Raises:
            ConfigError: this machine has no such places.
        """
        if self._rollout.urls:
            return [partial(self._attach, url) for url in self._rollout.urls]
        return [partial(self._start, gpus) for gpus in self._places()]

    def _places(self) -> list[list[int]]:
        """The GPUs of each server: the last ones, since the trainer is on the first.

        Raises:
            ConfigError: there are fewer.
        """
        engines, each = self._rollout.engines, self._rollout.tensor_parallel_size
        if self._cpu:
            if each > 1:
                raise ConfigError(f"rollout.tensor_parallel_size={each} is for GPUs. Set it to 1")
            if self._rollout.sleep != "none":
                raise ConfigError(
                    f"rollout.sleep={self._rollout.sleep}: a server on a CPU shares no GPU with the"
                    " trainer. Set rollout.sleep=none"
                )
            return [[] for _ in range(engines)]
        found = torch.cuda.device_count()
        first = found - engines * each
        if first < 0:
            raise ConfigError(
                f"rollout.engines={engines} times rollout.tensor_parallel_size={each} are"
                f" {engines * each} GPUs, but torch finds {found}"
            )
        if first > 0 and self._rollout.sleep != "none":
            raise ConfigError(
                f"rollout.sleep={self._rollout.sleep}: no server shares the trainer's GPU, which is"
                f" the first of {found}. Set rollout.sleep=none"
            )
        return [list(range(first + k * each, first + (k + 1) * each)) for k in range(engines)]

    def _start(self, gpus: list[int]) -> PooledEngine:
        r, m = self._rollout, self._config.model
        if r.name == "vllm":
            dtype = str(self._dtype).removeprefix("torch.")
            return vllm.start(self._config, self._base, dtype=dtype, gpus=gpus)
        adapter = m.lora_rank > 0 and (r.lora == "adapter" or (r.lora == "auto" and bool(gpus)))
        targets = m.lora_target_modules
        every = "all" if targets == "all-linear" else targets
        every = [every] if isinstance(every, str) else every
        shared = bool(gpus) and gpus[0] == 0
        process = SGLangLaunch(
            self._base,
            python=r.python,
            dtype=str(self._dtype).removeprefix("torch."),
            gpus=gpus,
            memory=r.gpu_memory_utilization,
            lora=Lora(m.lora_rank, [every] if isinstance(every, str) else every)
            if adapter
            else None,
            sleep=r.sleep if shared else "none",
            deterministic=r.deterministic,
            arguments=r.launch,
        ).start()
        try:
            return SGLangEngine(
                process.url,
                vocabulary=self._vocabulary,
                dtype=self._dtype,
                key=process.token,
                admin_key=process.admin_token,
                process=process,
                sender=AdapterSender if adapter else self._sender(gpus, shared),
                sleep=r.sleep if shared else "none",
            )
        except BaseException:
            process.stop()
            raise

    def _attach(self, url: str) -> PooledEngine:
        key, admin_key = os.environ.get(TOKEN, ""), os.environ.get(ADMIN_TOKEN, "")
        if self._rollout.name == "vllm":
            return vllm.attach(self._config, self._base, url, key)
        lora = self._rollout.lora
        adapter = self._config.model.lora_rank > 0 and lora != "merge"
        if adapter and lora == "auto":
            adapter = bool(Control(url, key=key).ask("/server_info").get("enable_lora"))
        return SGLangEngine(
            url,
            vocabulary=self._vocabulary,
            dtype=self._dtype,
            key=key,
            admin_key=admin_key,
            sender=AdapterSender if adapter else DiskSender,
        )

    def _sender(self, gpus: list[int], shared: bool) -> Callable[[Control], Sender]:
        """How weights go to a server on these GPUs.

        Raises:
            ConfigError: not in the way that was asked for.
        """
        sync = self._rollout.sync
        if sync == "auto":
            sync = "disk" if not gpus else "ipc" if shared else "nccl"
        if sync == "disk":
            return DiskSender
        if not gpus or shared != (sync == "ipc"):
            where = (
                "a CPU"
                if not gpus
                else f"GPU {gpus[0]}, "
                + ("which is the trainer's" if shared else "which is not the trainer's")
            )
            raise ConfigError(f"rollout.sync={sync}: a server is on {where}. Set rollout.sync=auto")
        if sync == "ipc":
            return partial(IpcSender, tp=len(gpus))
        return partial(NcclSender, tp=len(gpus))
