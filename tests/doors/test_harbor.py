"""Tasks of Harbor in containers of podman: rows, episodes, failures, and nothing left."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
import uuid
from pathlib import Path

import pytest
from support.at_once import play_at_once

from agentrl import load_config, play, registry
from agentrl.cli import main
from agentrl.demo import TINY_SETTINGS
from agentrl.doors.program import program
from agentrl.errors import DataError, Infrastructure, ToolError, UserCodeError, UserError
from agentrl.preflight import make_plan
from agentrl.record import METRICS, read_metrics
from agentrl.sandbox.program import slot_count
from agentrl.testing import Scripted, byte_tokenizer, call
from agentrl.trainer import Trainer

pytestmark = [pytest.mark.doors, pytest.mark.timeout(600)]

TOKENIZER = byte_tokenizer()
IMAGE = "agentrl.test/harbor-tools:1"
TOOLS = (
    "bash", "base64", "cat", "chmod", "chown", "cp", "dirname", "env", "false", "find", "head",
    "id", "ls", "mkdir", "mv", "printf", "rm", "seq", "sleep", "sort", "tail", "tar", "gzip",
    "tee", "timeout", "touch", "tr", "true", "wc",
)  # fmt: skip
CONF = """
[engine]
runtime = "runc"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
"""
TEST = 'v=0; [ "$(cat /fruit 2>/dev/null)" = apple ] && v=1; echo $v > /logs/verifier/reward.txt\n'
SOLVE = "#!/bin/bash\ncat $(dirname $0)/answer > /fruit\n"
PODMAN = "sandbox.backend=harbor:podman"


def podman(*words, **options):
    return subprocess.run(["podman", *words], capture_output=True, text=True, **options)


def make_image(folder: Path) -> None:
    """Make an image of this machine's tools: no registry can be reached in tests."""
    root = folder / "root"
    for name in ("usr/bin", "usr/lib", "usr/lib64", "etc", "tmp", "proc", "dev", "root"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    files = {shutil.which(tool) for tool in TOOLS} | {*filter(None, [shutil.which("tmux")])}
    shown = subprocess.run(["ldd", *files], capture_output=True, text=True).stdout
    for file in files | {*re.findall(r"(/\S+) \(0x", shown)}:
        copy = root / "usr" / file.removeprefix("/").removeprefix("usr/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    (root / "usr/bin/sh").symlink_to("bash")
    for data in ("usr/lib/terminfo", "usr/lib/locale/C.utf8"):  # tmux needs both
        if Path("/", data).exists():
            shutil.copytree(Path("/", data), root / data)
    with tarfile.open(folder / "image.tar", "w") as archive:
        archive.add(root, "/")
    podman("import", str(folder / "image.tar"), IMAGE, check=True)


@pytest.fixture(scope="module")
def containers(tmp_path_factory):
    """Return the environment variables with which podman works on this machine."""
    if shutil.which("podman") is None:
        pytest.skip("no podman")
    folder = tmp_path_factory.mktemp("podman")
    (folder / "containers.conf").write_text(CONF if shutil.which("runc") else "")
    variables = {"CONTAINERS_CONF": str(folder / "containers.conf")}
    if podman("image", "exists", IMAGE).returncode:
        make_image(folder)
    words = ["run", "--rm", "--network=none", IMAGE, "true"]
    done = podman(*words, env=os.environ | variables)
    if done.returncode:
        pytest.skip(f"podman runs no container here: {done.stderr[-500:]}")
    return variables


class World:
    """A folder of tasks whose containers have a name of their own."""

    def __init__(self, folder: Path):
        self.folder, self.prefix = folder, f"t{uuid.uuid4().hex[:8]}"
        folder.mkdir()

    def task(self, name="apple", *, test=TEST, toml="", image=IMAGE) -> Path:
        path = self.folder / f"{self.prefix}-{name}"
        for part in ("environment", "tests", "solution"):
            (path / part).mkdir(parents=True)
        (path / "task.toml").write_text(
            f'version = "1.0"\n[environment]\ndocker_image = "{image}"\n{toml}'
        )
        (path / "environment/docker-compose.yaml").write_text(
            "services:\n  main:\n    network_mode: none\n    stop_grace_period: 0s\n"
        )
        (path / "instruction.md").write_text("Write apple into /fruit.\n")
        (path / "tests/test.sh").write_text(test)
        (path / "solution/solve.sh").write_text(SOLVE)
        (path / "solution/answer").write_text("apple\n")
        return path

    def samples(self, *overrides):
        return list(make_plan(self.config(*overrides)).train)

    def config(self, *overrides, options=""):
        address = f"harbor:{self.folder}{options}"
        budgets = [
            "rollout.timeout_s=300", "rollout.max_turns=30", "tools.max_result_tokens=20000",
            "rollout.max_trajectory_tokens=60000",
        ]  # fmt: skip
        return load_config(None, [PODMAN, *budgets, *overrides], {"data.train": address})

    def play(self, *texts):
        """Play the only task."""
        config = self.config()
        [sample] = make_plan(config).train
        return play(sample, Scripted([*texts, "done"], TOKENIZER), TOKENIZER, config=config)

    def left(self, seconds=40.0) -> list[str]:
        """Return the containers and folders that are left, after at most so many seconds."""
        deadline = time.monotonic() + seconds
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.5)
        return left

    def containers(self) -> list[str]:
        names = podman("ps", "-a", f"--filter=name={self.prefix}", "--format={{.Names}}").stdout
        return names.split()

    def _left(self) -> list[str]:
        folders = Path(os.environ["TMPDIR"]).glob("agentrl-harbor-*")
        return [*self.containers(), *map(str, folders)]


@pytest.fixture
def world(use_packages, containers, tmp_path, monkeypatch):
    use_packages("harbor")
    for name, value in containers.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    world = World(tmp_path / "fruits")
    yield world
    assert world.left() == []


def bash(command, **options):
    return call("bash", command=command, **options)


def results(trajectory):
    return [m.content for m in trajectory.messages if m.role == "tool"]


@pytest.mark.proves("harbor", "rows")
def test_rows_are_those_of_the_tasks(world):
    first, second = world.task("a"), world.task("b")
    samples = world.samples()
    assert [s.tools_kwargs["harbor"]["create_kwargs"]["task"] for s in samples] == [
        str(first), str(second),
    ]  # fmt: skip
    assert samples[0].prompt[0].content == "Write apple into /fruit.\n"
    assert (samples[0].data_source, samples[0].environment) == ("harbor/fruits", "harbor")
    [one] = make_plan(load_config(None, [PODMAN], {"data.train": f"harbor:{second}"})).train
    assert one.tools_kwargs["harbor"]["create_kwargs"]["task"] == str(second)


def test_tasks_that_cannot_be_played_are_refused_by_name(world):
    world.task("good")
    world.task("steps", toml='[[steps]]\nname = "one"\n')
    world.task("windows", toml='os = "windows"\n')
    world.task("skills", toml='skills_dir = "/skills"\n')
    (world.task("untested") / "tests/test.sh").unlink()
    (world.task("broken") / "task.toml").write_text("version = [")
    with pytest.raises(DataError) as raised:
        world.samples()
    text = str(raised.value)
    assert "-good:" not in text
    for pattern in (
        r"-steps: .*step", r"-windows: .*tests/test\.bat", r"-skills: it has skills, which",
        r"-untested: .*tests/test\.sh", r"-broken: ",
    ):  # fmt: skip
        assert re.search(pattern, text), (pattern, text)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("harbor:podmann", "no backend 'podmann'. Did you mean podman"),
        ("harbor:podman?keep=1", "Unknown option 'keep'"),
        ("harbor:e2b", "=harbor:e2b: harbor: .*the backend e2b does not work.*E2B_API_KEY"),
        ("harbor:modal", r"the backend modal does not work.*pip install 'harbor\[modal\]'"),
        ("bubblewrap", r"\(rows of Harbor use docker then\): .*the backend docker does not work"),
    ],
)
def test_a_backend_that_does_not_work_is_refused_before_rows_are_played(
    world, monkeypatch, backend, message
):
    world.task()
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    monkeypatch.setenv("MODAL_TOKEN_ID", "x")
    monkeypatch.setenv("MODAL_TOKEN_SECRET", "x")
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    with pytest.raises(UserError, match=re.compile(message, re.DOTALL)):
        world.samples(f"sandbox.backend={backend}")


