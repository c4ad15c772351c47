"""claude-agent-sdk, which runs Claude Code: its Bash tool may do arithmetic with `echo`.

With the argument `retry`, it waits too briefly for an answer; with `compact`, it goes on from a
summary after its first answer.
"""

import asyncio
import os
import sys
import tempfile

from calculator import PROMPT
from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient, ResultMessage

PROMPTS = [PROMPT, "/compact", "Sure?"] if "compact" in sys.argv else [PROMPT]


async def main(folder):
    options = ClaudeAgentOptions(
        allowed_tools=["Bash(echo:*)"],
        cwd=folder,
        setting_sources=[],
        env={
            "CLAUDE_CONFIG_DIR": os.path.join(folder, "claude"),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "ENABLE_TOOL_SEARCH": "false",
            "API_TIMEOUT_MS": "1800" if "retry" in sys.argv else "600000",
        },
    )
    async with ClaudeSDKClient(options) as client:
        for prompt in PROMPTS:
            await client.query(prompt)
            async for message in client.receive_response():
                if isinstance(message, ResultMessage):
                    assert not message.is_error, message
                    print(message.result)


with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(folder))
