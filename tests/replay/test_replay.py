"""Recorded steps, replayed: equal bit for bit, or the value that differs is named."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from agentrl.cli import main
from agentrl.config import load_config
from agentrl.errors import UserError
from agentrl.learner.algorithms import make_targets
from agentrl.replay.replay import Replayer, replay
from agentrl.replay.what_if import ADVANTAGE_KEYS, LOSS_KEYS, what_if
from agentrl.report.rescore import change_config, changes_outcome, open_rescoring
from agentrl.report.run import Run
from agentrl.trainer import Trainer
from agentrl.trajectory import Scored

ENV = """
from agentrl import agent_loop, reward

@reward("letters_replay")
def letters(trajectory) -> float:
    return len(set(trajectory.assistant_text)) / 10

@reward("often_equal_replay")
def often_equal(trajectory) -> float:
    return float(len(trajectory.assistant_text) % 3 == 0)

@agent_loop("rewarded_turn_replay")
async def rewarded_turn(ep):
    try:
        await ep.generate()
    finally:  # each turn is cut at its limit
        ep.reward(len(ep.messages[-1].content) % 4 / 4)
"""
ROOT = Path(__file__).parents[2]
STEPS = 4
PPO = [
    "algorithm.name=ppo", "algorithm.kl_reward_coef=0.5", "algorithm.kl_target=0.02",
    "algorithm.kl_horizon=40", "algorithm.ppo_epochs=2", "algorithm.mini_batch_size=2",
    "optim.critic_lr=0.01", "reward.turn_weight=0.5", "data.agent_name=rewarded_turn_replay",
    "algorithm.critic_warmup=1", "optim.lr_final=0.1", "optim.lr_warmup_steps=1",
    "trainer.keep=2",
]  # fmt: skip
RUNS = {
    "grpo": [],
    "ppo": PPO,
    "lora": ["model.lora_rank=2", "algorithm.kl_loss_coef=0.1", "algorithm.policy_loss=gspo"],
    "dapo": ["algorithm.name=dapo", "reward.function=often_equal_replay", "data.gen_batch_size=4"],
    "remax": ["algorithm.name=remax", "rollout.budget_policy={turn_tokens: 0.5}"],
    "truncated": [
        "rollout.top_p=0.8",
        "rollout.top_k=6",
        "rollout.temperature=0.9",
        "algorithm.kl_loss_coef=0.1",
        "algorithm.mini_batch_size=2",
    ],
    "epochs": ["trainer.total_steps=0", "trainer.total_epochs=2", "optim.lr_final=0.1"],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory, random_model):
    """Return a function that trains a run of `RUNS` once, and returns its folder."""
    home = tmp_path_factory.mktemp("replay")
    (home / "env.py").write_text(ENV)
    rows = [{"prompt": f"Say {i}.", "ground_truth": "1"} for i in range(4)]
    (home / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def train(name: str, *more: str, output: Path | None = None) -> Path:
        output = output or home / name
        if output.is_dir() and not more:
            return output
        base = [
            f"trainer.total_steps={STEPS}", "trainer.save_freq=2", "trainer.keep=1",
            "data.batch_size=2", "rollout.n=3", "rollout.max_turn_tokens=8", "optim.lr=0.01",
            "trainer.device=cpu", "tools.transport=in_process", "reward.function=letters_replay",
        ]  # fmt: skip
        flags = {
            "data.train": str(home / "rows.jsonl"),
            "model.path": str(random_model),
            "trainer.output": str(output),
            "files": [str(home / "env.py")],
        }
        Trainer(load_config(None, [*base, *RUNS[name], *more], flags)).run()
        return output

    return train


def files_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(f): (f.stat().st_mtime_ns, f.read_bytes()) for f in folder.rglob("*") if f.is_file()
    }


def silent(_: str) -> None:
    pass


@pytest.mark.parametrize(
    "name",
    [
        "grpo",
        "ppo",
        "lora",
        "dapo",
        "remax",
        "truncated",
        pytest.param("epochs", marks=pytest.mark.slow),
    ],
)
def test_a_step_is_equal_bit_for_bit(run, name):
    folder = run(name)
    before = files_of(folder)
    result = replay(Replayer(Run(folder)), STEPS, say=silent)
    assert not result.differences, result.differences
    assert result.tolerance == 0 and len(result.compared) == 3, result.compared
    assert list(result.steps) == ([3, 4] if name == "ppo" else [1, 2, 3, 4])
    assert ("checkpoint of step 2" in result.start) == (name == "ppo")
    assert files_of(folder) == before, "a replay writes nothing"


@pytest.mark.slow
def test_several_threads_give_the_same_bits(tiny_model, tmp_path):
    """The products of MKL depend on the place of tensors in memory, if its strict mode is off."""
    defaults = "MKL_CBWR", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"  # two threads on two cores
    environment = {name: value for name, value in os.environ.items() if name not in defaults}
    rows = ["--dataset", "datasets/arithmetic_train.parquet", "--model", "tiny"]
    keys = ["trainer.total_steps=1", f"trainer.output={tmp_path}/run"]
    for command in (["train", *rows, *keys], ["replay", f"{tmp_path}/run", "--step", "1"]):
        words = [sys.executable, "-m", "agentrl", *command]
        done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "equals the record bit for bit" in done.stdout


def test_turns_tools_and_masked_rollouts(tiny_model, tmp_path):
    """The tiny model calls a calculator. Some of its rollouts end at the limit and are masked."""
    output, rows = tmp_path / "run", tmp_path / "rows.parquet"
    pq.write_table(pq.read_table(ROOT / "datasets/arithmetic_train.parquet").slice(0, 4), rows)
    overrides = [
        "data.batch_size=2", "rollout.n=4", "rollout.max_trajectory_tokens=70", "optim.lr=1e-3",
        "rollout.budget_policy={trajectory_tokens: mask, turn_tokens: mask}",
        "tools.transport=in_process", "trainer.total_steps=2", "data.shuffle=false",
        "tools.penalties={schema: 0.5, tool_error: 0.5, bad_call: 0.5}", "trainer.device=cpu",
        "algorithm.name=turn_rloo",
    ]  # fmt: skip
    flags = {
        "data.train": str(rows),
        "model.path": str(tiny_model),
        "trainer.output": str(output),
        "files": ["shelf:calculator"],
    }
    Trainer(load_config(None, overrides, flags)).run()
    masked = [s.masked for g in Run(output).read_groups(2, "train") for s in g.scored]
    assert {*masked} == {True, False}
    result = replay(Replayer(Run(output)), 2, say=silent)
    assert not result.differences and list(result.steps) == [1, 2]


def edited(folder: Path, column: str, row: int, change, split: str = "train") -> None:
    """Change one value of the stored rollouts of the last step; `change` gets the row's value."""
    path = folder / f"trajectories/{split}-{STEPS:08d}.parquet"
    table = pq.read_table(path)
    values = table.column(column).to_pylist()
    values[row] = change(values[row])
    index = table.schema.get_field_index(column)
    pq.write_table(
        table.set_column(index, column, pa.array(values, table.schema.field(column).type)), path
    )


