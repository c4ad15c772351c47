"""Runs with a teacher: the student reaches it without a reward, and every token is its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agentrl.chat import load_tokenizer
from agentrl.config import load_config
from agentrl.demo import TINY_SETTINGS
from agentrl.errors import EngineError
from agentrl.record import read_metrics
from agentrl.replay.replay import Replayer, replay
from agentrl.replay.what_if import what_if
from agentrl.report.rescore import change_config
from agentrl.report.run import Run
from agentrl.store import load_trajectories
from agentrl.trainer import Trainer
from agentrl.trainer import teacher as teacher_module
from agentrl.trainer.checkpoint import find_steps

DATA = Path(__file__).parents[2] / "datasets"
ENV = """
from agentrl import Message, ToolCall, ToolResult, agent_loop, reward, tool

@reward("letters_opd")
def letters(trajectory) -> float:
    return len(set(trajectory.assistant_text)) / 10

@tool
def weather_opd(city: str = "") -> ToolResult:
    "Say what the weather is."
    return ToolResult("It rains and rains.")

@agent_loop("two_turns_opd")
async def two_turns(ep):
    stop = tuple("aeinorst ")
    await ep.generate(stop=stop, parse=lambda text: [ToolCall("weather_opd", {})])
    await ep.call_tools()
    await ep.generate(stop=stop)

@agent_loop("spawns_opd")
async def spawns(ep):
    await ep.generate()
    async with ep.spawn([Message("user", "Help.")]) as other:
        await other.generate()
"""
STEPS = 3


def noisy(source: Path, folder: Path, scale: float, seed: int = 0) -> Path:
    """Copy a model, with noise of so many standard deviations in its matrices."""
    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: t + scale * t.std() * torch.randn(t.shape, generator=generator) if t.dim() > 1 else t
        for name, t in load_file(source / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory, random_model) -> Path:
    """A folder with rows, their file of code, and two teachers."""
    home = tmp_path_factory.mktemp("opd")
    (home / "env.py").write_text(ENV)
    rows = [
        {
            "prompt": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": f"Say {i} {{x}}."},
            ],
            "data_source": "ab"[i % 2],
            "ground_truth": str(i),
            "extra_info": {"hint": {"text": f"<|im_end|> {i + 1}"}},
            "agent_name": "two_turns_opd",
            "tools": ["weather_opd"],
        }
        for i in range(6)
    ]
    (home / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    noisy(random_model, home / "a", 1.0, seed=1)
    noisy(random_model, home / "b", 1.0, seed=2)
    return home


@pytest.fixture(scope="module")
def config_of(home, random_model):
    def make(output: Path, *keys: str):
        base = [
            "algorithm.name=opd", f"trainer.total_steps={STEPS}", "trainer.save_freq=1",
            "data.batch_size=2", "rollout.n=2", "rollout.max_turn_tokens=40", "optim.lr=0.01",
            "trainer.device=cpu", "tools.transport=in_process", "reward.function=letters_opd",
            f"teacher.model={home}/a",
        ]  # fmt: skip
        flags = {
            "data.train": str(home / "rows.jsonl"),
            "model.path": str(random_model),
            "trainer.output": str(output),
            "files": [str(home / "env.py")],
        }
        return load_config(None, [*base, *keys], flags)

    return make


@pytest.fixture
def train(config_of, tmp_path):
    """Return a function that trains a run, and returns its folder."""

    def run(*keys: str, output: str = "run") -> Path:
        Trainer(config_of(tmp_path / output, *keys)).run()
        return tmp_path / output

    return run


def metrics_of(folder: Path) -> list[dict]:
    return [
        {k: v for k, v in metrics.items() if not k.startswith(("timing_s/", "perf/"))}
        for _, metrics in read_metrics(folder / "metrics.jsonl")
    ]


def weights_of(folder: Path) -> bytes:
    return (folder / "model/model.safetensors").read_bytes()


def logprobs_of(path: Path, ids: list[int]) -> torch.Tensor:
    """Return the logprob of each token but the first, by transformers, one row alone."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


