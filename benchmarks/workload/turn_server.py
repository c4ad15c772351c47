"""A server with SGLang's HTTP API and prepared turns, which costs little CPU: for one core.

`python turn_server.py FILE` reads a pickled `(answers, seconds)` and prints its port. `answers[i]`
are the JSON texts of the turns of conversation i. An episode's id names its row, and so its
conversation; of the body of a request, only the number of its ids is read.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvloop

from agentrl.trajectory import Generation

INFO = {
    b"/server_info": {"max_req_input_len": 1 << 24, "enable_deterministic_inference": False},
    b"/model_info": {"weight_version": "default"},
}
PLACE = 111_111_111
"""Stands for the number of ids of a prompt."""
KEY = b"x-smg-routing-key: "


def answer_of(turn: Generation) -> bytes:
    """Return the HTTP response with a turn."""
    entries = list(zip(turn.logprobs, turn.token_ids, [None] * len(turn.token_ids), strict=True))
    meta = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": entries,
        "completion_tokens": len(turn.token_ids),
        "prompt_tokens": PLACE,
        "cached_tokens": 0,
        "weight_version": "default",
    }
    return respond({"meta_info": meta}).replace(b"%d" % PLACE, b"%9d")


def respond(content: object) -> bytes:
    """Return a response with a JSON object."""
    body = json.dumps(content).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


class Connection(asyncio.Protocol):
    """One keep-alive connection."""

    answers: Sequence[Sequence[bytes]]
    seconds: float
    probe: bytes
    played: dict[bytes, int]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to read."""
        self._transport, self._head, self._missing = transport, b"", 0
        self._body = bytearray()
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        """Answer when the body has arrived."""
        if not self._missing:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, body = self._head[:end], len(self._head) - end - 4
            at = head.lower().find(b"content-length: ")
            size = int(head[at + 16 :].partition(b"\r\n")[0]) if at >= 0 else 0
            self._body = bytearray(self._head[end + 4 :])
            self._head, self._missing = head, size - body
        else:
            self._missing -= len(data)
            self._body += data
        if not self._missing:
            head, self._head = self._head, b""
            self._answer(head)

    def _answer(self, head: bytes) -> None:
        path = head.split(b" ", 2)[1]
        at = head.lower().find(KEY)
        if path in INFO:
            self._transport.write(respond(INFO[path]))
        elif at < 0:
            self._transport.write(self.probe)
        else:
            episode = head[at + len(KEY) :].partition(b"\r\n")[0]
            turn = self.played.get(episode, 0)
            self.played[episode] = turn + 1
            talk = self.answers[int(episode.split(b"-")[2]) % len(self.answers)]
            ids = self._body.count(b",", 0, self._body.find(b"]")) + 1
            self._loop.call_later(self.seconds, self._transport.write, talk[turn] % ids)


@contextmanager
def turn_server(talks: Sequence[Sequence[Generation]], seconds: float) -> Iterator[str]:
    """Serve prepared turns within the block, in a process of its own; yield the URL."""
    answers = [[answer_of(turn) for turn in turns] for turns in talks]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "turns"
        file.write_bytes(pickle.dumps((answers, seconds)))
        command = [sys.executable, __file__, str(file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield f"http://127.0.0.1:{int(process.stdout.readline())}"
            finally:
                process.kill()


async def main() -> None:
    Connection.answers, Connection.seconds = pickle.loads(Path(sys.argv[1]).read_bytes())
    entries = {"output_token_logprobs": [[-0.5, 0, None]], "completion_tokens": 1}
    meta = {"finish_reason": {"type": "stop"}, "prompt_tokens": 1, "cached_tokens": 0}
    Connection.probe = respond({"meta_info": meta | entries | {"weight_version": "default"}})
    Connection.played = {}
    server = await asyncio.get_running_loop().create_server(
        Connection, "127.0.0.1", 0, backlog=4096
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
