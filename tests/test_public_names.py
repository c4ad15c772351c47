from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import agentrl

HEAVY = "('torch', 'transformers', 'fastapi', 'ray', 'pydantic', 'pyarrow')"


def test_all_is_what_is_visible_sorted():
    assert sorted(agentrl.__all__) == agentrl.__all__
    assert [name for name in dir(agentrl) if not name.startswith("_")] == agentrl.__all__
    assert sorted(name for names in agentrl._MODULES.values() for name in names) == agentrl.__all__


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(agentrl.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {f.module: tuple(a.name for a in f.names) for f in block.body}
    assert seen == {f"agentrl.{module}": names for module, names in agentrl._MODULES.items()}


@pytest.mark.parametrize("name", agentrl.__all__)
def test_every_name_exists_and_is_documented(name):
    thing = getattr(agentrl, name)
    assert thing.__name__ == name
    assert thing.__doc__


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'tol'"):
        agentrl.tol  # noqa: B018
    with pytest.raises(ImportError):
        from agentrl import tol  # noqa: F401


@pytest.mark.parametrize(
    "script",
    [
        "import agentrl",
        "import sys; sys.argv = ['agentrl', '--help']; from agentrl.cli import main\n"
        "try: main()\n"
        "except SystemExit as e: assert not e.code",
    ],
    ids=["import", "help"],
)
def test_importing_agentrl_is_light(script):
    script = (
        f"import sys, time\n{script}\nprint('heavy:', [m for m in {HEAVY} if m in sys.modules])"
        "\nprint(time.process_time())"
    )
    seconds = []
    # The machine may be busy with something else for a while: the best of some counts.
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        heavy, spent = done.stdout.splitlines()[-2:]
        assert heavy == "heavy: []"
        seconds.append(float(spent))
        if seconds[-1] < 0.3:
            break
    assert min(seconds) < 0.3
