"""Rollouts in other processes: the same episodes, whatever their number and whichever dies."""

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from support.failing_engine import SAMPLING, TOKENIZER, FailingEngine, rows
from support.small_sglang import small_sglang

from agentrl import registry
from agentrl.chat import ChatTemplate
from agentrl.config import Config, DataConfig, RolloutConfig
from agentrl.engine.remote.pool import EnginePool
from agentrl.engine.remote.sglang import SGLangEngine
from agentrl.engine.scripted import Scripted
from agentrl.errors import (
    ConfigError,
    EngineError,
    Infrastructure,
    RunStopped,
    UserCodeError,
    UserError,
)
from agentrl.rewards import Scorer
from agentrl.rollout import open_rollouts
from agentrl.rollout_workers.channel import Channel, ChannelClosed
from agentrl.rollout_workers.workers import LocalProcess, count_workers
from agentrl.testing import call

pytestmark = pytest.mark.usefixtures("no_other_names")

TURNS = [call("calculator", expression="3*4"), "#### 12"]
OWN = str(Path(__file__).parent / "support/loops_of_workers.py")


@contextmanager
def playing(
    engine, workers=2, files=(), tools="in_process", reward=None, start=LocalProcess, **rollout
):
    files = ["shelf:calculator", OWN, *files]
    config = Config.model_validate(
        {
            "files": files,
            "tools": {"transport": tools},
            "rollout": {"workers": workers, **rollout},
            "reward": {"function": reward} if reward else {},
        }
    )
    for file in files:
        registry.load_file(file)
    scorer = Scorer(config.reward)
    with open_rollouts(config, engine, ChatTemplate(TOKENIZER), scorer, start=start) as opened:
        yield opened


class Chosen(Scripted):
    """The engine of workers that start once, of which each test chooses another one."""

    def __init__(self):
        super().__init__(TURNS, TOKENIZER)
        self.engine = FailingEngine(TURNS)

    def begin(self, *args, **options):
        self.engine.begin(*args, **options)

    def end(self, *args):
        self.engine.end(*args)

    async def generate(self, *args, **options):
        return await self.engine.generate(*args, **options)


@pytest.fixture(scope="module")
def two(no_other_names):
    """Return a function that gives two workers an engine. Their reward is the id of a process."""
    chosen = Chosen()
    with playing(chosen, reward="process") as rollouts:

        def with_engine(engine):
            chosen.engine = engine
            return rollouts

        yield with_engine


def content(groups):
    """What does not depend on time and process."""
    return [
        [
            (
                s.reward,
                s.rewards,
                s.trajectory.messages,
                s.trajectory.segments,
                s.trajectory.rollout,
            )
            for s in g.scored
        ]
        for g in groups
    ]


def pids(rollouts):
    return [worker.pid for worker in rollouts._players._workers]


def wait_for_two(rollouts):
    end = time.monotonic() + 60
    while len(pids(rollouts)) < 2:
        assert time.monotonic() < end, "the worker was not replaced"
        time.sleep(0.05)


def test_workers_play_what_one_process_plays():
    played = []
    for workers, tools in ((1, "in_process"), (3, "http")):
        engine = FailingEngine(TURNS)
        with playing(engine, workers, tools=tools) as rollouts:
            played.append(rollouts.collect(rows(6), n=4, sampling=SAMPLING, step=7))
        assert sorted(engine.begun) == sorted(engine.ended) and len(engine.begun) == 24
    one, three = map(content, played)
    assert one == three and len(one) == 6


def test_each_worker_plays_about_as_many_and_scores_its_groups(two):
    rollouts = two(FailingEngine(TURNS))
    groups = rollouts.collect(rows(8), n=4, sampling=SAMPLING, step=0)
    scored_in = [{s.reward for s in g.scored} for g in groups]
    assert all(len(processes) == 1 for processes in scored_in)
    of_groups = [int(*processes) for processes in scored_in]
    assert sorted(map(of_groups.count, pids(rollouts))) == [4, 4]
    assert os.getpid() not in of_groups


def test_the_progress_counts_episodes_of_all_workers(two):
    class Uneven(FailingEngine):
        async def generate(self, *args, **kwargs):
            await asyncio.sleep(0.03 * (kwargs["seed"] % 40))
            return await super().generate(*args, **kwargs)

    rollouts = two(Uneven(TURNS))
    with ThreadPoolExecutor() as pool:
        work = pool.submit(rollouts.collect, rows(40), n=2, sampling=SAMPLING, step=0)
        seen = []
        while not work.done():
            seen.append(rollouts.progress())
            time.sleep(0.02)
        work.result()
        assert rollouts.progress() is None
    ended = [progress.ended for progress in seen if progress]
    assert ended == sorted(ended) and len({*ended}) > 5
    assert {progress.total for progress in seen if progress} == {80}
    states = {progress.wait.state for progress in seen if progress and progress.wait}
    assert states == {"generate"}


