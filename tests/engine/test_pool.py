"""Several engines as one: where turns go, who is left out, and with which policy it comes back."""

import asyncio
import contextlib
import threading
import time
from array import array
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from support.examples import examples
from support.fake_engines import PROMPT, QUICK, FakeOpener, PoolHarness

from agentrl.engine.base import Sampling
from agentrl.engine.remote import distributor as distributor_module
from agentrl.engine.remote.pool import EnginePool
from agentrl.engine.remote.senders import Delivery
from agentrl.engine.remote.supervisor import RecoveryPolicy, Replica, Supervisor
from agentrl.errors import (
    EngineDead,
    EngineError,
    EngineOverloaded,
    InvalidEngineResponse,
    PromptTooLong,
    RequestRefused,
    UserError,
)

PATIENT = RecoveryPolicy(first_backoff=60.0)
"""Nobody comes back within a test."""


@pytest.fixture
async def make():
    harnesses = []

    async def opened(n=2, version=1, **options) -> PoolHarness:
        harnesses.append(PoolHarness(n, **options))
        await harnesses[-1].publish(version)
        return harnesses[-1]

    yield opened
    for harness in harnesses:
        start = time.monotonic()
        await asyncio.to_thread(harness.pool.close)
        assert time.monotonic() - start < 2
        assert not harness.learner.misread
        assert all(e.closed for opener in harness.openers for e in opener.opened)


# -- where turns go --------------------------------------------------------------------------------


async def test_first_turns_go_where_the_fewest_episodes_are_and_later_ones_stay(make):
    harness = await make(3)
    for turn in range(3):
        for k in range(6):
            await harness.ask(f"e{k}", PROMPT * (turn + 1))
    for k, engine in enumerate(harness.engines):
        mine = [f"e{k}", f"e{k + 3}"]
        assert engine.requests == [(e, list(PROMPT) * n) for n in (1, 2, 3) for e in mine]
        assert engine.live == {*mine}
    for e in ("e1", "e4", "e2"):
        harness.pool.end(e)
    for k in range(6, 9):
        await harness.ask(f"e{k}")
    assert [e.live for e in harness.engines] == [{"e0", "e3"}, {"e6", "e8"}, {"e5", "e7"}]


async def test_episodes_one_after_another_take_turns(make):
    harness = await make(3)
    for k in range(7):
        await harness.ask(f"e{k}")
        harness.pool.end(f"e{k}")
    assert harness.request_counts() == [3, 2, 2]
    assert [e.live for e in harness.engines] == [set()] * 3


async def test_the_maximum_length_is_the_smallest_of_all_engines():
    class Shorter(FakeOpener):
        def __call__(self):
            engine = super().__call__()
            engine.max_length = 50
            return engine

    pool = EnginePool([FakeOpener(0, True), Shorter(1, True)])
    assert pool.max_length == 50
    pool.close()


# -- what is whose fault ---------------------------------------------------------------------------


@pytest.mark.parametrize("error", [PromptTooLong("101 tokens"), UserError("stop=''")])
async def test_errors_of_a_request_do_not_count_against_the_engine(make, error):
    harness = await make(2, recovery=PATIENT)
    for k in range(5):
        harness.engines[k % 2].failing = [error]
        with pytest.raises(type(error)) as raised:
            await harness.ask(f"e{k}")
        assert raised.value is error
        harness.pool.end(f"e{k}")
    assert harness.request_counts() == [3, 2] and harness.usable_count() == 2


async def test_a_turn_that_fails_is_sent_with_the_same_tokens_to_another_engine(make):
    harness = await make(2, recovery=PATIENT)
    a, b = harness.engines
    a.failing = [EngineError("connection reset")]
    await harness.ask("e0", array("i", [1, 2, 3]))
    assert a.requests == b.requests == [("e0", [1, 2, 3])]
    await harness.ask("e0", array("i", [1, 2, 3, 4]))
    assert b.requests[1:] == [("e0", [1, 2, 3, 4])], "the episode stays where its prefix is"
    assert (a.live, b.live) == (set(), {"e0"})
    assert harness.pool.metrics() == {
        "engine/restarts": 0.0,
        "engine/failovers": 1.0,
        "engine/usable": 2.0,
    }
    assert harness.pool.metrics()["engine/failovers"] == 0.0, "since the last call"


async def test_three_failures_in_a_row_exclude_an_engine_and_a_probe_readmits_it(make):
    harness = await make(1)
    engine = harness.engines[0]
    for outcome in "xx.xx.xx.xxx":
        assert harness.usable_count() == 1
        if outcome == ".":
            await harness.ask("e")
            continue
        engine.failing = [EngineError("one in ten")]
        with pytest.raises(EngineError, match="one in ten"):
            await harness.ask("e")
    assert (harness.usable_count(), engine.probes) == (0, 0)
    await harness.pool.ready()
    assert (engine.probes, engine.published, harness.openers[0].opened) == (1, [1], [engine])


