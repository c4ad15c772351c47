"""A real SGLang server gets new weights while turns are in flight."""

import asyncio
from array import array
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from support.reference_model import ask, logprobs_of
from support.updates import publish, update
from transformers import AutoModelForCausalLM

from agentrl.config import load_config
from agentrl.data import RowOrder
from agentrl.demo import TINY_SETTINGS
from agentrl.engine.base import Sampling
from agentrl.engine.remote.pool import EnginePool
from agentrl.engine.remote.sglang import SGLangEngine
from agentrl.errors import EngineError
from agentrl.record import read_metrics
from agentrl.store import TrajectoryStore
from agentrl.trainer import Trainer

pytestmark = pytest.mark.sglang

PROMPTS = [array("i", range(3 + i, 40 + i)) for i in range(12)]


@pytest.fixture(scope="module")
def policies(tiny_model):
    """Models whose turns are long, because all tokens are about equally likely."""
    models = []
    for version in range(4):
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
        torch.manual_seed(version)
        with torch.no_grad():
            model.get_parameter("model.norm.weight").mul_(0.1)
            for p in model.parameters():
                p.add_(0.01 * torch.randn_like(p))
        models.append(model)
    return models


def update_of(model, version):
    return update([(n, p.detach()) for n, p in model.named_parameters()], version)


@pytest.fixture
def engine(sglang_server, policies):
    engine = SGLangEngine(
        sglang_server.url,
        vocabulary=policies[0].config.vocab_size,
        key=sglang_server.token,
        admin_key=sglang_server.admin_token,
    )
    publish(engine, update_of(policies[0], 0))
    return engine


async def play_and_publish(engine, policies, sampling, has_enough):
    """Sample turns after each prompt, and publish one policy after another, until there are enough.

    How many turns get new weights depends on the load of the machine. Version v is that of
    `policies[v % len(policies)]`. Return the pairs of a prompt and its turn.
    """
    pairs, publishing = [], True

    async def sample_until_stopped(prompt):
        while publishing:
            pairs.append((prompt, await ask(engine, prompt, sampling, f"e{prompt[0]}")))

    tasks = [asyncio.create_task(sample_until_stopped(prompt)) for prompt in PROMPTS]
    try:
        for version in range(1, 200):
            await asyncio.sleep(0.1)
            assert not any(task.done() for task in tasks), "a turn failed"
            update = update_of(policies[version % len(policies)], version)
            await asyncio.to_thread(publish, engine, update)
            if has_enough([turn for _, turn in pairs]):
                break
        else:
            pytest.fail("too few turns got new weights")
    finally:
        publishing = False
    await asyncio.gather(*tasks)
    return pairs


def worst_gap(policies, prompt, turn):
    """The largest distance of a logprob from that of the model that the token's version names."""
    versions = torch.tensor(turn.versions.tolist())
    logprobs = torch.tensor(turn.logprobs.tolist(), dtype=torch.float64)
    gaps = [
        (logprobs - logprobs_of(policies[v % len(policies)], prompt, turn.token_ids))
        .abs()[versions == v]
        .max()
        for v in set(turn.versions)
    ]
    return float(max(gaps))


@pytest.mark.slow
async def test_each_logprob_is_that_of_the_version_that_its_token_names(engine, policies):
    pairs = await play_and_publish(
        engine,
        policies,
        Sampling(max_tokens=700),
        lambda turns: sum(len(set(turn.versions)) > 2 for turn in turns) > 2,
    )
    for prompt, turn in pairs:
        assert list(turn.versions) == sorted(turn.versions)
        assert turn.prompt_tokens == len(prompt)
        assert worst_gap(policies, prompt, turn) < 1e-5
    aborted = sum(len(set(turn.versions)) - 1 for _, turn in pairs)
    assert engine.reprefill_tokens() > aborted * len(PROMPTS[0])


async def test_a_turn_with_new_weights_in_it_ends_as_one_without(engine, policies):
    """One token in ten ends a turn, also if it is the last one before the abort."""
    ends = {*range(0, policies[0].config.vocab_size, 10), policies[0].config.eos_token_id}
    pairs = await play_and_publish(
        engine,
        policies,
        Sampling(max_tokens=12, stop_ids=tuple(sorted(ends))),
        lambda turns: sum(len(set(turn.versions)) > 1 for turn in turns) > 30,
    )
    for _, turn in pairs:
        assert not ends & {*turn.token_ids[:-1]}
        assert (turn.finish_reason == "stop") == (turn.token_ids[-1] in ends)
        assert (turn.finish_reason == "length") == (turn.token_ids[-1] not in ends)
        assert len(turn.token_ids) == 12 or turn.finish_reason == "stop"


