"""The engine against a real SGLang server on a CPU: what it samples is what the model says."""

import asyncio
import copy
import os
import re
import signal
import threading
import time
from array import array
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from support.reference_model import ask, greedy_of, logprobs_of
from support.updates import publish, update
from transformers import AutoModelForCausalLM

from agentrl.agent_loops.attempt import load_template
from agentrl.chat import ChatTemplate
from agentrl.config import load_config
from agentrl.demo import TINY_SETTINGS
from agentrl.demo.recipe import CALCULATOR
from agentrl.engine.base import Sampling
from agentrl.engine.pieces import SamplerInPieces
from agentrl.engine.remote.launch import SGLangLaunch
from agentrl.engine.remote.pool import EnginePool
from agentrl.engine.remote.senders import Route, Sent, WeightsSender
from agentrl.engine.remote.sglang import SGLangEngine
from agentrl.errors import EngineDead, EngineError, PromptTooLong, RunStopped
from agentrl.http import fetch_json
from agentrl.metrics import rollout_metrics
from agentrl.preflight import make_plan
from agentrl.record import read_metrics
from agentrl.rollout import open_rollouts
from agentrl.store import load_trajectories
from agentrl.trainer import Trainer
from agentrl.trainer import run as run_module

pytestmark = pytest.mark.sglang

