"""Training on answers that were served, with the scores of their users."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from contextlib import closing
from dataclasses import replace

import httpx
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from agentrl.agent_loops import agent_loop
from agentrl.agent_loops.attempt import Runtime, make_template
from agentrl.agent_loops.play import play
from agentrl.chat import load_tokenizer
from agentrl.chat.tokenizer import hash_vocabulary
from agentrl.cli import app
from agentrl.cli.options import read_config
from agentrl.config import Config, load_config
from agentrl.data.recorded import (
    RecordedAnswer,
    Recorder,
    ScoredAnswers,
    open_recorded,
    read_records,
)
from agentrl.engine.base import Sampling
from agentrl.engine.local import LocalEngine
from agentrl.errors import ConfigError, DataError, RunStopped
from agentrl.gateway.serve import Gateway, create_app
from agentrl.gateway.session import Session
from agentrl.gateway.stateless import sessions_of_keys, without_budgets
from agentrl.learner.algorithms import make_targets
from agentrl.learner.batch import collate
from agentrl.learner.learner import Learner
from agentrl.record import read_metrics
from agentrl.store import TrajectoryStore
from agentrl.tools import LocalToolbox
from agentrl.trainer import Trainer
from agentrl.trainer.recorded import make_group
from agentrl.trajectory import Generation, Message, Sample, float_array, token_array

POLICY = {"model": "m", "run": "", "step": 0}
SETTINGS = [
    "trainer.device=cpu", "data.batch_size=2", "rollout.n=1", "algorithm.name=reinforce_plus_plus",
    "trainer.max_staleness=3", "tools.transport=in_process", "trainer.save_freq=1",
    "trainer.keep=0", "optim.lr=1e-3",
]  # fmt: skip


def answer_of(learner, id, *, parent=None, step=0, noise=0.0, observed=(9, 4), **sampling):
    """Return an answer of random tokens, with the logprobs of the learner's weights."""
    rng = random.Random(id)
    draw = lambda n: token_array([rng.randrange(5, 60) for _ in range(n)])  # noqa: E731
    prompt = draw(5)
    if parent:
        prompt = parent.prompt + parent.sampled + token_array(observed)
    sampled = draw(rng.randint(2, 5))
    logprobs = learner.ranks.score([*prompt, *sampled])[len(prompt) - 1 :]
    return RecordedAnswer(
        id, parent.id if parent else "", "u", step, prompt, sampled,
        float_array([x + noise for x in logprobs.tolist()]),
        Sampling(**sampling).as_dict(), [Message("user", "Q")], f"text of {id}", "stop", 1.0,
    )  # fmt: skip


def record(folder, answers, scores):
    """Record answers, and scores by the ids of answers."""
    with closing(Recorder(folder, POLICY)) as recorder:
        for answer in answers:
            recorder.add(answer)
        for id, score in scores.items():
            assert recorder.score(id, "u", score).result()[1]


@pytest.fixture(scope="module", autouse=True)
def served_policy(random_model):
    tokenizer = load_tokenizer(random_model)
    POLICY["vocabulary"] = hash_vocabulary(tokenizer.backend_tokenizer.to_str())


@pytest.fixture(scope="module")
def learner(random_model):
    return Learner(str(random_model), Config(), total_steps=1)


def configured(model, folder, output, *overrides):
    flags = {
        "model.path": str(model),
        "data.train": f"recorded:{folder}",
        "trainer.output": str(output),
    }
    return load_config(None, [*SETTINGS, *overrides], flags)


def weights(run, step):
    state = {}
    for file in sorted((run / f"global_step_{step:08d}").rglob("*.safetensors")):
        state |= {f"{file.name}/{k}": v for k, v in load_file(file).items()}
    return state


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def trained(run):
    """Return the episodes of each step, with the number of their sampled tokens."""
    stored = TrajectoryStore(run / "trajectories").read(split="train")
    return [(s.step, s.scored.trajectory.episode_id, s.scored.reward,
             s.scored.trajectory.sampled_tokens) for s in stored]  # fmt: skip


def verified(run):
    """Return the mean difference of the logprobs of each answer, by its id."""
    return {k.split()[0]: d for k, d in json.loads((run / "verified.json").read_text()).items()}


# -- from records to rollouts ----------------------------------------------------------------------


