"""Codex. The argument is its executable."""

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
[agents]
enabled = false
[model_providers.agentrl]
name = "agentrl"
base_url = "{os.environ["OPENAI_BASE_URL"]}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""

with tempfile.TemporaryDirectory() as home:
    Path(home, "config.toml").write_text(CONFIG)
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    command = [sys.argv[1], "exec", *options, "-C", home, PROMPT]
    environment = {**os.environ, "CODEX_HOME": home}
    sys.exit(subprocess.run(command, env=environment, stdin=subprocess.DEVNULL).returncode)
