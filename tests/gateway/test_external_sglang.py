"""External agents against a real SGLang server: rows contain what the policy sampled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.reference_model import logprobs_of
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.config import load_config
from agentrl.demo import TINY_SETTINGS
from agentrl.demo.recipe import CALCULATOR
from agentrl.record import read_metrics
from agentrl.store import load_trajectories
from agentrl.trainer import Trainer
from agentrl.trainer import run as run_module

pytestmark = pytest.mark.sglang

PROMPTS = [
    [
        {"role": "system", "content": "Use the tools. Answer with ####."},
        {"role": "user", "content": f"Compute {k} * {k + 3} with the calculator."},
    ]
    for k in range(3, 9)
]
# It asks twice, then lets two sub-agents work at the same time, and asks again. Its reward is the
# share of the letter e in all answers, which differs from rollout to rollout.
AGENT = f"""
import asyncio, json
import httpx

TOOL = {CALCULATOR!r}

async def run(sample, base_url, api_key, model):
    headers = {{"authorization": f"Bearer {{api_key}}"}}
    texts = []
    async with httpx.AsyncClient(headers=headers, timeout=120) as client:
        async def turn(messages, **fields):
            body = {{"model": model, "messages": messages, "max_tokens": 40, **fields}}
            response = await client.post(base_url + "/chat/completions", json=body)
            assert response.status_code == 200, response.text
            message = response.json()["choices"][0]["message"]
            messages.append(message)
            texts.append(json.dumps(message))
            calls = message.get("tool_calls", ())
            messages += [dict(role="tool", tool_call_id=c["id"], content="12") for c in calls]
            if not calls:
                messages.append(dict(role="user", content="Go on."))

        async def sub_agent(name):
            messages = [dict(role="system", content=f"You are {{name}}."), sample["prompt"][1]]
            for _ in range(2):
                await turn(messages)

        main = list(sample["prompt"])
        await turn(main, tools=[TOOL])
        await turn(main, tools=[TOOL])
        await asyncio.gather(sub_agent("ada"), sub_agent("bob"))
        await turn(main, tools=[TOOL])
    return "".join(texts).count("e") / len("".join(texts))
"""
TURNS = 7
"""The turns of an episode of this agent."""

REWARD = """
from agentrl import reward

@reward("length_of_answer")
def length_of_answer(trajectory) -> float:
    return len(trajectory.assistant_text) / 100
