"""What an episode sees of tools: schemas to show, calls to run.

In this process or over HTTP, with the same answers: behind both stands the same `ToolHost`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import orjson

from agentrl.errors import (
    AgentRLError,
    ConfigError,
    DataError,
    RegistryError,
    ToolServerError,
    UserCodeError,
    UserError,
)
from agentrl.http import fetch_json
from agentrl.registry import Registry, tools
from agentrl.tools.arguments import readable
from agentrl.tools.catalogue import Offer, lanes_of, schemas_of
from agentrl.tools.remote import RemoteWorkers
from agentrl.tools.session import GRACE_SECONDS, ToolHost, UnknownEpisode, patience
from agentrl.tools.side_by_side import side_by_side
from agentrl.trajectory import Message, Sample, ToolCall, ToolResult

ASK_SECONDS = 15.0
"""How long the server may take for what involves no tool's code."""


class Toolbox(Protocol):
    """The tools of all episodes. Belongs to one event loop."""

    @property
    def where(self) -> str:
        """Where the tools run, for people."""
        ...

    def schemas(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """OpenAI function schemas of the tools a row names, in that order.

        Raises:
            RegistryError: no tool of that name.
            UserError: two of the tools offer a function of the same name.
        """
        ...

    async def open(self, episode_id: str, sample: Sample) -> None:
        """Begin an episode: make its class tools; only `sample.tools` may be called in it.

        Raises:
            UserError: a tool that is not there, or `create_kwargs` that its constructor refuses.
            UserCodeError: a constructor raised.
            ToolServerError: tools are out of reach; the episode may be played again.
        """
        ...

    async def run(
        self,
        calls: Sequence[ToolCall],
        episode_id: str,
        turn: int,
        messages: Sequence[Message] = (),
    ) -> list[ToolResult]:
        """Run the calls of one turn side by side; results in the order of the calls.

        Calls that share a class tool's object or the episode's `state` run one after another, in
        order. A model's mistake is a result, never an exception; in an episode that is not open,
        any call is one.

        Args:
            calls: as parsed; those with an `error` are answered without being run.
            episode_id: of an open episode, or of one whose row has no tools.
            turn: not used before in this episode: (turn, position) is what makes a call the same
                call when it is sent again.
            messages: the conversation so far, for tools that ask for it.

        Raises:
            ToolServerError: tools are out of reach; the episode may be played again.
            UserCodeError: the `reward()` of an object that was made for one call raised.
        """
        ...

    async def close(self, episode_id: str) -> float:
        """End an episode: the sum of its class tools' `reward()`; they are closed in any case.

        Closing again gives the same answer; an episode that was never opened, 0.

        Raises:
            UserCodeError: a `reward()` raised.
            ToolServerError: tools are out of reach, and with them the reward.
        """
        ...

    async def aclose(self) -> None:
        """End whatever is still open."""
        ...


class LocalToolbox:
    """Tools in this process, from the registry."""

    where = "in this process"

    def __init__(self) -> None:
        self._host = ToolHost()

    def schemas(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """See `Toolbox.schemas`."""
        return schemas_of([tools.get(n).offer for n in dict.fromkeys(names)])

    async def open(self, episode_id: str, sample: Sample) -> None:
        """See `Toolbox.open`."""
        await self._host.open(episode_id, sample, create_kwargs_of(sample))

    async def run(
        self,
        calls: Sequence[ToolCall],
        episode_id: str,
        turn: int,
        messages: Sequence[Message] = (),
    ) -> list[ToolResult]:
        """See `Toolbox.run`."""

        async def call(index: int, arguments: bytes) -> ToolResult:
            name, given = calls[index].name, orjson.loads(arguments)
            return await self._host.call(episode_id, turn, index, name, given, messages)

        return await side_by_side(calls, call, self._host.lanes(episode_id))

    async def close(self, episode_id: str) -> float:
        """See `Toolbox.close`."""
        try:
            return await self._host.close(episode_id)
        except UnknownEpisode:
            return 0.0

    async def aclose(self) -> None:
        """See `Toolbox.aclose`."""
        await self._host.aclose()


class _Opened(NamedTuple):
    """What is to be known of an open episode."""

    lanes: dict[str, str] | None
    """See `lanes_of`."""
    seconds: float
    """How long to wait for a call."""
    readers: Collection[str]
    """The functions that are sent the conversation."""


_NEVER = _Opened(None, 0.0, ())


class HttpToolbox:
    """Tools of a server: `agentrl tools serve`, or the one a training run starts.

    Args:
        url: the server, e.g. `http://127.0.0.1:8900`.
        token: its bearer token, if it has one.
    """

    def __init__(self, url: str, token: str = ""):
        self.where = f"at {url}"
        self._url, self._token = url, token
        self._workers = RemoteWorkers(url, token)
        self._offers: Registry[Offer] | None = None
        self._episodes: dict[str, _Opened] = {}

    def schemas(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """See `Toolbox.schemas`. The first time, the server is asked, and the caller blocked.

        Raises:
            ConfigError: no tool server answers at the URL.
        """
        if self._offers is None:
            try:
                status, answer = fetch_json(
                    self._url, "/tools", token=self._token, error=ToolServerError, timeout=10.0
                )
                self._offers = self._learn(_accepted(status, answer))
            except ToolServerError as e:
                raise ConfigError(
                    f"no tool server at {self._url} ({e}). Start one with `agentrl tools serve"
                    " FILE...`, or set tools.transport=http: the run starts its own."
                ) from None
        return schemas_of([self._offers.get(n) for n in dict.fromkeys(names)])

    async def open(self, episode_id: str, sample: Sample) -> None:
        """See `Toolbox.open`."""
        if self._offers is None:
            self._offers = self._learn(await self._ask("GET", "/tools", None, ASK_SECONDS, ""))
        offers = [self._offers.get(n) for n in dict.fromkeys(sample.tools)]
        body = {
            "episode_id": episode_id,
            "sample": sample if any(o.wants_row for o in offers) else {"tools": sample.tools},
            "create_kwargs": create_kwargs_of(sample),
        }
        seconds = ASK_SECONDS + sum(patience(o.timeout) for o in offers if o.stateful)
        try:
            await self._ask("POST", "/sessions", body, seconds, episode_id)
        except TypeError as e:
            raise DataError(
                f"row {sample.row} (id {sample.id!r}) holds what JSON cannot, so it cannot be sent"
                f" to its tools: {e}"
            ) from e
        longest = max((patience(o.timeout) for o in offers), default=0.0)
        readers = {f for o in offers if "messages" in o.injected for f in o.functions}
        self._episodes[episode_id] = _Opened(lanes_of(offers), ASK_SECONDS + longest, readers)

    async def run(
        self,
        calls: Sequence[ToolCall],
        episode_id: str,
        turn: int,
        messages: Sequence[Message] = (),
    ) -> list[ToolResult]:
        """See `Toolbox.run`."""
        lanes, seconds, readers = self._episodes.get(episode_id, _NEVER)
        path = f"/sessions/{quote(episode_id, safe='')}/calls"

        async def call(index: int, arguments: bytes) -> ToolResult:
            body = {
                "turn": turn,
                "call_index": index,
                "name": calls[index].name,
                "arguments": orjson.Fragment(arguments),
            }
            if calls[index].name in readers:
                body["messages"] = readable(messages)
            answer = await self._ask("POST", path, body, seconds, episode_id)
            try:
                return ToolResult(**answer)
            except TypeError:
                raise ToolServerError(f"{self._url}: not a tool's result: {answer!r}") from None

        return await side_by_side(calls, call, lanes)

    async def close(self, episode_id: str) -> float:
        """See `Toolbox.close`."""
        path = f"/sessions/{quote(episode_id, safe='')}"
        seconds = self._episodes.get(episode_id, _NEVER).seconds or ASK_SECONDS
        try:
            seconds = GRACE_SECONDS + 2 * seconds
            answer = await self._ask("DELETE", path, None, seconds, episode_id)
        except ToolServerError:
            # What was not opened may still be half open over there, and needs no answer.
            if episode_id in self._episodes:
                raise
            return 0.0
        finally:
            self._episodes.pop(episode_id, None)
        return float(answer["reward"])

    async def aclose(self) -> None:
        """See `Toolbox.aclose`."""
        await asyncio.gather(*map(self.close, list(self._episodes)), return_exceptions=True)
        await self._workers.aclose()

    async def _ask(self, method: str, path: str, body: Any, seconds: float, episode_id: str) -> Any:
        # Every request carries its key (episode, turn, index), so sending it again does no harm.
        status, answer = await self._workers.of(episode_id).request_json(
            method, path, body, deadline=time.monotonic() + seconds, retries=1, patient=True
        )
        if status == 421:
            self._offers = None  # the server has other workers than it had
        return _accepted(status, answer)

    def _learn(self, answer: Any) -> Registry[Offer]:
        """The server's tools by name, and where its workers are."""
        offers: Registry[Offer] = Registry("tool")
        try:
            for fields in answer["tools"]:
                offers.add(fields["name"], Offer(**fields))
            self._workers.spread([int(port) for port in answer.get("workers", ())])
        except (TypeError, KeyError, ValueError):
            raise ToolServerError(f"not a list of tools: {answer!r}") from None
        return offers


def create_kwargs_of(sample: Sample) -> dict[str, Mapping[str, Any]]:
    """By tool, what the row gives its constructor."""
    kwargs = {n: sample.tools_kwargs[n] for n in sample.tools if n in sample.tools_kwargs}
    return {n: k.get("create_kwargs") or {} for n, k in kwargs.items()}


_ERRORS: dict[str, type[AgentRLError]] = {
    e.__name__: e for e in (UserError, DataError, RegistryError, UserCodeError)
}


def _accepted(status: int, answer: Any) -> Any:
    """The answer of a request that went well; the server's errors are raised as they were there."""
    if status == 200:
        return answer
    if not isinstance(answer, dict) or "error" not in answer:
        raise ToolServerError(f"the tool server answered with status {status}: {answer!r}")
    raise _ERRORS.get(answer["error"], ToolServerError)(answer["message"])
