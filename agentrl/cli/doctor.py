"""`agentrl doctor`: what of this machine a run can count on, found out by trying."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

if TYPE_CHECKING:
    from agentrl.config import SandboxConfig

LITTLE_DISK = 10 * 2**30
"""Bytes: less does not hold a model and its checkpoints."""

# Tries to leave the sandbox; prints what it could do, and who it is.
_OUT = """
import os, socket
try: socket.create_connection(("127.0.0.1", {port}), 2); print("network")
except OSError: pass
try: open({secret!r}).read(); print("files")
except OSError: pass
try: os.kill({pid}, 0); print("processes")
except OSError: pass
print("uid", os.getuid())
"""


class Finding(NamedTuple):
    """A line of the report."""

    state: str
    """ok, note (works, but look at it), missing (optional), failed."""
    what: str
    said: str


def doctor(
    sandbox: Annotated[
        str, typer.Option(help="Where model-written programs would run: the key sandbox.backend.")
    ] = "bubblewrap",
    output: Annotated[str, typer.Option(help="Where runs would be written.")] = "runs",
) -> None:
    """Say what works on this machine, and how to mend what does not.

    A real program is run in the sandbox and tries to leave it. Ends with code 1 if anything fails
    that a run needs.

    Examples:
        agentrl doctor

        agentrl doctor --sandbox http://127.0.0.1:8080
    """
    from agentrl.config import load_config

    config = load_config(flags={"sandbox.backend": sandbox}).sandbox
    failed = False
    for finding in (*_packages(), *_devices(), *_disks(output), *_sandbox(config)):
        typer.echo(f"{finding.state:<8}{finding.what}: {finding.said}")
        failed = failed or finding.state == "failed"
    if failed:
        raise typer.Exit(1)


def _packages() -> Iterator[Finding]:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    yield Finding("ok", "python", platform.python_version())
    for name in ("torch", "transformers", "ray", "sglang", "vllm"):
        try:
            yield Finding("ok", name, version(name))
        except PackageNotFoundError:
            if name not in ("sglang", "vllm"):
                yield Finding("failed", name, "not installed: pip install agentrl")
                continue
            where = f"rollout.name={name} needs it here, or in one that rollout.python names"
            yield Finding("missing", name, f"not in this environment; {where}: pip install {name}")


def _devices() -> Iterator[Finding]:
    """The driver is asked: torch takes seconds to be loaded."""
    import shutil
    import subprocess

    if not (program := shutil.which("nvidia-smi")):
        yield Finding("missing", "GPU", "none found (no nvidia-smi): runs use the CPU")
        return
    asked = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=4)
    except subprocess.TimeoutExpired:
        yield Finding("failed", "GPU", "nvidia-smi does not answer: the driver hangs")
        return
    if done.returncode:
        said = (done.stdout or done.stderr).strip().partition("\n")[0]
        yield Finding("failed", "GPU", f"nvidia-smi: {said}")
        return
    for line in done.stdout.splitlines():
        yield Finding("ok", "GPU", line)


def _disks(output: str) -> Iterator[Finding]:
    import os
    import shutil
    from pathlib import Path

    cache = os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface"
    for what, folder in (("runs", Path(output)), ("models", Path(cache))):
        path = folder.absolute()
        there = next(p for p in (path, *path.parents) if p.exists())
        free = shutil.disk_usage(there).free
        said = f"{free / 2**30:.0f} GiB free in {folder}"
        if not os.access(there, os.W_OK):
            yield Finding("failed", what, f"{there} cannot be written to")
        elif free < LITTLE_DISK:
            yield Finding("note", what, f"{said}: a model and its checkpoints may not fit")
        else:
            yield Finding("ok", what, said)


def _sandbox(config: SandboxConfig) -> Iterator[Finding]:
    import asyncio
    import shutil
    import subprocess

    from agentrl.sandbox import probe

    what = f"sandbox {config.backend}"
    if config.backend == "bubblewrap" and (bwrap := shutil.which("bwrap")):
        done = subprocess.run([bwrap, "--version"], capture_output=True, text=True, timeout=4)
        yield Finding("ok", "bwrap", done.stdout.strip().removeprefix("bubblewrap "))
    if problem := probe(config):
        yield Finding("failed", what, problem)
        return
    *reached, uid = asyncio.run(_reached(config)).splitlines()
    if not reached:
        yield Finding("ok", what, f"a program ran without network, files or processes, as {uid}")
        if config.backend == "bubblewrap":
            yield _memory_limit()
        return
    state = "failed" if config.backend == "bubblewrap" else "note"
    yield Finding(state, what, f"a program ran as {uid} and reached: {', '.join(reached)}")


def _memory_limit() -> Finding:
    """Say whether the memory of a program's processes together has a limit."""
    from agentrl.sandbox.cgroup import find_parent

    if parent := find_parent():
        return Finding("ok", "sandbox memory", f"each program gets a cgroup in {parent.folder}")
    none = "no cgroup can be made here: only a memory limit of the container bounds a program"
    return Finding("note", "sandbox memory", none)


async def _reached(config: SandboxConfig) -> str:
    """What of ours a program could reach."""
    import os
    import socket
    import tempfile

    from agentrl.sandbox.settings import open_sandbox

    place = open_sandbox(config)
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.NamedTemporaryFile() as file:
        os.chmod(file.name, 0o644)
        port = server.getsockname()[1]
        done = await place.run(_OUT.format(port=port, secret=file.name, pid=os.getpid()))
    await place.aclose()
    return done.stdout.strip() or f"nothing said: {done}"
