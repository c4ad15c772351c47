"""Isolation of code that a model wrote: it runs without network, files or rights, or not at all."""

from __future__ import annotations

from agentrl.sandbox.base import Box, Completed, EndedBy, Language, Limits, Sandbox

__all__ = ["Box", "Completed", "EndedBy", "Language", "Limits", "Sandbox"]