def test_errors_of_an_engine_are_retried_by_the_worker(two):
    engine = FailingEngine(TURNS, failures=3)
    groups = two(engine).collect(rows(2), n=4, sampling=SAMPLING, step=0)
    tries = [s.trajectory.episode_id.partition("+")[2] for g in groups for s in g.scored]
    assert sum(map(bool, tries)) >= 1 and len(tries) == 8
    assert sorted(engine.begun) == sorted(engine.ended)


def test_a_bug_in_a_reward_reaches_the_run(two):
    broken = rows(2, extra={"is_broken": True})
    with pytest.raises(UserCodeError, match="a bug in the reward"):
        two(FailingEngine(TURNS)).collect(broken, n=2, sampling=SAMPLING, step=0)


def test_a_mistake_in_the_config_of_tools_ends_the_start(tmp_path):
    path = tmp_path / "only_here.py"
    path.write_text("from agentrl import tool\n@tool\ndef only_here() -> str:\n    'Say hi.'\n")
    registry.load_file(str(path))  # The config does not name it.
    wanted = r"the tool 'only_here'.*name the file with --file"
    with pytest.raises(ConfigError, match=wanted), playing(FailingEngine(TURNS)):
        pass


def test_a_killed_worker_costs_nothing(caplog):
    engine = FailingEngine(TURNS)
    with playing(engine) as rollouts:
        expected = content(rollouts.collect(rows(20), n=4, sampling=SAMPLING, step=7))
        killed = pids(rollouts)[0]
        timer = threading.Timer(0.02, os.kill, (killed, signal.SIGKILL))
        timer.start()
        groups = rollouts.collect(rows(20), n=4, sampling=SAMPLING, step=7)
        timer.join()
        assert content(groups) == expected
        assert not any(g.dropped for g in groups)
        wait_for_two(rollouts)
        assert killed not in pids(rollouts)
        metrics = rollouts.metrics()
        assert metrics["workers/restarts"] == 1 and metrics["workers/replayed"] % 4 == 0
        assert content(rollouts.collect(rows(20), n=4, sampling=SAMPLING, step=7)) == expected
    assert "ended by itself, code -9" in caplog.text
    assert sorted(engine.begun) == sorted(engine.ended)


