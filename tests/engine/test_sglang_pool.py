"""Two real SGLang servers as one engine, and what becomes of a step when one dies or hangs."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from support.exact_rank import ExactRank
from support.processes import Processes
from support.trainer_fixtures import config
from support.updates import update
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.agent_loops import attempt
from agentrl.config import Config
from agentrl.engine.base import Sampling, Update
from agentrl.engine.remote.launch import SGLangLaunch
from agentrl.engine.remote.pool import EnginePool
from agentrl.engine.remote.senders import Delivery
from agentrl.engine.remote.sglang import SGLangEngine
from agentrl.engine.remote.supervisor import RecoveryPolicy
from agentrl.errors import EngineDead
from agentrl.rewards import Scorer
from agentrl.rollout import Rollouts
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Message, Sample, token_array

pytestmark = pytest.mark.sglang

QUICK = RecoveryPolicy(health_interval=1.0, health_timeout=5.0, first_backoff=0.2)
VERSION = 5
ROW = token_array(range(3, 40))


def engine_of(server, model, process=None, **options):
    return SGLangEngine(
        server.url,
        vocabulary=AutoConfig.from_pretrained(model).vocab_size,
        key=server.token,
        admin_key=server.admin_token,
        process=process,
        **options,
    )


class Site:
    """Starts one server after another."""

    def __init__(self, model, python, *, most=99, **options):
        self.model, self.python, self.options = model, python, options
        self.processes = []
        self.most = most
        """The largest number of servers."""

    def __call__(self):
        if len(self.processes) >= self.most:
            raise EngineDead("no machine is left")
        process = SGLangLaunch(str(self.model), python=self.python, dtype="float32").start()
        self.processes.append(process)
        return engine_of(process, self.model, process, **self.options)

    @property
    def process(self):
        return self.processes[-1]


def scheduler_of(process) -> int:
    """The process in the server's group that computes."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            group = int((folder / "stat").read_text().rpartition(")")[2].split()[2])
            name = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if group == process.pid and name.startswith(b"sglang::scheduler"):
            return int(folder.name)
    raise AssertionError("no scheduler")


def logprobs_of(model, row):
    ids = torch.tensor([row.tolist()])
    with torch.inference_mode():
        logits = model(input_ids=ids[:, :-1]).logits[0].float()
    logprobs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return torch.cat([torch.zeros(1), logprobs])


class World:
    """A pool that samples another policy than its servers began with, and talks at length."""

    def __init__(self, folder, openers, *, turn_tokens=400, n=8):
        self.n = n
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        base = logprobs_of(model, ROW)
        with torch.no_grad():
            model.get_parameter("model.norm.weight").mul_(0.1)  # anything may follow anything
        self.expected = logprobs_of(model, ROW)
        assert (self.expected - base).abs().max() > 0.05
        config = Config.model_validate(
            {
                "model": {"path": str(folder)},
                "rollout": {"max_turn_tokens": turn_tokens, "timeout_s": 60},
            }
        )
        self.pool = EnginePool(openers, recovery=QUICK)
        self.rollouts = Rollouts(
            attempt.Runtime(self.pool, attempt.load_template(config), LocalToolbox(), config),
            Scorer(config.reward),
            seed=0,
        )
        policy = ((n, p.detach()) for n, p in model.named_parameters())
        self.pool.publish(update(policy, VERSION))

    def step(self, number, harm):
        """A step during which harm is done, once turns are in flight."""
        timer = threading.Thread(target=harm)
        timer.start()
        groups = self.rollouts.collect(SAMPLES, n=self.n, sampling=Sampling(), step=number)
        timer.join()
        assert [(len(g.scored), g.dropped) for g in groups] == [(self.n, 0)] * len(SAMPLES)
        for scored in (s for g in groups for s in g.scored):
            for segment in scored.trajectory.segments:
                assert {v for v in segment.versions if v >= 0} == {VERSION}

    def until_usable(self, n):
        end = time.monotonic() + 300
        while self.pool.metrics()["engine/usable"] < n:
            assert time.monotonic() < end, "a server did not come back"
            time.sleep(0.1)

    def check_weights(self, *replicas):
        for replica in replicas:
            logprobs = torch.tensor(list(self.rollouts.run(replica.engine.score(ROW))))
            torch.testing.assert_close(logprobs, self.expected, atol=1e-4, rtol=0)

    def close(self):
        self.rollouts.close()
        self.pool.close()


SAMPLES = [
    Sample(
        f"r{i}",
        (Message("user", f"What is 3*4+{i}?"),),
        "single_turn",
        "openai/gsm8k",
        "12",
        row=i,
    )
    for i in range(4)
]


def in_flight(replica):
    end = time.monotonic() + 30
    while len(replica.in_flight) < 4:
        assert time.monotonic() < end, "no turns to harm"
        time.sleep(0.005)


@pytest.mark.slow
def test_one_of_two_servers_is_killed_and_the_step_completes(
    sglang_server, sglang_python, tiny_model
):
    site = Site(tiny_model, sglang_python, most=1)
    openers = [site, lambda: engine_of(sglang_server, tiny_model)]
    world = World(tiny_model, openers, turn_tokens=150, n=4)
    a, b = world.pool.replicas
    try:
        world.check_weights(a, b)

        def kill():
            in_flight(a)
            os.killpg(site.process.pid, signal.SIGKILL)

        world.step(1, kill)
        metrics = world.pool.metrics()
        assert metrics["engine/failovers"] >= 4 and metrics["engine/usable"] == 1
        world.check_weights(b)
    finally:
        world.close()
    assert not site.process.running and sglang_server.running


