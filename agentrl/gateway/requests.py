"""Requests of clients and answers to them, in a form that no API's JSON determines.

    ChatRequest ─► Session ─► Answer

A `Dialect` (`agentrl.gateway.dialects`) translates both from and to the JSON of an API.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl.errors import AgentRLError
from agentrl.gateway.output_format import OutputFormat
from agentrl.images import Image
from agentrl.trajectory import Role

MODEL = "policy"
"""The name of the policy as a model. Requests may use any other name, too."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A tool call as clients see it.

    Attributes:
        id: identifies the call within the session.
        name: the name of the tool.
        arguments: the text of a JSON object.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message as a client sends it.

    Attributes:
        role: system, user, assistant or tool.
        text: the text, without tool calls and thinking. Each image has a `PLACE` in it.
        calls: the calls of an assistant message.
        call_id: in a tool message, the id of the call that it answers.
        reasoning: the thinking of an assistant message; "" if the client does not send it.
        images: the images, as in `Message`.
    """

    role: Role
    text: str
    calls: tuple[ChatCall, ...] = ()
    call_id: str = ""
    reasoning: str = ""
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for the next assistant message.

    Attributes:
        messages: the whole conversation so far.
        tools: the schemas of the tools, as chat templates take them.
        model: the name that the client gave the model.
        max_tokens: the largest number of tokens of the answer; None: only the run's limits apply.
        stop: texts that end the answer.
        stream: True if the client wants the answer as events.
        stream_usage: True if the last event must contain the numbers of tokens.
        shows_thinking: False if the answer must not contain the policy's thinking.
        is_retry: True if the client says that it sends the request again.
        sampling: the `temperature`, `top_p` and `top_k` that the client asked for. In training the
            run decides them.
        ignored: the names of the fields that are ignored because the run decides them, such as
            `temperature`.
        output_format: the form that the client wants the text of the answer to have; None: any.
        kept: the messages that a later request may continue by the answer's id; None: none may.
        fields: fields of the request's JSON that the JSON of the answer depends on.
        body: its JSON with sorted keys. Equal requests have equal bytes.
    """

    messages: tuple[ChatMessage, ...]
    tools: Sequence[Mapping[str, Any]] = ()
    model: str = ""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_usage: bool = False
    shows_thinking: bool = True
    is_retry: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    output_format: OutputFormat | None = None
    kept: tuple[ChatMessage, ...] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Answer:
    """The policy's message as clients see it.

    Attributes:
        id: unique for each answer.
        text: its text, without tool calls and thinking.
        reasoning: its thinking; "" if there is none.
        calls: its well-formed calls. A malformed call stays in the text.
        finish_reason: "length" if a limit cut it; "tool_calls" if it has calls; else "stop".
        stop: the one of the request's `stop` that ended it; "" if none did.
        prompt_tokens: the tokens of the prompt.
        cached_tokens: those of them that were in the engine's prefix cache.
        completion_tokens: the sampled tokens.
    """

    id: str
    text: str
    reasoning: str = ""
    calls: tuple[ChatCall, ...] = ()
    finish_reason: Literal["stop", "length", "tool_calls"] = "stop"
    stop: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Refusal(AgentRLError):
    """An error that is the answer to a request.

    Args:
        status: the HTTP status.
        code: a short name of the reason (`episode_over`).
        message: the reason, and what to do.
        field: the field of the request that is wrong; "" if no field is.
    """

    def __init__(self, status: int, code: str, message: str, field: str = ""):
        super().__init__(message)
        self.status, self.code, self.field = status, code, field
