"""A headless Chromium, driven over its debugging pipe (one JSON text per message, ended by NUL)."""

from __future__ import annotations

import json
import os
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from support.needs import BROWSER


class Browser:
    """One page of a browser. Errors of the page's scripts are collected in `errors`."""

    def __init__(self, profile: Path):
        assert BROWSER, "no browser: install chromium (Debian's package)"
        to_read, self._writes = os.pipe()
        self._reads, to_write = os.pipe()
        # The browser expects descriptors 3 and 4.
        command = (
            f"exec {BROWSER} --headless --no-sandbox --disable-gpu --remote-debugging-pipe"
            f" --disable-dev-shm-usage --no-first-run --user-data-dir='{profile}' about:blank"
            f" 3<&{to_read} 4>&{to_write}"
        )
        self._process = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the browser and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(answer["params"]["exceptionDetails"]))
            if answer.get("method") == "Log.entryAdded":
                self.errors.append(answer["params"]["entry"]["text"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            received = os.read(self._reads, 2**20)
            assert received, "the browser has ended"
            self._buffer += received
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script: str, seconds: float = 20.0) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f"not true within {seconds} s: {script}"
            time.sleep(0.02)

    def resize(self, width: int, height: int = 800) -> None:
        """Set the size of the page in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def grave_violations(self) -> list[list[Any]]:
        """Return what axe-core calls serious or critical on this page."""
        spec = find_spec("axe_core_python")
        assert spec and spec.submodule_search_locations, "`pip install -e '.[dev]'` has it"
        axe = (Path(spec.submodule_search_locations[0]) / "axe.min.js").read_text()
        self.run(f"{axe};0")
        result = self.send(
            "Runtime.evaluate",
            expression="axe.run(document).then(r => r.violations.map("
            "v => [v.impact, v.id, v.nodes.slice(0, 3).map(n => n.html)]))",
            awaitPromise=True,
            returnByValue=True,
        )
        return [v for v in result["result"]["value"] if v[0] in ("serious", "critical")]

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._reads)
        os.close(self._writes)
