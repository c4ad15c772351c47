"""A server with SGLang's HTTP API and scripted turns, in a process of its own.

The n-th request of an episode gets the n-th turn. `python small_sglang.py SCRIPT` prints its port.
SCRIPT is JSON: `{"turns": [[token, ...], ...], "seconds": seconds for each turn}`. `GET /requests`
returns the largest number of turns at the same time (`most`) and the number of all (`turns`).
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvicorn

INFO = {
    "/server_info": {"max_req_input_len": 4096, "enable_deterministic_inference": False},
    "/model_info": {"weight_version": "default"},
}


class SmallSGLang:
    """The application."""

    def __init__(self, turns: Sequence[Sequence[int]], seconds: float):
        self.turns, self.seconds = turns, seconds
        self._played: Counter[bytes] = Counter()
        self._now = self._most = 0

    async def __call__(self, scope, receive, send) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path, headers = scope["path"], dict(scope["headers"])
        if path == "/generate":
            answer = await self._generate(json.loads(body), headers.get(b"x-smg-routing-key"))
        else:
            answer = INFO.get(path, {"most": self._most, "turns": self._played.total()})
        content = json.dumps(answer).encode()
        length = (b"content-length", b"%d" % len(content))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": content})

    async def _generate(self, body, episode: bytes | None) -> dict:
        ids = [0]  # a probe, which has no episode
        if episode is not None:
            ids = self.turns[self._played[episode]]
            self._played[episode] += 1
            self._now += 1
            self._most = max(self._most, self._now)
            await asyncio.sleep(self.seconds)
            self._now -= 1
        meta = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "completion_tokens": len(ids),
            "prompt_tokens": len(body["input_ids"]),
            "cached_tokens": 0,
            "weight_version": "default",
        }
        return {"meta_info": meta}


@contextmanager
def small_sglang(turns: Sequence[Sequence[int]], seconds: float) -> Iterator[str]:
    """Start a server for the block, and yield its URL."""
    script = json.dumps({"turns": [list(turn) for turn in turns], "seconds": seconds})
    command = [sys.executable, __file__, script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def main() -> None:
    app = SmallSGLang(**json.loads(sys.argv[1]))
    bound = socket.create_server(("127.0.0.1", 0), backlog=2048)
    config = uvicorn.Config(
        app, http="httptools", log_level="error", ws="none", lifespan="off", access_log=False
    )
    print(bound.getsockname()[1], flush=True)
    uvicorn.Server(config).run([bound])


if __name__ == "__main__":
    main()
