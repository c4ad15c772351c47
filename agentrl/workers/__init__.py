"""Work that may hang, crash or never end, kept away from the event loop: threads and processes."""

from __future__ import annotations

from agentrl.workers.threads import Outcome, Threads

__all__ = ["Outcome", "Threads"]
