"""Addresses, doors of other packages, and the process of a door's package."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import doors_page

from agentrl import load_config
from agentrl.cli import main
from agentrl.doors import door, program
from agentrl.doors.door import Door, read_address
from agentrl.doors.install import install, installed_version, use
from agentrl.errors import ConfigError, Infrastructure, ToolError, UserCodeError, UserError
from agentrl.file_loaders import SHIPPED_DOORS, door_names, door_of
from agentrl.preflight import make_plan

PROGRAM = """
import asyncio, os, sys, time

class Down(Exception):
    kind = "infrastructure"

class Refused(Exception):
    kind = "refused"

def echo(value): print("printed", value); return value
ERRORS = {
    "down": Down("no disk"), "refused": Refused("no such move"), "bug": KeyError("x"),
    "exit": SystemExit(3),
}
def fail(kind): raise ERRORS[kind]
def die(): os.kill(os.getpid(), 9)
def block(seconds): time.sleep(seconds); return seconds
def read(): return sys.stdin.read()
def unwritable(): return object()
async def wait(seconds, file):
    try:
        await asyncio.sleep(seconds)
    finally:
        open(file, "w").write("cancelled")
async def close():
    open(os.environ["CLOSED"], "w").write("closed")
"""


@pytest.fixture
def own_program(tmp_path, monkeypatch):
    """A door whose program is PROGRAM, in this Python."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "serve.py").symlink_to(program.PROGRAMS / "serve.py")
    (programs / "pytest.py").write_text(PROGRAM)
    monkeypatch.setattr(program, "PROGRAMS", programs)
    monkeypatch.setenv("CLOSED", str(tmp_path / "closed"))
    own = Door("pytest", "a test", lambda alias, address: None)
    monkeypatch.setattr(program, "find_door", lambda name: own)
    return own


def run(play):
    """Run an async function of a program, which ends afterwards."""

    async def work():
        opened = program.Program("pytest")
        try:
            return await play(opened)
        finally:
            await asyncio.to_thread(opened.close)

    return asyncio.run(work())


def test_calls_return_values_of_any_size(own_program):
    big = {"text": "x" * 3_000_000, "unicode": "ä€", "none": None, "list": [1, 2.5]}
    assert run(lambda p: p.call("echo", value=big)) == big


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("down", Infrastructure, "^pytest: no disk$"),
        ("refused", ToolError, "^no such move$"),
        ("bug", UserCodeError, "pytest: KeyError: 'x'"),
        ("exit", UserCodeError, "pytest: SystemExit: 3"),
    ],
)
def test_errors_have_their_kind(own_program, kind, error, message):
    with pytest.raises(error, match=message):
        run(lambda p: p.call("fail", kind=kind))


def test_what_is_no_json_is_an_error_of_the_program(own_program):
    with pytest.raises(UserCodeError, match="not JSON serializable"):
        run(lambda p: p.call("unwritable"))


def test_the_package_cannot_read_the_channel(own_program):
    assert run(lambda p: p.call("read")) == ""


def test_a_process_that_dies_fails_its_calls_and_starts_again(own_program):
    async def play(p):
        waiting = asyncio.create_task(p.call("block", seconds=60))
        await p.call("echo", value=1)
        with pytest.raises(Infrastructure, match="its process ended with exit code -9"):
            await p.call("die")
        with pytest.raises(Infrastructure, match="its process ended"):
            await waiting
        return await p.call("echo", value=2)

    assert run(play) == 2


def test_calls_run_at_the_same_time(own_program):
    async def play(p):
        await p.call("echo", value=0)
        start = time.monotonic()
        await asyncio.gather(*(p.call("block", seconds=0.5) for _ in range(40)))
        return time.monotonic() - start

    assert run(play) < 5


def test_a_cancelled_call_is_cancelled_in_the_process(own_program, tmp_path):
    file = tmp_path / "wait"

    async def play(p):
        await p.call("echo", value=0)
        task = asyncio.create_task(p.call("wait", seconds=60, file=str(file)))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while not file.exists():
            await asyncio.sleep(0.05)

    run(play)


