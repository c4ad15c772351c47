"""Messages to tokens and back: the only reader of chat templates."""

from agentrl.chat.encoding import truncate
from agentrl.chat.formats import REACT_STOP, parse_hermes, parse_react
from agentrl.chat.formats.adapters import ForeignParser
from agentrl.chat.formats.detect import Reader, open_reader
from agentrl.chat.template import ChatTemplate
from agentrl.chat.tokenizer import load_tokenizer

__all__ = [
    "REACT_STOP", "ChatTemplate", "ForeignParser", "Reader", "load_tokenizer", "open_reader",
    "parse_hermes", "parse_react", "truncate",
]  # fmt: skip
