"""Many processes on any number of machines, by Ray: the only room that knows it.

A run opens a site in a cluster (`open_site`), gets its ranks there as a group with the methods of
one, and places for its servers.
"""

from agentrl.cluster.open import RaySite, open_site

__all__ = ["RaySite", "open_site"]