@pytest.mark.slow
def test_steps_complete_although_servers_die(sglang_python, random_model):
    """One of two killed, one of two stopped, and one alone killed."""
    sites = [Site(random_model, sglang_python) for _ in range(2)]
    world = World(random_model, sites)
    a, b = world.pool.replicas
    try:
        world.check_weights(a, b)

        def kill():
            in_flight(a)
            os.killpg(sites[0].process.pid, signal.SIGKILL)

        world.step(1, kill)
        assert len(sites[0].processes) <= 2 and len(sites[1].processes) == 1
        world.until_usable(2)
        world.check_weights(a, b)

        def stop():
            in_flight(b)
            sites[1].most = 1
            os.kill(scheduler_of(sites[1].process), signal.SIGSTOP)

        start = time.monotonic()
        world.step(2, stop)
        assert time.monotonic() - start < 45, "noticed, not waited for to the episodes' end"
        assert not sites[1].process.running

        world.step(3, kill)  # which is alone now
        assert len(sites[0].processes) == 3
        world.check_weights(a)
    finally:
        world.close()
    assert not any(p.running for site in sites for p in site.processes)


@pytest.mark.slow
def test_turns_go_on_although_the_server_dies_while_it_gets_weights(sglang_python, random_model):
    site = Site(random_model, sglang_python)
    world = World(random_model, [site])
    engine = world.pool.replicas[0].engine
    model = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32).eval()
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(0.05)
    policy = update(((n, p.detach()) for n, p in model.named_parameters()), VERSION + 1)
    load = engine.load

    def die(*_):
        os.killpg(site.process.pid, signal.SIGKILL)
        load(*_)

    engine.load = die
    try:
        futures = [
            world.rollouts.start(sample, n=4, sampling=Sampling(), position=i)
            for i, sample in enumerate(SAMPLES)
        ]
        in_flight(world.pool.replicas[0])
        with world.rollouts.paused_time_limits():
            world.pool.publish(policy)
        groups = [world.rollouts.wait(future).group for future in futures]
        assert [(len(g.scored), g.dropped) for g in groups] == [(4, 0)] * len(SAMPLES)
        segments = [s for g in groups for r in g.scored for s in r.trajectory.segments]
        versions = {v for s in segments for v in s.versions if v >= 0}
        assert versions <= {VERSION, VERSION + 1} and VERSION + 1 in versions
        assert len(site.processes) == 2
        world.expected = logprobs_of(model, ROW)
        world.check_weights(world.pool.replicas[0])
    finally:
        world.close()
    assert not any(p.running for p in site.processes)


class Ranks:
    """Two ranks that publish to two servers: by the memory of rank 1, by broadcast from rank 0."""

    def __init__(self, folder, python):
        self.ranks = Processes(2, ExactRank, folder)
        self.ranks.begin(config())
        self.sites = [
            Site(folder, python, dtype=torch.float32, delivery=Delivery("memory", **way))
            for way in ({"ranks": (1,)}, {"backend": "gloo"})
        ]
        self.pool = EnginePool(self.sites, recovery=QUICK)
        self.version = 0

    def publish(self, harm=lambda: None):
        """Publish other weights; harm is done when the servers are ready to receive them."""

        def send(route):
            harm()
            return self.ranks.send_weights(route)

        self.pool.sleep()
        self.ranks.move(0.02)
        self.version += 1
        start = time.monotonic()
        self.pool.publish(Update(self.version, lambda: iter(()), send))
        return time.monotonic() - start

    async def check(self, *usable):
        """Check that exactly these servers are used, and that they have the ranks' weights."""
        assert [r.index for r in self.pool.replicas if not r.is_excluded] == [*usable]
        expected = self.ranks.score(ROW.tolist())
        for index in usable:
            engine = self.pool.replicas[index].engine
            assert engine.version == self.version
            scores = torch.tensor(list(await engine.score(ROW)))
            torch.testing.assert_close(scores[1:], expected, atol=1e-4, rtol=0)

    def until_waiting(self, index):
        end = time.monotonic() + 300
        while not self.pool.replicas[index].awaits_weights:
            assert time.monotonic() < end, "the server did not come back"
            time.sleep(0.1)

    def close(self):
        self.pool.close()
        self.ranks.close()


@pytest.mark.slow
async def test_ranks_publish_while_servers_hang_die_and_return(sglang_python, tiny_model):
    world = Ranks(tiny_model, sglang_python)
    try:
        world.publish()
        await world.check(0, 1)
        world.ranks.set_deadline(3.0)

        stopped = scheduler_of(world.sites[0].process)
        assert world.publish(lambda: os.kill(stopped, signal.SIGSTOP)) < 20
        await world.check(1)
        os.kill(stopped, signal.SIGCONT)
        world.until_waiting(0)
        await world.check(1)
        world.publish()
        await world.check(0, 1)

        killed = world.sites[1].process
        assert world.publish(lambda: os.killpg(killed.pid, signal.SIGKILL)) < 20
        await world.check(0)
        world.until_waiting(1)
        world.publish()
        await world.check(0, 1)
        assert len(world.sites[1].processes) == 2
    finally:
        world.close()
    assert not any(p.running for site in world.sites for p in site.processes)
