"""Read settings from YAML files and `a.b.c=1` texts, and merge them.

Every reader appends its mistakes to a list and continues, so that one error reports all of them.
Scalars are read as in YAML 1.2: `1e-6` is a number, `2026-11-20` and `on` are texts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from agentrl.config.removed import REMOVED, is_constant
from agentrl.regular_files import read_regular

MAX_NODES = 100_000
"""The most values of a YAML document, with its aliases expanded."""


class BoundedLoader(yaml.SafeLoader):
    """SafeLoader that refuses a small document that expands to a huge one."""

    def get_single_node(self) -> yaml.Node | None:
        """Return the document.

        Raises:
            YAMLError: it has too many values, or is nested too deeply.
        """
        try:
            node = super().get_single_node()
            if node is not None and _count_nodes(node, {}) > MAX_NODES:
                raise yaml.YAMLError(f"it has more than {MAX_NODES:,} values, aliases expanded")
        except RecursionError:
            raise yaml.YAMLError("it is nested too deeply") from None
        return node


def _count_nodes(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return the number of values in a node, with its aliases expanded."""
    if id(node) not in counts:
        counts[id(node)] = MAX_NODES  # It counts as too many if it contains itself.
        inner = [*node.value] if isinstance(node, yaml.SequenceNode) else []
        inner += chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else []
        counts[id(node)] = 1 + sum(_count_nodes(child, counts) for child in inner)
    return counts[id(node)]


def load_yaml(path: Path) -> Any:
    """Return the content of a YAML 1.1 file.

    Raises:
        YAMLError: it is not YAML, or has too many values.
        OSError: it cannot be read.
    """
    try:
        return yaml.load(read_regular(path), BoundedLoader)
    except (ValueError, RecursionError) as e:  # such as a date with month 13
        raise yaml.YAMLError(str(e)) from None


class _Loader(BoundedLoader):
    """SafeLoader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own way)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), [*_first, ""]
    )
# In YAML 1.1, 010 is 8.
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


class _Dumper(yaml.SafeDumper):
    """SafeDumper with the scalars of YAML 1.2.

    It quotes unprintable characters, because PyYAML reads the U+0085 that it wrote as a space.
    """

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"'
    ),
)

_Dumper.add_multi_representer(
    BaseModel, lambda dumper, section: dumper.represent_dict(section.model_dump())
)


def dump_yaml(value: Any, flow: bool = False) -> str:
    """Return YAML that is read back as the same value; with `flow`, on one line."""
    return yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=flow,
        width=2**20 if flow else 100,
    )


NESTED_MAPPINGS = ("interaction.kwargs",)
"""Keys whose values map names to mappings: `interaction.kwargs.NAME.ARGUMENT=1`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value for a key.

    Example: `Setting("optim.lr", 1e-5, "run.yaml:7")`.
    """

    path: str
    value: Any
    source: str
    """The source for messages: file and line, flag, or command line."""
    references: Mapping[str, str] = field(default_factory=dict)
    """The reference `${oc.env:NAME}` of each text in `value` that is an environment variable's."""

    def __str__(self) -> str:
        return f"{assignment(self.path, self.value)} ({self.source})"


def parse_value(text: str, is_text: bool = False, repeated: list[str] | None = None) -> Any:
    """Return the value of the right-hand side of `a.b.c=text`.

    Null, booleans and numbers, and lists, mappings and texts in brackets or quotation marks are
    read as in YAML. Anything else is the text itself: `#`, `: ` and line breaks are part of it.

    Args:
        text: the right-hand side.
        is_text: whether a number or a boolean is the text itself, too.
        repeated: a list to which a message is appended for each key that a mapping contains twice.
    """
    bare = text.strip()
    try:
        loader = _Loader(bare)
        node = loader.get_single_node()
        is_marked = bare.startswith(("[", "{", '"', "'")) and not _has_template(node)
        if node and (is_marked or node.value == bare) and node.end_mark.index == len(bare):
            if repeated is not None:
                repeated.extend(m.partition(";")[0] for _, m in _repeated_keys(node))
            value = _construct(loader, node, is_text)
            return value if is_marked or not isinstance(value, str) else text
    except (yaml.YAMLError, RecursionError, ValueError):
        pass
    return text