def test_a_program_frees_its_resources_at_the_end(own_program, tmp_path):
    run(lambda p: p.call("echo", value=0))
    assert (tmp_path / "closed").read_text() == "closed"


def test_a_process_that_still_imports_its_package_ends_at_once(own_program):
    slow = "import os, time; print('imports', flush=True); time.sleep(60); os.abort()"
    (program.PROGRAMS / "pytest.py").write_text(slow)
    child = program._start(own_program)
    while not child.tail:
        time.sleep(0.05)
    start = time.monotonic()
    child.stop(30)
    assert child.exit_code == 0 and time.monotonic() - start < 10


def test_a_killed_run_leaves_no_process(tmp_path):
    """The process reads the end of its input, and calls `close`, also after SIGKILL of the run."""
    code = f"""
import asyncio, sys
from pathlib import Path
from agentrl.doors import door, program
programs = Path({str(tmp_path)!r})
(programs / "serve.py").symlink_to(program.PROGRAMS / "serve.py")
(programs / "pytest.py").write_text({PROGRAM!r})
program.PROGRAMS = programs
program.find_door = lambda name: door.Door("pytest", "", print)
async def main():
    p = program.Program("pytest")
    await p.call("echo", value=1)
    print(p._child.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    closed = tmp_path / "closed"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "CLOSED": str(closed)}
    ) as child:
        pid = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists() and closed.read_text() == "closed"


def test_addresses():
    assert door_of("reasoning-gym:letter_counting?n=2") == "reasoning-gym"
    for path in ("train.jsonl", "gym:x", "https://x/y.parquet", "data/a:b.jsonl", "harbor"):
        assert door_of(path) == ""
    options = {"n": 5, "name": "x"}
    assert read_address("harbor:a/b?n=7&more=1.5", options) == (
        "a/b", {"n": 7, "name": "x", "more": 1.5}
    )  # fmt: skip
    for query, message in (("n=x", "must be of type int"), ("n=1&n=2", "occurs twice")):
        with pytest.raises(ConfigError, match=message):
            read_address(f"harbor:a?{query}", options)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data.train": "reasoning-gym"}, "Did you mean 'reasoning-gym:NAME'?"),
        ({"data.train": "reasoning_gym:ab?n=3"}, "Did you mean 'reasoning-gym:NAME'?"),
        ({"data.train": "opnenv://localhost:1"}, "Did you mean 'openenv:NAME'?"),
        ({"data.train": "openenv://localhost:1"}, "openenv://localhost:1 is a server, not rows"),
        ({"environments": {"maze": "opnenv://x:1"}}, "projects: openenv://HOST:PORT, nemo-gym://"),
        ({"environments": {"maze": "http://127.0.0.1:1"}}, "projects: openenv://HOST:PORT, nemo"),
        ({"environments": {"maze": "localhost:1"}}, "environments.maze: no environment at loc"),
        ({"data.train": "harbor:x?agnt=y"}, "no option agnt. Options: agent, agent_timeout_"),
        ({}, 'or name its server: environments={maze: "openenv://HOST:PORT"}'),
    ],
)
def test_an_address_of_almost_a_door_says_what_to_write(tmp_path, own_registries, keys, message):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "environment": "maze"}')
    with pytest.raises(UserError) as raised:
        make_plan(load_config(None, [], {"data.train": str(tmp_path / "rows.jsonl"), **keys}))
    assert message in str(raised.value)
    assert "Start it," not in str(raised.value)  # of `openenv://` in data.train
    assert str(raised.value).count(message) == 1


def test_a_query_in_yaml_needs_quotation_marks(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("data: {train: textarena:Mastermind-v0?n=3}")
    with pytest.raises(SystemExit):
        main(["check", "-c", str(tmp_path / "run.yaml")])
    shown = capsys.readouterr().err
    assert "1 mistake" in shown and "Put a text with ? into quotation marks" in shown


def test_the_same_rows_in_training_and_validation_are_a_warning(caplog):
    keys = {"data.train": "textarena:Mastermind-v0", "data.val": "textarena:Mastermind-v0?n=9"}
    door.check_doors(load_config(None, [], keys))
    assert "textarena:Mastermind-v0?n=9: the same rows. Give one another seed" in caplog.text
    caplog.clear()
    door.check_doors(load_config(None, [], keys | {"data.val": "textarena:Mastermind-v0?seed=1"}))
    assert not caplog.text


def test_the_list_has_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))
    with pytest.raises(SystemExit):
        main(["doors", "list"])
    lines = capsys.readouterr().out.splitlines()
    at = lines[0].index("needs no package")
    assert lines[0].startswith("benchmark ") and lines[2].startswith("nemo-gym ")
    assert all(line[at - 1] == " " and line[at] != " " for line in lines)


def test_all_shipped_doors_load():
    assert all(door.find_door(name).name == name for name in SHIPPED_DOORS)


def test_packages_may_bring_doors(tmp_path, monkeypatch, own_registries):
    (tmp_path / "my_door.py").write_text(
        "from agentrl.doors import Door\n"
        "def rows(address):\n    return [{'prompt': address, 'ground_truth': 'x'}]\n"
        "DOOR = Door('my-door', 'mine', print, rows)\n"
        "WRONG = 3\n"
    )
    info = tmp_path / "my_door-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-door\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[agentrl.doors]\nmy-door = my_door:DOOR\nwrong = my_door:WRONG\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path / "home"))
    for cached in (door_names, door.find_door, door.rows_file):
        cached.cache_clear()
    try:
        keys = {"data.train": "my-door:hello", "data.agent_name": "single_turn"}
        plan = make_plan(load_config(None, ["reward.function=gsm8k"], keys))
        assert plan.train[0].prompt[0].content == "my-door:hello"
        with pytest.raises(ConfigError, match="must be a Door named 'wrong'"):
            door.find_door("wrong")
    finally:
        for cached in (door_names, door.find_door, door.rows_file):
            cached.cache_clear()


def test_the_table_of_the_docs_is_that_of_the_tests():
    assert doors_page.PAGE.read_text() == doors_page.page(), "run `make docs`"


def test_a_missing_package_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))
    door.rows_file.cache_clear()
    with pytest.raises(UserError, match="agentrl doors install textarena"):
        make_plan(load_config(None, [], {"data.train": "textarena:Mastermind-v0"}))


def test_a_wrong_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["doors", "install", "reasoning_gym"])
    assert "no door 'reasoning_gym'. Did you mean 'reasoning-gym'?" in capsys.readouterr().err


def test_an_environment_of_your_own(tmp_path, monkeypatch):
    """pip stands for the package: each virtual environment has it."""
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path / "home"))
    own = Door("pip", "", print)
    with pytest.raises(UserError, match="is no virtual environment"):
        use(own, tmp_path)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "mine")], check=True)
    assert use(own, tmp_path / "mine") == installed_version(own) != ""
    # A folder that is refused leaves the door's environment as it is.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty"], check=True)
    with pytest.raises(UserError, match="does not have the package pip"):
        use(own, tmp_path / "empty")
    assert installed_version(own)
    # Another Python means a new environment, and leaves yours as it is.
    owned = Door("pip", "", print, requirements=("pip",))
    install(owned, python=sys.executable)
    assert not program.environment_folder("pip").is_symlink()
    assert (tmp_path / "mine" / "bin" / "python").exists()
    with pytest.raises(UserError, match="does not have the package harbor"):
        use(Door("harbor", "", print), tmp_path / "mine")


@pytest.mark.doors
@pytest.mark.slow
def test_install_makes_an_environment(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["doors", "install", "textarena"])
    assert not ended.value.code
    assert capsys.readouterr().out.startswith("textarena 0.")
    with pytest.raises(UserError, match=r"(?s)pip install.*failed:.*no-such-package-of-anyone"):
        install(door.find_door("textarena"), ["no-such-package-of-anyone"])


def test_a_python_that_is_too_old_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"needs Python 9.9 or newer.*--python"):
        install(Door("x", "", print, requirements=("x",), python=(9, 9)))
