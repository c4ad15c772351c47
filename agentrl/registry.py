"""Registries of tools, agent loops, interactions, rewards and algorithms, by name.

Decorators register them. A dataset row can only refer to a registered name. Code is loaded from the
files that the user lists, never from a row.
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from agentrl.errors import ConfigError, RegistryError, UserError
from agentrl.file_loaders import door_names, door_of, file_loaders
from agentrl.siblings import make_siblings_importable

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the closest choice, or an empty string."""
    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""


def suggest_door(address: object) -> str:
    """Return ` Did you mean 'DOOR:NAME'?` for an address with almost the name of a door, or ""."""
    return did_you_mean(str(address).partition(":")[0], [f"{name}:NAME" for name in door_names()])


class Registry(Generic[T]):
    """A dictionary of named entries whose error messages list the known names.

    Args:
        kind: the kind of entries, for messages.
        aliases: the registered name of each alias.
        shipped: the names of entries whose module is slow to import, or may only be imported by
            higher ones. `get` imports it when one is needed.
        home: the module or package that defines the shipped entries.
        replaceable: whether a definition of the user's replaces a shipped one with the same name.
            If not, it is refused.
    """

    def __init__(
        self,
        kind: str,
        aliases: Mapping[str, str] | None = None,
        *,
        shipped: Iterable[str] = (),
        home: str = "",
        replaceable: bool = False,
    ):
        self.kind = kind
        self.aliases = dict(aliases or {})
        self.shipped = frozenset(shipped)
        self._home = home
        self._replaceable = replaceable
        self._entries: dict[str, T] = {}
        self._agentrl_names: set[str] = set()

    def add(self, name: str, entry: T) -> T:
        """Register an entry and return it. The same definition may be registered again.

        A shipped entry that the user has replaced already is not registered.

        Raises:
            RegistryError: the name belongs to another definition, or to a shipped one that cannot
                be replaced.
        """
        module = getattr(getattr(entry, "target", entry), "__module__", "")
        if name in self.shipped and not f"{module}.".startswith(f"{self._home}."):
            raise RegistryError(
                f"{_origin(entry)} has the name of the shipped {self.kind} {name!r}. Rename it."
            )
        existing = self._entries.get(name)
        is_other = existing is not None and _origin(existing) != _origin(entry)
        may_replace = self._replaceable and is_shipped(existing) != is_shipped(entry)
        if is_other and not may_replace:
            raise RegistryError(
                f"two definitions of the {self.kind} {name!r}: {_origin(existing)} and"
                f" {_origin(entry)}. Rename one of them."
            )
        if is_shipped(entry):
            self._agentrl_names.add(name)
            if existing is not None and not is_shipped(existing):
                return entry
        self._entries[name] = entry
        return entry

    def user_names(self) -> list[str]:
        """Return the names that the user's files define, sorted."""
        return sorted(name for name, entry in self._entries.items() if not is_shipped(entry))

    def replaced(self) -> dict[str, str]:
        """Return the shipped names that the user's files define anew, and where they do."""
        users = set(self.user_names()) & self._agentrl_names
        return {name: _origin(self._entries[name]) for name in sorted(users)}

    def get(self, name: str) -> T:
        """Return the entry with a name or an alias.

        Raises:
            RegistryError: the name is unknown; the message lists the known names.
        """
        name = self.canonical(name)
        if name in self.shipped and name not in self._entries:
            importlib.import_module(self._home)
        try:
            return self._entries[name]
        except KeyError:
            raise RegistryError(self.explain_unknown(name)) from None

    def canonical(self, name: str) -> str:
        """Return the registered name of an alias, or the name itself."""
        return self.aliases.get(name, name)

    def explain_unknown(self, name: str) -> str:
        """Return the error message for a name that is not registered."""
        names = self.names()
        choices = ", ".join(names) if names else "none"
        suggestion = did_you_mean(name, names)
        return f"no {self.kind} named {name!r}.{suggestion} Registered: {choices}"

    def names(self) -> list[str]:
        """Return all registered names, sorted, without aliases."""
        return sorted({*self._entries, *self.shipped})

    def items(self) -> list[tuple[str, T]]:
        """Return the registered names and entries, in the order of their registration."""
        return list(self._entries.items())

    @contextmanager
    def isolated(self, *, keep: Iterable[str] | None = None) -> Iterator[None]:
        """Forget on exit what is registered inside the context, for tests.

        Shipped entries stay, because their module is imported only once. A user's file that is
        loaded inside the context is not run again by `load_file` either, unless it is removed from
        `sys.modules`.

        Args:
            keep: the names that are registered at the start, besides the shipped ones; None: all
                that are registered now.
        """
        before = self._entries
        names = before.keys() if keep is None else {*keep, *self.shipped}
        self._entries = {name: entry for name, entry in before.items() if name in names}
        try:
            yield
        finally:
            shipped = {n: entry for n, entry in self._entries.items() if n in self.shipped}
            self._entries = before | shipped

    def __contains__(self, name: str) -> bool:
        name = self.canonical(name)
        return name in self._entries or name in self.shipped


