from __future__ import annotations

import ast
import fcntl
import gc
import os
import socket
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

import agentrl.agent_loops
import agentrl.interactions
import agentrl.player
import agentrl.rewards
from agentrl import registry
from agentrl.config import environment
from agentrl.observers.curve import Curve
from agentrl.report.run import diagnoses

CI = os.environ.get("CI") == "true"

# Nothing in the tests may reach a model hub.
os.environ["HF_HUB_OFFLINE"] = "1"

# No test cuts the power. A run syncs some 20 files, and each waits milliseconds for the disk.
# Programs in processes of their own keep the real function.
os.fsync = lambda fd: None

# Tests of failures need not wait until what failed has recovered.
agentrl.player.RETRY_SECONDS = (0.0, 0.0)
agentrl.player.LOST_SESSION_SECONDS = (0.0, 0.0)

# A picture of a run takes longer than its steps. The fixture `curves` draws it.
DRAWS = {name: getattr(Curve, name) for name in ("on_validation", "on_end")}
for name in DRAWS:
    setattr(Curve, name, lambda self, event: None)

# Deadlines fail by chance where three processes share two cores. `make test-all` uses "thorough".
settings.register_profile("quick", deadline=None, derandomize=CI, max_examples=20)
settings.register_profile("thorough", deadline=None, derandomize=CI, max_examples=100)
settings.load_profile("quick")


SHIPPED = {kind.kind: kind.names() for kind in registry.all_registries()}


@pytest.fixture
def curves(monkeypatch):
    """Let the runs in this process draw `curve.svg`."""
    for name, draw in DRAWS.items():
        monkeypatch.setattr(Curve, name, draw)


@contextmanager
def only_names(names: Mapping[str, Collection[str]]) -> Iterator[None]:
    """Keep only these names of each kind of registry for a block, and forget all user files."""
    # A file that was loaded once is not run again, and would register nothing.
    files = {n: sys.modules.pop(n) for n in list(sys.modules) if n.startswith("agentrl_user_")}
    with ExitStack() as stack:
        for kind in registry.all_registries():
            stack.enter_context(kind.isolated(keep=names[kind.kind]))
        yield
    sys.modules.update(files)


@pytest.fixture
def shipped_registries(own_registries):
    """Leave only what agentrl itself registers, as in a new process."""
    with only_names(SHIPPED):
        yield


@pytest.fixture
def no_tools(own_registries):
    """Start without tools."""
    with registry.tools.isolated(keep=()):
        yield


@pytest.fixture(scope="module")
def no_other_names():
    """Remove the names that other test files registered. Ranks would need all of them."""
    from agentrl.shipment import user_registrations

    user_names = user_registrations()
    own = {k.kind: set(k.names()) - user_names[k.kind] for k in registry.all_registries()}
    with only_names(own), own_user_files():
        yield


@contextmanager
def own_user_files():
    """Forget after the block the user files that it read: they would not register again."""
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith("agentrl_user_"):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def own_registries(monkeypatch):
    """Remove after each test what it registered, the user files and the keys that it read."""
    monkeypatch.setattr(environment, "_values", {})
    with ExitStack() as stack:
        stack.enter_context(own_user_files())
        for kind in (*registry.all_registries(), diagnoses):
            stack.enter_context(kind.isolated())
        yield


@cache
def sglang_tests(file: Path) -> frozenset[str]:
    """Return the names of a file's tests that have the marker `sglang`, by its text alone."""
    text = file.read_text()
    if "mark.sglang" not in text:
        return frozenset()
    tree = ast.parse(text)
    tests = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    if any("mark.sglang" in ast.unparse(n) for n in tree.body if isinstance(n, ast.Assign)):
        return frozenset(test.name for test in tests)  # the file's `pytestmark`
    return frozenset(
        test.name
        for test in tests
        if any("mark.sglang" in ast.unparse(decorator) for decorator in test.decorator_list)
    )


LONG_FILES = (
    "test_rollout_workers.py",
    "cluster/test_train.py",
    "gateway/test_packages.py",
    "tools/test_tool_options.py",
    "trainer/test_distillation.py",
    "doors/test_games.py",
    "tools/test_workers.py",
    "cluster/test_cluster.py",
    "sandbox/test_sandbox.py",
    "learner/test_ranks.py",
    "test_check_environment.py",
    "test_real_model.py",
    "trainer/test_resume_run.py",
    "gateway/test_session_fuzz.py",
    "view/test_page.py",
    "tools/test_mcp.py",
    "engine/test_local.py",
    "tools/test_server.py",
    "sandbox/test_containers.py",
    "docs/test_readme.py",
    "gateway/test_external.py",
    "learner/test_learner.py",
    "cli/test_eval_models.py",
    "trainer/test_trainer.py",
    "engine/test_senders.py",
    "test_pretrained.py",
    "trainer/test_saving.py",
    "learner/test_invariants.py",
    "cli/test_check_agent.py",
)
"""The files whose tests take longest together (`--durations=25`), after those of a real SGLang."""