DATA = Path(__file__).parents[2] / "datasets"
GREEDY = Sampling(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def close(actual, expected, temperature=1.0, *, mean=False, bound=1e-5):
    """Logits within a bound: SGLang's float32 is nearer to float64 than transformers' own is.

    Of thousands of tokens a few are further off: then that is their mean's bound, and 10 times as
    much each one's.
    """
    actual = torch.as_tensor(actual, dtype=torch.float64)
    bound /= min(1, temperature)
    torch.testing.assert_close(actual, expected, atol=10 * bound if mean else bound, rtol=0)
    assert (actual - expected).abs().mean() < bound


@pytest.fixture
def engine(sglang_server, model):
    """The server with the tiny model's weights as version 0, and an empty cache."""
    engine = connect(sglang_server, model)
    publish(engine, update(weights(model), 0))
    yield engine
    # A test that failed may have left it paused, and the others would wait.
    engine.admin.manage("/continue_generation", {})


def connect(server, model, *, ours=True):
    return SGLangEngine(
        server.url,
        vocabulary=model.config.vocab_size,
        key=server.token,
        admin_key=server.admin_token,
        process=server if ours else None,
    )


@contextmanager
def pooled(server, model):
    """The server as a pool's only engine; left running at the end."""
    pool = EnginePool([lambda: connect(server, model, ours=False)])
    try:
        yield pool
    finally:
        pool.close()


def weights(model):
    return ((name, p.detach()) for name, p in model.named_parameters())


QUESTION = []
"""One that the model answers at length, however it was trained here: see `talkative`."""


@pytest.fixture(scope="module", autouse=True)
def talkative(model, tiny_tokenizer):
    for k in range(5, 500):
        text = f"Compute {k} + {k + 1} with the calculator."
        if len(greedy_of(model, question(tiny_tokenizer, text), GREEDY.max_tokens)) > 12:
            QUESTION[:] = [text]
            return
    raise AssertionError("the model says little to any question")


def question(tokenizer, text=""):
    chat = [{"role": "user", "content": text or QUESTION[0]}]
    ids = tokenizer.apply_chat_template(
        chat, tools=[CALCULATOR], add_generation_prompt=True, return_dict=False
    )
    return array("i", ids)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_the_models(engine, model, tiny_tokenizer, temperature):
    prompts = [question(tiny_tokenizer, f"What is {i} + {i}?") for i in range(8)]
    sampling = Sampling(temperature=temperature, max_tokens=48)
    for prompt in prompts:
        turn = await ask(engine, prompt, sampling)
        expected = logprobs_of(model, prompt, turn.token_ids, temperature)
        close(turn.logprobs, expected, temperature, mean=True)
        assert turn.prompt_tokens == len(prompt)
        assert set(turn.versions) == {0} and len(turn.versions) == len(turn.token_ids)


async def test_narrowed_sampling_keeps_the_full_vocabularys_logprobs(engine, model, tiny_tokenizer):
    prompt = question(tiny_tokenizer)
    only = await ask(engine, prompt, Sampling(temperature=2.0, top_k=1, max_tokens=16))
    assert only.token_ids == greedy_of(model, prompt, 16)
    expected = logprobs_of(model, prompt, only.token_ids, 2.0)
    close(only.logprobs, expected)
    nucleus = await ask(engine, prompt, Sampling(top_p=0.0001, max_tokens=16))
    assert nucleus.token_ids == only.token_ids


async def test_greedy_and_its_end(engine, model, tiny_tokenizer):
    prompt = question(tiny_tokenizer)
    turn = await ask(engine, prompt, GREEDY)
    assert turn.token_ids == greedy_of(model, prompt, GREEDY.max_tokens)
    expected = logprobs_of(model, prompt, turn.token_ids)
    close(turn.logprobs, expected)
    cut = await ask(engine, prompt, Sampling(temperature=0.0, max_tokens=3))
    assert cut.token_ids == turn.token_ids[:3] and cut.finish_reason == "length"


async def test_a_turn_is_the_same_in_pieces(engine, tiny_tokenizer):
    """`agentrl play chat` samples in pieces, to print an answer before it is complete."""
    prompt, pieces = question(tiny_tokenizer), []
    template = ChatTemplate(tiny_tokenizer)
    sampler = SamplerInPieces(engine, template, lambda *piece: pieces.append(piece))
    turn, at_once = await ask(sampler, prompt, GREEDY), await ask(engine, prompt, GREEDY)
    assert turn.token_ids == at_once.token_ids and turn.finish_reason == at_once.finish_reason
    assert len(pieces) == -(-len(turn.token_ids) // 4) > 1
    assert "".join(text for text, _ in pieces) == template.decode_turn(turn.token_ids)


async def test_stop_ids_and_texts_stay_in_the_ids(engine, tiny_tokenizer):
    prompt = question(tiny_tokenizer)
    ids = (await ask(engine, prompt, GREEDY)).token_ids
    at = max(i for i in range(len(ids) - 1) if ids[i] not in ids[:i])
    assert at > 1
    by_id = await ask(engine, prompt, Sampling(temperature=0.0, max_tokens=24, stop_ids=(ids[at],)))
    assert (by_id.token_ids, by_id.finish_reason) == (ids[: at + 1], "stop")
    texts = [tiny_tokenizer.decode(ids[:n]) for n in range(at + 2)]
    stop = texts[at + 1][len(texts[at - 1]) :]  # the text of two tokens
    first = next(n for n, text in enumerate(texts) if stop in text)
    by_text = await ask(engine, prompt, Sampling(temperature=0.0, max_tokens=24, stop=(stop,)))
    assert (by_text.token_ids, by_text.finish_reason) == (ids[:first], "stop")
    assert len(by_text.logprobs) == first


async def test_a_row_ends_at_the_servers_maximum_length(engine):
    row = array("i", [5] * (engine.max_length - 3))
    turn = await ask(engine, row, Sampling(temperature=0.0, max_tokens=64, stop_ids=()))
    assert len(turn.token_ids) <= 3
    assert len(turn.token_ids) == 3 or turn.finish_reason == "stop"
    with pytest.raises(PromptTooLong, match="must be 1 to"):
        await ask(engine, array("i", [5] * engine.max_length), GREEDY)
    engine.max_length = 100_000  # now it is the server that refuses
    with pytest.raises(PromptTooLong, match="status 400"):
        await ask(engine, array("i", [5] * 5_000), GREEDY)
    assert (await ask(engine, array("i", [5]), GREEDY)).prompt_tokens == 1


async def test_tokens_that_would_crash_the_server_do_not_reach_it(engine, model):
    with pytest.raises(EngineError, match="vocabulary"):
        await ask(engine, array("i", [1, model.config.vocab_size]), GREEDY)
    with pytest.raises(EngineError, match="1 to"):
        await ask(engine, array("i"), GREEDY)


async def test_scores(engine, model, tiny_tokenizer):
    row = question(tiny_tokenizer)
    await ask(engine, row, GREEDY)  # what is cached is scored all the same
    scores = await engine.score(row)
    assert scores[0] == 0
    expected = logprobs_of(model, row[:1], row[1:])
    close(scores[1:], expected, bound=3e-5)  # one token is 1.6e-5 off on some CPUs


def endless(model):
    """A tensor with which greedy ends no turn: of all logits one is above the end's, which is 0."""
    torch.manual_seed(4)
    head = 0.05 * torch.randn_like(model.get_input_embeddings().weight)
    head[model.config.eos_token_id] = 0
    return [("model.embed_tokens.weight", head)]


@torch.no_grad()
def changed(model, tensors):
    """A copy with other tensors."""
    other = copy.deepcopy(model)
    for name, tensor in tensors:
        other.get_parameter(name).copy_(tensor)
    return other


def without_end(model):
    """All logits 0: greedy says token 0 for ever."""
    return [("model.norm.weight", torch.zeros(model.config.hidden_size))]


def in_flight(engine):
    _, loads = fetch_json(engine.url, "/get_load", token=engine.admin.key, timeout=10)
    return sum(load["num_reqs"] for load in loads)


@pytest.mark.parametrize("how", ["cancelled", pytest.param("deadline", marks=pytest.mark.slow)])
async def test_the_server_aborts_a_turn_whose_client_gave_up(engine, model, how):
    await asyncio.to_thread(publish, engine, update(without_end(model), 1))
    endless = Sampling(temperature=0.0, max_tokens=2_000)

    async def turn(seconds):
        return await ask(engine, array("i", [5, 6]), endless, seconds=seconds)

    begun = time.monotonic()
    await turn(120.0)
    whole = time.monotonic() - begun  # seconds that an unbroken turn takes

    async def seen_in_flight():
        """A turn that the server is at, or None where a deadline came before the server said so."""
        task = asyncio.create_task(turn(whole / 4 if how == "deadline" else 120.0))
        while not await asyncio.to_thread(in_flight, engine):
            if task.done():
                with pytest.raises(EngineError, match="deadline"):
                    await task
                return None
        return task

    for _ in range(10):
        begun = time.monotonic()
        if task := await seen_in_flight():
            break
    assert task, "no turn was seen in flight"
    if how == "cancelled":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        with pytest.raises(EngineError, match="deadline"):
            await task
    # Neither is the turn over by then, nor has SGLang, after 4 s, looked for broken connections.
    while await asyncio.to_thread(in_flight, engine):
        assert time.monotonic() < begun + min(0.7 * whole, 3.5), "the turn was not aborted"


async def test_64_concurrent_turns(engine, model, tiny_tokenizer):
    prompts = [question(tiny_tokenizer, f"What is {i} * {i + 1}?") for i in range(64)]
    sampling = Sampling(max_tokens=32)
    turns = await asyncio.gather(
        *(ask(engine, prompt, sampling, f"e{i}") for i, prompt in enumerate(prompts))
    )
    for prompt, turn in zip(prompts, turns, strict=True):
        expected = logprobs_of(model, prompt, turn.token_ids)
        close(turn.logprobs, expected, mean=True)


async def test_a_second_turn_finds_the_first_in_the_cache(engine, tiny_tokenizer):
    first = question(tiny_tokenizer)
    turn = await ask(engine, first, GREEDY)
    second = first + turn.token_ids + array("i", [5, 6, 7])
    again = await ask(engine, second, GREEDY)
    # The last sampled token has not been through the model.
    assert again.cached_tokens == len(first) + len(turn.token_ids) - 1


async def test_publishing_changes_what_is_sampled(engine, model, tiny_tokenizer):
    prompt = question(tiny_tokenizer)
    before = await ask(engine, prompt, GREEDY)
    torch.manual_seed(3)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.05 * torch.randn_like(p))
    await asyncio.to_thread(publish, engine, update(weights(other), 7))
    after = await ask(engine, prompt, GREEDY)
    assert after.token_ids == greedy_of(other, prompt, GREEDY.max_tokens) != before.token_ids
    assert set(after.versions) == {7} and after.cached_tokens == 0
    expected = logprobs_of(other, prompt, after.token_ids)
    close(after.logprobs, expected)
    # What is not named stays: as merged adapters are published.
    name = "model.layers.0.mlp.down_proj.weight"
    tensor = model.get_parameter(name).detach()
    await asyncio.to_thread(publish, engine, update([(name, tensor)], 8))
    with torch.no_grad():
        other.get_parameter(name).copy_(tensor)
    mixed = await ask(engine, prompt, GREEDY)
    expected = logprobs_of(other, prompt, mixed.token_ids)
    close(mixed.logprobs, expected)


async def test_weights_in_many_files_are_the_same_weights(engine, model, tiny_tokenizer, tmp_path):
    prompt = question(tiny_tokenizer)
    scores = await engine.score(prompt)
    await asyncio.to_thread(publish, engine, update(without_end(model), 1))
    assert await engine.score(prompt) != scores
    route = Route(2, folder=tmp_path, bucket_bytes=1)
    sent = WeightsSender().send(weights(model), route)
    assert len(list(tmp_path.iterdir())) == len(sent.names)
    await asyncio.to_thread(engine.finish_update, route, sent)
    assert await engine.score(prompt) == scores


def test_the_server_requires_tokens_that_are_in_no_command_line(sglang_server):
    for path in ("/model_info", "/server_info"):
        assert fetch_json(sglang_server.url, path, timeout=10)[0] == 401
        assert fetch_json(sglang_server.url, path, token="wrong", timeout=10)[0] == 401
    assert fetch_json(sglang_server.url, "/generate", {}, timeout=10)[0] == 401
    # Who may sample may not manage.
    for path in ("/flush_cache", "/update_weights_from_disk", "/pause_generation"):
        answer = fetch_json(sglang_server.url, path, {}, token=sglang_server.token, timeout=10)
        assert answer[0] == 401, path
    assert sglang_server.url.startswith("http://127.0.0.1:")
    group = [p for p in Path("/proc").glob("[0-9]*") if in_group(int(p.name), sglang_server.pid)]
    assert len(group) >= 3  # the parent watch, the server and its scheduler
    for process in group:
        for file in ("cmdline", "environ"):
            content = (process / file).read_bytes()
            assert sglang_server.token.encode() not in content
            assert sglang_server.admin_token.encode() not in content


def in_group(pid, group):
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return False


def test_an_update_without_effect_is_noticed(engine, model, tmp_path):
    flush, load = engine.flush_cache, engine.load
    engine.flush_cache = lambda: None
    with pytest.raises(EngineError, match="127 tokens of the old weights are still in the cache"):
        publish(engine, update(weights(model), 1))
    engine.flush_cache, engine.load = flush, lambda *_: None
    with pytest.raises(EngineError, match=r"weights were '5' when .* and '1'"):
        publish(engine, update(weights(model), 5))
    with pytest.raises(EngineError, match="update_weights_from_disk: status 400"):
        load(Route(6, folder=tmp_path), Sent())


async def paused(engine, mode, turn):
    """Pause a turn that is in flight: a task that has not ended, unless it is to be aborted."""
    task = asyncio.create_task(turn)
    while not await asyncio.to_thread(in_flight, engine):
        assert not task.done()
    await asyncio.to_thread(engine.admin.manage, "/pause_generation", {"mode": mode})
    return task


@pytest.mark.timing
@pytest.mark.parametrize("mode", ["in_place", pytest.param("retract", marks=pytest.mark.slow)])
async def test_a_pause_loses_nothing(engine, model, tiny_tokenizer, mode):
    await asyncio.to_thread(publish, engine, update(endless(model), 1))
    prompt = question(tiny_tokenizer)
    turn = ask(engine, prompt, Sampling(temperature=0.0, max_tokens=300))
    task = await paused(engine, mode, turn)
    if mode == "in_place":  # its turns keep their cache
        with pytest.raises(EngineError, match=f"{engine.url}/flush_cache: status"):
            engine.flush_cache(0.5)  # refused, and the server lives
    await asyncio.sleep(2)  # several times what the turn takes
    assert not task.done()
    await asyncio.to_thread(engine.admin.manage, "/continue_generation", {})
    paused_turn = await task
    assert len(paused_turn.token_ids) == len(paused_turn.logprobs) == 300
    close(
        paused_turn.logprobs,
        logprobs_of(changed(model, endless(model)), prompt, paused_turn.token_ids),
    )


async def test_a_pause_may_abort_turns_in_flight(engine, model):
    await asyncio.to_thread(publish, engine, update(without_end(model), 1))
    turn = ask(engine, array("i", [5, 6]), Sampling(temperature=0.0, max_tokens=2_000))
    task = await paused(engine, "abort", turn)
    with pytest.raises(EngineError, match=r"(?i)abort"):
        await task
    await asyncio.to_thread(engine.admin.manage, "/continue_generation", {})
    again = await ask(engine, array("i", [5, 6]), Sampling(temperature=0.0, max_tokens=8))
    assert again.token_ids == array("i", [0] * 8)


@pytest.mark.slow
def test_a_server_that_does_not_start_says_why(sglang_python, tiny_model):
    with pytest.raises(EngineDead, match=r"no-such-flag(?s:.)*ended with code 2"):
        SGLangLaunch(str(tiny_model), python=sglang_python, arguments=["--no-such-flag"]).start()


# -- episodes through the pool ---------------------------------------------------------------------


async def test_a_prompt_that_is_too_long_does_not_count_against_the_engine(
    engine, sglang_server, model
):
    with pooled(sglang_server, model) as pool:
        inner = pool.replicas[0].engine

        async def turn(row):
            return await pool.generate(
                row, GREEDY, episode_id="e", seed=1, deadline=time.monotonic() + 60
            )

        inner.max_length, limit = 100_000, inner.max_length  # then it is the server that refuses
        for row, message in ((limit, "status 400"), (100_000, "must be 1 to")):
            for _ in range(4):  # three failures would have it left out
                with pytest.raises(PromptTooLong, match=message):
                    await turn(array("i", [5] * row))
        assert (await turn(array("i", [5]))).prompt_tokens == 1
        assert not pool.replicas[0].is_excluded
        assert pool.metrics() == {
            "engine/usable": 1.0, "engine/restarts": 0.0, "engine/failovers": 0.0,
        }  # fmt: skip


SPACES = """
from agentrl import reward

@reward("spaces_of_answer")
def spaces_of_answer(trajectory) -> float:
    text = trajectory.assistant_text
    return text.count(" ") / max(1, len(text))
"""


def of_arithmetic(folder, model, *overrides):
    """A run of the tiny model's loops; hardly two answers have the same reward."""
    (folder / "spaces.py").write_text(SPACES)
    return load_config(
        None,
        ["rollout.name=sglang", "trainer.device=cpu", "data.batch_size=6", "rollout.n=4",
         f"files=[shelf:calculator, {folder / 'spaces.py'}]", "reward.function=spaces_of_answer",
         "trainer.save_freq=0", *overrides],
        {
            "data.train": str(DATA / "arithmetic_train.parquet"),
            "model.path": str(model),
            "trainer.output": str(folder / "run"),
        },
        preset=TINY_SETTINGS,
    )  # fmt: skip


@pytest.mark.slow
def test_200_concurrent_episodes(engine, sglang_server, model, tiny_model, tmp_path):
    config = of_arithmetic(tmp_path, tiny_model)
    plan = make_plan(config)
    samples = [s for s in plan.train if s.agent_name == "tool_agent"][:25]
    with (
        pooled(sglang_server, model) as pool,
        open_rollouts(config, pool, load_template(config), plan.scorer) as rollouts,
    ):
        groups = rollouts.collect(samples, n=8, sampling=Sampling(), step=0)
    assert [(len(g.scored), g.dropped) for g in groups] == [(8, 0)] * 25
    played = [s.trajectory for g in groups for s in g.scored]
    assert sum(len(t.turns) > 1 for t in played) > 100
    exact = copy.deepcopy(model).double()
    for t in played:
        for segment in t.segments:
            row = segment.prompt_ids + segment.response_ids
            ids = torch.tensor([row.tolist()])
            with torch.inference_mode():
                logprobs = exact(ids).logits[0, len(segment.prompt_ids) - 1 : -1].log_softmax(-1)
            expected = logprobs.gather(-1, ids[0, len(segment.prompt_ids) :, None])[:, 0]
            sampled = torch.tensor(segment.response_mask.tolist()).bool()
            assert sampled.any()
            close(torch.tensor(segment.logprobs.tolist())[sampled], expected[sampled], mean=True)
    metrics = rollout_metrics(groups)
    assert metrics["rollout/cached_token_ratio/later_turns"] > 0.5


# -- training --------------------------------------------------------------------------------------


@pytest.fixture
def keys(sglang_server, monkeypatch):
    """Those of the server, as a run finds them."""
    monkeypatch.setenv("AGENTRL_ENGINE_TOKEN", sglang_server.token)
    monkeypatch.setenv("AGENTRL_ENGINE_ADMIN_TOKEN", sglang_server.admin_token)


def history_of(output):
    """Each step's metrics, and the policy versions of all tokens that trained."""
    versions = {
        v
        for s in load_trajectories(output / "trajectories")
        for segment in s.trajectory.segments
        for v in segment.versions
        if v >= 0
    }
    return [m for step, m in read_metrics(output / "metrics.jsonl") if step], versions


def check_steps(steps):
    """Each step's tokens were sampled from what the trainer held, and the policy moved."""
    for metrics in steps:
        assert metrics["rollout_corr/logprob_diff_max"] < 1e-4
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
        assert metrics["canary/mismatch"] < 1e-5 < 1e-3 < metrics["canary/drift"]
        assert metrics["timing_s/update_weights"] > 0


@pytest.mark.slow
def test_a_few_steps_move_the_reward(engine, keys, sglang_server, model, tiny_model, tmp_path):
    val = pq.read_table(DATA / "arithmetic_val.parquet").slice(0, 120)
    pq.write_table(val, tmp_path / "val.parquet")
    config = of_arithmetic(
        tmp_path, tiny_model, f"rollout.urls=[{sglang_server.url}]", "trainer.total_steps=4",
        "data.batch_size=12", f"data.val={tmp_path / 'val.parquet'}", "val.greedy=false",
        "optim.lr=0.001", "trainer.test_freq=0", "rollout.n=6",
    )  # fmt: skip
    Trainer(config).run()
    before, *_ = (m for _, m in read_metrics(tmp_path / "run/metrics.jsonl"))
    steps, versions = history_of(tmp_path / "run")
    check_steps(steps)
    assert versions == set(range(5))  # the last is validation's
    size = sum(p.nbytes for p in model.parameters())
    assert [m["perf/update_weights_bytes"] for m in steps] == [size] * 4
    reward = "val/reward/mean@1"
    assert steps[-1][reward] > before[reward] + 0.02, "the servers' samples did not follow"


@pytest.mark.slow
def test_lora_by_merge(engine, keys, sglang_server, tiny_model, tmp_path):
    config = of_arithmetic(
        tmp_path, tiny_model, f"rollout.urls=[{sglang_server.url}]", "trainer.total_steps=2",
        "model.lora_rank=4", "rollout.lora=merge", "optim.lr=0.01",
    )  # fmt: skip
    Trainer(config).run()
    steps, versions = history_of(tmp_path / "run")
    check_steps(steps)
    assert versions == {0, 1}


def harmed(real):
    """Return a step in which the server is killed: the third, and the fourth, then for good."""

    def train_step(parts, state):
        if state.step < 2:
            return real(parts, state)
        replica = parts.engine.replicas[0]
        process = replica.engine.process
        if state.step == 3:
            Path(parts.config.rollout.python).write_text(
                '#!/bin/sh\n[ "$1" = -c ] || { echo no machine is left; exit 7; }\n'
            )

        pid = process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

        def kill():
            while not replica.in_flight:
                time.sleep(0.001)
            os.kill(int(children[0]), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
        try:
            return real(parts, state)
        finally:
            assert not process.running

    return train_step


@pytest.mark.slow  # a minute; test_sglang_pool kills a server, too
def test_a_server_that_dies_is_restarted_or_the_run_stops(
    sglang_python, tiny_model, tmp_path, caplog, monkeypatch
):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sglang_python} "$@"\n')
    python.chmod(0o700)
    config = of_arithmetic(
        tmp_path, tiny_model, f"rollout.python={python}", "trainer.total_steps=5", "optim.lr=0.001"
    )  # fmt: skip
    monkeypatch.setattr(run_module, "train_step", harmed(run_module.train_step))
    with pytest.raises(RunStopped) as stopped:
        Trainer(config).run()
    steps, versions = history_of(tmp_path / "run")
    assert len(steps) == 3 and versions == {0, 1, 2}
    check_steps(steps)
    assert [m["engine/restarts"] for m in steps] == [0, 0, 1]
    assert "ended with code -9" in caplog.text, "the log's end is shown where the run goes on, too"
    error = str(stopped.value)
    assert re.search(r"NoEngineLeft: no engine is left(?s:.)*no machine is left\n.*code 7", error)
    assert "saved after step 3" in error
