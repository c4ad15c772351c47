"""Two real SGLang servers as one engine, and what becomes of a step when one dies or hangs."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from updates import update

from agentrl.agent_loops.attempt import World, load_template
from agentrl.config import Config
from agentrl.engine.base import Sampling
from agentrl.engine.pool import Pacing, Pool
from agentrl.engine.sglang import SGLangEngine, SGLangLaunch
from agentrl.errors import EngineDead
from agentrl.rewards import make_scorer
from agentrl.rollout import Rollouts
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Message, Sample, token_array

pytestmark = pytest.mark.sglang

QUICK = Pacing(health_every=1.0, health_seconds=5.0, first_wait=0.2)
VERSION = 5
ROW = token_array(range(3, 40))


class Site:
    """Starts one server after another."""

    def __init__(self, model, python):
        self.model, self.python = model, python
        self.processes = []
        self.gone = False
        """Whether no further server starts."""

    def __call__(self):
        if self.gone:
            raise EngineDead("no machine is left")
        process = SGLangLaunch(str(self.model), python=self.python).start()
        self.processes.append(process)
        return SGLangEngine(
            process.url,
            vocabulary=AutoModelForCausalLM.from_pretrained(self.model).config.vocab_size,
            key=process.token,
            admin_key=process.admin_token,
            process=process,
        )

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
    found = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return torch.cat([torch.zeros(1), found])


def test_a_step_outlives_its_servers(sglang_python, random_model):
    """One of two killed, one of two stopped, and one alone killed."""
    model = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32).eval()
    base = logprobs_of(model, ROW)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.mul_(1.5)
    expected = logprobs_of(model, ROW)
    assert (expected - base).abs().max() > 0.05
    config = Config.model_validate(
        {
            "model": {"path": str(random_model)},
            "rollout": {"max_turn_tokens": 400, "max_trajectory_tokens": 400, "timeout_s": 60},
        }
    )
    template = load_template(config)
    sites = [Site(random_model, sglang_python) for _ in range(2)]
    pool = Pool(sites, pacing=QUICK)
    rollouts = Rollouts(
        World(pool, template, LocalToolbox(), config), make_scorer(config.reward), seed=0
    )
    samples = [
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

    def step(number, harm):
        """A step during which harm is done, once turns are in flight."""
        timer = threading.Thread(target=harm)
        timer.start()
        groups = rollouts.collect(samples, n=8, sampling=Sampling(), step=number)
        timer.join()
        assert [(len(g.scored), g.dropped) for g in groups] == [(8, 0)] * 4
        for scored in (s for g in groups for s in g.scored):
            for segment in scored.trajectory.segments:
                assert {v for v in segment.versions if v >= 0} == {VERSION}

    def in_flight(member):
        end = time.monotonic() + 30
        while len(member.flights) < 4:
            assert time.monotonic() < end, "no turns to harm"
            time.sleep(0.005)

    def until_usable(n):
        end = time.monotonic() + 300
        while pool.metrics()["engine/usable"] < n:
            assert time.monotonic() < end, "a server did not come back"
            time.sleep(0.1)

    def check_weights(n):
        for member in pool._members[:n]:
            found = torch.tensor(list(rollouts.run(member.engine.score(ROW))))
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)

    a, b = pool._members
    try:
        pool.publish(update(((n, p.detach()) for n, p in model.named_parameters()), VERSION))
        check_weights(2)

        def kill():
            in_flight(a)
            os.killpg(sites[0].process.pid, signal.SIGKILL)

        step(1, kill)
        assert len(sites[0].processes) <= 2 and len(sites[1].processes) == 1
        until_usable(2)
        check_weights(2)

        def stop():
            in_flight(b)
            sites[1].gone = True
            os.kill(scheduler_of(sites[1].process), signal.SIGSTOP)

        start = time.monotonic()
        step(2, stop)
        assert time.monotonic() - start < 45, "noticed, not waited for to the episodes' end"
        assert not sites[1].process.running

        step(3, kill)  # which is alone now
        assert len(sites[0].processes) == 3
        check_weights(1)
    finally:
        rollouts.close()
        pool.close()
    assert not any(p.running for site in sites for p in site.processes)
