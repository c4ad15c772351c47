"""Open the engine of a run, as configured by the section `rollout`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from agentrl.config import Config
from agentrl.engine.base import Engine
from agentrl.engine.local import LocalEngine
from agentrl.engine.local.load import (
    base_and_adapters,
    load_causal_lm,
    load_model_config,
    resolve_device,
)
from agentrl.engine.local.routers import choices_of_a_token
from agentrl.engine.remote.admin import close_opened, in_thread
from agentrl.engine.remote.launch import EngineSlot
from agentrl.workers.owned_folder import OwnedFolder

log = logging.getLogger("agentrl")

T = TypeVar("T")


class EngineStart:
    """An engine that opens while the learner loads.

    Servers start at once, in threads. Only servers that share a GPU with the learner wait until
    `finish`, because a server takes its share of the memory that is free when it starts. The local
    engine is loaded by `finish`, too: two models that load in one process at the same time would
    disturb each other, because torch's default dtype belongs to the process.

    Attributes:
        dtype: the precision in which the engine samples, such as "bfloat16"; known when it is open.
            "float32" for a server that rounds a part of the weights by itself.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        slots: Sequence[EngineSlot] | None = None,
    ):
        """Start or connect to the servers of a run, if it has servers.

        Args:
            config: the config of the run.
            tokenizer: the tokenizer of the model.
            slots: the slots in which servers are started; None: on this machine.

        Raises:
            UserError: the model does not exist or has no routers, or this machine cannot run the
                servers.
        """
        self._learner_loaded: Future[None] = Future()
        self._engine: Future[Engine] = Future()
        self._load_local: Callable[[], LocalEngine] | None = None
        path, device = config.model.path, config.trainer.device
        if config.rollout.router_replay:
            choices_of_a_token(load_model_config(path))
        if config.rollout.name == "local":
            patience = config.rollout.timeout_s / 4
            # Weights that arrive while turns are in flight make the schedule depend on the clock.
            deterministic = False if config.plays_ahead else None
            self._load_local = partial(
                LocalEngine.load,
                path,
                tokenizer,
                device=device,
                deterministic=deterministic,
                patience=patience,
                returns_experts=config.rollout.router_replay,
            )
            return
        from agentrl.engine.remote.open import make_openers, server_dtype
        from agentrl.engine.remote.pool import EnginePool

        # Slots may be on other machines, with or without GPUs.
        cpu = not slots[0].gpus if slots else resolve_device(device) == "cpu"
        with ExitStack() as stack:
            base, adapters = base_and_adapters(path)
            if adapters:  # Servers load a plain model. It must exist while they may restart.
                base = str(stack.enter_context(OwnedFolder("merged")))
                merged = load_causal_lm(path, "float32" if cpu else "auto")
                if merged.dtype.itemsize < 4:
                    log.warning("%s: merged for servers in %s, which rounds it", path, merged.dtype)
                merged.save_pretrained(base)
                tokenizer.save_pretrained(base)
            openers = make_openers(
                config, base, cpu=cpu, slots=slots, learner_loaded=self._learner_loaded
            )
            close = stack.pop_all().close
        rounds_itself = config.rollout.name == "sglang" and config.rollout.deterministic
        self.dtype = "float32" if rounds_itself else str(server_dtype(base, cpu=cpu))[6:]
        self._engine = in_thread(lambda: EnginePool(openers, close=close), "open-engines")

    def wait_for(self, work: Future[T]) -> T:
        """Return the result of other work. If the servers fail first, raise their error at once.

        Raises:
            Exception: the error of the work, or that of the servers.
        """
        both: list[Future[Any]] = [work, self._engine]
        wait(both, return_when=FIRST_COMPLETED)
        if self._engine.done():
            self._engine.result()
        return work.result()

    def finish(self) -> Engine:
        """Return the engine when it is open. Call it once, when the learner has loaded.

        Raises:
            UserError: the model or the server does not exist, or the engine cannot run the model.
            EngineError: a server did not start; the message has its last lines.
        """
        self._learner_loaded.set_result(None)
        if self._load_local is not None:
            engine = self._load_local()
            self.dtype = str(engine.dtype)[6:]
            self._engine.set_result(engine)
        return self._engine.result()

    def close(self) -> None:
        """Close the engine. One that is still starting is closed as soon as it is open."""
        self._learner_loaded.cancel()  # Servers that wait for the learner do not start.
        self._engine.add_done_callback(close_opened)


def open_engine(config: Config, tokenizer: PreTrainedTokenizerBase) -> Engine:
    """Load the model in this process, or start or connect to servers on this machine.

    Raises:
        AgentRLError: see `EngineStart`.
    """
    start = EngineStart(config, tokenizer)
    try:
        engine = start.finish()
    except BaseException:
        start.close()
        raise
    path = config.model.path
    stored = str(load_model_config(path).get_text_config().dtype)
    if not config.rollout.urls and start.dtype != "float32" and stored.endswith("float32"):
        log.warning(
            "%s: the engine rounds its float32 weights to %s. A model that was trained on a CPU"
            " plays worse then; trainer.device=cpu does not round (docs/run_folder.md, Export)",
            path,
            start.dtype,
        )
    return engine


def describe_engine(config: Config) -> str:
    """Return a line for the console about what `open_engine` will do, since it may take minutes."""
    r = config.rollout
    if r.urls:
        return f"engine: {r.name} at {', '.join(r.urls)}"
    servers = f"{r.engines} servers" if r.engines > 1 else "a server"
    return f"engine: starting {r.name}, {servers}"
