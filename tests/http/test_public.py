"""The pages that a model may fetch, and the addresses that it must not reach."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import registry
from agentrl.errors import ToolError
from agentrl.http.public import fetch_public, is_public, resolve


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "0.0.0.0", "10.0.0.1", "172.16.3.4", "192.168.1.1", "169.254.169.254",
        "100.64.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1",
        "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fec0::1", "ff02::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1", "2002:7f00:1::", "2001::1", "2001:db8::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


PUBLIC = ["1.1.1.1", "93.184.216.34", "168.63.129.17", "192.0.1.1", "2606:4700:4700::1111"]


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_that_are_public(address):
    assert is_public(address)


# All rows of the two registries (October 2025), and the blocks for multicast.
REGISTERED = [
    "0.0.0.0/8 0.0.0.0/32 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12",
    "192.0.0.0/24 192.0.0.0/29 192.0.0.8/32 192.0.0.9/32 192.0.0.10/32 192.0.0.170/32",
    "192.0.0.171/32 192.0.2.0/24 192.31.196.0/24 192.52.193.0/24 192.88.99.0/24 192.88.99.2/32",
    "192.168.0.0/16 192.175.48.0/24 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 240.0.0.0/4",
    "255.255.255.255/32 ::1/128 ::/128 ::ffff:0:0/96 64:ff9b::/96 64:ff9b:1::/48 100::/64",
    "100:0:0:1::/64 2001::/23 2001::/32 2001:1::1/128 2001:1::2/128 2001:1::3/128 2001:2::/48",
    "2001:3::/32 2001:4:112::/48 2001:10::/28 2001:20::/28 2001:30::/28 2001:db8::/32 2002::/16",
    "2620:4f:8000::/48 3fff::/20 5f00::/16 fc00::/7 fe80::/10 224.0.0.0/4 ff00::/8",
]


@pytest.mark.parametrize("block", " ".join(REGISTERED).split())
def test_no_block_of_the_iana_registries_is_public(block):
    network, draw = ipaddress.ip_network(block), random.Random(block)
    inside = [network[0], network[-1], network[draw.randrange(network.num_addresses)]]
    assert [str(a) for a in inside if is_public(str(a))] == []


@pytest.mark.parametrize("inner", ["10.0.0.1", "169.254.169.254", "1.1.1.1"])
def test_addresses_that_embed_another_are_not_public(inner):
    """6to4, Teredo (which inverts the client's address), NAT64, and IPv4-mapped and -compatible."""
    number = int(ipaddress.ip_address(inner))
    holders = [
        0x2002 << 112 | number << 80,
        0x20010000 << 96 | number ^ 0xFFFFFFFF,
        0x20010000 << 96 | number << 64,
        0x64FF9B << 96 | number,
        0x64FF9B0001 << 80 | number,
        0xFFFF << 32 | number,
        number,
    ]
    assert [h for h in holders if is_public(str(ipaddress.IPv6Address(h)))] == []


@pytest.mark.parametrize("address", ["168.63.129.16", "192.0.0.192", "100.100.100.200",
                                     "169.254.170.2", "fd00:ec2::254", "fd20:ce::254"])  # fmt: skip
def test_metadata_services_of_clouds_are_not_public(address):
    assert not is_public(address)


OWN = """
import asyncio, fcntl, socket, struct, sys, threading, time
from agentrl.errors import AgentRLError
from agentrl.http.public import fetch_public, is_public

FIRST, SECOND, THIRD = "93.184.216.34", "93.184.216.35", "2606:4700:4700::64"
with socket.socket() as four, socket.socket(socket.AF_INET6) as six:
    for label, address, flags in ((b"lo", FIRST, 0x49), (b"lo:1", SECOND, 0x49)):
        name = struct.pack("16sHH4s8x", label, socket.AF_INET, 0, socket.inet_aton(address))
        fcntl.ioctl(four, 0x8916, name)  # SIOCSIFADDR
        mask = struct.pack("16sHH4s8x", label, socket.AF_INET, 0, b"\\xff" * 4)
        fcntl.ioctl(four, 0x891C, mask)  # SIOCSIFNETMASK
        fcntl.ioctl(four, 0x8914, struct.pack("16sH14x", label, flags))  # SIOCSIFFLAGS
    lo = socket.if_nametoindex("lo")
    fcntl.ioctl(six, 0x8916, socket.inet_pton(socket.AF_INET6, THIRD) + struct.pack("Ii", 128, lo))
time.sleep(0.1)
print([is_public(a) for a in (FIRST, SECOND, THIRD, "93.184.217.34", "2606:4700:4700::65")])
for address, host in ((FIRST, FIRST), (SECOND, SECOND), (THIRD, f"[{THIRD}]")):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        server.settimeout(1.0)

        def answer():
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.recv(9999)
                connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 6\\r\\n\\r\\nsecret")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://{host}:{server.getsockname()[1]}/"
        try:
            page = asyncio.run(fetch_public(url, deadline=time.monotonic() + 5, max_bytes=99))
            print(page.content)
        except AgentRLError as e:
            print(type(e).__name__, e)
        thread.join()
if "any" in sys.argv:
    open("/proc/sys/net/ipv4/ip_nonlocal_bind", "w").write("1")
    try:
        print(is_public("93.184.217.34"))
    except AgentRLError as e:
        print(type(e).__name__, e)
"""


def test_a_public_address_of_this_machine_is_refused():
    """In a network of its own, whose loopback has public addresses."""
    command = ["unshare", "-rn", sys.executable, "-c", OWN, "any"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.stderr.startswith("unshare:") and not os.environ.get("CI"):
        pytest.skip("no network namespaces here")
    assert not done.returncode, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "[False, False, False, True, True]"
    for line, host in zip(lines[1:4], ("93.184.216.34", "93.184.216.35", "2606:"), strict=True):
        assert line.startswith(f"ToolError {host}") and line.endswith("public web address")
    assert lines[4].startswith("Infrastructure a socket of this machine binds to any address")


@contextmanager
def listener(*answers: bytes, host: str = "127.0.0.1") -> Iterator[tuple[int, list[bytes]]]:
    """A server on loopback: its port, and what it was asked."""
    requests: list[bytes] = []
    with socket.create_server((host, 0)) as server:
        server.settimeout(20)

        def serve() -> None:
            for answer in answers:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    requests.append(connection.recv(65536))
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1], requests


def page(body: str, head: str = "Content-Type: text/html") -> bytes:
    raw = body.encode()
    return f"HTTP/1.1 200 OK\r\n{head}\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw


def redirect(place: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode()


def fetched(url: str, seconds: float = 10, max_bytes: int = 1000, **options):
    deadline = time.monotonic() + seconds
    return asyncio.run(fetch_public(url, deadline=deadline, max_bytes=max_bytes, **options))


def names(**addresses: list[str]):
    """A resolver that knows these names, and how often each was asked for."""
    lookups: list[str] = []

    async def look_up(host: str, port: int) -> list[str]:
        lookups.append(host)
        name = host.replace(".", "_")
        return addresses[name] if name in addresses else await resolve(host, port)

    return look_up, lookups


LOOPBACK_SPELLINGS = [
    "http://127.0.0.1:{port}/", "http://localhost:{port}/", "http://127.1:{port}/",
    "http://2130706433:{port}/", "http://0x7f.1:{port}/", "http://0:{port}/",
    "http://①②⑦.⓪.⓪.①:{port}/", "http://[::1]:{port}/", "http://[::ffff:127.0.0.1]:{port}/",
    "http://ok@127.0.0.1:{port}/", "http://example.com@127.0.0.1:{port}/",
    "file:///etc/passwd", "gopher://127.0.0.1:{port}/", "ftp://127.0.0.1:{port}/",
    "http://127.0.0.1:{port}\\@example.com/", "//127.0.0.1:{port}/", "http:///x", "http://[::1",
    "http://127.0.0.1:99999/", "http://exa mple.com/", "x", "",
]  # fmt: skip


@pytest.mark.parametrize("spelling", LOOPBACK_SPELLINGS)
def test_nothing_on_this_machine_is_reached(spelling):
    with listener(page("secret")) as (port, requests), pytest.raises(ToolError):
        fetched(spelling.format(port=port))
    assert requests == []


def test_a_redirect_to_this_machine_is_not_followed():
    with listener(page("secret")) as (inner, requests):
        for place in (f"http://127.0.0.1:{inner}/", f"http://metadata.test:{inner}/"):
            with listener(redirect(place), host="127.0.0.9") as (port, _):
                look_up, _ = names(public_test=["127.0.0.9"], metadata_test=["127.0.0.1"])
                # For this test the one address 127.0.0.9 is public.
                with pytest.raises(ToolError, match="is not a public web address"):
                    fetched(
                        f"http://public.test:{port}/",
                        resolve=look_up,
                        allowed=lambda a: a == "127.0.0.9",
                    )
        assert requests == []


def test_a_name_that_changes_its_address_is_asked_once():
    answers = [["93.184.216.34"], ["127.0.0.1"]]
    lookups = []

    async def rebinding(host, port):
        lookups.append(host)
        return answers[min(len(lookups), 2) - 1]

    # Goes to the first address, which nobody answers at; never to what the name says next.
    with listener(page("secret")) as (port, seen), pytest.raises(ToolError):
        fetched(f"http://changes.test:{port}/", seconds=1.0, resolve=rebinding)
    assert lookups == ["changes.test"] and seen == []


def test_a_name_with_one_private_address_is_refused():
    look_up, _ = names(both_test=["93.184.216.34", "10.0.0.1"])
    with pytest.raises(ToolError, match="not a public web address"):
        fetched("http://both.test/", resolve=look_up)


def test_pages_are_read_redirects_followed_and_cut():
    look_up, lookups = names(page_test=["127.0.0.1"])
    everywhere = {"resolve": look_up, "allowed": lambda address: True}
    with listener(redirect("/there?x=1"), page("x" * 5000)) as (port, requests):
        fetched_page = fetched(f"http://page.test:{port}/here#part", **everywhere)
    assert (fetched_page.url, fetched_page.status) == (f"http://page.test:{port}/there?x=1", 200)
    assert fetched_page.truncated and fetched_page.content == b"x" * 1000
    assert requests[0].startswith(b"GET /here HTTP/1.1")
    assert f"Host: page.test:{port}".encode() in requests[0]
    assert lookups == ["page.test"] * 2


@pytest.mark.timing
def test_faulty_servers():
    look_up, _ = names(page_test=["127.0.0.1"])
    everywhere = {"resolve": look_up, "allowed": lambda address: True}
    zipped = page("zip", "Content-Type: text/html\r\nContent-Encoding: gzip")
    for answer, why in (
        (zipped, "encoding"),
        (b"nonsense\r\n\r\n", "cannot read"),
        (b"", "cannot read"),
    ):
        with listener(answer) as (port, _), pytest.raises(ToolError, match=why):
            fetched(f"http://page.test:{port}/", **everywhere)
    with (
        listener(*[redirect("/again")] * 7) as (port, _),
        pytest.raises(ToolError, match="redirects"),
    ):
        fetched(f"http://page.test:{port}/", **everywhere)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(ToolError, match="did not answer in time"):
            fetched(f"http://page.test:{silent.getsockname()[1]}/", seconds=0.5, **everywhere)
        assert time.monotonic() - began < 3


def test_the_fetch_tool_shows_the_visible_text(no_tools):
    shelf = registry.load_file("shelf:fetch")
    html = (
        "<html><head><title>T</title></head><body><script>no()</script><h1>Head &amp;\n line</h1>"
        "<p>One <b>bold</b> word.</p><style>p{}</style><ul><li>a<li>b</ul></body></html>"
    )
    assert shelf.text_of(html) == "Head & line\nOne bold word.\na\nb"
    assert shelf.text_of("<script>never closed") == ""
    with pytest.raises(ToolError, match="not a public web address"):
        asyncio.run(shelf.fetch("http://127.0.0.1:1/"))


@pytest.fixture
def text_of(no_tools):
    return registry.load_file("shelf:fetch").text_of


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("a<!-- <p>b --!> -->c<!-->d<!--->e", "acde"),
        ("<!DOCTYPE html><?xml x?></>1 < 2 & 3 <4", "1 < 2 & 3 <4"),
        ('<a title="a > b" x=\'>\' y = ">">5</a>', "5"),
        ("<p don't>one</p><P>two</P >three", "one\ntwo\nthree"),
        ("<SCRIPT>if (a </b> c) '</scripts>'</script\n>shown<script/>too", "showntoo"),
        ("<svg><style></svg></style><svg></svg><p>x</svg>y", "y"),
        ("<svg><template></svg>a</template>b</head>c", "abc"),
        ("<head><title>T</title><body>all of it", "all of it"),
        ("<noscript>a<noscript>b</noscript>c</noscript>d", "d"),
        ("&lt;b&gt;&nbsp; &#10;&amp;lt; &notit;", "<b> &lt; \xacit;"),
        ("&#xD800;&#" + "1" * 5000 + ";", "\ufffd\ufffd"),
        ("a<b", "a"),
        ("a<![a", "a"),
        ("a<!--", "a"),
        ('a<b c="d>e', "a"),
        ("a</", "a"),
    ],
)  # fmt: skip
def test_pages_are_read_as_a_browser_does(text_of, page, shown):
    assert text_of(page) == shown


