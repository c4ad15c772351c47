"""Many processes on any number of machines, by Ray: the only room that knows it.

A run opens a cluster (`open_cluster`), gets its ranks there as a group with the methods of one, and
places for its servers.
"""

from agentrl.cluster.open import Cluster, open_cluster

__all__ = ["Cluster", "open_cluster"]
