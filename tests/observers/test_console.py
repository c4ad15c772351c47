"""The output of a run: lines, a display in a terminal, JSON."""

from __future__ import annotations

import gc
import io
import json
import logging
import re
import time
import weakref
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console as Terminal
from support.forked_python import run_agentrl

from agentrl.callbacks import Event
from agentrl.config import Config
from agentrl.observers.console import Console
from agentrl.observers.json_log import JsonConsole
from agentrl.observers.live import LiveConsole
from agentrl.observers.results import Results
from agentrl.player import Wait
from agentrl.record import METRICS
from agentrl.report.finding import Finding
from agentrl.rollout import Progress
from agentrl.trainer import display as display_module
from agentrl.trainer.display import Activity

STEP = {
    "critic/score/mean": 0.53125,
    "tool_call_counts/mean": 1.2,
    "actor/grad_norm": 0.7,
    "perf/throughput": 5123.4,
    "timing_s/step": 0.61,
    "other": 1.0,
}
VALIDATION = {
    "val/reward/mean@2": 0.5,
    "val/tool_call_rate": 0.4,
    "val/react/reward/mean@2": 0.4,
    "val/react/tool_call_rate": 0.98,
    "val/single_turn/reward/mean@2": 0.6,
    "val/single_turn/tool_call_rate": 0.0,
    "val/react/acc/mean@2": 0.1,
    "val_greedy/reward/mean@1": 0.7,
    "val_greedy/react/reward/mean@1": 0.7,
    "val-core/gsm8k/reward/mean@2": 0.5,
}


def event(step, metrics=None, total=120, folder=Path("runs/a")):
    return Event(step, total, metrics or {}, folder)


def begin(console, step, total, activity):
    console.follow(activity)
    console.on_begin(event(step, total=total))


def test_plain_lines_without_a_terminal():
    out = io.StringIO()
    with Console(out) as console:
        console.on_validation(event(0, VALIDATION))
        console.on_step(event(7, STEP))
        console.note("a [bold]note[/bold]")
    assert out.getvalue().splitlines() == [
        "validation at step 0:  all 0.500  react 0.400 (98% call)  single_turn 0.600  greedy 0.700",
        "step   7/120  reward 0.531  calls 1.20  grad 0.70  tokens/s 5,123  s 0.6",
        "a [bold]note[/bold]",
    ]


def test_a_live_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    out = io.StringIO()
    with LiveConsole(out) as console:
        begin(console, 0, 120, lambda: Activity("gen", 1.0, None))
        console.note("before")
        console.on_validation(event(0, VALIDATION))
        for step in range(1, 31):
            console.on_step(event(step, STEP))
        console.note("a [bold]note[/bold]")
    console.close()
    shown = out.getvalue()
    assert shown.startswith("before\n")
    assert "a [bold]note[/bold]" in shown
    last = shown.splitlines()
    assert any("reward" in line and "tokens/s" in line for line in last)
    assert any("0.400 (98% call)" in line for line in last)
    # Nothing runs any more, so no time is left.
    assert "30/120" in last[-1] and "elapsed" in last[-1] and "left" not in shown


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        ("36", ["step", "reward", "calls", "ppo_kl"]),
        ("40", ["step", "reward", "calls", "ppo_kl", "grad"]),
        ("80", ["step", "reward", "calls", "ppo_kl", "grad", "tokens/s", "s"]),
    ],
)
def test_a_narrow_table_drops_columns_and_no_digits(monkeypatch, width, columns):
    monkeypatch.setenv("COLUMNS", width)
    out = io.StringIO()
    with LiveConsole(out) as console:
        console.on_validation(event(0, VALIDATION))
        console.on_step(event(7, STEP | {"actor/ppo_kl": 0.0012}))
    lines = out.getvalue().splitlines()
    start = max(i for i, line in enumerate(lines) if "reward" in line)
    assert lines[start].split() == columns
    digits = ["7", "0.531", "1.20", "0.0012", "0.70", "5,123", "0.6"]
    assert lines[start + 1].split() == digits[: len(columns)]
    assert "…" not in out.getvalue()
    assert max(map(len, lines[start:])) <= int(width)


def test_the_console_keeps_only_the_metrics_that_it_shows():
    class Metrics(dict):
        pass

    console, kept = LiveConsole(io.StringIO()), []
    for step in range(100):
        for show, data in ((console.on_step, STEP), (console.on_validation, VALIDATION)):
            metrics = Metrics(data)
            kept.append(weakref.ref(metrics))
            show(event(step, metrics))
    del metrics
    gc.collect()
    assert 8 <= sum(ref() is not None for ref in kept) <= 30