class Replaying:
    """An engine that samples recorded answers."""

    is_concurrent = False
    max_length = 10_000

    def __init__(self, answers):
        self._answers = answers

    def begin(self, episode_id, awaited=True): ...
    def end(self, episode_id): ...

    async def generate(self, prompt_ids, sampling, **others):
        a = next(a for a in self._answers if a.prompt == prompt_ids)
        versions = token_array([a.step] * len(a.sampled))
        return Generation(a.sampled, a.logprobs, versions, "stop", len(prompt_ids))


def converse(folder, model, conversations):
    """Serve a model, and have conversations of several turns. Return the records."""
    config, tokenizer = without_budgets(Config()), load_tokenizer(model)

    async def run(client, path="/v1/chat/completions"):
        for words in conversations:
            messages = []
            for word in words:
                messages.append({"role": "user", "content": word})
                body = {"messages": messages, "max_tokens": 6}
                answer = (await client.post(path, json=body)).json()
                messages.append(answer["choices"][0]["message"])
            score = {"id": answer["id"], "score": len(words[-1])}
            assert (await client.post("/v1/feedback", json=score)).status_code == 200

    async def serve(engine, recorder):
        runtime = Runtime(engine, make_template(tokenizer, config), LocalToolbox(), config)
        transport = httpx.ASGITransport(create_app(sessions_of_keys("k", runtime, 1.0, recorder)))
        headers = {"authorization": "Bearer k"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", headers=headers
        ) as client:
            await run(client)

    with (
        closing(LocalEngine.load(model, tokenizer)) as engine,
        closing(Recorder(folder, POLICY)) as recorder,
    ):
        asyncio.run(serve(engine, recorder))
    return read_records(folder)


def test_the_gradient_is_that_of_played_episodes(random_model, tmp_path):
    talks = [["Hi", "Go on", "x"], ["How many?", "Sure"], ["Hi", "No"]]
    records = converse(tmp_path, random_model, talks)
    scored = records.scored()
    assert [len(s.answers) for s in scored] == [3, 2, 2]
    sample = Sample("s", (Message("user", "Hi"),), agent_name="replays")
    recorded = [make_group(sample, s, s.answers) for s in scored]

    def replay(s):
        @agent_loop("replays", uses_tools=False, uses_interaction=False)
        async def replays(ep):
            session = Session(ep)
            async with Gateway().session(session) as (url, key):
                headers = {"authorization": f"Bearer {key}"}
                async with httpx.AsyncClient(base_url=url, headers=headers) as client:
                    messages = []
                    for answer in s.answers:
                        messages += [m.as_dict() for m in answer.messages]
                        body = {"messages": messages}
                        reply = await client.post("/chat/completions", json=body)
                        messages.append(reply.json()["choices"][0]["message"])
            await session.close()

        config = Config()
        return play(sample, Replaying(s.answers), load_tokenizer(random_model), config=config)

    played = [
        replace(g, scored=(replace(g.scored[0], trajectory=replay(s)),))
        for g, s in zip(recorded, scored, strict=True)
    ]
    for a, b in zip(recorded, played, strict=True):
        ours, theirs = a.scored[0].trajectory, b.scored[0].trajectory
        assert ours.segments == theirs.segments and len(ours.segments) == 1
        assert [(t.start, t.end) for t in ours.turns] == [(t.start, t.end) for t in theirs.turns]
        assert ours.final_text == theirs.final_text
        assert [m.as_dict() for m in ours.messages] == [m.as_dict() for m in theirs.messages]
    config = Config.model_validate({"algorithm": {"name": "reinforce_plus_plus"}})
    learner = Learner(str(random_model), config, total_steps=1)
    gradients = []
    for groups in (recorded, played):
        batch = collate(groups)
        targets = make_targets(batch, config, None, None, None)
        gradients.append(learner.gradient(batch, targets))
    assert equal(*gradients) and any(g.abs().max() > 0 for g in gradients[0].values())


def test_each_token_trains_once_with_the_first_score(learner, tmp_path):
    a = answer_of(learner, "a")
    b, c = (answer_of(learner, id, parent=a) for id in "bc")
    d = answer_of(learner, "d", parent=c)
    record(tmp_path, [a, b, c, d], {"b": 1, "d": -1, "a": 0.5, "c": 2})
    scored = read_records(tmp_path).scored()
    assert [(s.id, s.score, [x.id for x in s.answers]) for s in scored] == [
        ("b", 1, ["a", "b"]), ("d", -1, ["c", "d"]), ("a", 0.5, []), ("c", 2, [])
    ]  # fmt: skip
    assert [m.content for m in scored[1].messages if m.role == "assistant"] == [
        "text of a", "text of c", "text of d"
    ]  # fmt: skip
    [row] = make_group(Sample("s", ()), scored[1], scored[1].answers).scored[0].trajectory.segments
    assert row.prompt_ids == c.prompt and sum(row.response_mask) == len(c.sampled + d.sampled)


