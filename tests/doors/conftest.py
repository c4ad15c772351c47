"""Doors with the packages of other projects, and without what the user has installed."""

import os
from pathlib import Path

import pytest

from agentrl.doors import door

PACKAGES = Path(__file__).parents[2] / ".venv-doors"


@pytest.fixture
def use_packages(tmp_path, monkeypatch, own_registries):
    """Give doors the packages of a list in tests/doors/packages; skip without them."""
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(door, "_loaded", set())
    door.rows_file.cache_clear()

    def use(packages: str, *names: str) -> None:
        folder = PACKAGES / packages
        if not (folder / "bin/python").exists():
            is_missing = "is missing" if os.environ.get("CI") else ""
            assert not is_missing or packages != "games", "make quick-doors"
            pytest.skip(f"no packages of {packages}: `make doors`")
        for name in names or (packages,):
            link = tmp_path / "home" / "doors" / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(folder.resolve())

    yield use
    door.rows_file.cache_clear()
