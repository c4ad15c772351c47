"""The pages are true of the code: their snippets run, their commands are valid.

A reader sees how each block is tested by its language: `python` runs, `yaml` loads, `json` parses,
the commands in `bash` are read by their own parsers (`test_readme.py` also runs the README's), and
`text`, or no language, is output.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forked_python import run_python
from typer.main import get_command

from agentrl import play
from agentrl.agent_loops.chat_model import parse_address
from agentrl.cli import app, main
from agentrl.cli.options import is_address, read_config
from agentrl.cli.sweep import read_sweep
from agentrl.comparison import Expectation
from agentrl.config import FIELDS, load_config, without_effect
from agentrl.config.verl_keys import VERL_KEYS
from agentrl.metrics import rollout_metrics
from agentrl.rewards import GRADERS
from agentrl.store import (
    IMAGES,
    LEARNED,
    SCHEMA,
    TOKENS_SCHEMA,
    TrajectoryStore,
    load_trajectories,
)
from agentrl.testing import Scripted, byte_tokenizer
from agentrl.trajectory import Group, Message, Sample, Scored

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDES = sorted(page.stem for page in DOCS.glob("*.md"))
OTHER_PAGES = [
    "AGENTS.md", "CONTRIBUTING.md", "README.md", "SECURITY.md", "benchmarks/README.md",
    "benchmarks/models.md", "benchmarks/templates.md",
    "datasets/README.md",
    "agentrl/cli/starter/README.md",
    *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("examples/*/README.md")),
    "recipes/README.md",
    *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("recipes/*/README.md")),
]  # fmt: skip
PAGES = [*GUIDES, *OTHER_PAGES]


def path_of(page: str) -> Path:
    """The file of a page of docs/, or of another page."""
    return ROOT / page if page.endswith(".md") else DOCS / f"{page}.md"


def text(page: str) -> str:
    return path_of(page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return [block for name, block in all_blocks(page) if name == language]


def all_blocks(page: str) -> list[tuple[str, str]]:
    """The language and the text of each block."""
    return re.findall(r"^```(.*)\n((?:.*\n)*?)```$", text(page), re.MULTILINE)


def prose(page: str) -> str:
    """The text without its blocks."""
    return re.sub(r"^```.*?^```$", "", text(page), flags=re.DOTALL | re.MULTILINE)


def commands(page: str) -> Iterator[list[str]]:
    """The words of each command: in shell blocks, and on indented lines.

    An indented line is a command of agentrl, or config keys of `agentrl train`. `...` stands for
    rows and a model.
    """
    indented = [
        line if line.startswith("agentrl") else f"agentrl train {line} ..."
        for line in re.findall(r"^ {4}((?:agentrl |\w+\.\w+=).*)$", prose(page), re.MULTILINE)
    ]
    for line in "\n".join([*blocks(page, "bash"), *indented]).replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue  # a string of several lines
        if words and words[-1] == "...":
            words[-1:] = ["--dataset", "rows.jsonl", "--model", "models/mine"]
        if words:
            yield words


@pytest.mark.parametrize("page", PAGES)
def test_the_language_of_a_block_says_how_it_is_tested(page):
    for language, block in all_blocks(page):
        assert language in ("python", "bash", "yaml", "json", "text", ""), block
        if language in ("text", ""):
            assert not re.search(r"^(\$ |agentrl |pip |python |make )", block, re.MULTILINE), block


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ("README.md", "testing")])
def test_snippets_run(page, shipped_registries, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("model: {path: models/mine}")
    _leave_trajectories(Path("runs/demo/trajectories"))
    Path("runs/demo/metrics.jsonl").write_text('{"step": 1, "data": {"critic/score/mean": 1}}\n')
    space = {"__name__": f"docs_{page}"}
    for block in blocks(page, "python"):
        exec(compile(block, str(path_of(page)), "exec"), space)
    for block in blocks(page, "json"):
        json.loads(block)


def _leave_trajectories(folder: Path) -> None:
    tokenizer = byte_tokenizer()
    sample = Sample("row-0", (Message("user", "How much is 3*4?"),))
    scored = Scored(play(sample, Scripted(["12"], tokenizer), tokenizer), {"outcome": 1.0}, 1.0)
    TrajectoryStore(folder).write(1, [Group(sample, (scored,))])


def test_the_tests_on_the_page_about_tests_pass(tmp_path):
    environment, *tests = blocks("testing", "python")
    (tmp_path / "my_env.py").write_text(environment)
    (tmp_path / "test_my_env.py").write_text("\n\n".join(tests))
    only_pytest = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    pytest_words = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = run_python(pytest_words, cwd=tmp_path, env=only_pytest)
    assert done.returncode == 0 and "14 passed" in done.stdout, done.stdout


def test_all_columns_of_trajectories_are_documented():
    section = text("run_folder").split("## Trajectories")[1].split("\n## ")[0]
    rows = [line.partition(": ")[0] for line in section.splitlines() if line.startswith("- `")]
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == {*SCHEMA.names, IMAGES.name}


def test_all_columns_of_what_was_learned_are_documented():
    section = text("run_folder").split("## What a step learned from")[1].split("\n## ")[0]
    rows = [line.partition(": ")[0] for line in section.splitlines() if line.startswith("- `")]
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(LEARNED)
    section = text("run_folder").split("## Read a run")[1].split("\n## ")[0]
    [row] = [line for line in section.splitlines() if line.startswith("- `run.tokens`")]
    assert set(re.findall(r"`(\w+)`", row)) == set(TOKENS_SCHEMA.names)


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
        if re.search(r"^(grid|runs):", block, re.MULTILINE):
            read_sweep(file)
        else:
            load_config(str(file))


VERLS_OWN = r"^(\| `[^|]*\||- `[^`]*`(, `[^`]*`)*: )"
"""On the page about verl, the first column of a table, and the names that begin a list's line."""


