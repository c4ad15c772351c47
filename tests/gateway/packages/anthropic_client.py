"""An agent of Anthropic's client alone.

Arguments: stream, retry, broken, think, and those of plain_agent. With `broken` its first
connection breaks when the answer arrives.
"""

import itertools
import os
import socket
import sys
import threading
from urllib.parse import urlsplit

import anthropic
from plain_agent import play

TOOL = {
    "name": "calculator",
    "description": "Evaluate an arithmetic expression.",
    "input_schema": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
    "cache_control": {"type": "ephemeral"},
}


def copy(source, target, is_broken=False):
    """Copy what a socket receives to another one; a broken connection loses it."""
    while received := source.recv(65536):
        if is_broken:
            break
        target.sendall(received)
    source.close()
    target.shutdown(socket.SHUT_RDWR)


def serve_proxy(server, address):
    for i in itertools.count():
        client, _ = server.accept()
        gateway = socket.create_connection(address)
        threading.Thread(target=copy, args=(client, gateway), daemon=True).start()
        threading.Thread(target=copy, args=(gateway, client, i == 0), daemon=True).start()


if "broken" in sys.argv:
    url, server = urlsplit(os.environ["ANTHROPIC_BASE_URL"]), socket.create_server(("127.0.0.1", 0))
    os.environ["ANTHROPIC_BASE_URL"] = f"http://127.0.0.1:{server.getsockname()[1]}"
    arguments = server, (url.hostname, url.port)
    threading.Thread(target=serve_proxy, args=arguments, daemon=True).start()
# With `retry` the first request takes longer than the client waits: it sends it again.
client = anthropic.Anthropic(timeout=0.5 if "retry" in sys.argv else 30.0, max_retries=3)
thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}} if "think" in sys.argv else {}


def ask(messages):
    options = {
        "model": "claude-sonnet-4-5",
        "max_tokens": 2048,
        "messages": messages,
        "tools": [TOOL],
        **thinking,
    }
    if "stream" not in sys.argv:
        message = client.messages.create(**options)
    else:
        text = ""
        with client.messages.stream(**options) as stream:
            for event in stream:
                if event.type == "text":
                    text += event.text
        message = stream.get_final_message()
        assert text == "".join(b.text for b in message.content if b.type == "text")
    if "broken" not in sys.argv:
        del options["max_tokens"]
        counted, usage = client.messages.count_tokens(**options), message.usage
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    assert message.role == "assistant" and message.id.startswith("msg_")
    assert any(block.type == "thinking" for block in message.content) == bool(thinking)
    calls = [(b.id, b.input["expression"]) for b in message.content if b.type == "tool_use"]
    assert message.stop_reason == ("tool_use" if calls else "end_turn")
    text = "" if calls else message.content[-1].text
    return [{"role": "assistant", "content": message.content}], calls, text


def write_results(results):
    blocks = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in results]
    return [{"role": "user", "content": blocks}]


print(play(ask, write_results))
