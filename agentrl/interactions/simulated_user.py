"""`SimulatedUser`: a user with a goal, played by a language model."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.answers import without_thoughts
from agentrl.errors import ConfigError, Infrastructure
from agentrl.http.chat import Chat, OpenAIChat
from agentrl.http.client import parse_base_url
from agentrl.interactions.base import Interaction, Reply, interaction
from agentrl.trajectory import Message, Role, Sample

DONE = "###DONE###"
"""The text that the model writes when the user is done."""
ROLE = """\
You play a user who talks to an assistant. Write only the user's next message, in a few plain \
sentences. Stay in this role: do not help the assistant, do not invent facts that are not stated \
here, and share what you know only when the assistant asks for it.
{persona}Your goal: {goal}
When you have reached your goal, or clearly cannot reach it, write {done} and nothing else."""
GREETING = "Hello! How can I help you?"
"""The assistant's first message, before the row's prompt: chat templates need alternating roles."""


@interaction("simulated_user")
class SimulatedUser(Interaction):
    """A user with a persona and a goal, whose replies a language model writes.

    The model sees the conversation with the roles exchanged: the row's prompt is its own message,
    and the assistant's messages are user messages. It sees no system message, no tool call and no
    tool result. Its replies have no score; a reward function decides whether the goal was reached.
    """

    config_only = ("url", "model", "token_env", "max_tokens", "temperature", "timeout_s")

    def __init__(
        self,
        sample: Sample,
        chat: Chat,
        goal: str,
        persona: str = "",
        max_turns: int = 8,
        url: str = "",
        model: str = "",
        token_env: str = "",
        max_tokens: int = 256,
        temperature: float = 1.0,
        timeout_s: float = 60.0,
    ):
        """Make the user of one episode.

        Args:
            sample: the dataset row. Its prompt is the user's first message.
            chat: the run's engine, used if there is no `url`.
            goal: the goal of the user and the facts that the user knows.
            persona: who the user is and how they write.
            max_turns: the number of replies; then the conversation ends.
            url: the URL of an OpenAI-compatible server, with `/v1` at its end.
            model: the name of the model at the server.
            token_env: the environment variable that contains the server's token.
            max_tokens: the maximum number of tokens of a reply.
            temperature: the sampling temperature.
            timeout_s: the time limit of a reply, in seconds.
        """
        self._client = OpenAIChat(url, model, os.environ.get(token_env, "")) if url else None
        self._chat: Chat = self._client or chat
        self._sampling = {"max_tokens": max_tokens, "temperature": temperature}
        self._timeout_s = timeout_s
        self._replies_left = max_turns
        persona = f"Your persona: {persona}\n" if persona else ""
        self._messages = [
            Message("system", ROLE.format(persona=persona, goal=goal, done=DONE)),
            *_exchange_roles(sample.prompt),
        ]

    @classmethod
    def problems(cls, kwargs: Mapping[str, Any]) -> Iterator[str]:
        """Return problems with the arguments' values."""
        url, model, token_env = (kwargs.get(k, "") for k in ("url", "model", "token_env"))
        key = "interaction.kwargs.simulated_user"
        try:
            if url:
                parse_base_url(url)
        except ConfigError as e:
            yield f"{key}.url: {e}/v1"
        if bool(url) != bool(model):
            yield f"{key}.url={url!r} and {key}.model={model!r} go together: set both or neither"
        if token_env and not url:
            yield f"{key}.token_env={token_env!r} needs a url. Remove it"
        if token_env and token_env not in os.environ:
            yield f"{key}.token_env: there is no environment variable {token_env!r}"
        if not str(kwargs["goal"]).strip():
            yield "argument 'goal' is empty: say what the user wants"
        for name in ("max_turns", "max_tokens", "timeout_s"):
            value = kwargs.get(name, 1)
            if not isinstance(value, int | float) or value <= 0:
                yield f"argument {name!r} must be a number above 0, not {value!r}"

    async def respond(self, messages: Sequence[Message]) -> Reply | None:
        """Reply to the assistant's last message.

        Raises:
            Infrastructure: the model gave no reply. The sample is played again.
        """
        if self._replies_left < 1:
            return None
        self._replies_left -= 1
        message = without_thoughts(messages[-1].content).strip()
        self._messages.append(Message("user", message or "(no message)"))
        deadline = time.monotonic() + self._timeout_s
        text = await self._chat(tuple(self._messages), deadline=deadline, **self._sampling)
        reply, done, _ = _remove_thinking(text).partition(DONE)
        self._messages.append(Message("assistant", reply.strip()))
        return Reply(reply.strip(), done=bool(done) or not reply.strip())

    async def close(self) -> None:
        """Close the connection to the model's server."""
        if self._client:
            await self._client.aclose()


def _exchange_roles(prompt: Sequence[Message]) -> Iterator[Message]:
    """Yield the user and assistant messages of the prompt, each with the other role."""
    roles: dict[str, Role] = {"user": "assistant", "assistant": "user"}
    messages = [Message(roles[m.role], m.content) for m in prompt if m.role in roles]
    if messages and messages[0].role == "assistant":
        yield Message("user", GREETING)
    yield from messages


def _remove_thinking(text: str) -> str:
    """Return a reply without the thinking before it.

    Raises:
        Infrastructure: the reply is an unfinished thought.
    """
    reply = without_thoughts(text)
    if reply == text and reply.lstrip().startswith("<think>"):
        raise Infrastructure(
            "the simulated user's model used all of its tokens for thinking: raise"
            " interaction.kwargs.simulated_user.max_tokens, or turn its thinking off"
        )
    return reply
