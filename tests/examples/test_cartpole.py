"""CartPole as a conversation, and the two textbook learners beside it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from agentrl import play
from agentrl.config import load_config, without_effect
from agentrl.data import check_samples, load_samples, write_rows
from agentrl.registry import load_file
from agentrl.rewards import Scorer
from agentrl.testing import Scripted, byte_tokenizer
from agentrl.workers.variables import environment_variables

EXAMPLE = Path(__file__).parents[2] / "examples/cartpole"
ROOM = ["rollout.max_turn_tokens=64", "rollout.max_trajectory_tokens=32768"]
TOKENIZER = byte_tokenizer()


@pytest.fixture
def env():
    return load_file(str(EXAMPLE / "env.py"))


@pytest.fixture
def starts(env, tmp_path):
    """Rows as a run would read them."""
    file = tmp_path / "rows.jsonl"
    write_rows(file, env.rows(8, 3))
    samples = load_samples(str(file))
    check_samples(samples, str(file), load_config(str(EXAMPLE / "run.yaml")).interaction.kwargs)
    return samples


def scored(sample, policy):
    """A game by a policy: a function of what the user said last."""
    config = load_config(str(EXAMPLE / "run.yaml"), ROOM)

    def says(prompt, turn):
        return policy(prompt.rpartition("user\n")[2].partition("<|im_end|>")[0])

    t = play(sample, Scripted(says, TOKENIZER), TOKENIZER, config=config)
    return asyncio.run(Scorer(config.reward).score(t))


def test_the_gold_policy_keeps_the_pole_up(env, starts):
    for sample in starts:
        s = scored(sample, env.gold)
        assert (s.reward, s.metrics["acc"], s.metrics["steps"]) == (1.0, 1.0, 50)
        assert len(s.trajectory.turns) == 50 and s.trajectory.stop_reason == "done"


@pytest.mark.parametrize(
    ("policy", "most"),
    [
        (lambda text: "left", 0.22),
        (lambda text: "It leans, so: right", 0.22),
        (lambda text: "left" if "falls right" in text else "right", 0.3),
        (lambda text: "left or right, who knows?", 0.3),  # the last one named counts: right
        (lambda text: "hold it", 0),
    ],
)
def test_a_policy_that_does_not_look_drops_it(starts, policy, most):
    assert all(scored(sample, policy).reward <= most for sample in starts)


def test_the_prompt_shows_the_start_and_rollouts_of_a_row_begin_alike(env, starts):
    for sample in starts:
        seed = sample.interaction_kwargs["seed"]
        game = gymnasium.make("CartPole-v1")
        observation, _ = game.reset(seed=seed)
        assert sample.prompt[0].content == f"{env.ASK}\n{env.words(observation)}"
        observation, *_ = game.step(1)
        games = [scored(sample, lambda text: "right").trajectory for _ in range(2)]
        assert games[0].messages == games[1].messages
        assert games[0].messages[2].content == env.words(observation)
        game.close()


def test_a_trace_is_better_than_chance_and_worse_than_gold(env):
    def mean_length(looks):
        games = [env.habit(start, looks) for start in range(60)]
        return sum(m["role"] == "assistant" for game in games for m in game) / len(games)

    assert 18 < mean_length(0) < 28 and mean_length(1) == 50
    assert 28 < mean_length(env.LOOKS) < 42
    rows = env.rows(20, 2)
    answers = [m["content"] for row in rows for m in row["trace"] if m["role"] == "assistant"]
    assert 0.4 < answers.count("left") / len(answers) < 0.6 and set(answers) == {"left", "right"}
    assert all(row["trace"][-1]["role"] == "assistant" for row in rows)
    assert all(row["prompt"] == row["trace"][0]["content"] for row in rows)


def test_the_config_loads_and_every_key_has_an_effect():
    config = load_config(str(EXAMPLE / "run.yaml"))
    assert without_effect(config) == [] and config.diff()


# -- the textbook's side ---------------------------------------------------------------------------


def test_advantages_of_a_game_worked_by_hand():
    ppo = load_file(str(EXAMPLE / "ppo.py"))
    rewards, values = torch.ones(3, 1), torch.tensor([[2.0], [3.0], [4.0]])
    ends, last = torch.tensor([[0.0], [1.0], [0.0]]), torch.tensor([5.0])
    result = ppo.advantages(rewards, values, ends, last)
    after = 1 + 0.99 * 5 - 4  # the third step is of another game
    fell = 1 - 3
    first = 1 + 0.99 * 3 - 2 + 0.99 * 0.95 * fell
    torch.testing.assert_close(result[:, 0], torch.tensor([first, fell, after]))


@pytest.mark.parametrize("name", ["dqn", "ppo"])
def test_it_runs(name, capsys):
    threads = torch.get_num_threads()
    try:
        curve = load_file(str(EXAMPLE / f"{name}.py")).train(1500, seed=0)
    finally:
        torch.set_num_threads(threads)
    steps, length = curve[-1]
    assert 1000 < steps <= 1500 and 8 < length < 60
    assert f"{steps:7d} steps" in capsys.readouterr().out


def test_the_memory_overwrites_the_oldest_transitions(monkeypatch):
    dqn = load_file(str(EXAMPLE / "dqn.py"))
    monkeypatch.setattr(dqn, "MEMORY", 5)
    learner = dqn.Learner(0)
    for start in (0, 4):  # 0 1 2 3, then 4 5 6 7
        rows = np.arange(start, start + 4, dtype=np.float32)[:, None]
        learner.store([np.tile(rows, n) for n in (4, 1, 1, 4, 1)])
    assert learner.memory[2][:, 0].tolist() == [5, 6, 7, 3, 4] and learner.stored == 8


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class InThisProcess:
    """A placement and its group: the workers as objects of this process."""

    def start_ranks(self, cls, *args):
        self.workers = []
        for rank in range(4):
            with environment_variables({"RANK": str(rank)}):
                self.workers.append(cls(*args))
        return self

    def load_weights(self, weights):
        for worker in self.workers:
            worker.load_weights(weights)

    def play(self, shares, steps):
        pairs = zip(self.workers, shares, strict=True)
        return [worker.play(share, steps) for worker, share in pairs]


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("shipped_registries")
@pytest.mark.parametrize(
    "spread_over",
    ["objects", pytest.param("processes", marks=[pytest.mark.ray, pytest.mark.slow])],
)
def test_four_workers_play_with_the_learner_s_weights(monkeypatch, one_thread, spread_over):
    dqn = load_file(str(EXAMPLE / "dqn.py"))
    spread = load_file(str(EXAMPLE / "dqn_workers.py"))
    stored, weights = [], []

    class Learner(spread.Learner):
        def store(self, transitions):
            stored.append(transitions)
            weights.append({k: v.clone() for k, v in self.q.state_dict().items()})
            super().store(transitions)

    if spread_over == "objects":
        monkeypatch.setattr(spread, "open_placement", lambda config: nullcontext(InThisProcess()))
    monkeypatch.setattr(spread, "Learner", Learner)
    monkeypatch.setattr(spread, "WARM_UP", 100)
    monkeypatch.setattr(spread, "epsilon", lambda step: 0.0)
    curve = spread.train(300, seed=3)
    assert curve[-1][0] == 300 and len(stored) == 12  # 3 rounds of 4 workers
    # What each worker played is what it plays in this process with the learner's weights.
    players = [dqn.Player(3_000 + rank) for rank in range(4)]
    q = dqn.network()
    for i, transitions in enumerate(stored):
        q.load_state_dict(weights[i])
        expected, _ = players[i % 4].play(q, 0.0, 25)
        for column, other in zip(transitions, expected, strict=True):
            np.testing.assert_array_equal(column, other)
    assert len({t[0].tobytes() for t in stored}) == 12
    first, _, last = (weights[i]["0.weight"] for i in (0, 4, 8))
    assert not torch.equal(first, last)  # the learner learned between the rounds


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(120)
def test_ctrl_c_ends_the_workers():
    """Ctrl-C of a terminal goes to all processes of the command's group."""
    command = [sys.executable, str(EXAMPLE / "dqn_workers.py"), "--steps", "1000000"]
    run = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts background jobs with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert run.stdout is not None and "steps" in run.stdout.readline()
    started = descendants(run.pid)
    assert len(started) > 4  # Ray's own processes, and the workers
    os.killpg(run.pid, signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130 and "Traceback" not in errors, errors
    end = time.monotonic() + 15
    while left := [pid for pid in started if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, left
        time.sleep(0.1)


def descendants(pid):
    """The processes that a process started, and that these started."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for file in files for child in file.read_text().split()]
    return [*children, *(d for child in children for d in descendants(child))]


@pytest.mark.slow
@pytest.mark.learning
@pytest.mark.usefixtures("shipped_registries")
@pytest.mark.parametrize(
    ("name", "steps"), [("dqn", 30_000), ("dqn_workers", 30_000), ("ppo", 60_000)]
)
def test_it_learns(name, steps):
    threads = torch.get_num_threads()
    try:
        curve = load_file(str(EXAMPLE / f"{name}.py")).train(steps, seed=0)
    finally:
        torch.set_num_threads(threads)
    assert max(length for _, length in curve) >= 195
