"""Processes: what holds a server ends with it, and a server with its parent; without SGLang."""

import os
import signal
import subprocess
import sys
import time

import pytest

from agentrl.engine.remote import launch
from agentrl.engine.remote.launch import ServerProcess, SGLangLaunch
from agentrl.errors import ConfigError, EngineDead, EngineError
from agentrl.workers import parent_watch

CHILD_AND_GRANDCHILD = """
import os, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), grandchild.pid, flush=True)
{then}
"""


def command(then, folder="/nowhere"):
    return [sys.executable, "-I", parent_watch.__file__, str(folder), sys.executable, "-c",
            CHILD_AND_GRANDCHILD.format(then=then)]  # fmt: skip


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_end(pids):
    end = time.monotonic() + 20
    while any(map(runs, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(runs, pids))


def test_all_processes_end_with_the_server():
    with subprocess.Popen(
        command("sys.exit(3)"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        pids, last = process.stdout.read().splitlines()
    assert last == "the server's process ended with code 3"
    assert all_end([*map(int, pids.split()), process.pid])


def test_all_processes_end_with_the_parent(tmp_path):
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "keys.yaml").write_text("secret")
    script = (
        "import os, subprocess, sys\n"
        f"held = subprocess.Popen({command('time.sleep(600)', folder)!r}, stdin=subprocess.PIPE,\n"
        "    stdout=subprocess.PIPE, text=True, start_new_session=True)\n"
        "print(held.pid, held.stdout.readline(), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    parent = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    pids = [int(pid) for pid in parent.stdout.split()]
    assert len(pids) == 3 and all_end(pids)
    assert not folder.exists()


SERVER = """
import http.server, os, subprocess, sys
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(sys.argv[2], "w") as file:
    print(os.getpid(), grandchild.pid, file=file)
print("x" * 100_000)
print("the last line", flush=True)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args): ...

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_all_processes_end_if_the_parent_watch_is_killed(tmp_path):
    file = tmp_path / "pids"
    server = ServerProcess("fake", lambda s: [sys.executable, "-c", SERVER, str(s.port), str(file)])
    first, second = map(int, file.read_text().split())
    folder = server.folder
    assert runs(first) and runs(second) and folder.exists()
    os.kill(server.pid, signal.SIGKILL)
    assert all_end([first, second])
    while server.running:  # noticed a moment later
        time.sleep(0.02)
    error = str(server.death_error())
    assert error.endswith("\n  | the last line")
    assert len(error) < 70_000, "the log's end alone is told"
    server.stop()
    assert not folder.exists()
    server.stop()


def test_a_server_that_ends_while_it_starts_is_reported_with_its_last_lines():
    def command(server):
        code = f"print('the key is {server.token}'); raise SystemExit(3)"
        return [sys.executable, "-c", code]

    with pytest.raises(EngineDead, match=r"\*\*\*\n  \| the server's process ended with code 3$"):
        ServerProcess("fake", command)


class Sockets:
    """Of a machine that gives high ports away, and has none below but those that are free."""

    def __init__(self, free):
        self.free = free

    def __enter__(self):
        return self

    def __exit__(self, *error): ...

    def bind(self, address):
        self.port = address[1] or 60_000
        if self.port < launch.HIGHEST_PORT and self.port not in self.free:
            raise OSError("address in use")

    def getsockname(self):
        return "127.0.0.1", self.port


def test_a_free_port_is_below_50000(monkeypatch):
    free = range(launch.LOWEST_PORT, launch.HIGHEST_PORT, 2)
    monkeypatch.setattr(launch.socket, "socket", lambda: Sockets(free))
    assert launch.free_port() in free
    monkeypatch.setattr(launch.socket, "socket", lambda: Sockets([]))
    with pytest.raises(EngineError, match="no port below 50000"):
        launch.free_port()


NO_SGLANG = r"has no sglang\. Install .*\[sglang\].* rollout\.python .* rollout\.name=local"


def test_a_python_without_sglang_is_named():
    with pytest.raises(ConfigError, match=NO_SGLANG):
        SGLangLaunch("model", python=os.path.realpath("/usr/bin/env")).start()
    with pytest.raises(ConfigError, match=r"rollout\.python=/no/python: cannot run"):
        SGLangLaunch("model", python="/no/python").start()


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_server_that_sleeps_has_no_expandable_segments(name, monkeypatch):
    """SGLang's memory saver ends the server if the learner's allocator has them."""
    value = "max_split_size_mb:64,expandable_segments:True"
    monkeypatch.setenv(name, value)
    environments = [
        SGLangLaunch("model", gpus=(0,), sleep=sleep)._environment()
        for sleep in ("none", "kv_cache", "all")
    ]
    assert [e.get(name, value) for e in environments] == [value, *["max_split_size_mb:64"] * 2]
