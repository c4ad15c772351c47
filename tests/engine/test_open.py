"""The engine of a run opens while the learner loads."""

import threading
import time
from concurrent.futures import CancelledError, Future
from types import SimpleNamespace

import pytest

from agentrl.config import load_config
from agentrl.engine.open import EngineStart
from agentrl.engine.remote import open as remote_open
from agentrl.engine.remote.launch import EngineSlot, SGLangLaunch
from agentrl.errors import ConfigError, EngineDead


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