def test_an_image_that_podman_compose_would_remove_is_refused(world):
    world.task(image="localhost/tools:1")
    with pytest.raises(UserError, match=r"podman tag localhost/tools:1 example.org/tools:1"):
        world.samples()


def test_programs_of_tools_do_not_run_in_a_backend_of_harbor(tmp_path):
    from agentrl import sandbox

    config = load_config(None, [PODMAN]).sandbox
    assert "is for the rows of harbor:DIR alone" in sandbox.probe(config)


def test_rows_cannot_name_tasks_of_other_folders(world, tmp_path):
    world.task()
    [sample] = world.samples()
    other = World(tmp_path / "others").task()
    sample.tools_kwargs["harbor"]["create_kwargs"]["task"] = str(other)
    with pytest.raises(UserCodeError, match="the config does not name the task"):
        play(sample, Scripted(["done"], TOKENIZER), TOKENIZER, config=world.config())


@pytest.mark.parametrize("chosen", [{"task": ".."}, {"multiplier": 1e9}])
def test_rows_cannot_leave_the_folder_or_choose_settings(world, chosen):
    path = world.task()
    [sample] = world.samples()
    shutil.copytree(path, world.folder, dirs_exist_ok=True)
    shutil.move(world.folder / "task.toml", world.folder.parent / "task.toml")
    if "task" in chosen:
        chosen = {"task": f"{world.folder}/.."}
    sample.tools_kwargs["harbor"]["create_kwargs"].update(chosen)
    with pytest.raises(UserCodeError, match="the config does not name the task"):
        play(sample, Scripted(["done"], TOKENIZER), TOKENIZER, config=world.config())