def test_turns_that_do_not_train_are_context(learner):
    a = answer_of(learner, "a")
    b = answer_of(learner, "b", parent=a)
    c = answer_of(learner, "c", parent=b)
    other = replace(c, id="other", prompt=token_array([7, 8]) + c.prompt)
    scored = read_of([a, b, c, other])
    group = make_group(Sample("s", ()), scored, [a, c, other])
    one, two = group.scored[0].trajectory.segments
    assert one.response_ids[: len(a.sampled)] == a.sampled and two.prompt_ids == other.prompt
    between = len(one.response_ids) - len(a.sampled) - len(c.sampled)
    mask = [1] * len(a.sampled) + [0] * between + [1] * len(c.sampled)
    assert [*one.response_mask] == mask and between == len(b.sampled) + 4
    assert [v == 0 for v in one.versions] == [bool(m) for m in mask]
    assert [*one.logprobs[-len(c.sampled) :]] == [*c.logprobs]


def read_of(answers):
    indices = {a.id: i for i, a in enumerate(answers)}
    messages = [Message("assistant", a.text) for a in answers]
    return ScoredAnswers(answers[-1].id, 1.0, answers, messages, indices)


# -- runs ------------------------------------------------------------------------------------------


def test_only_what_the_recorded_version_sampled_trains(learner, random_model, tmp_path, capsys):
    good = [answer_of(learner, f"good{i}") for i in range(3)]
    bad = [
        answer_of(learner, "tampered", noise=0.1),
        answer_of(learner, "cold", temperature=0.5),
        answer_of(learner, "greedy", temperature=0.0),
        answer_of(learner, "nucleus", top_p=0.9),
        answer_of(learner, "topk", top_k=5),
        answer_of(learner, "newer", step=1),
        replace(good[0], id="odd", sampled=token_array([10**6] * len(good[0].sampled))),
    ]
    child = answer_of(learner, "child", parent=bad[1])
    unscored = answer_of(learner, "unscored")
    answers = [good[0], *bad, child, unscored, *good[1:]]
    ids = [a.id for a in answers if a is not unscored]
    record(tmp_path / "served", answers, {id: i % 2 for i, id in enumerate(ids)})
    run = tmp_path / "run"
    Trainer(configured(random_model, tmp_path / "served", run)).run()
    names = [id for _, id, _, _ in trained(run)]
    assert names == ["good0", "child", "good1", "good2"]
    assert trained(run)[1][3] == len(child.sampled)  # The turn before it is context.
    out = capsys.readouterr()
    text = out.out + out.err
    assert "1 answer refused" in text and "tampered (0.1)" in text
    assert "4 scores trained; 0 left, and a step takes 2" in text
    for line in (
        "left out: 4 answers sampled with other parameters than those of training",
        "left out: 1 answer of a version without a checkpoint",
        "left out: 1 answer with other logprobs than those of their version",
        "left out: 1 answer too long, or with tokens that the model does not have",
    ):
        assert line in text
    last = read_metrics(run / "metrics.jsonl")[-1][1]
    assert last["recorded/other_sampling"] == 4 and last["recorded/other_logprobs"] == 1
    assert last["staleness/max"] == 1


