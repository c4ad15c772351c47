"""An SGLang engine for a run: on a server that is started here, or on one that runs already."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from transformers import AutoConfig

from agentrl.config import Config
from agentrl.engine.server.control import Control
from agentrl.engine.server.place import Place
from agentrl.engine.server.process import ServerProcess
from agentrl.engine.server.sender import Sender
from agentrl.engine.sglang.client import SGLangEngine
from agentrl.engine.sglang.launch import Lora, SGLangLaunch
from agentrl.engine.sglang.sync.adapter import AdapterSender
from agentrl.engine.sglang.sync.disk import DiskSender
from agentrl.engine.sglang.sync.ipc import IpcSender
from agentrl.engine.sglang.sync.nccl import NcclSender
from agentrl.errors import ConfigError, EngineDead

log = logging.getLogger("agentrl")


def start(config: Config, base: str, *, dtype: torch.dtype, place: Place) -> SGLangEngine:
    """Start a server and return once it samples.

    Args:
        config: the run's.
        base: the plain model that it loads.
        dtype: what it computes in.
        place: where it stands.

    Raises:
        ConfigError: there is no SGLang, or the policy cannot go to it as was asked for.
        EngineError: the server did not start; with the last lines it said.
    """
    r, m, gpus, shared = config.rollout, config.model, place.gpus, place.shared
    adapter = m.lora_rank > 0 and (r.lora == "adapter" or (r.lora == "auto" and bool(gpus)))
    if adapter and not gpus:
        raise ConfigError(
            "rollout.lora=adapter: SGLang takes no adapters on a CPU. Set rollout.lora=merge"
        )
    sender = AdapterSender if adapter else _sender(r.sync, place)
    sleep = r.sleep if shared else "none"
    targets = m.lora_target_modules
    every = (
        ["all"] if targets == "all-linear" else [targets] if isinstance(targets, str) else targets
    )
    launch = SGLangLaunch(
        base,
        python=r.python,
        dtype=str(dtype).removeprefix("torch."),
        gpus=gpus,
        memory=r.gpu_memory_utilization,
        lora=Lora(m.lora_rank, every) if adapter else None,
        whole=m.lora_rank == 0,
        sleep=sleep,
        deterministic=r.deterministic,
        arguments=r.launch,
    )
    on_policy = r.deterministic and bool(gpus)
    process, on_policy = place.run(partial(_started, launch, on_policy))
    try:
        return SGLangEngine(
            process.url,
            vocabulary=_vocabulary(base),
            # A trainer's float32 embeddings and norms are kept as they are by a server that
            # computes as the trainer does.
            dtype=None if on_policy else dtype,
            key=process.token,
            admin_key=process.admin_token,
            process=process,
            sender=sender,
            sleep=sleep,
        )
    except BaseException:
        process.stop()
        raise


def attach(
    config: Config, base: str, url: str, *, dtype: torch.dtype, key: str, admin_key: str
) -> SGLangEngine:
    """Use a server that runs already; see `start`.

    Raises:
        EngineError: there is none.
    """
    lora = config.rollout.lora
    adapter = config.model.lora_rank > 0 and lora != "merge"
    if adapter and lora == "auto":
        adapter = bool(Control(url, key=key).ask("/server_info").get("enable_lora"))
    return SGLangEngine(
        url,
        vocabulary=_vocabulary(base),
        dtype=dtype,
        key=key,
        admin_key=admin_key,
        sender=AdapterSender if adapter else DiskSender,
    )


def _vocabulary(base: str) -> int:
    return AutoConfig.from_pretrained(base).get_text_config().vocab_size


def _started(launch: SGLangLaunch, on_policy: bool, host: str) -> tuple[ServerProcess, bool]:
    """The server, and whether it computes as the trainer does, which not every model can."""
    if on_policy and launch.knows_on_policy():
        try:
            return replace(launch, on_policy=True).start(host=host), True
        except EngineDead as e:
            why = str(e).splitlines()[1:]
            log.warning(
                "this model does not start with --rl-on-policy-target: rollouts are deterministic,"
                " but not as near to the trainer as could be. SGLang said:\n%s",
                "\n".join(line for line in why if "Error" in line)[:500],
            )
    return launch.start(host=host), False


def _sender(sync: str, place: Place) -> Callable[[Control], Sender]:
    """How weights go to a server.

    Raises:
        ConfigError: not in the way that was asked for.
    """
    gpus, shared = place.gpus, place.shared
    if sync == "auto":
        sync = "disk" if not gpus or not place.near else "ipc" if shared else "nccl"
    if sync == "disk":
        return DiskSender
    if not place.near:
        raise ConfigError(
            f"rollout.sync={sync}: the weights are spread over processes of their own, and go to"
            " servers through files. Set rollout.sync=auto"
        )
    if not gpus or shared != (sync == "ipc"):
        where = "a CPU" if not gpus else f"GPU {gpus[0]}, which is "
        owner = "" if not gpus else "the trainer's" if shared else "not the trainer's"
        raise ConfigError(
            f"rollout.sync={sync}: a server is on {where}{owner}. Set rollout.sync=auto"
        )
    return partial(IpcSender if sync == "ipc" else NcclSender, tp=len(gpus))