async def test_a_turn_that_all_engines_fail_is_an_error_with_the_last_cause(make):
    harness = await make(3, recovery=PATIENT)
    for k, engine in enumerate(harness.engines):
        engine.failing = [EngineError(f"broken pipe {k}")]
    with pytest.raises(EngineError, match="broken pipe 2"):
        await harness.ask("e")
    assert harness.request_counts() == [1, 1, 1]


async def test_a_deadline_that_passed_does_not_count_against_the_engine(make):
    harness = await make(1, recovery=RecoveryPolicy())
    harness.engines[0].seconds = 60.0
    for k in range(4):
        with pytest.raises(EngineError, match="deadline"):
            await harness.ask(f"e{k}", seconds=0.02)
    assert harness.request_counts() == [4] and harness.usable_count() == 1


@pytest.mark.timing
async def test_an_engine_that_is_full_is_not_broken(make):
    harness = await make(2, recovery=PATIENT)
    a, b = harness.engines
    full = EngineOverloaded("the queue is full")
    a.failing = [full] * 5
    await harness.ask("e0")
    assert harness.request_counts() == [1, 1], "another has a place"
    b.failing = [full] * 2
    await harness.ask("e1")  # the next in line is a, then b, and both again after a while
    await harness.ask("e2")
    assert harness.usable_count() == 2 and harness.pool.metrics()["engine/failovers"] == 0
    a.failing, b.failing = [full] * 99, [full] * 99
    start = time.monotonic()
    with pytest.raises(EngineOverloaded):
        await harness.ask("e3", seconds=0.5)
    assert 0.5 <= time.monotonic() - start < 0.7 and harness.usable_count() == 2
    assert len(a.requests) + len(b.requests) < 30, "it waits between its tries"


@pytest.mark.parametrize("claimed", [2, 4])
async def test_tokens_of_a_policy_that_is_not_published_are_refused(make, claimed):
    harness = await make(1, version=3, recovery=PATIENT)
    harness.engines[0].claims = claimed
    for _ in range(3):
        with pytest.raises(
            InvalidEngineResponse, match=rf"tokens of policy \[{claimed}\], but 3 is"
        ):
            await harness.ask("e")
    assert harness.usable_count() == 0


async def test_an_engine_of_another_version_gets_no_requests(make):
    harness = await make(2, version=3)
    harness.engines[0].version = 2
    for k in range(4):
        await harness.ask(f"e{k}")
    assert harness.request_counts() == [0, 4] and harness.usable_count() == 1


# -- death and hanging -----------------------------------------------------------------------------


async def test_one_of_two_engines_dies_with_turns_in_flight(make):
    harness = await make(2)
    first, other = harness.engines
    first.seconds = other.seconds = 0.05
    turns = [asyncio.create_task(harness.ask(f"e{k}")) for k in range(8)]
    await harness.until(lambda: len(first.requests) == 4)
    first.dead = True
    await asyncio.gather(*turns)
    assert {e for e, _ in other.requests} == {f"e{k}" for k in range(8)}
    await harness.until(lambda: harness.pool.supervisor.is_usable(harness.pool.replicas[0]))
    _, again = harness.openers[0].opened
    assert first.closed and again.published == [1] and again.weights == 10
    assert harness.pool.metrics() == {
        "engine/restarts": 1.0,
        "engine/failovers": 4.0,
        "engine/usable": 2.0,
    }
    await harness.ask("new")
    assert [e for e, _ in again.requests] == ["new"], "the fewest episodes are there"


@pytest.mark.timing
async def test_turns_wait_for_the_restart_of_the_only_engine(make):
    harness = await make(1)
    harness.openers[0].seconds = 0.1
    first = harness.openers[0].engine
    first.dead = True
    with pytest.raises(EngineDead, match="last words"):
        await harness.ask("e")
    start = time.monotonic()
    with pytest.raises(EngineError, match="no engine can be used now"):
        await harness.ask("e")
    assert time.monotonic() - start < 0.05, "the caller waits in ready(), not within its time"
    await harness.pool.ready()
    await harness.ask("e+1")
    assert harness.openers[0].engine is not first and harness.openers[0].engine.published == [1]


async def test_an_episode_is_new_to_a_restarted_engine(make):
    harness = await make(1)
    await harness.ask("e")
    first = harness.engines[0]
    first.dead = True
    with pytest.raises(EngineDead):
        await harness.ask("other")
    await harness.pool.ready()
    await harness.ask("e")
    assert harness.engines[0] is not first and harness.engines[0].live == {"e"}


