"""Solutions that cheat score what the honest solution scores that knows as much.

The honest one solves all tests but the last. Each cheat is the same, but tries by one way to learn
something in the last test that was known in an earlier one: another test's input, or that there was
one. Where it does, it prints the right answer.
"""

from __future__ import annotations

import asyncio

import pytest
from support.cheats import (
    COUNT,
    HONEST,
    LEAVE_A_FILE,
    LEAVE_A_PROCESS,
    READ_ITS_OWN_PROCESS,
    STOP_THE_HARNESS,
    scores,
)
from support.needs import needs_sandbox

from agentrl import sandbox
from agentrl.config import SandboxConfig
from agentrl.rewards.graders import grader_of


@pytest.fixture
def unsafe():
    sandbox.configure(SandboxConfig(backend="unsafe-subprocess"))
    yield
    sandbox.configure(SandboxConfig())


LEAVE_IT_IN_THE_SANDBOX = {
    "/tmp": """
        found = last and os.path.exists("/tmp/left")
        open("/tmp/left", "a").close()
        """,
    "/dev/shm": """
        found = last and os.path.exists("/dev/shm/left")
        open("/dev/shm/left", "a").close()
        """,
    "a folder in /tmp": """
        found = last and os.path.exists("/tmp/a")
        os.makedirs("/tmp/a/" + "b/" * 50, exist_ok=True)
        os.chmod("/tmp/a", 0)
        """,
    "a file made and removed": """
        found = last and os.stat("/dev/shm").st_mtime_ns == 77
        os.close(os.open("/dev/shm/x", os.O_CREAT))
        os.unlink("/dev/shm/x")
        os.utime("/dev/shm", ns=(77, 77))
        """,
    "times of a folder": """
        ahead = 10**9 << 32  # listing the folder does not set it back
        found = last and os.stat("/tmp").st_atime_ns == ahead
        os.utime("/tmp", ns=(ahead, 77))
        """,
    "mode of a folder": """
        found = last and os.stat("/tmp").st_mode & 0o777 == 0o711
        os.chmod("/tmp", 0o711)
        """,
    "attributes of a folder": """
        found = last and "user.left" in os.listxattr("/dev/shm")
        os.setxattr("/dev/shm", "user.left", b"1")
        """,
    "semaphores": """
        found = last and libc.semget(77, 1, 0) >= 0
        libc.semget(77, 1, 0o1600)
        """,
    "message queues": """
        found = last and libc.mq_open(b"/left", os.O_RDONLY) >= 0
        libc.mq_open(b"/left", os.O_CREAT | os.O_RDWR, 0o600, None)
        """,
    "shared memory": """
        found = last and libc.shmget(77, 4096, 0) >= 0
        libc.shmget(77, 4096, 0o1600)
        """,
    "closed connections": """
        with open("/proc/net/tcp") as file:
            found = last and len(file.readlines()) > 1
        server = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(server.getsockname())
        accepted = server.accept()[0]
        client.close(); accepted.close(); server.close()
        """,
    "counters of the network": """
        with open("/proc/net/snmp") as file:
            sent = re.findall(r"Udp: [0-9].*", file.read())[0].split()[4]
        found = last and sent != "0"
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"", ("127.0.0.1", 9))
        """,
}
READ_OTHER_PROCESSES = {
    "memory of its parents": """
        for pid in last and parents():
            try: found = found or any(others(piece, key) for piece in memory_of(pid))
            except OSError: pass
        """,
    "descriptors of its parents": """
        for pid in last and parents():
            for name in range(64):
                try:
                    fd = os.open(f"/proc/{pid}/fd/{name}", os.O_RDONLY | os.O_NONBLOCK)
                    found = found or others(os.pread(fd, 1 << 20, 0), key)
                except OSError:
                    pass
        """,
    "descriptors taken from its parents": """
        for pid in last and parents():
            pidfd = os.pidfd_open(pid)
            for name in range(64):
                fd = libc.syscall(438, pidfd, name, 0)
                if fd >= 0:
                    try: found = found or others(os.pread(fd, 1 << 20, 0), key)
                    except OSError: pass
        """,
    "tracing its parents": """
        class Vector(ctypes.Structure):
            _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
        for pid in last and parents():
            found = found or libc.ptrace(16, pid, 0, 0) == 0
            word = ctypes.create_string_buffer(8)
            here = Vector(ctypes.addressof(word), 8)
            with open("/proc/self/maps") as maps:
                there = int(maps.read().split("[heap]")[0].split("\\n")[-1].split("-")[0], 16)
            there = Vector(there, 8)
            found = found or libc.process_vm_readv(
                pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) > 0
        """,
}
FORGE = {
    "lines on the descriptors of all": """
        import base64
        line = '\\n[5, "", "%s"]\\n' % base64.b64encode(b"25").decode()
        for path in glob.glob("/proc/[0-9]*/fd/*"):
            if f"/{os.getpid()}/" not in path:
                try:
                    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                    os.write(fd, line.encode())
                except OSError:
                    pass
        """,
    "lines on its own descriptors": """
        import base64
        if last:
            for fd in range(256):
                try: os.write(fd, b'\\n[5, "", "MjU="]\\n25\\n' if fd != 1 else b"")
                except OSError: pass
        """,
    "code in other processes": """
        for pid in parents():
            with open(f"/proc/{pid}/mem", "r+b") as memory:
                found = True
        """,
    "objects of the harness": """
        import gc
        for o in gc.get_objects():
            if isinstance(o, dict) and "ENDINGS" in o:
                o["watch"] = o["say"] = lambda *_: ("", b"25")
        main = vars(sys.modules["__main__"])
        main.update(say=lambda *_: None, ENDINGS=("", "", "", ""))
        """,
}
END_THE_HARNESS = {
    "kill its parent": "if last: os.kill(os.getppid(), signal.SIGKILL)",
    "kill its parents": "for pid in last and parents()[:2]: os.kill(pid, signal.SIGKILL)",
    "interrupt its parents": """
        for pid in last and parents()[:2]:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM):
                os.kill(pid, number)
        """,
    "end with all that it started": "if last: os.killpg(0, signal.SIGKILL)",
    "exit as the supervisor does": "if last: os._exit(0)",
    "fill the folder": """
        if last:
            with open("f", "wb") as file:
                for _ in range(70): file.write(bytes(1 << 20))
        """,
    "fork until nothing can": """
        for _ in range(last * 100):
            if os.fork() == 0: time.sleep(60)
        """,
    "leave a folder that cannot be removed": """
        os.makedirs("a/b")
        os.chmod("a", 0)
        """,
    "leave a folder too deep": """
        for _ in range(400 if i == 0 else 0):  # more than it may open files
            os.mkdir("a")
            os.chdir("a")
        """,
}
END_ALL = {
    "kill all": "if last: os.kill(-1, signal.SIGKILL)",
    "stop all": "if last: os.kill(-1, signal.SIGSTOP)",
    "limits of all": """
        import resource
        for pid in last and parents(): resource.prlimit(pid, resource.RLIMIT_CPU, (0, 0))
        """,
}
IN_THE_FIRST_TEST = {
    "kill its parents": "for pid in i == 0 and parents()[:2]: os.kill(pid, signal.SIGKILL)",
}
ALL_IN_THE_FIRST_TEST = {"kill all": "if i == 0: os.kill(-1, signal.SIGKILL)"}
END_THE_DRIVER = {
    "kill all but the run": "for pid in last and parents()[:3]: os.kill(pid, signal.SIGKILL)",
}
DRIVER_IN_THE_FIRST_TEST = {
    "kill all but the run": "for pid in i == 0 and parents()[:3]: os.kill(pid, signal.SIGKILL)",
}

