"""The APIs of the gateway: they translate JSON to `ChatRequest`, and `Answer` to JSON or events.

A new API is a new subclass of `Dialect`. No other module knows the JSON of an API.
"""

from __future__ import annotations

from agentrl.gateway.dialects.base import Dialect
from agentrl.gateway.dialects.chat_completions import ChatCompletions
from agentrl.gateway.dialects.messages import Messages
from agentrl.gateway.dialects.responses import Responses

__all__ = ["DIALECTS", "ChatCompletions", "Dialect", "Messages", "Responses"]

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Responses(), Messages())