async def test_late_failures_of_an_engine_do_not_count_against_the_next(make):
    harness = await make(1)
    first, [replica] = harness.engines[0], harness.pool.replicas
    first.dead = True
    with pytest.raises(EngineDead):
        await harness.ask("e")
    await harness.pool.ready()
    for error in (EngineDead("late"), EngineError("late")):
        for _ in range(3):
            harness.pool.supervisor.record_failure(replica, first, error)
    assert harness.usable_count() == 1


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.timing
async def test_the_turns_of_an_engine_that_hangs_are_sent_to_another(make, ours):
    harness = await make(2, ours=ours)
    first, other = harness.engines
    first.hung = True
    start = time.monotonic()
    await asyncio.gather(*(harness.ask(f"e{k}") for k in range(6)))
    # Two looks, each after 0.05 s and of 0.1 s.
    assert 0.3 <= time.monotonic() - start < 1.0
    assert len(first.requests) == 3 and len(other.requests) == 6
    await asyncio.sleep(0.3)
    if ours:
        assert first.closed and len(harness.openers[0].opened) == 2
    else:
        assert (
            harness.usable_count() == 1
            and first.probes > 0
            and harness.openers[0].opened == [first]
        )
        first.hung = False
    await harness.until(lambda: harness.usable_count() == 2)
    assert [len(opener.opened) for opener in harness.openers] == [1 + ours, 1]


async def test_a_slow_engine_that_is_healthy_is_not_restarted(make):
    harness = await make(1)
    harness.engines[0].seconds = 0.6
    await harness.ask("e")
    assert harness.request_counts() == [1] and len(harness.openers[0].opened) == 1


async def test_one_failed_health_check_does_not_end_an_engine(make):
    harness = await make(1)
    engine = harness.engines[0]
    turn = asyncio.create_task(harness.ask("e"))
    for _ in range(3):
        engine.hung = True
        await asyncio.sleep(0.17)  # a look begins at 0.05 and is a miss at 0.15
        engine.hung, engine.seconds = False, 9.0
        await asyncio.sleep(0.1)
    engine.seconds = 0.0
    await turn
    assert len(harness.openers[0].opened) == 1


async def test_after_three_restarts_an_engine_is_not_used_again(make):
    harness = await make(2)
    opener = harness.openers[0]
    for life in range(4):
        engine = opener.engine
        engine.dead = True
        await asyncio.gather(*(harness.ask(f"e{life}-{i}") for i in range(4)))
        for i in range(4):
            harness.pool.end(f"e{life}-{i}")
        if life < 3:
            await harness.until(lambda: harness.usable_count() == 2)
            assert opener.engine is not engine
    await asyncio.sleep(0.3)
    assert len(opener.opened) == 4 and harness.usable_count() == 1
    await harness.publish(2)
    await asyncio.sleep(0.3)
    assert len(opener.opened) == 4 and harness.usable_count() == 1, "for good"


async def test_publishing_a_policy_resets_the_count_of_restarts(make):
    harness = await make(1)
    for version in range(2, 8):
        harness.engines[0].dead = True
        with pytest.raises(EngineDead):
            await harness.ask("e")
        await harness.pool.ready()
        await harness.publish(version)
    assert len(harness.openers[0].opened) == 7


async def test_if_all_engines_failed_the_error_has_their_last_lines(make):
    harness = await make(2)
    for opener in harness.openers:
        opener.failing = [EngineDead("it does not start:\n  | CUDA out of memory")] * 3
        opener.engine.dead = True
    with pytest.raises(EngineDead, match="last words"):
        await harness.ask("e")
    with pytest.raises(EngineDead, match="out of memory") as raised:
        await asyncio.wait_for(harness.pool.ready(), 5)
    assert str(raised.value).count("CUDA out of memory") == 2
    assert [len(opener.opened) for opener in harness.openers] == [1, 1]
    with pytest.raises(EngineDead):
        await harness.ask("e")
    assert harness.pool.metrics()["engine/restarts"] == 6


@pytest.mark.timing
async def test_servers_of_the_user_are_waited_for_with_a_limit(make):
    harness = await make(
        2, ours=False, recovery=RecoveryPolicy(first_backoff=0.02, max_backoff=0.1, outage=0.4)
    )
    for engine in harness.engines:
        engine.dead = True
    for k in range(3):
        with pytest.raises(EngineError):
            await harness.ask(f"e{k}")
    start = time.monotonic()
    with pytest.raises(EngineDead, match="refuses"):
        await harness.pool.ready()
    assert 0.2 < time.monotonic() - start < 1.0
    harness.engines[1].dead = False
    await harness.until(lambda: harness.usable_count() == 1)
    await harness.pool.ready()
    assert len(harness.openers[1].opened) == 1


