"""Read a page of the public web. Only rows and runs that name it have it: pages are not trusted.

Addresses of this machine and its network are refused, see `agentrl.http.public`.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from html import unescape

from agentrl import ToolError, tool
from agentrl.http.public import fetch_public

SECONDS = 15.0
MAX_BYTES = 1_000_000
_RAW = {
    tag: re.compile(rf"</{tag}(?=[\s/>])", re.IGNORECASE) for tag in ("script", "style", "title")
}
# Not the head: its end need not be written, and what is in it is hidden by itself.
_HIDDEN = {*_RAW, "noscript", "template", "svg"}
_BREAKS = {"p", "div", "br", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "section", "article"}
# The time of a page grows with its length alone, whoever wrote it: each alternative ends at the end
# of the page at the latest and gives nothing back, so that none is tried again from further on.
_MARKUP = re.compile(
    r"""<(?:!--(?:>|->|[\s\S]*?(?:-->|\Z))
        |(/?)([a-zA-Z][^\s/>]*+)
         (?:[^>=]++|=\s*+(?:"[^"]*+(?:"|\Z)|'[^']*+(?:'|\Z))?+)*+(?:>|\Z)
        |[!?/][^>]*+(?:>|\Z))""",
    re.VERBOSE,
)
_SPACES = re.compile(r"\s+")
_LONG_NUMBER = re.compile(r"&#(?:[0-9]{20,}+|[xX][0-9a-fA-F]{20,}+);?")
"""Numbers of no character; `html.unescape` raises for thousands of digits."""


@tool(timeout=20, idempotent=True, retries=0, max_concurrency=16)
async def fetch(url: str) -> str:
    """Fetch a web page and return its text.

    Args:
        url: the address of the page, starting with https:// or http://
    """
    page = await fetch_public(url, deadline=time.monotonic() + SECONDS, max_bytes=MAX_BYTES)
    kind = page.content_type.partition(";")[0].strip().lower()
    if page.status >= 400:
        raise ToolError(f"{page.url} returned HTTP status {page.status}")
    if kind and not (kind.startswith("text/") or "json" in kind or "xml" in kind):
        raise ToolError(f"{page.url} is {kind}, not a text page")
    text = page.content.decode("utf-8", "replace")
    text = text_of(text) if "html" in kind else text
    return f"{text}\n[truncated after {MAX_BYTES} bytes]" if page.cut else text


def text_of(page: str) -> str:
    """What a reader sees of a page: no scripts, no styles, a line for each block."""
    shown: list[str] = []
    hidden: list[str] = []
    open_hidden = Counter[str]()
    position, end = 0, len(page)
    while position < end:
        found = _MARKUP.search(page, position)
        start = found.start() if found else end
        if start > position and not hidden:
            shown.append(_SPACES.sub(" ", page[position:start]))
        if not found:
            break
        position = found.end()
        name = found[2]
        if name is None:  # a comment, a declaration
            continue
        tag = name.lower()
        if tag in _BREAKS:
            if not hidden:
                shown.append("\n")
        elif tag not in _HIDDEN:
            continue
        elif found[1]:
            if open_hidden[tag]:
                while (closed := hidden.pop()) != tag:
                    open_hidden[closed] -= 1
                open_hidden[tag] -= 1
        elif not page.endswith("/>", start, position):
            if tag in _RAW:  # what looks like a tag in it is none
                close = _RAW[tag].search(page, position)
                position = close.start() if close else end
            hidden.append(tag)
            open_hidden[tag] += 1
    lines = (" ".join(_characters(line).split()) for line in "".join(shown).split("\n") if line)
    return "\n".join(line for line in lines if line)


def _characters(text: str) -> str:
    return unescape(_LONG_NUMBER.sub("\ufffd", text)) if "&" in text else text
