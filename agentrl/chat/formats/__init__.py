"""Text to tool calls, one file per format: strict and linear.

A policy under training writes every kind of broken call. None of them may crash a parser, take
quadratic time, or vanish: what is not a call becomes a `ToolCall` with its error, so that the model
is told and the metrics count it.
"""

from agentrl.chat.formats.hermes import parse_hermes
from agentrl.chat.formats.react import REACT_STOP, parse_react

__all__ = ["REACT_STOP", "parse_hermes", "parse_react"]