def is_shipped(entry: Any) -> bool:
    """Return whether agentrl defines an entry itself.

    An entry that a file of verl's names is the user's choice, also if `agentrl.compat` defines it.
    """
    module = getattr(getattr(entry, "target", entry), "__module__", None) or ""
    return module.startswith("agentrl.") and not module.startswith("agentrl.compat.")


def _origin(entry: Any) -> str:
    """Return file and qualified name of a definition."""
    entry = getattr(entry, "target", entry)
    code = getattr(entry, "__code__", None)
    module = sys.modules.get(getattr(entry, "__module__", ""), None)
    file = code.co_filename if code else getattr(module, "__file__", "?")
    return f"{file}:{getattr(entry, '__qualname__', repr(entry))}"


ENVIRONMENT = "environment+"
"""The beginning of the address of an environment in another program: `environment+URL#ALIAS`. With
the name of a door as its scheme, the URL is an address of this door (`agentrl.doors`)."""

tools: Registry[Any] = Registry("tool")
agent_loops: Registry[Any] = Registry(
    "agent loop",
    {"single_turn_agent": "single_turn", "react_agent": "react"},
    shipped=("external",),
    home="agentrl.gateway.agent",
)
interactions: Registry[Any] = Registry("interaction", replaceable=True)
rewards: Registry[Any] = Registry(
    "reward", shipped=("reward_model",), home="agentrl.learner.reward_model"
)
advantage_estimators: Registry[Callable[..., Any]] = Registry(
    "advantage estimator",
    shipped=(
        "gae", "grpo", "maxrl", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
        "remax", "turn_rloo", "opd",
    ),
    home="agentrl.learner.algorithms",
)  # fmt: skip
policy_losses: Registry[Callable[..., Any]] = Registry(
    "policy loss",
    shipped=("vanilla", "gspo", "cispo", "sapo", "dppo"),
    home="agentrl.learner.losses",
)

callbacks: Registry[Callable[..., Any]] = Registry("callback")
"""Keys are FILE.EVENT, the file without its suffix: each file may define each event once."""


def all_registries() -> list[Registry[Any]]:
    """Return the registry of each kind."""
    return [
        tools, agent_loops, interactions, rewards, advantage_estimators, policy_losses, callbacks
    ]  # fmt: skip


def advantage_estimator(name: str) -> Callable[[F], F]:
    """Register an estimator under the name that `algorithm.adv_estimator` uses.

        @advantage_estimator("plain")
        def plain(batch, token_rewards, values, config):
            rewards = batch.rewards[batch.rollout][:, None]  # (B, 1)
            return rewards.where(batch.action_mask, 0.0), None

    The function gets the step's rollouts (`agentrl.learner.batch.Batch`, of which the first line
    above makes one reward for each row), `batch.token_rewards`, the critic's values or None, both
    (B, T), and the config's section `algorithm`. It returns the advantages (B, T), and the targets
    of the critic (B, T) or None. `agentrl.learner.algorithms` explains them. The decorator returns
    the function unchanged.

    Args:
        name: the value of `algorithm.adv_estimator`.

    Raises:
        RegistryError: the name belongs to another definition, or is not a string.
    """
    return _decorator(advantage_estimators, name)


