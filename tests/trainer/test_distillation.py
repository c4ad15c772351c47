"""Runs with a teacher: the student reaches it without a reward, and every token is its own."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agentrl.chat import load_tokenizer
from agentrl.cli import main
from agentrl.config import load_config
from agentrl.demo import TINY_SETTINGS
from agentrl.engine.local import LocalEngine
from agentrl.errors import ConfigError, DataError, EngineError, RunStopped, UserError
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
    await ep.generate(stop=tuple("aeinorst "))
    await ep.spawn([Message("user", "Help.")]).generate(stop=tuple("aeinorst "))
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
    def make(output: Path, *keys: str, rows: Path | None = None):
        base = [
            "algorithm.name=opd", f"trainer.total_steps={STEPS}", "trainer.save_freq=1",
            "data.batch_size=2", "rollout.n=2", "rollout.max_turn_tokens=40", "optim.lr=0.01",
            "trainer.device=cpu", "tools.transport=in_process", "reward.function=letters_opd",
            f"teacher.model={home}/a",
        ]  # fmt: skip
        flags = {
            "data.train": str(rows or home / "rows.jsonl"),
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
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_bad_student_reaches_its_teacher_without_a_reward(tiny_model, tmp_path):
    """With tools, over several turns; the rewards are only measured."""
    student = noisy(tiny_model, tmp_path / "student", 0.2)
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
    assert kls[0] > 0.25 and sum(kls[-4:]) / 4 < 0.3 * kls[0]
    assert sum(rewards[-8:]) / 8 > sum(rewards[:2]) / 2 + 0.08
    assert all(m["tool_call_counts/mean"] > 0 for m in metrics)


# --- each token ----------------------------------------------------------------------------------


def test_each_token_is_scored_in_the_context_that_the_teacher_reads(train, home, random_model):
    """Teachers by data source, a prompt with the row's answer, observed tokens, advantages."""
    prompt = "{prompt} Hint: {hint[text]}, {ground_truth}"
    folder = train(
        "trainer.total_steps=1", f"teacher.model={{a: {home}/a, b: {home}/b}}",
        f"teacher.prompt='{prompt}'", "teacher.weight=0.5", "teacher.clip=0.02",
        "data.batch_size=6", "rollout.n=1",
    )  # fmt: skip
    run = Run(folder)
    learned = run.store.read_learned(1).to_pylist()
    tokenizer = load_tokenizer(random_model)
    rows = {(r["episode_id"], r["segment"]): r for r in learned}
    kls, observed = [], 0
    for scored in load_trajectories(folder / "trajectories", 1, "train"):
        trajectory, i = scored.trajectory, int(scored.trajectory.sample.ground_truth)
        teacher = home / trajectory.sample.data_source
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
            expected = 0.5 * max(-0.02, min(0.02, ratio))
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


@pytest.mark.slow
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