@pytest.mark.parametrize("page", PAGES)
def test_config_keys_exist(page):
    """Keys in backticks with a section of ours, not verl's own."""
    sections = {path.split(".")[0] for path in FIELDS if "." in path}
    for line in text(page).splitlines():
        checked = re.sub(VERLS_OWN, "", line) if page == "verl" else line
        for path in re.findall(r"`(\w+\.\w+)(?:\.\w+)*(?:=[^`]*)?`", checked):
            if path.split(".")[0] in sections and not path.endswith((".md", ".py", ".jsonl")):
                assert path in FIELDS, f"{page}.md: no key {path}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_read_by_their_own_parsers(page, reader, monkeypatch):
    """No option is unknown, no key contradicts another one, and each key does something."""
    # The models and files of the pages need not exist.
    monkeypatch.setattr("agentrl.cli.options.resolve_model", lambda path, say: path)
    if script := "\n".join(blocks(page, "bash")):
        checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert not checked.stderr, f"{page}: {checked.stderr}"
    for words in commands(page):
        program = words[0].removeprefix(".venv/bin/")
        try:
            if program == "agentrl":
                with monkeypatch.context() as patch:
                    patch.setattr("agentrl.registry.load_file", lambda name: None)
                    _read_command(words[1:], reader)
            elif program == "make":
                targets = [w for w in words[1:] if "=" not in w]
                assert all(f"\n{target}:" in (ROOT / "Makefile").read_text() for target in targets)
            elif program == "pip" and "-e" in words:
                extras = re.findall(r"\w+", words[-1])
                assert set(extras) <= set(PROJECT["optional-dependencies"]), words
            elif program == "python" and words[1] == "-m":
                package = words[2].partition(".")[0]
                assert package != "agentrl" or importlib.util.find_spec(words[2]), words
            elif program == "python" and "/" in words[1]:
                _read_arguments(words[1:], monkeypatch)
        except (Exception, SystemExit) as e:
            raise AssertionError(f"{page}: {shlex.join(words)}: {e}") from e


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS = get_command(app)
VERL_CONFIG = "actor_rollout_ref: {model: {path: models/mine}}\ndata: {train_files: rows.parquet}"


