"""The shelf's tools that run what a model wrote: Python, a session of it, a shell with files."""

from __future__ import annotations

import ast
import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.needs import needs_sandbox

from agentrl import Sample, ToolError, sandbox
from agentrl.config import SandboxConfig, ToolsConfig
from agentrl.registry import load_file
from agentrl.sandbox import Completed
from agentrl.sandbox.report import report
from agentrl.tools import LocalToolbox, open_toolbox
from agentrl.trajectory import Message, ToolCall


@pytest.fixture(autouse=True)
def short():
    """Programs end soon, and what the next test runs under is the default again."""
    sandbox.configure(SandboxConfig(timeout_s=2.0))
    yield
    sandbox.configure(SandboxConfig())


async def say(tool, *calls, create_kwargs=None):
    """Return the results that a model reads for consecutive calls of one episode."""
    load_file(f"shelf:{tool}")
    tools_kwargs = {tool: {"create_kwargs": create_kwargs or {}}}
    sample = Sample("row", (Message("user", "Go."),), tools=(tool,), tools_kwargs=tools_kwargs)
    box = LocalToolbox()
    await box.open("e", sample)
    try:
        texts = []
        for turn, (name, arguments) in enumerate(calls):
            (result,) = await box.run([ToolCall(name, arguments)], episode_id="e", turn=turn)
            texts.append(result)
        return texts
    finally:
        await box.close("e")
        await box.aclose()


async def texts(tool, *calls, **more):
    return [r.content for r in await say(tool, *calls, **more)]


def code(*programs):
    return [("python", {"code": p}) for p in programs]


# -- what is told ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("done", "expected"),
    [
        (Completed("12\n", "", 0), "12"),
        (Completed("", "", 0), "(no output)"),
        (Completed("a\n", "oh\n", 0), "a\nstderr:\noh"),
        (Completed("", "NameError: x\n", 1), "stderr:\nNameError: x\n[exit code 1]"),
        (Completed("a\n", "", -9, "time", 2.04), "a\n[timed out after 2 s]"),
        (Completed("", "", -24, "cpu"), "[stopped: CPU time limit exceeded]"),
        (Completed("yy", "", -9, "output"), "yy\n[stopped: too much output]"),
        (Completed("", "", -11, "signal"), "[crashed: SIGSEGV]"),
        (Completed("", "", -64, "signal"), "[crashed: SIGRTMAX]"),
        (Completed("", "x" * 3000, 1), "stderr:\n[...]\n" + "x" * 2000 + "\n[exit code 1]"),
    ],
)
def test_reports(done, expected):
    assert report(done) == expected


@pytest.fixture
def shows():
    return load_file("shelf:python").shows_last_value


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        ("1 + 1", "2\n"),
        ("x = 2\nx * 3  # six", "6\n"),
        ("x = 2; x", "2\n"),
        ("print('a')", "a\n"),
        ("None", ""),
        ("x = 5", ""),
        ("", ""),
        ("# nothing", ""),
        ("for i in range(2):\n    i", ""),
        ("'ä' * 2; 'ö', 1", "('ö', 1)\n"),
        ("[n\n for n in\n range(3)]", "[0, 1, 2]\n"),
        ("(n for n in 'ab').__next__()", "'a'\n"),
        ("*[1], 2", "(1, 2)\n"),
        ("'''a\nb'''", "'a\\nb'\n"),
        ("x = 1\r\nx + 1\r\n", "2\n"),
        ("x = 1\rx + 1", "2\n"),
        ("\f1", "1\n"),
        ("(y := 3)", "3\n"),
        ("lambda: 0 and print", None),
    ],
)
def test_the_last_value_is_shown(shows, capsys, program, printed):
    exec(compile(shows(program), "main.py", "exec"), {})
    out = capsys.readouterr().out
    assert out == printed or (printed is None and out.startswith("<function"))


@pytest.mark.parametrize(
    "program", ["1 +", "(" * 500, "\0", "\ud800", "x = 1\n  y", "return 3", "def f(): pass"]
)
def test_other_programs_stay_as_they_are(shows, program):
    if program == "return 3":  # parses, and the interpreter refuses it
        assert shows(program) == program
    else:
        assert shows(program) == program


