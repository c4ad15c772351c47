"""Fetch pages of the public web for a model. The model may write any URL.

A URL that a model wrote must not reach this machine, its network, or the metadata service of a
cloud (server-side request forgery). So a host name is resolved once, every address of it is
checked, and the connection goes to the address that was checked; a later change of the name's
addresses has no effect. Redirects are followed here, and each is checked in the same way.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

import httpx

from agentrl.errors import Infrastructure, ToolError
from agentrl.http.pool import Server, TimeLimit, pool_of_loop

MAX_REDIRECTS = 5
PUBLIC_WEB = Server("", 80, None, name="the public web")
"""One server for the pool: a model that requests many hosts gets no larger share of connections."""
MAX_URL = 2048

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host name for a port."""

_BLOCKED_NETWORKS = [
    ipaddress.ip_network(block)
    for block in (
        # The IANA IPv4 special-purpose address registry. Oracle's metadata service is 192.0.0.192.
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
        *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24"),
        *("192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15"),
        *("198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4"),
        "224.0.0.0/4",  # multicast
        "168.63.129.16/32",  # the metadata service of Azure
        # The rows of the IANA IPv6 special-purpose address registry that lie in _IPV6_UNICAST.
        # Addresses of Teredo (in 2001::/23) and 6to4 (2002::/16) contain an IPv4 address.
        *("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20"),
    )
]
_IPV6_UNICAST = ipaddress.ip_network("2000::/3")
"""All IPv6 addresses that are assigned to networks. NAT64 and IPv4-mapped ones are not in it."""
_UNASSIGNED = {4: "203.0.113.203", 6: "2001:db8:ffff::203"}
"""Addresses reserved for documentation, which no machine has."""


@dataclass(frozen=True, slots=True)
class Page:
    """The response of a server."""

    url: str
    """The URL of the last request, after redirects."""
    status: int
    content_type: str
    content: bytes
    truncated: bool
    """True if the content was longer than `max_bytes`."""


def is_public(address: str) -> bool:
    """Return whether an address belongs to another machine of the public internet.

    False for every block of the IANA special-purpose registries, for multicast, for metadata
    services of clouds, and for the addresses of this machine, even if they are public. This
    function cannot know a public address that a router translates to this machine, nor a NAT64
    prefix that a network has chosen for itself.

    The blocks are listed here because `ipaddress.is_global` differs between versions of Python.

    Raises:
        Infrastructure: sockets of this machine bind to any address, so it is unknown which
            addresses are its own.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.version == 6 and ip not in _IPV6_UNICAST:
        return False
    return not any(ip in block for block in _BLOCKED_NETWORKS) and not _is_own(ip)


def _is_own(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether this machine has an address: a socket can bind only to such addresses.

    Raises:
        Infrastructure: sockets of this machine bind to any address.
    """
    if not _can_bind(str(ip)):
        return False
    if _can_bind(_UNASSIGNED[ip.version]):
        raise Infrastructure(
            "a socket of this machine binds to any address, so its own addresses cannot be kept"
            f" from the model: set net.ipv{ip.version}.ip_nonlocal_bind to 0"
        )
    return True


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError as e:
        # After any other error it is unknown, so the address is treated as this machine's own.
        return e.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host by the resolver of the system."""
    loop = asyncio.get_running_loop()
    entries = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


async def fetch_public(
    url: str,
    *,
    deadline: float,
    max_bytes: int,
    resolve: Resolve = resolve,
    allowed: Callable[[str], bool] = is_public,
) -> Page:
    """GET a page of the public web.

    Args:
        url: http or https, without user and password.
        deadline: `time.monotonic()` seconds at which to give up, redirects included.
        max_bytes: the number of bytes of the response to read.
        resolve: returns the addresses of a host name.
        allowed: returns whether connections to an address are allowed.

    Raises:
        ToolError: the address is not allowed, or there is no response. The model reads the message.
        Infrastructure: host names cannot be resolved at all.
    """
    try:
        async with TimeLimit(deadline - time.monotonic()):
            for _ in range(MAX_REDIRECTS + 1):
                page = await _get(url, max_bytes, resolve, allowed)
                if isinstance(page, Page):
                    return page
                url = page
    except TimeoutError:
        raise ToolError(f"timed out: {url[:200]} did not answer in time") from None
    raise ToolError(f"too many redirects (more than {MAX_REDIRECTS}); the last one to {url[:200]}")


async def _get(
    url: str, max_bytes: int, resolve: Resolve, allowed: Callable[[str], bool]
) -> Page | str:
    """Return the page at a URL, or the URL of a redirect."""
    host, port, secure = _parse_url(url)
    try:
        addresses = await resolve(host, port)
    except socket.gaierror as e:
        if e.errno == socket.EAI_AGAIN:  # No name server answered: the model is not at fault.
            raise Infrastructure(f"no name server answers for {host[:100]!r}") from None
        raise ToolError(f"host not found: {host[:100]!r}") from None
    except (OSError, UnicodeError):
        raise ToolError(f"host not found: {host[:100]!r}") from None
    # All addresses must be allowed: a name with a public and a private address is an attack.
    if not addresses or not all(map(allowed, addresses)):
        raise ToolError(f"{host[:100]} is not a public web address")
    address = addresses[0]
    target = httpx.URL(url).copy_with(host=address, fragment=None)
    host_header = f"[{host}]" if ":" in host else host
    headers = {
        "Host": host_header if port == (443 if secure else 80) else f"{host_header}:{port}",
        "Accept-Encoding": "identity",
        "User-Agent": "agentrl",
    }
    try:
        async with (
            pool_of_loop().reserve_slot(PUBLIC_WEB),
            httpx.AsyncClient(trust_env=False, timeout=None, follow_redirects=False) as client,
            client.stream(
                "GET", target, headers=headers, extensions={"sni_hostname": host}
            ) as response,
        ):
            if response.is_redirect and (location := response.headers.get("location")):
                return urljoin(url, location)
            if response.headers.get("content-encoding", "identity") != "identity":
                raise ToolError(f"{host} answered with an unsupported content encoding")
            content = bytearray()
            async for piece in response.aiter_raw():
                content += piece
                if len(content) > max_bytes:
                    break
            kind = response.headers.get("content-type", "")
            truncated = len(content) > max_bytes
            return Page(url, response.status_code, kind, bytes(content[:max_bytes]), truncated)
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        raise ToolError(f"cannot read {host}: {type(e).__name__}") from None


def _parse_url(url: str) -> tuple[str, int, bool]:
    """Return host, port, and whether the scheme is https.

    Raises:
        ToolError: it is not a URL of the web.
    """
    if len(url) > MAX_URL or any(c.isspace() or not c.isprintable() for c in url):
        raise ToolError("invalid URL: it is too long or contains spaces")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        # As browsers do: full-width digits become digits, umlauts become punycode.
        host = host if ":" in host else host.encode("idna").decode()
    except (ValueError, UnicodeError):
        raise ToolError(f"invalid URL: {url[:200]!r}") from None
    if parts.scheme not in ("http", "https"):
        raise ToolError(f"invalid URL: the scheme must be http or https, not {parts.scheme[:20]!r}")
    if "@" in parts.netloc or not host:
        raise ToolError("invalid URL: it must have a host, and no user or password")
    secure = parts.scheme == "https"
    return host, port or (443 if secure else 80), secure
