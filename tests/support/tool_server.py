"""A tool server in a thread of this process, and rows that name its tools."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from agentrl.trajectory import Message, Sample

TOKEN = "open-sesame"


@contextmanager
def serving_tools() -> Iterator[str]:
    """Serve the tools that this process has registered so far, and yield the URL."""
    from agentrl.tools.serving.listen import ToolServer

    ready = threading.Event()
    server = ToolServer("127.0.0.1", 0, TOKEN, ready.set)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    assert ready.wait(20)
    yield server.url
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def row(*tools: str, **fields) -> Sample:
    """Return a row with these tools and an id of its own."""
    return Sample(uuid.uuid4().hex[:8], (Message("user", "hi"),), tools=tools, **fields)
