"""Open the engine of a run, as configured by the section `rollout`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from transformers import PreTrainedTokenizerBase

from agentrl.config import Config
from agentrl.engine.base import Engine
from agentrl.engine.local import LocalEngine
from agentrl.engine.local.load import base_and_adapters, load_causal_lm, resolve_device
from agentrl.engine.remote.launch import EngineSlot
from agentrl.workers.owned_folder import OwnedFolder


def open_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    slots: Sequence[EngineSlot] | None = None,
) -> Engine:
    """Load the model in this process, or start or connect to servers.

    Args:
        config: the config of the run.
        tokenizer: the tokenizer of the model.
        slots: the slots in which servers are started; None: on this machine.

    Raises:
        UserError: the model or the server does not exist, or the engine cannot run the model.
        EngineError: a server did not start; the message has its last lines.
    """
    path, device = config.model.path, config.trainer.device
    if config.rollout.name == "local":
        return LocalEngine.load(
            path, tokenizer, device=device, patience=config.rollout.timeout_s / 4
        )
    from agentrl.engine.remote.open import make_openers
    from agentrl.engine.remote.pool import EnginePool

    with ExitStack() as stack:
        base, adapters = base_and_adapters(path)
        if adapters:  # Servers load a plain model. It must exist while they may restart.
            base = str(stack.enter_context(OwnedFolder("merged")))
            load_causal_lm(path, "auto").save_pretrained(base)
            tokenizer.save_pretrained(base)
        # Slots may be on other machines, with or without GPUs.
        cpu = not slots[0].gpus if slots else resolve_device(device) == "cpu"
        openers = make_openers(config, base, cpu=cpu, slots=slots)
        return EnginePool(openers, close=stack.pop_all().close)


def describe_engine(config: Config) -> str:
    """Return a line for the console about what `open_engine` will do, since it may take minutes."""
    r = config.rollout
    if r.urls:
        return f"engine: {r.name} at {', '.join(r.urls)}"
    servers = f"{r.engines} servers" if r.engines > 1 else "a server"
    return f"engine: starting {r.name}, {servers}"
