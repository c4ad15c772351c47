"""Arguments as pairs of tags around a key and a value that nothing escapes."""

from __future__ import annotations

import re

from agentrl.chat.formats.strict_json import is_sound


def read_values(
    text: str, position: int, key: re.Pattern[str], end: re.Pattern[str], closing: str
) -> tuple[dict[str, str], str, int]:
    """The arguments of one call.

    Args:
        text: the turn.
        position: behind the call's name.
        key: an argument's key, group 1, up to where its value begins.
        end: what ends a value: `closing`, or a tag that shows that it is missing.
        closing: the tag behind a value.

    Returns:
        The values by key, what is wrong or "", and where reading ended.
    """
    values: dict[str, str] = {}
    while pair := key.match(text, position):
        name, begin = pair[1].strip(), pair.end()
        found = end.search(text, begin)
        if not found or found[0] != closing:
            return values, f"no {closing} for {name[:80]}", position
        value = text[begin : found.start()]
        position = found.end()
        if name in values:
            return values, f"argument {name[:80]} is given twice", position
        if not is_sound(value + name):
            return values, "lone surrogate", position
        values[name] = value
    return values, "", position