HOSTILE = ["<a ", '<a b="', "<a b=' ", "<a = ", "<!--", "<![a", "<", "</", "<script>", "<style ",
           "<a>", "&#1", "&" + "a" * 32, "<svg></svg>", "<svg></template>", "\n "]  # fmt: skip


NESTED = "elements that are closed by another name"


@pytest.mark.parametrize("shape", [*HOSTILE, NESTED])
@pytest.mark.timing
def test_the_time_for_a_page_is_linear_in_its_length(text_of, shape):
    page = shape * (1_000_000 // len(shape))
    if shape == NESTED:
        page = "<svg>" * 60_000 + "</div>" * 60_000
    began = time.thread_time()
    text_of(page)
    assert time.thread_time() - began < 0.6  # at most half of it on a machine at rest


PIECES = [
    *HOSTILE, "<p>", "</p>", "<svg>", "</svg>", "<head>", "</head>", "-->", ">", "/>", '"', "&amp;",
    "&#x" + "f" * 30, "&#" + "9" * 5000, "x", " ", "=", "\0", "\ud800", "\u0130", "</script>",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30).map("".join))
def test_any_broken_page_gives_text(page):
    text_of = registry.load_file("shelf:fetch").text_of
    shown = text_of(page)
    assert all(line and line == " ".join(line.split()) for line in shown.split("\n") if shown)
    assert text_of(f"<p>before<script>{page.replace('</script>', '')}") == "before"


@given(st.text(max_size=50))
def test_plain_text_stays_itself(text):
    text_of = registry.load_file("shelf:fetch").text_of
    plain = text.replace("\x00", "").replace("\r", " ")
    assert text_of(escape(plain)) == " ".join(plain.split())
