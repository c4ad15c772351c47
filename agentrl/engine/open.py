"""The run's engine, as the section `rollout` says."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from tempfile import TemporaryDirectory

from transformers import PreTrainedTokenizerBase

from agentrl.config import Config
from agentrl.engine.base import Engine
from agentrl.engine.local import LocalEngine
from agentrl.engine.local.load import base_and_adapters, load_causal_lm, resolve_device
from agentrl.engine.remote.launch import EngineSlot


def open_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    places: Sequence[EngineSlot] | None = None,
) -> Engine:
    """The model in this process, or servers that are started here or run already.

    Args:
        config: the run's.
        tokenizer: the model's.
        places: where servers are started; None: on this machine.

    Raises:
        UserError: there is no such model or no such server, or the engine cannot run this one.
        EngineError: a server did not start; with the last lines it said.
    """
    path, device = config.model.path, config.trainer.device
    if config.rollout.name == "local":
        return LocalEngine.load(
            path, tokenizer, device=device, patience=config.rollout.timeout_s / 4
        )
    from agentrl.engine.remote.open import make_openers
    from agentrl.engine.remote.pool import Pool

    with ExitStack() as stack:
        base, adapters = base_and_adapters(path)
        if adapters:  # servers get a plain model, which is there for as long as one may start anew
            base = stack.enter_context(TemporaryDirectory(prefix="agentrl-merged-"))
            load_causal_lm(path, "auto").save_pretrained(base)
            tokenizer.save_pretrained(base)
        # Places have GPUs or not, whatever this machine has.
        cpu = not places[0].gpus if places else resolve_device(device) == "cpu"
        found = make_openers(config, base, cpu=cpu, places=places)
        return Pool(found, close=stack.pop_all().close)


def describe_engine(config: Config) -> str:
    """What `open_engine` is about to do, since a server takes its time."""
    r = config.rollout
    if r.urls:
        return f"engine: {r.name} at {', '.join(r.urls)}"
    many = f"{r.engines} servers" if r.engines > 1 else "a server"
    return f"engine: starting {r.name}, {many}"
