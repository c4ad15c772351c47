"""The engine against a real vLLM server on a CPU: what it samples is what the model says.

The model's head is not tied to its embeddings: on a CPU vLLM packs a tied one, and does not pack it
anew when it is sent weights.
"""

import asyncio
import copy
import os
import signal
import time
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.reference_model import ask, greedy_of, logprobs_of
from support.updates import publish, update
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.config import load_config
from agentrl.demo import TINY_SETTINGS
from agentrl.engine.base import Sampling, Update
from agentrl.engine.remote.launch import VLLMLaunch
from agentrl.engine.remote.open import make_openers, parameter_names
from agentrl.engine.remote.senders import Delivery, Sent
from agentrl.engine.remote.vllm import VLLMEngine
from agentrl.errors import ConfigError, EngineDead, EngineError, PromptTooLong, UserError
from agentrl.http import fetch
from agentrl.record import read_metrics
from agentrl.store import load_trajectories
from agentrl.trainer import Trainer

pytestmark = pytest.mark.vllm

DATA = Path(__file__).parents[2] / "datasets"
GREEDY = Sampling(temperature=0.0, max_tokens=24)
RANK = 8
NO_PARAMS = {"sampling_params": {}}


@pytest.fixture(scope="module")
def vllm_python():
    """The Python of an environment with vLLM that runs on a CPU."""
    folder = Path(__file__).parents[2]
    real = os.environ.get("AGENTRL_VLLM_PYTHON") or folder / ".venv-vllm/bin/python"
    if not Path(real).exists():
        pytest.skip(f"no vLLM at {real}: set AGENTRL_VLLM_PYTHON")
    return str(real)


@pytest.fixture(scope="module")
def untied(tiny_model, tmp_path_factory):
    """The tiny model's folder, with a head of its own."""
    folder = tmp_path_factory.mktemp("untied") / "model"
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(untied):
    return AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float32).eval()


def config_of(folder, output, *overrides):
    return load_config(
        None,
        ["rollout.name=vllm", "trainer.device=cpu", *overrides],
        {
            "data.train": str(DATA / "arithmetic_train.parquet"),
            "model.path": str(folder),
            "trainer.output": str(output),
        },
        preset=TINY_SETTINGS,
    )


@pytest.fixture(scope="module")
def server(vllm_python, untied, tmp_path_factory):
    """One server for all tests; it takes adapters and weights."""
    config = config_of(
        untied, tmp_path_factory.mktemp("out"),
        f"rollout.python={vllm_python}", f"model.lora_rank={RANK}",
    )  # fmt: skip
    [opener] = make_openers(config, str(untied), cpu=True)
    engine = opener()
    assert isinstance(engine, VLLMEngine) and engine.process is not None
    yield engine.process
    engine.close()


def attached(server, model, **options):
    return VLLMEngine(
        server.url,
        vocabulary=model.config.vocab_size,
        key=server.token,
        process=server,
        **options,
    )


@pytest.fixture
def engine(server, model, untied):
    """It takes weights, and has the tiny model's as version 0."""
    engine = attached(server, model, names=parameter_names(str(untied)))
    publish(engine, update(weights(model), 0))
    return engine


def weights(model):
    return ((name, p.detach()) for name, p in model.named_parameters())


def close(actual, expected, temperature=1.0):
    """Logits within 3e-5, float32 against float64."""
    actual = torch.tensor(actual, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, atol=3e-5 / min(1, temperature), rtol=0)


def question(tokenizer, text="What is 12*13?"):
    chat = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    return array("i", ids)


def moved(model, seed=3):
    torch.manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return other


def without_end(model):
    """All logits 0: greedy says token 0 for ever."""
    return ((n, p if n != "model.norm.weight" else torch.zeros_like(p)) for n, p in weights(model))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_the_models(engine, model, tiny_tokenizer, temperature):
    sampling = Sampling(temperature=temperature, max_tokens=32)
    prompts = [question(tiny_tokenizer, f"What is {i} + {i}?") for i in range(8)]
    turns = await asyncio.gather(*(ask(engine, prompt, sampling) for prompt in prompts))
    for prompt, turn in zip(prompts, turns, strict=True):
        expected = logprobs_of(model, prompt, turn.token_ids, temperature)
        close(turn.logprobs, expected, temperature)
        assert turn.prompt_tokens == len(prompt)
        assert set(turn.versions) == {0} and len(turn.versions) == len(turn.token_ids)