async def test_a_server_that_the_user_restarted_is_sent_the_policy(make):
    harness = await make(2, ours=False, version=4)
    a, b = harness.engines
    a.claims, a.weights = 0, -1  # its own weights again, while the client believes in 4
    for k in range(8):
        await harness.ask(f"e{k}")
    await harness.until(lambda: harness.usable_count() == 2)
    assert (a.published, a.weights, b.published) == ([4, 4], 40, [4])


# -- the policy ------------------------------------------------------------------------------------


async def test_every_engine_is_sent_the_policy_in_order(make):
    harness = await make(3)
    assert await harness.publish(2) == 4
    assert [e.published for e in harness.engines] == [[1, 2]] * 3


async def test_an_engine_that_refuses_the_policy_is_used_again_only_with_it(make):
    harness = await make(2)
    a, _ = harness.engines
    a.refuses = [EngineError("the canary is wrong")]
    assert await harness.publish(2) == 4
    assert harness.usable_count() == 1
    await harness.until(lambda: harness.usable_count() == 2)
    assert a.published == [1, 2] and harness.openers[0].opened == [a]


async def test_an_engine_that_fails_its_check_is_never_usable(make):
    """It has the new version already when the check fails."""
    harness = await make(2, recovery=PATIENT)
    failing, replica = harness.engines[0], harness.pool.replicas[0]

    def fail(route, sent):
        failing.version = route.version
        raise EngineError("it holds other values")

    failing.finish_update = fail
    publishing = asyncio.create_task(harness.publish(2))
    await harness.until(lambda: failing.version == 2)
    while not publishing.done():
        assert not harness.pool.supervisor.is_usable(replica)
        await asyncio.sleep(0.001)
    assert harness.usable_count() == 1


async def test_the_log_names_an_engine_that_does_not_fall_asleep(make, monkeypatch, caplog):
    monkeypatch.setattr(distributor_module, "SLOW_SECONDS", 0.1)
    harness = await make(2)
    harness.engines[1].sleep = lambda: time.sleep(0.3)
    await harness.sleep()
    (line,) = [r.getMessage() for r in caplog.records]
    assert line == f"engines are not asleep after 0.1 s; waiting for {harness.engines[1].url}"
    await harness.publish(2)


async def test_an_engine_that_always_refuses_the_policy_is_restarted_then_given_up(make):
    class Stubborn(FakeOpener):
        def __call__(self):
            engine = super().__call__()
            engine.refuses = [EngineError("not these")] * 99
            return engine

    harness = await make(2)
    harness.openers[0].__class__ = Stubborn
    harness.engines[0].refuses = [EngineError("not these")] * 99
    await harness.publish(2)
    await harness.until(lambda: len(harness.openers[0].opened) == 4)
    await asyncio.sleep(0.3)
    assert len(harness.openers[0].opened) == 4 and harness.usable_count() == 1
    await harness.ask("e")


@pytest.mark.parametrize(
    "error, kind",
    [
        (OSError("no space left"), EngineError),
        (SafetensorError("while serializing"), EngineError),
        (KeyError("data"), InvalidEngineResponse),
        (TypeError("not subscriptable"), InvalidEngineResponse),
        (ValueError("not JSON"), InvalidEngineResponse),
        (AttributeError("no get"), InvalidEngineResponse),
    ],
)
async def test_any_exception_of_a_client_counts_against_its_engine(make, error, kind):
    harness = await make(2, recovery=PATIENT)
    a, b = harness.engines
    a.refuses = [error]

    def stumble():
        raise error

    a.probe = stumble
    assert await harness.publish(2) == 4
    assert harness.usable_count() == 1 and b.published == [1, 2]
    cause = harness.pool.replicas[0].cause
    assert type(cause) is kind and a.url in str(cause) and cause.__cause__ is error


async def test_user_errors_do_not_count_against_an_engine(make):
    harness = await make(1, recovery=PATIENT)
    harness.engines[0].refuses = [UserError("rollout.sync")]
    with pytest.raises(UserError, match="sync"):
        await harness.publish(2)


async def test_an_engine_that_stays_full_is_restarted(make):
    recovery = RecoveryPolicy(first_backoff=0.02, max_backoff=0.05, outage=0.3)
    harness = await make(1, recovery=recovery)
    first = harness.engines[0]

    def full():
        raise EngineOverloaded("status 503: shutting down")

    first.probe = full
    first.failing = [EngineError("x")] * 3
    for _ in range(3):
        with pytest.raises(EngineError):
            await harness.ask("e")
    await asyncio.sleep(0.1)
    assert harness.openers[0].opened == [first], "it may have a place soon"
    await asyncio.wait_for(harness.pool.ready(), 5)
    assert harness.engines[0] is not first
    await harness.ask("e")