def flip(logprobs):
    flipped = [[*segment] for segment in logprobs]
    flipped[0][2] = -flipped[0][2]
    return flipped


def tiny(logprobs):
    """Flip the sign of a logprob as near to 0 as that of a certain token."""
    return [[1e-9, *logprobs[0][1:]], *logprobs[1:]]


def nudge(logprobs):
    """Change the last bits of one logprob only."""
    return [[logprobs[0][0] * (1 + 1e-6), *logprobs[0][1:]], *logprobs[1:]]


EDITS = {
    "a flipped logprob": ("grpo", "logprobs", flip, "the logprob of response token 2 of segment 0"),
    "a flipped logprob of a group without a signal": ("dapo", "logprobs", flip, "the logprob of"),
    "a flipped logprob near 0": ("grpo", "logprobs", tiny, "the logprob of response token 0"),
    "the last bits of a logprob": ("ppo", "logprobs", nudge, "rollout_corr/logprob_diff_mean"),
    "a reward": ("grpo", "reward", lambda reward: reward + 1e-6, "the reward of episode"),
    "a reward and its part": (
        "grpo",
        "rewards",
        lambda text: json.dumps(
            {k: v + 1e-6 if k == "outcome" else v for k, v in json.loads(text).items()}
        ),
        "the reward of episode",
    ),
    "a token": ("grpo", "response_ids", lambda ids: [[ids[0][0] ^ 1, *ids[0][1:]]], "the logprob"),
    "a version": (
        "grpo",
        "versions",
        lambda versions: [[*versions[0][:2], versions[0][2] - 1, *versions[0][3:]], *versions[1:]],
        "the version of response token 2 of segment 0 of episode",
    ),
    "a version in the future": (
        "dapo",
        "versions",
        lambda versions: [[versions[0][0] + 1, *versions[0][1:]], *versions[1:]],
        "the version of response token 0 of segment 0 of episode",
    ),
    "a mask": ("lora", "masked", lambda masked: not masked, "masked of episode"),
}