async def test_greedy_stop_ids_and_texts(engine, model, tiny_tokenizer):
    prompt = question(tiny_tokenizer)
    turn = await ask(engine, prompt, GREEDY)
    ids = turn.token_ids
    assert ids == greedy_of(model, prompt, GREEDY.max_tokens)
    close(turn.logprobs, logprobs_of(model, prompt, ids))
    cut = await ask(engine, prompt, Sampling(temperature=0.0, max_tokens=3))
    assert cut.token_ids == ids[:3] and cut.finish_reason == "length"
    # What ends a turn stays in its ids.
    at = max(i for i in range(len(ids) - 1) if ids[i] not in ids[:i])
    by_id = await ask(engine, prompt, Sampling(temperature=0.0, max_tokens=24, stop_ids=(ids[at],)))
    assert (by_id.token_ids, by_id.finish_reason) == (ids[: at + 1], "stop")
    texts = [tiny_tokenizer.decode(ids[:n]) for n in range(at + 2)]
    stop = texts[at + 1][len(texts[at - 1]) :]  # the text of two tokens
    first = next(n for n, text in enumerate(texts) if stop in text)
    by_text = await ask(engine, prompt, Sampling(temperature=0.0, max_tokens=24, stop=(stop,)))
    assert (by_text.token_ids, by_text.finish_reason) == (ids[:first], "stop")
    assert len(by_text.logprobs) == first


async def test_scores(engine, model, tiny_tokenizer):
    row = question(tiny_tokenizer)
    await ask(engine, row, GREEDY)  # what is cached is scored all the same
    scores = await engine.score(row)
    assert scores[0] == 0
    close(scores[1:], logprobs_of(model, row[:1], row[1:]))


async def test_impossible_requests_are_refused(engine, model):
    row = array("i", [5] * (engine.max_length - 3))
    turn = await ask(engine, row, Sampling(temperature=0.0, max_tokens=64))
    assert len(turn.token_ids) == 3 or turn.finish_reason == "stop"
    with pytest.raises(PromptTooLong, match="must be 1 to"):
        await ask(engine, array("i", [5] * engine.max_length), GREEDY)
    with pytest.raises(EngineError, match="vocabulary"):
        await ask(engine, array("i", [1, model.config.vocab_size]), GREEDY)
    with pytest.raises(UserError, match="not 3"):
        await ask(engine, array("i", [1]), Sampling(temperature=3.0))
    engine.max_length = 100_000  # now it is the server that refuses
    with pytest.raises(PromptTooLong, match="status 400"):
        await ask(engine, array("i", [5] * 5_000), Sampling(max_tokens=3))
    assert (await ask(engine, array("i", [5]), GREEDY)).prompt_tokens == 1


def running(engine):
    _, text = fetch(engine.url, "/metrics", token=engine.admin.key, error=EngineError, timeout=10)
    lines = text.decode().splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{")
    )


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
async def test_the_server_aborts_a_turn_whose_client_gave_up(engine, model, how):
    await asyncio.to_thread(publish, engine, update(without_end(model), 1))
    endless = Sampling(temperature=0.0, max_tokens=2_000)
    seconds = 1.5 if how == "deadline" else 120.0
    task = asyncio.create_task(ask(engine, array("i", [5, 6]), endless, seconds=seconds))
    while not await asyncio.to_thread(running, engine):
        assert not task.done()
    if how == "cancelled":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        with pytest.raises(EngineError, match="deadline"):
            await task
    end = time.monotonic() + 3
    while await asyncio.to_thread(running, engine):
        assert time.monotonic() < end, "the turn was not aborted"


async def test_a_second_turn_finds_the_first_in_the_cache(engine):
    first = array("i", [i % 500 + 1 for i in range(400)])
    turn = await ask(engine, first, GREEDY)
    assert turn.cached_tokens == 0
    again = await ask(engine, first + turn.token_ids, GREEDY)
    assert 0 < again.cached_tokens <= 400 and again.cached_tokens % 128 == 0  # whole blocks


