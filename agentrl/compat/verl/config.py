"""Translate a config of verl's to agentrl's keys, and report what could not be translated.

What the config does not set has verl's default (`verl_defaults.csv`), not agentrl's, unless it
concerns the machine: GPUs, memory, engines. The defaults are those of the version of verl that has
the config's keys.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.compat.verl.hydra import (
    as_list,
    is_group,
    read_verl_config,
    references,
    resolve,
    resolve_value,
)
from agentrl.config import FIELDS
from agentrl.config.environment import hide_secrets, map_leaves, replace_texts
from agentrl.config.sources import Setting, assignment, read_overrides
from agentrl.config.trackers import TRACKERS
from agentrl.config.verl_keys import (
    CHANGED,
    CHOICES,
    MACHINE,
    REFUSED,
    RENAMED,
    SAME,
    SHARED,
    UNNEEDED,
    VALUES,
    VERL_KEYS,
    WHYS,
    explain_key,
    is_known,
    known_key,
    verl_versions,
)
from agentrl.data.dataset import list_files
from agentrl.data.files import read_batches
from agentrl.errors import ConfigError, DataError
from agentrl.registry import agent_loops, did_you_mean

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"
MODE, SAMPLER = "trainer.v1.trainer_mode", "trainer.v1.sampler.max_off_policy"
MAX_SHOWN = 150
"""The maximum length of a setting in messages, in characters."""
_ESTIMATOR = "algorithm.adv_estimator"
CHARACTERS_PER_TOKEN = 4
"""The assumed length of a token of a tool's result."""


@dataclass
class Translation:
    """A translated config."""

    settings: list[Setting] = field(default_factory=list)
    """The settings in agentrl's keys."""
    taken: list[str] = field(default_factory=list)
    """Lines on settings with the same meaning."""
    overridden: list[str] = field(default_factory=list)
    """Lines on settings whose key the command line sets by agentrl's name."""
    changed: list[str] = field(default_factory=list)
    """Lines on settings with another meaning."""
    dropped: list[str] = field(default_factory=list)
    """Lines on settings without a counterpart."""
    defaults: list[str] = field(default_factory=list)
    """agentrl's settings that stand for verl's defaults."""
    mistakes: list[str] = field(default_factory=list)
    """What must be changed before the config can be translated."""
    version: str = ""
    """The version of verl whose keys the config has, as a text."""

    def report(self) -> str:
        """Return the lines under headings."""
        parts = {
            "taken": self.taken,
            "overridden by the command line": self.overridden,
            "changed": self.changed,
            "no counterpart": self.dropped,
            "verl's defaults": self.defaults,
        }
        return "\n".join(
            f"{title}:\n" + "".join(f"  {line}\n" for line in lines)
            for title, lines in parts.items()
            if lines
        ).rstrip()


def translate(
    file: str, overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None
) -> Translation:
    """Translate a config of verl's.

    Args:
        file: the YAML file, for Hydra.
        overrides: texts `a.b.c=1`, which override the file: verl's keys, or agentrl's own.
        flags: the values of agentrl's keys that options of the command line set.
    """
    translation = Translation()
    given = read_overrides(overrides, translation.mistakes)
    settings = read_verl_config(file, translation.mistakes, given)
    own = [p for p in references([*settings.values(), *given]) if is_variable(p)]
    verls_key = {ours: verls for verls, ours in reversed(RENAMED.items())}
    verls_key["data.train"] = "data.train_files"
    agentrl_settings: list[Setting] = []
    set_by_ours: dict[str, Setting | None] = {}
    options = [Setting(path, value, "command line") for path, value in (flags or {}).items()]
    for setting in [*given, *options]:
        path = setting.path
        if path.startswith(("hydra.", "hydra/")) or is_group(path, setting.value):
            continue
        is_verls = path in SHARED or (path not in FIELDS and bool(explain_key(path)))
        is_verls |= path in own
        if not is_verls:
            agentrl_settings.append(setting)
            # Values that are computed from it should agree with it.
            path = verls_key.get(path, "")
        if is_verls or (path and path not in VALUES):
            if not is_verls:
                set_by_ours[path] = settings.get(path)
            settings[path] = replace(setting, path=path)
    variables = {path: settings.pop(path).value for path in own if path in settings}
    version, translation.version = recognize_version(settings)
    strategy = settings.get("model_engine") or settings.get(f"{ACTOR}.strategy")
    versions = verl_versions(str(strategy and strategy.value))
    # A key that this version lacks has the default of the newest version that has it.
    found = [*versions.values(), versions[version], variables]
    defaults = {key: value for has in found for key, value in has.items()}
    # verl reads only the values that it needs, so `???` in the others is no mistake.
    unread = {"", *UNNEEDED}
    settings = {p: s for p, s in settings.items() if s.value != "???" or known_key(p) not in unread}
    settings = resolve(settings, defaults, translation.mistakes)
    overridden = {setting.path for setting in agentrl_settings}
    _Translator(settings, translation, defaults, set_by_ours, overridden).run()
    translation.settings += agentrl_settings
    return translation


