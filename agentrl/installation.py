"""How this agentrl was installed, and the folder of the files that it makes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

DISTRIBUTION = "agentrl-toolkit"
"""The name for pip. PyPI's `agentrl` is another project."""


def install_command(extra: str = "") -> str:
    """Return the command that installs agentrl again, with an extra of pyproject.toml.

    From a checkout it names the checkout's folder, so that it works in any folder. Otherwise pip
    reads the extra's packages from the distribution that is installed.
    """
    extras = f"[{extra}]" if extra else ""
    checkout = Path(__file__).parent.parent
    if (checkout / "pyproject.toml").is_file():
        return f'pip install -e "{checkout}{extras}"'
    return f'pip install "{DISTRIBUTION}{extras}"'


def home() -> Path:
    """Return the folder of files that agentrl can make again: $AGENTRL_HOME, or the user's cache.

    It has the generated models (`tiny`) and the cache of rows.
    """
    if configured := os.environ.get("AGENTRL_HOME"):
        return Path(configured).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "agentrl"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl"