async def test_publishing_changes_what_is_sampled(engine, model, tiny_tokenizer):
    prompt = question(tiny_tokenizer)
    before = await ask(engine, prompt, GREEDY)
    other = moved(model)
    sent = await asyncio.to_thread(publish, engine, update(weights(other), 7))
    assert sent == sum(p.nbytes for p in other.parameters())
    after = await ask(engine, prompt, GREEDY)
    assert after.token_ids == greedy_of(other, prompt, GREEDY.max_tokens) != before.token_ids
    assert set(after.versions) == {7} and after.cached_tokens == 0
    close(after.logprobs, logprobs_of(other, prompt, after.token_ids))


def test_an_update_without_effect_is_noticed(engine, model, monkeypatch):
    manage = engine.admin.manage

    def deaf(path, body, **kwargs):
        return None if path == "/collective_rpc" else manage(path, body, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(engine.admin, "manage", deaf)
        with pytest.raises(EngineError, match=r"version 9 was .*other values of \S*norm"):
            publish(engine, update(weights(moved(model)), 9))
    manage("/resume", {})  # it had stayed paused
    engine.probe()
    assert engine.probe().cached_tokens > 0  # what was cached before would be seen
    manage("/update_weight_version", {"new_version": "5"})
    with pytest.raises(EngineError, match="version 5, not 0"):
        engine.probe()


def test_updates_that_would_leave_old_weights_are_refused(engine, model, server):
    some = [("model.layers.0.self_attn.q_proj.weight", torch.zeros(1))]
    with pytest.raises(ConfigError, match=r"26 of 27 are not published .*lora=adapter"):
        publish(engine, update(some, 1))
    engine.probe()  # goes on as it was
    engine = attached(server, model, stale_head=True)
    with pytest.raises(ConfigError, match="keep using the old head"):
        publish(engine, update(weights(model), 1))


async def test_weights_change_between_turns(engine, model):
    """Those in flight end with the old ones, those that wait begin with the new ones."""
    row, turn = array("i", [5, 6]), Sampling(temperature=0.0, max_tokens=300)
    await asyncio.to_thread(publish, engine, update(without_end(model), 1))
    early = asyncio.create_task(ask(engine, row, turn))
    while not await asyncio.to_thread(running, engine):
        assert not early.done()
    change = asyncio.create_task(asyncio.to_thread(publish, engine, update(without_end(model), 2)))
    while not (await asyncio.to_thread(engine.admin.ask, "/is_paused"))["is_paused"]:
        assert not change.done()
    late = asyncio.create_task(ask(engine, row, turn))
    assert (await early).versions == array("i", [1] * 300)
    await change
    assert (await late).versions == array("i", [2] * 300)


async def test_a_pause_loses_nothing(engine, model):
    await asyncio.to_thread(publish, engine, update(without_end(model), 1))
    turn = Sampling(temperature=0.0, max_tokens=300)
    task = asyncio.create_task(ask(engine, array("i", [5, 6]), turn))
    while not await asyncio.to_thread(running, engine):
        assert not task.done()
    await asyncio.to_thread(engine.admin.manage, "/pause?mode=keep&clear_cache=false", {})
    await asyncio.sleep(2)
    assert not task.done()
    await asyncio.to_thread(engine.admin.manage, "/resume", {})
    assert (await task).token_ids == array("i", [0] * 300)


def adapter_of(model, seed):
    """The tuned model, and what publishes its adapter."""
    torch.manual_seed(seed)
    lora = LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=False)
    tuned = get_peft_model(copy.deepcopy(model), lora)

    def send(route):
        tuned.save_pretrained(str(route.adapter_folder))
        return Sent()

    return tuned, Update(seed, lambda: iter(()), send)


