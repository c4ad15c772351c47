"""Servers of OpenEnv: actions as tools and as texts, faults, sessions, training."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random

import pytest
from support.at_once import play_at_once
from support.killed_door import outcomes_with_a_kill

from agentrl import load_config
from agentrl.cli import main
from agentrl.demo import TINY_SETTINGS
from agentrl.doors import program
from agentrl.engine.remote.launch import free_port
from agentrl.errors import Infrastructure, UserError
from agentrl.preflight import make_plan
from agentrl.record import METRICS, read_metrics
from agentrl.registry import tools
from agentrl.testing import byte_tokenizer, call
from agentrl.trainer import Trainer

TOKENIZER = byte_tokenizer()
HERE = Path(__file__).parent
KINDS = HERE / "environments" / "openenv_kinds.py"
pytestmark = pytest.mark.doors


@contextlib.contextmanager
def running(file, port=0):
    """Run a server with the package's Python; yield its port."""
    port = port or free_port()
    python = program.environment_folder("openenv") / "bin" / "python"
    with subprocess.Popen([str(python), str(file), str(port)]) as child:
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and child.poll() is None:
                with contextlib.suppress(OSError):
                    get(port, "health")
                    break
                time.sleep(0.1)
            yield port
        finally:
            child.kill()


@pytest.fixture(scope="module")
def started():
    """The server of this module, which the first test starts."""
    with contextlib.ExitStack() as stack:
        yield cache(lambda: stack.enter_context(running(KINDS)))


@pytest.fixture
def port(use_packages, started):
    use_packages("openenv")
    return started()


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
        return json.load(answer)


def sessions_end(port):
    """Return whether the server closes all environments within 10 s."""
    deadline = time.monotonic() + 10
    while get(port, "open") and time.monotonic() < deadline:
        time.sleep(0.05)
    return get(port, "open") == 0


def settings(folder, address, rows=({},)):
    """Return the config keys for rows with these arguments of `reset`."""
    row = {"prompt": "Play.", "environment": "maze"}
    texts = [json.dumps({**row, "environment_kwargs": kwargs}) for kwargs in rows]
    (folder / "rows.jsonl").write_text("\n".join(texts))
    return {
        "data.train": str(folder / "rows.jsonl"),
        "environments": {"maze": f"openenv://127.0.0.1:{address}"},
    }


def samples_of(folder, address, rows=({},)):
    return list(make_plan(load_config(None, [], settings(folder, address, rows))).train)


def play(sample, script, *overrides):
    [played] = play_at_once([sample], script, TOKENIZER, overrides)
    return played


def read_by(trajectory, role):
    return [m.content for m in trajectory.messages if m.role == role]


@pytest.mark.proves("openenv", "tools", "reward")
def test_a_typed_action_is_a_tool(port, tmp_path):
    [sample] = samples_of(tmp_path, f"{port}/numbers", [{"seed": 1, "highest": 100}])
    [schema] = tools.get("maze").spec.schemas
    assert schema["function"] == {
        "name": "step",
        "description": "Guess the number.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer"}},
            "required": ["number"],
            "additionalProperties": False,
        },
    }
    script = [call("step", number=n) for n in (50, "x", 18, 19)]
    played = play(sample, [*script, "I found it"])
    assert read_by(played, "user") == ["Play.", "A number from 1 to 100."]
    lower, invalid, right, over = read_by(played, "tool")
    assert lower == "It is lower." and "'number' must be an integer" in invalid
    assert right == "Right!\nThe episode is over." and over == "Error: The episode is over."
    assert played.scores.outcome == 1.0
    assert played.scores.metrics == {"last_reward": 1.0, "step_count": 2.0}
    assert sessions_end(port)


@pytest.mark.proves("openenv", "user")
def test_an_action_of_one_text_is_the_text_of_the_assistant(port, tmp_path):
    [sample] = samples_of(tmp_path, f"{port}/chat", [{"greeting": "Ho"}])
    assert tools.get("maze").spec.schemas == []
    played = play(sample, ["abc", "bye", "never said"])
    assert read_by(played, "user") == ["Play.", "Ho", "abc!"]
    assert played.stop_reason == "done" and len(played.turns) == 2
    # The outcome is the sum of 0.3 and 0.3.
    assert played.scores.outcome == 0.6 and played.scores.metrics["last_reward"] == 0.3