@given(st.text(max_size=40) | st.text("x=1+()[]'\"#;:\n\r\t \\äf", max_size=30))
def test_a_program_that_parses_still_does(program):
    shown = load_file("shelf:python").shows_last_value(program)
    try:
        before = ast.parse(program)
    except (SyntaxError, ValueError, MemoryError):
        assert shown == program
        return
    after = ast.parse(shown)
    assert len(after.body) == len(before.body)
    if shown != program:
        call = after.body[-1]
        assert isinstance(call, ast.Expr) and isinstance(call.value, ast.Call)
        assert ast.dump(call.value.args[0]) == ast.dump(before.body[-1].value)


# -- python ----------------------------------------------------------------------------------------


@needs_sandbox
async def test_python():
    results = await texts(
        "python",
        *code(
            "sum(n * n for n in range(10))",
            "print('a')\n'b'",
            "x = 1",
            "x",  # nothing is kept
            "import sys\nprint('on the way', file=sys.stderr)\nsys.exit(3)",
            "1 +",
            "open('/etc/passwd')",
        ),
    )
    assert results[:3] == ["285", "a\n'b'", "(no output)"]
    assert "NameError: name 'x' is not defined" in results[3] and results[3].endswith(
        "[exit code 1]"
    )
    assert "line 1" in results[3]
    assert results[4] == "stderr:\non the way\n[exit code 3]"
    assert "SyntaxError" in results[5]
    assert "FileNotFoundError" in results[6]


@needs_sandbox
async def test_python_that_misbehaves():
    began = time.monotonic()
    results = await texts(
        "python",
        *code(
            "while True: pass",
            "print('x' * 10_000_000)",
            "import ctypes\nctypes.string_at(0)",
            "a = 'x' * 10**11",
        ),
    )
    assert "timed out after 2 s" in results[0] or "CPU time" in results[0]
    assert "too much output" in results[1] and len(results[1]) < 140_000
    assert results[2].endswith("[crashed: SIGSEGV]")
    assert "MemoryError" in results[3]
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("tool", ["python", "python_session"])
async def test_programs_have_a_maximum_length(tool):
    if tool == "python":
        with pytest.raises(ToolError, match="has 20001 characters, maximum 20000"):
            await load_file("shelf:python").python("x" * 20_001, None)
    else:
        session = load_file("shelf:python_session").PythonSession(None)
        with pytest.raises(ToolError, match="has 20001 characters, maximum 20000"):
            await session.python("x" * 20_001)


def test_injected_parameters_are_not_in_schemas():
    load_file("shelf:python")
    load_file("shelf:python_session")
    load_file("shelf:shell")
    box = LocalToolbox()
    shown = {
        s["function"]["name"]: list(s["function"]["parameters"]["properties"])
        for name in ("python", "shell")
        for s in box.schemas((name,))
    }
    assert shown == {
        "python": ["code"],
        "run": ["command"],
        "read_file": ["path"],
        "write_file": ["path", "content"],
        "list_files": ["path"],
    }
    (session,) = box.schemas(("python_session",))
    assert list(session["function"]["parameters"]["properties"]) == ["code"]


@needs_sandbox
def test_tools_work_the_same_over_http():
    """On the server that a run starts, with the run's limits."""
    files = ["shelf:python", "shelf:shell"]
    for name in files:
        load_file(name)
    tools_kwargs = {"shell": {"create_kwargs": {"files": FILES}}}
    tools = ("python", "shell")
    sample = Sample("row", (Message("user", "Go."),), tools=tools, tools_kwargs=tools_kwargs)
    calls = [
        ToolCall("python", {"code": "6 * 7"}),
        ToolCall("run", {"command": "cat 'read me.txt'"}),
        ToolCall("python", {"code": "while True: pass"}),
    ]

    async def talk(box):
        await box.open("e", sample)
        results = await box.run(calls, episode_id="e", turn=0)
        await box.close("e")
        return [r.content for r in results]

    with open_toolbox(ToolsConfig(), files, SandboxConfig(timeout_s=1.0)) as box:
        outputs = asyncio.run(talk(box))
    assert outputs[:2] == ["42", "hello"]
    assert "timed out after 1 s" in outputs[2] or "CPU time" in outputs[2]


# -- python_session --------------------------------------------------------------------------------


