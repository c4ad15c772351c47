"""Messages to tokens and back: the only reader of chat templates."""

from agentrl.chat.parsers import parse_react, parse_tool_calls
from agentrl.chat.template import ChatTemplate
from agentrl.chat.tokenizer import load_tokenizer

__all__ = ["ChatTemplate", "load_tokenizer", "parse_react", "parse_tool_calls"]
