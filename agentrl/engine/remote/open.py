"""A run's servers: where they stand, how each is started or found, how the policy goes there."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.config import Config
from agentrl.engine.remote.buckets import IpcSender, NcclSender
from agentrl.engine.remote.client import RemoteEngine
from agentrl.engine.remote.control import Control
from agentrl.engine.remote.launch import EngineSlot, SGLangLaunch, VLLMLaunch
from agentrl.engine.remote.senders import (
    Sender,
    SGLangAdapterSender,
    SGLangDiskSender,
    VLLMAdapterSender,
    VLLMDiskSender,
)
from agentrl.engine.remote.sglang import SGLangEngine
from agentrl.engine.remote.vllm import VLLMEngine
from agentrl.errors import ConfigError, EngineError

TOKEN, ADMIN_TOKEN = "AGENTRL_ENGINE_TOKEN", "AGENTRL_ENGINE_ADMIN_TOKEN"
"""Environment variables with the keys of servers that run already."""

MakeSender = Callable[[Control], Sender]


def make_openers(
    config: Config, base: str, *, cpu: bool, places: Sequence[EngineSlot] | None = None
) -> list[Callable[[], RemoteEngine]]:
    """What starts each server of a run, or finds it.

    Args:
        config: the run's.
        base: the plain model that servers load.
        cpu: whether they do without a GPU.
        places: where those stand that are started; None: on this machine.

    Raises:
        ConfigError: this machine has no such places.
    """
    model = AutoConfig.from_pretrained(base).get_text_config()
    half = torch.float16 if model.dtype == torch.float16 else torch.bfloat16
    dtype = torch.float32 if cpu else half
    if config.rollout.urls:
        return [partial(_attach, config, base, url, dtype) for url in config.rollout.urls]
    if cpu:
        _check_without_gpu(config)
    found = _places(config, cpu) if places is None else places
    return [partial(_start, config, base, place, dtype) for place in found]


# -- where they stand ------------------------------------------------------------------------------


def _places(config: Config, cpu: bool) -> list[EngineSlot]:
    """The last GPUs, since the trainer is on the first.

    Raises:
        ConfigError: there are fewer, or none that the trainer shares where one is to sleep, or one
            where none is to be shared.
    """
    r = config.rollout
    if cpu:
        return [EngineSlot([])] * r.engines
    found, each = torch.cuda.device_count(), r.tensor_parallel_size
    first = found - r.engines * each
    if first < 0:
        raise ConfigError(
            f"rollout.engines={r.engines} times rollout.tensor_parallel_size={each} are"
            f" {r.engines * each} GPUs, but torch finds {found}"
        )
    if first == 0 and config.trainer.placement == "separate":
        raise ConfigError(
            f"trainer.placement=separate: rollout.engines={r.engines} times"
            f" rollout.tensor_parallel_size={each} leave none of {found} GPUs to the trainer alone."
            " Set trainer.placement=colocated, or one of them lower"
        )
    if first > 0 and r.sleep != "none":
        raise ConfigError(
            f"rollout.sleep={r.sleep}: no server shares the trainer's GPU, which is the first of"
            f" {found}. Set rollout.sleep=none"
        )
    starts = range(first, found, each)
    return [EngineSlot(list(range(k, k + each)), shared=k == 0) for k in starts]


def _check_without_gpu(config: Config) -> None:
    """Raises where a server is to do what takes a GPU.

    Raises:
        ConfigError: it is.
    """
    r = config.rollout
    if r.tensor_parallel_size > 1:
        raise ConfigError(
            f"rollout.tensor_parallel_size={r.tensor_parallel_size} is for GPUs. Set it to 1"
        )
    if r.sleep != "none":
        raise ConfigError(
            f"rollout.sleep={r.sleep}: a server on a CPU shares no GPU with the trainer. Set"
            " rollout.sleep=none"
        )
    if r.deterministic and r.name == "sglang":
        raise ConfigError(
            "rollout.deterministic=true: SGLang's deterministic inference is for GPUs. Leave it"
            " out, or set rollout.name=local, which always is deterministic"
        )


# -- one that is started here, one that runs already -----------------------------------------------


def _start(config: Config, base: str, place: EngineSlot, dtype: torch.dtype) -> RemoteEngine:
    """Start a server and return once it samples.

    Raises:
        ConfigError: there is no such server, or the policy cannot go to it as was asked for.
        EngineError: the server did not start; with the last lines it said.
    """
    r = config.rollout
    common: dict[str, Any] = {
        "python": r.python,
        "dtype": str(dtype).removeprefix("torch."),
        "gpus": place.gpus,
        "memory": r.gpu_memory_utilization,
        "deterministic": r.deterministic,
        "lora_rank": config.model.lora_rank,
        "arguments": r.launch,
    }
    if r.name == "vllm":
        launch = VLLMLaunch(base, **common)
        sender = _vllm_sender(config, base, cpu=not place.gpus)
        connect = partial(VLLMEngine, sender=sender, seeded=r.deterministic)
    else:
        sender = _sglang_sender(config, place)
        sleep = r.sleep if place.shared else "none"
        targets = _targets(config) if sender is SGLangAdapterSender else ()
        launch = SGLangLaunch(base, lora_targets=targets, sleep=sleep, **common)
        connect = partial(SGLangEngine, sender=sender, sleep=sleep)
    process, on_policy = place.run(launch.start_for_trainer)
    if r.name == "sglang":
        # A trainer's float32 embeddings and norms are kept as they are by a server that computes as
        # the trainer does.
        sent = None if on_policy else dtype
        connect = partial(connect, admin_key=process.admin_token, dtype=sent)
    try:
        return connect(
            process.url, vocabulary=_vocabulary(base), key=process.token, process=process
        )
    except BaseException:
        process.stop()
        raise


def _attach(config: Config, base: str, url: str, dtype: torch.dtype) -> RemoteEngine:
    """Use a server that runs already.

    To be trained with, a vLLM must run with `--logprobs-mode processed_logprobs` and under
    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 (LoRA) or VLLM_SERVER_DEV_MODE=1 (all weights).

    Raises:
        EngineError: there is none.
    """
    r = config.rollout
    key, admin_key = os.environ.get(TOKEN, ""), os.environ.get(ADMIN_TOKEN, "")
    options: dict[str, Any] = {"vocabulary": _vocabulary(base), "key": key}
    try:
        if r.name == "vllm":
            sender = _vllm_sender(config, base, cpu=False)
            return VLLMEngine(url, sender=sender, seeded=r.deterministic, **options)
        adapter = config.model.lora_rank > 0 and r.lora != "merge"
        if adapter and r.lora == "auto":
            adapter = bool(Control(url, key=key).ask("/server_info").get("enable_lora"))
        sender = SGLangAdapterSender if adapter else SGLangDiskSender
        return SGLangEngine(url, dtype=dtype, admin_key=admin_key, sender=sender, **options)
    except EngineError as e:
        keys = f"{TOKEN} ({'set' if key else 'not set'})"
        if r.name == "sglang":
            keys += f" and {ADMIN_TOKEN} ({'set' if admin_key else 'not set'})"
        raise type(e)(f"{e}\nThe server is one of rollout.urls; its keys are in {keys}") from e


def _vocabulary(base: str) -> int:
    return AutoConfig.from_pretrained(base).get_text_config().vocab_size


def _targets(config: Config) -> Sequence[str]:
    """The modules that LoRA adapts, as SGLang names them."""
    targets = config.model.lora_target_modules
    if targets == "all-linear":
        return ["all"]
    return [targets] if isinstance(targets, str) else targets


# -- how the policy goes to it ---------------------------------------------------------------------


def _sglang_sender(config: Config, place: EngineSlot) -> MakeSender:
    """How the policy goes to an SGLang server of our own.

    Raises:
        ConfigError: not in the way that was asked for.
    """
    r, gpus, shared = config.rollout, place.gpus, place.shared
    if config.model.lora_rank and (r.lora == "adapter" or (r.lora == "auto" and gpus)):
        if not gpus:
            raise ConfigError(
                "rollout.lora=adapter: SGLang takes no adapters on a CPU. Set rollout.lora=merge"
            )
        return SGLangAdapterSender
    sync = r.sync
    if sync == "auto":
        sync = "disk" if not gpus or not place.near else "ipc" if shared else "nccl"
    if sync == "disk":
        return SGLangDiskSender
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


def _vllm_sender(config: Config, base: str, *, cpu: bool) -> MakeSender:
    """How the policy goes to a vLLM server: LoRA as an adapter, here on a CPU as well.

    Raises:
        ConfigError: it was to be merged.
    """
    if config.model.lora_rank:
        if config.rollout.lora == "merge":
            raise ConfigError(
                "rollout.lora=merge: vLLM takes all weights at once, not only those that LoRA"
                " adapts. Set rollout.lora=adapter"
            )
        return VLLMAdapterSender
    tied = AutoConfig.from_pretrained(base).get_text_config().tie_word_embeddings
    return partial(VLLMDiskSender, names=parameter_names(base), stale_head=cpu and bool(tied))


def parameter_names(base: str) -> frozenset[str]:
    """Of all a model's tensors, each once; no weights are read."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    return frozenset(name for name, _ in model.named_parameters())
