# ruff: noqa: E501  (a table reads best one case a line)
"""Mistakes of users: each gives one clear message with the value and the fix, within seconds."""

import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

GOOD = {
    "prompt": [{"role": "user", "content": "How much is 3*4?"}],
    "agent_name": "tool_agent",
    "tools": ["calculator"],
    "data_source": "openai/gsm8k",
    "ground_truth": "12",
}


class Case:
    """Builds a command line in a folder of its own."""

    def __init__(self, folder: Path, model: Path):
        self.folder, self.model = folder, model

    def file(self, name: str, text: str | bytes) -> str:
        path = self.folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    def rows(self, *rows, name="rows.jsonl") -> str:
        return self.file(name, "\n".join(json.dumps(r) for r in rows))

    def train(self, *args, row=None, dataset=None, model=None, files=("shelf:calculator",)):
        dataset = dataset or self.rows({**GOOD, **(row or {})})
        words = ["train", "--dataset", dataset, "--model", str(model or self.model)]
        words += ["--output", str(self.folder / "run")]
        for f in files:
            words += ["-f", f]
        return [*words, "trainer.total_steps=1", "rollout.n=2", "data.batch_size=1", *args]


def imports_a_syntax_error(case):
    case.file("helper_with_typo.py", "x = 1\ndef f(:")
    path = f"import sys\nsys.path.insert(0, {str(case.folder)!r})\n"
    return case.train(files=[case.file("user.py", path + "import helper_with_typo")])


def without(key):
    return {k: v for k, v in GOOD.items() if k != key}


def no_template(case):
    folder = case.folder / "model"
    shutil.copytree(case.model, folder)
    (folder / "chat_template.jinja").unlink()
    return folder


def rewriting_template(case):
    folder = case.folder / "model"
    shutil.copytree(case.model, folder)
    template = (folder / "chat_template.jinja").read_text()
    edited = template.replace(
        "message.content + '<|im_end|>", "message.content | replace('é', 'e') + '<|im_end|>"
    )
    assert edited != template
    (folder / "chat_template.jinja").write_text(edited)
    return folder


def busy_port(case):
    case.socket = socket.socket()
    case.socket.bind(("127.0.0.1", 0))
    case.socket.listen()
    port = case.socket.getsockname()[1]
    return ["tools", "serve", "shelf:calculator", "--port", str(port)]


def locked(case):
    from agentrl.trainer.checkpoint import run_lock

    case.lock = run_lock(case.folder / "run")
    case.lock.__enter__()
    return case.train()