async def test_if_no_engine_accepts_an_update_the_causes_are_raised_at_once(make):
    harness = await make(2, recovery=PATIENT)
    for k, engine in enumerate(harness.engines):
        engine.refuses = [EngineError(f"canary {k}")]
    with pytest.raises(EngineError, match=r"version 2(.|\n)*canary 0(.|\n)*canary 1"):
        await harness.publish(2)


async def test_publish_restarts_the_only_engine_if_it_died_during_training(make):
    harness = await make(1)
    await harness.sleep()
    assert harness.engines[0].asleep
    harness.engines[0].dead = True
    assert await harness.publish(2) == 4
    assert [e.published for e in harness.openers[0].opened] == [[1], [2]]
    await harness.ask("e")


async def test_a_version_that_is_published_twice_is_sent_twice(make):
    """As when the first was a trial: an engine that was away meanwhile holds the trial."""
    harness = await make(2, recovery=RecoveryPolicy(first_backoff=0.2))
    a, _ = harness.engines
    a.weights = -1  # the trial's
    a.failing = [EngineError("x")] * 3
    for k in range(6):
        await harness.ask(f"e{k}")
    assert harness.usable_count() == 1 and a.version == 1
    await harness.publish(1)
    await harness.until(lambda: harness.usable_count() == 2)
    assert (a.published, a.weights) == ([1, 1], 10)


async def test_a_policy_that_has_not_changed_is_not_sent_again(make):
    harness = await make(2)
    first, second = harness.engines
    await harness.move_weights()
    assert await harness.publish(2, weights=10) == 0
    await harness.sleep()
    assert await harness.publish(3, weights=10) == 0
    assert [(e.published, e.version, e.asleep) for e in (first, second)] == [([1], 3, False)] * 2
    answer = await harness.pool.generate(
        PROMPT, Sampling(), episode_id="e", seed=1, deadline=time.monotonic() + 5
    )
    assert (list(answer.token_ids), list(answer.versions)) == ([10], [3])
    assert await harness.publish(4) == 4 and first.published == second.published == [1, 4]


async def test_a_policy_is_sent_again_to_engines_that_do_not_hold_it(make):
    harness = await make(2)
    first, second = harness.engines
    second.forgets = True
    await harness.sleep()
    assert await harness.publish(2, weights=10) == 4
    assert first.published == second.published == [1, 2], "one has released its weights"
    first.dead = True
    await harness.sleep()
    await harness.until(lambda: len(harness.openers[0].opened) == 1)
    assert await harness.publish(3, weights=10) == 4
    await harness.until(lambda: harness.usable_count() == 2)
    assert harness.engines[0] is not first and harness.engines[0].weights == 10


async def test_an_engine_that_cannot_take_a_version_is_excluded(make):
    harness = await make(2)
    first = harness.engines[0]
    first.dead = True
    assert await harness.publish(2, weights=10) == 0
    await harness.until(lambda: harness.usable_count() == 2)
    assert [e.published for e in harness.openers[0].opened] == [[1], [2]]
    assert harness.engines[1].published == [1] and harness.engines[1].version == 2


@pytest.mark.parametrize("ours", [True, False])
async def test_publish_waits_for_the_only_engine_to_recover(make, ours):
    harness = await make(1, ours=ours)
    engine = harness.engines[0]
    engine.failing = [EngineError("x")] * 3
    for _ in range(3):
        with pytest.raises(EngineError):
            await harness.ask("e")
    await harness.sleep()
    assert harness.usable_count() == 0
    assert await harness.publish(2) == 4
    await harness.ask("e")
    assert harness.openers[0].opened == [engine]


async def test_nothing_is_sent_while_the_weights_change(make):
    harness = await make(2, recovery=RecoveryPolicy(first_backoff=0.2))
    first = harness.engines[0]
    first.refuses = [EngineError("the canary is wrong")]
    await harness.publish(2)
    await harness.sleep()
    await harness.until(lambda: first.asleep)
    await asyncio.sleep(0.2)
    assert first.published == [1] and harness.usable_count() == 1
    await harness.publish(3)  # to the one that came back, too
    assert [e.published for e in harness.engines] == [
        [1, 3],
        [1, 2, 3],
    ] and harness.usable_count() == 2
    assert not harness.learner.misread


