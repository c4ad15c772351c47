"""The names of `agentrl.learner.dispatch` that users import for methods of their own ranks."""

from __future__ import annotations

from agentrl.learner.dispatch import BROADCAST, SPLIT, Dispatch, dispatch

__all__ = ["BROADCAST", "SPLIT", "Dispatch", "dispatch"]