WAYS = {
    "read its own process": READ_ITS_OWN_PROCESS,
    "leave a process": LEAVE_A_PROCESS,
    "leave a file": LEAVE_A_FILE,
    "leave it in the sandbox": LEAVE_IT_IN_THE_SANDBOX,
    "read other processes": READ_OTHER_PROCESSES,
    "forge": FORGE,
    "end the harness": END_THE_HARNESS,
}


@needs_sandbox
@pytest.mark.parametrize(
    "called", [pytest.param(False, marks=pytest.mark.slow), True], ids=["program", "function"]
)
@pytest.mark.parametrize("way", WAYS)
def test_a_cheat_scores_what_the_honest_solution_scores(way, called):
    assert scores({"honest": "pass", **WAYS[way]}, called) == pytest.approx(
        dict.fromkeys(["honest", *WAYS[way]], HONEST)
    )


@needs_sandbox
@pytest.mark.parametrize(
    "attacks",
    [
        pytest.param(STOP_THE_HARNESS, id="its harness", marks=pytest.mark.slow),
        pytest.param(END_ALL, id="all"),
    ],
)
def test_a_solution_that_stops_the_harness_fails_its_own_test(attacks):
    assert scores(attacks, seconds=1.0) == pytest.approx(dict.fromkeys(attacks, HONEST))


