"""Ray for real, on this machine's CPUs: groups of two ranks that meet over gloo."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray")

import ray
from support import adder
from support.adder import Adder

from agentrl.cluster import connect, engines, open_placement
from agentrl.cluster.connect import check_ray, check_reachable
from agentrl.cluster.group import RankActor, WorkerGroup, describe_location, exit_reason
from agentrl.cluster.pool import ResourcePool
from agentrl.config import load_config
from agentrl.engine.remote.launch import ServerProcess
from agentrl.errors import ConfigError, EngineDead, RunStopped, UserError
from agentrl.http import fetch
from agentrl.learner.dispatch import BROADCAST, dispatch
from agentrl.registry import load_file, rewards
from agentrl.shipment import Shipment, local_copy
from agentrl.torch_threads import count_cores

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("no_other_names"),
]
# The ranks cannot import these files.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
ray.cloudpickle.register_pickle_by_value(adder)


class Loaded:
    """Knows what user files registered."""

    @dispatch(BROADCAST)
    def reward(self, name):
        from agentrl.registry import rewards

        return rewards.get(name)(None)


SERVER = """
import http.server, os, sys
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        names = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"
        self.wfile.write(f"{os.getpid()} {' '.join(map(str, map(os.environ.get, names)))}".encode())
    def log_message(self, *args): pass
print("what it said last", flush=True)
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Answers).serve_forever()
"""


def start(host):
    command = [sys.executable, "-c", SERVER]
    server = ServerProcess("fake", lambda s: [*command, s.host, str(s.port)], host=host)
    return server, True


def processes(word):
    """The processes that have a word on their command line, but not this one."""
    command_lines = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if word in line and int(file.parent.name) != os.getpid():
            command_lines[int(file.parent.name)] = line
    return command_lines


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(what, seconds=15.0):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def pool(cluster):
    pool = ResourcePool(1, 2, gpu=False, request="two ranks")
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def running():
    """The group of ranks that runs now, if there is one."""
    groups = []
    yield groups
    for group in groups:
        group.close()


@pytest.fixture
def ranks(pool, running):
    """Two ranks that tests share, and do not end."""
    if not running:
        running.append(WorkerGroup(Adder, pool, start=0.5))
    return running[0]


@pytest.fixture
def doomed(ranks, running):
    """The same two ranks for a test that ends them. The next test gets others."""
    yield ranks
    running.remove(ranks)
    ranks.close()


@pytest.fixture
def one(cluster):
    """A place for one rank."""
    pool = ResourcePool(1, 1, gpu=False, request="one rank")
    yield pool
    pool.close()


# -- the cluster -----------------------------------------------------------------------------------


def test_ray_requires_the_token(cluster):
    file = Path(cluster)
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert file.stat().st_mode & 0o777 == 0o600
    # Ray opens its folder to everybody, so the one around it must be ours.
    assert file.parent.stat().st_mode & 0o777 == 0o700
    token = file.read_text()
    assert len(token) == 64
    assert not processes(token), "a command line is read by everybody"
    address = ray.get_runtime_context().gcs_address
    asks = f"from ray._raylet import GcsClient; print(len(GcsClient({address!r}).cluster_id.hex()))"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}

    def client(**more):
        return subprocess.run(
            [sys.executable, "-c", asks],
            env=clean | more,
            capture_output=True,
            text=True,
            timeout=60,
        )

    known = client(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=cluster)
    assert known.returncode == 0, known.stderr
    for more in ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}, {}):
        refused = client(**more)
        assert refused.returncode != 0
        assert "InvalidAuthToken" in refused.stderr


def test_there_is_no_dashboard(cluster):
    assert not ray._private.worker._global_node.webui_url
    assert all("--disable-frontend" in line for line in processes("dashboard.py").values())


@pytest.mark.timing
def test_a_cluster_that_is_too_small_says_so_at_once(cluster):
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"so many: 64 CPUs on each of 1 nodes .* are 1\S+ .*: 4"):
        ResourcePool(1, 64, gpu=False, request="so many")
    with pytest.raises(ConfigError, match="1 GPUs on each of 2 nodes are needed"):
        ResourcePool(2, 1, gpu=True, request="so many")
    assert time.monotonic() - began < 2


def test_missing_gpus_are_an_error_and_not_replaced_by_processes(cluster):
    config = load_config(None, ["trainer.n_gpus_per_node=2"])
    message = (
        r"n_gpus_per_node=2: the run needs 2 GPUs, but the cluster has none\. .*trainer.device=cpu"
    )
    with pytest.raises(ConfigError, match=message), open_placement(config):
        raise AssertionError
    # One that nobody asked for is no reason.
    with open_placement(load_config(None, [])):
        pass


def test_resources_of_other_jobs_are_waited_for_and_reported(cluster):
    reserved = ResourcePool(1, 3, gpu=False, request="held")
    try:
        with pytest.raises(ConfigError, match="but other jobs still use them after 1 s"):
            ResourcePool(1, 4, gpu=False, request="four", seconds=1)
    finally:
        reserved.close()
    ResourcePool(1, 4, gpu=False, request="four", seconds=20).close()


@pytest.mark.parametrize("address", ["ray://h:1", "somewhere", ":6379", "h:port"])
def test_impossible_addresses(address):
    with pytest.raises(ConfigError, match="is neither auto nor HOST:PORT"):
        check_reachable(address)


def test_an_address_without_a_server_fails_quickly():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # and does not listen
        began = time.monotonic()
        with pytest.raises(ConfigError, match="no process answers there"):
            check_reachable(f"127.0.0.1:{s.getsockname()[1]}")
        assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "installed, message",
    [("2.51.9", "has no token authentication"), ("", "needs Ray"), ("2.52.0", ""), ("3.0", "")],
)
def test_a_ray_without_token_authentication_is_refused(monkeypatch, installed, message):
    def version(name):
        if not installed:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(connect, "version", version)
    if not message:
        check_ray()
        return
    with pytest.raises(ConfigError, match=message):
        check_ray()


DRIVER = """
import os, signal, sys, time
sys.path.insert(0, {tests!r})
import ray
from support import adder
from support.adder import Adder
from agentrl.cluster import open_placement
from agentrl.cluster.connect import open_cluster
from agentrl.config import load_config

