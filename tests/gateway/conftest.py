from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def packages_python() -> str:
    """Return the Python of the environment with the packages (`make agents`)."""
    python = Path(__file__).parents[2] / ".venv-agents/bin/python"
    if not python.exists() and not os.environ.get("CI"):
        pytest.skip("no agent packages: `make agents`")
    return str(python)