def _has_template(node: yaml.Node | None) -> bool:
    """Return whether a node contains `{answer}`, which YAML reads as a mapping to null."""
    if isinstance(node, yaml.MappingNode):
        values = [value for _, value in node.value]
        is_template = any(v.start_mark.index == v.end_mark.index for v in values)
        return is_template or any(map(_has_template, values))
    return isinstance(node, yaml.SequenceNode) and any(map(_has_template, node.value))


def _construct(loader: _Loader, node: yaml.Node, is_text: bool) -> Any:
    """Return the value of a node; if `is_text`, numbers and booleans in it are texts."""
    for scalar in [node, *node.value] if isinstance(node, yaml.SequenceNode) else [node]:
        if is_text and scalar.tag.endswith((":int", ":float", ":bool")):
            scalar.tag = "tag:yaml.org,2002:str"
    return loader.construct_object(node, deep=True)


def assignment(path: str, value: Any) -> str:
    """Return `path=value` as a user would type it; `parse_value` reads the same value back."""
    is_bare = isinstance(value, str) and value.isprintable() and value == value.strip() != ""
    if is_bare and parse_value(value) == value:
        return f"{path}={value}"
    text = dump_yaml(value, flow=True).removesuffix("...\n")  # a bare scalar ends its document
    return f"{path}={text.strip()}"


def read_overrides(
    texts: Iterable[str],
    mistakes: list[str],
    allowed: Callable[[str], str] = lambda path: "",
    text_keys: Collection[str] = (),
) -> list[Setting]:
    """Return the settings of texts `a.b.c=1`, in order; a leading `+` is ignored.

    Args:
        texts: the texts.
        mistakes: the list to which mistakes are appended.
        allowed: returns the values that a key accepts, for messages, or "".
        text_keys: the keys whose values are texts or lists of texts, never numbers or booleans.
    """
    settings = []
    for text in texts:
        path, equals, value = text.partition("=")
        path = path.strip().lstrip("+")
        if path.startswith("~"):
            mistakes.append(
                f"{text}: keys cannot be removed. Write {path[1:]}=null for the default"
            )
        elif not equals or not re.fullmatch(r"[^\s.=]+(\.[^\s.=]+)*", path):
            mistakes.append(
                f"{text!r} is not of the form section.key=value, without spaces. Files and models"
                " need an option: --dataset, --model, --file or --config"
            )
        elif not value.strip():
            # In a shell this is usually a variable that is not set.
            mistakes.append(
                f"{path}= has no value. Write {path}=null for the default, or"
                f" {path}={allowed(path) or 'VALUE'}"
            )
        else:
            repeated: list[str] = []
            value = parse_value(value, path in text_keys, repeated)
            mistakes.extend(f"{text}: {message}" for message in repeated)
            settings.append(Setting(path, value, "command line"))
    return settings


def read_yaml(
    file: str, fields: Collection[str], mistakes: list[str], text_keys: Collection[str] = ()
) -> list[Setting]:
    """Return the settings of a YAML file, in order.

    Args:
        file: the path of the file.
        fields: the dotted paths of all keys; mappings above them are sections.
        mistakes: the list to which mistakes are appended: the file, its syntax, repeated keys.
        text_keys: the keys whose values are texts or lists of texts, never numbers or booleans.
    """
    try:
        text = read_regular(Path(file).expanduser()).decode()
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            mistakes.append(
                f"{file}: must contain `section:` and `key: value` lines, not {text[:40]!r}"
            )
            return []
        mistakes.extend(f"{file}:{line}: {message}" for line, message in _repeated_keys(root))
        return [
            Setting(path, _construct(loader, value, path in text_keys), f"{file}:{line}")
            for path, value, line in _walk(loader, root, "", fields)
        ]
    except OSError as e:
        mistakes.append(f"{file}: cannot be read ({e.strerror})")
    except (ValueError, RecursionError) as e:
        mistakes.append(f"{file}: is not a YAML file ({e})")
    except yaml.MarkedYAMLError as e:
        line = f":{e.problem_mark.line + 1}" if e.problem_mark else ""
        hint = ". Put a text with ? into quotation marks" if "'?'" in (e.problem or "") else ""
        mistakes.append(f"{file}{line}: YAML syntax: {e.problem or e.context}{hint}")
    except yaml.YAMLError as e:
        mistakes.append(f"{file}: YAML syntax: {e}")
    return []


