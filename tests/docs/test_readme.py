"""Every snippet of the README is run, as a reader would run it."""

import re
import shlex
from pathlib import Path

import pytest
from support.forked_python import run_agentrl, run_python

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model):
    """The reader's: my_env.py holds the extensions; each other block is a script, run in order."""
    tmp_path = tmp_path_factory.mktemp("readme")
    extensions, rest = [], []
    for block in blocks("python"):
        decorated = re.search(
            r"^@(tool|environment|interaction|reward|agent_loop)\b", block, re.MULTILINE
        )
        (extensions if decorated else rest).append(block)
    assert len(extensions) == 4 and len(rest) == 3
    (tmp_path / "my_env.py").write_text("\n".join(extensions))
    for i, block in enumerate(rest):
        (tmp_path / f"block_{i}.py").write_text(block)
        done = run_python([f"block_{i}.py"], cwd=tmp_path)
        assert done.returncode == 0, (block, done.stdout, done.stderr)
        if i == 0:  # every validation plays all rows of val.jsonl
            val = tmp_path / "val.jsonl"
            rows = val.read_text().splitlines(keepends=True)
            assert len(rows) == 32
            val.write_text("".join(rows[:4]))
    return tmp_path


def test_the_python_snippets(folder):
    assert (folder / "train.jsonl").exists() and (folder / "runs/py/model").is_dir()


def test_the_commands(folder, tiny_model):
    commands = [
        line.split("#")[0].strip()
        for block in blocks("bash")
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("agentrl ")
    ]
    verbs = {shlex.split(c)[1] for c in commands}
    assert {"train", "check", "play", "eval"} <= verbs
    for command in commands:
        words, cwd = shlex.split(command), folder
        if words[1:3] == ["model", "get"]:
            continue  # it downloads
        if "recipes/facts/run.yaml" in words:
            words, cwd = ["agentrl", "check", *words[2:], "--model", "tiny"], ROOT
        elif "datasets/arithmetic_train.parquet" in words:
            words = [str(ROOT / w) if w.startswith("datasets/") else w for w in words]
            words[1] = "check"  # `make demo` trains
        elif words[1] == "train":
            words += ["trainer.total_steps=1", "data.batch_size=1"]
        # A process for the tools takes seconds: only the training starts one.
        if words[1] in ("play", "eval") or words[1:3] == ["check", "--dataset"]:
            words += ["tools.transport=in_process"]
        done = run_agentrl(*words[1:], cwd=cwd)
        assert done.returncode == 0 and done.stdout, (command, done.stdout, done.stderr)
