"""The engine of a run opens while the learner loads."""

import threading
import time
from concurrent.futures import CancelledError, Future
from types import SimpleNamespace

import pytest
import torch
from support.vision import write_vision_model

from agentrl.chat import load_tokenizer
from agentrl.config import load_config
from agentrl.engine.local.load import load_causal_lm
from agentrl.engine.open import EngineStart, open_engine
from agentrl.engine.remote import open as remote_open
from agentrl.engine.remote.launch import EngineSlot, SGLangLaunch
from agentrl.errors import ConfigError, EngineDead
from agentrl.learner.policy import ACTOR, Policy


class Slots:
    """Slots that record the starts of servers; `server_may_run` lets them end."""

    def __init__(self, *shares_gpu, error=None):
        self.started, self.server_may_run, self.error = [], threading.Event(), error
        self.slots = [
            EngineSlot([0] if shares else [], ranks=(0,) if shares else (), run=self.runner(i))
            for i, shares in enumerate(shares_gpu)
        ]

    def runner(self, index):
        def run(start):
            self.started.append(index)
            self.launch = start.__self__
            assert self.server_may_run.wait(20)
            if self.error is not None:
                raise self.error
            process = SimpleNamespace(url="http://127.0.0.1:1", token="", admin_token="")
            return process, False

        return run


@pytest.fixture
def closed(monkeypatch):
    """The engines that were closed."""
    closed = []

    class Engine:
        max_length, version, restartable = 100, 0, True

        def __init__(self, url, **options): ...

        def close(self):
            closed.append(self)

    monkeypatch.setattr(remote_open, "SGLangEngine", Engine)
    monkeypatch.setattr(SGLangLaunch, "start", lambda launch, *, host: pytest.fail("started"))
    return closed


def start(model, slots):
    config = load_config(
        None, ["rollout.name=sglang", f"model.path={model}", f"rollout.engines={len(slots.slots)}"]
    )
    return EngineStart(config, None, slots.slots)


def wait_until(what, seconds=10.0):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)


def test_servers_start_at_once_unless_they_share_a_gpu(random_model, closed):
    slots = Slots(False, True)
    opening = start(random_model, slots)
    learner = Future()
    wait_until(lambda: slots.started)
    learner.set_result("the learner")
    assert opening.wait_for(learner) == "the learner"
    time.sleep(0.05)
    assert slots.started == [0], "the other one waits until the learner holds its memory"
    slots.server_may_run.set()
    assert opening.finish().max_length == 100
    assert slots.started == [0, 1]
    opening.close()
    wait_until(lambda: len(closed) == 2)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_an_adapter_is_merged_in_the_precision_of_the_servers(
    random_model, closed, tmp_path, caplog, on_gpu
):
    """The base is in bfloat16, and the change of the adapter is far below its precision."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    load_causal_lm(random_model, torch.bfloat16).save_pretrained(base)
    tokenizer = load_tokenizer(random_model)
    tokenizer.save_pretrained(base)
    policy = Policy(load_causal_lm(base, torch.float32), 1.0)
    policy.add_adapter(ACTOR, 2, 4, "all-linear", seed=0)
    for name, parameter in policy.parameters(ACTOR).items():
        if "lora_B" in name:
            parameter.data.fill_(1e-5)
    policy.save_adapter(adapter)
    slots = Slots(on_gpu)
    slots.server_may_run.set()
    config = load_config(None, ["rollout.name=sglang", f"model.path={adapter}"])
    opening = EngineStart(config, tokenizer, slots.slots)
    opening.finish()
    merged = load_causal_lm(slots.launch.model, "auto")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    assert (merged.dtype, opening.dtype) == (dtype, str(dtype)[6:])
    assert ("which rounds it" in caplog.text) == on_gpu
    weights = merged.state_dict()
    assert all(torch.equal(weights[n], t.to(dtype)) for n, t in policy.export())
    opening.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_engine_that_rounds_a_model_in_float32_says_so(random_model, monkeypatch, caplog, dtype):
    monkeypatch.setattr(EngineStart, "finish", lambda start: setattr(start, "dtype", dtype))
    config = load_config(None, [f"model.path={random_model}"])
    open_engine(config, load_tokenizer(random_model))
    message = "the engine rounds its float32 weights to bfloat16"
    assert (message in caplog.text) == (dtype == "bfloat16")


def test_servers_of_a_model_that_reads_images(closed, tmp_path):
    model, slots = write_vision_model(tmp_path), Slots(False)
    slots.server_may_run.set()

    def opening(*settings):
        config = load_config(None, [f"model.path={model}", "model.lora_rank=4", *settings])
        return EngineStart(config, None, slots.slots)

    started = opening("rollout.name=sglang")
    started.finish()
    started.close()
    flags, environment = slots.launch.flags(), slots.launch._environment()
    assert flags[flags.index("--mm-attention-backend") + 1] == "sdpa"
    assert "--enable-lora" not in flags
    # SGLang would keep vectors of images that earlier weights made.
    assert environment["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
    assert environment["SGLANG_MM_AVOID_RETOKENIZE"] == "1"
    with pytest.raises(ConfigError, match="no images to vLLM"):
        opening("rollout.name=vllm")
    with pytest.raises(ConfigError, match="merged into the weights"):
        opening("rollout.name=sglang", "rollout.lora=adapter")


def test_the_error_of_a_server_does_not_wait_for_the_learner(random_model, closed):
    slots = Slots(False, error=EngineDead("it ended"))
    opening = start(random_model, slots)
    slots.server_may_run.set()
    with pytest.raises(EngineDead, match="it ended"):
        opening.wait_for(Future())  # a learner that never loads
    opening.close()


def test_the_error_of_the_learner_does_not_wait_for_the_servers(random_model, closed):
    """A server that is starting is closed later; one that waits for the learner never starts."""
    slots = Slots(False, True)
    opening = start(random_model, slots)
    learner = Future()
    wait_until(lambda: slots.started)
    learner.set_exception(ConfigError("too large"))
    with pytest.raises(ConfigError, match="too large"):
        opening.wait_for(learner)
    opening.close()
    assert not closed
    slots.server_may_run.set()
    wait_until(lambda: len(closed) == 1)
    assert slots.started == [0]
    with pytest.raises(CancelledError):
        opening._engine.result(10)
