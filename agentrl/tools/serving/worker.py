"""A process of the tool server: what `background` starts."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time

from agentrl.config import SandboxConfig
from agentrl.errors import UserError
from agentrl.registry import load_file
from agentrl.sandbox import configure

STOP_SECONDS = 20.0
MARK = "agentrl-tool-server: "
"""Begins the lines that are for who started it."""


def main() -> None:
    """Serve, as a line on standard input says, until who started it is gone."""
    from agentrl.tools.serving.listen import ToolServer
    from agentrl.tools.serving.sticky import Place

    parent = os.getppid()
    order = json.loads(sys.stdin.readline())
    # Tools that start programs shall not hand them the lifeline, nor the socket.
    lifeline = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.set_inheritable(order["socket"], False)
    try:
        configure(SandboxConfig.model_validate(order["sandbox"]))
        for name in order["files"]:
            load_file(name)
        server = ToolServer(
            "",
            0,
            order["token"],
            lambda: _say(serving=server.url),
            bound=socket.socket(fileno=order["socket"]),
            place=Place(tuple(order["ports"]), order["number"]),
            max_calls=order["max_calls"],
        )
    except UserError as e:
        _say(user_error=str(e))
        sys.exit(2)

    def watch() -> None:
        # The pipe ends with the parent, unless a fork of the parent holds it too.
        while not select.select([lifeline], [], [], 1.0)[0] and os.getppid() == parent:
            pass
        server.should_exit = True
        time.sleep(0.75 * STOP_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
    server.serve_forever()


def _say(**said: str) -> None:
    print(MARK + json.dumps(said), flush=True)
