"""Proof that a server holds the weights which it was sent: of numbers, not of what it samples.

SGLang may offer two, each used where it is there:

- `/get_weights_by_name` (models of Llama's family) returns the head of a tensor: it must be the one
  that was sent, to the bit.
- `/weights_checker` (on a GPU) returns a checksum of all its weights: it must differ from the last
  one exactly where what was sent differs from what was sent before.

vLLM may offer `/weight_checker`, the checksum of each tensor's bytes.
"""

from __future__ import annotations

import hashlib
from itertools import islice
from typing import Any

import orjson
import torch
from torch import Tensor

from agentrl.engine.base import Update
from agentrl.engine.remote.control import Control
from agentrl.errors import EngineError

COMPARED = 3
"""Tensors compared by value."""
ROWS = 8
"""Their first rows."""
MOST_ELEMENTS = 2**21
"""Of a tensor that is compared: SGLang writes all of it as numbers, then takes the first rows."""
NOT_COMPARED = ("k_proj", "v_proj")
"""SGLang cuts these out of a fused tensor, at places that are wrong where a model's heads are not
as wide as its hidden size divided by their number."""
NORM = "norm.weight"
"""Tensors so named lie in vLLM as in the files: not fused with others, nor split over GPUs."""
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
"""Those that a server may hold a tensor in."""


class WeightsChecker:
    """What is known of one SGLang server's weights."""

    def __init__(self, control: Control):
        """Ask nothing yet: what a server offers shows at the first update."""
        self._control = control
        self._by_name = self._by_checksum = True
        self._checksum: str | None = None
        self._digest: int | None = None

    def before(self) -> None:
        """Look at the weights that are there before the first update."""
        if self._by_checksum and self._digest is None:
            self._checksum = self._ask_checksum()

    def after(self, update: Update) -> None:
        """Prove an update.

        Raises:
            EngineError: the server holds something else.
        """
        if self._by_name:
            self._compare(update)
        if self._by_checksum:
            self._check(update)

    def _compare(self, update: Update) -> None:
        """Some tensors, spread over the model."""
        names = [
            name
            for name, tensor in update.weights()
            if tensor.numel() <= MOST_ELEMENTS and not any(part in name for part in NOT_COMPARED)
        ]
        chosen = set(names[:: max(1, len(names) // COMPARED)][:COMPARED])
        for name, tensor in islice(((n, t) for n, t in update.weights() if n in chosen), COMPARED):
            status, content = self._control.attempt(
                "/get_weights_by_name", {"name": name, "truncate_size": ROWS}
            )
            held = orjson.loads(content) if status == 200 and content else None
            if held is None:  # not of this model's family
                self._by_name = False
                return
            if not _same(held, tensor[:ROWS]):
                raise EngineError(
                    f"{self._control.url}: version {update.version} was published, but the server"
                    f" holds another {name}"
                )

    def _check(self, update: Update) -> None:
        """The checksum changes with what is sent, and with nothing else."""
        digest, checksum = _digest(update), self._ask_checksum()
        if self._digest is not None and checksum is not None:
            sent, held = digest != self._digest, checksum != self._checksum
            if sent != held:
                raise EngineError(
                    f"{self._control.url}: version {update.version} was published, and its weights"
                    + (
                        " differ from the last ones, but the server's are as they were"
                        if sent
                        else " are the last ones, but the server's have changed"
                    )
                )
        self._digest, self._checksum = digest, checksum

    def _ask_checksum(self) -> str | None:
        status, content = self._control.attempt("/weights_checker", {"action": "checksum"})
        if status != 200:  # no GPU, or a release without it
            self._by_checksum = False
            return None
        answer: dict[str, Any] = orjson.loads(content)
        return str(answer.get("per_engine_checksum") or answer.get("ranks"))


def _same(held: list[Any], sent: Tensor) -> bool:
    """Whether the numbers are those of the tensor, in the server's precision or the tensor's."""
    wide = sent.detach().float().cpu()
    found = torch.tensor(held, dtype=torch.float32)
    if found.shape != wide.shape:
        return False
    return any(torch.equal(found, wide.to(d).float()) for d in PRECISIONS)


def _digest(update: Update) -> int:
    """A number that differs where any weight does: sums of bits, by row and by name."""
    total = 0
    for name, tensor in update.weights():
        flat = tensor.detach().contiguous().reshape(-1)
        bits = flat.view(torch.int16).reshape(len(tensor) if tensor.dim() else 1, -1)
        rows = bits.sum(1, dtype=torch.int64)
        places = torch.arange(1, len(rows) + 1, device=rows.device)
        total ^= hash((name, int((rows * places).sum())))
    return total


def check_norms(control: Control, update: Update) -> bool:
    """Compare vLLM's checksums of the model's norms with those of what was sent.

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