# --- learning ------------------------------------------------------------------------------------


@pytest.mark.learning
@pytest.mark.timeout(900)
def test_a_bad_student_reaches_its_teacher_without_a_reward(tiny_model, tmp_path):
    """With tools, over several turns; the rewards are only measured."""
    student = noisy(tiny_model, tmp_path / "student", 0.3)
    keys = [
        "algorithm.name=opd", f"teacher.model={tiny_model}", "trainer.total_steps=16",
        "rollout.n=4", "optim.lr=1e-3",
    ]  # fmt: skip
    flags = {
        "data.train": str(DATA / "arithmetic_train.parquet"),
        "model.path": str(student),
        "trainer.output": str(tmp_path / "run"),
    }
    Trainer(load_config(None, keys, flags, preset=TINY_SETTINGS)).run()
    metrics = metrics_of(tmp_path / "run")
    kls = [m["teacher/reverse_kl"] for m in metrics]
    rewards = [m["critic/score/mean"] for m in metrics]
    print([round(kl, 3) for kl in kls], [round(r, 3) for r in rewards])
    assert kls[0] > 0.8 and max(kls[-3:]) < 0.4 * kls[0]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:2]) / 2 + 0.1
    assert all(m["tool_call_counts/mean"] > 0 for m in metrics)


# --- each token ----------------------------------------------------------------------------------


def test_each_token_is_scored_in_the_context_that_the_teacher_reads(train, home, random_model):
    """Teachers by data source, a prompt with the row's answer, observed tokens, advantages."""
    prompt = "{prompt} Hint: {hint[text]}, {ground_truth}"
    folder = train(
        "trainer.total_steps=1", f"teacher.model={{a: {home}/a, b: {random_model}}}",
        f"teacher.prompt='{prompt}'", "teacher.weight=0.5", "teacher.clip=0.05",
    )  # fmt: skip
    run = Run(folder)
    learned = run.store.read_learned(1).to_pylist()
    tokenizer = load_tokenizer(random_model)
    rows = {(r["episode_id"], r["segment"]): r for r in learned}
    kls, observed = [], 0
    for scored in load_trajectories(folder / "trajectories", 1, "train"):
        trajectory, i = scored.trajectory, int(scored.trajectory.sample.ground_truth)
        teacher = home / "a" if trajectory.sample.data_source == "a" else random_model
        [segment] = trajectory.segments
        row = rows[trajectory.episode_id, 0]
        content = f"Say {i} {{x}}."
        before, after = tokenizer.decode(segment.prompt_ids).split(content)
        # What looks like a control token is none.
        added = f"{content} Hint: <|im_end|> {i + 1}, {i}"
        pieces = [(before, False), (added, True), (after, False)]
        head = [
            token
            for text, is_content in pieces
            for token in tokenizer.encode(text, split_special_tokens=is_content)
        ]
        scores = logprobs_of(teacher, [*head, *segment.response_ids])[len(head) - 1 :]
        old = logprobs_of(random_model, [*segment.prompt_ids, *segment.response_ids])
        old = old[len(segment.prompt_ids) - 1 :]
        for t, mask in enumerate(segment.response_mask):
            if not mask:
                assert row["teacher_logprobs"][t] is None and row["advantages"][t] is None
                continue
            assert row["teacher_logprobs"][t] == pytest.approx(scores[t].item(), abs=1e-5)
            ratio = (scores[t] - old[t]).item()
            kls.append(-ratio)
            expected = 0.5 * max(-0.05, min(0.05, ratio))
            assert row["advantages"][t] == pytest.approx(expected, abs=1e-5)
        observed += segment.response_mask.count(0)
    [metrics] = metrics_of(folder)
    assert observed > 20
    assert metrics["teacher/reverse_kl"] == pytest.approx(sum(kls) / len(kls), abs=1e-5)
    assert 0 < metrics["teacher/clipfrac"] < 1


