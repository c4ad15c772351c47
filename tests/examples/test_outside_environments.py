"""TextArena and reasoning-gym as environments in another Python: played, checked, trained."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from agentrl import load_config, load_samples, play
from agentrl.cli import main
from agentrl.demo import TINY_SETTINGS
from agentrl.preflight import make_plan
from agentrl.record import METRICS, read_metrics
from agentrl.testing import Scripted, byte_tokenizer
from agentrl.trainer import Trainer

ROOT = Path(__file__).parents[2]
FILES = {
    "text_game": ROOT / "examples/text_games/env.py",
    "reasoning_task": ROOT / "examples/reasoning_tasks/env.py",
}
TOKENIZER = byte_tokenizer()
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(outside_python, tmp_path_factory):
    """The URL of the environments, and the rows that their own Python writes."""
    folder = tmp_path_factory.mktemp("outside")
    known = {k: v for k, v in os.environ.items() if k != "AGENTRL_TOOLS_TOKEN"}
    variables = {**known, "PYTHONPATH": str(ROOT)}
    for name, file in FILES.items():
        command = [outside_python, str(file), str(folder / f"{name}.jsonl"), "--rows", "4"]
        subprocess.run(command, env=variables, check=True)
    command = [outside_python, "-m", "agentrl", "tools", "serve", *map(str, FILES.values())]
    with subprocess.Popen(
        [*command, "--port", "0"],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        assert server.stdout
        lines = []
        for line in server.stdout:
            lines.append(line)
            if found := re.search(r"2 tools at (http://\S+):", line):
                break
        else:
            pytest.fail("".join(lines))
        yield found[1], folder
        server.terminate()


def environments(url):
    return f"environments={{text_game: '{url}', reasoning_task: '{url}'}}"


@pytest.fixture(autouse=True)
def own_names(own_registries, monkeypatch):
    monkeypatch.setattr("agentrl.tools.remote_environment._loaded", set())


def test_a_game_is_played(served):
    url, folder = served
    kwargs = {"game": "GuessTheNumber-v0", "seed": 3}
    row = {"prompt": "Play.", "environment": "text_game", "environment_kwargs": kwargs}
    (folder / "guess.jsonl").write_text(json.dumps(row))
    flags = {"data.train": str(folder / "guess.jsonl")}
    [sample] = make_plan(load_config(None, [environments(url)], flags)).train
    guesses = iter([10, 15, 5, 12, 17, *range(1, 21)])

    def guess(prompt, turn):
        return f"I say [{next(guesses)}]"

    trajectory = play(
        sample,
        Scripted(guess, TOKENIZER),
        TOKENIZER,
        config=load_config(None, ["rollout.max_turns=20"]),
    )
    assert "guess the number between 1 and 20" in trajectory.messages[1].content
    assert re.match(r"The target number is (higher|lower)", trajectory.messages[3].content)
    assert trajectory.stop_reason == "done" and trajectory.scores.outcome in (0.0, 1.0)


def test_a_task_has_its_own_grader(served):
    url, folder = served
    data = str(folder / "reasoning_task.jsonl")
    plan = make_plan(load_config(None, [environments(url)], {"data.train": data}))
    sample = plan.train[1]
    for answer, outcome in ((sample.extra["solution"][0], 1.0), ("#### none", 0.0), ("17", 0.0)):
        assert play(sample, Scripted([answer], TOKENIZER), TOKENIZER).scores.outcome == outcome


@pytest.mark.parametrize("name", FILES)
def test_a_check_finds_no_fault(served, name, capsys):
    url, folder = served
    with pytest.raises(SystemExit) as ended:
        main(["check", "environment", str(folder / f"{name}.jsonl"), environments(url), "-n", "2"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and "0 of 20 checks failed" in shown, shown
    if name == "reasoning_task":
        assert "passed       the gold solution earns the maximum: on 2 rows" in shown


def test_tiny_trains_on_both(served, tiny_model, tmp_path):
    url, folder = served
    rows = [line for n in FILES for line in (folder / f"{n}.jsonl").read_text().splitlines()]
    data = tmp_path / "both.jsonl"
    data.write_text(
        "".join(json.dumps({**json.loads(r), "id": str(i)}) + "\n" for i, r in enumerate(rows))
    )
    flags = {
        "data.train": str(data),
        "model.path": str(tiny_model),
        "trainer.output": str(tmp_path / "run"),
    }
    overrides = [
        environments(url), "data.batch_size=4", "rollout.n=2", "trainer.total_steps=5",
        "trainer.device=cpu", "trainer.save_freq=never", "rollout.max_turns=3",
        "rollout.max_trajectory_tokens=1024",
    ]  # fmt: skip
    Trainer(load_config(None, overrides, flags, preset=TINY_SETTINGS)).run()
    metrics = [values for _, values in read_metrics(tmp_path / "run" / METRICS)]
    assert len([m for m in metrics if "critic/score/mean" in m]) == 5
    assert len(load_samples(str(data))) == 8
