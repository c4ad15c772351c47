"""Episodes of a model at a URL: chat completions with tools, without token rows.

An OpenAI-compatible server returns no token ids, so the segment of such an episode is empty. Its
messages, tool calls, results and rewards are those of any other episode.
"""

from __future__ import annotations

import json
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.agent_loops.attempt import mix_seed
from agentrl.agent_loops.context import TokenRow
from agentrl.agent_loops.episode import Episode
from agentrl.config import RolloutConfig
from agentrl.engine.base import Sampler, Sampling
from agentrl.errors import ChatRefused, ConfigError, Infrastructure, RequestRefused, UserError
from agentrl.http.chat import NoAccess, OpenAIChat
from agentrl.http.client import parse_base_url
from agentrl.trajectory import Generation, Message, ToolCall, float_array, token_array

MAX_REQUESTS = 64
"""The most requests in flight to a server."""
TOKEN_COUNTS = "prompt_tokens", "completion_tokens"
"""The counts that are read of a server's `usage`; a missing one is 0."""
CHARACTERS = 4
"""The characters that count as a token where a tool result is cut."""


def parse_address(address: str) -> tuple[str, str]:
    """Return URL and name of a model `https://HOST/v1#NAME`.

    Raises:
        ConfigError: the address has another form.
    """
    url, _, name = address.partition("#")
    parse_base_url(url)
    if not name:
        raise ConfigError(f"--model {address}: add the model's name on the server: {url}#NAME")
    return url, name


class ChatModel(Sampler):
    """A model of an OpenAI-compatible server, which plays a `ChatEpisode`.

    Args:
        address: the URL up to `/v1`, then `#` and the model's name on the server.
        token: the bearer token, if the server needs one.
    """

    max_length = sys.maxsize
    is_concurrent = True

    def __init__(self, address: str, token: str = ""):
        url, name = parse_address(address)
        self._chat = OpenAIChat(url, name, token, MAX_REQUESTS)
        self._address = address

    async def generate(self, *_: Any, **__: Any) -> Generation:
        """Raise `UserError`: only `answer` asks the model."""
        raise UserError(
            f"{self._address} plays the policy and cannot also play the user: set"
            " interaction.kwargs.simulated_user.url"
        )

    async def answer(
        self, messages: Sequence[Message], schemas: Any, sampling: Sampling, seed: int, until: float
    ) -> tuple[Message, str, Mapping[str, int]]:
        """Return the model's next message, its finish reason and the server's counts of tokens.

        Raises:
            RequestRefused: the server rejects the length or the content of the conversation or the
                key, or has no such URL or model.
            Infrastructure: no answer, or not a chat completion.
        """
        options = {"top_p": sampling.top_p, "top_k": sampling.top_k, "stop": list(sampling.stop)}
        off = {"top_p": 1.0, "top_k": 0, "stop": []}
        body = {
            "messages": [_as_json(message) for message in messages],
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "seed": seed % 2**31,
            **{name: value for name, value in options.items() if value != off[name]},
            **({"tools": list(schemas)} if schemas else {}),
        }
        try:
            answer = await self._chat.complete(body, deadline=until)
        except ChatRefused as e:
            raise RequestRefused(str(e)) from None
        except NoAccess as e:  # The next attempt would fail, too.
            fix = "Check URL and name of --model, and the key (--token-env)"
            raise RequestRefused(f"{e}. {fix}") from None
        try:
            choice, counts = answer["choices"][0], answer.get("usage") or {}
            usage = {name: int(counts.get(name) or 0) for name in TOKEN_COUNTS}
            calls = enumerate(choice["message"].get("tool_calls") or ())
            text = choice["message"].get("content") or ""
            if not isinstance(text, str):  # A list of parts would be scored as the text "[{...".
                raise TypeError
            message = Message("assistant", text, tuple(_read_call(i, c) for i, c in calls))
        except (TypeError, LookupError, AttributeError, ValueError):
            problem = f"{self._address}: not a chat completion: {answer!r:.300}"
            raise Infrastructure(problem) from None
        return message, str(choice.get("finish_reason")), usage

    def close(self) -> None:
        """Do nothing: the rollouts close the connections of their event loop."""


