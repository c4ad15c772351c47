"""The starter projects: their tests pass, they train, and the commands that they print work."""

import contextlib
import io
import json
import os
import re
import shlex
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request
from support.forked_python import ForkedPython, run_python
from support.small_server import serving

import agentrl.cli as agentrl_cli
from agentrl.cli import main
from agentrl.cli.init import Template

pytestmark = pytest.mark.usefixtures("shipped_registries")

AGENTRL = ["-m", "agentrl"]
STARTER = Path(agentrl_cli.__file__).parent / "starter"
ASSISTANTS = (Path(__file__).parents[2] / "AGENTS.md").read_text()


def run(arguments, cwd, **options):
    done = run_python(arguments, cwd=cwd, **options)
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    return done.stdout


def agentrl(line, cwd):
    """A command as it was printed, all on one line; not in a new process, which takes seconds.

    Nor are the tools: the training of `project` serves them. What a command prints about phases
    that take long (on a busy machine) is left out.
    """
    words, output = shlex.split(line, comments=True), io.StringIO()
    assert words[0] == "agentrl"
    if words[1] in ("check", "play", "eval", "generate"):
        words.append("tools.transport=in_process")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.chdir(cwd)
        with pytest.raises(SystemExit) as ended:
            main(words[1:])
    assert not ended.value.code, line
    lines = output.getvalue().splitlines(keepends=True)
    return "".join(x for x in lines if not re.fullmatch(r"[a-z ]+: (started|[\d.]+ s)\n", x))


@pytest.fixture(scope="module")
def project(tmp_path_factory, tiny_model):
    """The starter project after one step of training, and what the run printed."""
    above = tmp_path_factory.mktemp("starter")
    assert "agentrl train -c run.yaml" in run([*AGENTRL, "init", "my_env"], above)
    val = above / "my_env/val.jsonl"
    rows = val.read_text().splitlines(keepends=True)
    assert len(rows) == 48
    val.write_text("".join(rows[:8]))  # every validation plays all of them
    train = [*AGENTRL, "train", "-c", "run.yaml", "trainer.total_steps=1", "data.batch_size=4"]
    return above / "my_env", run(train, above / "my_env")


@pytest.mark.slow
def test_the_files_of_the_starter_project(project):
    folder, _ = project
    assert {"env.py", "run.yaml", "test_env.py", "README.md"} <= set(os.listdir(folder))
    assert (folder / "runs/starter/curve.svg").exists()


def test_a_folder_that_cannot_be_written_is_a_mistake(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="1"):
        main(["init", str(tmp_path / "file/my_env")])
    assert "file/my_env cannot be written (Not a directory)" in capsys.readouterr().err


TEMPLATES = [template.value for template in Template]


def test_the_templates_are_the_folders():
    folders = {f.name for f in STARTER.iterdir() if (f / "env.py").is_file()}
    assert folders == set(TEMPLATES)


def test_an_unknown_template_names_the_choices(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["init", str(tmp_path / "a"), "--template", "gam"])
    assert ended.value.code == 2 and not (tmp_path / "a").exists()
    shown = capsys.readouterr().err
    assert all(name in shown for name in TEMPLATES)


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_is_a_project_whose_tests_need_only_pytest(template, tmp_path):
    """In any folder, and from any other one."""
    output = agentrl(f"agentrl init 'my énv/a' --template {template}", tmp_path)
    assert shlex.split(output)[4:6] == ["cd", "my énv/a"]
    folder = tmp_path / "my énv/a"
    files = {
        "README.md",
        "env.py",
        "rows.py",
        "run.yaml",
        "test_env.py",
        "train.jsonl",
        "val.jsonl",
    }
    assert files <= set(os.listdir(folder))
    only_pytest = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run(["-m", "pytest", "-q", "my énv", "-p", "no:cacheprovider"], tmp_path, env=only_pytest)


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_checks_plays_and_trains(template, tmp_path, tiny_model):
    agentrl(f"agentrl init my_env --template {template}", tmp_path)
    folder = tmp_path / "my_env"
    assert "all checks passed" in run([*AGENTRL, "check", "-c", "run.yaml"], folder)
    assert run([*AGENTRL, "play", "-c", "run.yaml", "-n", "2"], folder).count("ground truth") == 2
    output = run([*AGENTRL, "train", "-c", "run.yaml", "trainer.total_steps=2"], folder)
    assert "done: 2 steps" in output


