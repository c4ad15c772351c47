"""Weights are gathered once and reach all servers at the same time, from one rank or from many."""

import tempfile
import threading
import time
from contextlib import ExitStack, closing
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from support.exact_rank import ExactRank
from support.fake_sglang import FakeSGLang
from support.processes import Processes
from support.trainer_fixtures import config, tiny_folder
from support.updates import update_from

from agentrl.engine.base import Update
from agentrl.engine.remote import distributor as distributor_module
from agentrl.engine.remote import senders as senders_module
from agentrl.engine.remote.adapters import Adapters
from agentrl.engine.remote.admin import AdminClient
from agentrl.engine.remote.distributor import Distributor
from agentrl.engine.remote.senders import FROM_FILES, Delivery, Route, Sent, Target, WeightsSender
from agentrl.errors import ConfigError, EngineError
from agentrl.learner.rank import LocalRankGroup

WEIGHTS = [(f"layers.{i}.weight", torch.randn(8, 8)) for i in range(12)]


@pytest.fixture
def fake():
    with closing(FakeSGLang()) as server:
        yield server


class Engine:
    """A client that only forwards the steps of an update, with the steps of a slow server."""

    dtype = None

    has_received = False
    kept_folders = 0

    def __init__(self, url, delivery=FROM_FILES, seconds=0.0):
        self.url, self.seconds, self.delivery = url, seconds, delivery
        self.admin = AdminClient(url)
        self.target = Target(url, ranks=delivery.ranks)
        self.adapters = Adapters(
            self.admin, field="lora_path", path="/{}_lora_adapter", limit=delivery.adapters
        )
        self.version = None

    def begin_update(self):
        time.sleep(self.seconds)

    def finish_update(self, route, sent):
        time.sleep(self.seconds)
        if self.delivery == FROM_FILES:
            body = {"model_path": str(route.folder)}
            self.admin.manage("/update_weights_from_disk", body)
        elif self.delivery.source == "adapter":
            self.adapters.load(route.version, route.adapter_folder)
        self.has_received = True
        self.version = route.version

    def fail_update(self, error): ...


MEMORY, AUTO = Delivery("memory", ranks=(0,)), Delivery("memory", ranks=(0,), may_use_files=True)
ADAPTERS = Delivery("adapter")


class Weights:
    """Weights that count how often they are gathered."""

    def __init__(self):
        self.gathers = 0

    def update(self, version):
        def gather():
            self.gathers += 1
            yield from WEIGHTS

        return update_from(gather, version)


@pytest.mark.parametrize("delivery", [MEMORY, FROM_FILES], ids=["memory", "files"])
@pytest.mark.timing
def test_32_servers_take_about_as_long_as_one(fake, delivery):
    fake.seconds, fake.reads_weights = 0.2, False
    weights, seconds = Weights(), {}
    for count in (1, 32):
        engines = [Engine(fake.url(1 + k), delivery, 0.2) for k in range(count)]
        with closing(Distributor()) as distributor:
            start = time.monotonic()
            size, errors = distributor.send(engines, weights.update(count))
            seconds.setdefault(count, []).append(time.monotonic() - start)
        assert not errors and size == 12 * 64 * 4
        assert all(engine.version == count for engine in engines)
    assert weights.gathers == 2, "once for each publication"
    assert min(seconds[32]) < 2 * min(seconds[1]), "benchmarks/publish.py measures this"


def test_a_server_that_refuses_affects_no_other(fake):
    fake.refusing = {"127.0.0.2"}
    engines = [Engine(fake.url(n), MEMORY) for n in (1, 2, 3)]
    with closing(Distributor()) as distributor:
        _, errors = distributor.send(engines, Weights().update(7))
    assert list(errors) == [engines[1]] and "out of memory" in str(errors[engines[1]])
    assert [engine.version for engine in engines] == [7, None, 7]
    assert fake.versions == {"127.0.0.1": ["7"], "127.0.0.3": ["7"]}


