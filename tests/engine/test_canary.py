"""The canary: noise never stops a run, and an engine with old weights always does."""

import asyncio
import json
from array import array
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.trainer_fixtures import config
from support.updates import publish, sent_of

from agentrl.engine.remote.sglang import SGLangEngine
from agentrl.errors import RunStopped
from agentrl.learner.learner import Learner
from agentrl.trainer.publisher import (
    MAX_START_MISMATCH,
    MIN_MOVEMENT,
    MIN_NOISE,
    NOISE_TOLERANCE,
    Canary,
    Publisher,
)
from agentrl.workers.owned_folder import OwnedFolder

T = 16
ROW = torch.linspace(-6, -0.5, T, dtype=torch.float64)
SIGNS = torch.tensor([1.0, -1.0] * (T // 2), dtype=torch.float64)


def off(row, by):
    """Return a row whose mean absolute difference from `row` is `by`."""
    return row + by * SIGNS


def moved(row, by):
    """Return the row of a policy that moved by `by`, in a direction without noise."""
    return row + by


def start(trainer, *engines):
    return Canary.measure(trainer, torch.stack(engines))


def check(watch, trainer, *engines, version=1):
    return watch.check(trainer, torch.stack(engines), version)


def canary(noise):
    """Return a canary that was calibrated at `noise` and has checked the first update."""
    made = start(ROW, off(ROW, noise))
    check(made, ROW, off(ROW, noise), version=0)
    return made


NOISE = st.floats(1e-4, 0.95 * MAX_START_MISMATCH)
SHARE = st.floats(0, 1)
"""A share of the range that a test allows."""


def test_metrics_of_the_canary():
    watch = start(ROW, off(ROW, 0.01))
    assert watch.baseline_noise == pytest.approx(0.01)
    assert check(watch, ROW, off(ROW, 0.012)) == {
        "canary/mismatch": pytest.approx(0.012),
        "canary/drift": 0.0,
    }
    after = moved(ROW, 0.5)
    assert check(watch, after, off(after, 0.011)) == {
        "canary/mismatch": pytest.approx(0.011),
        "canary/drift": pytest.approx(0.5),
    }


def test_equal_logprobs_still_allow_the_error_of_float32():
    watch = start(ROW, ROW)
    assert watch.baseline_noise == MIN_NOISE
    check(watch, ROW, off(ROW, 1.4 * MIN_NOISE))


@given(NOISE, st.lists(st.tuples(st.floats(0, 100), SHARE), max_size=8))
def test_noise_never_stops_a_run(noise, updates):
    """The updates may be of any size, and the noise may reach the tolerance."""
    watch, policy = canary(noise), ROW
    for drift, share in updates:
        policy = moved(policy, drift * noise)
        check(watch, policy, off(policy, 0.999 * share * NOISE_TOLERANCE * noise))


@given(NOISE, st.floats(1.001, 100), SHARE, st.integers(0, 2))
def test_an_engine_with_old_weights_is_caught_once_the_policy_moved(noise, further, share, at):
    """One of several engines has old weights. Its noise is at most that of the start."""
    after = moved(ROW, MIN_MOVEMENT * noise * further)
    engines = [off(after, noise)] * 3
    check(canary(noise), after, *engines)
    engines[at] = off(ROW, share * noise)
    with pytest.raises(RunStopped, match=r"lack 100% .* still samples from an earlier version"):
        check(canary(noise), after, *engines)


@given(NOISE, st.floats(0, 0.999), SHARE)
def test_smaller_steps_are_not_judged(noise, drift, share):
    """An engine with old weights passes, because the step cannot be distinguished from noise."""
    after = moved(ROW, MIN_MOVEMENT * noise * drift)
    check(canary(noise), after, off(ROW, share * noise))
    check(canary(noise), after, off(after, share * noise))


@given(NOISE, st.lists(st.floats(0.3, 0.999), min_size=4, max_size=20))
def test_small_steps_do_not_hide_an_engine_with_old_weights_for_long(noise, steps):
    """Each step alone is too small to be judged, but their sum is not."""
    watch, policy = canary(noise), ROW
    with pytest.raises(RunStopped, match="still samples from an earlier version"):
        for step in steps:
            policy = moved(policy, MIN_MOVEMENT * noise * step)
            check(watch, policy, off(ROW, noise))


@given(NOISE, st.floats(0.01, 10), st.floats(1.001, 100))
def test_an_engine_that_is_neither_policy_is_caught_however_small_the_step(noise, drift, further):
    after = moved(ROW, drift * noise)
    with pytest.raises(RunStopped, match="does not hold any version"):
        check(canary(noise), after, moved(after, (MIN_MOVEMENT + drift) * noise * further))


def test_noise_may_grow_with_the_policy_but_not_at_once():
    watch, policy, noise = canary(0.01), ROW, 0.01
    for _ in range(3):
        policy, noise = moved(policy, 0.25), 1.4 * noise
        check(watch, policy, off(policy, noise))
    policy = moved(policy, 0.25)
    with pytest.raises(RunStopped, match="does not hold any version"):
        check(watch, policy, off(policy, 1.6 * noise))


def test_noise_does_not_grow_without_limit():
    watch, policy, noise = canary(0.01), ROW, 0.01
    with pytest.raises(RunStopped, match="does not hold any version"):
        for _ in range(20):
            policy, noise = moved(policy, 0.25), 1.1 * noise
            check(watch, policy, off(policy, noise))
    assert 0.045 < noise < 0.05


@given(NOISE, st.floats(0.3, 1))
def test_an_engine_with_a_part_of_the_update_is_caught(noise, part):
    after = moved(ROW, 9 * noise)
    behind = after - part * (after - ROW)
    with pytest.raises(RunStopped, match="still samples from an earlier version"):
        check(canary(noise), after, behind)


def test_a_resumed_run_is_compared_with_its_start():
    """An engine that still has the base model must not calibrate the canary."""
    watch = Canary(0.01, 0.01)
    with pytest.raises(RunStopped, match="does not hold any version"):
        check(watch, ROW, moved(ROW, 0.1))
    check(Canary(0.01, 0.01), ROW, off(ROW, 0.011))


@given(NOISE, st.lists(st.floats(0, 6), min_size=2, max_size=8), st.integers(1, 8))
def test_a_resumed_run_measures_drift_from_the_same_point(noise, moves, stop):
    """This also holds after steps that were too small to be judged."""
    straight, resumed = Canary(noise, noise), Canary(noise, noise)
    row = ROW.float()
    for k, move in enumerate([0.0, *moves]):
        row = moved(row, move * noise)
        if k == stop:
            resumed = Canary.load(json.loads(json.dumps(resumed.state)))
        engine = off(row, noise).float()
        assert check(resumed, row, engine) == check(straight, row, engine)


def test_another_row_after_a_restart_has_no_drift():
    watch = canary(0.01)
    check(watch, ROW, off(ROW, 0.01))
    assert watch.check(ROW[1:], ROW[None, 1:], 2)["canary/drift"] == 0


@given(NOISE, st.integers(0, T - 1), st.sampled_from(["trainer", "engine", "one of two"]))
def test_a_nan_logprob_is_caught(noise, at, whose):
    broken = ROW.clone()
    broken[at] = float("nan")
    trainer, *engines = {
        "trainer": (broken, ROW),
        "engine": (ROW, broken),
        "one of two": (ROW, ROW, broken),
    }[whose]
    with pytest.raises(RunStopped, match="nan nats"):
        start(trainer, *engines)
    with pytest.raises(RunStopped, match="nan nats"):
        check(canary(noise), trainer, *engines)


@given(st.floats(1.001, 50))
def test_another_model_at_the_start_is_caught(further):
    with pytest.raises(RunStopped, match="Do they hold the same model"):
        start(ROW, off(ROW, MAX_START_MISMATCH * further))
    with pytest.raises(RunStopped, match="Do they hold the same model"):
        start(ROW, ROW, off(ROW, MAX_START_MISMATCH * further))


def test_a_failed_check_is_not_the_last_success():
    watch, after = canary(0.01), moved(ROW, 1.0)
    for _ in range(2):  # the second check fails like the first
        with pytest.raises(RunStopped, match="moved by 1"):
            check(watch, after, ROW)
    assert check(watch, after, off(after, 0.01))["canary/drift"] == pytest.approx(1.0)


# -- against a real server -------------------------------------------------------------------------

ROW_IDS = array("i", range(20, 84))
ONE = "model.layers.1.mlp.up_proj.weight"


class Faulty(SGLangEngine):
    """An engine that may load wrong weights. The server reports the right version nevertheless."""

    fault = ""

    def __init__(self, url, **options):
        super().__init__(url, **options)
        self.loaded = {}

    def load(self, route, sent):
        files = sorted(route.folder.glob("*.safetensors"))
        now = {name: t for file in files for name, t in load_file(file).items()}
        weights, self.loaded = self.wrong(now), now
        with OwnedFolder("weights") as other:
            sent_of(weights.items(), Path(other))
            super().load(replace(route, folder=other), sent)

    def wrong(self, now):
        if self.fault == "off":  # an update cannot be empty: send a tensor that does not change
            name = next(iter(now))
            return {name: self.loaded[name]}
        if self.fault == "stale":
            return self.loaded
        if self.fault == "noise":
            return now | {ONE: now[ONE] + 0.01 * torch.randn(now[ONE].shape)}
        return now


@pytest.fixture
def world(sglang_server, tiny_model):
    """Yield a learner of the tiny model, its engine, and the publisher that connects them."""
    learner = Learner(tiny_model, config(), total_steps=1)
    engine = Faulty(
        sglang_server.url,
        vocabulary=learner.rank.policy.model.config.vocab_size,
        key=sglang_server.token,
        admin_key=sglang_server.admin_token,
        process=sglang_server,
    )
    with asyncio.Runner() as runner:
        pool = SimpleNamespace(publish=partial(publish, engine))
        yield (
            learner,
            engine,
            Publisher(learner, pool, ROW_IDS, lambda ids: [runner.run(engine.score(ids))]),
        )


@torch.no_grad()
def learn(learner, seed):
    """Change all weights, by more than an optimizer step would."""
    torch.manual_seed(seed)
    learner.policy_steps += 1
    for p in learner.rank.policy.model.parameters():
        p.add_(0.02 * p.abs().mean() * torch.randn_like(p))


@pytest.mark.slow
@pytest.mark.sglang
def test_updates_that_arrive_pass(world):
    learner, _, publisher = world
    for version in range(3):
        metrics = publisher.publish(version)
        assert metrics["canary/mismatch"] <= NOISE_TOLERANCE * publisher.noise
        if version:
            assert metrics["canary/drift"] > 100 * publisher.noise
        assert metrics["perf/update_weights_bytes"] == sum(
            p.nbytes for p in learner.rank.policy.model.parameters()
        )
        learn(learner, version)


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.parametrize("fault", ["off", "stale"])
def test_an_update_that_did_not_arrive_stops_the_run(world, fault):
    learner, engine, publisher = world
    publisher.publish(0)
    learn(learner, 1)
    publisher.publish(1)
    learn(learner, 2)
    engine.fault = fault
    with pytest.raises(RunStopped, match=r"version 2 .* still samples from an earlier version"):
        publisher.publish(2)
    engine.fault = ""
    assert publisher.publish(3)["canary/drift"] > 100 * publisher.noise


@pytest.mark.slow
@pytest.mark.sglang
def test_a_server_takes_a_version_without_weights(world):
    learner, engine, publisher = world
    publisher.publish(0)
    learn(learner, 1)
    publisher.publish(1)
    engine.set_version(3)
    assert engine.has_weights and [*engine.probe().versions] == [3]
    learn(learner, 2)
    assert publisher.publish(4)["canary/drift"] > 100 * publisher.noise
    assert [*engine.probe().versions] == [4]


@pytest.mark.slow
@pytest.mark.sglang
def test_noise_in_one_tensor_stops_the_run(world):
    learner, engine, publisher = world
    publisher.publish(0)
    learn(learner, 1)
    engine.fault = "noise"
    with pytest.raises(RunStopped, match=r"version 1 .* nats a token"):
        publisher.publish(1)


@pytest.mark.slow
@pytest.mark.sglang
def test_a_sender_that_sends_nothing_stops_the_run(world, monkeypatch):
    learner, engine, publisher = world
    publisher.publish(0)
    learn(learner, 1)
    monkeypatch.setattr(engine, "load", lambda *_: None)
    with pytest.raises(RunStopped, match=r"did not accept version 1 .* weights were '1' .* '0'"):
        publisher.publish(1)
