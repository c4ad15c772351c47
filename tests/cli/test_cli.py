"""The output of the command line: versions, keys, notes, tables."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from agentrl import __version__, load_config
from agentrl.cli import app, main
from agentrl.cli.evaluate import table
from agentrl.cli.session import _silence_training_warnings
from agentrl.config import FIELDS
from agentrl.config.load import flag_of
from agentrl.trainer.console import next_commands

ROW = {
    "prompt": "How much is 3*4?",
    "agent_name": "tool_agent",
    "tools": ["calculator"],
    "data_source": "openai/gsm8k",
    "ground_truth": "12",
}


@pytest.fixture
def run_cli(monkeypatch, capsys):
    def run(*words: str) -> tuple[str, str]:
        with pytest.raises(SystemExit) as ended:
            main(words)
        out, err = capsys.readouterr()
        assert bool(ended.value.code) == ("error:" in err), err
        return out, err

    return run


def test_version(run_cli):
    assert run_cli("--version") == (f"agentrl {__version__}\n", "")


def test_the_package_is_a_command_too():
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == (f"agentrl {__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["--rollout.n", "4"], "rollout.n=4"),
        (["--rollout.n=4"], "rollout.n=4"),
        (["--optim.lr"], "optim.lr=VALUE"),
    ],
)
def test_a_key_is_no_option(run_cli, words, advice):
    _, err = run_cli("train", *words)
    assert err == f"error: {words[0]}: write config keys without dashes: {advice}\n"


@pytest.mark.parametrize("command", ["train", "check", "play", "eval"])
def test_all_missing_options_are_reported_at_once(run_cli, command):
    _, err = run_cli(command)
    assert "--dataset" in err and "--model" in err and err.count("error:") == 1


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    others = {**ROW, "agent_name": "single_turn", "tools": [], "data_source": "agentrl/arithmetic"}
    file.write_text("\n".join(map(json.dumps, [ROW, ROW, others])))
    return str(file)


def check(rows, model, *words):
    return ["check", "--dataset", rows, "--model", str(model), "-f", "shelf:calculator", *words]


def test_check_prints_the_graders_and_doubtful_settings(run_cli, rows, random_model):
    out, err = run_cli(*check(rows, random_model))
    assert "grader gsm8k: 2 rows of data_source openai/gsm8k" in out
    assert "grader gsm8k: 1 rows of data_source agentrl/arithmetic" in out
    assert "note: data.batch_size=16 is more than the 3 rows" in err
    assert "data.batch_size" not in run_cli(*check(rows, random_model, "data.batch_size=3"))[1]


@pytest.mark.parametrize(
    ("name", "shown", "note"),
    [
        ("auto", "hermes (auto)", ""),
        ("hermes", "hermes (rollout.tool_format)", ""),
        (
            "glm",
            "glm (rollout.tool_format)",
            "rollout.tool_format=glm, but the chat template writes calls in the format hermes",
        ),
    ],
)
def test_check_prints_the_format_of_calls(run_cli, rows, random_model, caplog, name, shown, note):
    out, _ = run_cli(*check(rows, random_model), f"rollout.tool_format={name}")
    assert f"\ntool calls are parsed as: {shown}\n" in f"\n{out}"
    assert note in caplog.text and ("in the format hermes" in caplog.text) == bool(note)


def test_check_refuses_rows_whose_calls_cannot_be_parsed(run_cli, rows, random_model, tmp_path):
    """The run would train on calls that never ran; rows without tools may be played."""
    import shutil

    from transformers import AutoTokenizer

    model = shutil.copytree(random_model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    written = "<|im_end|>\\n"
    source = str(tokenizer.chat_template)
    assert source.count("message.content + '" + written) == 1
    tokenizer.chat_template = source.replace(
        "message.content + '" + written,
        "(message.content or '') + ('<|tool_call:begin|>' + message.tool_calls[0].function.name"
        " + '<|tool_call:args|>' + message.tool_calls[0].function.arguments | tojson"
        " if message.tool_calls else '') + '" + written,
    )
    tokenizer.save_pretrained(model)
    _, err = run_cli(*check(rows, model))
    assert err.startswith("error: 2 rows show tools, but agentrl cannot parse the tool calls of ")
    assert "in the format of Solar: '<|tool_call:begin|>probe<|tool_call:args|>" in err
    assert "agentrl reads: " in err and "hermes" in err and "agent_name=react" in err
    out, _ = run_cli(*check(rows, model), "rollout.tool_format=hermes")
    assert "all checks passed" in out
    assert (
        "tool calls cannot be parsed: the chat template renders tool calls in the format of Solar"
        in (CliRunner().invoke(app, ["check-template", str(model)]).output)
    )


def test_check_warns_about_tools_that_the_template_does_not_show(
    run_cli, rows, random_model, tmp_path, caplog
):
    import shutil

    from transformers import AutoTokenizer

    warning = "2 rows have tools, but the chat template"
    out, _ = run_cli(*check(rows, random_model))
    assert "all checks passed" in out and warning not in caplog.text
    model = shutil.copytree(random_model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(model)
    out, _ = run_cli(*check(rows, model), "rollout.tool_format=hermes")
    assert "all checks passed" in out and warning in caplog.text


def test_check_refuses_an_unknown_parser(run_cli, rows, random_model):
    _, err = run_cli(*check(rows, random_model), "rollout.tool_format=sglang:foo")
    assert "sglang" in err and "all checks passed" not in err


def test_check_refuses_variables_that_the_template_never_reads(run_cli, rows, random_model):
    _, err = run_cli(*check(rows, random_model), "model.template_kwargs.enable_thinkin=false")
    assert "model.template_kwargs: the chat template never reads 'enable_thinkin'. It reads:" in err


def test_check_asks_the_server_for_the_tools_of_the_rows(run_cli, rows, random_model, tmp_path):
    from agentrl.tools.serving.background import serve_in_background

    other = tmp_path / "other.py"
    other.write_text(
        "from agentrl import tool\n\n\n@tool\ndef other_tool() -> str:\n    'Other.'\n"
    )
    for file, right in (("shelf:calculator", True), (str(other), False)):
        url, token, server = serve_in_background([file])
        with server, pytest.MonkeyPatch.context() as environment:
            environment.setenv("AGENTRL_TOOLS_TOKEN", token)
            _, err = run_cli(*check(rows, random_model, f"tools.transport={url}"))
        if not right:
            assert f"the tools at {url}: no tool named 'calculator'" in err
            assert "Registered: other_tool" in err


def test_deterministic_is_a_flag(run_cli, rows, random_model):
    out, err = run_cli(*check(rows, random_model, "--deterministic"))
    assert "rollout.deterministic=true" in out
    assert "rollout.deterministic=true has no effect: rollout.name is local" in err
    assert "rollout.deterministic" not in "".join(run_cli(*check(rows, random_model)))


def test_every_flag_that_the_docs_name_is_an_option():
    train = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    options = {name for option in train.params for name in option.opts}
    named = {flag_of(key) for key in FIELDS} - {""}
    assert named and named <= options


@pytest.mark.parametrize("command", ["eval", "play"])
def test_a_model_that_a_running_server_does_not_load_is_reported(
    run_cli, rows, random_model, caplog, command
):
    words = [command, *check(rows, random_model)[1:], "rollout.urls=[http://127.0.0.1:1]"]
    _, err = run_cli(*words, "rollout.name=sglang", "trainer.device=cpu")
    assert "error: GET http://127.0.0.1:1" in err
    [warning] = [m for m in caplog.messages if "rollout.urls" in m]
    assert "not from --model (model.path)" in warning
    caplog.clear()
    run_cli(*words[:-1], "val.n=1", "rollout.max_turn_tokens=2", "trainer.device=cpu")
    assert not any("rollout.urls" in m for m in caplog.messages)


def test_a_run_prints_the_next_commands(tmp_path):
    overrides = ["data.train=a.jsonl", "data.val=b.jsonl"]
    run = ["-c", f"{tmp_path}/config.yaml", "--dataset", "b.jsonl", "--model", f"{tmp_path}/model"]
    sampled = next_commands(tmp_path, load_config(overrides=overrides))
    assert sampled[0] == ["agentrl", "play", *run, "-n", "3"]
    assert sampled[1] == ["agentrl", "eval", *run, "val.n=4"]
    greedy = next_commands(tmp_path, load_config(overrides=[*overrides, "val.temperature=0"]))
    assert greedy[1] == ["agentrl", "eval", *run]


def test_the_table_of_an_evaluation():
    one = {"reward/mean@2": 0.5, "acc/mean@2": 0.25, "acc/pass@2": 0.75, "num_turns": 2.0}
    metrics = {f"val/{k}": v for k, v in one.items()}
    metrics |= {f"val/{a}/{k}": v for k, v in one.items() for a in ("react", "mine")}
    metrics |= {"val/tool_call_rate": 0.5, "val_greedy/reward/mean@1": 1.0}
    assert table(metrics, ["mine", "react"], 2) == [
        "                reward    acc  pass@2  calls tools  turns",
        "all    sampled   0.500  0.250   0.750          50%    2.0",
        "all    greedy    1.000      -       -            -      -",
        "mine   sampled   0.500  0.250   0.750            -    2.0",
        "react  sampled   0.500  0.250   0.750            -    2.0",
    ]
    assert [line.split()[0] for line in table(metrics, ["mine"], 2)[1:]] == ["mine", "mine"]


def test_warnings_about_training_are_silenced_without_training(caplog):
    log = logging.getLogger("agentrl.rewards.scorer")
    with _silence_training_warnings():
        log.warning("one")
    log.warning("two")
    assert caplog.messages == ["two"]