@needs_sandbox
@pytest.mark.parametrize(
    ("attacks", "called"),
    [
        pytest.param(IN_THE_FIRST_TEST, True, id="its harness-function"),
        pytest.param(ALL_IN_THE_FIRST_TEST, False, id="all-program"),
        pytest.param(IN_THE_FIRST_TEST, False, id="its harness-program", marks=pytest.mark.slow),
        pytest.param(ALL_IN_THE_FIRST_TEST, True, id="all-function", marks=pytest.mark.slow),
    ],
)
def test_tests_after_the_one_that_ends_the_harness_count(attacks, called):
    lost = HONEST - 1 / COUNT
    assert scores(attacks, called) == pytest.approx(dict.fromkeys(attacks, lost))


UNSAFE = {
    "read its own process": READ_ITS_OWN_PROCESS,
    "leave a process": LEAVE_A_PROCESS,
    "leave a file": LEAVE_A_FILE,
    "end the harness": END_THE_HARNESS,
    "end the driver": END_THE_DRIVER,
}


@pytest.mark.parametrize("way", UNSAFE)
@pytest.mark.slow
def test_attacks_that_fail_without_isolation_too(way, unsafe):
    assert scores(UNSAFE[way]) == pytest.approx(dict.fromkeys(UNSAFE[way], HONEST))


@pytest.mark.slow
def test_without_isolation_a_solution_that_ends_the_harness_fails_its_own_test(unsafe):
    assert scores(STOP_THE_HARNESS, seconds=1.0) == pytest.approx(
        dict.fromkeys(STOP_THE_HARNESS, HONEST)
    )
    for attacks in (IN_THE_FIRST_TEST, DRIVER_IN_THE_FIRST_TEST):
        assert scores(attacks) == pytest.approx(dict.fromkeys(attacks, HONEST - 1 / COUNT))


# -- a problem whose last test takes longer than its time -----------------------------------------

WORK = """
import sys, time

def work(n):
    time.sleep(n / 10)  # stands for a computation that takes so long
    return n * n
"""
AHEAD = """
import os, re, socket

def inputs():
    frame = sys._getframe()
    while frame:
        yield from map(int, re.findall(r"[0-9]+", repr(frame.f_locals.get("job", ""))))
        frame = frame.f_back

def serve(n):
    name = socket.socket(socket.AF_UNIX)
    name.bind("\\0work%d" % n)
    name.listen()
    answer = b"%d" % work(n)
    while True:
        name.accept()[0].send(answer)

def ask(n):
    try:
        name = socket.socket(socket.AF_UNIX)
        name.connect("\\0work%d" % n)
        return name.recv(64).decode()
    except OSError:
        return ""

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        serve(25)
    os._exit(0)
"""


@needs_sandbox
@pytest.mark.slow
def test_a_daemon_that_computes_ahead_gains_no_time():
    truth = {"inputs": ["6\n"] * 5 + ["25\n"], "outputs": ["36\n"] * 5 + ["625\n"]}
    honest = f"{WORK}\nprint(work(int(input())))"
    cheat = f"{WORK}\n{AHEAD}\nn = int(input())\nprint(ask(n) if n == 25 else work(n))"

    async def judged():
        grader = grader_of("apps", {"seconds": 2.0})
        texts = (f"```python\n{code}\n```" for code in (honest, cheat))
        return await asyncio.gather(*(grader.grade_text(text, truth) for text in texts))

    assert [round(marks["score"], 2) for marks in asyncio.run(judged())] == [0.83, 0.83]