def test_a_text_that_is_too_long_is_refused_and_the_episode_goes_on(port, tmp_path):
    [sample] = samples_of(tmp_path, f"{port}/chat")
    played = play(sample, ["x" * 101, "bye"])
    assert (
        "invalid arguments: message: String should have at most 100" in played.messages[3].content
    )
    assert played.stop_reason == "done" and played.scores.outcome == 0.3


@pytest.mark.parametrize("kind", ["cards", "cards-untyped"])
def test_mcp_tools_are_tools(port, tmp_path, kind):
    [sample] = samples_of(tmp_path, f"{port}/{kind}")
    [schema] = tools.get("maze").spec.schemas
    assert schema["function"]["name"] == "draw"
    assert schema["function"]["description"] == "Draw a card."
    assert list(schema["function"]["parameters"]["properties"]) == ["type"]
    script = [*(call("draw", type=n) for n in (2, 0, 3, 1)), "Done"]
    played = play(sample, script)
    # The first observation has no fields, so it is no message.
    assert read_by(played, "user") == ["Play."]
    assert read_by(played, "tool") == [
        "You drew 0.5",
        "Error: Error calling tool 'draw': division by zero",
        "You drew 0.3\nThe episode is over.",
        "Error: The episode is over.",
    ]
    assert played.scores.outcome == 5.0


def test_each_type_of_a_union_is_a_tool(port, tmp_path):
    [sample] = samples_of(tmp_path, f"{port}/board")
    schemas = {s["function"]["name"]: s["function"] for s in tools.get("maze").spec.schemas}
    assert schemas.keys() == {"look", "move"}
    assert schemas["move"]["description"] == "Move on the board."
    assert schemas["move"]["parameters"]["required"] == ["to"]
    assert list(schemas["move"]["parameters"]["properties"]) == ["to"]
    to = {"x": 3, "y": 4}
    played = play(sample, [call("move", to=to), call("look", direction="up"), call("look"), "Done"])
    assert played.messages[1].content == '{"x": 0, "y": 0}'
    first, refused, last = read_by(played, "tool")
    assert first == last == '{"x": 3, "y": 4}' and "'direction'" in refused
    assert played.scores.outcome == 2.0


@pytest.mark.parametrize(
    ("reset", "number", "message"),
    [
        ({}, 1, r"answered a step with EXECUTION_ERROR: the simulator is down"),
        ({"broken": True}, 9, r"answered a reset with EXECUTION_ERROR: no board"),
        # The package cannot send the error of a validator, and closes the session instead.
        ({}, 2, r"answered a step with SESSION_ERROR: Unable to serialize"),
    ],
)
def test_errors_of_the_server_are_no_reward(port, tmp_path, reset, number, message):
    [sample] = samples_of(tmp_path, f"{port}/faults", [reset])
    with pytest.raises(Infrastructure, match=rf"openenv: .*127.0.0.1:{port}/faults {message}"):
        play(sample, [call("step", number=number), "Done"])
    assert sessions_end(port)


class Broken(BaseHTTPRequestHandler):
    """A server that knows its actions, and answers all else with 500."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        action = {"properties": {"number": {"type": "integer"}}, "type": "object"}
        body = json.dumps({"action": action}).encode()
        self.send_response(200 if self.path == "/schema" else 500)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_a_server_that_answers_500_is_no_reward(use_packages, tmp_path):
    use_packages("openenv")
    with ThreadingHTTPServer(("127.0.0.1", 0), Broken) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        [sample] = samples_of(tmp_path, port)
        with pytest.raises(Infrastructure, match=rf"openenv: .*127.0.0.1:{port}/ws: .*HTTP 500"):
            play(sample, [call("step", number=3), "Done"])
        server.shutdown()


def test_a_server_that_dies_is_no_reward(use_packages, tmp_path):
    use_packages("openenv")
    with running(KINDS) as port:
        samples = samples_of(tmp_path, f"{port}/faults")
        for message in ("does not answer a step: ConnectionClosed", "Failed to connect to"):
            with pytest.raises(Infrastructure, match=f"openenv: .*{message}"):
                play(samples[0], [call("step", number=3), "Done"])


def test_a_server_that_is_started_again_does_not_continue_the_episode(use_packages, tmp_path):
    """The package's own client would open a new session, and play in another state."""
    use_packages("openenv")
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        port = first.enter_context(running(KINDS))
        [sample] = samples_of(tmp_path, f"{port}/chat")

        def answer(prompt, turn):
            if turn == 1:
                first.close()
                second.enter_context(running(KINDS, port))
            return "hello"

        with pytest.raises(Infrastructure, match="does not answer a step: ConnectionClosed"):
            play(sample, lambda sample: answer)
        assert get(port, "open") == 0


