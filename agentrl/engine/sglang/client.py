"""The engine: tokens from a running server, weights to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from array import array
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from agentrl.engine.base import Sampling
from agentrl.engine.checks import check_sampling, checked_row
from agentrl.engine.sglang.answers import read_generation, read_scores, refusal
from agentrl.engine.sglang.launch import SGLangServer
from agentrl.engine.sglang.weights import write_weights
from agentrl.errors import EngineError, EngineNonsense
from agentrl.http import HttpClient, fetch
from agentrl.trajectory import Generation

CONTROL_SECONDS = 60.0
PUBLISH_SECONDS = 1800.0
SCORE_SECONDS = 300.0
LEAST_TOP_P = 1e-6
PROBE_TOKENS = 128
"""More than a page of any attention backend's cache: a shorter prompt is never found in it."""


class SGLangEngine:
    """Samples from one SGLang server: a `Sampler` and an `EngineControl`.

    `generate` and `score` belong to the event loop of the first request; the other methods wait
    for the server and are for other threads. A turn also ends at the end-of-turn tokens that the
    model's own folder names, whatever `stop_ids` are. A seed counts where the server runs with
    `--enable-deterministic-inference`; elsewhere two runs sample different tokens.
    """

    max_length: int
    """The longest row, in tokens: a little less than the model's, as the server has it."""

    def __init__(
        self, url: str, *, vocabulary: int, token: str = "", server: SGLangServer | None = None
    ):
        """Ask a running server what it can do, and let it sample a token.

        Args:
            url: the server's.
            vocabulary: how many tokens the model has: others would crash the server.
            token: the server's api key.
            server: its process, where it is ours: watched, and ended by `close`.

        Raises:
            EngineError: no server answers, or one that is no SGLang with a number as its weights'
                version (`--weight-version 0`).
        """
        self._url, self._token, self._server = url, token, server
        self._vocabulary = vocabulary
        self._http = HttpClient(url, token=token, error=EngineError)
        self._aborts: set[asyncio.Task[None]] = set()
        self._paused = False
        info, model = self._control("/server_info"), self._control("/model_info")
        try:
            self.max_length = int(info["max_req_input_len"])
            self._seeded = bool(info.get("enable_deterministic_inference"))
            self._version = int(model["weight_version"])
        except (KeyError, TypeError, ValueError) as e:
            raise EngineNonsense(f"{url}: not SGLang's answer: {type(e).__name__}: {e}") from e
        self._probe()

    # -- Sampler -----------------------------------------------------------------------------------

    def begin(self, episode_id: str) -> None:
        """See `Sampler`: the server schedules requests, not episodes."""

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
            EngineOverloaded: the server's queue is full.
            EngineDead: the server, which is ours, ended.
            EngineNonsense: its answer cannot be.
            EngineError: no answer before the deadline, no row of this model's tokens, a request
                that cannot be served, or weights that changed within the turn.
            UserError: `sampling.stop` holds an empty string or something else than strings.
        """
        where = f"episode {episode_id!r}"
        self._check_row(prompt_ids, where, self.max_length - 1)
        check_sampling(sampling, where)
        limit = min(sampling.max_tokens, self.max_length - len(prompt_ids))
        version = self._version
        answer = await self._ask(
            {
                "input_ids": prompt_ids.tolist(),
                "return_logprob": True,
                "sampling_params": self._params(sampling, limit, seed),
            },
            where,
            deadline,
        )
        return read_generation(answer, limit, version, where)

    def end(self, episode_id: str) -> None:
        """See `Sampler`: the server forgets what is used least."""

    async def score(self, token_ids: array[int], temperature: float = 1.0) -> array[float]:
        """See `Sampler`; at temperature 1 alone, since SGLang scores at no other.

        Raises:
            EngineError: another temperature, or as `generate`.
        """
        if temperature != 1:
            raise EngineError(f"SGLang scores rows at temperature 1, not {temperature:g}")
        self._check_row(token_ids, "score", self.max_length - 1)
        answer = await self._ask(
            {
                "input_ids": token_ids.tolist(),
                "return_logprob": True,
                "logprob_start_len": 0,
                "sampling_params": {"max_new_tokens": 0},
            },
            "score",
            time.monotonic() + SCORE_SECONDS,
        )
        return read_scores(answer, token_ids, "score")

    async def _ask(self, body: dict[str, Any], where: str, deadline: float) -> Any:
        """One request of `/generate`; what is not waited for any more is aborted."""
        # SGLang aborts by prefix: ids of one length are no prefix of each other.
        rid = uuid.uuid4().hex
        answered = False
        try:
            # Sent again where an idle connection was closed at that moment; the server refuses an
            # id that it is at work on.
            status, answer = await self._http.request_json(
                "POST", "/generate", body | {"rid": rid}, deadline=deadline, retries=1
            )
            answered = True
        except EngineError as e:
            if time.monotonic() < deadline:
                await self._look_for_death()
            raise type(e)(f"{where}: {e}") from None
        finally:
            if not answered:
                task = asyncio.create_task(self._abort(rid))
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)
        if status != 200:
            raise refusal(status, answer, where)
        return answer

    async def _abort(self, rid: str) -> None:
        """Best effort: a server that does not hear it ends the turn at its limit."""
        with contextlib.suppress(EngineError):
            await self._http.request_json(
                "POST", "/abort_request", {"rid": rid}, deadline=time.monotonic() + 10
            )

    async def _look_for_death(self) -> None:
        """A connection breaks a moment before its process is seen to have ended."""
        for _ in range(20):
            if self._server is None:
                return
            if not self._server.running:
                raise self._server.death() from None
            await asyncio.sleep(0.05)

    def _params(self, sampling: Sampling, limit: int, seed: int) -> dict[str, Any]:
        params = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_new_tokens": limit,
            "stop_token_ids": list(sampling.stop_ids),
            "stop": list(sampling.stop),
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if sampling.top_k == 1 and sampling.temperature > 0:
            # SGLang takes it for greedy, and then the logprobs are of temperature 1 or not by what
            # else is sampled at the moment. The least top_p is the same choice.
            params |= {"top_k": -1, "top_p": LEAST_TOP_P}
        return params | ({"sampling_seed": seed % 2**63} if self._seeded else {})

    def _check_row(self, token_ids: array[int], where: str, limit: int) -> None:
        checked_row(
            token_ids,
            where,
            limit=limit,
            max_length=self.max_length,
            vocabulary=self._vocabulary,
        )

    # -- EngineControl -----------------------------------------------------------------------------

    def publish(self, update: Iterable[tuple[str, Any]], version: int) -> None:
        """Have the server load named tensors from a folder; it waits for the turns in flight.

        Tensors that are not named keep their values. A probe then proves that the next answer
        carries the version and finds nothing in the cache.

        Raises:
            EngineError: the server does not take them, or goes on as before; or it is paused, where
                turns that wait keep their cache and SGLang ends over a flush.
        """
        if self._paused:
            raise EngineError(f"{self._url}: resume it before publishing version {version}")
        with TemporaryDirectory(prefix="agentrl-weights-") as folder:
            write_weights(update, Path(folder))
            body = {"model_path": folder, "weight_version": str(version), "flush_cache": False}
            self._control("/update_weights_from_disk", body, PUBLISH_SECONDS)
        self._version = version
        self._flush()
        self._prove()

    def pause(self) -> None:
        """Stop stepping until `resume`; nothing in flight is lost."""
        self._control("/pause_generation", {"mode": "in_place"})
        self._paused = True

    def resume(self) -> None:
        """See `EngineControl`."""
        self._control("/continue_generation", {})
        self._paused = False

    def close(self) -> None:
        """End the server where it is ours; requests in flight fail then."""
        if self._server is not None:
            self._server.stop()

    def _flush(self) -> None:
        """Empty the cache, once the turns that were aborted have left it.

        Not with the update: there SGLang ends over a cache that is in use.

        Raises:
            EngineError: it is in use for too long.
        """
        end = time.monotonic() + CONTROL_SECONDS
        while (found := self._fetch("/flush_cache", {}, CONTROL_SECONDS))[0] != 200:
            if time.monotonic() > end:
                raise refusal(found[0], found[1].decode(errors="replace"), "/flush_cache")
            time.sleep(0.02)

    def _prove(self) -> None:
        """The next answer is of the published version, and of nothing that was cached before.

        Raises:
            EngineError: it is not.
        """
        if cached := self._probe().cached_tokens:
            raise EngineError(
                f"{self._url}: version {self._version} was published, but {cached} tokens are still"
                " in the cache that other weights computed"
            )

    def _probe(self) -> Generation:
        """Let the server sample a token after the same prompt as ever, which it then caches.

        Raises:
            EngineError: it does not, or under another version than was published.
        """
        body = {
            "input_ids": [0] * min(PROBE_TOKENS, self.max_length - 1),
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        }
        where = f"{self._url}: a probe"
        found = read_generation(self._control("/generate", body), 1, self._version, where)
        if found.versions[0] != self._version:
            raise EngineError(f"{where}: version {found.versions[0]}, not {self._version}")
        return found

    def _control(self, path: str, body: Any = None, seconds: float = CONTROL_SECONDS) -> Any:
        """A request that must succeed, from code that is not async.

        Raises:
            EngineError: it does not.
        """
        status, content = self._fetch(path, body, seconds)
        try:
            answer = orjson.loads(content) if content else None
        except orjson.JSONDecodeError as e:
            raise EngineNonsense(f"{self._url}{path}: status {status} and not JSON: {e}") from e
        if status != 200:
            raise refusal(status, answer, f"{self._url}{path}")
        return answer

    def _fetch(self, path: str, body: Any, seconds: float) -> tuple[int, bytes]:
        try:
            return fetch(
                self._url, path, body, token=self._token, error=EngineError, timeout=seconds
            )
        except EngineError:
            if self._server is not None and not self._server.running:
                raise self._server.death() from None
            raise