def policy_loss(name: str) -> Callable[[F], F]:
    """Register a policy loss under the name that `algorithm.policy_loss` uses.

        @policy_loss("reinforce")
        def reinforce(logprobs, old_logprobs, advantages, mask, config):
            return -advantages * logprobs, {}

    The function gets four tensors (b, A) with the tokens that the policy chose, and the config's
    section `algorithm`. Only `logprobs` has a gradient; `mask` is True where there is a token. It
    returns the loss of each token (b, A), which is not aggregated, and further metrics (b, A) by
    name. `agentrl.learner.losses` explains them. The decorator returns the function unchanged.

    Args:
        name: the value of `algorithm.policy_loss`.

    Raises:
        RegistryError: the name belongs to another definition, or is not a string.
    """
    return _decorator(policy_losses, name)


def _decorator(kind: Registry[Callable[..., Any]], name: str) -> Callable[[F], F]:
    if not isinstance(name, str):
        raise RegistryError(
            f'the decorator of the {kind.kind} needs a name, ("name"): the config refers to it'
        )

    def register(function: F) -> F:
        kind.add(name, function)
        return function

    return register


SHELF = "shelf:"
USER_MODULE = "agentrl_user_"
"""The names of the modules of user files begin with it."""
YAML = (".yaml", ".yml")


def shipped_path(packaged: str, in_checkout: str) -> Path:
    """Return the path of a file or folder that the wheel contains, or of that in the checkout."""
    package = Path(__file__).parent
    path = package / packaged
    return path if path.exists() else package.parent / in_checkout


def shelf_folder() -> Path:
    """Return the folder of the shipped tools."""
    return shipped_path("_shelf", "tools_registry")


def where_to_load(*names: str, verls_base: str = "BaseTool") -> str:
    """Return how to load the file of a name that no loaded file defines.

    If a shipped tool file has the name, the advice contains `shelf:NAME`.

    Args:
        names: the unknown names.
        verls_base: the name of verl's base class of such entries.
    """
    shipped = [n for n in names if n.isidentifier() and (shelf_folder() / f"{n}.py").is_file()]
    advice = " ".join(["Load its file with --file", *(SHELF + name for name in shipped[:1])])
    return advice + explain_verl_classes(verls_base)


def explain_verl_classes(base: str) -> str:
    """Return how to load verl's classes in loaded Python files, which only YAML files register.

    Args:
        base: the name of verl's base class.

    Returns:
        A sentence that begins with ". ", or "" if no loaded file has such a class.
    """
    classes = [
        f"{Path(module.__file__ or '').stem}.{cls.__name__}"
        for name, module in list(sys.modules.items())
        if name.startswith(USER_MODULE)
        for cls in vars(module).values()
        if isinstance(cls, type)
        and cls.__module__ == module.__name__
        and any(parent.__name__ == base for parent in cls.__mro__[1:])
    ]
    if not classes:
        return ""
    return (
        f". Subclasses of verl's {base} ({', '.join(classes)}) are registered by a YAML file with"
        f" class_name: {classes[0]}, which --file loads instead of the Python file (docs/verl.md)"
    )


def resolve_file(name: str) -> Path:
    """Return the path of a user file, or of the shipped tool `shelf:NAME`.

    Raises:
        UserError: the file does not exist, or is neither a Python nor a YAML file.
    """
    if name.startswith(SHELF):
        stem = name[len(SHELF) :]
        shipped = sorted(p.stem for p in shelf_folder().glob("*.py"))
        if stem not in shipped:
            raise UserError(
                f"no shipped tool file {name!r}.{did_you_mean(stem, shipped)}"
                f" Shipped: {', '.join(SHELF + s for s in shipped)}"
            )
        return shelf_folder() / f"{stem}.py"
    path = Path(name).expanduser().resolve()
    suffixes = (".py", *YAML)
    if path.is_file() and path.suffix in suffixes:
        return path
    if path.is_file():
        hint = f": for rows, use --dataset {name}" * (path.suffix in (".jsonl", ".parquet"))
        raise UserError(
            f"{name} is neither a Python file (.py) nor verl's YAML of tools (.yaml){hint}"
        )
    folder = path if path.is_dir() else path.parent
    files = sorted(f.name for f in folder.glob("*") if f.suffix in suffixes)
    problem = (
        f"{name} is a folder." if path.is_dir() else f"no such file: {name} (looked at {path})."
    )
    raise UserError(
        f"{problem}{did_you_mean(path.name, files)} Files in {folder}:"
        f" {', '.join(files[:20]) or 'none with .py or .yaml'}"
    )


