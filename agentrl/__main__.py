"""`python -m agentrl`: the same as the command `agentrl`."""

from __future__ import annotations

from agentrl.cli import main

main()
