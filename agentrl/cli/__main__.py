"""`python -m agentrl.cli`."""

from __future__ import annotations

from agentrl.cli import main

main()
