"""One client for inference servers: tokens from a running server, the policy to it.

What a request and its answer look like is the dialect's, a subclass: `sglang`, `vllm`. Ids and
logprobs are read from where the server gives them as numbers, never from the text. Nothing is
guessed: a field that is missing or cannot be is an error.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from agentrl.engine.base import Engine, Sampling, Update
from agentrl.engine.checks import check_sampling, validate_row
from agentrl.engine.remote.control import Control, reading, refusal
from agentrl.engine.remote.launch import ServerHandle, raise_if_dead
from agentrl.engine.remote.senders import AdapterSender, Sender
from agentrl.errors import EngineError, EngineNonsense
from agentrl.http import HttpClient
from agentrl.trajectory import Generation, token_array

SCORE_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """What an answer says of the weights that sampled it, and which policy that is."""

    weights: str
    """The server's `weight_version`."""
    policy: int
    """The policy's version: the same number where weights are published, the adapter's else."""


class RemoteEngine(Engine):
    """Samples from one server.

    `generate`, `score` and `check_health` belong to the event loop of the first request; the other
    methods wait for the server and are for other threads. A turn also ends at the end-of-turn
    tokens that the model's own folder names, whatever `stop_ids` are.
    """

    max_length: int
    """The longest row, in tokens, as the server has it."""
    name: ClassVar[str]
    """The server's, for messages."""
    health: ClassVar[str]
    """The path that says whether it samples."""
    probe_tokens: ClassVar[int]
    """More than a block of any cache of it: a shorter prompt is never found there."""
    _stamp: PolicyVersion

    def __init__(
        self,
        url: str,
        *,
        vocabulary: int,
        sender: Callable[[Control], Sender],
        key: str = "",
        admin_key: str = "",
        process: ServerHandle | None = None,
    ):
        """Ask a running server what it can do, and let it sample a token.

        Args:
            url: the server's.
            vocabulary: how many tokens the model has: others would crash the server.
            sender: how the policy goes to it.
            key: the server's api key.
            admin_key: the one for what manages it; "" where that is the same.
            process: its own, where it is ours: watched, and ended by `close`.

        Raises:
            EngineError: no server answers, or one of another kind.
        """
        self.url, self._process, self._vocabulary = url, process, vocabulary
        self._http = HttpClient(url, token=key, error=EngineError)
        # Its requests do not wait for a place behind turns, which may hang.
        self._aside = HttpClient(url, token=admin_key or key, error=EngineError, control=True)
        self._control = Control(url, key=key, admin_key=admin_key, process=process)
        self._sender = sender(self._control)
        self._seeded = False
        with reading(self.name, url):
            self._connect()
        self.probe()

    @property
    def version(self) -> int:
        """Of the policy that it samples from."""
        return self._stamp.policy

    @property
    def restartable(self) -> bool:
        """Whether the server is ours."""
        return self._process is not None

    # -- Sampler -----------------------------------------------------------------------------------

    async def check_health(self, deadline: float) -> None:
        """Have the server show that it samples, or could.

        Raises:
            EngineError: it did not by then.
        """
        status, answer = await self._aside.request_json(
            "GET", self.health, deadline=deadline, retries=1
        )
        if status != 200:
            raise refusal(status, answer, f"{self.url}{self.health}")

    async def generate(
        self,
        prompt_ids: array[int],
        sampling: Sampling,
        *,
        episode_id: str,
        seed: int,
        deadline: float,
    ) -> Generation:
        """See `Sampler`. A turn is cut at `max_length` as well as at `max_tokens`.

        Raises:
            PromptTooLong: the prompt leaves no room.
            EngineOverloaded: the server takes no more requests.
            EngineDead: the server, which is ours, ended.
            EngineNonsense: its answer cannot be.
            EngineError: no answer before the deadline, no row of this model's tokens, a request
                that cannot be served, or weights that changed within the turn.
            UserError: `sampling.stop` holds an empty string or something else than strings, or a
                temperature that this server does not have.
        """
        where = f"episode {episode_id!r}"
        self._check_row(prompt_ids, where)
        self._check_sampling(sampling, where)
        limit = min(sampling.max_tokens, self.max_length - len(prompt_ids))
        body = self._body(prompt_ids, sampling, limit, seed % 2**63 if self._seeded else None)
        stamp, named = self._stamp, self._sender.request()
        answer = await self._ask(body | named, where, deadline, episode_id)
        found = self._read_turn(answer, limit, stamp, where, named)
        if max(found.token_ids) >= self._vocabulary:
            raise EngineNonsense(
                f"{where}: token {max(found.token_ids)}, but the model's vocabulary has"
                f" {self._vocabulary}"
            )
        return found

    async def score(self, token_ids: array[int], temperature: float = 1.0) -> array[float]:
        """See `Sampler`; at temperature 1 alone, since servers score at no other.

        Raises:
            EngineError: another temperature, or as `generate`.
        """
        if temperature != 1:
            raise EngineError(f"{self.name} scores rows at temperature 1, not {temperature:g}")
        self._check_row(token_ids, "score")
        body = self._score_body(token_ids) | self._sender.request()
        answer = await self._ask(body, "score", time.monotonic() + SCORE_SECONDS, "score")
        return self._read_scores(answer, token_ids, "score")

    # -- EngineControl -----------------------------------------------------------------------------

    def publish(self, update: Update) -> int:
        """Send the policy, and prove that the server holds it and samples from it.

        Where weights are sent, the next answer carries their version and finds nothing in the
        cache; where an adapter is, the server lists it and every request names it.

        Raises:
            ConfigError: this server cannot be sent it; nothing was.
            EngineError: the server does not take it, or goes on as before.
        """
        if not isinstance(self._sender, AdapterSender):
            return self._replace_weights(update)
        sent = self._send(update)
        self._stamp = PolicyVersion(self._stamp.weights, update.version)
        self.probe()
        return sent

    def close(self) -> None:
        """End the server where it is ours, or leave it without our adapters.

        Requests in flight fail then.
        """
        if self._process is not None:  # first: nobody waits then for one that hangs
            self._process.stop()
        self._sender.close()

    def probe(self) -> Generation:
        """Let the server sample a token after the same prompt as ever, which it then caches.

        Raises:
            EngineError: it does not, or under another version than was published.
        """
        named, where = self._sender.request(), f"{self.url}: a probe"
        row = [0] * min(self.probe_tokens, self.max_length - 1)
        body = self._body(row, Sampling(temperature=0.0), 1) | named
        answer = self._control.ask(self._path, body)
        found = self._read_turn(answer, 1, self._stamp, where, named)
        if found.versions[0] != self.version:
            raise EngineError(f"{where}: version {found.versions[0]}, not {self.version}")
        return found

    # -- what both dialects need -------------------------------------------------------------------

    def _check_row(self, token_ids: array[int], where: str) -> None:
        validate_row(
            token_ids,
            where,
            limit=self.max_length - 1,
            max_length=self.max_length,
            vocabulary=self._vocabulary,
        )

    def _check_sampling(self, sampling: Sampling, where: str) -> None:
        check_sampling(sampling, where)

    async def _post(
        self,
        body: dict[str, Any],
        where: str,
        deadline: float,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """The status and the answer of a request for tokens.

        Raises:
            EngineDead: the server, which is ours, ended.
            EngineError: no answer in time.
        """
        try:
            # Sent again where an idle connection was closed at that moment.
            return await self._http.request_json(
                "POST", self._path, body, deadline=deadline, retries=1, headers=headers
            )
        except EngineError as e:
            if time.monotonic() < deadline:
                await raise_if_dead(self._process)
            raise type(e)(f"{where}: {e}") from None

    def _send(self, update: Update) -> int:
        return self._sender.send(update)

    def _prove_fresh(self) -> None:
        """The next answer is of the published version, and of nothing that was cached before.

        Raises:
            EngineError: it is not.
        """
        if cached := self.probe().cached_tokens:
            raise EngineError(
                f"{self.url}: version {self.version} was published, but {cached} tokens are still"
                " in the cache that other weights computed"
            )

    # -- the dialect -------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _path(self) -> str:
        """Where the server is asked for tokens."""

    @abstractmethod
    def _connect(self) -> None:
        """Ask for `max_length` and the stamp of the weights."""

    @abstractmethod
    def _body(
        self, row: Sequence[int], sampling: Sampling, limit: int, seed: int | None = None
    ) -> dict[str, Any]:
        """A request for a turn of at most `limit` tokens."""

    @abstractmethod
    def _score_body(self, row: Sequence[int]) -> dict[str, Any]:
        """A request for the logprobs of a row."""

    @abstractmethod
    async def _ask(self, body: dict[str, Any], where: str, deadline: float, episode_id: str) -> Any:
        """One request's answer; what is not waited for any more is aborted.

        Raises:
            EngineDead: the server, which is ours, ended.
            EngineError: it is refused, or there is no answer in time.
        """

    @abstractmethod
    def _read_turn(
        self, answer: Any, limit: int, stamp: PolicyVersion, where: str, named: dict[str, Any]
    ) -> Generation:
        """A turn from an answer; `stamp` and `named` are of when it was asked for."""

    @abstractmethod
    def _read_scores(self, answer: Any, row: Sequence[int], where: str) -> array[float]:
        """Logprobs of a whole row, the first token's as 0, from an answer."""

    @abstractmethod
    def _replace_weights(self, update: Update) -> int:
        """Send weights, and prove that the server samples from them. Returns their bytes."""


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """Return the sampling parameters that both servers call by the same names.

    All of them: what a request leaves out comes from the server's settings or the model's folder.
    """
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(sampling.stop_ids),
        "stop": list(sampling.stop),
        "skip_special_tokens": False,
    }


