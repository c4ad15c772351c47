"""Run a solution on the inputs of many tests. This file is sent into the sandbox as text.

It imports only the standard library of Python 3.8 or later. It reads frames from stdin: ten
characters with a length, then JSON of that length. The first frame is the job, a mapping:
`solution`, `fn_name` ("" for a program that reads stdin and prints), `count` of tests, `seconds`
per test, `most` bytes of output per test, and how many tests may end by a `crash` or by `time`
before the rest is skipped. Each other frame is the input of a test. It prints JSON lines: "ready";
for each test its index when it begins, then a list of its index, its ending (one of `ENDINGS`), and
its output in base64. If the harness ends before all tests have begun, it died or could not remove
all traces of a test, and the remaining tests need a new sandbox.

There are three kinds of process. The harness starts a supervisor for each test. The harness reads
no input and no output of tests, so a later test cannot find one in the memory that it inherits. The
supervisor reads one input, starts the solution, collects its output and prints the line. The
solution has this one input. After each test the harness ends every other process and removes the
test's folder.

No process here knows the expected output. The supervisor and the harness are not dumpable, so the
solution cannot read their memory or their descriptors (root can). If the harness is process 1 of a
namespace, the solution cannot end or stop it. Otherwise it can. Then a kernel timer ends a stopped
harness, and the caller starts another one for the remaining tests.
"""

import atexit
import base64
import contextlib
import ctypes
import gc
import importlib
import json
import math
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time

MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random",
    "statistics", "itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
"""The modules whose names solutions can use without an import, as in verl's grader of the same
data. If two modules define a name, the later module's is used."""
RECURSION = 600_000
POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0
"""The seconds that a supervisor has in addition to its test. If it takes longer, the solution has
stopped it."""
SWEEP_SECONDS = 5.0
"""The seconds in which the remaining processes of a test must end."""
ENDINGS = ("", "time", "crash", "output")
FAILED = 70
"""The exit code of a child that raised. A supervisor with it ends the harness, because a part of
its input may still be on stdin."""
IS_INIT = os.getpid() == 1
"""Every process of this namespace was started by this one."""
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, WALL = 4, 36, 0x40000000


def main():
    """Serve one job."""
    protect()
    base = tempfile.mkdtemp()
    job = read_frame()
    names = importable_names()
    names.pop(job["fn_name"], None)  # The solution must define it.
    kill_after, unchanged = kill_timer(), traces(base)
    write_line("ready")  # If the harness fails after this line, the solution has caused it.
    program = compile_or_none(job["solution"])
    gc.freeze()  # Otherwise garbage collection in a child would copy all pages of this process.
    remaining = {"crash": job["crash"], "time": job["time"]}
    for index in range(job["count"]):
        write_line(index)
        folder = tempfile.mkdtemp(dir=base)
        end_event, supervisor_end = os.pipe()  # The supervisor alone holds the second end.
        supervisor = start(supervise, job, program, names, index, folder)
        os.close(supervisor_end)
        kill_after(job["seconds"] + GRACE_SECONDS + 1)
        in_time = select.select([end_event], [], [], job["seconds"] + GRACE_SECONDS)[0]
        os.close(end_event)
        kill_after(SWEEP_SECONDS + 1)
        status = end_all_others(supervisor)
        kill_after(0)  # No process is left that could stop this one.
        if os.WIFEXITED(status):
            ended = ENDINGS[os.WEXITSTATUS(status)]
        else:  # The supervisor was killed: by the solution, or by the harness after the deadline.
            ended = "crash" if in_time else "time"
            write_line([index, ended, ""])
        shutil.rmtree(folder)
        if ended:
            remaining["time" if ended == "time" else "crash"] -= 1
        if traces(base) != unchanged or 0 in remaining.values():
            break
    shutil.rmtree(base)


