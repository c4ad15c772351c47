"""What a program says: read as it comes, up to a cap, and made fit to be shown and stored."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable

_CHUNK = 65_536
_CONTROL = re.compile(r"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def clean(content: bytes) -> str:
    """Text that can be encoded and shown: no NUL; escape sequences begin with a visible x1b."""
    text = content.decode("utf-8", "replace").replace("\0", "")
    return _CONTROL.sub(lambda m: f"\\x{ord(m.group()):02x}", text)


def shorten(content: bytes, most: int) -> bytes:
    """The head and the tail of what is longer, and how much is between them."""
    if len(content) <= most:
        return content
    head, tail = content[: most - most // 2], content[len(content) - most // 2 :]
    return head + b"\n[%d bytes left out]\n" % (len(content) - most) + tail


class Capture:
    """Reads the end of a pipe until it is closed, or holds more than was asked for."""

    def __init__(self, fd: int, most: int, on_flood: Callable[[], None] = lambda: None):
        """Start reading; the descriptor is ours from here on.

        Args:
            fd: of the pipe.
            most: bytes to take. A little more is kept, so that something can be left out.
            on_flood: called once, when there are more. Of what comes afterwards nothing is kept.
        """
        os.set_blocking(fd, False)
        self.content = bytearray()
        self._loop = asyncio.get_running_loop()
        self._fd, self._most, self._on_flood = fd, most, on_flood
        self._flooded = False
        self._loop.add_reader(fd, self._read)

    @property
    def text(self) -> str:
        """What was said, shortened and cleaned."""
        return clean(shorten(bytes(self.content), self._most))

    def close(self) -> None:
        """Stop reading."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def drain(self) -> None:
        """Read what is there now, and close: once nobody is left who could write more."""
        while self._fd >= 0 and self._read():
            pass
        self.close()

    def _read(self) -> bool:
        """Whether there was something."""
        try:
            read = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return False
        if not read:
            self.close()
        elif not self._flooded:
            self.content += read
            if len(self.content) > self._most:
                self._flooded = True
                self._on_flood()
        return bool(read)
