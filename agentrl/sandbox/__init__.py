"""Isolation of code that a model wrote: it runs without network, files and privileges.

If the code cannot be isolated, it is not run.

Example::

    from agentrl import sandbox

    done = await sandbox.current().run("print(6 * 7)")
    assert done.ok and done.stdout.strip() == "42"
"""

from __future__ import annotations

from agentrl.sandbox.base import Sandbox
from agentrl.sandbox.box import Box
from agentrl.sandbox.program import Completed, EndedBy, Language, Limits
from agentrl.sandbox.settings import configure, current, current_config, limits, probe, release

__all__ = [
    "Box", "Completed", "EndedBy", "Language", "Limits", "Sandbox", "configure", "current",
    "current_config", "limits", "probe", "release",
]  # fmt: skip