def protect():
    """Hide this process and its children from others, and adopt the orphans of its children."""
    library = ctypes.CDLL(None)
    library.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    library.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Process 1 receives only signals that it handles, and Python handles this one.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class SignalEvent(ctypes.Structure):
    """`struct sigevent`, for a timer that sends a signal."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("unused", ctypes.c_char * 48),
    )


def kill_timer():
    """Return a function that makes the kernel kill this process after `seconds`; 0 cancels it.

    Each call replaces the one before. A stopped process handles no other signal than SIGKILL.
    """
    library, timer = ctypes.CDLL(None), ctypes.c_void_p()
    if not hasattr(library, "timer_create"):  # glibc before 2.34
        library = ctypes.CDLL("librt.so.1")
    event = ctypes.byref(SignalEvent(number=signal.SIGKILL))
    if library.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer)):
        raise OSError("this kernel has no timers")

    def kill_after(seconds):
        setting = (ctypes.c_long * 4)(0, 0, math.ceil(seconds), 0)
        library.timer_settime(timer, 0, setting, None)

    return kill_after


def read_frame():
    """Return the next value on stdin. Further bytes are for other processes and are not read."""
    return json.loads(read_exactly(int(read_exactly(10))))


def read_exactly(count):
    """Return the next bytes of stdin."""
    data = bytearray()
    while len(data) < count:
        piece = os.read(0, count - len(data))
        if not piece:
            raise EOFError("stdin ended within a frame")
        data += piece
    return data


def write_line(value):
    """Print a line of JSON without a buffer: a forked child would print the buffer again."""
    data = json.dumps(value).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


def importable_names():
    """Return the names that a solution can use without an import."""
    names = {}
    for module in MODULES:
        exec(f"from {module} import *", names)
    return {**names, **{module: importlib.import_module(module) for module in MODULES}}


def compile_or_none(solution):
    """Return the compiled solution; None if it is not valid Python."""
    try:
        return compile(solution, "solution.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def start(task, *arguments):
    """Run a task in a new process and return its pid. The task returns the exit code."""
    pid = os.fork()
    if not pid:
        status = FAILED
        try:
            status = task(*arguments)
        finally:
            os._exit(status)
    return pid


# The supervisor


def supervise(job, program, names, index, folder):
    """Run one test and print its line; return the index of its ending."""
    value = read_frame()
    reading, writing = os.pipe()
    child = start(run, program, names, job["fn_name"], value, writing, folder)
    os.close(writing)
    ended, out = watch(child, reading, job["seconds"], job["most"])
    write_line([index, ended, base64.b64encode(out).decode()])
    return ENDINGS.index(ended)


def watch(child, reading, seconds, max_output):
    """Wait for the child; return its ending and its output. Then its process group is killed."""
    end, out, ended, status = time.monotonic() + seconds, bytearray(), "", None
    os.set_blocking(reading, False)
    open_still = True
    while status is None or open_still:
        remaining = end - time.monotonic()
        if remaining <= 0 and status is None:
            ended = "time"
            break
        if open_still:
            # A process that the child started may still hold the pipe open. So once the child has
            # ended, read the content of the pipe and do not wait for the end of file.
            ready = select.select(
                [reading], [], [], 0 if status is not None else min(remaining, POLL_SECONDS)
            )
            piece = os.read(reading, 65536) if ready[0] else None
            if piece:
                out += piece
                if len(out) > max_output:
                    ended = "output"
                    break
                continue
            open_still = piece is None and status is None
        else:
            time.sleep(min(remaining, 0.0005))
        if status is None:
            pid, code = os.waitpid(child, os.WNOHANG)
            status = code if pid else None
    for kill in (os.killpg, os.kill):  # The solution must not write into the report.
        with contextlib.suppress(OSError):
            kill(child, signal.SIGKILL)
    return ended or ("crash" if status else ""), bytes(out[:max_output])


# The solution


def run(program, names, fn_name, value, writing, folder):
    """Run the solution, as a program or to define a function; return its exit code."""
    os.setsid()
    if program is None:
        return 1
    os.chdir(folder)
    tempfile.tempdir = os.environ["TMPDIR"] = os.environ["HOME"] = folder
    result = take_descriptors(fn_name, value, writing)
    text = {"encoding": "utf-8", "errors": "replace", "closefd": False}
    sys.stdin = sys.__stdin__ = open(0, **text)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", **text)  # noqa: SIM115
    sys.setrecursionlimit(RECURSION)
    module = type(sys)("solution" if fn_name else "__main__")
    module.__dict__.update({**names, "stdin": sys.stdin, "stdout": sys.stdout, **module.__dict__})
    sys.modules[module.__name__] = module
    status = 0
    try:
        exec(program, module.__dict__)
        if fn_name:
            call(module.__dict__, fn_name, value, result)
    except SystemExit:
        pass
    except BaseException:
        status = 1
    name = module.__name__
    del module  # Only the interpreter still refers to it.
    return end_as_a_program(name) or status


def take_descriptors(fn_name, value, writing):
    """Close all descriptors but input and output; return the one for a function's value."""
    null, result = os.open(os.devnull, os.O_RDWR), 2
    if fn_name:
        result = os.dup2(writing, 9)
        os.dup2(null, 0)
        os.dup2(null, 1)
    else:
        with tempfile.TemporaryFile() as stdin:
            stdin.write(value.encode("utf-8", "replace"))
            stdin.seek(0)
            os.dup2(stdin.fileno(), 0)
        os.dup2(writing, 1)
    os.dup2(null, 2)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (0, 1, 2, result):
            with contextlib.suppress(OSError):  # `listdir` has closed its own descriptor.
                os.close(int(name))
    return result


