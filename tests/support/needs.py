"""What some tests need of a machine. With CI set none is skipped: one that cannot run fails."""

import os
import shutil

import pytest

needs_sandbox = pytest.mark.skipif(
    not shutil.which("bwrap") and not os.environ.get("CI"),
    reason="no bwrap: install bubblewrap",
)
