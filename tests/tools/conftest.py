from __future__ import annotations

import pytest
from support.tool_server import TOKEN

from agentrl.tools import HttpToolbox, LocalToolbox
from agentrl.tools.runner import CallLimits


@pytest.fixture(params=["local", "http"])
async def toolbox(request, url):
    """A toolbox in process, and one that calls the server at the module's `url`.

    In process, it has one worker process: each one takes most of a second to start.
    """
    box = (
        LocalToolbox(CallLimits(processes=1))
        if request.param == "local"
        else HttpToolbox(url, TOKEN)
    )
    yield box
    await box.aclose()