def _as_json(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = message.as_dict()
    if message.tool_call_id:
        body["tool_call_id"] = message.tool_call_id
    if message.tool_calls and all(call.id for call in message.tool_calls):
        texts = [c.arguments if c.error else json.dumps(c.arguments) for c in message.tool_calls]
        body["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": text}}
            for c, text in zip(message.tool_calls, texts, strict=True)
        ]
    return body


def _read_call(index: int, call: Any) -> ToolCall:
    function, call_id = call["function"], str(call.get("id") or f"call_{index}")
    text = function.get("arguments") or "{}"
    try:
        arguments = json.loads(text) if isinstance(text, str) else text
        if isinstance(arguments, dict):
            return ToolCall(str(function["name"]), arguments, id=call_id)
        error = "the arguments are not a JSON object"
    except (ValueError, RecursionError) as e:
        error = f"the arguments are not JSON: {e}"
    return ToolCall(str(function["name"]), str(text), error, call_id)


class _NoTokens(TokenRow):
    """A row that stays empty."""

    def extend(self, *_: Any, **__: Any) -> None:
        pass


class NoTemplate:
    """The chat template of a `ChatModel`, which has none: conversations have no tokens."""

    stop_ids = ()
    images = None

    def prompt(self, *_: Any, **__: Any) -> array[int]:
        return token_array()

    def control_tokens_of(self, schemas: Any) -> Sequence[str]:
        return ()

    def count_control_tokens(self, *_: Any) -> int:
        return 0

    schema_control_tokens = count_control_tokens

    def encode(self, text: str) -> list[str]:
        return [text[i : i + CHARACTERS] for i in range(0, len(text), CHARACTERS)]

    def decode_plain(self, tokens: Sequence[str]) -> str:
        return "".join(tokens)

    def __getattr__(self, name: str) -> Any:
        raise UserError(f"a model at a URL has no tokens, and this needs them ({name})")


class ChatEpisode(Episode):
    """An episode whose turns a `ChatModel` writes."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._context.row = self._first_row = _NoTokens(token_array())
        self._tokens = self._first_prompt = 0

    async def _generate(
        self,
        rollout: RolloutConfig,
        stop: tuple[str, ...],
        parse: Callable[[str], list[ToolCall]] | None,
        requested: int | None,
    ) -> Message:
        attempt, model = self._attempt, self._runtime.sampler
        assert isinstance(model, ChatModel)
        if len(attempt.turns) >= rollout.max_turns:
            raise attempt.end_with("turns")
        remaining = rollout.max_trajectory_tokens - self._tokens
        if remaining < 1:
            raise attempt.end_with("trajectory_tokens")
        budget = min(remaining, rollout.max_turn_tokens)
        sampling = replace(attempt.sampling, max_tokens=min(budget, requested or budget), stop=stop)
        seed = mix_seed(attempt.seed, attempt.rollout, self._n_turns, self._seed)
        start = time.monotonic()
        with attempt.waiting_for("generate", self._conversation):
            try:
                message, reason, usage = await model.answer(
                    self.messages, () if parse else self._schemas, sampling, seed, attempt.deadline
                )
            except Infrastructure:
                attempt.check()
                raise
        if parse:
            message = replace(message, tool_calls=tuple(parse(message.content)))
        prompt, completion = (usage[name] for name in TOKEN_COUNTS)
        self._first_prompt = self._first_prompt or prompt
        self._tokens = prompt + completion - self._first_prompt
        reason = "length" if reason == "length" else "stop"
        turn = Generation(token_array(), float_array(), token_array(), reason, prompt)
        row, seconds = self._first_row, time.monotonic() - start
        self._add_turn(row, token_array(), turn, sampling.max_tokens, message, seconds)
        if reason == "length" and sampling.max_tokens == budget:
            raise attempt.end_with("turn_tokens" if budget < remaining else "trajectory_tokens")
        return message
