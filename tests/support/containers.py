"""A small image for tests of containers, made of this machine's own Python, shell and libraries."""

from __future__ import annotations

import io
import os
import re
import resource
import shutil
import subprocess
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import pytest

IMAGE = "localhost/agentrl-test:1"
OTHER = "localhost/agentrl-test-other:1"
"""The same, with the file /other."""
PROGRAMS = ("bash", "sh", "cat", "mkdir", "sleep", "id", "find", "wc", "unshare", "su", "true",
            "rm")  # fmt: skip
needs_podman = pytest.mark.skipif(
    not shutil.which("podman") and not os.environ.get("CI"),
    reason="no podman: install podman and runc",
)


@cache
def prepare() -> str:
    """Make the images, once for this machine. Return a file for CONTAINERS_CONF that works here."""
    path = Path(tempfile.gettempdir(), f"agentrl-test-containers-{os.geteuid()}.conf")
    files = min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    runtime = 'runtime = "runc"\n' if shutil.which("runc") else ""
    path.write_text(
        f'[engine]\n{runtime}cgroup_manager = "cgroupfs"\n[containers]\n'
        f'default_ulimits = ["nofile={files}:{files}", "nproc=1024:1024"]\n'
    )
    for name, more in ((IMAGE, ()), (OTHER, ("other",))):
        if subprocess.run(["podman", "image", "exists", name], check=False).returncode:
            _make(name, more)
    return str(path)


def _make(name: str, more: tuple[str, ...]) -> None:
    python = Path("/usr/bin/python3").resolve()
    library = Path("/usr/lib", python.name)
    binaries = [Path(p) for n in PROGRAMS if (p := shutil.which(n))] + [python]
    needed = {*binaries, *_libraries([*binaries, *library.glob("lib-dynload/*.so")])}
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        with tarfile.open(fileobj=file, mode="w", dereference=True) as tar:
            for folder in ("tmp", "etc", "dev", "proc", "sys", "run"):
                entry = tarfile.TarInfo(folder)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
                tar.addfile(entry)
            for link, target in (("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")):
                entry = tarfile.TarInfo(link)
                entry.type, entry.linkname = tarfile.SYMTYPE, target
                tar.addfile(entry)
            for path in sorted(needed):
                # /bin, /lib and /lib64 are links into /usr, here too.
                tar.add(path, "/usr/" + str(path).removeprefix("/usr").lstrip("/"))
            tar.add(python, "/usr/bin/python3")
            tar.add(library, str(library), filter=_stdlib)
            for text_file in (*more, "etc/passwd"):
                entry, text = tarfile.TarInfo(text_file), b"nobody:x:65534:65534::/:/bin/sh\n"
                entry.size = len(text)
                tar.addfile(entry, io.BytesIO(text))
        file.flush()
        subprocess.run(["podman", "import", "-q", file.name, name], check=True, timeout=120)


def _libraries(binaries: list[Path]) -> set[Path]:
    """Return the shared libraries of programs."""
    text = subprocess.run(
        ["ldd", *map(str, binaries)], capture_output=True, text=True, check=False
    ).stdout
    return {Path(p) for p in re.findall(r"(?:=> |^\t)(/\S+) \(", text, re.MULTILINE)}


def _stdlib(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    left_out = ("__pycache__", "/test", "/idlelib", "/lib2to3", "/config-", "/ensurepip", "/pydoc")
    return None if any(word in entry.name for word in left_out) else entry
