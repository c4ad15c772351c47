"""The run's engine, as `rollout.name` says."""

from __future__ import annotations

from tempfile import TemporaryDirectory

from transformers import AutoConfig, PreTrainedTokenizerBase

from agentrl.config import Config
from agentrl.engine.base import Engine
from agentrl.engine.local import LocalEngine
from agentrl.engine.local.load import base_and_adapters, load_causal_lm, resolve_device
from agentrl.engine.sglang import SGLangEngine, SGLangServer


def open_engine(config: Config, tokenizer: PreTrainedTokenizerBase) -> Engine:
    """The model in this process, or on an SGLang server that is started here; `close` ends it.

    Args:
        config: the run's.
        tokenizer: the model's.

    Raises:
        UserError: there is no such model or no SGLang, or the engine cannot run this one.
        EngineError: the server did not start; with the last lines it said.
    """
    path, device = config.model.path, config.trainer.device
    if config.rollout.name == "local":
        return LocalEngine.load(
            path, tokenizer, device=device, patience=config.rollout.timeout_s / 4
        )
    base, adapters = base_and_adapters(path)
    with TemporaryDirectory(prefix="agentrl-merged-") as folder:
        if adapters:  # of the server's own adapters nothing is asked: it gets a plain model
            load_causal_lm(path, "auto").save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            base = folder
        vocabulary = AutoConfig.from_pretrained(base).get_text_config().vocab_size
        server = SGLangServer(
            base,
            python=config.rollout.python,
            cpu=resolve_device(device) == "cpu",
            arguments=config.rollout.launch,
        )
    try:
        return SGLangEngine(server.url, vocabulary=vocabulary, token=server.token, server=server)
    except BaseException:
        server.stop()
        raise