def test_a_run_resumes_exactly_and_takes_later_scores(learner, random_model, tmp_path, capsys):
    answers = [answer_of(learner, str(i)) for i in range(9)]
    served, age = tmp_path / "served", "trainer.max_staleness=9"
    record(served, answers[:4], {str(i): i % 2 for i in range(4)})
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    Trainer(configured(random_model, served, parts, age, "trainer.total_steps=1")).run()
    record(served, answers[4:], {str(i): i % 2 for i in range(4, 9)})
    Trainer(configured(random_model, served, parts, age)).run()
    Trainer(configured(random_model, served, whole, age)).run()
    assert trained(whole) == trained(parts) and len(trained(whole)) == 8
    assert equal(weights(whole, 4), weights(parts, 4))
    checked = verified(parts)
    assert checked.keys() == {str(i) for i in range(9)} and max(checked.values()) < 1e-4
    # What was verified is not verified again, unless somebody changes it.
    text = (served / "answers.jsonl").read_text()
    changed = replace(answers[8], logprobs=float_array([x - 0.1 for x in answers[8].logprobs]))
    text = text.replace(json.dumps([*answers[8].logprobs], separators=(",", ":")),
                        json.dumps([*changed.logprobs], separators=(",", ":")))  # fmt: skip
    assert text != (served / "answers.jsonl").read_text()
    (served / "answers.jsonl").write_text(text)
    # The same command prints the result, and trains no token again.
    Trainer(configured(random_model, served, parts, age)).run()
    assert len(trained(parts)) == 8 and "1 answer refused" in "".join(capsys.readouterr())


def test_answers_of_older_versions_need_their_checkpoint_and_age(learner, random_model, tmp_path):
    first, base = tmp_path / "first", tmp_path / "base"
    record(base, [answer_of(learner, str(i)) for i in range(4)], {str(i): i % 2 for i in range(4)})
    # Versions differ by more than the limit of 0.01 nats.
    Trainer(configured(random_model, base, first, "optim.lr=0.05")).run()

    def of_step(step, *ids):
        own = Learner(str(random_model), configured(random_model, base, first), total_steps=1)
        own.ranks.load(first / f"global_step_{step:08d}")
        return [answer_of(own, id, step=step) for id in ids]

    served = tmp_path / "served"
    answers = [answer_of(learner, "v0"), *of_step(1, "v1"), *of_step(2, "v2", "w2", "x2")]
    lying = replace(answers[1], id="lying", step=2)  # Version 1 sampled it.
    record(served, [*answers, lying], {a.id: i % 2 for i, a in enumerate([lying, *answers])})
    resume = f"trainer.resume={first}"
    fork = tmp_path / "fork"
    Trainer(configured(random_model, served, fork, resume)).run()
    assert [row[:2] for row in trained(fork)] == [(3, "v0"), (3, "v1"), (4, "v2"), (4, "w2")]
    checked = verified(fork)
    assert checked.pop("lying") > 0.01 > 1e-4 > max(checked.values()) and len(checked) == 5

    young = tmp_path / "young"
    Trainer(configured(random_model, served, young, resume, "trainer.max_staleness=1")).run()
    assert [row[:2] for row in trained(young)] == [(3, "v1"), (3, "v2"), (4, "w2"), (4, "x2")]

    shutil.rmtree(first / "global_step_00000001")
    without = tmp_path / "without"
    Trainer(configured(random_model, served, without, resume)).run()
    assert [row[1] for row in trained(without)] == ["v0", "v2", "w2", "x2"]
    metrics = read_metrics(without / "metrics.jsonl")[-1][1]
    assert metrics["recorded/no_checkpoint"] == 1 and metrics["recorded/other_logprobs"] == 1


def test_a_run_without_a_usable_step_says_why(learner, random_model, tmp_path):
    served = tmp_path / "served"
    with pytest.raises(DataError, match=r"no recorded answers in .*agentrl serve RUN --record"):
        open_recorded(f"recorded:{served}")
    cold = [answer_of(learner, id, temperature=0.5) for id in "ab"]
    record(served, [*cold, answer_of(learner, "c")], {})
    with pytest.raises(DataError, match="no answer of 3 has a score"):
        Trainer(configured(random_model, served, tmp_path / "run"))
    record(served, [], dict.fromkeys("abc", 1.0))
    with pytest.raises(
        RunStopped, match=r"no step: .*0 scores trained; 1 left(.|\n)*2 answers sam"
    ):
        Trainer(configured(random_model, served, tmp_path / "run")).run()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.name=grpo", "Set algorithm.name=reinforce_plus_plus"),
        ("algorithm.name=remax", "compares several answers to a prompt"),
        ("algorithm.name=turn_rloo", "compares several answers to a prompt"),
        ("algorithm.tis_cap=0", "which only importance weights correct"),
        ("rollout.n=4", "has one answer to each prompt. Set rollout.n=1"),
        ("algorithm.filter_groups=true", "is not played"),
        ("data.val=recorded:other", "cannot be played"),
    ],
)
def test_settings_that_recorded_answers_cannot_have(random_model, tmp_path, override, message):
    with pytest.raises(ConfigError) as error:
        configured(random_model, tmp_path, tmp_path / "run", override)
    assert message in str(error.value) and "rollout.n to 2" not in str(error.value)


