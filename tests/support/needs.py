"""Conditions for tests that not every machine can run. With CI=true such a test fails."""

import os
import shutil

import pytest

needs_sandbox = pytest.mark.skipif(
    not shutil.which("bwrap") and not os.environ.get("CI"),
    reason="no bwrap: install bubblewrap",
)

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
needs_browser = pytest.mark.skipif(
    not BROWSER and not os.environ.get("CI"),
    reason="no browser: install chromium (Debian's package)",
)
