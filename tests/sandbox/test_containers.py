"""The sandbox in containers: real ones of Podman, and of Docker what works without its service."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.containers import IMAGE, OTHER, needs_podman, prepare
from support.sandbox_conformance import CHECKS
from typer.testing import CliRunner

from agentrl import sandbox
from agentrl.cli import app
from agentrl.config import SandboxConfig, load_config
from agentrl.errors import ConfigError, SandboxError
from agentrl.sandbox import Limits
from agentrl.sandbox.container import Container
from agentrl.sandbox.settings import open_sandbox

ROOT = Path(__file__).parents[2]


@pytest.fixture
def podman(monkeypatch):
    monkeypatch.setenv("CONTAINERS_CONF", prepare())


@asynccontextmanager
async def opened(**keys):
    place = open_sandbox(SandboxConfig(**{"backend": "podman", "images": [IMAGE, OTHER], **keys}))
    try:
        yield place
    finally:
        await place.aclose()


def warm_tasks(place):
    assert isinstance(place, Container)
    return place._warm


def containers(pid=None):
    label = f"label=agentrl.pid={pid or os.getpid()}"
    command = ["podman", "ps", "--all", "--quiet", "--filter", label]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@needs_podman
@pytest.mark.parametrize(
    "check",
    [
        c if c.isolating else pytest.param(c, marks=pytest.mark.slow)
        for c in CHECKS
        if not c.empty_root
    ],
    ids=lambda c: c.name,
)
async def test_podman_conforms(check, podman):
    async with opened() as place:
        await check.run(place)
    assert containers() == []


@needs_podman
async def test_programs_and_boxes_run_in_an_image_of_the_list_only(podman):
    code = "import os; print(os.path.exists('/other'))"
    async with opened() as place:
        assert (await place.run(code)).stdout == "False\n"
        assert (await place.run(code, image=OTHER)).stdout == "True\n"
        box = await place.open(image=OTHER, files={"a/b": b"in a folder"})
        assert (await box.run(code)).stdout == "True\n"
        assert await box.read("a/b") == b"in a folder"
        # Another driver of the same box has the same image.
        subprocess.run(["podman", "kill", *containers()], check=False, capture_output=True)
        await asyncio.sleep(1)
        assert (await box.run(code)).stdout == "True\n"
        await box.aclose()
        for refused in (place.run(code, image="busybox"), place.open(image="busybox")):
            with pytest.raises(SandboxError, match=f"'busybox' is not in sandbox.images: {IMAGE}"):
                await refused


async def test_other_backends_refuse_images():
    async with opened(backend="unsafe-subprocess", images=[]) as place:
        for refused in (place.run("1", image="x"), place.open(image="x")):
            with pytest.raises(SandboxError, match=r"no images, so image='x' needs .*docker or"):
                await refused


@needs_podman
async def test_the_limits_of_a_whole_container(podman):
    forks = (
        "import os, time\nn = 0\ntry:\n    while n < 60:\n"
        "        if os.fork() == 0: time.sleep(1000)\n        n += 1\n"
        "except OSError: print('refused after', n)\n"
    )
    large = (  # more than memory_mb + disk_mb + 64 MiB, in processes that each stay below memory_mb
        "import os, time\nfor _ in range(4):\n"
        "    if os.fork() == 0:\n        x = b'x' * (200 << 20); time.sleep(1000)\n"
        "time.sleep(1.5)\n"
        "print(sum(os.waitpid(-1, os.WNOHANG)[0] > 0 for _ in range(4)) > 0)\n"
    )
    async with opened() as place:
        done = await place.run(forks, limits=Limits(processes=32))
        assert done.stdout == "refused after 31\n", done
        done = await place.run(large, limits=Limits(memory_mb=256, disk_mb=8))
        assert done.ended_by == "signal" or done.stdout == "True\n", done


@needs_podman
async def test_later_programs_get_containers_that_are_ready(podman):
    async with opened(slots=2) as place:
        await place.run("1")
        assert containers() == []  # one program alone starts no others
        box = await place.open(limits=Limits(seconds=0.5, open_files=50))
        await asyncio.gather(*warm_tasks(place))
        assert len(containers()) == 3
        code = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
        box2 = await place.open(limits=Limits(seconds=0.5, open_files=50))
        assert (await box2.run(code)).stdout == "50\n"
        assert (await box2.run("while True: pass")).ended_by == "time"
        await box.aclose()
        await box2.aclose()
        # A container that has died meanwhile is not used.
        await asyncio.gather(*warm_tasks(place))
        subprocess.run(["podman", "kill", *containers()], check=True, capture_output=True)
        assert (await place.run("print(1)")).stdout == "1\n"
    assert containers() == []


PARENT = """
import asyncio, sys
from agentrl.config import SandboxConfig
from agentrl.sandbox.container import Container
from agentrl.sandbox.settings import open_sandbox

