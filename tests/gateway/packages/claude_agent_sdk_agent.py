"""claude-agent-sdk, which runs Claude Code: its Bash tool may do arithmetic with `echo`."""

import asyncio
import os
import tempfile

from calculator import PROMPT
from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, query


async def main(folder):
    options = ClaudeAgentOptions(
        allowed_tools=["Bash(echo:*)"],
        cwd=folder,
        setting_sources=[],
        env={
            "CLAUDE_CONFIG_DIR": os.path.join(folder, "claude"),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "ENABLE_TOOL_SEARCH": "false",
        },
    )
    async for message in query(prompt=PROMPT, options=options):
        if isinstance(message, ResultMessage):
            assert not message.is_error, message
            print(message.result)


with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(folder))
