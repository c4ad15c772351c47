"""Weights in buckets: how they are cut, and that a real server reads them however they come.

On a CPU, memory is shared by name in place of CUDA's handles, and gloo broadcasts in place of NCCL;
the server's code is the same.
"""

import base64
import io
import os
import pickle
import signal
import subprocess
import sys
import time
from array import array
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from threading import Timer

import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.updates import publish, update
from transformers import AutoModelForCausalLM

from agentrl.engine.remote import senders as senders_module
from agentrl.engine.remote.admin import AdminClient
from agentrl.engine.remote.launch import SGLangLaunch
from agentrl.engine.remote.senders import (
    Delivery,
    Route,
    Target,
    WeightsSender,
    make_buckets,
    serialize,
)
from agentrl.engine.remote.sglang import SGLangEngine

F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64

kinds = st.sampled_from([F32, BF16, I64])
shapes = st.lists(st.integers(0, 5), max_size=3)
tensors = st.lists(st.tuples(shapes, kinds), min_size=1, max_size=12)


def named(drawn):
    return [
        (f"t{i}", (torch.arange(torch.Size(shape).numel()) + i).to(kind).reshape(shape))
        for i, (shape, kind) in enumerate(drawn)
    ]


def contents(bucket):
    """Tensors by name, as the server takes a bucket apart."""
    parts = bucket.flat.split([shape.numel() for shape in bucket.shapes])
    return {
        name: part.view(shape)
        for name, part, shape in zip(bucket.names, parts, bucket.shapes, strict=True)
    }


@given(tensors, st.integers(1, 200))
def test_buckets_hold_all_tensors_once_and_in_the_order_of_their_kind(drawn, limit):
    weights = named(drawn)
    buckets = list(make_buckets(weights, limit=limit))
    for kind in (F32, BF16, I64):
        received = [name for b in buckets if b.flat.dtype == kind for name in b.names]
        assert received == [name for name, t in weights if t.dtype == kind]
    assert [bucket.last for bucket in buckets] == [False] * (len(buckets) - 1) + [True]
    received = {name: t for bucket in buckets for name, t in contents(bucket).items()}
    for name, tensor in weights:
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)


@given(tensors, st.integers(1, 200))
def test_buckets_are_filled_up_to_the_limit(drawn, limit):
    buckets = list(make_buckets(named(drawn), limit=limit))
    for bucket in buckets:
        assert bucket.bytes.nbytes <= limit or len(bucket.names) == 1
    for kind in (F32, BF16, I64):
        for one, two in pairwise(b for b in buckets if b.flat.dtype == kind):
            first = next(iter(contents(two).values()))
            assert one.bytes.nbytes + first.nbytes > limit


def test_a_bucket_is_a_copy_of_its_own_size():
    tied = torch.ones(2, 3, requires_grad=True)
    (bucket,) = make_buckets([("a", tied), ("b", tied), ("c", tied.t())], limit=1000)
    assert bucket.flat.untyped_storage().nbytes() == 3 * 6 * 4
    assert not bucket.flat.requires_grad
    assert contents(bucket)["c"].shape == (3, 2)


@pytest.mark.parametrize("kinds", [[F32], [F32, I64]])
def test_only_one_bucket_of_each_kind_is_in_memory(kinds):
    """Merged LoRA weights are temporary: they must be freed after the copy."""
    from weakref import ref

    alive = []

    def weights():
        for i in range(12):
            tensor = torch.zeros(
                10 if kinds[i % len(kinds)] == F32 else 5, dtype=kinds[i % len(kinds)]
            )
            alive.append(ref(tensor))
            yield f"t{i}", tensor

    for bucket in make_buckets(weights(), limit=80):  # two of them
        alive_count = sum(r() is not None for r in alive)
        # Beside the bucket, there is the tensor that did not fit, and up to a bucket of others.
        assert alive_count <= 1 + 2 * (len(kinds) - 1)
        del bucket


READER = """
import base64, json, pickle, sys
made = pickle.loads(base64.b64decode(sys.stdin.read()))
flat = made["flattened_tensor"]
found = {
    m.name: flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape).tolist()
    for m in made["metadata"]
}
print(json.dumps(found))
flat.zero_()
"""


