from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import textwrap
from functools import cached_property
from pathlib import Path
from typing import Any

import docstring_parser
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
def test_help_shows_a_reference(name):
    """All fields, methods and parameters of a public name are described in its docstrings."""
    public = getattr(agentrl, name)
    assert public.__name__ == name
    assert described(public) >= required(public), name
    for method, function in public_methods(public):
        assert inspect.getdoc(function), f"{name}.{method}"
        assert described(function) >= required(function), f"{name}.{method}"


def public_methods(public) -> list[tuple[str, Any]]:
    """The methods and properties that agentrl defines, also in base classes."""
    if not isinstance(public, type):
        return []
    ours = [cls for cls in public.__mro__ if cls.__module__.startswith("agentrl.")]
    names = {name for cls in ours for name in vars(cls) if not name.startswith("_")}
    members = [(name, getattr(public, name)) for name in sorted(names)]
    return [(n, m) for n, m in members if inspect.isroutine(m) or isinstance(m, property)]


def described(documented) -> set[str]:
    """The arguments and attributes that a docstring describes."""
    doc = docstring_parser.parse(inspect.getdoc(documented), docstring_parser.Style.GOOGLE)
    assert doc.short_description and doc.short_description.endswith((".", ":")), documented
    return {parameter.arg_name for parameter in doc.params if parameter.description}


def required(documented) -> set[str]:
    """The parameters of a function; the fields of a class, or what its constructor sets."""
    if isinstance(documented, property | cached_property):
        return set()
    if not isinstance(documented, type):
        return {name for name in inspect.signature(documented).parameters if name != "self"}
    fields = getattr(documented, "model_fields", None) or getattr(
        documented, "__dataclass_fields__", {}
    )
    constructor = vars(documented).get("__init__")
    if fields or constructor is None:
        return set(fields)
    tree = ast.parse(textwrap.dedent(inspect.getsource(constructor)))
    targets = [
        target
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for assigned in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for target in ast.walk(assigned)
    ]
    names = {t.attr for t in targets if isinstance(t, ast.Attribute)}
    return {name for name in names if not name.startswith("_")}


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'tol'"):
        agentrl.tol  # noqa: B018
    with pytest.raises(ImportError):
        from agentrl import tol  # noqa: F401


@pytest.mark.parametrize(
    "script, most_modules",
    [
        ("import agentrl", 100),
        (
            "import sys; sys.argv = ['agentrl', '--help']; from agentrl.cli import main\n"
            "try: main()\n"
            "except SystemExit as e: assert not e.code",
            550,
        ),
    ],
    ids=["import", "help"],
)
def test_importing_agentrl_is_light(script, most_modules):
    script = (
        f"import sys\n{script}\nprint('heavy:', [m for m in {HEAVY} if m in sys.modules])"
        "\nprint(len(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    heavy, number = done.stdout.splitlines()[-2:]
    assert heavy == "heavy: []"
    assert int(number) < most_modules