def test_rows_cannot_choose_the_agent_or_the_address_of_the_gateway(world):
    world.task()
    config = world.config(options="?agent=nop")
    for chosen in ({"gateway": "0.0.0.0"}, {"agent": "oracle"}, {"agent": ""}):
        [sample] = make_plan(config).train
        sample.extra["harbor"].update(chosen)
        with pytest.raises(UserCodeError, match="the config does not name the task"):
            play(sample, Scripted(["done"], TOKENIZER), TOKENIZER, config=config)


@pytest.mark.proves("harbor", "tools", "reward", "sandbox")
def test_a_task_is_solved_or_not(world):
    world.task()
    assert world.play(bash("echo apple > /fruit")).scores.outcome == 1.0
    assert world.play(bash("echo pear > /fruit")).scores.outcome == 0.0


def test_named_rewards_become_metrics(world):
    world.task(test="""echo '{"style": 0.25, "reward": 0.5}' > /logs/verifier/reward.json\n""")
    scores = world.play().scores
    assert (scores.outcome, dict(scores.metrics)) == (0.5, {"style": 0.25})


def test_without_a_reward_of_this_name_the_first_one_counts(world):
    world.task(test="""echo '{"speed": 0.75, "style": 0.25}' > /logs/verifier/reward.json\n""")
    scores = world.play().scores
    assert (scores.outcome, dict(scores.metrics)) == (0.75, {"style": 0.25})


def test_a_separate_verifier_gets_the_artifacts(world):
    test = 'v=0; [ "$(cat /logs/artifacts/fruit)" = apple ] && [ ! -e /trace ] && v=1\n'
    path = world.task(
        test=test + "echo $v > /logs/verifier/reward.txt\n",
        toml='[verifier]\nenvironment_mode = "separate"\n',
    )
    assert path.exists()
    played = world.play(bash("touch /trace; echo apple > /logs/artifacts/fruit"))
    assert played.scores.outcome == 1.0


def test_the_model_reads_output_exit_codes_and_time_limits(world):
    world.task()
    start = time.monotonic()
    played = world.play(
        bash("echo out; echo err >&2; exit 3"),
        bash("x=1; cd /tmp; true"),
        bash("echo $x; pwd"),
        bash("seq 1 20000"),
        bash("sleep 60", timeout_s=2),
        bash("sleep 60 & echo started"),
        bash("kill -9 $$"),
    )
    shown = results(played)
    assert shown[0] == "out\nerr\n[exit code 3]"
    assert shown[1:3] == ["(no output)", "/"]
    assert re.search(
        r"^1\n2\n.*\n\[\.\.\. \d+ characters \.\.\.\]\n.*\n20000$", shown[3], re.DOTALL
    )
    assert len(shown[3]) < 10_100
    assert shown[4] == "[timed out after 2 s]"
    assert shown[5] == "started"
    assert shown[6] == "[exit code 137]"
    assert time.monotonic() - start < 45


