"""Proof that a server holds the weights which it was sent: of their bytes."""

from __future__ import annotations

import hashlib

import orjson
import torch
from torch import Tensor

from agentrl.engine.base import Update
from agentrl.engine.server.control import Control
from agentrl.errors import EngineError

NORM = "norm.weight"
"""Tensors so named lie in vLLM as in the files: not fused with others, nor split over GPUs."""
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)


def prove(control: Control, update: Update) -> bool:
    """Compare the checksums of the model's norms with those of what was sent.

    Returns:
        Whether the server has checksums, and one at least could be compared.

    Raises:
        EngineError: one differs.
    """
    status, content = control.attempt("/weight_checker", {"action": "checksum"})
    if status != 200:
        return False
    held: dict[str, set[str]] = {}
    for name, digest in orjson.loads(content)["checksums"].items():
        held.setdefault(name.rpartition(":")[2], set()).add(digest)
    compared = False
    for name, tensor in update.weights():
        if not name.endswith(NORM) or name not in held:
            continue
        if not held[name] <= _digests(tensor) or len(held[name]) > 1:
            raise EngineError(
                f"{control.url}: version {update.version} was published, but the server holds"
                f" another {name}"
            )
        compared = True
    return compared


def _digests(tensor: Tensor) -> set[str]:
    """SHA-256 of a tensor's bytes, in every precision that a server may hold it in."""
    there = tensor.detach().cpu().contiguous()
    return {
        hashlib.sha256(there.to(precision).view(torch.uint8).numpy().tobytes()).hexdigest()
        for precision in PRECISIONS
    }