QUICK = (
    "a version",
    "a flipped logprob",
    "a flipped logprob of a group without a signal",
    "a reward",
)


@pytest.mark.parametrize(
    "edit", [e if e in QUICK else pytest.param(e, marks=pytest.mark.slow) for e in EDITS]
)
def test_an_edited_record_is_named(run, tmp_path, edit):
    name, column, change, expected = EDITS[edit]
    folder = Path(shutil.copytree(run(name), tmp_path / "run"))
    edited(folder, column, 3, change)
    result = replay(Replayer(Run(folder)), STEPS, say=silent)
    assert any(d.name.startswith(expected) for d in result.differences), result.differences


def test_a_changed_reward_is_seen_in_what_was_learned(run, tmp_path):
    """Without the check of its parts: the metrics, the advantages and the weights differ, too."""
    folder = Path(shutil.copytree(run("grpo"), tmp_path / "run"))
    edited(folder, "reward", 3, lambda reward: reward + 1e-6)
    names = [d.name for d in replay(Replayer(Run(folder)), STEPS, say=silent).differences]
    assert "critic/score/mean" in names and "critic/advantages/max" in names
    assert any(name.startswith("advantages of response token") for name in names)
    assert any(name.startswith("actor: parameter.") for name in names)


def test_what_another_step_learned_is_named_by_its_first_row(run, tmp_path):
    folder = Path(shutil.copytree(run("grpo"), tmp_path / "run"))
    learned = folder / "learned"
    shutil.copy(learned / "learned-00000002.parquet", learned / "learned-00000001.parquet")
    [difference] = replay(Replayer(Run(folder)), 1, say=silent).differences
    assert difference.name == "episode, segment, tokens of row 0 of learned/"
    assert difference.recorded[0].startswith("train-1-")
    assert difference.replayed[0].startswith("train-0-")


def test_the_steps_that_can_be_replayed_are_listed(run, tmp_path):
    """The rollouts of step 2 are gone, and there is no checkpoint until after step 4."""
    folder = Path(shutil.copytree(run("grpo"), tmp_path / "run"))
    (folder / "trajectories/train-00000002.parquet").unlink()
    replayer = Replayer(Run(folder))
    assert replayer.replayable_steps() == [1]
    for step, why in (
        (9, "metrics.jsonl has no such step"),
        (2, r"its rollouts are not stored \(trainer.keep_trajectories=all\)"),
        (4, r"no checkpoint from which .* \(checkpoints: 4; stored rollouts: 1, 3-4\)"),
    ):
        with pytest.raises(UserError, match=f"step {step} .*{why}.* can be replayed: 1$"):
            replay(replayer, step, say=silent)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped_if_an_older_state_will_do(run, tmp_path):
    folder = Path(shutil.copytree(run("ppo"), tmp_path / "run"))
    damaged = next((folder / "global_step_00000002/actor").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-1])
    result = replay(Replayer(Run(folder)), STEPS, say=silent)
    assert not result.differences and list(result.steps) == [1, 2, 3, 4]


