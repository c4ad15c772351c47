"""Where JSON breaks off: what stands in its strings is data, whatever it looks like."""

from __future__ import annotations

import re

# Strings that end, and what may stand between them in JSON.
_WHOLE = re.compile(r'(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]\s:,0-9.eE+\-a-z]++)*+', re.DOTALL)


def end_of_broken_json(
    text: str, start: int, tags: re.Pattern[str], thought: re.Pattern[str]
) -> int:
    """Where JSON without an end is given up: at the next tag that is not in its strings.

    A string that is cut off goes on to the end of the turn, or of the thought that it stands in: a
    file about tool calls that did not fit into the turn is not executed.

    Args:
        text: one assistant turn.
        start: where the JSON begins.
        tags: what else may follow there.
        thought: the tags that end a thought.
    """
    broken = _WHOLE.match(text, start).end()  # type: ignore[union-attr]
    tag = (thought if text.startswith('"', broken) else tags).search(text, broken)
    return tag.start() if tag else len(text)
