"""What every backend of the sandbox must do, as checks that run real programs in it.

In a test of a backend of your own::

    from agentrl.testing.sandbox_conformance import CHECKS

    @pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.name)
    async def test_it_conforms(check):
        await check.run(MySandbox())

Those with `isolating` hold for a backend that keeps programs away from this machine, those with
`boxes` for one that has boxes, those with `limits` for one that keeps all of `Limits`.
"""

from __future__ import annotations

from agentrl.testing.sandbox_conformance import boxes, isolation, limits, programs
from agentrl.testing.sandbox_conformance.check import CHECKS, Check

__all__ = ["CHECKS", "Check", "boxes", "isolation", "limits", "programs"]