def test_another_process_reads_and_shares_a_bucket():
    weights = [(f"t{i}", torch.full((i,), float(i))) for i in range(6)]
    (bucket,) = make_buckets(weights, limit=1000)
    data = serialize(bucket)
    done = subprocess.run(
        [sys.executable, "-c", READER],
        input=base64.b64encode(data),
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert orjson.loads(done.stdout) == {name: t.tolist() for name, t in weights}
    assert not bucket.flat.any(), "the other process had the same memory"


def test_a_pickle_has_only_allowed_names_and_shares_memory_once():
    """SGLang's unpickler takes classes of torch and of a few standard modules."""
    (bucket,) = make_buckets([(f"t{i}", torch.ones(3)) for i in range(9)], limit=1000)
    names = []

    class Reader(pickle.Unpickler):
        def find_class(self, module, name):
            names.append((module, name))
            return super().find_class(module, name)

    Reader(io.BytesIO(serialize(bucket))).load()
    assert {module.partition(".")[0] for module, _ in names} <= {"torch", "types"}
    assert names.count(("torch.multiprocessing.reductions", "rebuild_storage_filename")) == 1


# -- a real server ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=F32).eval()


@pytest.fixture
def admin(sglang_server):
    server = sglang_server
    return AdminClient(server.url, key=server.token, admin_key=server.admin_token, process=server)


def weights(model, by=0.0):
    return [(name, p.detach() + by * p.detach().sign()) for name, p in model.named_parameters()]


ROW = array("i", range(3, 60))


def engine(server, model, delivery):
    return SGLangEngine(
        server.url,
        vocabulary=model.config.vocab_size,
        key=server.token,
        admin_key=server.admin_token,
        process=server,
        delivery=delivery,
    )


@torch.inference_mode()
def scores(model, weights):
    """Of the model with these weights, by transformers."""
    from torch.func import functional_call

    ids = torch.tensor([list(ROW)])
    logits = functional_call(model, dict(weights), ids).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


WAYS = {"ipc": {"ranks": (0,)}, "gloo": {"backend": "gloo"}}


def target_of(server, way):
    return Target(server.url, server.token, server.admin_token, **WAYS[way])


@pytest.mark.sglang
@pytest.mark.parametrize("way", WAYS)
async def test_weights_arrive_in_one_bucket_or_in_many(sglang_server, model, way):
    scored_rows = []
    there = engine(sglang_server, model, Delivery("memory", **WAYS[way]))
    with closing(WeightsSender()) as sender:
        for version, (size, by) in enumerate([(2**30, 0.0), (1, 0.01), (20_000, 0.01)], 1):
            pairs = weights(model, by)
            route = Route(version, (there.target,), bucket_bytes=size)
            there.begin_update()
            sent = sender.send(pairs, route)
            assert sent.size == sum(t.nbytes for _, t in pairs) and not sent.errors
            there.finish_update(route, sent)
            row = torch.tensor(await there.score(ROW))[1:]
            torch.testing.assert_close(row, scores(model, pairs), atol=2e-5, rtol=0)
            scored_rows.append(row)
    assert torch.equal(scored_rows[1], scored_rows[2])
    assert (scored_rows[0] - scored_rows[1]).abs().max() > 1e-2


@pytest.mark.sglang
@pytest.mark.parametrize("way", WAYS)
def test_an_engine_publishes_by_memory(sglang_server, model, way):
    there = engine(sglang_server, model, Delivery("memory", **WAYS[way]))
    for version in (60, 61):
        pairs = weights(model, version / 1000)
        assert publish(there, update(pairs, version)) == sum(t.nbytes for _, t in pairs)
        assert there.version == version


@pytest.mark.sglang
@pytest.mark.parametrize("way", WAYS)
def test_only_the_last_bucket_has_the_version(sglang_server, admin, model, way):
    versions = []

    def watched():
        for named in weights(model):
            versions.append(admin.ask("/model_info")["weight_version"])
            yield named

    with closing(WeightsSender()) as sender:
        target = target_of(sglang_server, way)
        sender.send(weights(model), Route(70, (target,), bucket_bytes=20_000))
        sender.send(watched(), Route(71, (target,), bucket_bytes=20_000))
    assert set(versions) == {"70"}
    assert admin.ask("/model_info")["weight_version"] == "71"


@pytest.mark.sglang
def test_a_group_serves_many_updates_and_leaves_nothing(sglang_server, admin, model):
    sender, target = WeightsSender(), target_of(sglang_server, "gloo")
    sender.send(weights(model), Route(80, (target,)))
    group = sender._broadcast.group
    sender.send(weights(model), Route(81, (target,)))
    assert sender._broadcast.group is group
    assert not torch.distributed.is_initialized()
    sender.close()
    sender.close()
    body = {"group_name": group.name}
    status, answer = admin.send("/destroy_weights_update_group", body)
    assert status == 400 and b"does not exist" in answer
    sender.send(weights(model), Route(82, (target,)))
    assert admin.ask("/model_info")["weight_version"] == "82"
    sender.close()


def fail_soon(sender, pairs, route):
    """Return the error of sending what must fail, and soon."""
    start = time.monotonic()
    sent = sender.send(pairs, route)
    assert time.monotonic() - start < 30
    (error,) = sent.errors.values()
    return error


@pytest.mark.sglang
def test_a_server_that_refuses_a_group_is_an_error_at_once(
    sglang_server, admin, model, monkeypatch
):
    monkeypatch.setattr(senders_module, "LEAVE_SECONDS", 0.5)
    target = target_of(sglang_server, "gloo")
    refused = replace(target, admin_key="wrong")
    with closing(WeightsSender()) as sender:
        error = fail_soon(sender, weights(model), Route(90, (refused,)))
        assert "/init_weights_update_group: status 401" in error
        assert not sender.send(weights(model), Route(91, (target,))).errors
    assert admin.ask("/model_info")["weight_version"] == "91"


@pytest.mark.sglang
def test_a_server_that_answers_without_the_broadcast_does_not_hang_the_sender(
    sglang_server, model, monkeypatch
):
    """A server that refuses before it takes part leaves our end waiting for it."""
    monkeypatch.setattr(senders_module, "LEAVE_SECONDS", 0.5)
    sender, target = WeightsSender(), target_of(sglang_server, "gloo")
    sender.send(weights(model), Route(95, (target,)))
    manage = AdminClient.manage
    with monkeypatch.context() as patch:
        elsewhere = lambda admin, path, body, **k: manage(admin, "/no_such_endpoint", body, **k)  # noqa: E731
        patch.setattr(AdminClient, "manage", elsewhere)
        error = fail_soon(sender, weights(model), Route(96, (target,)))
    assert "/no_such_endpoint: status" in error
    assert not sender.send(weights(model), Route(97, (target,))).errors
    sender.close()


@pytest.mark.parametrize("way", WAYS)
def test_an_unreachable_server_is_an_error_at_once(way):
    target = Target("http://127.0.0.1:1", **WAYS[way])
    with closing(WeightsSender()) as sender:
        error = fail_soon(sender, [("a", torch.ones(3))], Route(1, (target,)))
    assert "127.0.0.1:1" in error


@pytest.mark.sglang
@pytest.mark.slow
def test_a_server_that_dies_during_a_broadcast_is_an_error(sglang_python, model, tiny_model):
    server = SGLangLaunch(str(tiny_model), python=sglang_python, dtype="float32").start()
    try:
        target = target_of(server, "gloo")

        def halted():
            for i, named in enumerate(weights(model)):
                if i == 3:
                    # Stopped, it neither answers nor takes part.
                    os.killpg(server.pid, signal.SIGSTOP)
                    Timer(2, os.killpg, (server.pid, signal.SIGKILL)).start()
                yield named

        with closing(WeightsSender()) as sender:
            fail_soon(sender, halted(), Route(1, (target,), bucket_bytes=1))
        assert not server.running
    finally:
        server.stop()