def test_the_judge_of_its_template_grades_by_a_server(tmp_path, tiny_model):
    """The server answers as a judge model does; nothing of agentrl runs in it."""
    asked = []

    async def judge(request: Request):
        assert request.headers.get("authorization") is None
        asked.append(await request.json())
        message = {"role": "assistant", "content": '{"why": "right, with other words", "score": 8}'}
        return {"choices": [{"message": message, "finish_reason": "stop"}]}

    model = FastAPI()
    model.post("/v1/chat/completions")(judge)
    agentrl("agentrl init my_env --template judge", tmp_path)
    with serving(model) as url:
        command = f"agentrl play -c judge.yaml reward.kwargs.judge.url={url}/v1 -n 2"
        output = agentrl(command, tmp_path / "my_env")
    assert len(asked) == 2
    assert {request["model"] for request in asked} == {"Qwen/Qwen2.5-7B-Instruct"}
    assert all("the answer is #### and the number" in json.dumps(request) for request in asked)
    assert output.count("reward 0.8") == 2, output


def test_check_lists_tools_and_interactions(project):
    output = agentrl("agentrl check -c run.yaml", project[0])
    assert (
        "calculator" in output and "interaction coach" in output and "all checks passed" in output
    )
    assert "reward exact: 200 rows without data_source" in output


def test_the_commands_that_a_run_prints(project):
    folder, output = project
    printed = [line.strip() for line in output.partition("next:")[2].splitlines() if line.strip()]
    verbs = ["report", "view", "play", "eval", "generate"]
    assert [line.split()[1] for line in printed] == verbs
    view = printed.pop(1)
    report, play, evaluation, generation = (agentrl(line, folder) for line in printed)
    with ForkedPython(["-m", *shlex.split(view)], cwd=folder) as server:
        address, _, token = server.read_line().partition("open ")[2].strip().partition("#token=")
        runs = httpx.get(f"{address}api/runs", headers={"Authorization": f"Bearer {token}"})
        assert "starter" in runs.raise_for_status().text
    assert report.startswith("config: ") and "report.html" in report
    assert play.startswith("val.jsonl: 3 of 8 rows (sampled at T=1.0)\n")
    assert play.count("reward ") >= 3 and "ground truth" in play
    first, head, sampled, greedy = evaluation.splitlines()
    assert first == "val.jsonl: 8 rows x 4 (sampled at T=1.0), and a greedy pass"
    assert head.split() == ["rows", "reward", "acc", "pass@2", "pass@4", "calls", "tools", "turns"]
    assert sampled.split()[:2] == ["tool_agent", "sampled"]
    assert greedy.split()[:3] == ["tool_agent", "greedy", "8"]
    assert re.search(r"\d ± 0\.\d{3}  \d\.\d{3} ± 0\.\d{3} +- +- ", greedy), greedy
    assert "8 rows with 1 response each" in generation


def test_generate_refuses_existing_files_and_other_formats(project, monkeypatch, capsys):
    folder, _ = project
    monkeypatch.chdir(folder)
    Path("there.jsonl").write_text("")
    for name, message in (("there.jsonl", "already exists"), ("a.csv", ".parquet or .jsonl")):
        with pytest.raises(SystemExit) as ended:
            main(["generate", "-c", "run.yaml", "--output", name])
        out, err = capsys.readouterr()
        assert ended.value.code == 1 and message in err and "rows x" not in out


def _lines(text):
    block = re.search(r"## Using it\n\n```bash\n(.*?)```", text, re.DOTALL)
    assert block
    return block.group(1).splitlines()


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=[pytest.mark.slow] if " train " in line else [])
        for line in _lines(ASSISTANTS)
        if "agentrl init" not in line
    ],
)
def test_the_commands_for_assistants(line, project):
    folder, _ = project
    if " train " in line:
        line = line.split("#")[0] + " trainer.total_steps=1 --output runs/again"
    assert agentrl(line, folder)
    if " eval " in line:
        metrics = json.loads((folder / "evals/starter/metrics.json").read_text())
        assert {"val/reward/mean@1", "val_greedy/tool_agent/reward/mean@1"} <= metrics.keys()