def load_function(path: str, name: str, key: str) -> Callable[..., Any]:
    """Load a file and return the function of this name.

    Args:
        path: the file.
        name: the name of the function; an imported one may be named too.
        key: the config key that names it, for messages.

    Raises:
        ConfigError: the file has no such function.
        UserError: the file is missing or does not load.
    """
    module = load_file(path)
    functions = {k: v for k, v in vars(module).items() if callable(v) and not k.startswith("_")}
    if name not in functions:
        own = [k for k, v in functions.items() if v.__module__ == module.__name__]
        raise ConfigError(
            f"{key}: no function {name!r} in {path}.{did_you_mean(name, functions)} It defines:"
            f" {', '.join(own) or 'none'}"
        )
    return functions[name]


def load_file(name: str) -> Any:
    """Run a user file once, so that its decorators register its definitions; return the module.

    The file can import the modules of its folder (`agentrl.siblings`). A YAML file is in verl's
    format: it lists tools or interactions, and all of them are registered. A name that starts with
    `mcp+` is the address of an MCP server, whose tools are registered; one that starts with
    `environment+` is that of an environment in another program, or of a door
    (`Config.all_files`).

    Raises:
        UserError: the file is missing or raises an error, or imports a module of its folder whose
            name is taken; the message names the line.
    """
    if name.startswith("mcp+"):
        return file_loaders["mcp"]().load(name)
    if name.startswith(ENVIRONMENT):
        kind = "door" if door_of(name.removeprefix(ENVIRONMENT)) else "environment"
        return file_loaders[kind]().load(name)
    path = resolve_file(name)
    if path.suffix in YAML:
        return file_loaders["verl"]().load_yaml(path)
    # The name is the same in every process, so that processes can unpickle each other's objects.
    digest = blake2b(str(path).encode(), digest_size=8).hexdigest()
    module_name = f"{USER_MODULE}{path.stem}_{digest}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    make_siblings_importable(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        sys.modules[module_name] = module = _run(spec.loader, module, path)
    except UserError:
        del sys.modules[module_name]
        raise
    except Exception as e:
        del sys.modules[module_name]
        line = _line_in(path, e)
        inner = _line_of_sibling(path, e) + _missing_package(e)
        raise UserError(f"{name}{line} cannot be loaded: {type(e).__name__}: {e}{inner}") from e
    return module


def load_file_again(name: str) -> Any:
    """Load a file that the process of the run has loaded: its warnings were printed there."""
    logger = logging.getLogger("agentrl.tools")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        return load_file(name)
    finally:
        logger.disabled = was_disabled


def _run(loader: Loader, module: ModuleType, path: Path) -> ModuleType:
    """Run a module's file and return the module.

    If it imports verl and verl is not installed, install a substitute. If it has relative imports,
    as the classes in verl's folders have, they find the files of its folder and verl's modules.
    """
    try:
        loader.exec_module(module)
    except ImportError as e:
        verl = file_loaders["verl"]()
        if verl.is_relative(e):
            return verl.load_relative(path)
        if not verl.is_missing(e):
            raise
        verl.stand_in()
        return _run(loader, module, path)
    return module


def _missing_package(error: Exception) -> str:
    """Return the advice to install the package of a module that was not found, or ""."""
    package = ((isinstance(error, ModuleNotFoundError) and error.name) or "").partition(".")[0]
    if not package or package in sys.modules or importlib.util.find_spec(package):
        return ""  # The package lacks a part.
    return (
        f". Install the package that has it, for example: {sys.executable} -m pip install {package}"
    )


def _line_of_sibling(path: Path, error: Exception) -> str:
    """Return ` (FILE:LINE)` of the frame that raised `error`, if it is in the file's folder."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_sibling = last.filename != str(path) and path.parent in Path(last.filename).parents
    return f" ({last.filename}:{last.lineno})" if is_sibling else ""


def _line_in(path: Path, error: Exception) -> str:
    """Return `:LINE` of the last frame of `error` in the file, or an empty string."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f":{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f":{frame.lineno}" for frame in frames if frame.filename == str(path)]
    return lines[-1] if lines else ""