def is_variable(path: str) -> bool:
    """Return whether a key is a user's own: not below a section of verl's, nor almost a key."""
    keys = {*VERL_KEYS, *SHARED, *(key for has in verl_versions().values() for key in has)}
    is_below = path.partition(".")[0] in {key.partition(".")[0] for key in keys}
    return not (path in FIELDS or is_below or difflib.get_close_matches(path, keys, 1, 0.85))


def recognize_version(settings: Mapping[str, Setting]) -> tuple[str, str]:
    """Return the version of verl whose keys a config has, and a text that names it.

    If several have all of them, it is the newest, or for a whole config that verl has written the
    one that has the fewest others. If none has all, it is the one that has the most.
    """
    versions = verl_versions()
    known = {key for key in settings if any(key in has for has in versions.values())}
    unknown = [path for path in _with_value(settings) if not is_known(path)]

    def distance(version: str) -> tuple[int, int]:
        has = versions[version].keys()
        return len(known - has), len(has - known) * (2 * len(known) > len(has))

    least = min(map(distance, versions))
    nearest = [version for version in versions if distance(version) == least]
    version = nearest[-1]
    if lacking := sorted([*unknown, *(known - versions[version].keys())]):
        return version, f"{version}, the nearest version (it lacks {', '.join(lacking[:3])})"
    others = f" (and of {', '.join(nearest[:-1])})" if nearest[1:] else ""
    return version, f"{version}{others}"


