"""An HTTP server with SGLang's endpoints for weights, which keeps what it is sent."""

from __future__ import annotations

import base64
import json
import pickle
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from safetensors.torch import load_file


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 100


class FakeSGLang:
    """Many servers in one: each address 127.0.0.N of its port is a server of its own."""

    def __init__(self):
        self.seconds = 0.0
        """The time that a server takes for each request."""
        self.reads_weights = True
        self.weights: dict[str, dict[str, torch.Tensor]] = {}
        """The weights of each server, by its host."""
        self.versions: dict[str, list[str]] = {}
        self.requests: list[tuple[str, str]] = []
        """Host and path of each request."""
        self.hanging: set[str] = set()
        self.refusing: set[str] = set()
        self.refused_paths: set[tuple[str, str]] = set()
        self.adapters: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
        """The adapters of each server, by their names."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"] or 0)) or "{}")
                host = self.headers["host"].partition(":")[0]
                status, answer = fake.handle(host, self.path, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: object) -> None: ...

        self._server = Server(("0.0.0.0", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def url(self, n: int = 1) -> str:
        return f"http://127.0.0.{n}:{self._server.server_port}"

    def handle(self, host: str, path: str, body: dict) -> tuple[int, dict]:
        self.requests.append((host, path))
        time.sleep(self.seconds)
        while host in self.hanging:
            time.sleep(0.05)
        if host in self.refusing or (host, path) in self.refused_paths:
            return 500, {"error": {"message": "out of memory"}}
        if path == "/update_weights_from_tensor" and self.reads_weights:
            self.read(host, body)
        if "lora_adapter" in path:
            return self.change_adapters(host, path, body)
        if path == "/v1/models":
            return 200, {"data": [{"id": name} for name in self.adapters.get(host, {})]}
        return 200, {"success": True}

    def read(self, host: str, body: dict) -> None:
        """Take a bucket apart as every process of a server does."""
        copies = []
        for pickled in body["serialized_named_tensors"]:
            made = pickle.loads(base64.b64decode(pickled))
            flat = made["flattened_tensor"]
            copies.append(
                {
                    m.name: flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape).clone()
                    for m in made["metadata"]
                }
            )
        for copy in copies:
            assert copy.keys() == copies[0].keys()
            assert all(torch.equal(copy[name], t) for name, t in copies[0].items())
        self.weights.setdefault(host, {}).update(copies[0])
        if body["weight_version"] is not None:
            self.versions.setdefault(host, []).append(body["weight_version"])

    def change_adapters(self, host: str, path: str, body: dict) -> tuple[int, dict]:
        adapters = self.adapters.setdefault(host, {})
        if path == "/unload_lora_adapter":
            del adapters[body["lora_name"]]
        else:
            adapters[body["lora_name"]] = load_file(f"{body['lora_path']}/adapter.safetensors")
        return 200, {"success": True}

    def close(self) -> None:
        self.hanging.clear()
        self._server.shutdown()
        self._server.server_close()
