"""Codex. The first argument is its executable.

With `retry` it waits too briefly for an answer; with `compact` it goes on from a summary after its
first turn; with `helper` it has sub-agents.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from calculator import MODEL, PROMPT

CONFIG = f"""
model = "{MODEL}"
model_provider = "agentrl"
web_search = "disabled"
{"model_auto_compact_token_limit = 100" if "compact" in sys.argv else ""}
[agents]
enabled = {str("helper" in sys.argv).lower()}
[model_providers.agentrl]
name = "agentrl"
base_url = "{os.environ["OPENAI_BASE_URL"]}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
stream_idle_timeout_ms = {500 if "retry" in sys.argv else 300_000}
"""

with tempfile.TemporaryDirectory() as home:
    Path(home, "config.toml").write_text(CONFIG)
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    command = [sys.argv[1], "exec", *options, "-C", home, PROMPT]
    environment = {**os.environ, "CODEX_HOME": home}
    sys.exit(subprocess.run(command, env=environment, stdin=subprocess.DEVNULL).returncode)