class _Translator:
    """Translates the settings of one config."""

    def __init__(
        self,
        settings: Mapping[str, Setting],
        translation: Translation,
        defaults: Mapping[str, Any],
        set_by_ours: Mapping[str, Setting | None],
        overridden: Collection[str],
    ):
        """Prepare the translation.

        Args:
            settings: the settings by key.
            translation: the results are appended to it.
            defaults: verl's default of each key, with its interpolations.
            set_by_ours: the keys of `settings` whose value the user set by agentrl's name, and the
                setting that it replaces. The config checks these values.
            overridden: the keys of agentrl's that the user set by agentrl's name.
        """
        self.settings = _with_value(settings)
        clip = f"{ACTOR}.clip_ratio"
        for path in (f"{clip}_low", f"{clip}_high"):
            if clip in self.settings and path in settings and settings[path].value is None:
                self.settings[path] = replace(self.settings[clip], path=path)
        self.translation = translation
        self._defaults = defaults
        self._values = {**defaults, **{path: s.value for path, s in settings.items()}}
        self._set_by_ours = set_by_ours
        self._overridden = overridden
        self._dropped: dict[str, list[str]] = {}
        self._reported: set[str] = set()

    def run(self) -> None:
        for path in self.settings:
            self._check(path)
        translated = {*RENAMED, *SHARED} - {*MACHINE}
        defaults = dict.fromkeys(p for p in self._defaults if p in translated - {*self.settings})
        if "trainer.total_training_steps" in self.settings:
            defaults.pop("trainer.total_epochs", None)
            self.drop("trainer.total_epochs", WHYS["trainer.total_epochs"])
        for path in [*self.settings, *defaults]:
            if path in self._reported:
                continue
            above = known_key(path)
            if self.get(path) in (None, {}):
                continue
            if above in RENAMED:
                self.take(RENAMED[above] + path.removeprefix(above), self.value(path), path)
            elif path in SHARED and path not in (_ESTIMATOR, "trainer.logger"):
                self.take(path, self.value(path), path)
        for part in _PARTS:
            part(self)
        for path in [p for p in self.settings if p not in self._reported]:
            self.drop(path, "no effect with the other settings")
        for text, paths in self._dropped.items():
            self.translation.dropped.append(f"{', '.join(paths)}: {text}")

    # -- reading ----------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        """Return verl's value of a key: from the config, or verl's default."""
        if path in self.settings:
            return self.settings[path].value
        return None if path in MACHINE else self._default(path)

    def _default(self, path: str) -> Any:
        """Return verl's default of a key; None for a key that no version has."""
        return resolve_value(self._defaults.get(path), self._values, path)

    def is_default(self, setting: Setting) -> bool:
        """Return whether a setting has verl's default."""
        return _is_same(setting.value, self._default(setting.path))

    def value(self, path: str) -> Any:
        """Return agentrl's value of a key that differs in its spelling only."""
        value = self.get(path)
        spellings = VALUES.get(path, {})
        value = spellings.get(value, value) if isinstance(value, bool | int | str) else value
        if isinstance(value, str) and value.startswith("~"):
            value = str(Path(value).expanduser())
        return value

    def number(self, path: str) -> Any:
        """Return verl's value of a key that is a number or null; 1 for another value, a mistake."""
        value = self.get(path)
        if value is None or (type(value) in (int, float) and math.isfinite(value)):
            return value
        if path not in self._set_by_ours:
            self._mistake(path, "must be a number")
        return 1

    def name(self, path: str) -> str:
        """Return verl's value of a key that is a text; "" for null or another value, a mistake."""
        value = self.get(path)
        if value is not None and not isinstance(value, str):
            self._mistake(path, "must be a text")
        return value if isinstance(value, str) else ""

    def first(self, *paths: str) -> str:
        """Return the first of these keys that the config sets, or "": verl has moved some keys."""
        return next((path for path in paths if path in self.settings), "")

    # -- writing ----------------------------------------------------------------------------------

    def take(self, ours: str, value: Any, *verls: str) -> None:
        """Set a key of agentrl's that means the same."""
        self._set(ours, value, verls, self.translation.taken, "")

    def change(self, ours: str, value: Any, *verls: str, why: str = "") -> None:
        """Set a key of agentrl's whose meaning differs. Without `why`, the table has the reason."""
        self._set(ours, value, verls, self.translation.changed, f": {why or WHYS[ours]}")

    def drop(self, path: str, why: str, if_default: bool = False) -> None:
        """Report a key of the config that has no counterpart, verl's default only `if_default`."""
        if path not in self.settings:
            return
        self._reported.add(path)
        if self.is_default(self.settings[path]) and not if_default:
            return
        self._dropped.setdefault(why, []).append(_shorten(self.settings[path]))

    def refuse(self, path: str, why: str = "") -> None:
        """Report a key that would silently change what is learned, by default with its advice."""
        why = why or CHANGED[path]
        end = "" if why.endswith((".", "?")) else "."
        null = f" {path}=null leaves it out" if path in self.settings else ""
        self._mistake(path, f"{why}{end}{null}")

    def _mistake(self, path: str, what: str) -> None:
        self._reported.add(path)
        setting = self.settings.get(path) or Setting(path, self.get(path), "verl's default")
        line = f"{_shorten(setting)} ({setting.source}): {what}"
        if line not in self.translation.mistakes:
            self.translation.mistakes.append(line)

    def _set(self, ours: str, value: Any, verls: Sequence[str], lines: list[str], why: str) -> None:
        used = [self.settings[path] for path in verls if path in self.settings]
        self._reported.update(setting.path for setting in used)
        source = used[0].source if used else "verl's default"
        for setting in used:
            value = _with_references(value, setting)
        self.translation.settings.append(Setting(ours, value, source))
        line = assignment(ours, value)
        if ours in self._overridden:
            before = [self._set_by_ours.get(setting.path, setting) for setting in used]
            if replaced := [_shorten(s) for s in before if s and not self.is_default(s)]:
                self.translation.overridden.append(f"{ours}  ({', '.join(replaced)})")
        elif used := [setting for setting in used if not self.is_default(setting)]:
            origin = ", ".join(map(_shorten, used))
            lines.append(f"{line}  ({origin}){why}" if origin != line else f"{line}{why}")
        elif value != FIELDS[ours].get_default(call_default_factory=True):
            self.translation.defaults.append(f"{line}{why}")

    # -- keys without a counterpart ---------------------------------------------------------------

    def _check(self, path: str) -> None:
        """Report a key of the config that no part of the translation reads."""
        above, value = known_key(path), self.get(path)
        if path in SHARED or above in RENAMED or path in CHANGED:
            return
        if path.startswith("hydra."):
            self.drop(path, "settings of Hydra itself")
        elif not is_known(path):
            close = did_you_mean(path, [*VERL_KEYS, *self._defaults])
            self.refuse(path, f"this key is neither verl's, as far as known, nor agentrl's.{close}")
        elif above in REFUSED and path.startswith("critic.") and self.get(_ESTIMATOR) != "gae":
            self.drop(path, f"no critic with {_ESTIMATOR}={self.get(_ESTIMATOR)}")
        elif any(_is_same(value, self.same(same)) for same in SAME.get(path, ())):
            self.drop(path, "as agentrl does")
        elif self.is_default(self.settings[path]):
            self.drop(path, REFUSED.get(path, ""), if_default=path in SAME)
        elif above in REFUSED:
            self.refuse(path, REFUSED[above])
        elif above in UNNEEDED or above in CHANGED:
            self.drop(path, (UNNEEDED | CHANGED)[above])
        else:
            default = assignment(path, self._default(path))
            self.refuse(path, f"agentrl has no such setting; it is like verl's default, {default}")

    def same(self, value: Any) -> Any:
        """Return a value of the table; `${key}` is the value of another key."""
        is_key = isinstance(value, str) and value.startswith("${")
        return self.get(value[2:-1]) if is_key else value


