"""What an episode sees of tools: schemas to show, calls to run.

In this process or over HTTP, with the same answers: behind both stands the same `ToolHost`.
"""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import orjson

from agentrl.config import SandboxConfig, ToolsConfig
from agentrl.errors import (
    AgentRLError,
    ConfigError,
    DataError,
    RegistryError,
    ToolServerError,
    UserCodeError,
    UserError,
)
from agentrl.http import HttpClient, fetch_json
from agentrl.registry import Registry, tools
from agentrl.tools.payloads import encode_arguments, readable, unknown_tool
from agentrl.tools.serving.background import serve_in_background
from agentrl.tools.session import GRACE_SECONDS, ToolHost, UnknownEpisode, patience, worker_of
from agentrl.tools.tool import Offer, lanes_of, schemas_of
from agentrl.trajectory import Message, Sample, ToolCall, ToolResult
from agentrl.workers import run_all

ASK_SECONDS = 15.0
"""How long the server may take for what involves no tool's code."""
TOKEN_VARIABLE = "AGENTRL_TOOLS_TOKEN"


class Toolbox(ABC):
    """The tools of all episodes. Belongs to one event loop."""

    where: str
    """Where the tools run, for people."""

    @abstractmethod
    def schemas(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """OpenAI function schemas of the tools a row names, in that order.

        Raises:
            RegistryError: no tool of that name.
            UserError: two of the tools offer a function of the same name.
        """

    @abstractmethod
    async def open(self, episode_id: str, sample: Sample) -> None:
        """Begin an episode: make its class tools; only `sample.tools` may be called in it.

        Raises:
            UserError: a tool that is not there, or `create_kwargs` that its constructor refuses.
            UserCodeError: a constructor raised.
            ToolServerError: tools are out of reach; the episode may be played again.
        """

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
        lanes = self._lanes(episode_id)

        async def answer(index: int) -> ToolResult:
            call = calls[index]
            arguments = encode_arguments(call)
            if isinstance(arguments, ToolResult):
                return arguments
            if lanes is None:
                return unknown_tool(call.name, ())
            return await self._call((episode_id, turn, index), call.name, arguments, messages)

        if len(calls) == 1:
            return [await answer(0)]
        by_lane: dict[str | int, list[int]] = {}
        for i, call in enumerate(calls):
            by_lane.setdefault((lanes or {}).get(call.name, i), []).append(i)
        results: dict[int, ToolResult] = {}

        async def follow(indices: list[int]) -> None:
            for i in indices:
                results[i] = await answer(i)

        await run_all([follow(indices) for indices in by_lane.values()])
        return [results[i] for i in range(len(calls))]

    @abstractmethod
    async def close(self, episode_id: str) -> float:
        """End an episode: the sum of its class tools' `reward()`; they are closed in any case.

        Closing again gives the same answer; an episode that was never opened, 0.

        Raises:
            UserCodeError: a `reward()` raised.
            ToolServerError: tools are out of reach, and with them the reward.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """End whatever is still open."""

    @abstractmethod
    def _lanes(self, episode_id: str) -> dict[str, str] | None:
        """See `lanes_of`; None where the episode has no tools to call."""

    @abstractmethod
    async def _call(
        self, key: tuple[str, int, int], name: str, arguments: bytes, messages: Sequence[Message]
    ) -> ToolResult:
        """Run a call; `key` is its episode, turn and index, `arguments` are JSON."""


class LocalToolbox(Toolbox):
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

    async def close(self, episode_id: str) -> float:
        """See `Toolbox.close`."""
        try:
            return await self._host.close(episode_id)
        except UnknownEpisode:
            return 0.0

    async def aclose(self) -> None:
        """See `Toolbox.aclose`."""
        await self._host.aclose()

    def _lanes(self, episode_id: str) -> dict[str, str] | None:
        return self._host.lanes(episode_id)

    async def _call(
        self, key: tuple[str, int, int], name: str, arguments: bytes, messages: Sequence[Message]
    ) -> ToolResult:
        episode_id, turn, index = key
        session = self._host.session(episode_id)
        return await session.call(turn, index, name, orjson.loads(arguments), messages)


class _Opened(NamedTuple):
    """What is to be known of an open episode."""

    lanes: dict[str, str] | None
    """See `lanes_of`."""
    seconds: float
    """How long to wait for a call."""
    readers: Collection[str]
    """The functions that are sent the conversation."""


_NEVER = _Opened(None, 0.0, ())


class HttpToolbox(Toolbox):
    """Tools of a server: `agentrl tools serve`, or the one a training run starts.

    Args:
        url: the server, e.g. `http://127.0.0.1:8900`.
        token: its bearer token, if it has one.
    """

    def __init__(self, url: str, token: str = ""):
        self.where = f"at {url}"
        self._url, self._token = url, token
        self._workers = [self._client(url)]
        """A client for each worker of the server, by number."""
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
        await asyncio.gather(*(client.aclose() for client in self._workers))

    def _lanes(self, episode_id: str) -> dict[str, str] | None:
        return self._episodes.get(episode_id, _NEVER).lanes

    async def _call(
        self, key: tuple[str, int, int], name: str, arguments: bytes, messages: Sequence[Message]
    ) -> ToolResult:
        episode_id, turn, index = key
        _, seconds, readers = self._episodes.get(episode_id, _NEVER)
        body = {
            "turn": turn,
            "call_index": index,
            "name": name,
            "arguments": orjson.Fragment(arguments),
        }
        if name in readers:
            body["messages"] = readable(messages)
        path = f"/sessions/{quote(episode_id, safe='')}/calls"
        answer = await self._ask("POST", path, body, seconds, episode_id)
        try:
            return ToolResult(**answer)
        except TypeError:
            raise ToolServerError(f"{self._url}: not a tool's result: {answer!r}") from None

    async def _ask(self, method: str, path: str, body: Any, seconds: float, episode_id: str) -> Any:
        # Every request carries its key (episode, turn, index), so sending it again does no harm.
        client = self._workers[worker_of(episode_id, len(self._workers))]
        status, answer = await client.request_json(
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
            ports = [int(port) for port in answer.get("workers", ())]
        except (TypeError, KeyError, ValueError):
            raise ToolServerError(f"not a list of tools: {answer!r}") from None
        url = urlsplit(self._url)
        host = url.netloc.rpartition("@")[2].removesuffix(f":{url.port}")
        urls = [url._replace(netloc=f"{host}:{port}").geturl() for port in ports] or [self._url]
        self._workers = [self._client(url) for url in urls]
        return offers

    def _client(self, url: str) -> HttpClient:
        return HttpClient(url, token=self._token, error=ToolServerError)


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


@contextmanager
def open_toolbox(
    config: ToolsConfig, files: Sequence[str], sandbox: SandboxConfig | None = None
) -> Iterator[Toolbox]:
    """The run's toolbox, as `tools.transport` says.

    Its tools run in process, on a server that is started here and stopped at the end, or on a given
    one.

    Args:
        config: the section `tools`.
        files: what a server started here loads.
        sandbox: the section `sandbox`, for the tools of such a server.

    Raises:
        UserError: a file does not load.
        ToolServerError: the server did not start; with the last lines it said.
        ConfigError: no server answers at the given URL.
    """
    if config.transport == "in_process":
        yield LocalToolbox()
    elif config.url:
        toolbox = HttpToolbox(config.url, os.environ.get(TOKEN_VARIABLE, ""))
        toolbox.schemas(())  # asks the server here, where no event loop has to wait
        yield toolbox
    else:
        url, token, server = serve_in_background(
            files, workers=config.workers, sandbox=sandbox and sandbox.model_dump()
        )
        with server:
            toolbox = HttpToolbox(url, token)
            toolbox.schemas(())
            yield toolbox