def _repeated_keys(node: yaml.Node, prefix: str = "") -> Iterator[tuple[int, str]]:
    """Yield line and message for every key that a mapping contains twice."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated_keys(item, prefix)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in lines and name != "<<":
            yield line, f"{prefix}{name} is set twice; first in line {lines[name]}"
        lines.setdefault(name, line)
        yield from _repeated_keys(value, f"{prefix}{name}.")


def _walk(
    loader: _Loader, node: yaml.MappingNode, prefix: str, fields: Collection[str]
) -> Iterator[tuple[str, yaml.Node, int]]:
    """Yield path, value and line of the settings below a section."""
    loader.flatten_mapping(node)
    for key, value in node.value:
        path = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode) and value.value and path not in fields:
            yield from _walk(loader, value, f"{path}.", fields)
        else:
            yield path, value, key.start_mark.line + 1


def merge(
    settings: Sequence[Setting], fields: Mapping[str, type], mistakes: list[str]
) -> dict[str, Setting]:
    """Return the last setting of each key; null removes the earlier settings of a key.

    Args:
        settings: all settings; later ones override earlier ones.
        fields: the type of each key's value; `dict` if users put their own keys below the key.
        mistakes: the list to which paths that are not keys are appended.
    """
    merged: dict[str, Setting] = {}
    for setting in settings:
        for leaf in _leaves(setting, fields):
            owner = next((f for f in fields if leaf.path.startswith(f"{f}.")), "")
            if leaf.path in fields:
                merged.pop(leaf.path, None)
                if leaf.value is not None:
                    merged[leaf.path] = leaf
            elif is_constant(leaf.path, leaf.value):
                continue
            elif fields.get(owner) is dict:
                value = merged[owner].value if owner in merged else {}
                if isinstance(value, dict):  # otherwise validation reports it
                    value = _with_entry(value, leaf.path[len(owner) + 1 :], leaf.value, owner)
                    merged[owner] = Setting(owner, value, leaf.source)
            elif owner and not verl_keys().explain_key(leaf.path):
                mistakes.append(f"{leaf}: {owner} is a key, not a section")
            elif keys := [f for f in fields if f.startswith(f"{leaf.path}.")]:
                if leaf.value is not None:  # `optim:` with all keys commented out is valid
                    mistakes.append(
                        f"{leaf}: {leaf.path} is a section. Its keys: {', '.join(keys)}"
                    )
            else:
                mistakes.append(f"{leaf}: {_unknown_key(leaf.path, fields)}")
    return merged


def _with_entry(mapping: dict[str, Any], key: str, value: Any, owner: str) -> dict[str, Any]:
    """Return a mapping with one more entry; `name.inner` sets an entry of the mapping `name`."""
    # A name may contain dots itself, such as that of a reward in a file.
    names = (n for n, inner in mapping.items() if isinstance(inner, dict))
    name = next((n for n in names if key.startswith(f"{n}.")), "")
    if not name and owner in NESTED_MAPPINGS and "." in key:
        name = key.partition(".")[0]
    inner = mapping.get(name, {})
    if not name or not isinstance(inner, dict):
        return {**mapping, key: value}
    return {**mapping, name: {**inner, key[len(name) + 1 :]: value}}


def _leaves(setting: Setting, fields: Mapping[str, type]) -> Iterator[Setting]:
    """Split the setting of a whole section (`optim={lr: 1e-5}`) into its keys."""
    path = setting.path
    below = any(path == f or path.startswith(f"{f}.") for f in fields)
    if below or not isinstance(setting.value, dict):
        yield setting
        return
    for key, value in setting.value.items():
        yield from _leaves(Setting(f"{path}.{key}", value, setting.source), fields)


def verl_keys() -> Any:
    """Return the module with verl's keys. It reads a long table, so it is imported on use."""
    from agentrl.config import verl_keys

    return verl_keys


