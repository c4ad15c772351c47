"""Bind the sockets of agentrl's servers: on loopback, or on any address if there is a token."""

from __future__ import annotations

import ipaddress
import socket

from agentrl.errors import UserError

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


def bind(host: str, port: int, token: str, *, allows: str = "run your tools") -> socket.socket:
    """Return a listening socket.

    Args:
        host: an IP address, or `localhost`.
        port: the port; 0 takes a free one.
        token: the bearer token. An address that other machines can reach needs one.
        allows: what the server lets its clients do, for the error.

    Raises:
        UserError: a token is missing, or the address cannot be bound.
    """
    address = _address(host)
    if not address.is_loopback and not token:
        raise UserError(
            f"--host {host} lets other machines {allows}, so a token is required. Put one in the"
            " environment variable that --token-env names."
        )
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        bound = socket.create_server((str(address), port), family=family, backlog=2048)
        # Connections inherit it. asyncio sets it only for sockets with an explicit protocol number;
        # without it, a response of two packets takes 40 ms (Nagle's algorithm, delayed ACKs).
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return bound
    except (OSError, OverflowError) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else e
        raise UserError(
            f"cannot serve on {_name(address)}:{port}: {reason}. Choose another --port"
            " (0 takes a free one)."
        ) from None


def url_of(bound: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = bound.getsockname()[:2]
    return f"http://{_name(ipaddress.ip_address(host))}:{port}"


def host_names_of(bound: socket.socket) -> frozenset[str]:
    """Return the host names that requests to a listening socket may use; empty allows all.

    A request to an address like 0.0.0.0 may use any host name, so only the token protects it.
    """
    address = ipaddress.ip_address(bound.getsockname()[0])
    return frozenset() if address.is_unspecified else LOOPBACK | {_name(address)}


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise UserError(f"--host {host} is not an IP address. Use one such as 127.0.0.1") from None


def _name(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    return f"[{address}]" if address.version == 6 else str(address)