def test_a_server_that_cannot_read_memory_reads_files_from_then_on(fake, caplog):
    """Some containers share no GPU memory between processes."""

    fake.refused_paths = {("127.0.0.2", "/update_weights_from_tensor")}
    weights, engines = Weights(), [Engine(fake.url(n), AUTO) for n in (1, 2, 3)]
    with closing(Distributor()) as distributor:
        for version in (1, 2):
            _, errors = distributor.send(engines, weights.update(version))
            assert not errors and [engine.version for engine in engines] == [version] * 3
    assert [engine.delivery.source for engine in engines] == ["memory", "files", "memory"]
    assert fake.requests.count(("127.0.0.2", "/update_weights_from_disk")) == 2
    assert fake.versions == {"127.0.0.1": ["1", "2"], "127.0.0.3": ["1", "2"]}
    assert weights.gathers == 3, "the first version was gathered again for the files"
    (line,) = [r.getMessage() for r in caplog.records]
    assert engines[1].url in line and engines[0].url not in line and "out of memory" in line


def test_a_server_that_received_weights_before_does_not_switch_to_files(fake):
    engine = Engine(fake.url(), AUTO)
    with closing(Distributor()) as distributor:
        assert not distributor.send([engine], Weights().update(1))[1]
        fake.refused_paths = {("127.0.0.1", "/update_weights_from_tensor")}
        assert distributor.send([engine], Weights().update(2))[1]
    assert engine.delivery.source == "memory"


ADAPTER = {f"layers.{i}.lora_{k}.weight": torch.randn(4, 8) for i in range(3) for k in "AB"}


def adapter_update(version, calls):
    def send(route):
        calls.append(version)
        save_file(ADAPTER, route.adapter_folder / "adapter.safetensors")
        return Sent()

    return Update(version, lambda: iter(()), send)


def test_adapters_are_written_once_for_all_servers(fake):
    calls = []
    engines = [Engine(fake.url(n), ADAPTERS) for n in (1, 2)]
    with closing(Distributor()) as distributor:
        for version in (1, 2, 3):
            size, errors = distributor.send(engines, adapter_update(version, calls))
            assert not errors and size >= 6 * 32 * 4
    assert calls == [1, 2, 3]
    for engine, host in zip(engines, ("127.0.0.1", "127.0.0.2"), strict=True):
        assert engine.adapters.listed() == fake.adapters[host].keys(), "the last two are loaded"
        assert len(fake.adapters[host]) == 2
        assert engine.adapters.request_fields()["lora_path"] in fake.adapters[host]
        for adapter in fake.adapters[host].values():
            assert adapter.keys() == ADAPTER.keys()
            assert all(torch.equal(adapter[name], t) for name, t in ADAPTER.items())


def test_adapters_stay_loaded_while_turns_name_them(fake):
    """With `trainer.max_staleness=1` there are three: an old one, the current and the next."""
    engine = Engine(fake.url(), Delivery("adapter", adapters=3))
    loaded, held = engine.adapters, []
    with closing(Distributor()) as distributor, ExitStack() as turns:
        for version in range(1, 5):
            assert not distributor.send([engine], adapter_update(version, []))[1]
            if version in (1, 3):
                held.append(loaded.request_fields())
                turns.enter_context(loaded.in_use(held[-1]))
        names = fake.adapters["127.0.0.1"]
        assert len(names) == 3 and all(fields["lora_path"] in names for fields in held)
        turns.enter_context(loaded.in_use(loaded.request_fields()))
        errors = distributor.send([engine], adapter_update(5, []))[1]
        assert "turns in flight use all its 3 adapters" in str(errors[engine])
        turns.close()
        assert not distributor.send([engine], adapter_update(5, []))[1]
        assert held[0]["lora_path"] not in names and held[1]["lora_path"] in names


