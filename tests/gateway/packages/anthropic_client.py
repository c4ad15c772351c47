"""An agent of Anthropic's client alone. Arguments: stream, retry, broken, think, trim.

It may call several tools in one turn. With `trim` it removes its first turn from the history. With
`broken` its first connection breaks when the answer arrives.
"""

import itertools
import os
import socket
import sys
import threading
from urllib.parse import urlsplit

import anthropic
from calculator import PROMPT, evaluate

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
messages = [{"role": "user", "content": PROMPT}]
thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}} if "think" in sys.argv else {}


def ask():
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
    if "broken" in sys.argv:
        return message
    counted = client.messages.count_tokens(
        **{k: v for k, v in options.items() if k != "max_tokens"}
    )
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    return message


while True:
    message = ask()
    assert message.role == "assistant" and message.id.startswith("msg_")
    assert any(block.type == "thinking" for block in message.content) == bool(thinking)
    messages.append({"role": "assistant", "content": message.content})
    calls = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == ("tool_use" if calls else "end_turn")
    if not calls:
        break
    results = [
        {"type": "tool_result", "tool_use_id": c.id, "content": evaluate(c.input["expression"])}
        for c in calls
    ]
    messages.append({"role": "user", "content": results})
    if "trim" in sys.argv and len(messages) > 3:
        del messages[1:3]
print(message.content[-1].text)
