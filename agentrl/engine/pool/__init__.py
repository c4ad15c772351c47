"""Several engines as one.

`pool` is the engine that runs see, `member` what it knows of each of its own, `breaker` when one is
asked again after a failure, `supervisor` what is done for those that failed.
"""

from agentrl.engine.pool.member import Pacing, PooledEngine
from agentrl.engine.pool.pool import Pool

__all__ = ["Pacing", "Pool", "PooledEngine"]