def test_a_served_run_that_is_gone_is_named(learner, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(POLICY, "run", str(tmp_path / "gone"))
        patch.setitem(POLICY, "model", str(tmp_path / "gone"))
        record(tmp_path / "served", [answer_of(learner, "a")], {"a": 1})
    with pytest.raises(ConfigError, match=f"no model folder at {tmp_path}/gone"):
        read_config(None, [], recorded=tmp_path / "served")


@pytest.mark.parametrize(
    "rows", ["data.train=recorded:a", "data.train=[recorded:a, b.jsonl]", "data.val=recorded:a"]
)
def test_a_mistake_is_not_reported_as_missing_rows(random_model, rows):
    with pytest.raises(ConfigError) as error:
        read_config(None, [rows, f"model.path={random_model}"])
    assert "recorded:" in str(error.value) and "no rows" not in str(error.value)


def test_answers_of_another_vocabulary_are_refused(learner, random_model, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(POLICY, "vocabulary", "other")
        record(tmp_path / "served", [answer_of(learner, "a")], {"a": 1})
    with pytest.raises(ConfigError, match="have the tokens of m, which are not those of"):
        Trainer(configured(random_model, tmp_path / "served", tmp_path / "run")).run()


def test_a_run_validates_other_rows(learner, random_model, tmp_path):
    answers = [answer_of(learner, str(i)) for i in range(4)]
    record(tmp_path / "served", answers, {str(i): i % 2 for i in range(4)})
    row = {"prompt": "Hi", "data_source": "openai/gsm8k", "ground_truth": "1"}
    (tmp_path / "val.jsonl").write_text(json.dumps(row))
    overrides = [f"data.val={tmp_path / 'val.jsonl'}", "rollout.max_turn_tokens=5"]
    Trainer(configured(random_model, tmp_path / "served", tmp_path / "run", *overrides)).run()
    steps = [step for step, data in read_metrics(tmp_path / "run/metrics.jsonl") if any(
        name.startswith("val/") for name in data)]  # fmt: skip
    assert steps == [0, 2]


def test_from_starts_at_the_policy_that_was_served_last(
    learner, random_model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    served = tmp_path / "served"
    policies = [
        POLICY | {"model": str(random_model)},
        POLICY | {"model": "runs/a", "run": str(tmp_path / "runs/a"), "step": 3},
        POLICY | {"model": "runs/served", "run": str(tmp_path / "runs/served"), "step": 5},
    ]
    (tmp_path / "runs/a").mkdir(parents=True)
    text = f"model: {{path: {random_model}}}\nalgorithm: {{name: gspo}}\nrollout: {{n: 4}}\n"
    (tmp_path / "runs/a/config.yaml").write_text(text + "trainer: {total_steps: 9, output: runs/a}")
    starts = []
    for policy in policies:
        with closing(Recorder(served, policy)) as recorder:
            if policy is policies[0]:
                recorder.add(answer_of(learner, "a"))
                recorder.score("a", "u", 1.0)
        flags = (
            {} if policy["run"] != str(tmp_path / "runs/served") else {"model": str(random_model)}
        )
        config = read_config(None, ["optim.lr=1e-4"], recorded=served, **flags)
        starts.append((config.trainer.resume, config.trainer.output, config.model.path))
        assert config.data.train == f"recorded:{served}" and config.rollout.n == 1
        assert config.algorithm.adv_estimator == "reinforce_plus_plus"
        assert config.algorithm.clip_high == 0.2 and config.trainer.total_steps == 0
    path, output = str(random_model), "runs/served"
    assert starts == [
        ("auto", output, path), (str(tmp_path / "runs/a"), output, path), ("auto", output, path)
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="--dataset: name one of them"):
        read_config(None, [], recorded=served, dataset=["x.jsonl"])


def test_recording_needs_keys(tiny_model, tmp_path, monkeypatch):
    command = ["serve", str(tiny_model), "--record", str(tmp_path / "served")]
    assert "needs --token-env" in str(CliRunner().invoke(app, command).exception)
    monkeypatch.setenv("KEYS", " , ")
    error = CliRunner().invoke(app, [*command, "--token-env", "KEYS"]).exception
    assert "empty or not set" in str(error) and not (tmp_path / "served").exists()
