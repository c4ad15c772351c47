"""`agentrl doctor`: check whether this machine has everything that a run needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import typer

from agentrl.terminal import echo

if TYPE_CHECKING:
    from agentrl.config import SandboxConfig

MIN_FREE_DISK = 10 * 2**30
"""The least number of bytes that a model and its checkpoints need."""

# The program tries to leave the sandbox. It prints the names of what it reached, and its user id.
_PROBE = """
import os, socket
try: socket.create_connection(("127.0.0.1", {port}), 2); print("network")
except OSError: pass
try: open({secret!r}).read(); print("files")
except OSError: pass
try:
    os.kill({pid}, 0)
    # The first process of a container and the first of the sandbox have the same id.
    if os.stat("/proc/self/ns/pid").st_ino == {namespace}: print("processes")
except OSError: pass
print("uid", os.getuid())
"""


class Outcome(NamedTuple):
    """A line of the report."""

    state: str
    """ok, note (works, but may need attention), missing (optional), failed."""
    subject: str
    text: str


def doctor(
    sandbox: str = "",
    image: str = "",
    output: str = "runs",
) -> None:
    """Report what works on this machine, and how to fix what does not.

    Runs a program in the sandbox that tries to leave it. Exit code 1 if something fails that every
    run needs, or that --sandbox names. `agentrl check` fails if the rows need a sandbox that does
    not work.

    Args:
        sandbox: Where model-written programs run (sandbox.backend). It must work then; by default
            bubblewrap is tried, which only tools and rewards that run programs need.
        image: With --sandbox docker or podman: an image of sandbox.images.
        output: The folder for runs.

    Examples:
        agentrl doctor

        agentrl doctor --sandbox podman --image python:3.12-slim

        agentrl doctor --sandbox http://127.0.0.1:8080
    """
    from agentrl.config import load_config

    flags = {"sandbox.backend": sandbox} if sandbox else {}
    images = {"sandbox.images": [image]} if image else {}
    config = load_config(flags={**flags, **images}).sandbox
    failed = False
    outcomes = (
        *_packages(),
        *_devices(),
        *_threads(),
        *_disks(output),
        *_sandbox(config, bool(sandbox)),
    )
    for outcome in outcomes:
        echo(f"{outcome.state:<8}{outcome.subject}: {outcome.text}")
        failed = failed or outcome.state == "failed"
    if failed:
        raise typer.Exit(1)


def _packages() -> Iterator[Outcome]:
    import platform
    from importlib.metadata import PackageNotFoundError, distribution, version

    from agentrl.installation import DISTRIBUTION, install_command

    yield Outcome("ok", "python", platform.python_version())
    with contextlib.suppress(PackageNotFoundError):
        other = distribution("agentrl")
        text = (
            f"the package {other.name} {other.version} is not this one, which is {DISTRIBUTION}."
            " Remove it, then install this one again:"
            f" pip uninstall {other.name} && {install_command()}"
        )
        yield Outcome("note", other.name, text)
    for name in ("torch", "transformers", "ray", "sglang", "vllm"):
        try:
            yield Outcome("ok", name, version(name))
        except PackageNotFoundError:
            if name not in ("sglang", "vllm"):
                yield Outcome("failed", name, f"not installed: {install_command()}")
                continue
            requirement = (
                f"rollout.name={name} needs it in this environment, or in the one of rollout.python"
            )
            text = f"not installed here; {requirement}: {install_command(name)}"
            yield Outcome("missing", name, text)


def _devices() -> Iterator[Outcome]:
    """Query the GPU driver, because importing torch takes seconds."""
    import shutil
    import subprocess

    if not (program := shutil.which("nvidia-smi")):
        yield Outcome("missing", "GPU", "none (no nvidia-smi): runs use the CPU")
        return
    command = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=4)
    except subprocess.TimeoutExpired:
        yield Outcome("failed", "GPU", "nvidia-smi does not answer: the driver hangs")
        return
    if completed.returncode:
        error = (completed.stdout or completed.stderr).strip().partition("\n")[0]
        yield Outcome("failed", "GPU", f"nvidia-smi: {error}")
        return
    for line in completed.stdout.splitlines():
        yield Outcome("ok", "GPU", line)


def _threads() -> Iterator[Outcome]:
    """Report the CPU threads of a learner in one process."""
    from agentrl.torch_threads import NUMBER, choose_threads

    threads = choose_threads()
    text = f"a learner uses {threads}; {NUMBER} sets another number"
    yield Outcome("ok" if threads.count <= threads.cores else "note", "threads", text)


def _disks(output: str) -> Iterator[Outcome]:
    import os
    import shutil
    from pathlib import Path

    cache = os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface"
    for subject, folder in (("runs", Path(output)), ("models", Path(cache))):
        path = folder.absolute()
        existing = next(p for p in (path, *path.parents) if p.exists())
        free = shutil.disk_usage(existing).free
        text = f"{free / 2**30:.0f} GiB free in {folder}"
        if not os.access(existing, os.W_OK):
            yield Outcome("failed", subject, f"{existing} is not writable")
        elif free < MIN_FREE_DISK:
            yield Outcome("note", subject, f"{text}: a model and its checkpoints may not fit")
        else:
            yield Outcome("ok", subject, text)


def _sandbox(config: SandboxConfig, is_required: bool) -> Iterator[Outcome]:
    import asyncio
    import shutil
    import subprocess

    from agentrl.sandbox import probe

    subject = f"sandbox {config.backend}"
    if config.backend == "bubblewrap" and (bwrap := shutil.which("bwrap")):
        completed = subprocess.run([bwrap, "--version"], capture_output=True, text=True, timeout=4)
        yield Outcome("ok", "bwrap", completed.stdout.strip().removeprefix("bubblewrap "))
    if problem := probe(config):
        if not is_required:
            problem = f"needed by tools and rewards that run programs, no others. {problem}"
        yield Outcome("failed" if is_required else "missing", subject, problem)
        return
    *reached, uid = asyncio.run(_probe_sandbox(config)).splitlines()
    if not reached:
        text = f"a program ran without access to network, files and processes, as {uid}"
        yield Outcome("ok", subject, text)
        if config.backend == "bubblewrap":
            yield _memory_limit()
        return
    state = "failed" if config.backend in ("bubblewrap", "docker", "podman") else "note"
    yield Outcome(state, subject, f"a program ran as {uid} and reached: {', '.join(reached)}")


def _memory_limit() -> Outcome:
    """Report whether there is a memory limit for all processes of a program together."""
    from agentrl.sandbox.cgroup import find_parent

    if parent := find_parent():
        return Outcome("ok", "sandbox memory", f"each program gets a cgroup in {parent.folder}")
    text = "cannot create cgroups: only the container's memory limit applies to a whole program"
    return Outcome("note", "sandbox memory", text)


async def _probe_sandbox(config: SandboxConfig) -> str:
    """Run a program in the sandbox; return what it reached outside, and its user id, as lines."""
    import os
    import socket
    import tempfile
    from pathlib import Path

    from agentrl.sandbox.settings import open_sandbox

    sandbox = open_sandbox(config)
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.NamedTemporaryFile() as file:
        os.chmod(file.name, 0o644)
        port = server.getsockname()[1]
        namespace = Path("/proc/self/ns/pid")
        program = _PROBE.format(
            port=port,
            secret=file.name,
            pid=os.getpid(),
            namespace=namespace.stat().st_ino if namespace.exists() else 0,
        )
        completed = await sandbox.run(program)
    await sandbox.aclose()
    return completed.stdout.strip() or f"no output: {completed}"