@pytest.mark.slow
def test_a_worker_that_is_killed_every_second_costs_nothing():
    with playing(FailingEngine(TURNS), workers=3) as rollouts:
        expected = content(rollouts.collect(rows(6), n=4, sampling=SAMPLING, step=0))
        over, kills = threading.Event(), []

        def kill():
            while not over.wait(7.0):
                if running := pids(rollouts):
                    kills.append(running[len(kills) % len(running)])
                    os.kill(kills[-1], signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        while len(kills) < 10:
            assert content(rollouts.collect(rows(6), n=4, sampling=SAMPLING, step=0)) == expected
        over.set()
        killer.join()
        assert rollouts.metrics()["workers/restarts"] >= 9


def test_a_row_that_kills_its_worker_is_dropped_by_its_name(caplog):
    engine = FailingEngine(TURNS)
    with playing(engine) as rollouts:
        with pytest.raises(RunStopped, match="row r1: each worker that played it ended, 3 in"):
            rollouts.collect(rows(4, "deadly"), n=2, sampling=SAMPLING, step=0)
        others = [row for row in rows(40) if row.id != "r1"]
        assert len(rollouts.collect(others, n=2, sampling=SAMPLING, step=0)) == 39
    assert "row r1 is dropped" in caplog.text
    assert sorted(engine.begun) == sorted(engine.ended)


@pytest.mark.slow
def test_a_replacement_that_is_killed_is_started_again():
    started = []

    class Killed(LocalProcess):
        def __init__(self, number):
            super().__init__(number)
            started.append(number)
            if number == 2:
                os.kill(self._child.pid, signal.SIGKILL)

    with playing(FailingEngine(TURNS), start=Killed) as rollouts:
        os.kill(pids(rollouts)[0], signal.SIGKILL)
        end = time.monotonic() + 60
        while 3 not in started:
            assert time.monotonic() < end, "no other worker was started"
            time.sleep(0.05)
        wait_for_two(rollouts)
        assert rollouts.metrics()["workers/restarts"] == 1


@pytest.mark.slow
def test_a_worker_that_hangs_is_killed_and_costs_nothing(monkeypatch, caplog):
    monkeypatch.setattr("agentrl.rollout_workers.workers.SILENT_SECONDS", 3.0)
    engine = FailingEngine(TURNS)
    with playing(engine) as rollouts, ThreadPoolExecutor() as pool:
        expected = content(rollouts.collect(rows(6), n=4, sampling=SAMPLING, step=0))
        os.kill(pids(rollouts)[0], signal.SIGSTOP)
        asked = pool.submit(rollouts.run, rollouts._players.resume())  # It asks all workers.
        assert content(rollouts.collect(rows(6), n=4, sampling=SAMPLING, step=0)) == expected
        asked.result(timeout=5)
        wait_for_two(rollouts)
        assert rollouts.metrics() == {"workers/replayed": 12, "workers/restarts": 1}
    assert "has reported nothing for 3 s and is killed" in caplog.text
    assert "was killed, code -9" in caplog.text
    assert sorted(engine.begun) == sorted(engine.ended)


def test_a_row_that_cannot_be_sent_is_a_mistake_of_the_row(two, monkeypatch):
    module = ModuleType("only_in_this_process")
    exec("class Missing: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    rollouts = two(FailingEngine(["a"]))
    processes = pids(rollouts)
    for value, cause in (
        (threading.Lock(), "cannot pickle '_thread.lock' object"),
        (module.Missing(), "No module named 'only_in_this_process'"),
    ):
        row = rows(1, "single_turn", extra={"value": value})
        with pytest.raises(UserError, match=f"{cause}.*set rollout.workers=1"):
            rollouts.collect(row, n=2, sampling=SAMPLING, step=0)
    assert len(rollouts.collect(rows(2), n=2, sampling=SAMPLING, step=0)) == 2
    assert pids(rollouts) == processes


@pytest.mark.slow
def test_if_one_worker_cannot_start_the_others_end(tmp_path):
    path = tmp_path / "once.py"
    path.write_text(
        "import os, pathlib, time\n"
        "from agentrl.errors import ConfigError\n"
        f"mine = pathlib.Path({str(tmp_path)!r}) / f'pid{{os.getpid()}}'\n"
        f"if os.getpid() != {os.getpid()}:\n"
        "    mine.touch()\n"
        "    while len([*mine.parent.glob('pid*')]) < 3:\n"
        "        time.sleep(0.02)\n"
        "    if mine == max(mine.parent.glob('pid*')):\n"
        "        time.sleep(1)\n"
        "        raise ConfigError('not the last one')\n"
    )
    opened = playing(FailingEngine(TURNS), workers=3, files=[str(path)])
    with pytest.raises(ConfigError, match=r"in rollout worker \d: .*not the last one"):
        opened.__enter__()
    processes = [file.name[3:] for file in tmp_path.glob("pid*")]
    assert len(processes) == 3
    assert not [pid for pid in processes if os.path.exists(f"/proc/{pid}")]


@pytest.fixture
def interruptible():
    """SIGINT raises. A shell starts background jobs, perhaps these tests, with it ignored."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def test_nothing_is_left_behind(interruptible):
    engine = FailingEngine(TURNS)
    with pytest.raises(KeyboardInterrupt), playing(engine, tools="http") as rollouts:
        processes = pids(rollouts)
        threading.Timer(0.5, signal.raise_signal, (signal.SIGINT,)).start()
        rollouts.collect(rows(400, "slow"), n=2, sampling=SAMPLING, step=0)
    assert not [pid for pid in processes if os.path.exists(f"/proc/{pid}")]
    assert not engine.playing


def test_lines_and_warnings_of_workers_are_logged_once(two, caplog):
    caplog.set_level("INFO", logger="agentrl")
    engine = FailingEngine(["<tool_call>"])
    two(engine).collect(rows(1, "slow"), n=1, sampling=SAMPLING, step=0)
    end = time.monotonic() + 30  # A thread reads the lines that a worker prints.
    while "a line of a loop" not in caplog.text and time.monotonic() < end:
        time.sleep(0.05)
    assert caplog.text.count("a line of a loop") == 1


def test_a_warning_that_each_worker_logs_is_shown_once(two, caplog):
    rollouts = two(FailingEngine(TURNS))
    rollouts.collect(rows(4, "warns"), n=1, sampling=SAMPLING, step=0)
    counts = [caplog.text.count(f"an error of {pid}") for pid in pids(rollouts)]
    assert counts == [2, 2]
    # The worker that warned first may warn again.
    assert caplog.text.count("the same in all workers") == 2


def test_turns_go_to_servers_without_the_run_until_one_fails():
    template = ChatTemplate(TOKENIZER)
    turns = [[*template.encode(text), template.stop_ids[0]] for text in TURNS]
    with ExitStack() as stack:
        first = stack.enter_context(small_sglang(turns, 0.02))
        with small_sglang(turns, 0.02) as second:
            pool = EnginePool(
                [
                    lambda url=url: SGLangEngine(url, vocabulary=len(TOKENIZER))
                    for url in (first, second)
                ]
            )
            stack.callback(pool.close)
            requests = []
            for replica in pool.replicas:
                ask = replica.engine.generate
                replica.engine.generate = lambda *a, ask=ask, **k: (
                    requests.append(1) or ask(*a, **k)
                )
            rollouts = stack.enter_context(playing(pool))
            groups = rollouts.collect(rows(20), n=4, sampling=SAMPLING, step=0)
            served = [json.loads(_get(url, "/requests"))["turns"] for url in (first, second)]
        assert [len(g.scored) for g in groups] == [4] * 20 and not requests
        assert sum(served) == 160 and min(served) > 40
        # `second` has ended. All workers leave it.
        groups = rollouts.collect(rows(20), n=4, sampling=SAMPLING, step=1)
        assert [(len(g.scored), g.dropped) for g in groups] == [(4, 0)] * 20
        assert pool.metrics()["engine/usable"] == 1
        assert rollouts.metrics()["engine/failovers"] > 0


def _get(url, path):
    import urllib.request

    return urllib.request.urlopen(url + path, timeout=5).read()


# -- the number of workers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "batch", "cores", "expected"),
    [(1, 4096, 64, 1), (5, 1, 2, 5), ("auto", 16, 64, 1), ("auto", 256, 64, 8),
     ("auto", 4096, 8, 7), ("auto", 4096, 1, 1)],
)  # fmt: skip
def test_auto_counts_cores_and_episodes(monkeypatch, workers, batch, cores, expected):
    monkeypatch.setattr("agentrl.rollout_workers.workers.count_cores", lambda: cores)
    rollout = RolloutConfig(n=8, workers=workers)
    config = Config(rollout=rollout, data=DataConfig(batch_size=batch))
    assert count_workers(config) == expected


@pytest.mark.parametrize("workers", [0, 1025, 1.5, True, "two"])
def test_a_number_of_workers_that_no_machine_has_is_refused(workers):
    with pytest.raises(ValueError, match="workers"):
        RolloutConfig(workers=workers)


# -- the channel -----------------------------------------------------------------------------------


async def _channels(functions):
    one, two = socket.socketpair()
    first = Channel(*await asyncio.open_connection(sock=one))
    second = Channel(*await asyncio.open_connection(sock=two), functions)
    return first, second


class Unportable(Infrastructure):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def test_calls_return_raise_and_are_cancelled():
    ended = []

    async def wait():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("wait")

    def fail(error):
        raise error

    async def cancel_itself():
        raise asyncio.CancelledError

    def fail_oddly():
        raise Unportable(1, 2)

    async def run():
        first, second = await _channels(
            {
                "add": lambda a, b: a + b,
                "wait": wait,
                "fail": fail,
                "odd": fail_oddly,
                "itself": cancel_itself,
            }
        )
        assert await first.call("add", 2, 3) == 5
        assert await first.call("add", b"x" * 10**7, b"y") == b"x" * 10**7 + b"y"
        with pytest.raises(EngineError, match="down"):
            await first.call("fail", EngineError("down"))
        with pytest.raises(Infrastructure, match="Unportable: 1 and 2"):
            await first.call("odd")
        waiting = asyncio.create_task(first.call("wait"))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.sleep(0.05)
        assert ended == ["wait"] and not second.tasks
        with pytest.raises(Infrastructure, match="the call was cancelled"):
            await first.call("itself")
        lasting = asyncio.create_task(first.call("wait"))
        await asyncio.sleep(0.05)
        second.close()
        with pytest.raises(ChannelClosed):
            await lasting
        await asyncio.sleep(0.05)
        assert ended == ["wait"] * 2 and first.is_closed
        with pytest.raises(ChannelClosed):
            await first.call("add", 1, 2)

    asyncio.run(run())
