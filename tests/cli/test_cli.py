"""The output of the command line: versions, keys, notes, tables."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import typer
from PIL import Image as PIL
from support.forked_python import ForkedPython
from support.recorded import play_with_images
from support.trajectories import make_trajectory
from typer.testing import CliRunner

from agentrl import __version__, load_config
from agentrl.chat import ChatTemplate
from agentrl.cli import app, main
from agentrl.cli.evaluate import table
from agentrl.cli.play import transcript
from agentrl.cli.session import silence_training_warnings
from agentrl.cli.spelling import REMOVED
from agentrl.config import FIELDS
from agentrl.config.load import flag_of
from agentrl.config.sources import ALIASES
from agentrl.images import Image
from agentrl.observers.results import next_commands
from agentrl.testing import byte_tokenizer
from agentrl.trajectory import Scored, token_array

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
    ("words", "keys"),
    [
        ("--rollout.n 4", "rollout.n=VALUE"),
        ("--rollout.n=4", "rollout.n=VALUE"),
        ("--lr 1e-4", "optim.lr=VALUE"),
        ("--learning-rate=1e-4", "optim.lr=VALUE"),
        ("--batch_size 4", "data.batch_size=VALUE"),
        ("--train-batch-size 4", "data.batch_size=VALUE"),
        ("--epochs 2", "trainer.total_epochs=VALUE"),
        ("--max-steps", "trainer.total_steps=VALUE"),
        ("--output-dir out", "trainer.output=VALUE"),
        ("--temperature 1", "rollout.temperature=VALUE or val.temperature=VALUE"),
    ],
)
def test_an_option_that_is_a_key_names_the_key(run_cli, words, keys):
    _, err = run_cli("train", *words.split())
    name = words.split()[0].partition("=")[0]
    assert err == f"error: no option {name}. Config keys have no dashes: {keys}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train --dateset f", "(Possible options: --dataset"),
        ("train --frobnicate", "No such option: --frobnicate"),
        ("init --tempalte game", "(Possible options: --template"),
        ("sft --learning-rate=1", "No such option: --learning-rate"),
        ("tools serve --prot 3", "--port)"),
        ("check template --fxi", "--fix)"),
    ],
)
def test_an_unknown_option_is_wrong_usage(words, message):
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 2 and message in " ".join(result.output.split())


@pytest.mark.parametrize("old", REMOVED)
def test_a_removed_spelling_names_the_new_one(old):
    result = CliRunner().invoke(app, old.split())
    assert result.exit_code == 2
    assert f"`agentrl {old}` is now `agentrl {REMOVED[old]}`" in result.output
    assert CliRunner().invoke(app, [*REMOVED[old].split(), "--help"]).exit_code == 0


def test_a_removed_option_may_come_last():
    result = CliRunner().invoke(app, ["train", "-c", "run.yaml", "--dry-run"])
    assert result.exit_code == 2 and "is now `agentrl check`" in result.output


def test_the_keys_of_aliases_exist():
    assert set(ALIASES.values()) <= FIELDS.keys()


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("optim.lr=", ["optim.lr= has no value. Write optim.lr=null for the default, or"
                       " optim.lr=<a number > 0>"]),
        ("rollout.n= optim.lr=", ["rollout.n= has no value", "optim.lr= has no value"]),
        ("optim.learning_rate=1", ["unknown key. Did you mean optim.lr?"]),
        ("trainer.num_train_epochs=1", ["unknown key. Did you mean trainer.total_epochs?"]),
        ("data.per_device_train_batch_size=1", ["unknown key. Did you mean data.batch_size?"]),
        ("algorithm.name=GRPO", ["Did you mean 'grpo'?"]),
    ],
)  # fmt: skip
def test_a_word_in_the_wrong_place_or_spelling_names_the_right_one(run_cli, words, advice):
    _, err = run_cli("train", *words.split())
    assert err.count("error:") == 1
    for text in advice:
        assert text in err


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("rows.jsonl", ["rows.jsonl"]),
        ("tiny env.py", ["tiny", "env.py"]),
        ("optim.lr=1 run.yaml", ["run.yaml"]),
        ("optim.lr 1e-5", ["optim.lr", "1e-5"]),
        ("optim.lr = 1", ["optim.lr", "=", "1"]),
    ],
)
def test_a_word_without_a_key_and_a_value_is_refused(run_cli, words, refused):
    _, err = run_cli("train", *words.split(), "--model", "tiny")
    lines = err.splitlines()[1:]
    assert lines == [
        f"  - {word!r} is not of the form section.key=value, without spaces. Files and models"
        " need an option: --dataset, --model, --file or --config"
        for word in refused
    ]


def test_a_file_that_does_not_load_causes_no_second_mistake(run_cli, tmp_path, monkeypatch, rows):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_env.py").touch()
    (tmp_path / "raises.py").write_text("1 / 0")
    files = ["-f", "my_evn.py", "-f", ".", "-f", "rows.jsonl", "-f", "raises.py"]
    words = ["--dataset", rows, "--val-dataset", "none.jsonl", "--model", "tiny", *files]
    _, err = run_cli("check", *words, "reward.function=exact")
    lines = err.splitlines()
    assert [line.partition("(")[0] for line in lines] == [
        "error: no such file: my_evn.py ",
        f". is a folder. Files in {tmp_path}: my_env.py, raises.py",
        "rows.jsonl is neither a Python file ",
        "raises.py:1 cannot be loaded: ZeroDivisionError: division by zero",
        "no such file: none.jsonl ",
    ]
    assert "Did you mean 'my_env.py'?" in lines[0] and "use --dataset rows.jsonl" in lines[2]


def test_a_missing_package_and_the_file_that_needs_it_are_named(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("import json\nimport no_such_package.part")
    (tmp_path / "typo.py").write_text("import json.no_such_part")
    _, err = run_cli("check", "agent", "--python", "agent.py:run")
    assert "agent.py:2 cannot be loaded: ModuleNotFoundError: No module named" in err
    assert err.rstrip().endswith(f"for example: {sys.executable} -m pip install no_such_package")
    _, err = run_cli("check", "agent", "--python", "typo.py:run")
    assert "typo.py:1 cannot be loaded" in err and "pip" not in err


def test_all_mistakes_of_the_config_are_one_message_and_then_all_of_the_rows(run_cli, tmp_path):
    rows = tmp_path / "val.jsonl"
    rows.write_text(json.dumps({**ROW, "tools": ["calculater"]}))
    words = "--dataset", "missing.jsonl", "--val-dataset", str(rows), "--model", "tiny"
    _, err = run_cli("check", "optim.lrr=1", "data.batch_size=0", *words)
    assert "2 mistakes" in err and "optim.lrr" in err and "data.batch_size=0" in err
    assert err.count("error:") == 1
    _, err = run_cli("check", *words)
    assert "no such file: missing.jsonl" in err and "no tool named 'calculater'" in err


def test_a_run_without_its_config_names_it(run_cli, tmp_path):
    (tmp_path / "config.yaml").touch()
    _, err = run_cli("train", "--output", str(tmp_path))
    assert f"use the config of the run in {tmp_path}: --config {tmp_path}/config.yaml\n" in err


def test_a_misspelled_weight_is_one_mistake(run_cli, tmp_path):
    words = "data.train=[{path: a.jsonl, weigth: 2}]", "--model", "tiny"
    _, err = run_cli("check", *words)
    assert "1 mistake" in err and "unknown name 'weigth'. Did you mean 'weight'?" in err


def test_no_mistake_hides_another_one(run_cli, tmp_path, monkeypatch):
    """Each mistake that is printed is one that was made, and is printed once."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({**ROW, "agent_name": "nope"}))
    (tmp_path / "asked.jsonl").write_text('{"question": "1 + 1?"}')

    def of(*words: str) -> list[str]:
        _, err = run_cli("check", "--model", "tiny", *words)
        return [line.strip(" -") for line in err.splitlines()]

    # A file that does not load may define names, but no columns.
    missing, column = of("-f", "no.py", "--dataset", "rows.jsonl", "data.prompt_key=question")
    assert "no.py" in missing and "no column 'question'" in column
    # Of several files, one is missing.
    lines = of("--dataset", "rows.jsonl", "--dataset", "no.jsonl", "reward.function=x")
    for part in (
        "reward.function='x'",
        "no such file: no.jsonl",
        "agent loop named 'nope'",
    ):
        assert sum(part in line for line in lines) == 1, part
    assert len(lines) == 3
    # Keys contradict each other, and the column of the prompts has a name of its own.
    both = "algorithm.kl_loss_coef=0.1", "algorithm.kl_reward_coef=0.1"
    (_, line) = of("--dataset", "asked.jsonl", "data.prompt_key=question", *both)
    assert "penalize the same KL twice" in line
    # Rows that are wrong are not missing.
    (_, line) = of("data.train=[{path: rows.jsonl, weight: -1}]")
    assert line.startswith("data.train=")
    (tmp_path / "verl.yaml").write_text("actor_rollout_ref: {rollout: {name: local}}")
    lines = of("verl.yaml", "rollout.n=many", "data.train_files=asked.jsonl")
    assert sum("n=many" in line for line in lines) == 1


