"""Read a page of the public web. Only rows and runs that name it have it: pages are not trusted.

Addresses of this machine and its network are refused, see `agentrl.http.public`.
"""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser

from agentrl import ToolError, tool
from agentrl.http.public import fetch_public

SECONDS = 15.0
MAX_BYTES = 1_000_000
_HIDDEN = {"script", "style", "noscript", "template", "svg", "head"}
_BREAKS = {"p", "div", "br", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "section", "article"}


@tool(timeout=20, idempotent=True, retries=0, max_concurrency=16)
async def fetch(url: str) -> str:
    """Read a web page as text.

    Args:
        url: its address, beginning with https:// or http://
    """
    page = await fetch_public(url, deadline=time.monotonic() + SECONDS, max_bytes=MAX_BYTES)
    kind = page.content_type.partition(";")[0].strip().lower()
    if page.status >= 400:
        raise ToolError(f"{page.url} answered with status {page.status}")
    if kind and not (kind.startswith("text/") or "json" in kind or "xml" in kind):
        raise ToolError(f"{page.url} is {kind}, not text")
    text = page.content.decode("utf-8", "replace")
    text = text_of(text) if "html" in kind else text
    return f"{text}\n[cut after {MAX_BYTES} bytes]" if page.cut else text


def text_of(html: str) -> str:
    """What a reader sees of a page: no scripts, no styles, a line for each block."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    lines = (re.sub(" +", " ", line).strip() for line in "".join(reader.parts).split("\n"))
    return "\n".join(line for line in lines if line)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._hidden: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in _HIDDEN:
            self._hidden.append(tag)
        elif tag in _BREAKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._hidden:
            while self._hidden.pop() != tag:
                pass
        elif tag in _BREAKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(re.sub(r"\s+", " ", data))