async def test_an_engine_that_dies_while_weights_move_gets_the_next_ones(make):
    """Turns go on: so it is restarted at once, and an engine that hangs is noticed."""
    harness = await make(2)
    first, second = harness.openers
    await harness.move_weights()
    await asyncio.gather(*(harness.ask(f"e{k}") for k in range(4)))
    first.engine.dead = True
    await asyncio.gather(*(harness.ask(f"e{k}") for k in range(4)))
    await harness.until(lambda: harness.pool.replicas[0].awaits_weights)
    assert len(first.opened) == 2 and not first.engine.published
    assert not first.engine.asleep and harness.usable_count() == 1
    await harness.publish(2)
    assert first.engine.published == [2] and harness.usable_count() == 2
    await harness.move_weights()
    second.engine.hung = True
    await asyncio.gather(*(harness.ask(f"e{k}") for k in range(4)))
    await harness.until(lambda: second.opened[0].closed)


async def test_an_engine_with_the_published_weights_returns_while_they_move(make):
    harness = await make(1)
    engine = harness.engines[0]
    await harness.move_weights()
    engine.failing = [EngineError("x")] * 3
    for _ in range(3):
        with pytest.raises(EngineError):
            await harness.ask("e")
    await harness.until(lambda: harness.usable_count() == 1)
    assert engine.published == [1]
    await harness.ask("e")


async def test_new_turns_wait_while_some_engines_have_the_next_policy(make):
    harness = await make(2)
    go_on = threading.Event()
    slow, finish = harness.engines[1], harness.engines[1].finish_update
    slow.finish_update = lambda *args: go_on.wait(5) and finish(*args)
    publishing = asyncio.create_task(harness.publish(2))
    await harness.until(lambda: harness.engines[0].version == 2)
    slow.version = 2
    turn = asyncio.create_task(harness.ask("e"))
    await asyncio.sleep(0.2)
    assert not turn.done()
    go_on.set()
    await publishing
    assert await turn == 20


async def test_no_engine_is_restarted_during_training(make):
    """It may share the trainer's GPU: what fails there then says nothing of the engine."""
    harness = await make(1)
    opener = harness.openers[0]
    await harness.sleep()
    opener.engine.dead = True
    opener.failing = [EngineDead("out of memory")] * 9
    harness.pool.supervisor.exclude(
        harness.pool.replicas[0], opener.engine, EngineDead("died"), broken=True
    )
    await asyncio.sleep(0.3)
    assert len(opener.failing) == 9
    opener.failing.clear()
    assert await harness.publish(2) == 4
    await harness.ask("e")
    assert harness.pool.metrics()["engine/restarts"] == 1


async def test_a_failed_start_that_overlaps_training_is_not_counted(make):
    harness = await make(1)
    opener = harness.openers[0]
    opener.seconds, opener.failing = 0.2, [EngineDead("out of memory")]
    opener.engine.dead = True
    with pytest.raises(EngineDead):
        await harness.ask("e")
    await harness.until(lambda: harness.pool.replicas[0].restarts == 1)
    await harness.sleep()
    await harness.until(lambda: not opener.failing)
    await harness.until(lambda: harness.pool.replicas[0].restarts == 0)
    await harness.publish(2)


MEMORY = Delivery("memory", may_use_files=True)


def by_memory(harness):
    """Let the engines receive weights through memory; return the sources of all later updates."""
    sources, plain = [], FakeOpener.__call__

    def opened(opener):
        engine = plain(opener)
        engine.delivery = MEMORY
        finish = engine.finish_update

        def finish_update(*args):
            sources.append((opener.index, engine.delivery.source))
            finish(*args)

        engine.finish_update = finish_update
        return engine

    for opener in harness.openers:
        opener.__class__ = type("Memory", (FakeOpener,), {"__call__": opened})
        opener.engine.delivery, opener.engine.dead = MEMORY, True
    return sources


async def test_a_restarted_engine_that_receives_by_memory_waits_for_the_next_policy(make):
    harness = await make(2)
    sources = by_memory(harness)
    await harness.publish(2)
    await harness.until(lambda: harness.usable_count() == 1)
    first, second = sorted(range(2), key=lambda k: -len(harness.engines[k].published))
    assert sources == [(first, "files")], "no engine could be used, so one did not wait"
    await harness.until(lambda: harness.pool.replicas[second].awaits_weights)
    await harness.ask("e")
    assert harness.usable_count() == 1 and not harness.engines[second].published
    await harness.sleep()
    assert harness.engines[second].asleep, "it may share a GPU with the trainer"
    await harness.publish(3)
    assert harness.usable_count() == 2 and not harness.learner.misread
    assert sorted(sources[1:]) == [(0, "memory"), (1, "memory")]


async def test_an_engine_that_waits_for_the_next_policy_replaces_the_last_one(make):
    harness = await make(2)
    sources = by_memory(harness)
    await harness.publish(2)
    await harness.until(lambda: any(r.awaits_weights for r in harness.pool.replicas))
    waiting = next(r for r in harness.pool.replicas if r.awaits_weights)
    other = harness.engines[1 - waiting.index]
    other.dead = True
    with pytest.raises(EngineError):
        await harness.ask("e")
    await asyncio.wait_for(harness.pool.ready(), 5)
    await harness.ask("e")
    assert [how for _, how in sources] == ["files", "files"]


