"""Recorded steps, replayed: equal bit for bit, or the value that differs is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.config import load_config
from agentrl.errors import UserError
from agentrl.report.recorded import RecordedRun
from agentrl.trainer import Trainer
from agentrl.trainer.replay import Replayer, replay

ENV = """
from agentrl import Message, agent_loop, reward

@reward("letters_replay")
def letters(trajectory) -> float:
    return len(set(trajectory.assistant_text)) / 10

@reward("often_equal_replay")
def often_equal(trajectory) -> float:
    return float(len(trajectory.assistant_text) % 4 == 0)

@agent_loop("two_turns_replay")
async def two_turns(ep):
    await ep.generate()
    ep.reward(0.25 * len(ep.messages[-1].content) % 1.0)
    ep.observe(Message("user", "Again."))
    await ep.generate()
"""
STEPS = 4
PPO = [
    "algorithm.name=ppo", "algorithm.kl_reward_coef=0.5", "algorithm.kl_target=0.02",
    "algorithm.kl_horizon=40", "algorithm.ppo_epochs=2", "algorithm.mini_batch_size=2",
    "optim.critic_lr=0.01", "reward.turn_weight=0.5", "data.agent_name=two_turns_replay",
    "algorithm.critic_warmup=1", "optim.lr_final=0.1", "optim.lr_warmup_steps=1",
    "trainer.keep=2",
]  # fmt: skip
RUNS = {
    "grpo": [],
    "ppo": PPO,
    "lora": ["model.lora_rank=2", "algorithm.kl_loss_coef=0.1", "algorithm.policy_loss=gspo"],
    "dapo": ["algorithm.name=dapo", "reward.function=often_equal_replay"],
    "remax": ["algorithm.name=remax", "rollout.budget_policy={turn_tokens: mask}"],
    "epochs": ["trainer.total_steps=0", "trainer.total_epochs=2", "optim.lr_final=0.1"],
    "last": ["trainer.keep_trajectories=last:2", "trainer.save_freq=1", "trainer.keep=2"],
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


@pytest.mark.parametrize("name", ["grpo", "ppo", "lora", "dapo", "remax", "epochs"])
def test_a_step_is_equal_bit_for_bit(run, name):
    folder = run(name)
    before = files_of(folder)
    result = replay(Replayer(RecordedRun(folder)), STEPS, say=silent)
    assert not result.differences, result.differences
    assert result.tolerance == 0 and len(result.compared) == 3, result.compared
    assert list(result.steps) == ([3, 4] if name == "ppo" else [1, 2, 3, 4])
    assert ("checkpoint of step 2" in result.start) == (name == "ppo")
    assert files_of(folder) == before, "a replay writes nothing"


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


def nudge(logprobs):
    """Change the last bits of one logprob only."""
    return [[logprobs[0][0] * (1 + 1e-6), *logprobs[0][1:]], *logprobs[1:]]


EDITS = {
    "a flipped logprob": ("grpo", "logprobs", flip, "the logprob of response token 2 of segment 0"),
    "a flipped logprob of a group without a signal": ("dapo", "logprobs", flip, "the logprob of"),
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
    "a mask": ("lora", "masked", lambda masked: not masked, "masked of episode"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_record_is_named(run, tmp_path, edit):
    name, column, change, expected = EDITS[edit]
    folder = Path(shutil.copytree(run(name), tmp_path / "run"))
    edited(folder, column, 3, change)
    result = replay(Replayer(RecordedRun(folder)), STEPS, say=silent)
    assert any(d.name.startswith(expected) for d in result.differences), result.differences


def test_a_changed_reward_is_seen_in_what_was_learned(run, tmp_path):
    """Without the check of its parts: the metrics, the advantages and the weights differ, too."""
    folder = Path(shutil.copytree(run("grpo"), tmp_path / "run"))
    edited(folder, "reward", 3, lambda reward: reward + 1e-6)
    names = [d.name for d in replay(Replayer(RecordedRun(folder)), STEPS, say=silent).differences]
    assert "critic/score/mean" in names and "critic/advantages/max" in names
    assert any(name.startswith("advantages of response token") for name in names)
    assert any(name.startswith("actor: parameter.") for name in names)


def test_the_steps_that_can_be_replayed_are_listed(run, tmp_path):
    """Steps 3 and 4 are stored, and the checkpoints of 3 and 4: only step 4 has both."""
    replayer = Replayer(RecordedRun(run("last")))
    assert replayer.replayable_steps() == [4]
    for step, why in (
        (9, "metrics.jsonl has no such step"),
        (2, r"its rollouts are not stored \(trainer.keep_trajectories=last:2\)"),
        (3, r"no checkpoint from which .* \(checkpoints: 3-4; stored rollouts: 3-4\)"),
    ):
        with pytest.raises(UserError, match=f"step {step} .*{why}.* can be replayed: 4$"):
            replay(replayer, step, say=silent)


def test_a_damaged_checkpoint_is_skipped_if_an_older_state_will_do(run, tmp_path):
    folder = Path(shutil.copytree(run("ppo"), tmp_path / "run"))
    damaged = next((folder / "global_step_00000002/actor").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-1])
    result = replay(Replayer(RecordedRun(folder)), STEPS, say=silent)
    assert not result.differences and list(result.steps) == [1, 2, 3, 4]


def test_the_first_step_that_differs_ends_the_replay(run, tmp_path):
    folder = Path(shutil.copytree(run("grpo"), tmp_path / "run"))
    shard = folder / "trajectories/train-00000004.parquet"
    shutil.copy(shard, folder / "trajectories/train-00000002.parquet")  # of another step
    result = replay(Replayer(RecordedRun(folder)), STEPS, say=silent)
    assert list(result.steps) == [1, 2] and result.differences
