"""The files in deploy/ can be read, and the commands in them are commands of agentrl."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from agentrl import load_config

DEPLOY = Path(__file__).parents[2] / "deploy"


def commands(text):
    """The `agentrl train` commands of a file, with numbers in place of variables."""
    text = re.sub(r'"?\$\{?\w+\}?(/[\w./]+|:\d+)?"?', "2", text.replace("\\\n", " "))
    return re.findall(r"agentrl train ([^\n&]+)", text)


@pytest.mark.parametrize("name", ["slurm.sbatch", "kuberay.yaml", "skypilot.yaml"])
def test_the_keys_of_the_command_exist(name):
    text = (DEPLOY / name).read_text()
    if name == "kuberay.yaml":
        text = yaml.safe_load(text)["spec"]["entrypoint"]
    [command] = commands(text)
    words = shlex.split(command)
    assert words[0] == "-c" and words[1].endswith(("run.yaml", "2"))
    config = load_config(overrides=words[2:])
    assert config.trainer.nnodes == 2 and config.trainer.ray_address and config.trainer.max_restarts


def test_the_scripts_are_those_of_bash():
    for name in ("slurm.sbatch", "try_wheel.sh"):
        assert subprocess.run(["bash", "-n", DEPLOY / name]).returncode == 0


def test_every_container_has_the_token_and_the_shared_folders():
    cluster = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in (group["template"]["spec"] for group in groups):
        [container] = pod["containers"]
        env = {e["name"]: e for e in container["env"]}
        mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
        assert env["RAY_AUTH_MODE"]["value"] == "token" and "RAY_AUTH_TOKEN" in env
        assert env["TMPDIR"]["value"] in mounts and {*mounts.values()} == {
            volume["name"] for volume in pod["volumes"]
        }


def test_the_images_run_as_a_user_and_copy_files_that_exist():
    text = (DEPLOY / "Dockerfile").read_text()
    stages = re.split(r"^FROM ", text, flags=re.M)[1:]
    named = {stage.split()[2]: stage for stage in stages}
    for name in ("cpu", "cuda"):
        assert re.findall(r"^USER (\S+)", named[name], flags=re.M) == ["agentrl"]
        assert "HEALTHCHECK" in named[name]
        for line in re.findall(r"^RUN .*?(?<!\\)$", named[name], flags=re.M | re.S):
            assert "apt-get install" not in line or "rm -rf /var/lib/apt/lists" in line
    for source in re.findall(r"^COPY (?!--from)(\S+)", text, flags=re.M):
        assert (DEPLOY.parent / source).exists(), source