def _with_value(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    return {path: s for path, s in settings.items() if s.value not in (None, {}, [])}


def _is_same(a: Any, b: Any) -> bool:
    """Return whether two values are the same: 1 is 1.0, but not True."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _shorten(setting: Setting) -> str:
    """Return `path=value` on one short line."""
    value = _with_references(setting.value, setting)
    line = hide_secrets(" ".join(assignment(setting.path, value).split()))
    return line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]}..."


def _with_references(value: Any, setting: Setting) -> Any:
    """Return a value with references instead of the values of environment variables."""
    references = setting.references

    def refer(leaf: Any) -> Any:
        is_text = isinstance(leaf, str)
        return replace_texts(leaf, references) if is_text else references.get(str(leaf), leaf)

    return map_leaves(refer, value)


# -- the parts of a config ------------------------------------------------------------------------


def _algorithm(t: _Translator) -> None:
    path = _ESTIMATOR
    name = t.name(path)
    if name in CHOICES["estimators"]:
        t.take("algorithm.name", CHOICES["estimators"][name], path)
    elif name in CHOICES["other_estimators"]:
        t.refuse(path, f"agentrl has the estimators {', '.join(CHOICES['estimators'])}")
    else:
        t.take(path, name, path)
    if name == "gae" and (other := _settings_of_critic(t)):
        t.translation.changed.append(f"{WHYS['critic']} {', '.join(other)}")
    loss, mode, dual = (
        f"{ACTOR}.{key}" for key in ("policy_loss.loss_mode", "loss_agg_mode", "clip_ratio_c")
    )
    if t.name(loss) in ("gspo", "sapo"):
        t.change("algorithm.loss_agg_mode", "seq-mean-token-mean", mode)
    else:
        t.take("algorithm.loss_agg_mode", t.get(mode), mode)
    if t.name(loss) in ("vanilla", "dppo_tv"):
        t.take("algorithm.dual_clip", t.get(dual), dual)
    else:
        t.change("algorithm.dual_clip", 0.0, dual)
    if t.name(loss) not in CHOICES["losses"]:
        t.refuse(loss, f"agentrl has the losses {', '.join(CHOICES['losses'])}. {WHYS[loss]}")
    low = f"{ACTOR}.clip_ratio_low"
    if t.number(low) > 1:
        t.change("algorithm.clip_low", 1.0, low)
    else:
        t.take("algorithm.clip_low", t.number(low), low)
    clip = f"{ACTOR}.clip_ratio"
    t.drop(clip, "in verl too, only clip_ratio_low and clip_ratio_high count, 0.2 by default")


def _settings_of_critic(t: _Translator) -> list[str]:
    """Return verl's settings of the critic that are not the policy's, which agentrl takes."""
    own = {path: value for path, (value, *_) in SAME.items() if str(value).startswith("${")}
    paths = [path for path in own if path.startswith("critic.") and path != "critic.model.path"]
    if not t.get("actor_rollout_ref.model.lora_rank"):
        paths = [path for path in paths if not path.startswith("critic.model.")]
    different = [path for path in paths if not _is_same(t.get(path), t.same(own[path]))]
    return [assignment(path, t.get(path)) for path in different]


def _kl(t: _Translator) -> None:
    in_loss, in_reward = f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
    coef, kind = f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"
    t.take("algorithm.kl_loss_coef", t.get(coef) if t.get(in_loss) else 0.0, in_loss, coef)
    control = "algorithm.kl_ctrl"
    if t.get(in_reward):
        t.take("algorithm.kl_reward_coef", t.get(f"{control}.kl_coef"), in_reward)
        if t.get(f"{control}.type") == "adaptive":
            t.refuse(f"{control}.type")
        kind = "algorithm.kl_penalty" if not t.get(in_loss) else kind
    if t.get(in_loss) or t.get(in_reward):
        kinds = CHOICES["kl_types"]
        if (name := t.name(kind)) not in kinds:
            t.refuse(kind, f"agentrl has the estimators {', '.join(kinds)}")
        else:
            t.take("algorithm.kl_type", kinds[name], kind)


def _mini_batches(t: _Translator) -> None:
    path, n = f"{ACTOR}.ppo_mini_batch_size", t.number(f"{ROLLOUT}.n")
    prompts = t.number(path)
    why = f"it counts rollouts, verl's counts prompts: {prompts} times rollout.n={n}"
    t.change("algorithm.mini_batch_size", prompts * n, path, why=why)


def _learning_rate(t: _Translator) -> None:
    optim = f"{ACTOR}.optim"
    steps = t.number(f"{optim}.lr_warmup_steps")
    ratio = t.number(f"{optim}.lr_warmup_steps_ratio")
    if steps <= 0 and ratio:
        try:
            steps = int(ratio * _count_steps(t))
        except DataError as e:
            t.refuse(
                f"{optim}.lr_warmup_steps_ratio",
                f"agentrl counts the warm-up in steps, and the run's rows cannot be counted ({e})."
                f" Set {optim}.lr_warmup_steps, or trainer.total_training_steps",
            )
    paths = f"{optim}.lr_warmup_steps", f"{optim}.lr_warmup_steps_ratio"
    if steps > 0:
        t.change("optim.lr_warmup_steps", steps, *paths)
    else:
        t.take("optim.lr_warmup_steps", 0, *paths)
    schedule = t.first(f"{optim}.warmup_style") or f"{optim}.lr_scheduler_type"
    factor = f"{optim}.min_lr_factor"
    if t.get(schedule) != "constant":
        t.refuse(schedule)
    elif t.get(f"{ACTOR}.strategy") == "torchtitan":
        t.take("optim.lr_final", t.get(factor), factor, schedule)
    else:
        t.take("optim.lr_final", 1.0, schedule)


def _clip(t: _Translator) -> None:
    clip, older = f"{ACTOR}.optim.clip_grad", f"{ACTOR}.grad_clip"
    if older in t.settings and not t.is_default(t.settings[older]):
        t.change("optim.max_grad_norm", t.get(older), older, clip)
    else:
        t.take("optim.max_grad_norm", t.get(clip), clip, older)


def _count_steps(t: _Translator) -> int:
    """Return the number of steps of the run.

    Raises:
        DataError: it depends on rows that cannot be read.
    """
    if total := t.number("trainer.total_training_steps"):
        return total
    files = list_files(_files(t, "data.train_files"))
    batches = (batch for file, _ in files for batch in read_batches(file, lambda rows: rows[:0]))
    rows = sum(len(batch.array) for batch in batches)
    batch_size = t.number("data.train_batch_size") or 1
    return t.number("trainer.total_epochs") * (rows // batch_size or 1)


def _positions(t: _Translator) -> None:
    """Drop an override of the number of positions if the model has as many, else refuse it."""
    override = "actor_rollout_ref.model.override_config"
    for path in (f"{override}.{name}max_position_embeddings" for name in ("", "model_config.")):
        if not (wanted := t.number(path)):
            continue
        from agentrl.engine.local.load import load_model_config, max_row_length

        try:
            length = max_row_length(load_model_config(t.value("actor_rollout_ref.model.path")))
        except ConfigError as e:
            t.refuse(path, f"the model's own value is used, and it cannot be read ({e})")
            continue
        if length < wanted:
            t.refuse(path, f"the model has {length}. Set it in the config of the model's folder")
        else:
            t.drop(path, f"no effect: the model has {length}")


def _memory(t: _Translator) -> None:
    fsdp = f"{ACTOR}.fsdp_config"
    everything = t.first(f"{fsdp}.param_offload", f"{fsdp}.offload_policy")
    moments = f"{fsdp}.optimizer_offload"
    if everything and t.get(everything):
        t.take("optim.offload", "all", everything, moments)
    elif t.get(moments):
        t.take("optim.offload", "optimizer", moments)


def _importance_weights(t: _Translator) -> None:
    correction = "algorithm.rollout_correction"
    level, cap = t.get(f"{correction}.rollout_is"), t.get(f"{correction}.rollout_is_threshold")
    older = f"{ACTOR}.tis_imp_ratio_cap"
    if (t.number(older) or 0) > 0:
        t.take("algorithm.tis_cap", float(t.number(older)), older)
    elif level in ("token", "sequence"):
        t.take("algorithm.tis_level", level, f"{correction}.rollout_is")
        if isinstance(cap, str) and re.fullmatch(r"[\d.]+_[\d.]+", cap):  # IcePop
            low, cap = map(float, cap.split("_"))
            t.take("algorithm.tis_mode", "mask", f"{correction}.rollout_is_threshold")
            t.take("algorithm.tis_low", low, f"{correction}.rollout_is_threshold")
        t.take("algorithm.tis_cap", cap, f"{correction}.rollout_is_threshold")
    elif level is None and _is_asynchronous(t):
        t.change("algorithm.tis_cap", cap, MODE)
    elif level is None:
        t.take("algorithm.tis_cap", 0.0)
    else:
        t.refuse(f"{correction}.rollout_is", "agentrl has the levels token and sequence")


def _filter(t: _Translator) -> None:
    groups = "algorithm.filter_groups"
    most = f"{groups}.max_num_gen_batches"
    if t.get(f"{groups}.enable"):
        t.change("algorithm.filter_groups", True, f"{groups}.enable", f"{groups}.metric")
        t.change("algorithm.max_gen_batches", t.number(most) or 100, most)


def _turns(t: _Translator) -> None:
    lengths = f"{ROLLOUT}.response_length", "data.max_response_length"
    tokens = t.number(t.first(*lengths) or lengths[1])
    t.take("rollout.max_trajectory_tokens", tokens, *lengths)
    t.change("rollout.max_turn_tokens", tokens, *lengths)
    assistant, user = f"{TURNS}.max_assistant_turns", f"{TURNS}.max_user_turns"
    most, most_users = t.number(assistant), t.number(user)
    limits = [most] if most else []
    limits += [most_users + 1] if most_users else []
    turns = min(limits, default=tokens)
    if limits and user not in t.settings:
        t.take("rollout.max_turns", turns, assistant)
    else:
        t.change("rollout.max_turns", turns, assistant, user)
    calls = f"{TURNS}.max_parallel_calls"
    t.change("rollout.max_tool_calls", max(1, t.number(calls)) * turns, calls)


def _tools(t: _Translator) -> None:
    length, side = f"{TURNS}.max_tool_response_length", f"{TURNS}.tool_response_truncate_side"
    tokens = int(t.number(length)) // CHARACTERS_PER_TOKEN
    t.change("tools.max_result_tokens", max(1, tokens), length)
    if t.get(side) == "middle":
        t.take("tools.truncate", "middle", side)
    else:
        t.refuse(side)
    form = f"{TURNS}.format"
    if form in t.settings:
        name = CHOICES["tool_formats"].get(t.name(form), "auto")
        if name != "auto":
            t.take("rollout.tool_format", name, form)
        else:
            t.change("rollout.tool_format", name, form)
    history = f"{TURNS}.use_inference_chat_template"
    if t.get(history):
        t.change("rollout.history_thinking", "strip", history)
    tools = [t.first(f"{TURNS}.tool_config_path", "data.tool_config_path")]
    tools = [path for path in (*tools, f"{TURNS}.function_tool_path") if path in t.settings]
    if files := [p for p in (*tools, f"{TURNS}.interaction_config_path") if p in t.settings]:
        t.take("files", [t.value(path) for path in files], *files)
    if tools:
        t.take("data.tools", "all", *tools)


def _loop(t: _Translator) -> None:
    loop, enable = f"{ROLLOUT}.agent.default_agent_loop", f"{TURNS}.enable"
    if loop in t.settings or not t.get(enable):
        t.take("data.agent_name", agent_loops.canonical(t.name(loop)), loop)
    else:
        t.change("data.agent_name", "tool_agent", enable)


def _engine(t: _Translator) -> None:
    path, sleep = f"{ROLLOUT}.name", f"{ROLLOUT}.free_cache_engine"
    name = {"hf": "local"}.get(t.name(path), t.name(path))
    if path in t.settings:
        t.take("rollout.name", name, path)
    hybrid, is_asynchronous = "actor_rollout_ref.hybrid_engine", _is_asynchronous(t)
    if is_asynchronous:
        t.take("trainer.placement", "separate", MODE, hybrid)
    elif hybrid in t.settings:
        t.take("trainer.placement", "colocated" if t.get(hybrid) else "separate", hybrid)
    if sleep in t.settings and t.get(sleep) and name == "sglang" and not is_asynchronous:
        t.take("rollout.sleep", "all", sleep)
    else:
        t.drop(sleep, f"servers keep their memory with rollout.name={name}")
    machines = ROLLOUT if is_asynchronous else "trainer"
    gpus = [f"{machines}.n_gpus_per_node", f"{machines}.nnodes"]
    each = f"{ROLLOUT}.tensor_model_parallel_size"
    engines = _count(t.get(gpus[0])) * _count(t.get(gpus[1])) // _count(t.get(each))
    has_own = is_asynchronous or t.get(hybrid) is not False
    if engines > 1 and name in ("sglang", "vllm") and has_own:
        t.change("rollout.engines", engines, *gpus, each)
    shared = [f"{ACTOR}{part}.ulysses_sequence_parallel_size" for part in ("", ".fsdp_config")]
    if (ranks := max(_count(t.get(path)) for path in shared)) > 1:
        t.take("trainer.context_parallel_size", ranks, *shared)
    merge = "actor_rollout_ref.model.lora.merge"
    if t.get(merge):
        t.take("rollout.lora", "merge", merge)


def _is_asynchronous(t: _Translator) -> bool:
    return bool(t.get("trainer.use_v1")) and t.get(MODE) == "separate_async"


def _staleness(t: _Translator) -> None:
    ahead, most = "trainer.v1.separate_async.num_warmup_batches", f"{SAMPLER}_threshold"
    if _is_asynchronous(t):
        batches, versions = math.ceil(t.number(ahead) or 0), t.number(most) or math.inf
        keys = (MODE, ahead, most, f"{SAMPLER}_strategy")
        t.change("trainer.max_staleness", max(0, min(batches, versions - 1)), *keys)
    elif t.get("trainer.use_v1") and t.get(MODE) != "sync":
        t.refuse(MODE)


def _count(value: Any) -> int:
    """Return a value that is a number above 0; 1 for another value, which the config refuses."""
    return value if isinstance(value, int) and value > 0 else 1


def _rows(t: _Translator) -> None:
    for path, ours in (("data.train_files", "data.train"), ("data.val_files", "data.val")):
        if paths := _files(t, path):
            t.take(ours, paths if len(paths) > 1 else paths[0], path)
    t.change("val.greedy", False)
    if "trainer.total_training_steps" not in t.settings:
        t.take("data.drop_last", True)


def _files(t: _Translator, path: str) -> list[str]:
    return [str(Path(str(file)).expanduser()) for file in as_list(t.get(path))]


def _reward(t: _Translator) -> None:
    path = t.first("custom_reward_function.path", "reward.custom_reward_function.path")
    if path:
        name = path.replace(".path", ".name")
        function = f"{t.value(path)}:{t.get(name) or 'compute_score'}"
        t.take("reward.function", function, path, name)
    for buffer in (
        "reward_model.overlong_buffer",
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward.reward_kwargs.overlong_buffer_cfg",
    ):
        if t.get(f"{buffer}.enable"):
            length, penalty = t.get(f"{buffer}.len"), t.get(f"{buffer}.penalty_factor")
            t.change("reward.overlong_buffer", length, f"{buffer}.len")
            t.take("reward.overlong_penalty", penalty or 1.0, f"{buffer}.penalty_factor")
    for section in ("reward_model.sandbox_fusion", "reward.sandbox_fusion", "sandbox_fusion"):
        url, memory = f"{section}.url", f"{section}.memory_limit_mb"
        if t.get(url):
            t.take("sandbox.backend", str(t.get(url)).removesuffix("/run_code"), url)
            if memory in t.settings:
                t.take("sandbox.memory_mb", t.get(memory), memory)


def _run(t: _Translator) -> None:
    folder, names = "trainer.default_local_dir", ["trainer.project_name", "trainer.experiment_name"]
    if folder in t.settings:
        t.take("trainer.output", t.value(folder), folder)
    elif used := [name for name in names if name in t.settings]:
        output = "/".join(["checkpoints", *(str(t.get(name)) for name in used)])
        t.change("trainer.output", output, *used)
    if not t.get("trainer.max_actor_ckpt_to_keep"):
        t.take("trainer.keep", 0)
    mode, path = t.get("trainer.resume_mode"), "trainer.resume_from_path"
    if mode == "resume_path" and t.get(path):
        t.refuse(path, "agentrl does not read verl's checkpoints: export it as a model")
    elif mode:
        resume = "never" if mode == "disable" else "auto"
        t.take("trainer.resume", resume, "trainer.resume_mode")
    loggers = as_list(t.get("trainer.logger"))
    ours = [name for name in loggers if name in TRACKERS]
    if loggers and ours != [name for name in loggers if name != "console"]:
        t.change("trainer.logger", ours, "trainer.logger")
    elif loggers:
        t.take("trainer.logger", ours, "trainer.logger")


_PARTS: tuple[Callable[[_Translator], None], ...] = (
    _algorithm, _kl, _mini_batches, _learning_rate, _clip, _positions, _memory, _importance_weights,
    _filter, _turns, _tools, _loop, _engine, _staleness, _rows, _reward, _run,
)  # fmt: skip
