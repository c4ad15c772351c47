"""Publishing: from the learner to the engine, with what it took."""

from __future__ import annotations

import time
from collections.abc import Iterator

from torch import Tensor

from agentrl.engine.base import EngineControl
from agentrl.trainer.learner import Learner


def publish(learner: Learner, engine: EngineControl, version: int) -> dict[str, float]:
    """Hand the learner's weights to the engine; what it samples from now on carries `version`.

    Returns:
        `timing_s/update_weights` and `perf/update_weights_bytes`.
    """
    sent = 0

    def counted() -> Iterator[tuple[str, Tensor]]:
        nonlocal sent
        for name, tensor in learner.export():
            sent += tensor.nbytes
            yield name, tensor

    start = time.perf_counter()
    engine.publish(counted(), version)
    return {
        "timing_s/update_weights": time.perf_counter() - start,
        "perf/update_weights_bytes": float(sent),
    }