async def test_an_engine_that_ended_when_it_received_memory_reads_files_after_its_restart(make):
    """SGLang ends if it cannot read the memory of another process."""
    harness = await make(1)
    sources = by_memory(harness)
    await harness.publish(2)
    engine = harness.engines[0]
    engine.has_received = False

    def dies(route, sent):
        engine.dead = True
        engine.check_alive()

    engine.finish_update = dies
    await harness.sleep()
    await harness.publish(3)
    await harness.ask("e")
    await harness.sleep()
    await harness.publish(4)
    assert harness.engines[0] is not engine
    assert [how for _, how in sources] == ["files", "files", "files"]


async def test_training_waits_until_a_policy_in_transfer_is_complete(make):
    harness = await make(2)
    sending, go_on = threading.Event(), threading.Event()
    plain = FakeOpener.__call__

    def slow(opener):
        engine = plain(opener)
        finish = engine.finish_update

        def finish_slowly(*args):
            sending.set()
            assert go_on.wait(5)
            finish(*args)

        engine.finish_update = finish_slowly
        return engine

    harness.openers[0].__class__ = type("Slow", (FakeOpener,), {"__call__": slow})
    harness.engines[0].dead = True
    await asyncio.gather(*(harness.ask(f"e{k}") for k in range(2)))
    assert await asyncio.to_thread(sending.wait, 5)
    asleep = asyncio.create_task(harness.sleep())
    await asyncio.sleep(0.1)
    assert not asleep.done()
    go_on.set()
    await asleep
    assert harness.engines[0].published == [1] and harness.engines[0].asleep


async def test_before_the_first_publish_a_restarted_engine_has_its_initial_weights():
    harness = PoolHarness(1)
    try:
        await harness.ask("e")
        harness.engines[0].dead = True
        with pytest.raises(EngineDead):
            await harness.ask("e")
        await harness.pool.ready()
        await harness.ask("e+1")
        assert [e.published for e in harness.openers[0].opened] == [[], []]
    finally:
        await asyncio.to_thread(harness.pool.close)


async def test_an_engine_in_doubt_is_sent_the_policy_again(make):
    harness = await make(2)
    a, b = harness.engines
    a.failing = [RequestRefused("no logprobs here")]
    assert len(await harness.pool.scores(PROMPT)) == 1
    assert harness.usable_count() == 1
    await harness.until(lambda: harness.usable_count() == 2)
    assert (a.published, b.published) == ([1, 1], [1])
    for engine in harness.engines:
        engine.failing = [RequestRefused("too long")]
    with pytest.raises(RequestRefused):
        await harness.pool.scores(PROMPT)
    assert harness.usable_count() == 2, "a row that none takes is at fault itself"


# -- beginning and end -----------------------------------------------------------------------------


def test_a_failed_start_closes_the_other_engines_also_late_ones():
    closed = []
    openers = [FakeOpener(0, True), FakeOpener(1, True), FakeOpener(2, True)]
    openers[1].seconds, openers[1].failing = 0.1, [EngineDead("no such GPU")]
    openers[2].seconds = 0.3
    with pytest.raises(EngineDead, match="no such GPU"):
        EnginePool(openers, close=lambda: closed.append(1))
    assert closed == [1] and openers[0].engine.closed
    end = time.monotonic() + 5
    while not (openers[2].opened and openers[2].engine.closed):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.timing
def test_engines_start_concurrently():
    openers = [FakeOpener(i, True) for i in range(4)]
    for opener in openers:
        opener.seconds = 0.2
    start = time.monotonic()
    pool = EnginePool(openers)
    assert time.monotonic() - start < 0.6
    pool.close()


@pytest.mark.timing
async def test_close_ends_all_engines_and_threads():
    closed = []
    openers = [FakeOpener(0, True), FakeOpener(1, False), FakeOpener(2, True)]
    pool = EnginePool(openers, close=lambda: closed.append(1), recovery=QUICK)
    openers[0].engine.dead = True
    openers[0].seconds = 0.3
    openers[1].engine.hung = openers[2].engine.hung = True
    ask = [
        asyncio.create_task(
            pool.generate(
                PROMPT, Sampling(), episode_id=f"e{k}", seed=0, deadline=time.monotonic() + 60
            )
        )
        for k in range(3)
    ]
    await asyncio.sleep(0.1)
    start = time.monotonic()
    await asyncio.to_thread(pool.close)
    assert time.monotonic() - start < 0.5
    for error in await asyncio.gather(*ask, return_exceptions=True):
        assert isinstance(error, EngineError)
    assert closed == [1]
    await asyncio.to_thread(pool.close)
    assert closed == [1]
    assert all(e.closed for opener in openers for e in opener.opened), "the one being started, too"
    assert not [t for t in threading.enumerate() if t.name.startswith("recover-engine")]
    for call in (pool.ready(), pool.scores(PROMPT)):
        with pytest.raises(EngineError, match="closed"):
            await call


