"""An SGLang server as the engine, over HTTP.

`client` is the engine, `answers` reads what the server says, `weights` is what it is given,
`launch` a server of our own and `leash` the process that holds it.
"""

from agentrl.engine.sglang.client import SGLangEngine
from agentrl.engine.sglang.launch import SGLangServer

__all__ = ["SGLangEngine", "SGLangServer"]