def check_turn(ids: Sequence[int], reason: Any, limit: int, counted: Any) -> None:
    """Refuse a turn that cannot be.

    Args:
        ids: of the sampled tokens.
        reason: why it ended, as the server says.
        limit: how many tokens were asked for.
        counted: how many the server says there are.

    Raises:
        ValueError: it cannot be.
    """
    if reason not in ("stop", "length"):
        raise ValueError(f"finish reason {reason!r}")
    if not 0 < len(ids) <= limit or len(ids) != counted:
        raise ValueError(f"{len(ids)} tokens of {limit} asked for, and it counts {counted}")


def versions_of(spans: list[dict[str, Any]] | None, n: int, stamp: PolicyVersion) -> array[int]:
    """The policy version of each of a turn's n tokens.

    Args:
        spans: which weights sampled which tokens, as both servers say it; none: all the same.
        n: how many tokens there are.
        stamp: what was published when the turn was asked for.

    Raises:
        ValueError: the spans are not of n tokens.
    """
    versions = token_array()
    for span in spans or [{"version": stamp.weights, "start": 0, "end": n}]:
        if span["start"] != len(versions):
            raise ValueError(f"spans of versions with gaps: {spans}")
        weights = str(span["version"])
        policy = stamp.policy if weights == stamp.weights else int(weights)
        versions.extend([policy] * (span["end"] - span["start"]))
    if len(versions) != n:
        raise ValueError(f"spans of versions for {len(versions)} of {n} tokens")
    return versions
