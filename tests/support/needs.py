"""Conditions for tests that not every machine can run. With CI=true such a test fails."""

import os
import shutil

import pytest
import transformers
from packaging.version import Version

MODELS = "5.24"
needs_newest_models = pytest.mark.skipif(
    Version(transformers.__version__) < Version(MODELS),
    reason=f"expects what models of transformers {MODELS} compute",
)
"""For tests of the modes that models get. In 5.12, for example, Nemotron-H is not causal over long
rows, and is refused; Qwen3.5 is not packed for another reason."""
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
