"""An SGLang server as the engine, over HTTP.

`client` is the engine, `requests` asks the server, `answers` reads what it says, `sync` are the
ways of the policy to it, `proof` shows that it arrived, `launch` starts a server, `open` does all
that for a run.
"""

from agentrl.engine.sglang.client import SGLangEngine
from agentrl.engine.sglang.launch import Lora, SGLangLaunch

__all__ = ["Lora", "SGLangEngine", "SGLangLaunch"]