def call(names, fn_name, arguments, result):
    """Call the function and write its value to the pipe as JSON."""
    owner = names["Solution"]() if "Solution" in names else None
    function = getattr(owner, fn_name) if hasattr(owner, fn_name) else names[fn_name]
    returned = json.dumps(function(*map(with_integer_keys, arguments)))
    with open(result, "w") as file:
        file.write(returned)


def with_integer_keys(value):
    """Return a mapping with integer keys, if all of its keys are integers written as text.

    JSON has only text keys. Other values are returned unchanged.
    """
    if isinstance(value, dict) and all(key.lstrip("-").isdigit() for key in value):
        return {int(key): item for key, item in value.items()}
    return value


def end_as_a_program(name):
    """Run the interpreter's steps at exit, for the module of this name; return the exit code.

    To run them for all modules would take longer than the rest of a short test.
    """
    for task in (threading._shutdown, atexit._run_exitfuncs):  # pyright: ignore
        with contextlib.suppress(BaseException):
            task()
    try:
        for stream in (sys.stdout, sys.__stdout__):
            if not (stream is None or getattr(stream, "closed", False)):
                stream.flush()
    except BaseException:
        return 1
    sys.modules.pop(name, None)  # Files that are still open are flushed when they are deleted.
    gc.collect()
    return 0


# After a test


def end_all_others(supervisor):
    """End all descendants of this process; return the wait status of the supervisor.

    Raises:
        TimeoutError: new processes are started faster than they can be ended.
        FileNotFoundError: this kernel does not list the children of a process.
    """
    end, status = time.monotonic() + SWEEP_SECONDS, FAILED << 8
    while True:
        # In its own namespace, the harness kills all processes at once, so that none can escape by
        # forking. Otherwise the orphans become its children, one generation after another.
        for pid in [-1] if IS_INIT else children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while True:
                pid, reaped = os.waitpid(-1, WALL | (0 if IS_INIT else os.WNOHANG))
                if not pid:
                    break
                if pid == supervisor:
                    status = reaped
        except ChildProcessError:
            return status
        if time.monotonic() > end:
            raise TimeoutError("the remaining processes of a test do not end")


def children():
    """Return the pids of this process's children."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def traces(base):
    """Return the state that a test can change outside its own folder and a later test can read.

    If it has changed, the remaining tests need a new sandbox: the harness removes only its own
    files.
    """
    os.utime(base, ns=(0, 0))
    state = []
    state.append((os.stat(base).st_mode, os.listdir(base), os.listxattr(base)))
    if IS_INIT:  # Otherwise these folders belong to the machine, and other programs write there.
        for top in (tempfile.gettempdir(), "/dev/shm"):
            state.append((os.stat(top).st_ctime_ns, os.listdir(top), os.listxattr(top)))
        # The namespace's tables list a closed connection for a minute.
        for name in ("snmp", "snmp6"):
            with contextlib.suppress(OSError), open(f"/proc/net/{name}") as file:
                state.append(file.read())
    return state


main()
