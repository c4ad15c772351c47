from __future__ import annotations

import os

import pytest
from hypothesis import settings

CI = os.environ.get("CI") == "true"

# Nothing in the tests may reach a model hub.
os.environ["HF_HUB_OFFLINE"] = "1"

# Two shared cores make any deadline a matter of luck.
settings.register_profile("agentrl", deadline=None, derandomize=CI)
settings.load_profile("agentrl")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """With CI=true a test that cannot run fails: nothing is skipped in silence."""
    report = yield
    if CI and report.skipped and not hasattr(report, "wasxfail"):
        file, line, reason = report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{file}:{line}: cannot run, and CI=true: {reason}"
    return report
