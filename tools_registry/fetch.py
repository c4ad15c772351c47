"""Fetches pages of the public web.

Pages are not trusted, so a run has this tool only if its files and rows name it. Addresses of this
machine and its network are refused, see `agentrl.http.public`.
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
# Without <head>: its end tag is optional, and its hidden elements are listed here anyway.
_HIDDEN = {*_RAW, "noscript", "template", "svg"}
_BREAKS = {"p", "div", "br", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "section", "article"}
# The time grows linearly with the length of the page: each alternative ends at the end of the page
# at the latest and does not backtrack, so no alternative is tried twice on the same text.
_MARKUP = re.compile(
    r"""<(?:!--(?:>|->|[\s\S]*?(?:-->|\Z))
        |(/?)([a-zA-Z][^\s/>]*+)
         (?:[^>=]++|=\s*+(?:"[^"]*+(?:"|\Z)|'[^']*+(?:'|\Z))?+)*+(?:>|\Z)
        |[!?/][^>]*+(?:>|\Z))""",
    re.VERBOSE,
)
_SPACES = re.compile(r"\s+")
_LONG_NUMBER = re.compile(r"&#(?:[0-9]{20,}+|[xX][0-9a-fA-F]{20,}+);?")
"""Numeric references beyond all characters; `html.unescape` raises for thousands of digits."""


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
    return f"{text}\n[truncated after {MAX_BYTES} bytes]" if page.truncated else text


def text_of(page: str) -> str:
    """Return the visible text of a page: no scripts, no styles, one line per block."""
    parts: list[str] = []
    hidden: list[str] = []
    open_hidden = Counter[str]()
    position, end = 0, len(page)
    while position < end:
        match = _MARKUP.search(page, position)
        start = match.start() if match else end
        if start > position and not hidden:
            parts.append(_SPACES.sub(" ", page[position:start]))
        if not match:
            break
        position = match.end()
        name = match[2]
        if name is None:  # a comment or a declaration
            continue
        tag = name.lower()
        if tag in _BREAKS:
            if not hidden:
                parts.append("\n")
        elif tag not in _HIDDEN:
            continue
        elif match[1]:
            if open_hidden[tag]:
                while (inner := hidden.pop()) != tag:
                    open_hidden[inner] -= 1
                open_hidden[tag] -= 1
        elif not page.endswith("/>", start, position):
            if tag in _RAW:  # its content contains no tags
                close = _RAW[tag].search(page, position)
                position = close.start() if close else end
            hidden.append(tag)
            open_hidden[tag] += 1
    lines = (" ".join(_characters(line).split()) for line in "".join(parts).split("\n") if line)
    return "\n".join(line for line in lines if line)


def _characters(text: str) -> str:
    return unescape(_LONG_NUMBER.sub("\ufffd", text)) if "&" in text else text
