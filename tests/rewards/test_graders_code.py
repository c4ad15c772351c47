from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import sandbox
from agentrl.config import RewardConfig, SandboxConfig
from agentrl.errors import ConfigError, DataError, SandboxError
from agentrl.rewards import Scorer, check_graders
from agentrl.rewards.code import READY, _endings, last_program, read_tests, same_output, same_value
from agentrl.rewards.graders import grader_of
from agentrl.sandbox import Completed
from agentrl.trajectory import Message, Sample

ADD = {"inputs": ["1 2\n", "3 4\n", "-1 1\n"], "outputs": ["3\n", "7\n", "0\n"]}
RIGHT = "print(sum(map(int, input().split())))"
CALLED = {"inputs": [[1, 2], [3, 4], [-1, 1]], "outputs": [3, 7, 0], "fn_name": "add"}


@cache
def why_no_sandbox() -> str:
    return sandbox.probe(SandboxConfig())


def judge(*answers: str, truth: Any = ADD, **kwargs: Any) -> list[dict[str, float]]:
    """The marks of each answer, judged side by side."""
    if (why := why_no_sandbox()) and not os.environ.get("CI"):
        pytest.skip(why)

    async def judged():
        grader = grader_of("apps", kwargs)
        return await asyncio.gather(*(grader.grade_text(answer, truth) for answer in answers))

    return asyncio.run(judged())


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


def marks(score: float, acc: float | None = None, timeout: float = 0.0, crash: float = 0.0):
    acc = float(score == 1.0) if acc is None else acc
    return {"score": score, "acc": acc, "timeout": timeout, "crash": crash}


# -- reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx\n```", "x\n"),
        ("```py\nx\n```\nor\n```python\ny\n```", "y\n"),
        ("```\nx\n```\nIt prints\n```text\n3\n```", "x\n"),
        ("```python\nx", "x"),
        ("```python\nprint('''\n    ```''')\n```", "print('''\n    ```''')\n"),
        ("x = 1", "x = 1"),
        ("", ""),
    ],
)
def test_the_last_program(text, program):
    assert last_program(text) == program


