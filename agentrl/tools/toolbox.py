"""The interface of an episode to its tools: schemas to show to the model, and calls to run.

Tools run in this process or behind HTTP, with the same results: both use `ToolHost`.
"""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
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
from agentrl.http.pool import MAX_CONNECTIONS_TO_SERVER
from agentrl.registry import Registry, tools
from agentrl.replies import Reply
from agentrl.tools.payloads import (
    encode_arguments,
    from_wire,
    storable_messages,
    to_opening,
    to_wire,
    unknown_tool,
)
from agentrl.tools.runner import QUEUE_SECONDS, CallLimits
from agentrl.tools.serving.background import serve_in_background
from agentrl.tools.session import (
    GRACE_SECONDS,
    Opened,
    ToolHost,
    UnknownEpisode,
    worker_number,
)
from agentrl.tools.tool import ToolSpec, environment_hooks, schemas_of, serial_groups_of
from agentrl.trajectory import Message, Sample, Scores, ToolCall, ToolResult, copy_value
from agentrl.workers import run_all

REQUEST_SECONDS = 15.0
"""Timeout of requests that run no code of a tool."""
TOKEN_VARIABLE = "AGENTRL_TOOLS_TOKEN"


class Toolbox(ABC):
    """The tools of all episodes. Belongs to one event loop."""

    where: str
    """Where the tools run, for messages."""

    @abstractmethod
    def schemas(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the OpenAI function schemas of the tools that a row lists, in that order.

        Raises:
            RegistryError: a tool does not exist.
            UserError: two of the tools offer a function of the same name.
        """

    @abstractmethod
    async def open(self, episode_id: str, sample: Sample) -> Opened:
        """Begin an episode and create its class tools. It may only call `sample.tools`.

        Returns:
            The messages of the class tools' `opening()` in the order of `sample.tools`, or of the
            environment's `start()`; the names of the functions; and the environment's hooks.

        Raises:
            UserError: a tool does not exist, or its constructor does not take the `create_kwargs`.
            UserCodeError: a constructor, an `opening()` or a `start()` raised or took too long.
            ToolServerError: the tools are unreachable; the episode may be played again.
        """

    async def run(
        self,
        calls: Sequence[ToolCall],
        episode_id: str,
        turn: int,
        messages: Sequence[Message] = (),
    ) -> list[ToolResult]:
        """Run the calls of one turn concurrently and return the results in the order of the calls.

        Calls that share a class tool's object or the episode's `state` run one after another, in
        order. A mistake of the model is a result, never an exception. In an episode that is not
        open, every call returns the error `unknown_tool`.

        Args:
            calls: the calls of the parser. A call with an `error` gets a result without being run.
            episode_id: an open episode, or one whose row has no tools.
            turn: a number that this episode has not used before. A call that is sent again is
                recognized by its turn and position.
            messages: the conversation so far, for tools with a parameter `messages`.

        Raises:
            ToolServerError: the tools are unreachable; the episode may be played again.
            UserCodeError: the `reward()` of an object that was created for one call raised.
        """
        serial_groups = self._serial_groups(episode_id)

        async def answer(index: int) -> ToolResult:
            call = calls[index]
            arguments = encode_arguments(call)
            if isinstance(arguments, ToolResult):
                return arguments
            if serial_groups is None:
                return unknown_tool(call.name, ())
            return await self._call((episode_id, turn, index), call.name, arguments, messages)

        if len(calls) == 1:
            return [await answer(0)]
        by_group: dict[str | int, list[int]] = {}
        for i, call in enumerate(calls):
            by_group.setdefault((serial_groups or {}).get(call.name, i), []).append(i)
        results: dict[int, ToolResult] = {}

        async def run_in_order(indices: list[int]) -> None:
            for i in indices:
                results[i] = await answer(i)

        await run_all([run_in_order(indices) for indices in by_group.values()])
        return [results[i] for i in range(len(calls))]

    @abstractmethod
    async def respond(
        self, episode_id: str, turn: int, messages: Sequence[Message]
    ) -> Reply | None:
        """Return the reply of the episode's environment to a turn; None if it ends the episode.

        Args:
            episode_id: an open episode, whose environment replies (`Opened.hooks`).
            turn: the number of the turn. If it is sent again, the environment is not asked again.
            messages: the conversation so far.

        Raises:
            UserCodeError: `respond()` raised, took too long, or returned something else.
            ToolServerError: the tools are unreachable; the episode may be played again.
        """

    @abstractmethod
    async def score(self, episode_id: str, messages: Sequence[Message]) -> Scores:
        """Return the reward of the episode's environment, whose `reward()` is called once.

        Args:
            episode_id: an open episode, whose environment has a reward (`Opened.hooks`).
            messages: the whole conversation.

        Raises:
            UserCodeError: `reward()` raised, took too long, or returned something else.
            ToolServerError: the tools are unreachable; the episode may be played again.
        """

    @abstractmethod
    async def close(self, episode_id: str) -> float:
        """End an episode, close its class tools, and return the sum of their rewards.

        A second call returns the same sum. For an episode that was never opened, the sum is 0.

        Raises:
            UserCodeError: a `reward()` raised.
            ToolServerError: the tools are unreachable, so the reward is unknown.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Close all open episodes and connections."""

    @abstractmethod
    def _serial_groups(self, episode_id: str) -> dict[str, str] | None:
        """Return the result of `serial_groups_of` for an episode; None if it is not open."""

    @abstractmethod
    async def _call(
        self, key: tuple[str, int, int], name: str, arguments: bytes, messages: Sequence[Message]
    ) -> ToolResult:
        """Run a call. `key` is its episode, turn and index; `arguments` are JSON."""


class LocalToolbox(Toolbox):
    """Runs the registered tools in this process.

    Args:
        limits: the numbers of threads and processes, and the longest wait for one.
    """

    where = "in this process"

    def __init__(self, limits: CallLimits = CallLimits()) -> None:
        self._host = ToolHost(limits=limits)

    def schemas(self, names: Sequence[str]) -> list[dict[str, Any]]:
        return schemas_of([tools.get(n).spec for n in dict.fromkeys(names)])

    async def open(self, episode_id: str, sample: Sample) -> Opened:
        sample = copy_value(sample)  # As over HTTP, tools share no list with the agent loop.
        return await self._host.open(episode_id, sample, create_kwargs_of(sample))

    async def respond(
        self, episode_id: str, turn: int, messages: Sequence[Message]
    ) -> Reply | None:
        return await self._host.session(episode_id).respond(turn, messages)

    async def score(self, episode_id: str, messages: Sequence[Message]) -> Scores:
        return await self._host.session(episode_id).score(messages)

    async def close(self, episode_id: str) -> float:
        try:
            return await self._host.close(episode_id)
        except UnknownEpisode:
            return 0.0

    async def aclose(self) -> None:
        await self._host.aclose()

    def _serial_groups(self, episode_id: str) -> dict[str, str] | None:
        return self._host.serial_groups(episode_id)

    async def _call(
        self, key: tuple[str, int, int], name: str, arguments: bytes, messages: Sequence[Message]
    ) -> ToolResult:
        episode_id, turn, index = key
        session = self._host.session(episode_id)
        return await session.call(turn, index, name, orjson.loads(arguments), messages)


class _OpenEpisode(NamedTuple):
    """The state of an open episode that the client keeps."""

    serial_groups: dict[str, str] | None
    """The result of `serial_groups_of`."""
    seconds: float
    """Timeout of a call."""
    message_readers: Collection[str]
    """The names of the functions whose calls contain the conversation."""


_NOT_OPEN = _OpenEpisode(None, 0.0, ())


class HttpToolbox(Toolbox):
    """Runs the tools of a server: `agentrl tools serve`, or the one that a training run starts.

    Args:
        url: the URL of the server, e.g. `http://127.0.0.1:8900`.
        token: the bearer token; "" if the server asks for none.
        request_seconds: the timeout of requests that run no code of a tool.
        queue_seconds: the longest time that a call waits on the server. It may wait twice: for a
            thread that validates its arguments, and to start.
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        request_seconds: float = REQUEST_SECONDS,
        queue_seconds: float = QUEUE_SECONDS,
    ):
        self.where = f"at {url}"
        self.url, self._token = url, token
        self._request_seconds, self._queue_seconds = request_seconds, queue_seconds
        self._clients = [self._client(url)]
        """One client per worker of the server, by number."""
        self._specs: Registry[ToolSpec] | None = None
        self._specs_are_stale = False
        """True if the server was restarted with other workers since the tools were read."""
        self._episodes: dict[str, _OpenEpisode] = {}

    def schemas(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the OpenAI function schemas of tools.

        If the server's tools are not known yet, this calls `connect`, which blocks.
        """
        if not names:
            return []
        specs = self._specs or self.connect()
        return schemas_of([specs.get(n) for n in dict.fromkeys(names)])

    def connect(self) -> Registry[ToolSpec]:
        """Read the server's tools. This blocks; on an event loop, `open` reads them instead.

        Raises:
            ConfigError: no tool server answers at the URL.
        """
        try:
            return self.read_tools()
        except ToolServerError as e:
            raise ConfigError(
                f"no tool server at {self.url} ({e}). Start one with `agentrl tools serve"
                " FILE...`, or set tools.transport=http to let the run start its own."
            ) from None

    def read_tools(self) -> Registry[ToolSpec]:
        """Read the server's tools, as `connect` does.

        Raises:
            ToolServerError: no tool server answers at the URL.
        """
        status, answer = fetch_json(
            self.url, "/tools", token=self._token, error=ToolServerError, timeout=10.0
        )
        self._specs = self._read_tool_list(_check_response(status, answer))
        return self._specs

    async def open(self, episode_id: str, sample: Sample) -> Opened:
        known_specs = await self._load_specs()
        specs = [known_specs.get(n) for n in dict.fromkeys(sample.tools)]
        wants_row = any(s.wants_row for s in specs)
        part: dict[str, Any] = {"tools": sample.tools}
        if any(s.stateful for s in specs):  # Errors of constructors name the row.
            part |= {"id": sample.id, "row": sample.row}
        row: Any = sample
        if any(m.images for m in sample.prompt):
            row = {f.name: getattr(sample, f.name) for f in fields(sample)}
            row["prompt"] = [*map(to_wire, sample.prompt)]
        body = {
            "episode_id": episode_id,
            "sample": row if wants_row else part,
            "create_kwargs": create_kwargs_of(sample),
        }
        # A constructor and an `opening()` for each class.
        seconds = self._request_seconds + 2 * sum(
            self._call_seconds(s) for s in specs if s.stateful
        )
        try:
            values = [sample.ground_truth, sample.extra, sample.interaction_kwargs] * wants_row
            values.append(sample.tools_kwargs)
            if orjson.loads(orjson.dumps(values)) != values:  # faster than the search
                changed = sample.find_non_json(*([] if wants_row else ["tools_kwargs"]))
                raise TypeError(", ".join(f"{path}={value!r:.60}" for path, value in changed))
            answer = await self._request("POST", "/sessions", body, seconds, episode_id)
        except TypeError as e:
            raise DataError(
                f"row {sample.row} (id {sample.id!r}) has values that JSON cannot hold, so it"
                f" cannot be sent to its {'environment' if sample.environment else 'tools'}: {e}"
            ) from e
        longest = max(map(self._call_seconds, specs), default=0.0)
        message_readers = {f for s in specs if "messages" in s.injected for f in s.functions}
        self._episodes[episode_id] = _OpenEpisode(
            serial_groups_of(specs), self._request_seconds + longest, message_readers
        )
        try:
            messages = [Message(**from_wire(m)) for m in answer["opening"]]
            opening = to_opening(f"{self.url}: the answer to POST /sessions", messages)
            every = [f for spec in specs for f in spec.functions]
            offered = [str(name) for name in answer.get("tools", every)]
        except (TypeError, ValueError, KeyError, AttributeError) as e:
            raise UserCodeError(
                f"{self.url} did not answer with an opening: {answer!r:.200} ({e!r})"
            ) from None
        return Opened(opening, offered, environment_hooks(specs))

    async def respond(
        self, episode_id: str, turn: int, messages: Sequence[Message]
    ) -> Reply | None:
        body = {"turn": turn, "messages": [*map(to_wire, storable_messages(messages))]}
        answer = await self._post(episode_id, "respond", body)
        try:
            return answer and Reply(**from_wire(answer))
        except (TypeError, ValueError, KeyError, AttributeError):
            raise ToolServerError(f"{self.url} did not answer with a reply: {answer!r}") from None

    async def score(self, episode_id: str, messages: Sequence[Message]) -> Scores:
        body = {"messages": [*map(to_wire, storable_messages(messages))]}
        answer = await self._post(episode_id, "reward", body)
        try:
            turns = {int(index): score for index, score in answer.get("turns", {}).items()}
            return Scores(answer["reward"], turns, answer.get("parts", {}))
        except (TypeError, ValueError, KeyError, AttributeError) as e:
            raise UserCodeError(
                f"{self.url} did not answer with a reward: {answer!r:.200} ({e})"
            ) from None

    async def close(self, episode_id: str) -> float:
        path = f"/sessions/{quote(episode_id, safe='')}"
        seconds = self._episodes.get(episode_id, _NOT_OPEN).seconds or self._request_seconds
        try:
            seconds = GRACE_SECONDS + 2 * seconds
            answer = await self._request("DELETE", path, None, seconds, episode_id)
        except ToolServerError:
            # The server may have opened an episode although the request failed. Then the answer is
            # not needed.
            if episode_id in self._episodes:
                raise
            return 0.0
        finally:
            self._episodes.pop(episode_id, None)
        return float(answer["reward"])

    async def _load_specs(self) -> Registry[ToolSpec]:
        """Return the server's tools. Read them if they are unknown or stale.

        Raises:
            ToolServerError: the server is unreachable. The tools of before are kept.
        """
        if self._specs is None or self._specs_are_stale:
            # From the server's own URL: after a restart, the workers that are known may be gone.
            client, deadline = self._client(self.url), time.monotonic() + self._request_seconds
            status, answer = await client.request_json(
                "GET", "/tools", deadline=deadline, retries=1, wait_if_busy=True
            )
            self._specs = self._read_tool_list(_check_response(status, answer))
            self._specs_are_stale = False
        return self._specs

    def _call_seconds(self, spec: ToolSpec) -> float:
        """Return the longest time until the server answers a call of a tool."""
        return 2 * self._queue_seconds + spec.timeout

    async def aclose(self) -> None:
        await asyncio.gather(*map(self.close, list(self._episodes)), return_exceptions=True)
        await asyncio.gather(*(client.aclose() for client in self._clients))

    def _serial_groups(self, episode_id: str) -> dict[str, str] | None:
        return self._episodes.get(episode_id, _NOT_OPEN).serial_groups

    async def _call(
        self, key: tuple[str, int, int], name: str, arguments: bytes, messages: Sequence[Message]
    ) -> ToolResult:
        episode_id, turn, index = key
        body = {
            "turn": turn,
            "call_index": index,
            "name": name,
            "arguments": orjson.Fragment(arguments),
        }
        if name in self._episodes.get(episode_id, _NOT_OPEN).message_readers:
            body["messages"] = [*map(to_wire, storable_messages(messages))]
        answer = await self._post(episode_id, "calls", body)
        try:
            return ToolResult(**from_wire(answer))
        except (TypeError, ValueError, KeyError, AttributeError):
            raise ToolServerError(
                f"{self.url} did not answer with a tool result: {answer!r}"
            ) from None

    async def _post(self, episode_id: str, what: str, body: dict[str, Any]) -> Any:
        """Send a request to the session of an open episode, and return the answer."""
        path = f"/sessions/{quote(episode_id, safe='')}/{what}"
        seconds = self._episodes.get(episode_id, _NOT_OPEN).seconds
        return await self._request("POST", path, body, seconds, episode_id)

    async def _request(
        self, method: str, path: str, body: Any, seconds: float, episode_id: str
    ) -> Any:
        # Every request carries its key (episode, turn, index), so it may be sent again.
        # A server with many clients closes idle connections, maybe those of two attempts.
        client = self._clients[worker_number(episode_id, len(self._clients))]
        status, answer = await client.request_json(
            method, path, body, deadline=time.monotonic() + seconds, retries=2, wait_if_busy=True
        )
        if status == 421:
            self._specs_are_stale = True  # the server was restarted with other workers
        return _check_response(status, answer)

    def _read_tool_list(self, answer: Any) -> Registry[ToolSpec]:
        """Return the server's tools by name, and create one client per worker."""
        specs: Registry[ToolSpec] = Registry("tool")
        try:
            for fields in answer["tools"]:
                specs.add(fields["name"], ToolSpec(**fields))
            ports = [int(port) for port in answer.get("workers", ())]
            limit = int(answer.get("max_client_connections", MAX_CONNECTIONS_TO_SERVER))
        except (TypeError, KeyError, ValueError):
            raise ToolServerError(
                f"{self.url} did not answer with a list of tools: {answer!r}"
            ) from None
        url = urlsplit(self.url)
        host = url.netloc.rpartition("@")[2].removesuffix(f":{url.port}")
        urls = [url._replace(netloc=f"{host}:{port}").geturl() for port in ports] or [self.url]
        self._clients = [self._client(url, limit) for url in urls]
        return specs

    def _client(self, url: str, max_connections: int = MAX_CONNECTIONS_TO_SERVER) -> HttpClient:
        return HttpClient(
            url, token=self._token, error=ToolServerError, max_connections=max_connections
        )


def create_kwargs_of(sample: Sample) -> dict[str, Mapping[str, Any]]:
    """Return the constructor arguments of a row's tools, by tool."""
    kwargs = {n: sample.tools_kwargs[n] for n in sample.tools if n in sample.tools_kwargs}
    return {n: k.get("create_kwargs") or {} for n, k in kwargs.items()}


_ERRORS: dict[str, type[AgentRLError]] = {
    e.__name__: e for e in (UserError, DataError, RegistryError, UserCodeError, UnknownEpisode)
}


def _check_response(status: int, answer: Any) -> Any:
    """Return the answer of a successful request; raise the server's error otherwise."""
    if status == 200:
        return answer
    if not isinstance(answer, dict) or "error" not in answer:
        raise ToolServerError(f"the tool server answered with status {status}: {answer!r}")
    raise _ERRORS.get(answer["error"], ToolServerError)(answer["message"])


@contextmanager
def open_toolbox(
    config: ToolsConfig, files: Sequence[str], sandbox: SandboxConfig | None = None
) -> Iterator[Toolbox]:
    """Open the toolbox of a run, as `tools.transport` says.

    The tools run in this process, on a server that is started here and stopped at the end, or on
    the server at `tools.transport`.

    Args:
        config: the section `tools`.
        files: the files that a server started here loads.
        sandbox: the section `sandbox`, for the tools of such a server.

    Raises:
        UserError: a file does not load.
        ToolServerError: the server did not start. The message has its last lines of output.
        ConfigError: no server answers at the URL.
    """
    if config.transport == "in_process":
        yield LocalToolbox()
    elif config.url:
        toolbox = HttpToolbox(config.url, os.environ.get(TOKEN_VARIABLE, ""))
        toolbox.connect()  # here, because no event loop runs yet
        yield toolbox
    else:
        url, token, server = serve_in_background(
            files, workers=config.workers, sandbox=sandbox and sandbox.model_dump()
        )
        with server:
            toolbox = HttpToolbox(url, token)
            toolbox.connect()
            yield toolbox