ray.cloudpickle.register_pickle_by_value(adder)
config = load_config(None, ["trainer.device=cpu"])
rays = lambda: {{k: v for k, v in os.environ.items() if k.startswith("RAY_")}}
before = rays()
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
with open_cluster(cpus=1, gpus=False):
    print("open", os.path.dirname(os.environ["RAY_AUTH_TOKEN_PATH"]), flush=True)
assert rays() == before, rays()
print("closed", flush=True)
with open_placement(config) as placement:
    ranks = placement.start_ranks(Adder)
    token = os.environ["RAY_AUTH_TOKEN_PATH"]
    print("open", os.path.dirname(token), *(p.pid for p in ranks.workers), flush=True)
    print(ranks.sleep(1), ranks.sum(1), flush=True)
    time.sleep(60)
"""


def cluster_processes(folder):
    """The titles of the processes with the token of a cluster in their environment."""
    titles = {}
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"RAY_AUTH_TOKEN_PATH={folder}/".encode() in file.read_bytes():
                line = file.with_name("cmdline").read_bytes().rstrip(b"\0 ")
                titles[int(file.parent.name)] = line.decode()
    return titles


@pytest.mark.slow
def test_a_driver_that_ends_leaves_nothing_behind():
    """It ends its cluster at the block's end, and even if killed. Ctrl-C does not reach ranks."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(tests=str(Path(__file__).parents[1]))],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
    )
    assert driver.stdout is not None
    try:
        kind, folder = driver.stdout.readline().split()
        assert kind == "open"
        assert driver.stdout.readline() == "closed\n"
        assert not processes(folder) and not Path(folder).exists()
        # A second cluster in the same process has a token of its own.
        kind, folder, *pids = driver.stdout.readline().split()
        assert kind == "open"
        time.sleep(0.3)  # within the ranks' call
        os.killpg(driver.pid, signal.SIGINT)
        assert driver.stdout.readline() == "interrupted\n"
        assert driver.stdout.readline() == "slept 1.0\n"
        assert processes(folder) and all(alive(int(pid)) for pid in pids)
        agents = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}  # they start last
        wait_until(lambda: agents <= set(cluster_processes(folder).values()))
        driver.kill()
        wait_until(lambda: not processes(folder) and not any(alive(int(p)) for p in pids))
        wait_until(lambda: not cluster_processes(folder) and not Path(folder).exists())
    finally:
        driver.kill()
        driver.wait()


# -- the ranks -------------------------------------------------------------------------------------


def test_split_broadcast_and_rank_zero(ranks):
    assert ranks.size == 2
    sums = ranks.add([torch.arange(3), torch.arange(5)], times=2)
    assert sums == [(0, 3, 26.0), (1, 5, 26.0)]
    assert ranks.sum(3) == 6
    assert ranks.rank_zero_total() == (0, 26.5)
    with pytest.raises(ValueError, match="3 shares for 2 ranks"):
        ranks.add([torch.ones(1)] * 3)
    with pytest.raises(AttributeError, match=r"Adder\.private is not marked by"):
        ranks.private()


def test_the_environment_of_a_rank(ranks):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "RAY_AUTH_MODE"]
    for rank, (variables, folder) in enumerate(ranks.variables([names, names])):
        assert variables == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "RAY_AUTH_MODE": "token",
        }
        assert folder == os.getcwd()


