"""The pages of the guide are true of the code."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from support.forked_python import run_agentrl
from typer.main import get_command

from agentrl import play
from agentrl.cli import app
from agentrl.compat.verl.keys import VERL_KEYS
from agentrl.config import FIELDS, load_config, without_effect
from agentrl.metrics import rollout_metrics
from agentrl.rewards import GRADERS
from agentrl.store import SCHEMA, TrajectoryStore, load_trajectories
from agentrl.testing import Scripted, byte_tokenizer
from agentrl.trajectory import Group, Message, Sample, Scored

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (
    "agent_loops",
    "algorithms",
    "choosing",
    "code",
    "commands",
    "data",
    "debugging",
    "engines",
    "glossary",
    "gpu",
    "index",
    "interactions",
    "rewards",
    "run_folder",
    "sandbox",
    "scaling",
    "tokens",
    "tools",
    "trl",
    "verl",
)


def text(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_snippets_run(page, shipped_registries, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("model: {path: models/mine}")
    _leave_trajectories(Path("runs/demo/trajectories"))
    space = {"__name__": f"docs_{page}"}
    for block in blocks(page, "python"):
        exec(compile(block, f"docs/{page}.md", "exec"), space)
    for block in blocks(page, "json"):
        json.loads(block)


def _leave_trajectories(folder: Path) -> None:
    tokenizer = byte_tokenizer()
    sample = Sample("row-0", (Message("user", "How much is 3*4?"),))
    scored = Scored(play(sample, Scripted(["12"], tokenizer), tokenizer), {"outcome": 1.0}, 1.0)
    TrajectoryStore(folder).write(1, [Group(sample, (scored,))])


def test_all_columns_of_trajectories_are_documented():
    section = text("run_folder").split("## Trajectories")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(SCHEMA.names)


def test_all_metrics_of_rollouts_are_documented(tmp_path):
    _leave_trajectories(tmp_path)
    (scored,) = load_trajectories(tmp_path)
    sample = scored.trajectory.sample
    section = text("run_folder").split("## Metrics")[1].split("\n## ")[0]
    for name in rollout_metrics([Group(sample, (scored,))]):
        known = re.sub(r"/(mean|max|min)$", "", name)
        known = known.replace(f"/{sample.agent_name}/", "/AGENT/").replace("stop/done", "stop/R")
        assert f"`{known}" in section, name


@pytest.mark.parametrize("page", ["choosing", "debugging", "gpu", "trl"])
def test_documented_metrics_are_those_of_a_run(page):
    explained = text("run_folder")
    families = (
        "actor|canary|critic|engine|perf|rollout|rollout_corr|stop|timing_s|tool_error|val|waste"
    )
    named = [
        line.split("|", 2)[2] if page == "trl" and line.startswith("|") else line
        for line in text(page).splitlines()
    ]
    for name in re.findall(rf"`((?:{families})/[\w/@]+)`", "\n".join(named)):
        family = re.sub(r"^(stop|tool_error)/.*", r"\1/", re.sub(r"/(mean|max|min)$", "", name))
        family = re.sub(r"@\d+$", "@", family)
        assert f"`{family}" in explained, f"{page}.md: {name}"


@pytest.mark.parametrize("page", PAGES)
def test_yaml_snippets_load(page, tmp_path):
    for i, block in enumerate(blocks(page, "yaml")):
        file = tmp_path / f"{i}.yaml"
        file.write_text(block)
        load_config(str(file))


@pytest.mark.parametrize("page", PAGES)
def test_config_keys_exist(page):
    """Keys in backticks with a section of ours; verl's own stand in the first column of a table."""
    sections = {path.split(".")[0] for path in FIELDS if "." in path}
    for line in text(page).splitlines():
        checked = line.split("|", 2)[2] if page == "verl" and line.startswith("| `") else line
        for path in re.findall(r"`(\w+\.\w+)(?:\.\w+)*(?:=[^`]*)?`", checked):
            if path.split(".")[0] in sections and not path.endswith((".md", ".py")):
                assert path in FIELDS, f"{page}.md: no key {path}"