def test_the_first_step_that_differs_ends_the_replay(run, tmp_path):
    folder = Path(shutil.copytree(run("grpo"), tmp_path / "run"))
    shard = folder / "trajectories/train-00000004.parquet"
    shutil.copy(shard, folder / "trajectories/train-00000002.parquet")  # of another step
    result = replay(Replayer(Run(folder)), STEPS, say=silent)
    assert list(result.steps) == [1, 2] and result.differences


def test_the_first_step_of_lora_begins_with_the_stored_adapter(run, monkeypatch, tmp_path):
    """Another version of PEFT, or another device, draws other random numbers."""
    folder = Path(shutil.copytree(run("lora"), tmp_path / "run"))
    initial = torch.nn.init.kaiming_uniform_
    monkeypatch.setattr(
        torch.nn.init, "kaiming_uniform_", lambda tensor, **_: initial(tensor, a=2.0)
    )
    result = replay(Replayer(Run(folder)), 1, say=silent)
    assert not result.differences and result.start.endswith(f"with the adapter in {folder}/initial")
    [file] = (folder / "initial" / "actor").iterdir()
    stored = load_file(file)
    assert all(bool(t.any()) == ("lora_A" in name) for name, t in stored.items())
    assert sum("lora_A" in name for name in stored) == len(stored) / 2 > 0
    shutil.rmtree(folder / "initial")
    assert replay(Replayer(Run(folder)), 1, say=silent).differences


# --- changes of the config -----------------------------------------------------------------------


def test_each_step_has_the_config_that_held(run, tmp_path):
    """The learning rate was changed in place after step 4, and its length is that of its time."""
    folder = Path(shutil.copytree(run("grpo"), tmp_path / "run"))
    run("grpo", "trainer.total_steps=5", "optim.lr=0.02", "optim.lr_final=0.5", output=folder)
    recorded = Run(folder)
    assert [recorded.config_at(step).optim.lr for step in (4, 5)] == [0.01, 0.02]
    result = replay(Replayer(recorded), 5, say=silent)
    assert not result.differences and list(result.steps) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_fork_is_replayed_from_the_checkpoint_that_it_began_from(run, tmp_path):
    source = run("ppo")
    fork = tmp_path / "fork"
    changed = ["trainer.total_steps=5", f"trainer.resume={source}", "algorithm.lam=0.9"]
    run("ppo", *changed, output=fork)
    result = replay(Replayer(Run(fork)), 5, say=silent)
    assert not result.differences and str(source) in result.start
    with pytest.raises(UserError, match=r"can be replayed: 5$"):
        replay(Replayer(Run(fork)), 4, say=silent)


# --- the command ---------------------------------------------------------------------------------


def agentrl(capsys, *words: object) -> tuple[int, str]:
    """Run a command in this process; return its exit code and what it printed."""
    try:
        main([str(word) for word in words])
        code = 0
    except SystemExit as e:
        code = int(e.code or 0)
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_the_command_names_a_difference_and_fails(run, tmp_path, capsys):
    folder = run("ppo")
    code, printed = agentrl(capsys, "replay", folder, "--step", STEPS)
    assert code == 0 and f"step {STEPS} equals the record bit for bit: " in printed, printed
    broken = Path(shutil.copytree(folder, tmp_path / "run"))
    edited(broken, "logprobs", 3, flip)
    code, printed = agentrl(capsys, "replay", broken, "--step", STEPS)
    assert code == 1
    assert "the logprob of response token 2 of segment 0 of episode train-3-" in printed


# --- what another reward or estimator would have done --------------------------------------------

STRICT = """
def strict(trajectory):
    return float("a" in trajectory.assistant_text)

def equal(trajectory):
    return 1.0

def spread(trajectory):
    return float(trajectory.rollout)

class Stateful:
    def __call__(self, trajectory):
        return 0.0
"""


@pytest.fixture
def rewards(tmp_path):
    (tmp_path / "my.py").write_text(STRICT)
    return tmp_path / "my.py"


def ask(folder: Path, *overrides: str, reward: str = "", gradient: bool = False):
    """Return the replayer and the answer of `what_if` for the last step."""
    replayer = Replayer(Run(folder))
    recorded = replayer.config_at(STEPS)
    config = change_config(recorded, overrides, reward, (*ADVANTAGE_KEYS, *LOSS_KEYS))
    if not changes_outcome(recorded, config):
        return replayer, what_if(replayer, STEPS, config, gradient=gradient)
    with open_rescoring(replayer.run, config, [STEPS]) as score:
        return replayer, what_if(replayer, STEPS, config, score, gradient=gradient)