def test_a_bug_is_reported_with_the_line_of_the_users_code(tmp_path):
    """The line is neither that of the library that raised nor that of the callers."""
    file = tmp_path / "bad.py"
    file.write_text("import json\n\n\ndef loss(text):\n    return json.loads(text)\n")
    names = {}
    exec(compile(file.read_text(), file, "exec"), names)
    with pytest.raises(ValueError) as e:
        names["loss"]("{")
    assert describe_location(e.value) == f" ({file}:5: return json.loads(text))"
    with pytest.raises(AttributeError) as e:
        load_config(None, []).value("no.such")
    assert describe_location(e.value).startswith(f" ({__file__}:")
    assert describe_location(KeyError("never raised")) == ""


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            "The actor died.\n\tpid: 7\nWorker exit type: SYSTEM_ERROR Worker exit detail: Worker"
            " exits with\ncode 2. End of file. Some common causes include: (1) killed, or (2) not.",
            "Worker exits with code 2. End of file.",
        ),
        ("Its node\n  was lost. It is so.", "Its node was lost. It is so."),
        ("Causes: (1) this (2) that", "no reason is known"),
    ],
)
def test_the_reason_for_a_ranks_death_is_one_line(message, reason):
    assert exit_reason(message) == reason


@pytest.mark.slow
def test_a_rank_that_is_killed_stops_the_run(doomed):
    began = time.monotonic()
    gone = doomed.workers[1].pid
    with pytest.raises(
        RunStopped, match=rf"rank 1 of 2 \(process {gone} on .* its process ended"
    ) as e:
        doomed.kill_on(1)
    assert "causes" not in str(e.value) and len(str(e.value).splitlines()[0]) < 200
    assert time.monotonic() - began < 10


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_ended(one, caplog):
    group = WorkerGroup(Adder, one, watchdog_s=0.5, deadline_s=1.5)
    pid = group.workers[0].pid
    with pytest.raises(RunStopped, match=rf"sleep: not done after \d s: rank 0 .*process {pid} "):
        group.sleep(60)
    assert "sleep: not done after" in caplog.text
    wait_until(lambda: not alive(pid))


@pytest.mark.slow
def test_the_error_of_a_ranks_constructor_is_reported(one):
    with pytest.raises(ConfigError, match=r"rank 0 of 1 .*: this rank has no weights"):
        WorkerGroup(Adder, one, refuses=0)