async def test_turns_fail_if_the_weights_do_not_arrive(engine, policies, monkeypatch):
    sampling = Sampling(max_tokens=1500, temperature=1.5)
    tasks = [asyncio.create_task(ask(engine, p, sampling, f"e{p[0]}")) for p in PROMPTS]
    await asyncio.sleep(0.3)

    def fail(*_):
        raise EngineError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "load", fail)
        with pytest.raises(EngineError, match="disk is full"):
            await asyncio.to_thread(publish, engine, update_of(policies[1], 1))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert any(isinstance(r, EngineError) and "disk is full" in str(r) for r in results)
    with pytest.raises(EngineError, match="disk is full"):  # The weights are unknown.
        await ask(engine, PROMPTS[0], sampling)
    assert engine.probe().versions[0] == 0, "the pause has ended"
    await asyncio.to_thread(publish, engine, update_of(policies[2], 2))
    turn = await ask(engine, PROMPTS[0], Sampling(max_tokens=20))
    assert set(turn.versions) == {2} and worst_gap(policies, PROMPTS[0], turn) < 1e-5


# -- whole runs -----------------------------------------------------------------------------------

DATA = Path(__file__).parents[2] / "datasets"
ENV = """
from agentrl import reward

@reward("spaces_of_async")
def spaces(trajectory) -> float:
    text = trajectory.assistant_text
    return text.count(" ") / max(1, len(text))
"""
BATCH, N, STEPS = 3, 4, 6


@pytest.fixture
def run(sglang_server, tiny_model, tmp_path, monkeypatch):
    """Start a run with the server. Return its config and the weights of each version."""
    monkeypatch.setenv("AGENTRL_ENGINE_TOKEN", sglang_server.token)
    monkeypatch.setenv("AGENTRL_ENGINE_ADMIN_TOKEN", sglang_server.admin_token)
    published, publish = {}, EnginePool.publish

    def recorded(self, update):
        published[update.version] = {name: t.detach().clone() for name, t in update.weights()}
        return publish(self, update)

    monkeypatch.setattr(EnginePool, "publish", recorded)
    (tmp_path / "env.py").write_text(ENV)

    def start(*overrides):
        config = load_config(
            None,
            ["rollout.name=sglang", f"rollout.urls=[{sglang_server.url}]", "trainer.device=cpu",
             f"data.batch_size={BATCH}", f"rollout.n={N}", f"trainer.total_steps={STEPS}",
             f"files=[shelf:calculator, {tmp_path / 'env.py'}]", "trainer.save_freq=0",
             "reward.function=spaces_of_async", "optim.lr=0.001", *overrides],
            {
                "data.train": str(DATA / "arithmetic_train.parquet"),
                "model.path": str(tiny_model),
                "trainer.output": str(tmp_path / "run"),
            },
            preset=TINY_SETTINGS,
        )  # fmt: skip
        trainer = Trainer(config)
        trainer.run()
        return trainer, published

    return start


@pytest.mark.parametrize("staleness", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_trains_each_draw_once_with_exact_versions(run, tiny_model, tmp_path, staleness):
    trainer, published = run(f"trainer.max_staleness={staleness}")
    record = [m for step, m in read_metrics(tmp_path / "run/metrics.jsonl") if step]
    rows, segments, turns = defaultdict(list), [], []
    for stored in TrajectoryStore(tmp_path / "run/trajectories").read(split="train"):
        trajectory = stored.scored.trajectory
        rows[stored.step].append((trajectory.sample.row, trajectory.rollout))
        segments += trajectory.segments
        turns += [
            trajectory.segments[t.segment].versions[t.start : t.end] for t in trajectory.turns
        ]
        versions = {v for s in trajectory.segments for v in s.versions if v >= 0}
        assert all(0 <= stored.step - 1 - version <= staleness for version in versions)
    order = RowOrder(len(trainer.plan.train), 0)
    for step in range(1, STEPS + 1):
        drawn = order.take(BATCH * (step - 1), BATCH)
        assert rows[step] == [(row, rollout) for row in drawn for rollout in range(N)]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    gaps = []
    for version, weights in published.items():
        model.load_state_dict(weights, strict=False)
        for s in segments:
            of_version = torch.tensor(s.versions.tolist()) == version
            if of_version.any():
                logprobs = torch.tensor(s.logprobs.tolist(), dtype=torch.float64)
                exact = logprobs_of(model, s.prompt_ids, s.response_ids)
                gaps.append((logprobs - exact).abs()[of_version])
    gaps = torch.cat(gaps)
    assert len(gaps) == sum(sum(s.response_mask) for s in segments)
    assert gaps.mean() < 1e-5 and gaps.max() < 1e-4
    # How many turns get new weights depends on the load of the machine.
    turns_with_new_weights = sum(len(set(versions)) > 1 for versions in turns)
    assert sum(m["async/reprefill_tokens"] for m in record) >= turns_with_new_weights
    assert len(record) == STEPS and max(m["canary/drift"] for m in record) > 0
    assert all(m["engine/failovers"] == 0 == m["rollout/dropped"] for m in record)
