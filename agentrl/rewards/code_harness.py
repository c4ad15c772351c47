"""Runs a program on many inputs, inside the sandbox; sent there as text, imports nothing of ours.

Reads from stdin, as JSON, a mapping: `solution`, `inputs`, `fn_name` ("" for a program that reads
and prints), `seconds` for each input, `most` bytes of what comes out, and how many inputs may end
by a `crash` or by `time` before the rest is left out. Prints a line that it is there, then a line
of JSON for each input: its index, how it ended ("", "time", "crash" or "output"), and what came out
in base64.

Each input has a process of its own, forked from this one, which has imported what solutions may use
unasked. It writes into a pipe, never to the stdout of this one. Nothing in here knows what should
come out: a program that got hold of all of it would still have to find the right answers.
"""

import base64
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import sys
import tempfile
import time

MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random",
    "statistics", "itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
"""What solutions find without an import, with all that is in them (as in verl's judge of the same
data); of one name, the later module's."""
RECURSION = 600_000
POLL_S = 0.05


def main():
    """Serve one job."""
    job = json.load(sys.stdin)
    names = known_names()
    names.pop(job["fn_name"], None)  # the solution has to bring its own
    print(json.dumps("ready"), flush=True)  # from here on it is the solution's doing
    program = compile_or_none(job["solution"])
    sys.setrecursionlimit(RECURSION)
    gc.freeze()  # a child that ends would otherwise go through all of this one's objects
    left = {"crash": job["crash"], "time": job["time"], "output": job["crash"]}
    for index, given in enumerate(job["inputs"]):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            # Its end is that of a program: threads are waited for, a traceback is an exit code.
            return run(program, names, job["fn_name"], given, writing)
        os.close(writing)
        ended, out = watch(child, reading, job["seconds"], job["most"])
        os.close(reading)
        print(json.dumps([index, ended, base64.b64encode(out).decode()]), flush=True)
        if ended:
            left[ended] -= 1
            if not left[ended]:
                return None


def known_names():
    """What a solution finds in its namespace."""
    names = {}
    for module in MODULES:
        exec(f"from {module} import *", names)
    return {**names, **{module: importlib.import_module(module) for module in MODULES}}


def compile_or_none(solution):
    """The solution as code; None where it is not Python."""
    try:
        return compile(solution, "solution.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def run(program, names, fn_name, given, writing):
    """In the child: the solution, as a program or as what defines a function."""
    os.setsid()
    if program is None:
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    if fn_name:
        result = os.dup2(writing, 9)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
    else:
        result = 2
        with tempfile.TemporaryFile() as typed:
            typed.write(given.encode("utf-8", "replace"))
            typed.seek(0)
            os.dup2(typed.fileno(), 0)
        os.dup2(writing, 1)
    os.dup2(nothing, 2)
    os.closerange(3, 9)
    os.closerange(10, 64)
    text = {"encoding": "utf-8", "errors": "replace", "closefd": False}
    sys.stdin = sys.__stdin__ = open(0, **text)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", **text)  # noqa: SIM115
    module = type(sys)("solution" if fn_name else "__main__")
    module.__dict__.update({**names, "stdin": sys.stdin, "stdout": sys.stdout, **module.__dict__})
    sys.modules[module.__name__] = module
    try:
        exec(program, module.__dict__)
    except SystemExit:
        return
    if fn_name:
        call(module.__dict__, fn_name, given, result)


def call(names, fn_name, given, result):
    """The function's value, as JSON, to the pipe."""
    owner = names["Solution"]() if "Solution" in names else None
    function = getattr(owner, fn_name) if hasattr(owner, fn_name) else names[fn_name]
    returned = json.dumps(function(*map(keyed, given)))
    with open(result, "w") as file:
        file.write(returned)


def keyed(value):
    """JSON makes text of all keys; those that were numbers become numbers again."""
    if isinstance(value, dict) and all(key.lstrip("-").isdigit() for key in value):
        return {int(key): item for key, item in value.items()}
    return value


def watch(child, reading, seconds, most):
    """What the child wrote, and how it ended; its group of processes is gone afterwards."""
    end, out, ended, status = time.monotonic() + seconds, bytearray(), "", None
    os.set_blocking(reading, False)
    open_still = True
    while status is None or open_still:
        left = end - time.monotonic()
        if left <= 0 and status is None:
            ended = "time"
            break
        if open_still:
            # One that the child left behind may hold the pipe open: what is in it is all there is.
            ready = select.select([reading], [], [], 0 if status is not None else min(left, POLL_S))
            piece = os.read(reading, 65536) if ready[0] else None
            if piece:
                out += piece
                if len(out) > most:
                    ended = "output"
                    break
                continue
            open_still = piece is None and status is None
        else:
            time.sleep(min(left, 0.0005))
        if status is None:
            done, code = os.waitpid(child, os.WNOHANG)
            status = code if done else None
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return ended or ("crash" if status else ""), bytes(out[:most])


main()
