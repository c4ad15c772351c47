"""The run's toolbox, as `tools.transport` says."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from agentrl.config import SandboxConfig, ToolsConfig
from agentrl.tools.serving.background import serve_in_background
from agentrl.tools.toolbox import HttpToolbox, LocalToolbox, Toolbox

TOKEN_VARIABLE = "AGENTRL_TOOLS_TOKEN"


@contextmanager
def open_toolbox(
    config: ToolsConfig, files: Sequence[str], sandbox: SandboxConfig | None = None
) -> Iterator[Toolbox]:
    """Tools in process, on a server that is started here and stopped at the end, or on a given one.

    Args:
        config: the section `tools`.
        files: what a server started here loads.
        sandbox: the section `sandbox`, for the tools of such a server.

    Raises:
        UserError: a file does not load.
        ToolServerError: the server did not start; with the last lines it said.
        ConfigError: no server answers at the given URL.
    """
    if config.transport == "in_process":
        yield LocalToolbox()
    elif config.url:
        yield _asked(HttpToolbox(config.url, os.environ.get(TOKEN_VARIABLE, "")))
    else:
        url, token, server = serve_in_background(
            files, workers=config.workers, sandbox=sandbox and sandbox.model_dump()
        )
        with server:
            yield _asked(HttpToolbox(url, token))


def _asked(toolbox: HttpToolbox) -> HttpToolbox:
    """Let it ask the server for its tools here, where no event loop has to wait."""
    toolbox.schemas(())
    return toolbox
