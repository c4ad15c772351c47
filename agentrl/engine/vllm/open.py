"""A vLLM engine for a run: on a server that is started here, or on one that runs already."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.config import Config
from agentrl.engine.server.control import Control
from agentrl.engine.server.place import Place
from agentrl.engine.server.process import ServerProcess
from agentrl.engine.server.sender import Sender
from agentrl.engine.vllm.client import VLLMEngine
from agentrl.engine.vllm.launch import VLLMLaunch
from agentrl.engine.vllm.sync import AdapterSender, DiskSender
from agentrl.errors import ConfigError


def start(config: Config, base: str, *, dtype: str, place: Place) -> VLLMEngine:
    """Start a server and return once it samples.

    Args:
        config: the run's.
        base: the plain model that it loads.
        dtype: in which precision.
        place: where it stands.

    Raises:
        ConfigError: there is no vLLM.
        EngineError: the server did not start; with the last lines it said.
    """
    r = config.rollout
    launch = VLLMLaunch(
        base,
        python=r.python,
        dtype=dtype,
        gpus=place.gpus,
        memory=r.gpu_memory_utilization,
        lora_rank=config.model.lora_rank,
        deterministic=r.deterministic,
        arguments=r.launch,
    )
    process, _ = place.run(partial(_started, launch))
    try:
        return VLLMEngine(
            process.url,
            vocabulary=AutoConfig.from_pretrained(base).get_text_config().vocab_size,
            sender=_sender(config, base, cpu=not place.gpus),
            key=process.token,
            process=process,
            seeded=r.deterministic,
        )
    except BaseException:
        process.stop()
        raise


def attach(config: Config, base: str, url: str, key: str) -> VLLMEngine:
    """Use a server that runs already, with `--logprobs-mode processed_logprobs`.

    To be trained with, it must run under VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 (LoRA) or
    VLLM_SERVER_DEV_MODE=1 (all weights).

    Raises:
        EngineError: there is none.
    """
    return VLLMEngine(
        url,
        vocabulary=AutoConfig.from_pretrained(base).get_text_config().vocab_size,
        sender=_sender(config, base, cpu=False),
        key=key,
        seeded=config.rollout.deterministic,
    )


def _started(launch: VLLMLaunch, host: str) -> tuple[ServerProcess, bool]:
    return launch.start(host=host), False


def parameter_names(base: str) -> frozenset[str]:
    """Of all a model's tensors, each once; no weights are read."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    return frozenset(name for name, _ in model.named_parameters())


def _sender(config: Config, base: str, *, cpu: bool) -> Callable[[Control], Sender]:
    """How the policy goes to it: LoRA as an adapter, here on a CPU as well.

    Raises:
        ConfigError: it was to be merged.
    """
    if config.model.lora_rank:
        if config.rollout.lora == "merge":
            raise ConfigError(
                "rollout.lora=merge: vLLM takes all weights at once, not only those that LoRA"
                " adapts. Set rollout.lora=adapter"
            )
        return AdapterSender
    tied = AutoConfig.from_pretrained(base).get_text_config().tie_word_embeddings
    return partial(DiskSender, names=parameter_names(base), stale_head=cpu and bool(tied))