async def main():
    place = open_sandbox(SandboxConfig(backend="podman", images=[sys.argv[1]]))
    box = await place.open()
    await box.run("import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)")
    sleep = asyncio.ensure_future(place.run("import time; time.sleep(1000)"))
    await asyncio.sleep(1.5)
    print("ready", flush=True)
    await sleep

asyncio.run(main())
"""


@needs_podman
@pytest.mark.parametrize("whole_group", [False, True])
def test_containers_end_with_a_process_that_was_killed(whole_group, podman):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, IMAGE], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == "ready\n"
        assert len(containers(parent.pid)) >= 2
        clients = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    for client in clients if whole_group else []:
        os.kill(int(client), 9)
    until = time.monotonic() + 20
    while containers(parent.pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert containers(parent.pid) == []


@needs_podman
async def test_an_image_that_is_missing_or_has_no_python_is_an_error_with_its_remedy(podman):
    async with opened(images=["localhost/none:1"]) as place:
        for refused in (place.run("1"), place.open()):
            with pytest.raises(SandboxError, match="podman pull localhost/none:1"):
                await refused
    assert "podman pull" in sandbox.probe(SandboxConfig(backend="podman", images=["none:1"]))
    async with opened(python="/opt/none/python3") as place:
        with pytest.raises(SandboxError, match=r"sandbox\.python"):
            await place.run("1")
    assert containers() == []


@needs_podman
async def test_a_python_without_standard_modules_is_an_error_with_its_remedy(podman):
    # Debian's python3-minimal has no json.
    part, image = f"agentrl-{os.getpid()}-part", "localhost/agentrl-test-part:1"
    remove = "import os, shutil; shutil.rmtree(os.path.dirname(os.__file__) + '/json')"
    for words in (
        ["run", "--name", part, "--network", "none", IMAGE, "/usr/bin/python3", "-c", remove],
        ["commit", "-q", part, image],
        ["rm", part],
    ):
        subprocess.run(["podman", *words], check=True, capture_output=True)
    try:
        async with opened(images=[image]) as place:
            with pytest.raises(SandboxError, match=f"The Python of {image} lacks standard modules"):
                await place.run("1")
    finally:
        subprocess.run(["podman", "rmi", image], check=True, capture_output=True)


def test_an_engine_without_images_is_a_contradiction():
    with pytest.raises(ConfigError, match=r"sandbox.backend=podman needs the images .* set"):
        load_config(None, ["sandbox.backend=podman"])
    with pytest.raises(SandboxError, match=r"set sandbox\.images"):
        open_sandbox(SandboxConfig(backend="docker"))


def test_an_engine_that_is_not_installed_is_named_with_its_package(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    problem = sandbox.probe(SandboxConfig(backend="docker", images=["x"]))
    assert problem.startswith("docker is not installed") and "apt-get install docker.io" in problem


@pytest.mark.skipif(not shutil.which("docker"), reason="no docker client")
def test_a_docker_that_does_not_run_is_an_error_with_its_remedy(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    problem = sandbox.probe(SandboxConfig(backend="docker", images=["x"]))
    assert "cannot start a container of x" in problem and "systemctl start docker" in problem


@needs_podman
def test_doctor_tries_an_image(podman, tmp_path):
    words = ["--sandbox", "podman", "--image", IMAGE, "--output", str(tmp_path)]
    done = CliRunner().invoke(app, ["doctor", *words])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == (
        "ok      sandbox podman: a program ran without access to network, files and processes,"
        " as uid 65534"
    )
