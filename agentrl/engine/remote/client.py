"""The client for inference servers: it requests tokens and sends the policy.

Subclasses (`sglang`, `vllm`) define the formats of requests and answers. Ids and logprobs are read
from numeric fields, never from the text. Nothing is guessed: a field that is missing or invalid is
an error.
"""

from __future__ import annotations

import itertools
import time
from abc import abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from agentrl.engine.base import Followers, Sampler, Sampling, ServerUsage
from agentrl.engine.checks import check_sampling, validate_row
from agentrl.engine.remote.adapters import Adapters
from agentrl.engine.remote.admin import AdminClient, reading, refusal
from agentrl.engine.remote.launch import ServerHandle, raise_if_dead
from agentrl.engine.remote.senders import FROM_FILES, Delivery, Route, Sent, Target
from agentrl.engine.remote.turns import GateState, TurnGate, join_parts, without_last_token
from agentrl.errors import EngineError, InvalidEngineResponse, RequestRefused
from agentrl.http import HttpClient
from agentrl.images import RowImage
from agentrl.trajectory import Generation, float_array, token_array

SCORE_SECONDS = 300.0
_SERIALS = itertools.count()


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """The version of weights in an answer, and the version of the policy."""

    weights: str
    """The server's `weight_version`."""
    policy: int
    """The policy's version. It was the number of these weights, or of the adapter, when they were
    sent. Later versions of an unchanged policy increase it."""
    request_fields: dict[str, Any] = field(default_factory=dict[str, Any])
    """The fields of a request that name the adapter; empty if weights are published."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """What another process needs to sample from a server, see `RemoteEngine.follow`."""

    engine: type[RemoteEngine]
    serial: int
    """Another server has another number, and so has a server that was restarted."""
    url: str
    key: str
    admin_key: str
    vocabulary: int
    max_length: int
    uses_seeds: bool
    policy_version: PolicyVersion
    gate: GateState


class RemoteEngine(Sampler):
    """Samples from one server.

    `generate`, `score` and `check_health` belong to the event loop of the first request. The other
    methods block and are for other threads. A turn also ends at the end-of-turn tokens in the
    folder of the model, whatever `stop_ids` are.
    """

    max_length: int
    """The longest row, in tokens, that the server accepts."""
    is_concurrent = True
    name: ClassVar[str]
    """The name of the server, for messages."""
    path: ClassVar[str]
    """The path of requests for tokens."""
    health_path: ClassVar[str]
    """The path that reports whether the server can sample."""
    probe_tokens: ClassVar[int]
    """The length of a probe's prompt. It exceeds a block of every cache of the server, since a
    shorter prompt is never cached."""
    adapter_field: ClassVar[str]
    """The field of a request that contains the name of a LoRA adapter."""
    adapter_path: ClassVar[str]
    """The path to load or unload an adapter, with {} for the verb."""
    kept_folders: int = 0
    """How many folders of adapters must exist after loading."""
    admin: AdminClient
    """The blocking client of the server."""
    delivery: Delivery
    """How the server gets the policy."""
    dtype: torch.dtype | None = None
    """The dtype of the server's weights, in which they are sent; None: do not cast."""
    process: ServerHandle | None
    """The process of the server, if agentrl started it."""
    _policy_version: PolicyVersion

    def __init__(
        self,
        url: str,
        *,
        vocabulary: int,
        delivery: Delivery = FROM_FILES,
        key: str = "",
        admin_key: str = "",
        process: ServerHandle | None = None,
        view: EngineView | None = None,
    ):
        """Ask a running server for its properties, and let it sample a token.

        Args:
            url: the URL of the server.
            vocabulary: the size of the model's vocabulary; token ids outside of it would crash the
                server.
            delivery: how the server gets the policy.
            key: the API key of the server.
            admin_key: the key of its management endpoints; "" if it is the same as `key`.
            process: the process of the server, if agentrl started it: `close` ends it.
            view: the properties of a server that another process owns; nothing is asked then.

        Raises:
            EngineError: no server answers, or the server is of another kind.
        """
        self.serial = next(_SERIALS)
        self.followers: Followers | None = None
        """Other processes that sample from the server."""
        self.url, self.process, self._vocabulary = url, process, vocabulary
        self._http = HttpClient(url, token=key, error=EngineError)
        # Its requests do not wait for a connection behind turns, which may hang.
        self._control_http = HttpClient(
            url, token=admin_key or key, error=EngineError, reserved=True
        )
        self.admin = AdminClient(url, key=key, admin_key=admin_key, process=process)
        self.delivery = delivery
        self.adapters = Adapters(
            self.admin,
            field=self.adapter_field,
            path=self.adapter_path,
            limit=delivery.adapters,
            used_elsewhere=self._adapters_elsewhere,
        )
        self.has_received = False
        """True once the server has received the policy. Until then, it gets files if that fails and
        `delivery.may_use_files`."""
        self._gate = TurnGate()
        self.reprefilled = 0
        """The number of tokens that were prefilled again after new weights."""
        self._uses_seeds = False
        if view is not None:
            return
        with reading(self.name, url):
            self._connect()
        self.probe()

    @staticmethod
    def follow(view: EngineView) -> RemoteEngine:
        """Return a client in another process than the one that owns the server."""
        options: dict[str, Any] = {"key": view.key, "admin_key": view.admin_key, "view": view}
        engine = view.engine(view.url, vocabulary=view.vocabulary, **options)
        engine.update_view(view)
        return engine

    def update_view(self, view: EngineView) -> None:
        """Take over what the owner of the server knows about it."""
        self.serial, self.max_length = view.serial, view.max_length
        self._uses_seeds, self._policy_version = view.uses_seeds, view.policy_version
        self._gate.state = view.gate

    def view(self) -> EngineView:
        """Return what another process needs to sample from the server."""
        return EngineView(
            engine=type(self),
            serial=self.serial,
            url=self.url,
            key=self.admin.key,
            admin_key=self.admin.admin_key,
            vocabulary=self._vocabulary,
            max_length=self.max_length,
            uses_seeds=self._uses_seeds,
            policy_version=self._policy_version,
            gate=self._gate.state,
        )

    def usage(self) -> ServerUsage:
        """Return how this process uses the server."""
        return ServerUsage(self._gate.in_flight, self.adapters.used())

    def turns_in_flight(self) -> int:
        """Return the number of requests that have no answer, of all processes. It may block."""
        elsewhere = self.followers.usage(self.serial).turns if self.followers else 0
        return self._gate.in_flight + elsewhere

    def _adapters_elsewhere(self) -> frozenset[str]:
        return self.followers.usage(self.serial).adapters if self.followers else frozenset()

    def _changed(self) -> None:
        """Tell other processes that the gate or the policy has changed."""
        if self.followers:
            self.followers.changed()

    @property
    def version(self) -> int:
        """Return the version of the policy from which the server samples."""
        return self._policy_version.policy

    @property
    def restartable(self) -> bool:
        """Return whether agentrl started the server, and so can restart it."""
        return self.process is not None

    def has_ended(self) -> bool:
        """Return whether agentrl started the server and its process has ended."""
        return self.process is not None and not self.process.running

    # -- Sampler -----------------------------------------------------------------------------------

    async def check_health(self, deadline: float) -> None:
        """Check that the server can sample.

        Raises:
            EngineError: the server did not confirm this before the deadline.
        """
        status, answer = await self._control_http.request_json(
            "GET", self.health_path, deadline=deadline, retries=1
        )
        if status != 200:
            raise refusal(status, answer, f"{self.url}{self.health_path}")

    def is_healthy(self, seconds: float) -> bool:
        """Ask the server whether it can sample, and wait for at most so many seconds."""
        try:
            return self.admin.send(self.health_path, None, seconds=seconds)[0] == 200
        except EngineError:
            return False

    async def generate(
        self,
        prompt_ids: array[int],
        sampling: Sampling,
        *,
        episode_id: str,
        seed: int,
        deadline: float,
        images: Sequence[RowImage] = (),
    ) -> Generation:
        """Sample a turn. It is cut at `max_length` as well as at `max_tokens`.

        If the weights change within the turn, it goes on with the new ones.

        Raises:
            PromptTooLong: the prompt is too long.
            EngineOverloaded: the server accepts no more requests.
            EngineDead: agentrl started the server, and it has ended.
            InvalidEngineResponse: its answer is invalid.
            EngineError: no response before the deadline, tokens outside of the vocabulary, a
                request that cannot be served, or weights that did not arrive.
            UserError: `sampling.stop` is not a tuple of non-empty strings, or the server does not
                support the temperature.
        """
        where = f"episode {episode_id!r}"
        validate_row(prompt_ids, where, self.max_length, self._vocabulary)
        self._check_sampling(sampling, where)
        end = len(prompt_ids) + min(sampling.max_tokens, self.max_length - len(prompt_ids))
        row, parts = prompt_ids, list[Generation]()
        while True:
            start = time.monotonic()
            async with self._gate.passing():
                deadline += time.monotonic() - start  # A wait for new weights does not count.
                part = await self._sample(
                    row, sampling, end - len(row), seed, where, deadline, episode_id, images
                )
            if part.token_ids:
                parts.append(part)
            if part.finish_reason != "abort":
                return join_parts(parts)
            row = row + part.token_ids
            if part.token_ids and part.experts:
                sampling = replace(sampling, experts_from=len(row) - 1)
            self.reprefilled += len(row)

    async def _sample(
        self,
        row: array[int],
        sampling: Sampling,
        limit: int,
        seed: int,
        where: str,
        deadline: float,
        episode_id: str,
        images: Sequence[RowImage],
    ) -> Generation:
        """Sample a turn, or its part until the server gets new weights."""
        ids, fields = self._with_images(_json_ids(row), images, where)
        body = self._body(ids, sampling, limit, seed % 2**63 if self._uses_seeds else None) | fields
        policy_version = self._policy_version
        with self.adapters.in_use(policy_version.request_fields):
            body |= policy_version.request_fields
            answer = await self._ask(body, where, deadline, episode_id)
        generation = self._read_turn(answer, limit, policy_version, where)
        if max(generation.token_ids, default=0) >= self._vocabulary:
            raise InvalidEngineResponse(
                f"{where}: token {max(generation.token_ids)}, but the model's vocabulary has"
                f" {self._vocabulary}"
            )
        if images and generation.token_ids and generation.prompt_tokens != len(row):
            raise InvalidEngineResponse(
                f"{where}: {self.name} read {generation.prompt_tokens} tokens, but the row with its"
                f" images has {len(row)}. The server must resize images as the model's folder says"
            )
        if generation.finish_reason == "abort":
            if not self._gate.is_closed:
                raise EngineError(f"{where}: {self.name} aborted the turn")
            return without_last_token(generation)
        return generation

    async def score(self, token_ids: array[int], images: Sequence[RowImage] = ()) -> array[float]:
        """Return the logprob of each token given the tokens before it.

        The first token's is 0, and so are those of the placeholder tokens of images.

        Raises:
            EngineError: as `generate`.
        """
        row = validate_row(token_ids, "score", self.max_length, self._vocabulary)
        fields = self._policy_version.request_fields
        ids, image_fields = self._with_images(row, images, "score")
        with self.adapters.in_use(fields):
            body = self._score_body(ids) | image_fields | fields
            answer = await self._ask(body, "score", time.monotonic() + SCORE_SECONDS, "score")
        if not images:
            return self._read_scores(answer, token_ids, self._vocabulary, "score")
        is_image = row == images[0].token_id
        # The server reports token 0 in place of the placeholders.
        row[is_image] = 0
        scores = self._read_scores(answer, row.tolist(), self._vocabulary, "score")
        return float_array(np.where(is_image, 0.0, scores).tolist())

    def reprefill_tokens(self) -> int:
        return self.reprefilled

    # -- updates -----------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Release memory that the trainer needs, if the server shares it. Nothing by default."""

    @property
    def target(self) -> Target:
        """Return the server as a target of weights in memory."""
        admin, delivery = self.admin, self.delivery
        return Target(
            admin.url,
            admin.key,
            admin.admin_key,
            delivery.processes,
            delivery.ranks,
            delivery.backend,
        )

    def fail_update(self, error: EngineError) -> None:
        """Let the turns that wait for an update fail, because it did not succeed."""
        self._gate.fail(error)
        self._changed()

    def finish_update(self, route: Route, sent: Sent) -> None:
        """Load what was sent, and check that the server samples from it.

        After new weights, the next answer must carry their version and use no cached tokens. After
        a new adapter, the server must list the adapter, and every request names it.

        Args:
            route: the route of the update.
            sent: the weights that were sent; empty for an adapter.

        Raises:
            ConfigError: the server cannot load this policy, and still has the one before.
            EngineError: the server does not load the policy, or does not sample from it.
        """
        self.load(route, sent)
        self.has_received = True
        if self.delivery.source == "adapter":
            self._policy_version = replace(
                self._policy_version,
                policy=route.version,
                request_fields=self.adapters.request_fields(),
            )
            self.probe()
        else:
            self._policy_version = PolicyVersion(str(route.version), route.version)
            self._use_weights(sent)
            if cached := self.probe().cached_tokens:
                raise EngineError(
                    f"{self.url}: version {self.version} was published, but {cached} tokens of"
                    " the old weights are still in the cache"
                )
        self._gate.open()
        self._changed()

    @property
    def has_weights(self) -> bool:
        """True if the server still holds the weights that it loaded last."""
        return True

    def set_version(self, version: int) -> None:
        """Set the version of the policy that the server holds, and let the server sample.

        Raises:
            EngineError: the server cannot sample, or not from that policy: it was restarted.
        """
        self._policy_version = replace(self._policy_version, policy=version)
        self.probe()
        self._changed()

    def close(self) -> None:
        """End the server if agentrl started it, else unload the adapters that were sent to it.

        Requests in flight fail then.
        """
        # Stop the process first: nothing may wait for a server that hangs.
        if self.process is not None:
            self.process.stop()
        self.adapters.close()

    def probe(self) -> Generation:
        """Let the server sample a token after a fixed prompt, which it then caches.

        Raises:
            EngineError: the server samples no token, or not from the published version.
        """
        version, where = self._policy_version, f"{self.url}: a probe"
        row = [0] * min(self.probe_tokens, self.max_length - 1)
        body = self._body(_json_ids(row), Sampling(temperature=0.0), 1) | version.request_fields
        answer = self.admin.ask(self.path, body)
        generation = self._read_turn(answer, 1, version, where)
        if generation.finish_reason == "abort":
            raise EngineError(f"{where} was aborted")
        if generation.versions[0] != self.version:
            raise EngineError(
                f"{where} was sampled by version {generation.versions[0]}, not {self.version}"
            )
        return generation

    # -- used by subclasses ------------------------------------------------------------------------

    def _check_sampling(self, sampling: Sampling, where: str) -> None:
        check_sampling(sampling, where)

    async def _post(
        self,
        body: dict[str, Any],
        where: str,
        deadline: float,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Send a request for tokens; return the status and the answer.

        Raises:
            EngineDead: agentrl started the server, and it has ended.
            EngineError: no answer in time.
        """
        try:
            # `retries`: the server may close an idle connection at that moment.
            return await self._http.request_json(
                "POST", self.path, body, deadline=deadline, retries=1, headers=headers
            )
        except EngineError as e:
            if time.monotonic() < deadline:
                await raise_if_dead(self.process)
            raise type(e)(f"{where}: {e}") from None

    # -- implemented by subclasses -----------------------------------------------------------------

    @abstractmethod
    def _connect(self) -> None:
        """Ask for `max_length` and the version of the weights."""

    @abstractmethod
    def _body(
        self, ids: np.ndarray, sampling: Sampling, limit: int, seed: int | None = None
    ) -> dict[str, Any]:
        """Return a request for a turn of at most `limit` tokens after the row with these ids."""

    @abstractmethod
    def _score_body(self, ids: np.ndarray) -> dict[str, Any]:
        """Return a request for the logprobs of the row with these ids."""

    @abstractmethod
    async def _ask(self, body: dict[str, Any], where: str, deadline: float, episode_id: str) -> Any:
        """Send one request and return the answer. If the caller is cancelled, the server aborts it.

        Raises:
            EngineDead: agentrl started the server, and it has ended.
            EngineError: the request is refused, or there is no answer in time.
        """

    @staticmethod
    @abstractmethod
    def _read_turn(
        answer: Any, limit: int, policy_version: PolicyVersion, where: str
    ) -> Generation:
        """Return the turn in an answer.

        `policy_version` is that at the time of the request. If the server aborted the turn,
        `finish_reason` is "abort", and the tokens so far may be none.
        """

    @staticmethod
    @abstractmethod
    def _read_scores(answer: Any, row: Sequence[int], vocabulary: int, where: str) -> array[float]:
        """Return the logprobs of a whole row; the first token's is 0."""

    def _with_images(
        self, ids: np.ndarray, images: Sequence[RowImage], where: str
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Return the ids that the server gets for a row, and the fields with its images.

        Raises:
            RequestRefused: the server reads no images, or the row has not their tokens.
        """
        if images:
            raise RequestRefused(
                f"{where}: agentrl sends no images to {self.name}. Set rollout.name=sglang"
            )
        return ids, {}

    @abstractmethod
    def begin_update(self) -> None:
        """Prepare the server for an update.

        Raises:
            ConfigError: the policy cannot be sent to this server; nothing has changed.
            EngineError: the server cannot load an update now.
        """

    @abstractmethod
    def load(self, route: Route, sent: Sent) -> None:
        """Load an update. Weights that came through memory are already loaded.

        See `finish_update`.
        """

    @abstractmethod
    def _use_weights(self, sent: Sent) -> None:
        """Let the server sample from the weights of `version`, and check them."""


def _json_ids(row: Sequence[int]) -> np.ndarray:
    """Return ids as an array, (n,) int32, which orjson writes six times as fast as a list."""
    return np.asarray(row, np.int32)


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """Return the sampling parameters that have the same names in both servers.

    All are set, because a server takes missing ones from its settings or from the folder of the
    model.
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


def check_turn(ids: Sequence[int], reason: Any, limit: int, reported: Any) -> None:
    """Check the length and the finish reason of a turn.

    Args:
        ids: the ids of the sampled tokens.
        reason: the finish reason that the server reports.
        limit: the number of tokens that was requested.
        reported: the number of tokens that the server reports.

    Raises:
        ValueError: they are inconsistent.
    """
    if reason not in ("stop", "length", "abort"):
        raise ValueError(f"unknown finish reason {reason!r}")
    if not 0 < len(ids) <= limit or len(ids) != reported:
        raise ValueError(
            f"{len(ids)} tokens, where at most {limit} were requested and {reported} are reported"
        )


def token_versions(
    spans: list[dict[str, Any]], n: int, policy_version: PolicyVersion
) -> array[int]:
    """Return the policy version of each of a turn's n tokens.

    Args:
        spans: the version of the weights for each range of tokens, in the format of both servers.
        n: the number of tokens.
        policy_version: the version that was published at the time of the request.

    Raises:
        ValueError: the spans do not cover n tokens.
    """
    versions = token_array()
    for span in spans:
        if span["start"] != len(versions):
            raise ValueError(f"version spans with gaps: {spans}")
        weights = str(span["version"])
        policy = policy_version.policy if weights == policy_version.weights else int(weights)
        versions.extend([policy] * (span["end"] - span["start"]))
    if len(versions) != n:
        raise ValueError(f"version spans for {len(versions)} of {n} tokens")
    return versions