def test_the_end_prints_the_result_and_the_next_commands(tmp_path):
    folder = tmp_path / "runs" / "my demo"
    folder.mkdir(parents=True)
    history = [(0, VALIDATION), (1, STEP), (2, STEP | VALIDATION | {"val/reward/mean@2": 0.9})]
    lines = [json.dumps({"step": step, "data": data}) for step, data in history]
    (folder / METRICS).write_text("".join(f"{line}\n" for line in lines))
    (folder / "global_step_00000010").mkdir()
    config = Config.model_validate({"files": ["tools.py"], "data": {"val": "val.parquet"}})
    out = io.StringIO()
    Results(config, Console(out)).on_end(event(2, folder=folder))
    text = out.getvalue()
    assert "all          0.500 -> 0.900" in text
    assert f"{folder / 'global_step_00000010'}" in text
    assert "trajectories" not in text  # not there, not named
    run = f"-c '{folder / 'config.yaml'}' --dataset val.parquet --model '{folder / 'model'}'"
    assert f"agentrl play {run} -n 3" in text
    assert f"agentrl eval {run} val.n=4" in text


def test_a_phase_that_takes_long_has_two_lines(monkeypatch):
    monkeypatch.setattr(display_module, "PHASE_SECONDS", 0.1)
    out = io.StringIO()
    with Console(out) as console:
        with console.phase("short"):
            pass
        with console.phase("load the model"):
            deadline = time.monotonic() + 10
            while "started" not in out.getvalue():
                assert time.monotonic() < deadline
                time.sleep(0.01)
    first, last = out.getvalue().splitlines()
    assert first == "load the model: started"
    assert re.fullmatch(r"load the model: \d+\.\d s", last)


def progress():
    wait = Wait("gsm8k\x1b-17", 3, "tools http://127.0.0.1:8000", time.monotonic() - 14.2)
    return Progress(37, 64, wait)


def shown(console: LiveConsole) -> list[str]:
    out = io.StringIO()
    Terminal(file=out).print(console.render(), end="")
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_the_display_says_what_runs_and_where_the_time_goes(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "60")
    console = LiveConsole(io.StringIO())
    assert shown(console) == []
    begin(console, 0, 20, lambda: Activity("gen", 12.0, progress()))
    times = {
        "timing_s/step": 8.0,
        "timing_s/gen": 6.0,
        "timing_s/agent_loop/generate_sequences/mean": 2.0,
        "timing_s/agent_loop/tool_calls/mean": 1.0,
        "timing_s/update_actor": 1.0,
        "timing_s/update_weights": 0.5,
        "timing_s/canary": 0.1,
        "timing_s/testing": 2.0,
    }
    for step, reward in enumerate((0.0, 0.5, 1.0, 0.25), 1):
        console.on_step(event(step, {"critic/score/mean": reward} | times, total=20))
    lines = shown(console)
    assert lines[-5].split("  ", 1)[1].strip() == "▁▅█▃  0.000 to 0.250 in 4 steps"
    assert lines[-4].split("  ", 1)[1].split("■ ")[1:] == [
        "generate 40%  ", "tools 20%  ", "validation 20%  ",
        "update 10%  ", "publish 6%  ", "other 4%",
    ]  # fmt: skip
    assert lines[-3] == "now      step 5, episodes  37/64 ended  27 in flight  0:12"
    wait = "row gsm8k\\x1b-17, rollout 3: 14 s, tools http://127.0.0.1:8000"
    assert lines[-2] == f"slowest  {wait}"
    # Four steps of 8 s: the first one began 8 s before its end.
    assert re.search(r" 4/20  elapsed 0:00, about 0:32 left$", lines[-1])


def test_a_phase_is_shown_with_its_progress(monkeypatch):
    from agentrl.observers import live

    monkeypatch.setattr(live, "PHASE_SECONDS", 0.0)
    console = LiveConsole(io.StringIO())
    begin(console, 3, 20, lambda: Activity("gen", 12.0, None))
    with console.phase("validation", lambda: Progress(5, 8)):
        assert shown(console)[1] == "now      validation  5/8 ended  3 in flight  0:00"
    assert shown(console)[1] == "now      step 4, episodes  0:12"


