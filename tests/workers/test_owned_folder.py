"""Folders of processes that were killed: the next process removes them, and nothing else."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest

from agentrl.engine.remote.launch import ServerProcess
from agentrl.workers import parent_watch
from agentrl.workers.owned_folder import OwnedFolder
from agentrl.workers.parent_watch import OWNER, remove_abandoned

OWNERS = """
import os, sys, time
from agentrl.workers.owned_folder import OwnedFolder
folders = [OwnedFolder("test"), OwnedFolder("test")]
(folders[0].path / "weights").write_text("many")
(folders[0].path / "deep").mkdir()
(folders[0].path / "deep/link").symlink_to(sys.argv[1])
if os.fork() == 0:
    sys.exit()  # A fork of the owner removes nothing, even if it exits.
os.wait()
print(*(folder.path for folder in folders), flush=True)
time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A TMPDIR of the test's own, for this process and its children."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def wait_until(what, seconds=20.0):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.02)


def has_processes(group):
    """Return whether a process of a group runs. A zombie does not."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, process_group = file.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state != "Z":
                return True
    return False


def test_folders_of_a_killed_process_are_removed_by_the_next(temporary, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    with subprocess.Popen(
        [sys.executable, "-c", OWNERS, str(kept)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        folders = [Path(path) for path in owner.stdout.readline().split()]
        assert all(folder.parent == temporary for folder in folders)
        remove_abandoned()
        assert all(folder.is_dir() for folder in folders), "their owner lives"
        owner.kill()
        owner.wait()
        assert all(folder.is_dir() for folder in folders)
        remove_abandoned()
    assert not any(folder.exists() for folder in folders)
    assert (kept / "file").exists(), "the target of a link stays"


def test_only_the_users_own_abandoned_folders_are_removed(temporary, tmp_path, monkeypatch):
    def folder(name, owner):
        path = temporary / name
        path.mkdir()
        if owner is not None:
            (path / OWNER).write_text(owner)
        return path

    ours = f"process 1 on {socket.gethostname()}\n"
    kept = [
        folder("agentrl-engine-old", None),  # of another version, which writes no owner
        folder("agentrl-engine-new", ""),  # not locked yet
        folder("agentrl-engine-far", "process 1 on another-machine\n"),
        folder("other-engine", ours),
    ]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / OWNER).write_text(ours)
    (temporary / "agentrl-engine-link").symlink_to(elsewhere)
    linked_owner = folder("agentrl-engine-linked", None)
    (linked_owner / OWNER).symlink_to(elsewhere / OWNER)
    with OwnedFolder("test") as live:
        kept += [live, elsewhere, linked_owner]
        abandoned = folder("agentrl-engine-abandoned", ours)
        with monkeypatch.context() as other_user:
            other_user.setattr(os, "getuid", lambda: 12345)
            remove_abandoned()
            assert abandoned.is_dir()
        remove_abandoned()
        assert not abandoned.exists()
        assert all(path.is_dir() for path in kept)
    assert not live.exists()


SERVER = """
import http.server, sys
loads = open(sys.argv[2], "w")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args): ...
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
PARENT = """
import os, sys
from agentrl.engine.remote.launch import ServerProcess
command = [sys.executable, "-c", sys.argv[1]]
server = ServerProcess("fake", lambda s: [*command, str(s.port), sys.argv[2]])
print(server.folder, server.pid, flush=True)
if sys.argv[3] == "with its watch":
    os.kill(server.pid, 9)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def loads():
    """The path of a file in shared memory as SGLang creates them."""
    path = parent_watch.SHARED_MEMORY / f"sglang_loads_{uuid4().hex[:12]}_0.shm"
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_shared_memory_of_a_server_is_removed_with_it(temporary, loads):
    other = loads.with_name(loads.name.replace("_0.shm", "_1.shm"))
    other.touch()
    server = ServerProcess(
        "fake", lambda s: [sys.executable, "-c", SERVER, str(s.port), str(loads)]
    )
    assert loads.exists() and server.folder.parent == temporary
    server.stop()
    assert not loads.exists() and not server.folder.exists()
    assert other.exists(), "the file of another server stays"
    other.unlink()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
@pytest.mark.parametrize("killed", ["alone", "with its watch"])
def test_shared_memory_and_folder_of_a_killed_parents_server(temporary, loads, killed):
    """Without the watch of the server, the next process removes them."""
    parent = subprocess.run(
        [sys.executable, "-c", PARENT, SERVER, str(loads), killed], capture_output=True, text=True
    )
    folder, group = parent.stdout.split()
    if killed == "with its watch":
        assert Path(folder).is_dir() and loads.exists()
        remove_abandoned()
    wait_until(lambda: not Path(folder).exists() and not loads.exists())
    wait_until(lambda: not has_processes(int(group)))