@pytest.mark.parametrize("page", ["engines", "scaling"])
def test_commands_load(page, tmp_path):
    """None of them is a contradiction, and each key that is given does something."""
    (tmp_path / "run.yaml").write_text("model: {path: models/mine}\ndata: {train: rows.jsonl}")
    commands = [
        line.partition("#")[0]
        for block in blocks(page, "bash")
        for line in block.replace("\\\n", " ").splitlines()
        if "agentrl train " in line
    ]
    assert len(commands) >= 3
    for command in commands:
        overrides = [word for word in shlex.split(command) if re.match(r"\w+\.\w+=", word)]
        config = load_config(str(tmp_path / "run.yaml"), overrides)
        assert not without_effect(config), command


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_these_options(page):
    """All commands in shell blocks and indented lines: their names, options and config keys."""
    indented = re.findall(r"^ {4}(.*(?:\\\n.*)?)$", text(page), re.MULTILINE)
    shell = "\n".join([*blocks(page, "bash"), *indented]).replace("\\\n", " ")
    for line in (line for line in shell.splitlines() if line.startswith("agentrl ")):
        words = shlex.split(line, comments=True)[1:]
        command = get_command(app)
        while isinstance(getattr(command, "commands", None), dict):
            assert words[0] in command.commands, f"{page}.md: {line}"
            command = command.commands[words.pop(0)]
        options = {option for parameter in command.params for option in parameter.opts}
        for word in words:
            if re.match(r"--?[a-z]", word):
                assert word in options, f"{page}.md: {line}"
            elif key := re.match(r"([a-z]+\.[\w.]+)=", word):
                section, _, leaf = key[1].partition(".")
                if words[0].endswith(".yaml") and key[1] in VERL_KEYS:
                    continue  # `agentrl train verl.yaml` takes verl's keys
                assert f"{section}.{leaf.split('.')[0]}" in FIELDS, f"{page}.md: {line}"


def test_the_command_for_a_laptop_works(tiny_model):
    (command,) = (b for b in blocks("scaling", "bash") if "--model tiny" in b)
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == ["agentrl", "train"]
    done = run_agentrl(*words[1:], "--dry-run", cwd=DOCS.parent)
    assert done.returncode == 0 and "all checks passed" in done.stdout, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text(page)):
        assert target.startswith("https://") or (DOCS / target).exists(), f"{page}.md: {target}"


def test_the_map_of_the_code_names_files_that_exist():
    paths = re.findall(r"`((?:\w+/)*\w+(?:\.py|/))`", text("code"))
    assert len(paths) > 50
    root = DOCS.parent
    missing = [p for p in paths if not any((r / p).exists() for r in (root / "agentrl", root))]
    assert not missing


def test_every_page_is_in_the_index():
    linked = set(re.findall(r"\((\w+)\.md\)", text("index")))
    assert linked == {p.stem for p in DOCS.glob("*.md")} - {"index"}


def test_the_table_of_graders_is_complete():
    table = text("rewards").partition("| `data_source` | grader |\n|---|---|\n")[2]
    documented = {}
    for row in table.partition("\n\n")[0].splitlines():
        sources, grader = (re.findall(r"`([^`]+)`", cell) for cell in row.split("|")[1:3])
        documented.update(dict.fromkeys(sources, *grader))
    assert documented == GRADERS


def test_documented_keys_of_verl_are_those_that_a_run_refuses_by_name():
    table = text("verl").split("## Config keys")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) > 30
    for verls, ours in rows:
        words = " ".join(VERL_KEYS[key] for key in re.findall(r"`([^`]+)`", verls))
        if ours.strip().startswith("none"):
            assert "Not " in words, verls
            continue
        first = re.search(r"`([^`=]+)", ours)
        assert first and first.group(1) in words, f"{verls} -> {ours}"
