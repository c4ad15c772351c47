"""`rollout.router_replay` with a real SGLang server on a CPU."""

from __future__ import annotations

import asyncio
import json
import time
from array import array

import pytest
import torch
from learner.test_router_replay import batch_of, gaps, learner_of
from support.moe import experts_of, moe_model, own_experts, turn, turns
from support.trainer_fixtures import token_array
from support.updates import publish, update
from torch import Tensor

from agentrl.agent_loops.context import TokenRow
from agentrl.config import load_config
from agentrl.engine.base import Sampling
from agentrl.engine.local.load import with_published_names
from agentrl.engine.remote.launch import SGLangLaunch
from agentrl.engine.remote.sglang import SGLangEngine
from agentrl.errors import ConfigError
from agentrl.record import read_metrics
from agentrl.store import TrajectoryStore
from agentrl.trainer import Trainer

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
SIZE = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 4096}
PROMPTS = [[(31 * i + 7 * k) % 250 + 1 for i in range(20)] for k in range(3) for _ in range(4)]


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_tokenizer):
    """A mixture of experts, and its folder."""
    folder = tmp_path_factory.mktemp("moe")
    model = moe_model(**SIZE, vocab_size=len(tiny_tokenizer))
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return model, folder


def serve(sglang_python, folder, dtype: str, **options):
    launch = SGLangLaunch(str(folder), python=sglang_python, dtype=dtype, **options)
    return launch.start()


def connect(server, vocabulary: int) -> SGLangEngine:
    return SGLangEngine(
        server.url, vocabulary=vocabulary, key=server.token, admin_key=server.admin_token,
        returns_experts=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(sglang_python, world):
    server = serve(sglang_python, world[1], "float32", returns_experts=True)
    yield server
    server.stop()


@pytest.fixture
def engine(server, world):
    engine = connect(server, world[0].config.vocab_size)
    publish(engine, update_of(world[0], 0))
    yield engine
    engine.close()


def update_of(model, version: int):
    """Return an update to a model, by the names of its files, which SGLang reads."""
    pairs = [(n, p.detach()) for n, p in model.named_parameters()]
    return update(with_published_names(model, pairs), version)


def sets(experts: Tensor) -> Tensor:
    """Return the experts of each layer in an order of their own: SGLang has another."""
    return experts.long().view(len(experts), -1, 4).sort(-1).values


def test_the_experts_of_all_inputs_are_returned(engine, world):
    """Those of other requests too, whose prompts are in the cache, and turn by turn."""
    model, _ = world
    answers = turns(engine, PROMPTS)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = own_experts(model, [*prompt, *answer.token_ids])[:-1]
        assert torch.equal(sets(experts_of(answer)), sets(expected))
    assert any(answer.cached_tokens for answer in turns(engine, PROMPTS[:1]))

    async def play():
        row = TokenRow(token_array(PROMPTS[0]))
        for seed in range(3):
            prompt = row.ids + token_array([3, 4, 5] if seed else [])
            answer = await turn(engine, prompt, "e", start=row.experts_from, seed=seed)
            row.extend(prompt[len(row.ids) :], answer, 12)
        return row.segment()

    segment = asyncio.run(play())
    ids = [*segment.prompt_ids, *segment.response_ids]
    experts = torch.tensor(segment.experts).view(len(ids) - 1, -1)
    assert torch.equal(sets(experts), sets(own_experts(model, ids)[:-1]))


def test_new_weights_do_not_change_the_experts_of_sampled_tokens(engine, world):
    model, _ = world
    other = moe_model(**SIZE, vocab_size=model.config.vocab_size)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.3 * weight.std() * torch.randn_like(weight))

    async def play():
        playing = [
            asyncio.create_task(turn(engine, p, f"e{i}", n=2000)) for i, p in enumerate(PROMPTS[:3])
        ]
        await asyncio.sleep(1)
        await asyncio.to_thread(publish, engine, update_of(other, 1))
        return await asyncio.gather(*playing)

    changed = 0
    for prompt, answer in zip(PROMPTS, asyncio.run(play()), strict=False):
        if 1 not in answer.versions or 0 not in answer.versions:
            continue  # It had ended, or had not begun.
        changed += 1
        ids = [*prompt, *answer.token_ids]
        at = len(prompt) + answer.versions.index(1) - 1
        expected = torch.cat([own_experts(model, ids)[:at], own_experts(other, ids)[at:-1]])
        assert (sets(experts_of(answer)) == sets(expected)).all(-1).float().mean() > 0.999
    assert changed


def test_a_server_in_bfloat16(sglang_python, world):
    """With the server's experts, its gap to the trainer is that of rounding."""
    model, folder = world
    server = serve(sglang_python, folder, "bfloat16", returns_experts=True)
    try:
        engine = connect(server, model.config.vocab_size)
        answers = turns(engine, PROMPTS, n=60)
    finally:
        server.stop()
    segments = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        row = TokenRow(token_array(prompt))
        row.extend((), answer, 60)
        segments.append(row.segment())
    batch = batch_of(segments)
    before, after = (gaps(learner_of(folder, replay), batch) for replay in (False, True))
    print(f"before {before.mean():.4f} (max {before.max():.4f}), after {after.mean():.4f}"
          f" (max {after.max():.4f})")  # fmt: skip
    assert after.max() < before.max() / 3 and after.mean() < before.mean() / 1.5


def test_a_server_that_returns_none_is_refused(sglang_python, world, sglang_server):
    with pytest.raises(ConfigError, match="Start it with --enable-return-routed-experts"):
        connect(sglang_server, world[0].config.vocab_size)


def test_a_run(world, sglang_python, tmp_path):
    (tmp_path / "env.py").write_text(
        "from agentrl import reward\n@reward('letters_sglang_routers')\n"
        "def letters(trajectory) -> float:\n"
        "    return len(set(trajectory.assistant_text)) / 10\n"
    )
    rows = [{"prompt": f"Say {i}.", "ground_truth": "1"} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = tmp_path / "run"
    Trainer(load_config(None, [
        f"model.path={world[1]}", f"data.train={tmp_path}/rows.jsonl", f"trainer.output={run}",
        f"files=[{tmp_path}/env.py]", "reward.function=letters_sglang_routers",
        "rollout.name=sglang", f"rollout.python={sglang_python}", "rollout.router_replay=true",
        "trainer.total_steps=2", "data.batch_size=2", "rollout.n=4", "trainer.device=cpu",
        "rollout.max_turn_tokens=12", "tools.transport=in_process", "trainer.save_freq=0",
    ], {})).run()  # fmt: skip
    steps = read_metrics(run / "metrics.jsonl")
    assert len(steps) == 2
    stored = TrajectoryStore(run / "trajectories").read()
    assert all(s.experts for x in stored for s in x.scored.trajectory.segments)


def test_the_score_of_a_row_needs_no_experts(engine, world):
    """The canary scores rows, and validation samples without experts."""
    row = array("i", PROMPTS[0])
    assert len(asyncio.run(engine.score(row))) == 20
    answer = asyncio.run(
        engine.generate(
            row, Sampling(max_tokens=3), episode_id="e", seed=0, deadline=time.monotonic() + 60
        )
    )
    assert not answer.experts