@pytest.mark.parametrize(
    ("ray_or_user", "user", "count"),
    [("1", {}, 4), ("5", {}, 5), ("1", {"OMP_NUM_THREADS": "2"}, 2)],
)
def test_ranks_of_a_machine_share_its_cores(monkeypatch, ray_or_user, user, count):
    """Ray sets OMP_NUM_THREADS=1 in ranks where the user has not set it."""
    monkeypatch.setenv("OMP_NUM_THREADS", ray_or_user)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr("agentrl.torch_threads.count_cores", lambda: 16)
    before = torch.get_num_threads()
    try:
        threads = RankActor(0).enter(user, Shipment(), 4)
        assert threads.count == torch.get_num_threads() == count
        assert os.environ["OMP_NUM_THREADS"] == str(count), "accelerate would set its own"
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_the_users_number_of_threads_reaches_ranks(one, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    group = WorkerGroup(Adder, one)
    assert [str(threads) for threads in group.threads] == [
        f"3 of {count_cores()} cores (OMP_NUM_THREADS)"
    ]
    [(variables, _)] = group.variables([["OMP_NUM_THREADS"]])
    assert variables == {"OMP_NUM_THREADS": "3"}
    group.close()


# -- what is shipped -------------------------------------------------------------------------------

REWARD = """
from agentrl import reward

@reward("of_the_user")
def of_the_user(trajectory) -> float:
    return 7.5
"""

REWARD_WITH_IMPORT = """
from agentrl import reward
from shipped_values import VALUE

@reward("of_the_user")
def of_the_user(trajectory) -> float:
    from shipped_parts.factor import FACTOR
    return VALUE * FACTOR

@reward("broken")
def broken(trajectory) -> float:
    return {}["x"]
"""


def test_user_files_are_loaded_by_the_ranks(one, tmp_path):
    file, values = tmp_path / "mine.py", tmp_path / "shipped_values.py"
    (tmp_path / "shipped_parts").mkdir()
    (tmp_path / "shipped_parts/factor.py").write_text("FACTOR = 3")
    file.write_text(REWARD_WITH_IMPORT)
    values.write_text("VALUE = 2.5")
    load_file(str(file))
    shipment = Shipment.pack([str(file), "shelf:calculator"], [str(tmp_path)])
    [(path, contents)] = shipment.files
    assert local_copy(Path(path), contents) == file, "what lies beside it is found"
    # As on another machine: something else lies at the path of a module that the file imports.
    values.write_text("raise AssertionError")
    group = WorkerGroup(Loaded, one, shipment=shipment)
    assert group.reward("of_the_user") == 7.5
    # A bug names its rank and shows its line.
    with pytest.raises(RunStopped, match=r"rank 0 of 1 .* in reward: raised KeyError: 'x'") as e:
        group.reward("broken")
    assert 'return {}["x"]' in str(e.value.__cause__), "the line that raised"
    assert re.search(r"'x' \(\S+mine\.py:\d+: return .*\)$", str(e.value))


def test_functions_registered_only_in_this_process_are_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(REWARD)
    load_file(str(file))  # but it is in no `files`
    shipment = Shipment.pack([], [])
    with (
        rewards.isolated(keep=()),  # as in the process of a rank
        pytest.raises(ConfigError, match="the run has the reward 'of_the_user'"),
    ):
        shipment.unpack()


def test_a_path_that_only_the_controller_has_is_refused():
    with pytest.raises(
        ConfigError, match="/nowhere: exists on the machine of the run, but not here"
    ):
        replace(Shipment(), paths=("/nowhere",)).unpack()


# -- servers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "threads"),
    [("stop", None), ("server", None), pytest.param("host", "3", marks=pytest.mark.slow)],
)
def test_a_server_next_to_the_ranks(cluster, ranks, end, threads, monkeypatch):
    """It ends when it is stopped, when it is killed, and when its host process ends.

    OMP_NUM_THREADS is the user's, not Ray's.
    """
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    [first, second] = engines.colocated_slots(
        [replace(place, gpus=(f"GPU-{i}",)) for i, place in enumerate(ranks.workers)],
        load_config(None, ["rollout.engines=2"]).rollout,
        cpu=False,
    )
    assert (first.gpus, first.ranks) == ([0], (0,))
    server, word = second.run(start)
    assert word and server.running
    status, answer = fetch(server.url, "/", timeout=5)
    pid, *variables = answer.decode().split()
    assert (status, variables) == (200, ["GPU-1", str(threads)])
    assert server.url.startswith("http://127.0.0.1:"), "nobody else is to reach it"
    assert len({server.token, server.admin_token}) == 2
    if end == "stop":
        server.stop()
    elif end == "server":
        os.kill(int(pid), signal.SIGKILL)
    else:
        ray.kill(server._host)
    wait_until(lambda: not server.running and not alive(int(pid)))
    death = server.death_error()
    assert isinstance(death, EngineDead)
    if end == "server":
        assert "what it said last" in str(death)
    server.stop()
    server.stop()


def test_servers_of_ranks_without_gpus(cluster, ranks):
    [place] = engines.colocated_slots(ranks.workers, load_config(None, []).rollout, cpu=True)
    assert (list(place.gpus), place.ranks) == ([], ())


def refusing(host):
    raise ConfigError("no such package")


@pytest.mark.slow
def test_a_server_that_does_not_start_says_why(cluster, ranks):
    [place] = engines.colocated_slots(ranks.workers, load_config(None, []).rollout, cpu=True)
    with pytest.raises(ConfigError, match="no such package"):
        place.run(refusing)


@pytest.mark.parametrize(
    "overrides, gpus, message",
    [
        (["rollout.engines=3"], (0, 0), "are 3 GPUs, but the learner has 2"),
        (["rollout.tensor_parallel_size=2"], (0, 1), "must be on one machine"),
    ],
)
def test_servers_that_do_not_fit(cluster, ranks, overrides, gpus, message):
    places = [
        replace(place, node=str(node)) for place, node in zip(ranks.workers, gpus, strict=True)
    ]
    with pytest.raises(ConfigError, match=message):
        engines.colocated_slots(places, load_config(None, overrides).rollout, cpu=False)


def test_servers_on_separate_gpus_need_free_gpus(cluster):
    with pytest.raises(ConfigError, match=r"separate, .*: 2 GPUs, 1 times are needed"):
        engines.separate_slots(load_config(None, ["rollout.tensor_parallel_size=2"]).rollout)


# -- the end of the ranks --------------------------------------------------------------------------


def test_a_rank_that_raises_ends_the_ranks_that_wait_for_it(doomed):
    pids = [place.pid for place in doomed.workers]
    began = time.monotonic()
    with pytest.raises(UserError, match=r"^rank 1 of 2 \(process \d+ on .*\): row 7 is broken$"):
        doomed.raise_on(1)
    assert time.monotonic() - began < 10
    wait_until(lambda: not any(map(alive, pids)))
    with pytest.raises(RunStopped, match=r"sum: the ranks have ended: rank 1 .* row 7 is broken"):
        doomed.sum(1)
