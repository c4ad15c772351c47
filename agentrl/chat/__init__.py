"""Messages to tokens and back: the only reader of chat templates."""

from agentrl.chat.formats import REACT_STOP, parse_hermes, parse_react
from agentrl.chat.template import ChatTemplate
from agentrl.chat.tokenizer import load_tokenizer

__all__ = ["REACT_STOP", "ChatTemplate", "load_tokenizer", "parse_hermes", "parse_react"]