@pytest.fixture
def reader(tmp_path, monkeypatch) -> Path:
    """The reader's folder, as the working directory: the checkout's folders and a run.yaml."""
    for name in ("datasets", "examples", "recipes", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _read_command(words: list[str], folder: Path) -> None:
    """Parse a command of agentrl, and load its config as the command does."""
    command, name = COMMANDS, "agentrl"
    while isinstance(getattr(command, "commands", None), dict):
        context = command.context_class(command, info_name=name)
        name, command, words = command.resolve_command(context, words)
    parameters = command.make_context(name, words).params
    if "overrides" not in parameters:
        return
    overrides = parameters["overrides"] or []
    for path, content in (
        (parameters.get("config"), "model: {path: models/mine}\ndata: {train: rows.jsonl}"),
        (overrides[0] if overrides and "=" not in overrides[0] else None, VERL_CONFIG),
    ):
        if path and not (folder / path).exists():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content)
    if "config" not in parameters:  # `sft`, `replay` and `rescore` take keys, and no file of keys
        load_config(None, overrides)
        return
    flags = {"dataset", "val_dataset", "model", "file", "deterministic"} & parameters.keys()
    values = {flag: parameters[flag] for flag in flags}
    if isinstance(models := values.get("model"), list):  # of `eval`
        for url in filter(is_address, models):
            parse_address(url)
        for text in parameters["expect"] or ():
            Expectation.parse(text)
        values["model"] = next(model for model in models if not is_address(model))
    responses = parameters.get("responses")  # of `eval`; they need no model
    if responses:
        values["dataset"] = str(responses)
    if parameters.get("recorded"):  # The answers and the served model do not exist here.
        values |= {"dataset": ["rows.jsonl"], "model": "models/mine"}
    needs = {"needs_model": not responses, "needs_rows": name != "serve"}
    config = read_config(parameters["config"], overrides, **needs, **values)
    keys = tuple(f"{override.partition('=')[0]}=" for override in overrides)
    notes = [note for note in without_effect(config) if note.startswith(keys)]
    assert name != "train" or not notes, notes


def _read_arguments(words: list[str], monkeypatch) -> None:
    """Run a Python program of the checkout until it has parsed its arguments."""

    class Parsed(BaseException):
        pass

    def parse_only(parser, *arguments):
        original(parser, *arguments)
        raise Parsed

    original = argparse.ArgumentParser.parse_args
    with monkeypatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        patch.setattr(sys, "argv", words)
        patch.setattr(sys, "path", [str((ROOT / words[0]).parent), *sys.path])  # as Python does
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")


def test_extras_are_installed_from_the_checkout():
    """PyPI's `agentrl` is another project, and ours is not on PyPI."""
    for page in PAGES:
        assert not re.search(r"pip install [\"']?agentrl", text(page)), page
        for extra in re.findall(r"pip install -e ..\[(\w+)\]", text(page)):
            assert extra in PROJECT["optional-dependencies"], f"{page}: {extra}"


def test_the_command_for_a_laptop_works(tiny_model, shipped_registries, monkeypatch, capsys):
    (words,) = (words for words in commands("scaling") if "tiny" in words)
    assert words[:2] == ["agentrl", "train"]
    monkeypatch.chdir(DOCS.parent)
    with pytest.raises(SystemExit) as ended:
        main(["check", *words[2:], "tools.transport=in_process"])
    assert not ended.value.code and "all checks passed" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target, section in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text(page)):
        if target.startswith("https://"):
            continue
        path = path_of(page).parent / target if target else path_of(page)
        assert path.exists(), f"{page}: {target}"
        if section:
            assert section in anchors(str(path)), f"{page}: {target}#{section}"


