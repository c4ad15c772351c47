"""mini-swe-agent: a shell, through litellm. With the argument `retry`, it waits too briefly."""

import os
import tempfile

from calculator import MODEL, PROMPT, SECONDS
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
with tempfile.TemporaryDirectory() as folder:
    agent = DefaultAgent(
        LitellmModel(
            model_name=f"openai/{MODEL}",
            cost_tracking="ignore_errors",
            model_kwargs={"timeout": SECONDS},
        ),
        LocalEnvironment(cwd=folder),
        system_template="You work in a shell.",
        instance_template="{{task}}",
        step_limit=6,
        cost_limit=0,
    )
    print(agent.run(PROMPT))
