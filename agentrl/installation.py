"""How this agentrl was installed, for messages that say what to install."""

from __future__ import annotations

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
