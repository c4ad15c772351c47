"""verl's versions, which `make verl` installs into .venv-verl."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

VERL = Path(__file__).parents[2] / ".venv-verl"
PROGRAM = Path(__file__).parents[1] / "compat" / "programs" / "in_verl.py"
VERSIONS = ("0.7.0", "0.7.1", "0.8.0", "0.9.0", "0.9.1")
"""The versions of verl in `agentrl/config/verl_defaults.csv` and in .venv-verl."""


class InstalledVerl:
    """A version of verl in a process of its own, whose functions a test calls."""

    def __init__(self, version: str):
        self.version, self.folder = version, VERL / version
        assert self.folder.exists(), "make verl installs verl's versions"
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [VERL / "bin" / "python", PROGRAM],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return what a function returns: MODULE:FUNCTION, or one of `in_verl.py`."""
        call = {"name": name, "args": args, "kwargs": kwargs}
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        returned, error = json.loads(self._process.stdout.readline())
        assert not error, error
        return returned

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)
