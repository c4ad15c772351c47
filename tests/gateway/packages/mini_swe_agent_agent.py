"""mini-swe-agent: one shell command per turn, through litellm."""

import os
import tempfile

from calculator import MODEL, PROMPT
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
with tempfile.TemporaryDirectory() as folder:
    agent = DefaultAgent(
        LitellmModel(model_name=f"openai/{MODEL}", cost_tracking="ignore_errors"),
        LocalEnvironment(cwd=folder),
        system_template="You work in a shell.",
        instance_template="{{task}}",
        step_limit=6,
        cost_limit=0,
    )
    print(agent.run(PROMPT))