def by_group(folder: Path) -> list[list[Scored]]:
    return [list(g.scored) for g in Run(folder).read_groups(STEPS, "train")]


def test_another_estimator_and_reward_without_a_model(run, rewards):
    """All numbers again, by the formulas of GRPO and RLOO."""
    folder = run("grpo")
    replayer, answer = ask(folder, "algorithm.adv_estimator=rloo", reward=f"{rewards}:strict")
    assert not replayer.is_open, "no model is loaded"
    expected = {}
    for group in by_group(folder):
        old = [s.reward for s in group]
        new = [float("a" in s.trajectory.assistant_text) for s in group]
        for i, s in enumerate(group):
            grpo = (old[i] - mean(old)) / (stdev(old) + 1e-6) if stdev(old) else 0.0
            rloo = new[i] - mean(new[:i] + new[i + 1 :])
            expected[s.trajectory.episode_id] = (old[i], new[i], grpo, rloo)
    got = {e.episode_id: (e.reward, e.new_reward, e.advantage, e.new_advantage)
           for e in answer.episodes}  # fmt: skip
    assert got.keys() == expected.keys()
    for key, numbers in expected.items():
        assert got[key] == pytest.approx(numbers, abs=1e-12)
    signs = [a * b < 0 for _, _, a, b in expected.values()]
    assert len(answer.flipped) == sum(signs) > 0
    assert [abs(e.change) for e in answer.episodes] == sorted(
        (abs(e.change) for e in answer.episodes), reverse=True
    )


def test_groups_become_dead_and_alive(run, rewards):
    """With the groups that were set aside: they may have a signal under another reward."""
    folder = run("dapo")
    every = Run(folder).read_step(STEPS)
    count = len(every.groups) + len(every.evicted)
    dead = sum(len({s.reward for s in g.scored}) == 1 for g in (*every.groups, *every.evicted))
    assert 0 < dead < count and every.evicted
    answer = ask(folder, reward=f"{rewards}:spread")[1]
    assert (answer.groups, answer.dead, answer.new_dead) == (count, dead, 0)
    assert (answer.died, answer.revived) == (0, dead)
    answer = ask(folder, reward=f"{rewards}:equal")[1]
    assert (answer.new_dead, answer.died, answer.revived) == (count, count - dead, 0)
    assert not any(e.new_advantage for e in answer.episodes)


def test_another_reward_replaces_the_outcome_only(run, rewards):
    """The rewards of turns stay, with their weight."""
    folder = run("ppo")
    answer = ask(folder, reward=f"{rewards}:spread")[1]
    stored = {s.trajectory.episode_id: s.trajectory for g in by_group(folder) for s in g}
    turns = [trajectory.turn_rewards("turn") for trajectory in stored.values()]
    assert any(turns)
    for e in answer.episodes:
        trajectory = stored[e.episode_id]
        assert e.new_reward == trajectory.rollout + 0.5 * trajectory.turn_rewards("turn")


def test_the_greedy_baseline_is_scored_again(run, rewards):
    answer = ask(run("remax"), reward=f"{rewards}:spread", gradient=False)[1]
    assert [e.new_advantage == e.rollout - 3 for e in answer.episodes] == [True] * 6


def test_a_critic_and_a_penalty_come_from_the_restored_weights(run):
    """The same config gives the recorded advantages."""
    folder = run("ppo")
    replayer, answer = ask(folder)
    assert replayer.is_open and replayer.start.startswith("the checkpoint of step 2")
    table = Run(folder).store.read_learned(STEPS)
    recorded: dict[str, list[float]] = {}
    for episode, row in zip(table["episode_id"], table["advantages"], strict=True):
        recorded.setdefault(episode.as_py(), []).extend(x for x in row.as_py() if x is not None)
    for e in answer.episodes:
        assert e.change == 0 and e.advantage == pytest.approx(mean(recorded[e.episode_id]), 1e-5)


