from __future__ import annotations

import pytest
from support.tool_server import TOKEN

from agentrl.tools import HttpToolbox, LocalToolbox


@pytest.fixture(params=["local", "http"])
async def toolbox(request, url):
    """A toolbox in process, and one that calls the server at the module's `url`."""
    box = LocalToolbox() if request.param == "local" else HttpToolbox(url, TOKEN)
    yield box
    await box.aclose()