def test_a_killed_process_of_the_door_is_played_again(use_packages, tmp_path):
    def guess(samples, prompt, number):
        return "Done" if "Right!" in prompt else call("step", number=number + 1)

    use_packages("openenv")
    with running(HERE / "openenv_server.py") as port:
        keys = settings(tmp_path, port, [{"seed": i, "highest": 3} for i in range(2)])
        outcomes, played = outcomes_with_a_kill(keys, guess)
    assert outcomes == [1.0] * 4 and played > 4


def test_an_answer_that_is_broken_is_no_reward(use_packages, tmp_path):
    """The model would read the error of a tool, and the episode would have the reward 0."""
    use_packages("openenv")
    with running(HERE / "environments" / "openenv_broken.py") as port:
        [sample] = samples_of(tmp_path, port)
        for number in range(7):
            with pytest.raises(Infrastructure, match="openenv: "):
                play(sample, [call("step", number=number), "Done"])


@pytest.fixture
def short_limits(tmp_path, monkeypatch):
    """The program with limits of 1 s."""
    folder = tmp_path / "programs"
    shutil.copytree(program.PROGRAMS, folder)
    file = folder / "openenv.py"
    text = file.read_text()
    assert text.count("300.0") == 3
    file.write_text(text.replace("300.0", "1.0"))
    monkeypatch.setattr(program, "PROGRAMS", folder)


def test_a_server_that_hangs_is_no_reward(port, tmp_path, short_limits):
    [sample] = samples_of(tmp_path, f"{port}/faults")
    with pytest.raises(Infrastructure, match="does not answer a step: TimeoutError"):
        play(sample, [call("step", number=5), "Done"])
    assert sessions_end(port)


def test_episodes_wait_for_a_free_session(port, tmp_path):
    samples = samples_of(tmp_path, f"{port}/three", [{"seed": i} for i in range(30)])
    played = play_at_once(samples, [call("step", number=1), "Done"], TOKENIZER)
    assert all(t.scores.metrics["step_count"] == 1.0 for t in played)
    assert sessions_end(port)


def test_a_server_without_a_free_session_is_no_reward(port, tmp_path, short_limits):
    [sample] = samples_of(tmp_path, f"{port}/three")

    async def hold_all_sessions():
        held = program.Program("openenv")
        try:
            url = f"http://127.0.0.1:{port}/three"
            for number in range(3):
                await held.call("start", episode=str(number), url=url, arguments={})
            with pytest.raises(Infrastructure, match=r"CAPACITY_REACHED: .*3/3 sessions active"):
                await asyncio.to_thread(play, sample, ["Done"])
        finally:
            await asyncio.to_thread(held.close)

    asyncio.run(hold_all_sessions())
    assert sessions_end(port)


def test_an_action_that_a_budget_interrupts_closes_the_session(port, tmp_path):
    """The outcome is the sum of the rewards so far."""
    samples = samples_of(tmp_path, f"{port}/faults", [{"seconds": 0.6 * i} for i in range(5)])
    script = [call("step", number=9), *[call("step", number=5)] * 9]
    overrides = ["rollout.timeout_s=12", "rollout.max_turns=20"]
    played = play_at_once(samples, script, TOKENIZER, overrides)
    assert {t.stop_reason for t in played} == {"time"}
    assert all(t.scores.outcome == read_by(t, "tool").count("ok") >= 1 for t in played)
    # The time may also end between two actions, but not for all of them.
    assert any("step_count" not in t.scores.metrics for t in played)
    assert sessions_end(port)


def test_a_cancelled_start_closes_its_session(port, tmp_path):
    async def work():
        opened = program.Program("openenv")
        url = f"http://127.0.0.1:{port}/faults"
        starts = [
            asyncio.create_task(
                opened.call("start", episode=str(i), url=url, arguments={"seconds": 1})
            )
            for i in range(5)
        ]
        while get(port, "open") < 5:
            await asyncio.sleep(0.05)
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
        assert await asyncio.to_thread(sessions_end, port)
        await asyncio.to_thread(opened.close)

    asyncio.run(work())


CODE = """
import asyncio
from agentrl.doors.program import program
async def work():
    await asyncio.gather(*(
        program("openenv").call("start", episode=str(i), url={url!r}, arguments={{}})
        for i in range(20)
    ))
    print("started", flush=True)
    await asyncio.sleep(60)
asyncio.run(work())
"""