WAIT = """
import time

print("loading", flush=True)
time.sleep(60)
"""
WAIT_IN_DEL = """
import time

class Slow:
    def __del__(self):  # Python ignores exceptions here
        print("loading", flush=True)
        time.sleep(60)

Slow()
time.sleep(60)
"""


@pytest.mark.parametrize("code_of_file", [WAIT, WAIT_IN_DEL], ids=["file", "del"])
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_exit_codes_of_signals(tmp_path, rows, sent, code, code_of_file):
    file = tmp_path / "slow.py"
    file.write_text(code_of_file)
    words = ["check", "--dataset", rows, "--model", "tiny", "-f", str(file)]
    with ForkedPython(["-m", "agentrl", *words]) as process:
        assert process.read_line() == "loading\n"
        process.send_signal(sent)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == code and "Traceback" not in errors


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


def check(rows, model, *words, transport="in_process"):
    """Without a process for the tools, whose start takes most of the time."""
    options = ["--dataset", rows, "--model", str(model), "-f", "shelf:calculator"]
    return ["check", *options, f"tools.transport={transport}", *words]


def test_check_prints_the_graders_and_doubtful_settings(run_cli, rows, random_model):
    out, err = run_cli(*check(rows, random_model))
    assert "grader gsm8k: 2 rows of data_source openai/gsm8k" in out
    assert "grader gsm8k: 1 row of data_source agentrl/arithmetic" in out
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
    assert err.startswith("error: 2 rows with tools, but agentrl cannot parse the tool calls of ")
    assert "in the format of Solar: '<|tool_call:begin|>probe<|tool_call:args|>" in err
    assert "agentrl reads: " in err and "hermes" in err and "agent_name=react" in err
    out, _ = run_cli(*check(rows, model), "rollout.tool_format=hermes")
    assert "all checks passed" in out
    assert (
        "tool calls cannot be parsed: the chat template renders tool calls in the format of Solar"
        in (CliRunner().invoke(app, ["check", "template", str(model)]).output)
    )