def test_a_megabyte_of_fences_takes_no_time():
    started = time.thread_time()
    for unit in ("```\n", "```python\n", "``", "\n", "``` "):
        last_program(unit * (1_000_000 // len(unit)))
    assert time.thread_time() - started < 2.0


@pytest.mark.parametrize(
    ("truth", "why"),
    [
        (None, "must be a mapping, not NoneType"),
        ("[1]", "must be a mapping, not list"),
        ("print(1)", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ({"inputs": ["1"]}, 'a list under "outputs"'),
        ({"inputs": [], "outputs": []}, 'a list under "inputs" with at least one'),
        ({"inputs": ["1"], "outputs": ["1", "2"]}, "1 inputs, but 2 outputs"),
        ({"inputs": ["1"], "outputs": ["1"], "fn_name": "a b"}, "fn_name='a b' is not a valid"),
        ({"inputs": [1], "outputs": [1], "fn_name": "f"}, "list of arguments, not 1"),
        ({"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}, "one JSON value per line"),
    ],
)
def test_rows_with_test_cases_that_cannot_be_read_are_refused(truth, why):
    prompt = (Message("user", "?"),)
    rows = [
        Sample(id="r", prompt=prompt, data_source="taco", ground_truth=t, row=i)
        for i, t in enumerate([json.dumps(ADD), CALLED, truth])
    ]
    with pytest.raises(DataError, match="row 2: the grader 'code' cannot read") as caught:
        check_graders(rows, Scorer(RewardConfig()))
    assert why in str(caught.value) and len(str(caught.value)) < 700


def test_layouts_of_test_cases():
    lines = read_tests({"inputs": [["1", "2"]], "outputs": [["3", 4]]})
    assert (lines.inputs, lines.outputs, lines.fn_name) == (("1\n2",), ("3\n4",), "")
    called = read_tests('{"inputs": ["[1]\\n2"], "outputs": ["[2]"], "fn_name": "f"}')
    assert (called.inputs, called.outputs, called.fn_name) == (([[1], 2],), ([2],), "f")
    assert read_tests({**ADD, "fn_name": None}).fn_name == ""


def test_impossible_times_are_refused_before_anything_runs():
    with pytest.raises(ConfigError, match=r"seconds=5 \(of a test\) must be .* total_seconds=1"):
        Scorer(RewardConfig(function="code", kwargs={"seconds": 5, "total_seconds": 1}))


# -- comparing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("3\n", "3", True),
        ("  3  \n\n", "3\n", True),
        ("1  2\n3", "1 2\n3\n", True),
        ("1 2 3", "1 2\n3", False),
        ("3\n4", "4\n3", False),
        ("", "3", False),
        ("YES", "yes", False),
        ("0.333333", "0.33333333", True),
        ("0.3334", "0.33333333", False),
        ("2.50", "2.5", True),
        ("1e-3", "0.001", True),
        ("3.0", "3", True),
        ("3.00001", "3", False),
        ("-100001", "-100000", False),
        ("100000000000000001", "100000000000000000", False),
        ("nan", "nan.0", False),
        ("inf", "1e999", False),
        ("1e999", "7" * 400, False),
        ("1e999", "1" + "0" * 999, True),
        ("1e400", "1e401", False),
        ("1e9999", "1e9998", False),
        ("1e" + "9" * 30, "1.5", False),
        ("1e17", "100000000000000003", False),
        ("1e17", "100000000000000000", True),
        ("7" * 1_100_000 + ".5", "1.5", False),
        ("0.00000000001", "0.0", True),
        ("-2.5", "2.5", False),
    ],
)
def test_outputs(printed, expected, same):
    assert same_output(printed, expected) is same


@pytest.mark.parametrize(
    ("returned", "expected", "same"),
    [
        ("3", 3, True),
        ("3", [3], True),
        ("[3]", 3, False),
        ("[1, 2]", [[1, 2]], True),
        ("[1, 2]", (1, 2), True),
        ('{"1": 2}', {1: 2}, True),
        ("[2, 1]", [1, 2], False),
        ("1", [1, 2, 3], False),
        ("[1, 2]", [[1, 2], [3]], False),
        ('"a"', "a", True),
        ("", None, False),
        ("nonsense", "nonsense", False),
        ("[" * 50_000, 3, False),
    ],
)
def test_values(returned, expected, same):
    assert same_value(returned, expected) is same


@given(st.text(), st.text())
def test_comparing_never_raises_and_expected_output_is_right(a, b):
    assert same_output(a, a) and same_value(json.dumps(a), a)
    assert same_output(a, b) in (True, False) and same_value(a, b) in (True, False)


# -- programs ------------------------------------------------------------------------------------


def test_programs_that_read_and_print():
    programs = {
        RIGHT: 1.0,
        "import sys\nprint(sum(int(w) for w in sys.stdin.read().split()))": 1.0,
        "def main():\n    print(sum(map(int, stdin.readline().split())))\n"
        "if __name__ == '__main__':\n    main()\n    exit()": 1.0,
        "import threading\ndef main():\n    a, b = map(int, open(0).read().split())\n"
        "    sys.stdout.write(str(a + b))\nthreading.Thread(target=main).start()": 1.0,
        "print(3)": 1 / 3,
        "print(0)": 1 / 3,
        "print(5)": 0.0,
    }
    assert judge(*map(fenced, programs)) == [marks(score) for score in programs.values()]


ENDS = {
    "at exit": "import atexit\nout = []\natexit.register(lambda: print(out[0]))\n"
    "out.append(sum(map(int, input().split())))",
    "in a thread": "import threading, time\ndef late():\n    time.sleep(0.1)\n    "
    f"{RIGHT}\nthreading.Thread(target=late).start()",
    "in a thread that is not waited for": "import threading, time\ndef late():\n"
    f"    time.sleep(30)\n    {RIGHT}\nthreading.Thread(target=late, daemon=True).start()",
    "into a file that nobody closes": "f = open(1, 'w')\n"
    "f.write(str(sum(map(int, input().split()))))",
    "into a stream of its own": "import io, os\nclass Out(io.IOBase):\n    def __init__(self):\n"
    "        self.text = ''\n    def write(self, text):\n        self.text += text\n"
    "    def flush(self):\n        os.write(1, self.text.encode())\n        self.text = ''\n"
    f"sys.stdout = Out()\n{RIGHT}",
    "as an object ends": "class Last:\n    def __del__(self):\n        os.write(1, self.text)\n"
    "import os\nlast = Last()\nlast.me = last\n"
    "last.text = b'%d' % sum(map(int, input().split()))",
    "and closes": f"{RIGHT}\nsys.stdout.close()",
    "and leaves": f"{RIGHT}\nsys.stdout.flush()\nimport os\nos._exit(0)",
    "and raises at exit": f"{RIGHT}\nimport atexit\natexit.register(lambda: 1 / 0)",
    "in a child": f"import os\nif os.fork() == 0:\n    {RIGHT}\nelse:\n    os.wait()",
    "and raises": f"{RIGHT}\n1 / 0",
    "and is killed": f"{RIGHT}\nimport os\nos.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("way", ENDS)
def test_a_program_ends_as_an_interpreter_ends_it(way):
    code = "import sys\n" + ENDS[way]
    done = subprocess.run(
        ["/usr/bin/python3", "-c", code], input="1 2\n", capture_output=True, text=True, timeout=20
    )
    right = done.returncode == 0 and done.stdout.strip() == "3"
    [result] = judge(fenced(code), truth={"inputs": ["1 2\n"], "outputs": ["3"]})
    assert (result["score"], result["crash"]) == (float(right), float(done.returncode != 0))


def test_without_partial_credit_it_is_all_or_nothing():
    assert judge(fenced(RIGHT), fenced("print(3)"), continuous=False) == [marks(1.0), marks(0.0)]
    assert judge(RIGHT, "this is no program", truth=json.dumps(ADD)) == [
        marks(1.0),
        marks(0.0, crash=1.0),
    ]


def test_functions():
    programs = {
        "def add(a: int, b: int) -> Optional[int]:\n    print('noise')\n    return a + b": 1.0,
        "class Solution:\n    def add(self, a, b):\n        return sum([a, b])": 1.0,
        "def add(a, b):\n    return a - b": 0.0,
        "def add(a, b):\n    return 3": 1 / 3,
    }
    assert judge(*map(fenced, programs), truth=CALLED) == [marks(s) for s in programs.values()]
    wrong = ["def ad(a, b):\n    return a + b", "def add(a):\n    return a", "x = 1 +"]
    assert judge(*map(fenced, wrong), truth=CALLED) == [marks(0.0, crash=1.0)] * 3


def test_arguments_and_values_of_functions():
    truth = {
        "inputs": [[{"1": "a"}, [1.5]], [{}, []]],
        "outputs": [[["a", 1.5]], [[None, 0]]],
        "fn_name": "f",
    }
    code = "def f(names, values):\n    return [(names.get(1), sum(values))][0]"
    assert judge(fenced(code), truth=truth) == [marks(1.0)]


def test_the_first_ten_tests_count_for_the_share_and_all_for_the_whole():
    truth = {"inputs": [str(i) for i in range(12)], "outputs": [str(i) for i in range(12)]}
    echo = "n = int(input())\n"
    programs = ["print(n)", "print(n if n < 5 else -1)", "print(n if n < 11 else -1)"]
    assert judge(*(fenced(echo + p) for p in programs), truth=truth) == [
        marks(1.0),
        marks(0.5),
        marks(1.0, acc=0.0),
    ]


def test_programs_that_hang_or_crash():
    hang = "n = input()\nif n == '1 2':\n    print(3)\nelse:\n    while True: pass"
    deaf = "print(sum(map(int, input().split())), flush=True)\nimport time\ntime.sleep(60)"
    crash = RIGHT + "\nraise ValueError"
    started = time.monotonic()
    assert judge(*map(fenced, (hang, deaf, crash)), seconds=1.0, total_seconds=15) == [
        marks(1 / 3, timeout=1.0),
        marks(0.0, timeout=1.0),
        marks(0.0, crash=1.0),
    ]
    assert time.monotonic() - started < 20


def test_the_time_limit_for_all_tests_ends_them():
    slow = f"import time\ntime.sleep(0.4)\n{RIGHT}"
    truth = {"inputs": ["1 2"] * 10, "outputs": ["3"] * 10}
    [result] = judge(fenced(slow), truth=truth, seconds=2.0, total_seconds=3.0)
    assert 0 < result["score"] < 1 and result["timeout"] == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "\0",
        "\ud800",
        "(" * 100_000,
        "-" * 200_000 + "1",
        "x = " + "[" * 5000,
        "\\",
        "a" * 1_000_000,
    ],
    ids=["nul", "surrogate", "brackets", "minus", "lists", "backslash", "megabyte"],
)
def test_text_that_breaks_the_compiler_is_a_wrong_answer(text):
    assert [m["score"] for m in judge(fenced(text))] == [0.0]


def test_large_inputs_and_outputs():
    big = "\n".join(map(str, range(100_000)))
    truth = {"inputs": [big] * 2, "outputs": [big] * 2}
    flood = "while True: print('x' * 1000)"
    assert judge(fenced("print(sys.stdin.read())"), fenced(flood), truth=truth) == [
        marks(1.0),
        marks(0.0),
    ]


# -- S14: the harness hacked ---------------------------------------------------------------------

HACKS = {
    "says that it passed": "print('\"ready\"')\nfor i in range(3): print([i, '', 'Mwo='])",
    "says so to our stdout": (
        "import os\nwith open(f'/proc/{os.getppid()}/fd/1', 'w') as f:\n"
        '    for i in range(3): f.write(\'[%d, "", ""]\\n\' % i)'
    ),
    "exits early": "import os, sys\nos._exit(0)",
    "exits politely": "raise SystemExit(0)",
    "patches the builtins": (
        "import builtins, json\nclass Yes(str):\n    __eq__ = lambda *_: True\n"
        "    __hash__ = None\nbuiltins.str = builtins.all = builtins.any = Yes\n"
        "json.dumps = json.loads = Yes\n"
        "print(Yes('?'))"
    ),
    "patches the harness": (
        "import gc, sys\nfor o in gc.get_objects():\n"
        "    if isinstance(o, dict) and 'watch' in o and 'MODULES' in o:\n"
        "        o['watch'] = o['call'] = lambda *_: ('', b'3')"
    ),
    "looks for what is expected": (
        "import gc, glob, sys\nfound = [o for o in gc.get_objects() if isinstance(o, dict)"
        " and 'outputs' in o]\nframe = sys._getframe()\nwhile frame:\n"
        "    found += [v for k, v in frame.f_locals.items() if 'output' in k]\n"
        "    frame = frame.f_back\nfor path in glob.glob('/tmp/**', recursive=True):\n"
        "    found.append(path) if 'out' in path or 'test' in path else None\n"
        "print(found[0] if found else 'nothing')"
    ),
    "writes tests of its own": (
        "import os\nfor d in ('/tmp', '/', '.'):\n  for n in ('tests', 'out.json', 'main.py'):\n"
        "    try: open(os.path.join(d, n), 'w').write('{}')\n    except OSError: pass"
    ),
    "kills the harness": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "kills all": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "leaves somebody behind": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    while True:\n"
        "        try: open(f'/proc/{os.getppid()}/fd/1', 'w').write('[1, \"\", \"Nwo=\"]\\n')\n"
        "        except OSError: pass\n        time.sleep(0.01)"
    ),
}


@pytest.mark.parametrize("truth", [ADD, CALLED], ids=["program", "function"])
def test_a_hacked_harness_earns_nothing(truth):
    always = "class Any:\n    def __eq__(self, other): return True\n"
    ends = f"{always}def add(a, b): return Any()\n"
    results = judge(*(fenced(f"{ends}{code}") for code in HACKS.values()), truth=truth)
    scores = [r["score"] for r in results]
    assert dict(zip(HACKS, scores, strict=True)) == dict.fromkeys(HACKS, 0.0)


def test_the_harness_never_sees_the_expected_output(monkeypatch):
    """The expected outputs are in none of the data that the sandbox receives."""
    if (why := why_no_sandbox()) and not os.environ.get("CI"):
        pytest.skip(why)
    runs = []

    async def judged():
        place = sandbox.current()
        original = place.run

        async def listening(code, **kwargs):
            runs.append((code, kwargs))
            return await original(code, **kwargs)

        monkeypatch.setattr(place, "run", listening, raising=False)
        truth = {"inputs": ["1"] * 12, "outputs": ["7777"] * 12}
        return await grader_of("apps", {}).grade_text("print(7777 // 7 * int(input()) * 7)", truth)

    assert asyncio.run(judged())["acc"] == 1.0
    assert len(runs) == 2
    for code, kwargs in runs:
        assert "7777" not in f"{code}{kwargs}".replace("7777 // 7", "")


LINES = st.one_of(
    st.text(),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just("Mwo="),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=2),
    ).map(json.dumps),
    st.tuples(st.integers(-9, 9), st.sampled_from(["", "time", "crash", "x"]), st.text()).map(
        json.dumps
    ),
    st.integers(0, 3).map(str),
)


@given(st.lists(LINES))
def test_a_forged_report_raises_nothing_and_adds_no_test(lines):
    done = Completed("\n".join([READY, *lines]), "", 0)
    ended = _endings(done, read_tests(ADD))
    assert 0 < len(ended) <= 3
    assert set(ended) <= {"", "wrong", "time", "crash", "output"}


# -- the sandbox ---------------------------------------------------------------------------------


def test_a_sandbox_that_does_not_work_is_no_score(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    sandbox.configure(SandboxConfig(python=str(broken)))
    try:
        with pytest.raises(SandboxError):
            judge(fenced(RIGHT))
    finally:
        sandbox.configure(SandboxConfig())


def test_the_plan_knows_that_it_needs_the_sandbox():
    assert grader_of("apps", {}).options.sandbox
    assert not grader_of("aime24", {}).options.sandbox
