"""Checks that a server holds the weights that were sent to it: by their values, not by samples.

SGLang may offer two endpoints. Each is used if it exists:

- `/get_weights_by_name` (models of the Llama family) returns the first rows of a tensor. They must
  equal those that were sent, bit for bit.
- `/weights_checker` (on a GPU) returns a checksum of all weights. It must differ from the last one
  exactly if the weights that were sent differ from those sent before.

vLLM may offer `/weight_checker`, the checksum of the bytes of each tensor.
"""

from __future__ import annotations

import hashlib
from typing import Any

import orjson
import torch
from torch import Tensor, nn

from agentrl.engine.remote.admin import AdminClient
from agentrl.engine.remote.senders import COMPARED_ROWS, Sent
from agentrl.errors import EngineError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes in which a server may hold a tensor."""


class WeightsChecker:
    """Checks the weights of one SGLang server."""

    def __init__(self, admin: AdminClient):
        """Send no request yet. The first update shows which endpoints the server has."""
        self._admin = admin
        self._by_name = self._by_checksum = True
        self._checksum: str | None = None
        self._digest: str | None = None

    def check(self, version: int, sent: Sent) -> None:
        """Check that the server holds the weights of a version that were sent to it.

        Raises:
            EngineError: the server holds other weights.
        """
        if self._by_name:
            self._compare(version, sent)
        if self._by_checksum:
            self._check_checksum(version, sent)

    def _compare(self, version: int, sent: Sent) -> None:
        """Compare the values of some tensors, spread over the model."""
        for name, rows in sent.rows.items():
            status, content = self._admin.send(
                "/get_weights_by_name", {"name": name, "truncate_size": COMPARED_ROWS}
            )
            server_weights = orjson.loads(content) if status == 200 and content else None
            if server_weights is None:  # Not a model of the Llama family.
                self._by_name = False
                return
            if not _is_same(server_weights, rows):
                raise EngineError(
                    f"{self._admin.url}: version {version} was published, but the server"
                    f" holds other values of {name}"
                )

    def _check_checksum(self, version: int, sent: Sent) -> None:
        """Check that the checksum changes if and only if the weights that are sent change."""
        checksum = self._ask_checksum()
        if self._digest is not None and checksum is not None:
            sent_changed = sent.digest != self._digest
            server_changed = checksum != self._checksum
            if sent_changed != server_changed:
                raise EngineError(
                    f"{self._admin.url}: version {version} was published, and its weights"
                    + (
                        " differ from the last ones, but the server's are as they were"
                        if sent_changed
                        else " are the last ones, but the server's have changed"
                    )
                )
        self._digest, self._checksum = sent.digest, checksum

    def _ask_checksum(self) -> str | None:
        status, content = self._admin.send("/weights_checker", {"action": "checksum"})
        if status != 200:  # No GPU, or a version without it.
            self._by_checksum = False
            return None
        answer: dict[str, Any] = orjson.loads(content)
        return str(answer.get("per_engine_checksum") or answer.get("ranks"))


def _is_same(server_weights: list[Any], sent: Tensor) -> bool:
    """Return whether the numbers equal the tensor, in a dtype that the server may use.

    On a CPU SGLang pads columns with zeros to a multiple of 64.
    """
    expected = sent.float()
    server_tensor = torch.tensor(server_weights, dtype=torch.float32)
    if server_tensor.dim() == expected.dim() == 2:
        more = server_tensor.shape[1] - expected.shape[1]
        expected = nn.functional.pad(expected, (0, max(0, more)))
    if server_tensor.shape != expected.shape:
        return False
    return any(torch.equal(server_tensor, expected.to(d).float()) for d in DTYPES)


def check_norms(admin: AdminClient, version: int, sent: Sent) -> bool:
    """Compare vLLM's checksums of the model's norms with those of the tensors that were sent.

    Returns:
        Whether the server has checksums and at least one could be compared.

    Raises:
        EngineError: a checksum differs.
    """
    status, content = admin.send("/weight_checker", {"action": "checksum"})
    if status != 200:
        return False
    server_digests: dict[str, set[str]] = {}
    for name, digest in orjson.loads(content)["checksums"].items():
        server_digests.setdefault(name.rpartition(":")[2], set()).add(digest)
    has_compared = False
    for name, tensor in sent.norms.items():
        if name not in server_digests:
            continue
        if not server_digests[name] <= _digests(tensor) or len(server_digests[name]) > 1:
            raise EngineError(
                f"{admin.url}: version {version} was published, but the server holds"
                f" other values of {name}"
            )
        has_compared = True
    return has_compared


def _digests(tensor: Tensor) -> set[str]:
    """Return the SHA-256 of a tensor's bytes, in every dtype that a server may use."""
    return {
        hashlib.sha256(tensor.to(precision).view(torch.uint8).numpy().tobytes()).hexdigest()
        for precision in DTYPES
    }