def test_a_command_that_linux_cannot_start_is_refused(world):
    path = world.task()
    world.samples()

    async def run():
        door = program("harbor")
        settings = {"task": str(path), "backend": "podman", "options": {}}
        await door.call("start", episode="one", **settings)
        for command in ("x" * 110_000, "echo \0"):
            with pytest.raises(ToolError, match="a command has at most 100000 bytes"):
                await door.call("bash", episode="one", command=command, timeout_s=5)
        shown = await door.call("bash", episode="one", command="echo yes", timeout_s=5)
        await door.call("end", episode="one")
        return shown

    assert asyncio.run(run()) == "yes"


def test_the_time_limit_of_the_task_is_a_normal_end(world):
    world.task(toml="[agent]\ntimeout_sec = 4\n")
    played = world.play(bash("echo apple > /fruit"), bash("sleep 60"), bash("echo pear > /fruit"))
    assert results(played)[1:] == ["[the task's time limit is over: no more commands are run]"] * 2
    assert played.scores.outcome == 1.0


def test_a_multiplier_extends_the_time_limit(world):
    world.task(toml="[agent]\ntimeout_sec = 2\n")
    config = world.config(options="?agent_timeout_multiplier=10")
    [sample] = make_plan(config).train
    texts = [bash("sleep 3; echo apple > /fruit"), "done"]
    assert play(sample, Scripted(texts, TOKENIZER), TOKENIZER, config=config).scores.outcome == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test": "true\n"}, "RewardFileNotFoundError"),
        ({"test": "echo good > /logs/verifier/reward.txt\n"}, "VerifierOutputParseError"),
        ({"test": "echo nan > /logs/verifier/reward.txt\n"}, "VerifierOutputParseError"),
        ({"test": "sleep 60\n", "toml": "[verifier]\ntimeout_sec = 2\n"}, "VerifierTimeoutError"),
        ({"image": "agentrl.test/missing:1"}, "agentrl.test/missing:1"),
        (
            {"toml": '[environment.healthcheck]\ncommand = "false"\ninterval_sec = 0.1\n'},
            "HealthcheckError|[Hh]ealth",
        ),
    ],
)
def test_failures_of_the_task_have_no_reward(world, options, message):
    world.task(**options)
    with pytest.raises(Infrastructure, match=message):
        world.play(bash("echo apple > /fruit"))


def test_a_sandbox_that_dies_has_no_reward(world):
    world.task()

    class Kills(Scripted):
        async def generate(self, *words, **options):
            podman("rm", "-f", "-t", "0", *world.containers())
            return await super().generate(*words, **options)

    config = world.config()
    [sample] = make_plan(config).train
    with pytest.raises(Infrastructure, match="the sandbox does not answer"):
        play(sample, Kills([bash("true"), "done"], TOKENIZER), TOKENIZER, config=config)


def test_a_cancelled_episode_leaves_nothing(world):
    world.task()
    config = world.config("rollout.timeout_s=6")
    [sample] = make_plan(config).train
    played = play(sample, Scripted([bash("sleep 60"), "x"], TOKENIZER), TOKENIZER, config=config)
    assert played.stop_reason == "time"


@pytest.mark.parametrize("moment", ["starting", "commands"])
def test_a_killed_run_leaves_nothing(world, tmp_path, moment):
    world.task()
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(f"""
        from agentrl import load_config, play
        from agentrl.preflight import make_plan
        from agentrl.testing import Scripted, byte_tokenizer, call

        config = load_config(None, ["{PODMAN}"], {{"data.train": "harbor:{world.folder}"}})
        [sample] = make_plan(config).train
        print("start", flush=True)
        texts = [call("bash", command="echo here; sleep 100"), "done"]
        play(sample, Scripted(texts, byte_tokenizer()), byte_tokenizer(), config=config)
        """)
    )
    run = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert run.stdout and run.stdout.readline() == "start\n"
    if moment == "commands":
        deadline = time.monotonic() + 60
        while not world.containers() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(4)
        assert world.containers()
    else:
        time.sleep(4.2)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert world.left() == []