SHARING = {
    "a Ray cluster": ("tests/cluster/",),
    "processes of ranks": (
        "tests/learner/test_ranks.py",
        "tests/learner/test_loading.py",
        "tests/learner/test_lora_on_experts.py",
        "tests/learner/test_moe.py",
        "tests/learner/test_router_replay.py",
        "tests/learner/test_sft_ranks.py",
        "tests/learner/test_state.py",
    ),
}
"""The files that one process of tests runs, because starting what they share takes long."""


def pytest_sessionstart(session):
    """Let each of several processes begin to collect at another folder.

    Otherwise all of them compile the same file at the same time, and not each a part of the files.
    """
    worker, tests = getattr(session.config, "workerinput", None), Path(__file__).parent
    if reruns := worker and getattr(session.config, "failures_db", None):
        # pytest-rerunfailures asks the first process about each test. Without this option, the
        # kernel collects small messages, and each test waits 40 ms for its answer.
        reruns.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if worker and [Path(arg).absolute() for arg in session.config.args] == [tests]:
        parts = [f for f in sorted(tests.iterdir()) if f.is_dir() or f.match("test_*.py")]
        parts = [str(f) for f in parts if not f.name.startswith("_")]
        first = len(parts) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        session.config.args[:] = parts[first:] + parts[:first]


def pytest_collection_modifyitems(items):
    """Run the longest files first. The short ones then keep all processes busy until the end."""
    for item in items:
        if item.get_closest_marker("timing"):
            item.add_marker(pytest.mark.flaky(reruns=2, only_rerun="AssertionError"))
    positions = {Path(__file__).parent / file: i for i, file in enumerate(LONG_FILES)}

    def position(item) -> tuple[int, Path]:
        is_sglang = item.originalname in sglang_tests(item.path)
        return -1 if is_sglang else positions.get(item.path, len(LONG_FILES)), item.path

    items.sort(key=position)


def pytest_collection_finish():
    """Collect garbage less often, and not among modules and tests: it took a tenth of the time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Distributes the tests by file, because the tests of a file share fixtures.

    All tests of a real SGLang go to one process, so that there is one server, and so do the files
    in `SHARING`. (xdist's own groups, `--dist loadgroup`, are without effect under pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file, _, test = nodeid.partition("::")
            name = test.partition("[")[0]
            if name in sglang_tests(config.rootpath / file):
                return "sglang"
            return next((n for n, files in SHARING.items() if file.startswith(files)), file)

    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """With CI=true a test that cannot run fails: nothing is skipped in silence."""
    report = yield
    if CI and report.skipped and not hasattr(report, "wasxfail"):
        file, line, reason = report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{file}:{line}: cannot run, and CI=true: {reason}"
    return report


@pytest.fixture(scope="session")
def random_model(tmp_path_factory):
    """The folder of a small untrained model."""
    from itertools import islice

    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from agentrl.demo.arithmetic import rows
    from agentrl.demo.recipe import train_tokenizer

    folder = tmp_path_factory.mktemp("random") / "model"
    tokenizer = train_tokenizer(m.content for r in islice(rows(1), 50) for m in r.gold)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def one_process() -> Iterator[None]:
    """Run the block in one process of tests at a time."""
    from agentrl.demo.recipe import home

    home().mkdir(parents=True, exist_ok=True)
    with (home() / ".tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def tiny_model():
    """The folder of the tiny model in the user's cache. The first use makes it in a minute."""
    from agentrl.demo import tiny_model

    with one_process():
        return tiny_model()


@pytest.fixture(scope="session")
def smollm2():
    """The folder of SmolLM2 in the user's cache. The first use downloads it in a minute or two."""
    from agentrl.pretrained import get_model

    with one_process():
        return get_model("smollm2")


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model):
    from agentrl.chat import load_tokenizer

    return load_tokenizer(tiny_model)


@pytest.fixture(scope="session")
def sglang_python():
    """The Python of an environment with SGLang that runs on a CPU; `make sglang` makes one."""
    folder = Path(__file__).parent
    real = os.environ.get("AGENTRL_SGLANG_PYTHON") or folder.parent / ".venv-sglang/bin/python"
    if not Path(real).exists():
        pytest.skip(f"no SGLang at {real}: `make sglang`, or set AGENTRL_SGLANG_PYTHON")
    return str(folder / "sglang_cpu/python")


@pytest.fixture(scope="session")
def sglang_server(sglang_python, tiny_model):
    """One SGLang server for all tests, with the tiny model."""
    from agentrl.engine.remote.launch import SGLangLaunch

    server = SGLangLaunch(
        str(tiny_model),
        python=sglang_python,
        dtype="float32",
    ).start()
    yield server
    server.stop()


def python_of(folder: str, target: str) -> str:
    """Return the Python of an environment with other projects' packages; skip without it."""
    python = Path(__file__).parents[1] / folder / "bin/python"
    if not python.exists() and not os.environ.get("CI"):
        pytest.skip(f"no {folder}: `make {target}`")
    return str(python)


@pytest.fixture(scope="session")
def packages_python() -> str:
    """Return the Python that has the packages of agents."""
    return python_of(".venv-agents", "agents")