def anchors(page: str) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_map_of_the_code_names_files_that_exist():
    paths = re.findall(r"`((?:\w+/)*\w+(?:\.py|/))`", text("code"))
    assert len(paths) > 50
    root = DOCS.parent
    missing = [p for p in paths if not any((r / p).exists() for r in (root / "agentrl", root))]
    assert not missing


def test_the_map_of_the_code_names_functions_that_exist():
    sources = [file.read_text() for file in (ROOT / "agentrl").rglob("*.py")]
    names = set(re.findall(r"`((?:[A-Z]\w*\.)?[a-zA-Z_]\w*)`", text("code")))
    assert {"train_step", "TokenRow.extend", "collate"} <= names
    for name in names:
        home, _, last = name.rpartition(".")
        definition = rf"^( *)(async )?(def|class) {last}\b"
        homes = [source for source in sources if not home or f"\nclass {home}" in source]
        assert any(re.search(definition, source, re.MULTILINE) for source in homes), name


def test_the_arguments_of_trl_exist():
    """In the installed TRL and transformers, whose files are read, because their import is slow."""
    trl = importlib.util.find_spec("trl")
    if trl is None:
        pytest.skip("needs trl")
    arguments = importlib.util.find_spec("transformers").submodule_search_locations[0]
    folder = Path(trl.submodule_search_locations[0])
    fields = set()
    for file in (
        folder / "trainer/grpo_config.py",
        folder / "trainer/grpo_trainer.py",
        folder / "trainer/base_config.py",
        folder / "trainer/_base_config.py",
        Path(arguments) / "training_args.py",
    ):
        if file.exists():
            fields |= set(re.findall(r"^\s+(\w+): ", file.read_text(), re.MULTILINE))
    section = text("trl").split("## Arguments of `GRPOConfig`")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = re.findall(r"`(\w+)(?:=[^`]*)?`", " ".join(re.sub(r"\([^)]*\)", "", r) for r in rows))
    assert len(named) > 40
    values = {"bnpo", "sapo", "luspo", "vespo"}
    assert not {name for name in named if name not in fields | values}


def test_the_defaults_on_the_page_about_trl_are_those_of_the_code():
    """`name` (value) in the table is the default, on the left of TRL, on the right of agentrl."""
    trl = importlib.util.find_spec("trl")
    if trl is None:
        pytest.skip("needs trl")
    transformers = importlib.util.find_spec("transformers").submodule_search_locations[0]
    defaults = {}
    for file in (
        Path(transformers) / "training_args.py",
        *(Path(trl.submodule_search_locations[0]) / "trainer").glob("*base_config.py"),
        Path(trl.submodule_search_locations[0]) / "trainer/grpo_config.py",
    ):
        for field in ast.walk(ast.parse(file.read_text())):
            if isinstance(field, ast.AnnAssign) and isinstance(field.value, ast.Call):
                for keyword in field.value.keywords:
                    if keyword.arg == "default" and isinstance(keyword.value, ast.Constant):
                        defaults[ast.unparse(field.target)] = keyword.value.value
    section = text("trl").split("## Arguments of `GRPOConfig`")[1].split("\n## ")[0]
    compared = 0
    for row in section.splitlines():
        if row.startswith("| `"):
            theirs, ours = row.split("|")[1:3]
            for name, value in re.findall(r"`(\w+)` \(`?([^)`]+)`?\)", theirs):
                if defaults.get(name) is not None:
                    assert _literal(value) == defaults[name], (name, value)
                    compared += 1
            for name, value in re.findall(r"`(\w+\.\w+)` \(`?([^)`,:;]+)`?[):]", ours):
                assert _literal(value) == FIELDS[name].default, (name, value)
                compared += 1
    assert compared > 30


def _literal(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text.strip('"')


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
    assert len(rows) > 15
    for verls, ours in rows:
        words = " ".join(VERL_KEYS[key] for key in re.findall(r"`([^`]+)`", verls))
        if ours.strip().startswith("none"):
            assert "Not " in words, verls
            continue
        first = re.search(r"`([^`=]+)", ours)
        assert first and first.group(1) in words, f"{verls} -> {ours}"
