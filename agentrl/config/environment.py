"""References to environment variables in settings, `${oc.env:NAME}`, and keys of services.

A run stores its config. A key of a service (a token, a password) is stored as a reference only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from agentrl.config.sources import parse_value

REFERENCE = re.compile(r"\$\{oc\.env:\s*([^${},]+?)\s*(?:,([^${}]*))?\}")
"""`${oc.env:NAME}` or `${oc.env:NAME,DEFAULT}`."""
_SECRET = re.compile(
    r"(?<![\w-])(?:sk-[\w-]{16,}|hf_[a-zA-Z0-9]{16,}|gh[pousr]_[a-zA-Z0-9]{20,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abeoprs]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]+\.[\w-]+)"
    r"|(?<![\w-])(?:sk|rk)_(?:live|test)_\w{10,}|(?i:\bbearer )[\w.~+/-]{16,}=*"
    r"|(?i:(?<=key=)|(?<=token=)|(?<=secret=)|(?<=password=)|(?<=-key )|(?<=-token ))[\w.~+/-]{16,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*|(?<=://)[^/\s:@${}]*:[^/\s:@${}]+(?=@)"
)
"""Texts that have the form of a service's key, or of a user and password in a URL."""
_SECRET_NAME = re.compile(
    r"(^|[_-])((api|access|secret|private|auth)[_-]?(key|token)|secret|password|passwd)$", re.I
)
_RANDOM = re.compile(r"(?=\S*\d)(?=\S*[a-zA-Z])[\w.~+/=-]{20,}")
"""A text that is long and random enough for a key, under a name such as `hf_token`."""
_RANDOM_NAME = re.compile(r"(token|key)s?$", re.I)
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")
_values: dict[str, str] = {}
"""The reference of each value that was read from the environment, for messages."""


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a value in which each key and scalar is `function(scalar)`."""
    if isinstance(value, Mapping):
        return {function(k): map_leaves(function, v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [map_leaves(function, v) for v in value]
    return function(value)


def expand(text: Any) -> Any:
    """Replace references by variables; a lone number is a number. Unset variables stay as text."""
    if not isinstance(text, str):
        return text

    def look_up(match: re.Match[str]) -> str:
        name, default = match.groups()
        if value := os.environ.get(name):
            _values[value] = f"${{oc.env:{name}}}"
        return os.environ.get(name, match[0] if default is None else default)

    expanded = REFERENCE.sub(look_up, text)
    value = parse_value(expanded) if expanded != text and REFERENCE.fullmatch(text) else expanded
    # A password of digits is no number: 007 stays a text.
    return value if isinstance(value, int | float) and str(value) == expanded else expanded


def replace_texts(text: str, replacements: Mapping[str, str]) -> str:
    """Replace parts of a text; where several begin, the longest one."""
    pattern = "|".join(map(re.escape, sorted(replacements, key=len, reverse=True)))
    return re.sub(pattern, lambda match: replacements[match[0]], text) if pattern else text


def hide_secrets(text: str, values: Collection[str] = ()) -> str:
    """Return a text without keys of services and without values of environment variables.

    These are the variables that settings refer to, and those whose name says that it is a key.

    Args:
        text: a message.
        values: further texts to hide, if they have more than 3 characters.
    """
    keys = [v for name, v in os.environ.items() if _SECRET_VARIABLE.search(name) and len(v) > 7]
    hidden = dict.fromkeys([*values, *keys], "***") | _values
    text = replace_texts(text, {v: shown for v, shown in hidden.items() if len(v) > 3})
    return _SECRET.sub("***", text)


def find_secret(value: Any, path: str) -> str:
    """Return the path of the first text that looks like a key of a service, or ""."""
    if isinstance(value, Mapping):
        return next(filter(None, (find_secret(v, f"{path}.{k}") for k, v in value.items())), "")
    if isinstance(value, list):
        return next(filter(None, (find_secret(v, path) for v in value)), "")
    if value is None or isinstance(value, bool):
        return ""
    text = REFERENCE.sub(lambda match: match[2] or "", str(value))  # the default is stored, too
    name = path.rpartition(".")[2]
    is_random = _RANDOM_NAME.search(name) and _RANDOM.fullmatch(text)
    return path if text and (_SECRET.search(text) or _SECRET_NAME.search(name) or is_random) else ""
