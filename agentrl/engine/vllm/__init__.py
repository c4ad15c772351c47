"""A vLLM server as the engine, over HTTP. Experimental.

`client` is the engine, `dialect` how it is asked and what it answers, `sync` how the policy goes to
it, `launch` a server of our own and `guard` what that one asks every caller for.
"""

from agentrl.engine.vllm.client import VLLMEngine
from agentrl.engine.vllm.launch import VLLMLaunch
from agentrl.engine.vllm.sync import AdapterSender, DiskSender

__all__ = ["AdapterSender", "DiskSender", "VLLMEngine", "VLLMLaunch"]