async def test_adapters_by_name(server, engine, model, tiny_tokenizer):
    prompt = question(tiny_tokenizer)
    lora = attached(server, model, delivery=Delivery("adapter"))
    assert (await ask(lora, prompt, GREEDY)).token_ids == greedy_of(model, prompt, 24)
    for seed in (1, 2, 3, 4):
        tuned, published = adapter_of(model, seed)
        sent = await asyncio.to_thread(publish, lora, published)
        assert sent > 4 * sum(p.numel() for n, p in tuned.named_parameters() if "lora_" in n)
        turn = await ask(lora, prompt, Sampling(max_tokens=24))
        assert set(turn.versions) == {seed} and turn.cached_tokens == 0
        merged = tuned.merge_and_unload()
        close(turn.logprobs, logprobs_of(merged, prompt, turn.token_ids))
    listed = [m["id"] for m in lora.admin.ask("/v1/models")["data"]]
    assert len(listed) == 3 and listed[-1] == lora.adapters.request_fields()["model"]
    lora.adapters.close()
    with pytest.raises(EngineError, match="status 404"):
        lora.admin.ask(lora.path, {"token_ids": [5], "model": listed[-1]} | NO_PARAMS)
    assert len(lora.admin.ask("/v1/models")["data"]) == 1
    # The base is as it was.
    assert (await ask(engine, prompt, GREEDY)).token_ids == greedy_of(model, prompt, 24)


async def test_seeds(server, engine, model):
    seeded = attached(server, model, uses_seeds=True)
    turn = Sampling(max_tokens=32)
    first, same, other = [
        await ask(seeded, array("i", [5, 6]), turn, seed=seed) for seed in (1, 1, 2)
    ]
    assert first.token_ids == same.token_ids != other.token_ids


def test_logprobs_before_the_temperature_are_noticed(server, model, monkeypatch):
    body = VLLMEngine._body

    def all_tokens(engine, row, sampling, *args):
        return body(engine, row, replace(sampling, top_k=0, temperature=2.0), *args)

    monkeypatch.setattr(VLLMEngine, "_body", all_tokens)
    with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        attached(server, model)


def test_the_server_requires_tokens_that_are_in_no_command_line(server):
    for path in ("/v1/models", "/weight_info", "/metrics", "/version", "/is_paused"):
        for key in ("", "wrong"):
            assert fetch(server.url, path, token=key, timeout=10)[0] == 401, path
    for path in ("/collective_rpc", "/inference/v1/generate", "/v1/load_lora_adapter", "/pause"):
        assert fetch(server.url, path, {}, timeout=10)[0] == 401, path
    assert server.url.startswith("http://127.0.0.1:")
    group = [p for p in Path("/proc").glob("[0-9]*") if in_group(int(p.name), server.pid)]
    assert len(group) >= 3  # the parent watch, the server and its engine
    for process in group:
        for file in ("cmdline", "environ"):
            assert server.token.encode() not in (process / file).read_bytes()


def in_group(pid, group):
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return False


def test_a_python_without_vllm_is_named(untied):
    with pytest.raises(ConfigError, match=r"has no vllm\. Install .* rollout\.python"):
        VLLMLaunch(str(untied)).start()


@pytest.mark.parametrize("lora_rank", [0, RANK])
def test_two_steps(server, engine, untied, tmp_path, monkeypatch, lora_rank):
    """Training on a server that runs already: by weights, and by adapters."""
    monkeypatch.setenv("AGENTRL_ENGINE_TOKEN", server.token)
    config = config_of(
        untied, tmp_path, f"rollout.urls=[{server.url}]", "trainer.total_steps=2",
        "data.batch_size=6", "rollout.n=4", "trainer.save_freq=0", "optim.lr=0.001",
        f"model.lora_rank={lora_rank}",
    )  # fmt: skip
    Trainer(config).run()
    history = read_metrics(tmp_path / "metrics.jsonl")
    assert [step for step, _ in history] == [1, 2]
    for step, metrics in history:
        # The second step's tokens were sampled by the policy that the first published.
        assert metrics["training/rollout_probs_diff_max"] < 1e-4, step
        assert metrics["actor/grad_norm"] > 0
    played = load_trajectories(tmp_path / "trajectories")
    versions = {v for s in played for g in s.trajectory.segments for v in g.versions if v >= 0}
    assert versions == {0, 1}


async def test_the_death_of_a_server_is_reported(engine, model, server):
    """The last test: it ends the server."""
    await asyncio.to_thread(publish, engine, update(without_end(model), 1))
    endless = Sampling(temperature=0.0, max_tokens=2_000)
    task = asyncio.create_task(ask(engine, array("i", [5, 6]), endless))
    while not await asyncio.to_thread(running, engine):
        assert not task.done()
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    with pytest.raises(EngineDead, match=r"vLLM server(?s:.)*ended with code -9"):
        await task
    with pytest.raises(EngineDead):
        await ask(engine, array("i", [5, 6]), GREEDY)
