"""Opens the servers of a run: starts or attaches each, and chooses how the policy is sent to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from agentrl.config import Config
from agentrl.engine.checks import check_image_servers
from agentrl.engine.local.load import (
    empty_model,
    find_targets,
    load_model_config,
    reads_images,
    stacked_parameters,
)
from agentrl.engine.remote.admin import AdminClient
from agentrl.engine.remote.client import RemoteEngine
from agentrl.engine.remote.launch import EngineSlot, SGLangLaunch, VLLMLaunch
from agentrl.engine.remote.senders import FROM_FILES, Delivery
from agentrl.engine.remote.sglang import SGLangEngine
from agentrl.engine.remote.vllm import VLLMEngine
from agentrl.errors import ConfigError, EngineError

TOKEN, ADMIN_TOKEN = "AGENTRL_ENGINE_TOKEN", "AGENTRL_ENGINE_ADMIN_TOKEN"
"""Environment variables with the keys of servers that already run."""


def make_openers(
    config: Config,
    base: str,
    *,
    cpu: bool,
    slots: Sequence[EngineSlot] | None = None,
    learner_loaded: Future[None] | None = None,
) -> list[Callable[[], RemoteEngine]]:
    """Return one function per server of a run, which starts it or connects to it.

    Args:
        config: the config of the run.
        base: the plain model that servers load.
        cpu: whether servers run without a GPU.
        slots: the slots in which servers are started; None: on this machine.
        learner_loaded: has a result when the learner holds its memory. Servers that share a GPU
            with it wait for that. None: there is no learner.

    Raises:
        ConfigError: this machine cannot run the servers, or the policy cannot be sent to them.
    """
    if reads_images(load_model_config(base)):
        check_image_servers(config)
        config = config.with_values("rollout", lora="merge")
    if stacked := _stacked_targets(config, base):
        check_stacked_targets(config, stacked)
        config = config.with_values("rollout", lora="merge")
    dtype = server_dtype(base, cpu=cpu)
    urls = config.rollout.urls
    vllm: dict[str, Any] | None = None
    if config.rollout.name == "vllm":  # Not in `_start`, because a thread must not make a model.
        vllm = vllm_delivery(config, base, cpu=cpu and not urls)
    if urls:
        return [partial(_attach, config, base, url, dtype, vllm) for url in urls]
    if cpu:
        _check_without_gpu(config)
    if slots is None:
        slots = _local_slots(config, cpu)
    if config.plays_ahead and any(slot.ranks for slot in slots):
        raise ConfigError(
            f"trainer.max_staleness={config.trainer.max_staleness}: rollouts go on while the"
            " learner computes, but a server would share a GPU with it. Set"
            " trainer.placement=separate, with fewer GPUs for servers or for the learner, or"
            " trainer.max_staleness=0"
        )
    return [partial(_start, config, base, slot, dtype, vllm, learner_loaded) for slot in slots]


def server_dtype(base: str, *, cpu: bool) -> torch.dtype:
    """Return the precision in which servers hold the weights of a model."""
    is_float16 = load_model_config(base).get_text_config().dtype == torch.float16
    return torch.float32 if cpu else torch.float16 if is_float16 else torch.bfloat16


# -- where servers are started ---------------------------------------------------------------------


def _local_slots(config: Config, cpu: bool) -> list[EngineSlot]:
    """Return the slots on this machine: the last GPUs, because the trainer uses the first.

    Raises:
        ConfigError: there are too few GPUs; or `rollout.sleep` is set, but no server shares the
            trainer's GPU; or a server shares it although `trainer.placement` forbids this; or an
            SGLang server shares only one of its GPUs.
    """
    r = config.rollout
    if cpu:
        return [EngineSlot([])] * r.engines
    gpu_count, tp_size = torch.cuda.device_count(), r.tensor_parallel_size
    first = gpu_count - r.engines * tp_size
    if first < 0:
        raise ConfigError(
            f"rollout.engines={r.engines} times rollout.tensor_parallel_size={tp_size} are"
            f" {r.engines * tp_size} GPUs, but torch finds {gpu_count}"
        )
    if first == 0 and config.trainer.placement == "separate":
        raise ConfigError(
            f"trainer.placement=separate: rollout.engines={r.engines} times"
            f" rollout.tensor_parallel_size={tp_size} use all {gpu_count} GPUs, so the trainer"
            " would share one. Set trainer.placement=colocated, or use fewer GPUs for servers"
        )
    if first == 0 and tp_size > 1 and r.name == "sglang":
        fewer = f"rollout.engines={r.engines - 1}, or " if r.engines > 1 else ""
        raise ConfigError(
            f"rollout.engines={r.engines} times rollout.tensor_parallel_size={tp_size} use all"
            f" {gpu_count} GPUs, so the first server would share GPU 0 with the trainer, but not"
            " its other GPUs. SGLang does not start on GPUs with different free memory (`memory"
            f" capacity is unbalanced`). Set {fewer}rollout.tensor_parallel_size=1, or train on all"
            f" GPUs, which servers then share evenly: trainer.n_gpus_per_node={gpu_count}"
        )
    if first > 0 and r.sleep != "none":
        raise ConfigError(
            f"rollout.sleep={r.sleep}: no server shares the trainer's GPU, which is the first of"
            f" {gpu_count}. Set rollout.sleep=none"
        )
    starts = range(first, gpu_count, tp_size)
    return [
        EngineSlot(list(range(k, k + tp_size)), ranks=(0,) * tp_size if k == 0 else ())
        for k in starts
    ]


def _check_without_gpu(config: Config) -> None:
    """Check that the config needs no GPU for servers.

    Raises:
        ConfigError: a setting needs a GPU.
    """
    r = config.rollout
    if r.tensor_parallel_size > 1:
        raise ConfigError(
            f"rollout.tensor_parallel_size={r.tensor_parallel_size} needs GPUs. Set it to 1"
        )
    if r.sleep != "none":
        raise ConfigError(
            f"rollout.sleep={r.sleep}: a server on a CPU shares no GPU with the trainer. Set"
            " rollout.sleep=none"
        )
    if r.is_fp8:
        raise ConfigError(
            "rollout.quantization=fp8: a server on a CPU has no kernels for it. Set it to none"
        )
    if r.deterministic and r.name == "sglang":
        raise ConfigError(
            "rollout.deterministic=true: SGLang's deterministic inference needs GPUs. Remove it,"
            " or set rollout.name=local, which is always deterministic"
        )


# -- one server: started or attached ---------------------------------------------------------------


def _start(
    config: Config,
    base: str,
    slot: EngineSlot,
    dtype: torch.dtype,
    vllm: dict[str, Any] | None,
    learner_loaded: Future[None] | None,
) -> RemoteEngine:
    """Start a server and return when it samples.

    Raises:
        ConfigError: there is no such server, or the policy cannot be sent to it as configured.
        EngineError: the server did not start; the message has its last lines.
    """
    r = config.rollout
    common: dict[str, Any] = {
        "python": r.python,
        "dtype": str(dtype).removeprefix("torch."),
        "gpus": slot.gpus,
        "memory": r.gpu_memory_utilization,
        "deterministic": r.deterministic,
        "lora_rank": config.model.lora_rank,
        "adapters": _adapter_count(config),
        "arguments": r.launch,
    }
    if vllm is not None:
        launch = VLLMLaunch(base, **common)
        connect = partial(VLLMEngine, uses_seeds=r.deterministic, **vllm)
    else:
        delivery = sglang_delivery(config, slot)
        sleep = r.sleep if slot.ranks else "none"
        targets = _lora_targets(config) if delivery.source == "adapter" else ()
        launch = SGLangLaunch(
            base,
            lora_targets=targets,
            sleep=sleep,
            reads_images=reads_images(load_model_config(base)),
            fp8=r.is_fp8,
            returns_experts=r.router_replay,
            **common,
        )
        connect = partial(
            SGLangEngine,
            delivery=delivery,
            sleep=sleep,
            returns_kept=r.is_truncated,
            returns_experts=r.router_replay,
        )
        if r.is_truncated:
            launch = replace(launch, arguments=["--sampling-backend", "pytorch", *r.launch])
    if slot.ranks and learner_loaded is not None:
        learner_loaded.result()
    process, on_policy = slot.run(launch.start_for_trainer)
    if r.name == "sglang":
        # A server that computes as the trainer does keeps its float32 embeddings and norms.
        send_dtype = None if on_policy else dtype
        connect = partial(connect, admin_key=process.admin_token, dtype=send_dtype)
    try:
        return connect(
            process.url, vocabulary=_vocabulary(base), key=process.token, process=process
        )
    except BaseException:
        process.stop()
        raise


def _attach(
    config: Config, base: str, url: str, dtype: torch.dtype, vllm: dict[str, Any] | None
) -> RemoteEngine:
    """Connect to a server that already runs.

    A vLLM server must run with `--enable-scale-out --logprobs-mode processed_logprobs`. Training
    also needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 (LoRA) or VLLM_SERVER_DEV_MODE=1 (all weights).

    Raises:
        EngineError: there is no such server.
    """
    r = config.rollout
    key, admin_key = os.environ.get(TOKEN, ""), os.environ.get(ADMIN_TOKEN, "")
    options: dict[str, Any] = {"vocabulary": _vocabulary(base), "key": key}
    try:
        if vllm is not None:
            return VLLMEngine(url, uses_seeds=r.deterministic, **vllm, **options)
        adapter = config.can_send_adapter
        if adapter and r.lora == "auto":
            adapter = bool(AdminClient(url, key=key).ask("/server_info").get("enable_lora"))
        if adapter:
            options["delivery"] = Delivery("adapter", adapters=_adapter_count(config))
        options |= {"admin_key": admin_key, "returns_kept": r.is_truncated}
        options["returns_experts"] = r.router_replay
        return SGLangEngine(url, dtype=dtype, **options)
    except EngineError as e:
        keys = f"{TOKEN} ({'set' if key else 'not set'})"
        if r.name == "sglang":
            keys += f" and {ADMIN_TOKEN} ({'set' if admin_key else 'not set'})"
        raise type(e)(f"{e}\nThe server is one of rollout.urls; its keys are in {keys}") from e


def _vocabulary(base: str) -> int:
    return load_model_config(base).get_text_config().vocab_size


def _stacked_targets(config: Config, base: str) -> list[str]:
    """Return those of `model.lora_target_modules` that name stacked parameters."""
    m = config.model
    if not m.lora_rank or m.lora_target_modules == "all-linear":
        return []
    targets = m.lora_target_modules
    targets = [targets] if isinstance(targets, str) else targets
    return find_targets(targets, stacked_parameters(empty_model(load_model_config(base))))


def check_stacked_targets(config: Config, targets: Sequence[str]) -> None:
    """Check that servers get LoRA of stacked parameters merged into the weights.

    Args:
        config: the config of the run.
        targets: the parameters.

    Raises:
        ConfigError: the config wants an adapter.
    """
    r = config.rollout
    value = "rollout.quantization=fp8" if r.is_fp8 else "rollout.lora=adapter"
    value = "rollout.name=vllm" if r.name == "vllm" else value
    if r.name == "vllm" or r.is_fp8 or r.lora == "adapter":
        raise ConfigError(
            f"{value} with model.lora_target_modules={list(targets)}: agentrl sends LoRA of experts"
            " merged into their weights, not as an adapter. Set rollout.name=sglang,"
            " rollout.quantization=none and rollout.lora=merge, or model.lora_target_modules="
            "all-linear"
        )


def _lora_targets(config: Config) -> Sequence[str]:
    """Return the modules that LoRA adapts, by their names in SGLang."""
    targets = config.model.lora_target_modules
    if targets == "all-linear":
        return ["all"]
    return [targets] if isinstance(targets, str) else targets


# -- how the policy is sent ------------------------------------------------------------------------


def _sends_adapter(config: Config, slot: EngineSlot) -> bool:
    """Return whether LoRA is sent to an SGLang server as an adapter."""
    return config.can_send_adapter and (config.rollout.lora == "adapter" or bool(slot.gpus))


def sglang_delivery(config: Config, slot: EngineSlot) -> Delivery:
    """Return how an SGLang server that agentrl starts gets the policy.

    Raises:
        ConfigError: the configured transport is not possible.
    """
    r, gpus = config.rollout, slot.gpus
    if _sends_adapter(config, slot):
        if not gpus:
            raise ConfigError(
                "rollout.lora=adapter: SGLang supports no adapters on a CPU. Set rollout.lora=merge"
            )
        return Delivery("adapter", adapters=_adapter_count(config))
    sync = r.sync
    if sync == "auto":
        sync = "disk" if not gpus else "ipc" if slot.ranks else "nccl"
    if sync == "disk":
        return FROM_FILES
    if not gpus or bool(slot.ranks) != (sync == "ipc"):
        device = "a CPU" if not gpus else f"GPU {gpus[0]}, which is "
        owner = "" if not gpus else "the trainer's" if slot.ranks else "not the trainer's"
        raise ConfigError(
            f"rollout.sync={sync}: a server is on {device}{owner}. Set rollout.sync=auto"
        )
    may_use_files = r.sync == "auto" and not r.is_fp8
    return Delivery("memory", len(gpus), slot.ranks, may_use_files=may_use_files, fp8=r.is_fp8)


def _adapter_count(config: Config) -> int:
    """Return how many adapters a server keeps: those of turns in flight, and two more."""
    return (config.trainer.max_staleness if config.plays_ahead else 0) + 2


def vllm_delivery(config: Config, base: str, *, cpu: bool) -> dict[str, Any]:
    """Return the arguments of `VLLMEngine` for how it gets the policy. LoRA is sent as an adapter.

    Raises:
        ConfigError: `rollout.lora` is `merge`.
    """
    if config.model.lora_rank:
        if config.rollout.lora == "merge":
            raise ConfigError(
                "rollout.lora=merge: vLLM needs all weights at once, not only those that LoRA"
                " adapts. Set rollout.lora=adapter"
            )
        return {"delivery": Delivery("adapter", adapters=_adapter_count(config))}
    tied = load_model_config(base).get_text_config().tie_word_embeddings
    return {"names": parameter_names(base), "stale_head": cpu and bool(tied)}


def parameter_names(base: str) -> frozenset[str]:
    """Return the names in transformers of all tensors of a model, each once; read no weights."""
    model = empty_model(load_model_config(base))
    return frozenset(name for name, _ in model.named_parameters())