def test_the_gradient_is_that_of_the_step(run):
    replayer, answer = ask(run("grpo"), gradient=True)
    assert answer.gradients.cosine == pytest.approx(1)
    norm = replayer.record[STEPS]["actor/grad_norm"]
    assert answer.gradients.norm == answer.gradients.new_norm == pytest.approx(norm, 1e-5)
    assert answer.gradients.credits.keys() == {"trajectory", "turn"}


def test_an_opposite_reward_has_the_opposite_gradient(run):
    answer = ask(run("grpo"), "reward.outcome_weight=-1", gradient=True)[1]
    assert answer.gradients.cosine == pytest.approx(-1)
    assert len(answer.flipped) == sum(e.advantage != 0 for e in answer.episodes)


def test_the_deviation_of_the_gradient(run):
    """For two groups with the gradients g and h it is |g - h|; the gradient is g + h."""
    rloo = ["algorithm.adv_estimator=rloo", "algorithm.loss_agg_mode=seq-mean-token-sum"]
    replayer, answer = ask(run("grpo"), *rloo, gradient=True)
    _, _, batch = replayer.prepare(STEPS)
    config = change_config(replayer.config_at(STEPS), rloo, "", (*ADVANTAGE_KEYS, *LOSS_KEYS))
    targets = make_targets(batch, config, None, None, None)
    with replayer.learner.use(config):
        rows = batch.group[batch.rollout]
        parts = [replayer.learner.gradient(batch, targets, rows == k) for k in (0, 1)]
    g, h = (torch.cat([part[name].flatten() for name in sorted(parts[0])]) for part in parts)
    noise = answer.gradients.credits["trajectory"]
    assert noise.norm == pytest.approx((g + h).norm().item(), 1e-4)
    assert noise.norm == pytest.approx(answer.gradients.new_norm, 1e-4)
    assert noise.deviation == pytest.approx((g - h).norm().item(), 1e-4)


REFUSED = {
    "rollout.n=8": "rollout.n=8: the record cannot be repeated",
    "data.batch_size=1": "data.batch_size=1: the record cannot be repeated",
    "optim.lr=1": "optim.lr=1: the record cannot be repeated",
    "algorithm.ppo_epochs=2": "algorithm.ppo_epochs=2: the record cannot be repeated",
    "algorithm.clip_low=0.1": "algorithm.clip_low=0.1: no ratio is clipped",
    "algorithm.policy_loss=gspo": "algorithm.policy_loss=gspo: it changes the gradient",
    "algorithm.name=dapo": "algorithm.name=dapo sets algorithm.filter_groups=true",
    "algorithm.adv_estimator=gae": "gae needs the values of a critic, and the run has none",
    "algorithm.adv_estimator=remax": "remax needs a greedy rollout of each prompt",
    "algorithm.adv_estimator=nope": "nope",
    "algorithm.gama=1": "algorithm.gama",
    "algorithm.adv_estimator=grpo": "was made with these values",
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_a_replay_cannot_honour_is_refused_by_name(run, capsys, key):
    code, printed = agentrl(capsys, "replay", run("grpo"), "--step", STEPS, key)
    assert code == 1 and REFUSED[key] in printed, printed


def test_the_command_prints_the_answer(run, rewards, capsys):
    words = ["algorithm.name=rloo", "--reward", f"{rewards}:strict", "--gradient"]
    before = files_of(run("grpo"))
    code, printed = agentrl(capsys, "replay", run("grpo"), "--step", STEPS, *words)
    assert code == 0, printed
    for text in (
        "mean reward of 6 episodes", "dead groups, of 2", "the advantage changes its sign in",
        "cosine between the two gradients: ", "trajectory", "needs a critic",
    ):  # fmt: skip
        assert text in printed, printed
    assert len(re.findall(r"^train-\S+ ", printed, re.M)) == 6
    assert files_of(run("grpo")) == before
    code, printed = agentrl(
        capsys, "replay", run("grpo"), "--step", STEPS, "--reward", f"{rewards}:Stateful"
    )
    assert code == 1 and "Stateful' is a class" in printed
