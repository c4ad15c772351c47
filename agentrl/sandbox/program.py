"""A program that a sandbox runs: its limits, its files, its input and its output.

Limits     the resources of a program
Completed  the result of a program
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

from agentrl.config import SandboxConfig

MAX_BOXES = 1024
_CONTROL = re.compile(r"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")

Language = Literal["python", "bash"]
EndedBy = Literal["", "time", "cpu", "output", "signal"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The resources of one program. If it exceeds a limit, it is killed with all its processes."""

    seconds: float = 10.0
    """Wall clock time."""
    cpu_seconds: int = 10
    memory_mb: int = 2048
    """Address space of each process, in MiB. `sandbox/cgroup.py` limits the memory of all together.
    """
    disk_mb: int = 64
    """MiB that the program may write in total, and into one file."""
    processes: int = 64
    open_files: int = 256
    output_bytes: int = 65_536
    """Limit of stdout and of stderr. A program that prints more is killed; head and tail are kept.
    """


@dataclass(frozen=True, slots=True)
class Completed:
    """The exit code and the output of a program. The text can be encoded and stored."""

    stdout: str
    stderr: str
    exit_code: int
    """Negative if a signal ended the program: minus the number of the signal."""
    ended_by: EndedBy = ""
    """The limit that was exceeded, "signal" if the program crashed, or "" if it exited."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True if the program exited with code 0."""
        return self.exit_code == 0 and not self.ended_by


class Program(NamedTuple):
    """The arguments of `Sandbox.run`."""

    code: str
    language: Language
    stdin: str
    files: Mapping[str, bytes]
    limits: Limits
    init: bool
    image: str = ""

    @property
    def script(self) -> str:
        """The name of the file with the code."""
        return "main.py" if self.language == "python" else "main.sh"

    def interpreter_command(self, python: str) -> list[str]:
        """Return the command that starts the interpreter."""
        return [python, "-s"] if self.language == "python" else ["bash"]


def default_limits(config: SandboxConfig) -> Limits:
    """Return the limits of the section `sandbox`."""
    return Limits(
        seconds=config.timeout_s,
        cpu_seconds=max(1, round(config.timeout_s)),
        memory_mb=config.memory_mb,
    )


def slot_count(slots: int) -> int:
    """Return how many programs may run at once: `sandbox.slots`, where 0 means twice the cores."""
    return slots or 2 * len(os.sched_getaffinity(0))


def check_files(files: Mapping[str, bytes] | None, limits: Limits) -> dict[str, bytes]:
    """Return the files for a program's folder.

    Raises:
        ValueError: a path is not below the folder, or the files exceed the limit of the folder.
    """
    files = dict(files or {})
    for name in files:
        path = PurePosixPath(name)
        if not path.name or path.is_absolute() or ".." in path.parts or "\0" in name:
            raise ValueError(f"{name!r} is not a relative path below the program's folder")
    size = sum(map(len, files.values()))
    if size > limits.disk_mb * 2**20:
        raise ValueError(
            f"the files have {size} bytes, more than {limits.disk_mb} MiB (Limits.disk_mb)"
        )
    return files


def clean_input(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def readable_output(content: bytes, max_bytes: int) -> str:
    """Return output as text without NUL. Control characters become visible, such as x1b.

    The middle of long output is removed, and the number of omitted bytes is inserted.
    """
    if len(content) > max_bytes:
        head, tail = content[: max_bytes - max_bytes // 2], content[len(content) - max_bytes // 2 :]
        content = head + b"\n[%d bytes omitted]\n" % (len(content) - max_bytes) + tail
    text = content.decode("utf-8", "replace").replace("\0", "")
    return _CONTROL.sub(lambda m: f"\\x{ord(m.group()):02x}", text)
