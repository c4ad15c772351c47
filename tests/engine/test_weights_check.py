"""The checksum by which SGLang shows that it has the weights that it was sent."""

import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.updates import sent_of

from agentrl.engine.remote.sglang import WeightsChecker
from agentrl.errors import EngineError

BF16 = torch.bfloat16


class Server:
    """Answers as SGLang does."""

    url = "http://server"

    def __init__(self, *, has_checksum=True):
        self.has_checksum = has_checksum
        self.weights, self.requests = {}, []

    def send(self, path, body):
        self.requests.append(path)
        assert (path, body) == ("/weights_checker", {"action": "checksum"})
        if not self.has_checksum:
            return 400, b'{"success": false, "message": "no GPU"}'
        sums = [t.double().sum().item() for t in self.weights.values()]
        return 200, orjson.dumps({"success": True, "per_engine_checksum": str(sums)})


def weights(seed=0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (32, 8),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.self_attn.k_proj.weight": (4, 8),
        "model.layers.0.self_attn.v_proj.weight": (4, 8),
        "model.layers.0.mlp.down_proj.weight": (8, 16),
        "model.norm.weight": (8,),
    }
    return {n: torch.randn(s, generator=random).to(dtype) for n, s in shapes.items()}


def proof(server):
    return WeightsChecker(server)  # type: ignore[arg-type]


def publish(server, checker, version, sent, arrives=None):
    """Send some weights, of which others arrive."""
    server.weights |= sent if arrives is None else arrives
    checker.check(version, sent_of(sent.items()))


def by_checksum():
    server = Server()
    server.weights |= weights()
    return server, proof(server)


def test_a_checksum_changes_with_the_weights_and_with_nothing_else():
    server, checker = by_checksum()
    for version, seed in enumerate([0, 1, 1, 2, 0]):
        publish(server, checker, version, weights(seed))


def test_weights_that_did_not_arrive():
    server, checker = by_checksum()
    publish(server, checker, 1, weights(1))
    with pytest.raises(EngineError, match=r"version 2 .* but the server's are as they were"):
        publish(server, checker, 2, weights(2), {})


def test_weights_that_changed_by_themselves():
    server, checker = by_checksum()
    publish(server, checker, 1, weights(1))
    with pytest.raises(EngineError, match=r"version 2 .* but the server's have changed"):
        publish(server, checker, 2, weights(1), weights(2))


def test_one_number_of_one_tensor_counts():
    server, checker = by_checksum()
    sent = weights(1, BF16)
    publish(server, checker, 1, sent)
    sent["model.norm.weight"] = sent["model.norm.weight"].clone()
    sent["model.norm.weight"][3] *= 2
    with pytest.raises(EngineError, match="as they were"):
        publish(server, checker, 2, sent, {})


def test_the_digest_depends_on_the_places_of_the_values():
    rows = torch.arange(12.0).reshape(3, 4)
    changed = [rows, rows[[1, 0, 2]], rows[:, [1, 0, 2, 3]], rows.T.reshape(3, 4), -rows]
    made = {digest(t.to(dtype)) for dtype in (torch.float32, BF16) for t in changed}
    assert len(made) == 10
    vectors = [torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0]), torch.tensor(3.0)]
    assert len({digest(v) for v in vectors}) == 3
    assert digest(rows) == digest(rows.clone())


def digest(tensor):
    return sent_of([("w", tensor)]).digest


@given(st.integers(1, 3), st.integers(0, 9_999), st.integers(0, 9_999))
def test_the_digest_of_a_large_tensor_changes_with_two_values_that_change_places(seed, i, j):
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(seed))
    swapped = values.clone()
    swapped[i], swapped[j] = values[j], values[i]
    assert (digest(values) == digest(swapped)) == torch.equal(values, swapped)


def test_a_server_without_checksums_is_asked_once():
    server = Server(has_checksum=False)
    checker = proof(server)
    for version in range(3):
        publish(server, checker, version, weights(version), {})
    assert server.requests == ["/weights_checker"]