def test_a_server_that_keeps_too_few_adapters_is_refused(fake):
    adapters = Engine(fake.url(), Delivery("adapter", adapters=3)).adapters
    adapters.check_limit(3)
    adapters.check_limit(None)
    with pytest.raises(ConfigError, match=r"at most 2 adapters.* --max-loaded-loras 3"):
        adapters.check_limit(2)


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SafetensorError("I/O error")])
def test_an_adapter_that_cannot_be_written_is_an_engine_error(fake, error):
    def send(route):
        raise error

    with closing(Distributor()) as distributor, pytest.raises(EngineError, match="set TMPDIR"):
        engine = Engine(fake.url(), ADAPTERS)
        distributor.send([engine], Update(1, lambda: iter(()), send))


def test_a_temporary_folder_that_is_missing_is_an_engine_error(fake, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with closing(Distributor()) as distributor, pytest.raises(EngineError, match="missing"):
        distributor.send([Engine(fake.url())], Weights().update(1))


def test_a_server_that_hangs_fails_after_its_time_and_is_named_before(fake, monkeypatch, caplog):
    monkeypatch.setattr(senders_module, "BASE_SECONDS", 1.5)
    monkeypatch.setattr(distributor_module, "SLOW_SECONDS", 0.3)
    fake.hanging = {"127.0.0.2"}
    engines = [Engine(fake.url(n), MEMORY) for n in (1, 2)]
    start = time.monotonic()
    with closing(Distributor()) as distributor:
        _, errors = distributor.send(engines, Weights().update(7))
    assert 1 < time.monotonic() - start < 8
    assert list(errors) == [engines[1]] and "127.0.0.2" in str(errors[engines[1]])
    assert caplog.text.count("version 7 of the policy is not on every engine after 0.3 s") == 1


def test_a_group_that_a_server_refuses_leaves_no_thread(fake, monkeypatch):
    """A process that joins a gloo group blocks until the others join, or until its timeout."""
    monkeypatch.setattr(senders_module, "JOIN_SECONDS", 1.0)
    fake.refused_paths = {("127.0.0.1", "/init_weights_update_group")}
    before = threading.active_count()
    with closing(WeightsSender()) as sender:
        sent = sender.send(WEIGHTS, Route(1, (Target(fake.url(), backend="gloo"),)))
    assert "out of memory" in sent.errors[fake.url()]
    end = time.monotonic() + 30
    while threading.active_count() > before:
        assert time.monotonic() < end, threading.enumerate()
        time.sleep(0.05)


def test_the_log_names_the_servers_that_are_slow(fake, monkeypatch, caplog):
    monkeypatch.setattr(distributor_module, "SLOW_SECONDS", 0.3)
    engines = [Engine(fake.url(1), MEMORY), Engine(fake.url(2), MEMORY, 0.6)]
    with closing(Distributor()) as distributor:
        distributor.send(engines, Weights().update(7))
    assert f"waiting for {engines[1].url}" in caplog.text and engines[0].url not in caplog.text


def test_weights_that_cannot_be_gathered_leave_nothing_waiting(fake):
    def broken():
        yield from WEIGHTS[:3]
        raise RuntimeError("the gather failed")

    route = Route(1, (Target(fake.url(), ranks=(0,)),), bucket_bytes=300)
    with closing(WeightsSender()) as sender, pytest.raises(RuntimeError, match="the gather failed"):
        sender.send(broken(), route)
    assert not fake.versions, "the version comes with the last bucket only"


@pytest.mark.timing
def test_what_is_sent_next_is_gathered_while_a_bucket_is_sent(fake):
    """12 tensors of 50 ms each, in 12 buckets of 100 ms: together 1.2 s, not 1.8 s."""
    fake.seconds = 0.1

    def slow():
        for pair in WEIGHTS:
            time.sleep(0.05)
            yield pair

    route = Route(1, (Target(fake.url(), ranks=(0,)),), bucket_bytes=256)
    start = time.monotonic()
    WeightsSender().send(slow(), route)
    assert len(fake.requests) == 12
    assert time.monotonic() - start < 1.75


# -- several ranks ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture(scope="module")
def two_ranks(folder):
    with closing(Processes(2, ExactRank, folder)) as group:
        yield group


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize(
    "bucket_bytes",
    [pytest.param(1, marks=pytest.mark.slow), 4000, pytest.param(2**20, marks=pytest.mark.slow)],
)
def test_two_ranks_send_what_one_rank_sends(fake, folder, two_ranks, tmp_path, lora, bucket_bytes):
    """Server 1 reads rank 0, server 2 rank 1, and server 3 has a process on each."""
    cfg = config(model__lora_rank=lora)
    one = LocalRankGroup(ExactRank(folder))
    one.begin(cfg)
    expected = dict(one.rank.policy.export(torch.float32))
    two_ranks.begin(cfg)
    targets = [
        Target(fake.url(n), ranks=ranks, processes=len(ranks))
        for n, ranks in enumerate([(0,), (1,), (0, 1)], 1)
    ]
    route = Route(5, tuple(targets), tmp_path, torch.float32, bucket_bytes=bucket_bytes)
    sent = two_ranks.send_weights(route)
    assert not sent.errors
    assert sent.size == sum(t.nbytes for t in expected.values())
    files = {n: t for file in tmp_path.glob("*.safetensors") for n, t in load_file(file).items()}
    for received in (files, *(fake.weights[f"127.0.0.{n}"] for n in (1, 2, 3))):
        assert received.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(received[name], tensor, atol=1e-7, rtol=0)
    assert fake.versions == {f"127.0.0.{n}": ["5"] for n in (1, 2, 3)}


def test_a_rank_writes_its_adapter(folder, tmp_path):
    one = LocalRankGroup(ExactRank(folder))
    one.begin(config(model__lora_rank=4))
    sent = one.send_weights(Route(1, adapter_folder=tmp_path))
    tensors = [n for n, _ in one.rank.policy.model.named_parameters() if "lora_" in n]
    assert len(load_file(tmp_path / "adapter_model.safetensors")) == len(tensors) > 0
    assert not sent.names, "no weights were sent"
    closed = []
    one.rank._weights_sender._broadcast = SimpleNamespace(close=lambda: closed.append(1))
    one.close()
    assert closed, "it has left the group of the broadcast"


def test_a_server_of_another_rank_that_fails_does_not_end_the_ranks(fake, two_ranks):
    two_ranks.begin(config())
    fake.refusing = {"127.0.0.2"}
    targets = tuple(
        Target(fake.url(n), ranks=ranks) for n, ranks in enumerate([(0,), (1,), (1, 0)], 1)
    )
    sent = two_ranks.send_weights(Route(1, targets, bucket_bytes=4000))
    assert list(sent.errors) == [targets[1].url] and "out of memory" in sent.errors[targets[1].url]
    fake.refusing = set()
    assert not two_ranks.send_weights(Route(2, targets, bucket_bytes=4000)).errors
    assert fake.versions["127.0.0.2"] == ["2"]


def test_a_rank_that_fails_does_not_wait_for_the_others(fake, folder):
    """Its error ends them; they wait for it meanwhile."""
    with closing(Processes(2, ExactRank, folder)) as group:
        group.begin(config())
        route = Route(1, (Target(fake.url(), ranks=(0, 1), processes=2),))
        for rank, pipe in enumerate(group.pipes):
            pipe.send((rank, "fail_after_a_bucket", (route, 1), {}))
        assert group.pipes[1].poll(20.0)
        assert "the gather failed" in group.pipes[1].recv()[2]


def test_ctrl_c_does_not_wait_for_a_server_that_hangs(fake):
    fake.hanging = {"127.0.0.1"}

    def gather():
        yield from WEIGHTS
        raise KeyboardInterrupt

    start = time.monotonic()
    with closing(WeightsSender()) as sender, pytest.raises(KeyboardInterrupt):
        sender.send(gather(), Route(1, (Target(fake.url(), ranks=(0,)),), bucket_bytes=2900))
    assert time.monotonic() - start < 10