async def test_a_cancelled_turn_is_not_sent_to_another_engine(make):
    harness = await make(2)
    harness.engines[0].seconds = 60.0
    turn = asyncio.create_task(harness.ask("e"))
    await harness.until(lambda: harness.request_counts() == [1, 0])
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert harness.request_counts() == [1, 0] and harness.usable_count() == 2


# -- any faults at all -----------------------------------------------------------------------------


def test_an_excluded_engine_is_tried_less_often_until_it_answers_a_request(monkeypatch):
    replica = Replica(0, None, SimpleNamespace())
    supervisor = Supervisor([replica], RecoveryPolicy())
    monkeypatch.setattr(
        supervisor, "exclude", lambda *_, **__: setattr(replica, "is_excluded", True)
    )
    for _ in range(2):
        for excluded in (False, False, True):
            supervisor.record_failure(replica, replica.engine, EngineError("no"))
            assert replica.is_excluded == excluded
        supervisor.record_success(replica, replica.engine)  # a late answer says nothing
        waits = [supervisor._next_wait(replica) for _ in range(8)]
        assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
        supervisor._admit(replica)
        assert supervisor._next_wait(replica) == 60, "it has not answered a request yet"
        supervisor.record_success(replica, replica.engine)
    assert supervisor._next_wait(replica) == 1


FAULTS = ("die", "hang", "fail", "full", "claim", "refuse", "sleep", "publish", "wait")


@examples(40)
@given(
    ours=st.booleans(),
    n=st.integers(1, 3),
    schedule=st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(0, 2)), max_size=12),
)
def test_under_any_failures_tokens_come_from_the_published_policy_and_nothing_hangs(
    ours, n, schedule
):
    asyncio.run(asyncio.wait_for(any_faults(ours, n, schedule), 30))


async def any_faults(ours, n, schedule):
    harness = PoolHarness(n, ours=ours, recovery=QUICK)
    done, version = asyncio.Event(), 1
    try:
        await harness.publish(version)
        for opener in harness.openers:
            opener.engine.seconds = 0.002

        async def play(k):
            """Turns as an agent loop asks for them, played again after an error."""
            attempt = 0
            while not done.is_set():
                await learning()
                await harness.pool.ready()
                try:
                    for turn in range(4):
                        await learning()
                        await harness.ask(f"e{k}+{attempt}", PROMPT * (turn + 1), seconds=1.0)
                except EngineError:
                    pass
                harness.pool.end(f"e{k}+{attempt}")
                attempt += 1
                await asyncio.sleep(0.001)

        quiet = asyncio.Event()
        quiet.set()

        async def learning():
            await quiet.wait()

        async def new_policy(version):
            """Nobody asks from `sleep` to `publish`: turns in flight are let out first."""
            quiet.clear()
            await harness.until(lambda: not harness.asking)
            await harness.sleep()
            await asyncio.sleep(0.03)
            await harness.publish(version)
            quiet.set()

        players = [asyncio.create_task(play(k)) for k in range(5)]
        for fault, k in schedule:
            engine = harness.openers[k % n].engine
            if fault == "die" and ours:
                engine.dead = True
            elif fault == "hang":
                engine.hung = True
            elif fault == "fail":
                engine.failing += [EngineError("reset"), InvalidEngineResponse("NaN")] * 2
            elif fault == "full":
                engine.failing += [EngineOverloaded("full")] * 3
            elif fault == "claim":
                engine.claims, engine.weights = 0, -1
            elif fault == "refuse" and n > 1 and k == 0:
                engine.refuses += [EngineError("canary")]
            elif fault == "publish":
                version += 1
                with contextlib.suppress(EngineError):
                    await new_policy(version)
            await asyncio.sleep(0.02)
            if not ours and fault == "hang":
                engine.hung = False
        done.set()
        for result in await asyncio.gather(*players, return_exceptions=True):
            assert result is None or isinstance(result, EngineDead), repr(result)
        assert not harness.learner.misread
        for opener in harness.openers:
            for engine in opener.opened:
                assert not engine.live or engine.closed or engine is opener.engine
    finally:
        start = time.monotonic()
        await asyncio.to_thread(harness.pool.close)
        assert time.monotonic() - start < 2