def test_check_warns_about_tools_that_the_template_does_not_show(
    run_cli, rows, random_model, tmp_path, caplog
):
    import shutil

    from transformers import AutoTokenizer

    warning = "2 rows with tools, but the chat template"
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
            _, err = run_cli(*check(rows, random_model, transport=url))
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
    assert sampled[0] == ["agentrl", "report", f"{tmp_path}"]
    assert sampled[1] == ["agentrl", "view", f"{tmp_path}"]
    assert sampled[2] == ["agentrl", "play", *run, "-n", "3"]
    assert sampled[3] == ["agentrl", "eval", *run, "val.n=4"]
    greedy = next_commands(tmp_path, load_config(overrides=[*overrides, "val.temperature=0"]))
    assert greedy[3] == ["agentrl", "eval", *run]


def test_the_table_of_an_evaluation():
    one = {"reward/mean@2": 0.5, "acc/mean@2": 0.25, "acc/pass@2": 0.75, "num_turns": 2.0}
    metrics = {f"val/{k}": v for k, v in one.items()}
    metrics |= {f"val/{a}/{k}": v for k, v in one.items() for a in ("react", "mine")}
    metrics |= {"val/tool_call_rate": 0.5, "val_greedy/reward/mean@1": 1.0}
    metrics |= {"val/rows": 48.0, "val/reward/se@2": 0.0312}
    assert table(metrics, ["mine", "react"], 2) == [
        "                rows         reward    acc  pass@2  calls tools  turns",
        "all    sampled    48  0.500 ± 0.031  0.250   0.750          50%    2.0",
        "all    greedy      -          1.000      -       -            -      -",
        "mine   sampled     -          0.500  0.250   0.750            -    2.0",
        "react  sampled     -          0.500  0.250   0.750            -    2.0",
    ]
    assert [line.split()[0] for line in table(metrics, ["mine"], 2)[1:]] == ["mine", "mine"]


def test_warnings_about_training_are_silenced_without_training(caplog):
    log = logging.getLogger("agentrl.rewards.scorer")
    with silence_training_warnings():
        log.warning("one")
    log.warning("two")
    assert caplog.messages == ["two"]


def test_play_describes_images_in_place_of_their_tokens():
    red, blue = (Image.of(PIL.new("RGB", (56, 28), color)) for color in ("red", "blue"))
    scored = play_with_images(red, blue)
    [segment] = scored.trajectory.segments
    encode = byte_tokenizer().encode
    tokens = replace(
        segment,
        prompt_ids=token_array([*encode("In "), 99, 99, *encode("?")]),
        response_ids=token_array([*encode("no"), 99, 99, *encode(".")]),
    )
    scored = replace(scored, trajectory=replace(scored.trajectory, segments=(tokens,)))
    _, asked, answered, seen, *_ = transcript(scored, ChatTemplate(byte_tokenizer())).splitlines()
    assert asked == f"  In [image 56x28 {red.key[:8]}]?"
    assert answered == "▌ no"
    assert seen == f"  [image 56x28 {blue.key[:8]}]."


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("turn_tokens", "stopped: rollout.max_turn_tokens"),
        ("turns", "stopped: rollout.max_turns"),
        ("done", "done"),
    ],
)
def test_play_names_the_budget_that_ended_an_episode(reason, shown):
    trajectory = make_trajectory(("assistant", "x"), stop_reason=reason)
    scored = Scored(trajectory, {"outcome": 0.0}, 0.0, {})
    template = ChatTemplate(byte_tokenizer())
    assert f"── {shown} · 1 turn · " in transcript(scored, template)