RAISES = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    return {}['x']\n"
)
CASES = {
    "misspelt key": (lambda c: c.train("rollout.temprature=1"), ["rollout.temprature", "rollout.temperature"]),
    "output is a URL": (lambda c: [*c.train(), "--output", "s3://b/run"], ["'s3://b/run' is a URL"]),
    "a path option is a URL": (lambda c: ["generate", "--model", str(c.model), "--dataset", c.rows(GOOD), "--output", "s3://b/o.jsonl"], ["output: 's3:/b/o.jsonl' is a URL"]),
    "a path argument is a URL": (lambda c: ["view", str(c.folder), "s3://b/run"], ["runs: 's3:/b/run' is a URL"]),
    "a command below a command": (lambda c: ["data", "dump", "gs://b/run", "out"], ["run: 'gs:/b/run' is a URL"]),
    "wrong type": (lambda c: c.train("rollout.n=abc"), ["rollout.n", "abc"]),
    "out of range": (lambda c: c.train("rollout.temperature=0"), ["rollout.temperature", "0"]),
    "key without its section": (lambda c: c.train("lr=1e-3"), ["optim.lr"]),
    "a key of verl": (lambda c: c.train("data.train_batch_size=8"), ["data.batch_size"]),
    "a whole path of verl": (lambda c: c.train("actor_rollout_ref.rollout.n=8"), ["rollout.n"]),
    "KL twice": (lambda c: c.train("algorithm.kl_loss_coef=1", "algorithm.kl_reward_coef=1"), ["kl_loss_coef", "kl_reward_coef"]),
    "not an assignment": (lambda c: c.train("rollout.n"), ["rollout.n"]),
    "YAML syntax": (lambda c: c.train("-c", c.file("run.yaml", "rollout: {n: 2")), ["run.yaml"]),
    "YAML key": (lambda c: c.train("-c", c.file("run.yaml", "rolout:\n  n: 2")), ["rolout", "rollout"]),
    "no such YAML": (lambda c: c.train("-c", "nowhere.yaml"), ["nowhere.yaml"]),
    "two mistakes at once": (lambda c: c.train("rollout.m=1", "optim.lr=fast"), ["rollout.m", "optim.lr"]),
    "unknown algorithm": (lambda c: c.train("algorithm.name=gpro"), ["gpro", "grpo"]),
    "no rows at all": (lambda c: ["train", "--model", "tiny"], ["--dataset"]),
    "no such dataset": (lambda c: c.train(dataset="nowhere.parquet"), ["nowhere.parquet"]),
    "not a table": (lambda c: c.train(dataset=c.file("rows.csv", "a,b")), ["rows.csv", ".parquet", ".jsonl"]),
    "no row": (lambda c: c.train(dataset=c.file("rows.jsonl", "")), ["rows.jsonl"]),
    "broken line": (lambda c: c.train(dataset=c.file("rows.jsonl", json.dumps(GOOD) + "\n{oops")), ["rows.jsonl", "2"]),
    "corrupt parquet": (lambda c: c.train(dataset=c.file("rows.parquet", b"PAR1nonsensePAR1")), ["rows.parquet"]),
    "unknown loop": (lambda c: c.train(row={"agent_name": "tool_agnt"}), ["row 0", "tool_agnt", "tool_agent"]),
    "unknown tool": (lambda c: c.train(row={"tools": ["calculater"]}), ["row 0", "calculater", "calculator"]),
    "unknown interaction": (lambda c: c.train(row={"interaction": "gsm9k"}), ["row 0", "gsm9k", "gsm8k"]),
    "tools for a loop without": (lambda c: c.train(row={"agent_name": "single_turn"}), ["row 0", "single_turn", "tools"]),
    "interaction for a loop without": (lambda c: c.train(row={"agent_name": "single_turn", "tools": [], "interaction": "gsm8k", "interaction_kwargs": {"ground_truth": "1"}}), ["row 0", "single_turn", "interaction"]),
    "interaction's arguments": (lambda c: c.train(row={"interaction": "gsm8k", "interaction_kwargs": {"groundtruth": "1"}}), ["row 0", "groundtruth", "ground_truth"]),
    "arguments for a plain tool": (lambda c: c.train(row={"tools_kwargs": {"calculator": {"create_kwargs": {"x": 1}}}}), ["row 0", "calculator", "create_kwargs"]),
    "empty prompt": (lambda c: c.train(row={"prompt": []}), ["row 0", "prompt"]),
    "misspelt column": (lambda c: c.train(row={"agentname": "react"}), ["agentname", "agent_name"]),
    "the same id twice": (lambda c: c.train(dataset=c.rows({**GOOD, "id": "a"}, {**GOOD, "id": "a"})), ["'a'"]),
    "no grader": (lambda c: c.train(row={"data_source": "openai/gsm9k"}), ["openai/gsm9k", "openai/gsm8k", "reward.function"]),
    "no ground truth": (lambda c: c.train(dataset=c.rows(without("ground_truth"))), ["row 0", "ground_truth=None"]),
    "no such file": (lambda c: c.train(files=["nowhere.py"]), ["nowhere.py"]),
    "syntax error": (lambda c: c.train(files=[c.file("bad.py", "def f(:\n")]), ["bad.py:1", "SyntaxError"]),
    "syntax error in an imported file": (imports_a_syntax_error, ["user.py:3", "helper_with_typo.py, line 2"]),
    "import error": (lambda c: c.train(files=[c.file("bad.py", "x = 1\nimport nowhere_at_all")]), ["bad.py:2", "nowhere_at_all"]),
    "not on the shelf": (lambda c: c.train(files=["shelf:calculater"]), ["calculater", "shelf:calculator"]),
    "an interaction that says nothing": (lambda c: c.train(files=[c.file("i.py", "from agentrl import Interaction, interaction\n@interaction('mute')\nclass Mute(Interaction):\n    pass\n")]), ["Mute", "respond"]),
    "a loop that is not async": (lambda c: c.train(files=[c.file("l.py", "from agentrl import agent_loop\n@agent_loop('l')\ndef l(ep):\n    pass\n")]), ["'l'", "l.py:2", "async def"]),
    "a loop without a name": (lambda c: c.train(files=[c.file("l.py", "from agentrl import agent_loop\n@agent_loop\nasync def l(ep):\n    pass\n")]), ['@agent_loop("name")', "l.py:2"]),
    "unknown reward": (lambda c: c.train("reward.function=exactt"), ["exactt"]),
    "no such function in the reward's file": (lambda c: c.train(f"reward.function={c.file('r.py', RAISES)}:score"), ["score", "compute_score"]),
    "reward's arguments": (lambda c: c.train("reward.kwargs={formatscore: 1}"), ["formatscore", "format_score"]),
    "a reward that raises": (lambda c: c.train(f"reward.function={c.file('r.py', RAISES)}:compute_score"), ["KeyError", "r.py:2"]),
    "no model": (lambda c: ["train", "--dataset", c.rows(GOOD), "-f", "shelf:calculator"], ["--model"]),
    "no such model": (lambda c: c.train(model="./nowhere"), ["./nowhere"]),
    "no chat template": (lambda c: c.train(model=no_template(c)), ["chat template"]),
    "a template that changes contents": (lambda c: c.train(model=rewriting_template(c)), ["changes the content of a"]),
    "prompt beyond the context": (lambda c: c.train(row={"prompt": "x " * 3000}), ["row 0", "512"]),
    "port in use": (busy_port, ["port"]),
    "folder in use": (locked, ["in use", "--output"]),
    "wrong checkpoint": (lambda c: c.train("trainer.resume=./nowhere"), ["trainer.resume", "./nowhere"]),
    "no tool server there": (lambda c: c.train("tools.transport=http://127.0.0.1:9"), ["127.0.0.1:9", "agentrl tools serve"]),
    "unknown tracker": (lambda c: c.train("trainer.logger=[tensorbord]"), ["tensorbord", "tensorboard"]),
    "no GPU": (lambda c: c.train("trainer.device=cuda"), ["cuda", "cpu"]),
    "unknown tool called by hand": (lambda c: ["tools", "call", "calculater", "{}", "--file", "shelf:calculator"], ["calculater", "calculator"]),
    "arguments that are no JSON": (lambda c: ["tools", "call", "calculator", "{oops", "--file", "shelf:calculator"], ["JSON"]),
    "init over something": (lambda c: ["init", str(Path(c.file("x", "y")).parent)], ["not empty"]),
}  # fmt: skip


@pytest.fixture
def case(tmp_path, random_model):
    case = Case(tmp_path, random_model)
    yield case
    if hasattr(case, "socket"):
        case.socket.close()
    if hasattr(case, "lock"):
        case.lock.__exit__(None, None, None)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.timing
def test_a_broken_input_is_one_clear_message(case, name, capsys):
    if name == "no GPU":
        import torch

        if torch.cuda.is_available():
            return
    from agentrl.cli import main

    build, wanted = CASES[name]
    words = build(case)
    start = time.process_time()
    with pytest.raises(SystemExit) as ended:
        main(words)
    seconds = time.process_time() - start
    error = capsys.readouterr().err
    assert ended.value.code not in (0, None), error
    assert "Traceback" not in error and error.count("error:") == 1, error
    assert len(error) < 2000, error
    for piece in wanted:
        assert piece in error, error
    assert seconds < 20


def test_the_real_command_prints_the_same_message(tmp_path):
    command = [sys.executable, "-m", "agentrl", "train", "--dataset", "nowhere.parquet"]
    done = subprocess.run([*command, "--model", "tiny"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "nowhere.parquet" in done.stderr
    assert "Traceback" not in done.stderr