def test_a_killed_run_leaves_no_session(port):
    code = CODE.format(url=f"http://127.0.0.1:{port}/numbers")
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ}
    ) as child:
        assert child.stdout.readline() == "started\n" and get(port, "open") == 20
        child.send_signal(signal.SIGKILL)
    assert sessions_end(port)


@pytest.mark.proves("openenv", "200 episodes at once")
@pytest.mark.load
def test_200_episodes_at_once_have_states_of_their_own(port, tmp_path):
    samples = samples_of(
        tmp_path, f"{port}/numbers", [{"seed": i, "highest": 10} for i in range(20)]
    )
    script = [*(call("step", number=n) for n in range(1, 11)), "Done"]
    played = play_at_once(samples * 10, script, TOKENIZER, ["rollout.max_turns=20"])
    assert len(played) == 200
    for trajectory in played:
        number = Random(trajectory.sample.row).randint(1, 10)
        wrong, right = ["It is higher."] * (number - 1), ["Right!\nThe episode is over."]
        over = ["Error: The episode is over."] * (10 - number)
        assert read_by(trajectory, "tool") == wrong + right + over
        assert trajectory.scores.outcome == 1.0
        assert trajectory.scores.metrics["step_count"] == number
    assert sessions_end(port)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("openenv://127.0.0.1:{free}", r"environments.maze: no OpenEnv server at http://127.* \(.*"
         r"GET .*Connection refused.*uvicorn server:app"),
        ("openenv://127.0.0.1:{port}/web", "no OpenEnv server at .*HTTP Error 404.* leave out the"),
        ("openenv:127.0.0.1:{port}", "is not openenv://HOST:PORT"),
        ("openenv:ftp://127.0.0.1", "is not openenv://HOST:PORT"),
        ("openenv://", "is not openenv://HOST:PORT"),
    ],
)  # fmt: skip
def test_wrong_addresses_are_refused(port, tmp_path, address, message):
    keys = settings(tmp_path, f"{port}/numbers")
    url = address.format(port=port, free=free_port())
    with pytest.raises(UserError, match=f"(?s){message}"):
        make_plan(load_config(None, [], {**keys, "environments": {"maze": url}}))


def test_a_url_with_its_scheme_is_an_address(port, tmp_path):
    keys = settings(tmp_path, port)
    environments = {"maze": f"openenv:http://127.0.0.1:{port}/numbers/"}
    assert make_plan(load_config(None, [], {**keys, "environments": environments})).train


def test_a_server_without_tools_is_refused(port, tmp_path):
    with pytest.raises(UserError, match=r"environments.maze at http.*lists no MCP tools"):
        samples_of(tmp_path, f"{port}/empty")


def test_a_missing_package_says_how_to_install_it(tmp_path, monkeypatch, own_registries):
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))
    with pytest.raises(UserError, match="agentrl doors install openenv"):
        samples_of(tmp_path, 1)


def test_the_check_finds_no_fault_in_the_example(use_packages, tmp_path, capsys):
    use_packages("openenv")
    with running(HERE / "openenv_server.py") as port:
        keys = settings(tmp_path, port, [{"seed": 1}, {"seed": 2}])
        url = f"openenv://127.0.0.1:{port}"
        with pytest.raises(SystemExit) as ended:
            main(["check", "environment", keys["data.train"], f"environments={{maze: '{url}'}}"])
        shown = capsys.readouterr().out
        assert ended.value.code == 0 and "0 of 20 checks failed" in shown, shown


@pytest.mark.proves("openenv", "training")
@pytest.mark.slow
def test_tiny_trains(use_packages, tiny_model, tmp_path):
    use_packages("openenv")
    with running(HERE / "openenv_server.py") as port:
        flags = {
            **settings(tmp_path, port, [{"seed": i, "highest": 9} for i in range(4)]),
            "model.path": str(tiny_model),
            "trainer.output": str(tmp_path / "run"),
        }
        overrides = [
            "data.batch_size=2", "rollout.n=2", "trainer.total_steps=5", "trainer.device=cpu",
            "trainer.save_freq=never", "rollout.max_turns=3", "rollout.max_trajectory_tokens=1024",
        ]  # fmt: skip
        Trainer(load_config(None, overrides, flags, preset=TINY_SETTINGS)).run()
    metrics = [values for _, values in read_metrics(tmp_path / "run" / METRICS)]
    assert len([m for m in metrics if "critic/score/mean" in m]) == 5