# --- servers -------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """A server with SGLang's API that scores rows by a model, and fails when it is told to."""

    daemon_threads = True

    def __init__(self, folder: Path):
        self.folder, self.failures, self.scored = folder, 0, 0
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, body: dict) -> tuple[int, dict]:
        if path == "/model_info":
            folder = str(self.folder)
            return 200, {
                "weight_version": "x", "model_path": folder, "tokenizer_path": folder,
            }  # fmt: skip
        if path == "/server_info":
            return 200, {"max_req_input_len": 512}
        ids = body["input_ids"]
        meta = {"finish_reason": {"type": "length"}, "prompt_tokens": len(ids), "cached_tokens": 0}
        meta |= {"weight_version": "x", "completion_tokens": 1}
        if body["sampling_params"]["max_new_tokens"]:
            return 200, {"meta_info": meta | {"output_token_logprobs": [[-1.0, 5, None]]}}
        if self.failures:
            self.failures -= 1
            return 500, {"error": {"message": "out of memory"}}
        self.scored += 1
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([ids])).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        last = self.model.config.vocab_size - 1  # SGLang reports it as 0
        shown = [i if i < last else 0 for i in ids]
        entries = [[x, i, None] for x, i in zip(logprobs.tolist(), shown[1:], strict=True)]
        return 200, {
            "meta_info": meta | {"input_token_logprobs": [[None, shown[0], None], *entries]}
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"] or 0)) or "{}")
        status, answer = self.server.answer(self.path, body)  # type: ignore[attr-defined]
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def server(home, monkeypatch) -> Iterator[Server]:
    monkeypatch.setattr(teacher_module, "PAUSES", (0.01, 0.02, 0.03))
    server = Server(home / "a")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_server_that_fails_is_asked_again_and_scores_as_the_learner_does(train, server):
    held = Run(train("trainer.total_steps=1", output="held")).store.read_learned(1)
    server.failures = 3
    folder = train("trainer.total_steps=1", f"teacher.model={server.url}", output="served")
    served = Run(folder).store.read_learned(1)
    assert server.failures == 0 and server.scored == 4
    for name in ("teacher_logprobs", "advantages"):
        for ours, theirs in zip(*(t[name].to_pylist() for t in (held, served)), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
    result = replay(Replayer(Run(folder)), 1, say=lambda _: None)
    assert not result.differences, "the recorded logprobs are taken"
    shutil.rmtree(folder / "learned")
    with pytest.raises(UserError, match="the logprobs of its teacher are not stored"):
        replay(Replayer(Run(folder)), 1, say=lambda _: None)


def test_a_server_that_stays_away_ends_the_run_and_nothing_is_trained(train, server, tmp_path):
    whole = train(f"teacher.model={server.url}", output="whole")
    taken = LocalEngine.sleep

    def fail_in_the_second_step(self) -> None:
        taken(self)
        if len(find_steps(tmp_path / "run")) == 1:
            server.failures = 10**6

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher_module, "PAUSES", (0.0, 0.1, 0.1))
        patch.setattr(LocalEngine, "sleep", fail_in_the_second_step)
        with pytest.raises(EngineError, match=f"the teacher {server.url} failed 4 times: .*out of"):
            train(f"teacher.model={server.url}")
    assert find_steps(tmp_path / "run") == [1]
    server.failures = 0
    train(f"teacher.model={server.url}")
    assert weights_of(tmp_path / "run") == weights_of(whole)
    assert metrics_of(tmp_path / "run") == metrics_of(whole)


@pytest.mark.parametrize("status", [None, 401])
def test_a_server_that_does_not_answer_at_the_start_is_named(train, server, status):
    url = server.url
    if status:
        server.answer = lambda path, body: (status, {"error": "no key"})
    else:
        server.shutdown()
        server.server_close()
    with pytest.raises(EngineError, match=rf"teacher\.model={url}: .*AGENTRL_TEACHER_TOKEN"):
        train(f"teacher.model={url}")


# --- what is refused -----------------------------------------------------------------------------


@contextmanager
def changed_tokenizer(source: Path, folder: Path, old: str, new: str | None) -> Iterator[Path]:
    """A copy of a model whose token `old` is `new`, or is missing."""
    shutil.copytree(source, folder)
    data = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    vocabulary[new] = vocabulary.pop(old)
    data["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(data))
    yield folder


@pytest.mark.parametrize("is_server", [False, True])
def test_another_tokenizer_is_refused_with_the_first_token(train, home, tmp_path, is_server):
    with changed_tokenizer(home / "a", tmp_path / "t", "Q", "QQQQ") as folder:
        teacher = str(folder)
        number = load_tokenizer(folder).get_vocab()["QQQQ"]
        if is_server:
            server = Server(folder)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            teacher = server.url
        with pytest.raises(ConfigError) as e:
            train(f"teacher.model={teacher}")
    message = str(e.value)
    assert f"teacher.model={teacher} has another tokenizer than model.path=" in message
    assert f"token {number} is 'QQQQ', and the policy's is 'Q'" in message


def test_a_teacher_of_too_short_rows_is_refused(train, home, tmp_path):
    shutil.copytree(home / "a", tmp_path / "short")
    config = json.loads((tmp_path / "short/config.json").read_text())
    (tmp_path / "short/config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 99})
    )
    with pytest.raises(ConfigError, match="accepts 99 tokens, but a row may have 512"):
        train(f"teacher.model={tmp_path}/short")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["teacher.model={a: x}"], r"no teacher for rows of data_source 'b'. It has one for 'a'"),
        (
            ["teacher.prompt='{prompt} {solution}'"],
            r"row 0 has no field 'solution'. Fields: hint, ground_truth, data_source, prompt",
        ),
        (["teacher.prompt='{prompt} {hint[x]}'"], r"row 0: KeyError\('x'\)"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_a_model_is_loaded(train, keys, message):
    with pytest.raises(DataError, match=message):
        train(*keys)


def test_a_conversation_of_its_own_has_no_place_for_the_prompt(config_of, home, tmp_path):
    rows = [json.loads(line) for line in (home / "rows.jsonl").read_text().splitlines()]
    rows = [row | {"agent_name": "spawns_opd", "tools": []} for row in rows]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    Trainer(config_of(tmp_path / "without", "trainer.total_steps=1", rows=file)).run()
    tokens = Run(tmp_path / "without").store.read_learned(1)["teacher_logprobs"].to_pylist()
    assert len(tokens) == 8 and all(any(x is not None for x in row) for row in tokens)
    with pytest.raises(RunStopped, match="does not begin with the prompt of row"):
        Trainer(config_of(tmp_path / "with", "teacher.prompt='{prompt} {hint}'", rows=file)).run()


def test_check_describes_the_teacher(home, random_model, capsys):
    with pytest.raises(SystemExit) as e:
        main([
            "check", "--dataset", f"{home}/rows.jsonl", "--model", str(random_model), "--file",
            f"{home}/env.py", "algorithm.name=opd", "trainer.device=cpu",
            "reward.function=letters_opd",
            f"teacher.model={{a: {home}/a, b: policy}}", "teacher.prompt='{prompt} {ground_truth}'",
        ])  # fmt: skip
    assert e.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"teacher of rows of data_source a: {home}/a (held by the learner); weight 1" in out
    assert "teacher of rows of data_source b: the present policy" in out
    assert "it reads the last user message as '{prompt} {ground_truth}'" in out
    assert "all checks passed" in out