# --- the same run again --------------------------------------------------------------------------

VARIANTS = {
    "full": [],
    "lora": ["model.lora_rank=2", "algorithm.policy_loss=gspo", "teacher.model={home}/b"],
    "mixed": [
        "algorithm.name=grpo", "algorithm.adv_estimator=rloo", "teacher.weight=0.2",
        "algorithm.mini_batch_size=2", "algorithm.ppo_epochs=2", "algorithm.kl_loss_coef=0.1",
        "teacher.model={{a: {home}/a, b: {model}}}",
    ],
    "itself": [
        "teacher.model=policy", "teacher.prompt='{{hint}} {{prompt}}'", "model.lora_rank=2",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_is_replayed_bit_for_bit(train, home, random_model, name):
    folder = train(*(key.format(home=home, model=random_model) for key in VARIANTS[name]))
    result = replay(Replayer(Run(folder)), STEPS, say=lambda _: None)
    assert not result.differences, result.differences
    assert result.tolerance == 0 and len(result.compared) == 3, result.compared
    stored = Run(folder).store.read_learned(STEPS)["teacher_logprobs"].to_pylist()
    assert any(x is not None for row in stored for x in row)
    assert any(m["teacher/reverse_kl"] != 0 for m in metrics_of(folder))


def test_a_replay_finds_another_teacher(train, home, tmp_path):
    shutil.copytree(home / "a", tmp_path / "a")
    folder = train(f"teacher.model={tmp_path}/a", "trainer.total_steps=1")
    shutil.rmtree(tmp_path / "a")
    shutil.copytree(home / "b", tmp_path / "a")
    result = replay(Replayer(Run(folder)), 1, say=lambda _: None)
    assert "teacher/reverse_kl" in {d.name for d in result.differences}


def test_what_if_the_teacher_had_another_weight(train, home):
    folder = train("trainer.total_steps=1", "teacher.prompt='{hint} {prompt}'")
    replayer = Replayer(Run(folder))
    config = change_config(replayer.config_at(1), ["teacher.weight=2"], "", ["teacher.weight"])
    result = what_if(replayer, 1, config)
    before = {e.episode_id: e.advantage for e in result.episodes}
    assert any(before.values())
    for e in result.episodes:
        assert e.new_advantage == pytest.approx(2 * before[e.episode_id], rel=1e-9)


def test_a_run_whose_teacher_failed_continues_exactly(train, tmp_path, monkeypatch):
    whole = train(output="whole")
    score, calls = teacher_module.Teacher.logprobs, []

    def fail_once(self, *args):
        calls.append(args)
        if len(calls) == 2:
            raise EngineError("the teacher is gone")
        return score(self, *args)

    monkeypatch.setattr(teacher_module.Teacher, "logprobs", fail_once)
    with pytest.raises(EngineError, match="the teacher is gone"):
        train(output="again")
    assert find_steps(tmp_path / "again") == [1]
    train(output="again")
    assert metrics_of(tmp_path / "again") == metrics_of(whole)
    assert weights_of(tmp_path / "again") == weights_of(whole)


def test_older_tokens_are_compared_with_the_present_policy(train):
    """The log ratio is that of the policy at the start of the step, whatever sampled the token."""
    folder = train("trainer.max_staleness=1", "trainer.total_steps=4", "rollout.n=1")
    old = Run(folder).store.read_tokens(lambda step: step == 4).to_pylist()
    sampled = [t for t in old if t["mask"]]
    for token in sampled:
        expected = token["teacher_logprob"] - token["old_logprob"]
        assert token["advantage"] == pytest.approx(max(-10, min(10, expected)), abs=1e-6)
    assert any(t["version"] < 3 for t in sampled)
    assert any(abs(t["old_logprob"] - t["logprob"]) > 1e-3 for t in sampled if t["version"] < 3)