ALIASES = {
    "learning_rate": "optim.lr", "per_device_train_batch_size": "data.batch_size",
    "warmup_steps": "optim.lr_warmup_steps", "gradient_clipping": "optim.max_grad_norm",
    "max_tokens": "rollout.max_turn_tokens", "max_new_tokens": "rollout.max_turn_tokens",
    "group_size": "rollout.n", "num_samples": "rollout.n", "algo": "algorithm.name",
    "loss_type": "algorithm.loss_agg_mode", "scale_rewards": "algorithm.norm_adv_by_std",
    "num_iterations": "algorithm.ppo_epochs", "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high", "kl_coef": "algorithm.kl_loss_coef",
    "reward_funcs": "reward.function", "reward_fn": "reward.function",
    "resume_from_checkpoint": "trainer.resume", "epochs": "trainer.total_epochs",
    "num_train_epochs": "trainer.total_epochs", "steps": "trainer.total_steps",
    "max_steps": "trainer.total_steps", "save_steps": "trainer.save_freq",
    "save_total_limit": "trainer.keep", "metric_for_best_model": "trainer.keep_best",
    "early_stopping_patience": "trainer.patience", "eval_steps": "trainer.test_freq",
    "output_dir": "trainer.output", "report_to": "trainer.logger", "model_name": "model.path",
    "model_name_or_path": "model.path", "dataset_name": "data.train", "train_files": "data.train",
    "val_files": "data.val", "num_generations": "rollout.n",
    "max_completion_length": "rollout.max_trajectory_tokens",
    "max_response_length": "rollout.max_trajectory_tokens", "beta": "algorithm.kl_loss_coef",
    "lora_r": "model.lora_rank", "gradient_checkpointing": "optim.recompute",
    "gpus": "trainer.n_gpus_per_node", "num_gpus": "trainer.n_gpus_per_node",
}  # fmt: skip
"""agentrl's key for common options of TRL, transformers and others. `verl_keys.yaml` has verl's."""


def keys_named(word: str, fields: Iterable[str], *, cutoff: float = 1.0) -> list[str]:
    """Return agentrl's keys for a key's last part, as agentrl, verl, TRL or others spell it.

    Args:
        word: the last part, such as `learning_rate`.
        fields: the dotted paths of all keys.
        cutoff: how similar a name must be to `word`, as in `difflib.get_close_matches`.
    """
    ours: dict[str, list[str]] = {}
    for key in fields:
        ours.setdefault(key.rpartition(".")[2], []).append(key)
    verls = {theirs.rpartition(".")[2]: [key] for theirs, key in verl_keys().RENAMED.items()}
    known = {**verls, **{alias: [key] for alias, key in ALIASES.items()}, **ours}
    if word in known:
        return known[word]
    matches = difflib.get_close_matches(word, known, n=1, cutoff=cutoff) if cutoff < 1 else []
    return [key for match in matches for key in known[match]]


def _unknown_key(path: str, fields: Mapping[str, type]) -> str:
    if path in REMOVED:
        return f"this key was removed: {REMOVED[path][1]}"
    if explanation := verl_keys().explain_key(
        path, [f for f, kind in fields.items() if kind is dict]
    ):
        return explanation
    section, _, leaf = path.rpartition(".")
    close = keys_named(leaf, fields)
    close += difflib.get_close_matches(path, fields, n=1, cutoff=0.75)
    if close := close or keys_named(leaf, fields, cutoff=0.75):
        return f"unknown key. Did you mean {' or '.join(dict.fromkeys(close))}?"
    keys = [f for f in fields if f.startswith(f"{section}.")]
    if section and keys:
        return f"unknown key. Keys of {section}: {', '.join(f[len(section) + 1 :] for f in keys)}"
    return f"unknown key. Sections: {', '.join(dict.fromkeys(f.partition('.')[0] for f in fields))}"
