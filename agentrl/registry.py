"""Names to things: tools, agent loops, interactions, rewards and algorithms register by decorator.

A dataset row only ever names an entry; code is loaded from the files the user lists, never from a
row.
"""

from __future__ import annotations

import difflib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from agentrl.errors import RegistryError, UserError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the closest choice, or an empty string."""
    close = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


class Registry(Generic[T]):
    """A dictionary of named things that answers a wrong name with the right ones.

    Things that are heavy to import (those that need torch) can be known before they are defined:
    `shipped` are their names, `home` is the module or package that defines them when it is
    imported, which `get` does.
    """

    def __init__(
        self,
        kind: str,
        aliases: Mapping[str, str] | None = None,
        *,
        shipped: Iterable[str] = (),
        home: str = "",
    ):
        self.kind = kind
        self.aliases = dict(aliases or {})
        self.shipped = frozenset(shipped)
        self._home = home
        self._things: dict[str, T] = {}

    def add(self, name: str, thing: T) -> T:
        """Register `thing`; the same definition loaded twice replaces itself.

        Raises:
            RegistryError: another definition holds the name, or one that is shipped does.
        """
        module = getattr(thing, "__module__", "")
        if name in self.shipped and not f"{module}.".startswith(f"{self._home}."):
            raise RegistryError(
                f"{_origin(thing)} is named like the {self.kind} {name!r} that is there already."
                " Give it another name."
            )
        held = self._things.get(name)
        if held is not None and _origin(held) != _origin(thing):
            raise RegistryError(
                f"two definitions of the {self.kind} {name!r}: {_origin(held)} and"
                f" {_origin(thing)}. Rename one of them."
            )
        self._things[name] = thing
        return thing

    def get(self, name: str) -> T:
        """The thing of that name or alias.

        Raises:
            RegistryError: no such name; the message lists the choices.
        """
        name = self.canonical(name)
        if name in self.shipped and name not in self._things:
            importlib.import_module(self._home)
        try:
            return self._things[name]
        except KeyError:
            raise RegistryError(self.unknown(name)) from None

    def canonical(self, name: str) -> str:
        """The registered name behind an alias."""
        return self.aliases.get(name, name)

    def unknown(self, name: str) -> str:
        """The message for a name that is not registered."""
        names = self.names()
        listed = ", ".join(names) if names else "none"
        suggestion = did_you_mean(name, [*names, *self.aliases])
        return f"no {self.kind} named {name!r}.{suggestion} Registered: {listed}"

    def names(self) -> list[str]:
        """All registered names, sorted, without aliases."""
        return sorted({*self._things, *self.shipped})

    def __contains__(self, name: str) -> bool:
        name = self.canonical(name)
        return name in self._things or name in self.shipped


def _origin(thing: Any) -> str:
    """Where a definition stands: file and qualified name."""
    thing = getattr(thing, "target", thing)
    code = getattr(thing, "__code__", None)
    module = sys.modules.get(getattr(thing, "__module__", ""), None)
    file = code.co_filename if code else getattr(module, "__file__", "?")
    return f"{file}:{getattr(thing, '__qualname__', repr(thing))}"


tools: Registry[Any] = Registry("tool")
agent_loops: Registry[Any] = Registry(
    "agent loop", {"single_turn_agent": "single_turn", "react_agent": "react"}
)
interactions: Registry[Any] = Registry("interaction")
rewards: Registry[Any] = Registry(
    "reward", shipped=("reward_model",), home="agentrl.trainer.reward_model"
)
advantage_estimators: Registry[Callable[..., Any]] = Registry(
    "advantage estimator",
    shipped=(
        "gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax",
        "turn_rloo",
    ),
    home="agentrl.trainer.algorithms",
)  # fmt: skip
policy_losses: Registry[Callable[..., Any]] = Registry(
    "policy loss", shipped=("vanilla", "gspo", "cispo"), home="agentrl.trainer.losses"
)


def advantage_estimator(name: str) -> Callable[[F], F]:
    """Register an estimator under the name that `algorithm.adv_estimator` uses.

        @advantage_estimator("plain")
        def plain(batch, token_rewards, values, config):
            rewards = batch.rewards[batch.rollout][:, None]  # (B, 1)
            return rewards.where(batch.action_mask, 0.0), None

    See `agentrl.trainer.algorithms` for what it is given and returns. The function stays as it is.

    Raises:
        RegistryError: the name is taken, or is no text.
    """
    return _decorator(advantage_estimators, name)


def policy_loss(name: str) -> Callable[[F], F]:
    """Register a policy loss under the name that `algorithm.policy_loss` uses.

        @policy_loss("reinforce")
        def reinforce(logprobs, old_logprobs, advantages, mask, config):
            return -advantages * logprobs, {}

    See `agentrl.trainer.losses` for what it is given and returns. The function stays as it is.

    Raises:
        RegistryError: the name is taken, or is no text.
    """
    return _decorator(policy_losses, name)


def _decorator(kind: Registry[Callable[..., Any]], name: str) -> Callable[[F], F]:
    if not isinstance(name, str):
        raise RegistryError(
            f'write the {kind.kind}\'s decorator with a name, ("name"): the config refers to it so'
        )

    def register(function: F) -> F:
        kind.add(name, function)
        return function

    return register


SHELF = "shelf:"
YAML = (".yaml", ".yml")
VERL, MCP = "agentrl.compat.verl", "agentrl.tools.mcp.source"
"""Above this room: imported where a file needs them."""


def shelf_folder() -> Path:
    """Where the ready tools lie: in the package when installed, beside it in a checkout."""
    here = Path(__file__).parent
    installed = here / "_shelf"
    return installed if installed.is_dir() else here.parent / "tools_registry"


def where_to_load(*names: str) -> str:
    """What to do for names that no loaded file defines; whose file is on the shelf is named."""
    on_shelf = [n for n in names if n.isidentifier() and (shelf_folder() / f"{n}.py").is_file()]
    return " ".join(["Load its file with --file", *(SHELF + name for name in on_shelf[:1])])


def resolve_file(name: str) -> Path:
    """The path of a user file, or of a tool on the shelf for `shelf:NAME`.

    Raises:
        UserError: no such file, or not a Python file.
    """
    if name.startswith(SHELF):
        stem = name[len(SHELF) :]
        ready = sorted(p.stem for p in shelf_folder().glob("*.py"))
        if stem not in ready:
            raise UserError(
                f"no tool file {name!r} on the shelf.{did_you_mean(stem, ready)}"
                f" Ready: {', '.join(SHELF + r for r in ready)}"
            )
        return shelf_folder() / f"{stem}.py"
    path = Path(name).expanduser().resolve()
    if not path.is_file():
        raise UserError(f"no such file: {name} (looked at {path})")
    if path.suffix not in (".py", *YAML):
        raise UserError(f"{name} is neither a Python file (.py) nor verl's YAML of tools (.yaml)")
    return path


def load_file(name: str) -> Any:
    """Run a user file once, so that its decorators register what it defines; returns the module.

    A YAML file is verl's, of tools or interactions: what it names is registered; a name with `mcp+`
    is that of a server of tools.

    Raises:
        UserError: the file is missing or does not run; the message names the line.
    """
    if name.startswith("mcp+"):
        return importlib.import_module(MCP).load(name)
    path = resolve_file(name)
    if path.suffix in YAML:
        return importlib.import_module(VERL).load_yaml(path)
    # The same name in every process: what one pickles, another looks for by it.
    module_name = (
        f"agentrl_user_{path.stem}_{blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    )
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        _run(spec.loader, module)
    except UserError:
        del sys.modules[module_name]
        raise
    except Exception as e:
        del sys.modules[module_name]
        line = _line_in(path, e)
        raise UserError(f"{name}{line} does not load: {type(e).__name__}: {e}") from e
    return module


def _run(loader: Loader, module: ModuleType) -> None:
    """Run a module's file; what it misses of verl, agentrl stands in for."""
    try:
        loader.exec_module(module)
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] != "verl":
            raise
        verl = importlib.import_module(VERL)
        if not verl.is_missing(e):
            raise
        verl.stand_in()
        loader.exec_module(module)


def _line_in(path: Path, error: Exception) -> str:
    """`:LINE` of the last frame of `error` in the file, or nothing."""
    if isinstance(error, SyntaxError):
        return f":{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f":{frame.lineno}" for frame in frames if frame.filename == str(path)]
    return lines[-1] if lines else ""