def play_many(world, episodes):
    """Play episodes of two answers at once. No more containers than slots run at a time."""
    for number in range(4):
        world.task(str(number))
    samples = world.samples()

    def script(sample):
        fruit = "apple" if sample.row % 2 else "pear"
        return [bash(f"echo {fruit} > /fruit; ls -d /fruit", timeout_s=1500), "done"]

    start, most, over = time.monotonic(), [0], threading.Event()

    def watch():
        while not over.wait(1.0):
            most.append(len(world.containers()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        played = play_at_once(samples * (episodes // 4), script, TOKENIZER, [PODMAN])
    finally:
        over.set()
        watcher.join()
    print(f"{episodes} episodes: {time.monotonic() - start:.1f} s, {max(most)} containers")
    assert 0 < max(most) <= slot_count(0)
    assert len(played) == episodes and all(results(t) == ["/fruit"] for t in played)
    assert [t.scores.outcome for t in played] == [float(t.sample.row % 2) for t in played]
    assert world.left() == []


@pytest.mark.load
def test_20_episodes_at_once(world):
    play_many(world, 20)


@pytest.mark.proves("harbor", "200 episodes at once")
@pytest.mark.slow
@pytest.mark.timeout(3600)  # 12 minutes on two quiet cores
def test_200_episodes_at_once(world):
    play_many(world, 200)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # 8 minutes on two quiet cores
def test_a_check_finds_no_fault(world, capsys):
    world.task()
    with pytest.raises(SystemExit) as ended:
        main(["check", "environment", PODMAN, f"data.train=harbor:{world.folder}", "-n", "1"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0, shown
    assert "passed       the gold solution earns the maximum: on 1 row" in shown


@pytest.mark.proves("harbor", "training")
@pytest.mark.slow
def test_tiny_trains(world, tiny_model, tmp_path):
    world.task("a")
    world.task("b")
    flags = {
        "data.train": f"harbor:{world.folder}",
        "model.path": str(tiny_model),
        "trainer.output": str(tmp_path / "run"),
    }
    overrides = [
        PODMAN, "data.batch_size=2", "rollout.n=2", "trainer.total_steps=2", "trainer.device=cpu",
        "trainer.save_freq=never", "rollout.max_turns=2", "rollout.max_trajectory_tokens=1024",
    ]  # fmt: skip
    Trainer(load_config(None, overrides, flags, preset=TINY_SETTINGS)).run()
    metrics = [values for _, values in read_metrics(tmp_path / "run" / METRICS)]
    assert len([m for m in metrics if "critic/score/mean" in m]) == 2


AGENT = '''
import json, os, urllib.request
from harbor.agents.base import BaseAgent


class Caller(BaseAgent):
    """Asks the model once, and runs its answer."""

    @staticmethod
    def name():
        return "caller"

    def version(self):
        return "1"

    async def setup(self, environment):
        pass

    async def run(self, instruction, environment, context):
        import asyncio
        body = {"model": self.model_name.partition("/")[2],
                "messages": [{"role": "user", "content": instruction}]}
        request = urllib.request.Request(
            self.extra_env["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
            {"Authorization": "Bearer " + self.extra_env["OPENAI_API_KEY"],
             "Content-Type": "application/json"})
        answer = json.loads(await asyncio.to_thread(lambda: urllib.request.urlopen(request).read()))
        await environment.exec(answer["choices"][0]["message"]["content"])
'''


AGENT_INSIDE = (
    AGENT.replace("class Caller", "class Other")
    + """

class Caller(Other):
    async def run(self, instruction, environment, context):
        from urllib.parse import urlparse
        url = urlparse(self.extra_env["OPENAI_BASE_URL"])
        body = json.dumps({"messages": [{"role": "user", "content": instruction}]})
        request = "\\r\\n".join([
            f"POST {url.path}/chat/completions HTTP/1.1", f"Host: {url.netloc}",
            "Authorization: Bearer " + self.extra_env["OPENAI_API_KEY"],
            "Content-Type: application/json", "Connection: close",
            f"Content-Length: {len(body)}", "", body])
        connect = f"exec 3<>/dev/tcp/{url.hostname}/{url.port}"
        command = f"{connect}; printf %s \\"$REQUEST\\" >&3; cat <&3"
        done = await environment.exec(command, env={"REQUEST": request})
        answer = json.loads(done.stdout[done.stdout.index("{"):])
        await environment.exec(answer["choices"][0]["message"]["content"])
"""
)


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("mini-swe", "no agent 'mini-swe'. Did you mean mini-swe-agent"),
        ("{tmp}/none.py:Caller", "No module named 'none'"),
        ("{tmp}/caller.py:Caler", "has no attribute 'Caler'"),
    ],
)
def test_an_agent_that_does_not_exist_is_refused(world, tmp_path, agent, message):
    world.task()
    (tmp_path / "caller.py").write_text(AGENT)
    with pytest.raises(DataError, match=message):
        make_plan(world.config(options=f"?agent={agent.format(tmp=tmp_path)}"))


def test_an_agent_in_the_sandbox_reaches_the_gateway(world, tmp_path):
    path = world.task()
    compose = path / "environment/docker-compose.yaml"
    compose.write_text(compose.read_text().replace("    network_mode: none\n", ""))
    (tmp_path / "caller.py").write_text(AGENT_INSIDE)
    address = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()[0]
    config = world.config(options=f"?agent={tmp_path}/caller.py:Caller&gateway={address}")
    [sample] = make_plan(config).train
    engine = Scripted(["echo apple > /fruit"], TOKENIZER)
    played = play(sample, engine, TOKENIZER, config=config)
    assert (played.scores.outcome, len(played.turns)) == (1.0, 1)


def test_an_agent_of_harbor_plays_through_the_gateway(world, tmp_path):
    world.task()
    (tmp_path / "caller.py").write_text(AGENT)
    config = world.config(options=f"?agent={tmp_path}/caller.py:Caller")
    [sample] = make_plan(config).train
    assert sample.agent_name == "harbor_agent" and not sample.environment
    for fruit, outcome in (("apple", 1.0), ("pear", 0.0)):
        engine = Scripted([f"echo {fruit} > /fruit"], TOKENIZER)
        played = play(sample, engine, TOKENIZER, config=config)
        assert (played.scores.outcome, len(played.turns)) == (outcome, 1)


def test_an_agent_has_no_reward_if_the_verifier_fails(world, tmp_path):
    world.task(test="true\n")
    (tmp_path / "caller.py").write_text(AGENT)
    config = world.config(options=f"?agent={tmp_path}/caller.py:Caller")
    [sample] = make_plan(config).train
    with pytest.raises(Infrastructure, match="RewardFileNotFoundError"):
        play(sample, Scripted(["true"], TOKENIZER), TOKENIZER, config=config)


@pytest.mark.slow
def test_terminus_plays_through_the_gateway(world):
    if shutil.which("tmux") is None:
        pytest.skip("no tmux, which the agent needs in the sandbox")
    world.task()
    config = world.config(options="?agent=terminus-2")
    [sample] = make_plan(config).train
    writes = {"keystrokes": "echo apple > /fruit\n", "duration": 1.0}
    texts = [
        json.dumps({"analysis": "", "plan": "", "commands": commands, "task_complete": is_done})
        for commands, is_done in [([writes], False), ([], True), ([], True)]
    ]
    played = play(sample, Scripted(texts, TOKENIZER), TOKENIZER, config=config)
    assert (played.scores.outcome, len(played.turns)) == (1.0, 3)
    assert "echo apple > /fruit" in played.messages[2].content


@pytest.mark.parametrize(("name", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_agents_of_the_package_are_scored_by_its_verifier(world, name, reward):
    path = world.task()
    world.samples()
    options = {"backend": "podman", "options": {}, "multiplier": 1.0, "agent": name}
    api = {"url": "http://127.0.0.1:9", "key": "-", "model": "policy"}

    async def run():
        return await program("harbor").call("agent", task=str(path), **options, **api)

    assert asyncio.run(run()) == {"outcome": reward, "metrics": {}}
    assert "harbor" in registry.tools