"""
VAL = Path(__file__).parents[2] / "datasets/arithmetic_val.parquet"


@pytest.fixture
def published(monkeypatch):
    """The weights of each policy that a run publishes."""
    weights, real = [], run_module.train_step

    def train_step(parts, state):
        exported = parts.learner.export(published=True)
        weights.append({name: tensor.clone() for name, tensor in exported})
        return real(parts, state)

    monkeypatch.setattr(run_module, "train_step", train_step)
    return weights


def train(folder, server, model, prompts, *overrides):
    """Train for two steps; return the metrics and the trajectories of each step."""
    rows = folder / "rows.jsonl"
    texts = (json.dumps({"prompt": prompt, "agent_name": "external"}) for prompt in prompts)
    rows.write_text("\n".join(texts))
    config = load_config(
        None,
        ["rollout.name=sglang", f"rollout.urls=[{server.url}]", "trainer.device=cpu",
         "data.batch_size=3", "rollout.n=4", "trainer.total_steps=2", "trainer.save_freq=0",
         "trainer.test_freq=0", "optim.lr=0.001", "optim.lr_final=1", "agent.reward=post",
         "rollout.max_trajectory_tokens=2000", *overrides],
        {"data.train": str(rows), "model.path": str(model), "trainer.output": str(folder / "run")},
        preset=TINY_SETTINGS,
    )  # fmt: skip
    Trainer(config).run()
    metrics = [m for step, m in read_metrics(folder / "run/metrics.jsonl") if step]
    stored = (load_trajectories(folder / "run/trajectories", step, "train") for step in (1, 2))
    return metrics, [[s.trajectory for s in scored] for scored in stored]


@pytest.fixture
def keys(sglang_server, monkeypatch):
    """Set the keys of the server, as a run finds them."""
    monkeypatch.setenv("AGENTRL_ENGINE_TOKEN", sglang_server.token)
    monkeypatch.setenv("AGENTRL_ENGINE_ADMIN_TOKEN", sglang_server.admin_token)


def test_what_trains_is_what_the_published_policy_sampled(
    keys, published, sglang_server, tiny_model, tiny_tokenizer, tmp_path
):
    (tmp_path / "agent.py").write_text(AGENT)
    agent = f"agent.python={tmp_path / 'agent.py'}:run"
    metrics, steps = train(tmp_path, sglang_server, tiny_model, PROMPTS, agent)
    check_policies(published, metrics, steps, tiny_model)
    for m in metrics:  # Each episode: the first request, two sub-agents, and four continuations.
        counts = {name: m[f"gateway/{name}"] for name in ("first", "spawn", "clean")}
        assert counts == {"first": 12, "spawn": 24, "clean": 48} and m["rollout/dropped"] == 0
    for t in (t for step in steps for t in step):
        assert (len(t.turns), len(t.segments), t.stop_reason) == (TURNS, 3, "done")
        rows = [[turn for turn in t.turns if turn.segment == i] for i in range(3)]
        assert [len(turns) for turns in rows] == [3, 2, 2]
        threads = [{turn.thread for turn in turns} for turns in rows]
        assert threads[0] == {0} and sorted(threads[1:], key=min) == [{1}, {2}]
        task, question = (m.content for m in t.sample.prompt)
        first, *others = (tiny_tokenizer.decode(s.prompt_ids) for s in t.segments)
        assert first == rendered(tiny_tokenizer, task, question, [CALCULATOR])
        subs = (f"You are {name}." for name in ("ada", "bob"))
        assert sorted(others) == [rendered(tiny_tokenizer, sub, question) for sub in subs]


@pytest.mark.slow
def test_the_turns_of_agents_train_over_the_tokens_that_were_kept(
    keys, sglang_server, tiny_model, tmp_path, shipped_registries
):
    """Also of sub-agents, and of rollout workers that ask the server themselves."""
    (tmp_path / "agent.py").write_text(AGENT)
    metrics, steps = train(
        tmp_path, sglang_server, tiny_model, PROMPTS, "rollout.top_k=8", "rollout.top_p=0.95",
        "rollout.workers=2", f"agent.python={tmp_path / 'agent.py'}:run",
    )  # fmt: skip
    for m in metrics:
        assert m["rollout_corr/logprob_diff_max"] < 5e-5 and m["rollout/dropped"] == 0
    segments = [segment for step in steps for t in step for segment in t.segments]
    assert len(segments) == 3 * 12 * 2
    for segment in segments:
        assert [c > 0 for c in segment.kept_counts] == [m == 1 for m in segment.response_mask]
    assert max(max(segment.kept_counts) for segment in segments) <= 8


@pytest.mark.slow
def test_the_openai_package_in_processes(
    keys, published, sglang_server, tiny_model, packages_python, tmp_path
):
    """Its answers are streamed, and it runs the calls of the tiny model."""
    client = Path(__file__).parent / "packages/openai_client.py"
    (tmp_path / "rewards.py").write_text(REWARD)
    metrics, steps = train(
        tmp_path, sglang_server, tiny_model, [prompt[1:] for prompt in PROMPTS],
        f"agent.command='{packages_python} {client} stream'", "agent.slots=2",
        "agent.reward=grader", f"files=[{tmp_path / 'rewards.py'}]",
        "reward.function=length_of_answer",
    )  # fmt: skip
    check_policies(published, metrics, steps, tiny_model)
    assert sum(map(len, steps)) > 12 and all(len(t.segments) == 1 for s in steps for t in s)
    assert any(len(t.turns) > 1 for step in steps for t in step)


@pytest.mark.slow
def test_served_answers_are_those_of_an_evaluation(
    keys, sglang_server, tiny_model, shipped_registries
):
    words = [
        "serve", "--model", str(tiny_model), "--check", "12", f"data.val={VAL}",
        "files=[shelf:calculator]", "rollout.name=sglang", f"rollout.urls=[{sglang_server.url}]",
    ]  # fmt: skip
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.exception or result.output
    assert result.output.splitlines()[-1].startswith("12 of 12 rows equal (")


def rendered(tokenizer, system, question, tools=None):
    """Return a prompt as the chat template itself writes it."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False
    )


def check_policies(published, metrics, steps, folder):
    """Compare all rows with forwards of transformers, with the weights that were published."""
    for m in metrics:
        assert m["rollout_corr/logprob_diff_max"] < 1e-4
        assert m["canary/mismatch"] < 1e-5 < 1e-3 < m["canary/drift"]
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    for version, (weights, step) in enumerate(zip(published, steps, strict=True)):
        policy.load_state_dict(weights, strict=False)  # Tied weights are published once.
        assert len(step) == 12 - metrics[version]["rollout/dropped"]
        for t in step:
            for i, segment in enumerate(t.segments):
                turns = [turn for turn in t.turns if turn.segment == i]
                for turn in turns:  # The server read exactly the row before the turn.
                    assert turn.prompt_tokens == len(segment.prompt_ids) + turn.start
                mask = torch.zeros(len(segment.response_ids), dtype=torch.bool)
                for turn in turns:
                    mask[turn.start : turn.end] = True
                assert segment.response_mask.tolist() == mask.int().tolist()
                versions = torch.where(mask, version, -1)
                assert segment.versions.tolist() == versions.tolist()
                expected = logprobs_of(policy, segment.prompt_ids, segment.response_ids)
                logprobs = torch.tensor(segment.logprobs, dtype=torch.float64)
                torch.testing.assert_close(
                    logprobs, torch.where(mask, expected, 0.0), atol=1e-4, rtol=0
                )