@pytest.mark.parametrize("height", [8, 12, 24, 60])
@pytest.mark.parametrize("width", [20, 36, 60, 80, 120, 200])
def test_the_display_fits_the_terminal(monkeypatch, width, height):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", str(height))
    console = LiveConsole(io.StringIO())
    begin(console, 0, 120, lambda: Activity("gen", 12.0, progress()))
    for step in range(1, 40):
        console.on_step(event(step, STEP))
        console.on_validation(event(step, VALIDATION))
    lines = shown(console)
    assert max(map(len, lines)) <= max(width, 25)
    assert len(lines) <= max(8, height // 2)
    assert "39/120" in lines[-1]
    if height >= 24:
        assert any(line.split()[:2] == ["39", "0.531"] for line in lines)


# -- JSON -----------------------------------------------------------------------------------------

ENV = """
import os
from agentrl import reward

print("printed when the file is loaded")

@reward("letters_console")
def letters(trajectory) -> float:
    print("printed by a reward")
    os.write(1, b"written to the file descriptor\\n")
    return len(set(trajectory.assistant_text)) / 10
"""


@pytest.fixture
def keys(tmp_path, random_model):
    (tmp_path / "env.py").write_text(ENV)
    rows = [{"prompt": f"Say {i}.", "ground_truth": "1"} for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [
        f"data.val={tmp_path / 'rows.jsonl'}", f"data.train={tmp_path / 'rows.jsonl'}",
        f"model.path={random_model}", f"files=[{tmp_path / 'env.py'}]", "data.batch_size=2",
        "rollout.n=2", "rollout.max_turn_tokens=8", "tools.transport=in_process",
        "reward.function=letters_console", "trainer.device=cpu",
    ]  # fmt: skip


def events(stdout):
    lines = [json.loads(line) for line in stdout.splitlines()]
    assert all({"event", "time"} <= line.keys() for line in lines)
    return lines


def test_a_run_as_json(keys, tmp_path):
    run = tmp_path / "run"
    words = [*keys, f"trainer.output={run}", "trainer.total_steps=4", "trainer.test_freq=2",
             "trainer.save_freq=2"]  # fmt: skip
    done = run_agentrl("train", *words, "--log-format", "json")
    assert done.returncode == 0, done.stderr
    assert "printed by a reward" in done.stderr and "file descriptor" in done.stderr
    lines = events(done.stdout)
    record = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    assert [(line["step"], line["total_steps"]) for line in steps] == [(i, 4) for i in (1, 2, 3, 4)]
    assert [line["metrics"] for line in steps] == [line["data"] for line in record[1:]]
    validations = [line for line in lines if line["event"] == "validation"]
    assert [line["step"] for line in validations] == [0, 2, 4]
    assert validations[0]["metrics"] == record[0]["data"]
    checkpoints = [line for line in lines if line["event"] == "checkpoint"]
    assert [Path(line["folder"]) for line in checkpoints] == sorted(run.glob("global_step_*"))
    phases = [line for line in lines if line["event"] == "phase"]
    assert [p["name"] for p in phases if p["status"] == "finished"].count("validation") == 3
    assert {p["name"] for p in phases if p["status"] == "finished"} == {p["name"] for p in phases}
    assert {"check the dataset", "load the model", "start the engine", "checkpoint",
            "export the model"} < {p["name"] for p in phases}  # fmt: skip
    assert [line["event"] for line in lines].count("begin") == 1
    assert lines[-1] | {"time": 0} == {
        "event": "end", "time": 0, "status": "finished", "step": 4, "error": None,
    }  # fmt: skip


def test_findings_and_warnings_as_json():
    out = io.StringIO()
    finding = Finding(3, "no rollout calls a tool", {"calls": 0.0}, name="no_tools")
    with pytest.raises(KeyboardInterrupt), JsonConsole(out) as console:
        console.on_step(event(3, {"a": float("nan"), "b": np.float32(0.5)}, total=9))
        console.finding(finding)
        logging.getLogger("agentrl.rewards").warning("a %s", "warning")
        console.warning("note: doubtful")
        raise KeyboardInterrupt
    step, found, *warnings, end = events(out.getvalue())
    assert step["metrics"] == {"a": None, "b": 0.5}
    assert found | {"event": 0, "time": 0} == asdict(finding) | {
        "event": 0, "time": 0, "episodes": [], "causes": [], "tries": [], "turns": [],
    }  # fmt: skip
    assert [line["text"] for line in warnings] == ["a warning", "note: doubtful"]
    assert (end["status"], end["step"], end["error"]) == ("interrupted", 3, "KeyboardInterrupt")


def test_a_run_that_fails_as_json(keys, tmp_path):
    words = [*keys, f"trainer.output={tmp_path / 'run'}", "reward.function=leters_console"]
    done = run_agentrl("train", *words, "--log-format", "json")
    assert done.returncode == 1
    end = events(done.stdout)[-1]
    assert (end["event"], end["status"], end["step"]) == ("end", "failed", 0)
    assert "leters_console" in end["error"] and end["error"] in done.stderr


def test_an_evaluation_as_json(keys, tmp_path):
    done = run_agentrl("eval", *keys, "--log-format", "json", "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    lines = events(done.stdout)
    (validation,) = [line for line in lines if line["event"] == "validation"]
    assert validation["metrics"] == json.loads((tmp_path / "out/metrics.json").read_text())
    assert lines[-1]["status"] == "finished"
