from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package")
def cluster() -> Iterator[str]:
    """One Ray cluster of four CPUs for the tests of this folder. Its value is the token's file."""
    pytest.importorskip("ray")
    from agentrl.cluster.connect import open_cluster

    before = signal.getsignal(signal.SIGTERM)
    with open_cluster(cpus=4, gpus=False):
        assert signal.getsignal(signal.SIGTERM) is before
        yield os.environ["RAY_AUTH_TOKEN_PATH"]