@needs_sandbox
async def test_a_session_keeps_variables_and_files():
    results = await texts(
        "python_session",
        *code(
            "x = 6",
            "def double(n):\n    return 2 * n",
            "double(x)",
            "open('notes.txt', 'w').write('kept')",
            "1 / 0",
            "x, open('notes.txt').read()",
        ),
    )
    assert results[0] == results[1] == "(no output)"
    assert results[2] == "12"
    assert "ZeroDivisionError" in results[4]
    assert results[5] == "(6, 'kept')"


@needs_sandbox
async def test_a_session_survives_code_that_hangs():
    results = await texts(
        "python_session",
        *code("x = 1\nopen('f', 'w').write('a')", "while True: pass", "open('f').read()", "x"),
    )
    assert "timed out" in results[1] or "CPU time" in results[1]
    assert results[2] == "'a'"
    assert "NameError" in results[3]


@needs_sandbox
async def test_sessions_share_nothing():
    (first,) = await texts("python_session", *code("x = 1\nopen('/tmp/f', 'w').write('a')"))
    second = await texts("python_session", *code("x", "open('/tmp/f').read()"))
    assert first == "1"
    assert "NameError" in second[0] and "FileNotFoundError" in second[1]


# -- shell -----------------------------------------------------------------------------------------

FILES = {"logs/app.log": "ok\nerror: disk\nok\nerror: net\n", "read me.txt": "hello\n"}


@needs_sandbox
async def test_shell():
    results = await texts(
        "shell",
        ("list_files", {}),
        ("run", {"command": "grep -c error logs/app.log"}),
        ("read_file", {"path": "read me.txt"}),
        ("write_file", {"path": "new/deep/a.txt", "content": "ä\n"}),
        ("run", {"command": "cat new/deep/a.txt; cd new"}),
        ("run", {"command": "ls; exit 4"}),
        ("list_files", {"path": "new"}),
        ("run", {"command": "touch empty"}),
        ("read_file", {"path": "empty"}),
        create_kwargs={"files": FILES},
    )
    assert results[0] == "29 logs/app.log\n6 read me.txt"
    assert results[1:5] == ["2", "hello\n", "Wrote 3 bytes to new/deep/a.txt", "ä"]
    assert results[5] == "logs\nnew\nread me.txt\n[exit code 4]"
    assert results[6] == "3 new/deep/a.txt"
    assert results[7:] == ["(no output)", "(empty file)"]


@needs_sandbox
async def test_a_shell_without_files():
    assert await texts("shell", ("list_files", {})) == ["(no files)"]


@needs_sandbox
@pytest.mark.parametrize(
    "path",
    ["../x", "/etc/passwd", "a/../../x", "link", "folder", "nowhere", "", "a\0b", "x" * 5000],
)
async def test_invalid_paths(path):
    inner = f"{path}/f" if path == "link" else path
    made, read, written = await say(
        "shell",
        ("run", {"command": "ln -s /etc link; mkdir folder"}),
        ("read_file", {"path": path}),
        ("write_file", {"path": inner, "content": "x"}),
    )
    assert made.ok
    assert read.error == "tool_error" and "root:" not in read.content
    assert written.error == ("tool_error" if path != "nowhere" else "")


@needs_sandbox
async def test_long_outputs_are_cut():
    results = await texts(
        "shell",
        ("run", {"command": "yes | head -c 100000 > big; for i in $(seq 300); do : > f$i; done"}),
        ("read_file", {"path": "big"}),
        ("list_files", {}),
        ("run", {"command": "cat big big"}),
        ("run", {"command": "x" * 20_001}),
        ("write_file", {"path": "huge", "content": "y" * 200_000}),
    )
    assert len(results[1]) < 17_000 and results[1].endswith("use `run` to read other parts]")
    assert len(results[2].splitlines()) == 201
    assert results[2].endswith("[more than 200 files; list a subfolder]")
    assert len(results[3]) < 140_000
    assert "has 20001 characters, maximum 20000" in results[4]


@needs_sandbox
async def test_a_full_folder_is_reported():
    filled, more, after = await say(
        "shell",
        ("run", {"command": "for i in 1 2 3; do head -c 40000000 /dev/zero > full$i; done"}),
        ("write_file", {"path": "more", "content": "y" * 100_000}),
        ("run", {"command": "rm full*; echo free"}),
    )
    assert "No space left" in filled.content
    assert more.error == "tool_error" and "No space left" in more.content
    assert after.content == "free"
