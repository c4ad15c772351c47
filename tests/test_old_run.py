"""A stored run: it is resumed, read, replayed and exported as it was when it was made.

`fixtures/old_run` is a run of two steps (PPO with a critic; two turns and a tool call) with what it
was made from, and the metrics and weights of the third step that the same version made next. In
its folder, without `run`:

    agentrl train -c config.yaml && rm run/.lock
    cp -r run three && agentrl train -c config.yaml trainer.total_steps=3 --output three
    tail -n 1 three/metrics.jsonl > step_3.json
    mv three/model/model.safetensors step_3.safetensors && rm -r three
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.forked_python import run_agentrl
from torch.testing import assert_close

from agentrl import registry
from agentrl.agent_loops.attempt import Runtime
from agentrl.chat import ChatTemplate, load_tokenizer
from agentrl.config import load_config
from agentrl.data import RowOrder
from agentrl.engine.base import Sampling
from agentrl.engine.scripted import Scripted
from agentrl.rewards import Scorer
from agentrl.rollout import Rollouts
from agentrl.store import load_trajectories
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Generation, Trajectory

MADE = Path(__file__).parent / "fixtures" / "old_run"
# Another processor or version of torch rounds otherwise.
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


@pytest.fixture
def old(tmp_path):
    return Path(shutil.copytree(MADE, tmp_path / "old"))


def agentrl(folder, *arguments):
    done = run_agentrl(*arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_stored_run_resumes_as_it_would_have(old):
    printed = agentrl(old, "train", "-c", "config.yaml", "trainer.total_steps=3")
    assert "resuming from step 2 (run/global_step_00000002)" in printed
    steps = [json.loads(line) for line in (old / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [0, 1, 2, 3]
    now, then = steps[-1]["data"], json.loads((old / "step_3.json").read_text())["data"]
    assert then.keys() - now.keys() == set()
    timeless = [k for k in then if not k.startswith(("timing_s/", "perf/"))]
    assert_close([now[k] for k in timeless], [then[k] for k in timeless], **CLOSE)
    weights = load_file(old / "run/model/model.safetensors")
    assert_close(weights, load_file(old / "step_3.safetensors"), **CLOSE)


@pytest.mark.slow
def test_it_is_forked(old):
    changed = ["trainer.total_steps=3", "optim.lr=0.02", "rollout.n=3", "--output", "fork"]
    command = ["train", "-c", "config.yaml", "trainer.resume=run", *changed]
    printed = agentrl(old, *command)
    assert "changed after step 2: rollout.n: 2 -> 3" in printed
    steps = [json.loads(line) for line in (old / "fork/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [2, 3] and steps[1]["data"]["actor/lr"] == 0.02
    played = load_trajectories(old / "fork/trajectories", split="train")
    order = RowOrder(4, seed=0)
    assert [s.trajectory.sample.row for s in played][::3] == order.take(4, 2) != order.take(0, 2)
    assert "done: 3 steps" in agentrl(old, *command)


def test_its_last_step_is_repeated(old):
    printed = agentrl(old, "replay", "run", "--step", "2", "--tolerance", "1e-3")
    assert "replaying steps 1-2 from the base model policy" in printed
    compared = "85 metrics, the numbers of 68 tokens in learned/, 120 tensors"
    assert f"step 2 equals the record within 0.001: {compared}" in printed


def test_it_is_exported(old):
    agentrl(old, "export", "run/global_step_00000002", "exported")
    was, now = (load_file(old / f / "model.safetensors") for f in ("run/model", "exported"))
    assert_close(now, was, rtol=0, atol=0)


class Recorded(Scripted):
    """A sampler that answers the prompts of stored trajectories with what was sampled then."""

    def __init__(self, trajectories: list[Trajectory]):
        super().__init__({}, None)
        self.turns = {}
        for trajectory in trajectories:
            for turn in trajectory.turns:
                row = trajectory.segments[turn.segment]
                prompt = [*row.prompt_ids, *row.response_ids[: turn.start]]
                self.turns[tuple(prompt)] = row, turn

    async def generate(self, prompt_ids, sampling, *, episode_id, seed, deadline):
        row, turn = self.turns[tuple(prompt_ids)]
        at = slice(turn.start, turn.end)
        return Generation(
            row.response_ids[at],
            row.logprobs[at],
            row.versions[at],
            turn.finish_reason,
            len(prompt_ids),
            turn.cached_tokens,
        )


def test_its_trajectories_are_replayed(old, monkeypatch):
    """The same tokens, sampled again, make the same trajectories and rewards."""
    monkeypatch.chdir(old)
    config = load_config("config.yaml")
    registry.load_file("world.py")
    template = ChatTemplate(load_tokenizer("policy"))
    stored = list(load_trajectories(Path("run/trajectories")))
    loops = Counter(s.trajectory.sample.agent_name for s in stored)
    assert loops == {"twice": 12, "single_turn": 6, "tool_agent": 6}
    for then in stored:
        sampler = Recorded([then.trajectory])
        runtime = Runtime(sampler, template, LocalToolbox(), config)
        with closing(Rollouts(runtime, Scorer(config.reward), seed=0)) as rollouts:
            sampling = Sampling(max_tokens=config.rollout.max_turn_tokens)
            [group] = rollouts.collect([then.trajectory.sample], n=1, sampling=sampling, step=1)
        [now] = group.scored
        assert now.reward == then.reward
        for name in ("segments", "messages", "stop_reason", "control_token_attempts"):
            assert getattr(now.trajectory, name) == getattr(then.trajectory, name)
        for new, was in zip(now.trajectory.turns, then.trajectory.turns, strict=True):
            assert (new.start, new.end, new.tool_calls) == (was.start, was.end, was.tool_calls)
            assert [r.content for r in new.tool_results] == [r.content for r in was.tool_results]
