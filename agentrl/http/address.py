"""Where a server is and what it is shown: what can stand in a request's head."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

import httpx

from agentrl.errors import ConfigError

UNSAFE = re.compile(r"[^\x21-\x7e]")


def bearer(token: str) -> str:
    """What a header says of a token; "" of none.

    Raises:
        ConfigError: no header can hold it.
    """
    if UNSAFE.search(token):
        raise ConfigError("a bearer token must be printable ASCII without spaces")
    return f"Bearer {token}" if token else ""


def split(base_url: str) -> SplitResult:
    """The parts of an http(s) URL.

    Raises:
        ConfigError: it is none.
    """
    wrong = ConfigError(f"not a server's URL: {base_url!r}. Expected: http://HOST:PORT")
    try:
        url = urlsplit(base_url)
        named = url.scheme in ("http", "https") and url.hostname and url.port != 0
        str(url.hostname).encode("idna")  # as sockets write it
        _ = httpx.URL(base_url).host
    except (ValueError, httpx.InvalidURL):  # a port that is none, or a name that no host can have
        raise wrong from None
    if not named or UNSAFE.search(base_url) or url.username or url.query or url.fragment:
        raise wrong
    return url
