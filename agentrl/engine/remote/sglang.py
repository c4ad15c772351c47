"""SGLang's dialect: how a server of its kind is asked for tokens, and takes weights.

Ids and logprobs are read from `output_token_logprobs`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from agentrl.engine.base import Sampling, Update
from agentrl.engine.remote.client import (
    PolicyVersion,
    RemoteEngine,
    check_turn,
    sampling_params,
    versions_of,
)
from agentrl.engine.remote.control import CONTROL_SECONDS, Control, reading, refusal
from agentrl.engine.remote.proof import WeightsChecker
from agentrl.engine.remote.senders import Sender, SGLangDiskSender
from agentrl.errors import EngineError
from agentrl.trajectory import Generation, float_array, token_array

ABORT_SECONDS = 10.0
MIN_TOP_P = 1e-6
ROUNDED = 1e-2
"""Above 0 by rounding; more is no logprob."""
MEMORY = {"none": (), "kv_cache": ("kv_cache",), "all": ("weights", "kv_cache")}
"""What a server gives up asleep, in the order in which it is taken back."""


class SGLangEngine(RemoteEngine):
    """Samples from one SGLang server: an `Engine`.

    A seed counts where the server runs with `--enable-deterministic-inference`; elsewhere two runs
    sample different tokens. `max_length` is a little less than the model's.
    """

    name, health = "SGLang", "/health_generate"
    probe_tokens = 128

    def __init__(
        self,
        url: str,
        *,
        dtype: torch.dtype | None = None,
        sender: Callable[[Control], Sender] = SGLangDiskSender,
        sleep: Literal["none", "kv_cache", "all"] = "none",
        **options: Any,
    ):
        """Ask a running server what it can do, and let it sample a token.

        Args:
            url: the server's.
            dtype: what it computes in, and what it is sent; None: what it is given.
            sender: how the policy goes to it.
            sleep: what it gives up while the trainer works.
            **options: see `RemoteEngine`. SGLang aborts nothing without the admin key.

        Raises:
            EngineError: no server answers, or one that is no SGLang.
        """
        self._dtype = dtype
        self._memory, self._given_up = MEMORY[sleep], set[str]()
        self._aborts: set[asyncio.Task[None]] = set()
        super().__init__(url, sender=sender, **options)

    def _connect(self) -> None:
        self._proof = WeightsChecker(self._control)
        info, model = self._control.ask("/server_info"), self._control.ask("/model_info")
        self.max_length = int(info["max_req_input_len"])
        self._seeded = bool(info.get("enable_deterministic_inference"))
        self._stamp = PolicyVersion(str(model["weight_version"]), 0)

    # -- requests and answers ----------------------------------------------------------------------

    @property
    def _path(self) -> str:
        return "/generate"

    def _body(
        self, row: Sequence[int], sampling: Sampling, limit: int, seed: int | None = None
    ) -> dict[str, Any]:
        return {
            "input_ids": list(row),
            "return_logprob": True,
            "sampling_params": _sampling_params(sampling, limit, seed),
        }

    def _score_body(self, row: Sequence[int]) -> dict[str, Any]:
        return {
            "input_ids": list(row),
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 0},
        }

    async def _ask(self, body: dict[str, Any], where: str, deadline: float, episode_id: str) -> Any:
        # SGLang aborts by prefix: ids of one length are no prefix of each other. It refuses an id
        # that it is at work on.
        rid = uuid.uuid4().hex
        answered = False
        try:
            # SGLang's router keeps an episode to a worker.
            headers = {"x-smg-routing-key": episode_id}
            status, answer = await self._post(body | {"rid": rid}, where, deadline, headers)
            answered = True
        finally:
            if not answered:
                task = asyncio.create_task(self._abort(rid))
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)
        if status != 200:
            error = refusal(status, answer, where)
            adapter = body.get("lora_path")
            # A server that was started anew forgot it: its fault, not the request's.
            raise EngineError(str(error)) if adapter and adapter in str(error) else error
        return answer

    async def _abort(self, rid: str) -> None:
        """Best effort: a server that does not hear it ends the turn at its limit."""
        with contextlib.suppress(EngineError):
            await self._aside.request_json(
                "POST",
                "/abort_request",
                {"rid": rid},
                deadline=time.monotonic() + ABORT_SECONDS,
            )

    def _read_turn(
        self, answer: Any, limit: int, stamp: PolicyVersion, where: str, named: dict[str, Any]
    ) -> Generation:
        return read_generation(answer, limit, stamp, where)

    def _read_scores(self, answer: Any, row: Sequence[int], where: str) -> array[float]:
        return read_scores(answer, row, self._vocabulary, where)

    # -- EngineControl -----------------------------------------------------------------------------

    def sleep(self) -> None:
        """Give up the memory that the trainer needs now, once no turn is in flight."""
        if self._memory and not self._given_up:
            self._flush()
            body = {"tags": list(reversed(self._memory))}
            self._control.manage("/release_memory_occupation", body)
            self._given_up = set(self._memory)

    def probe(self) -> Generation:
        """See `RemoteEngine`."""
        if self._given_up:
            raise EngineError(
                f"{self.url}: asleep, without its {', '.join(sorted(self._given_up))}"
            )
        return super().probe()

    def _replace_weights(self, update: Update) -> int:
        write = update.write
        update = replace(
            update,
            weights=partial(self._cast, update),
            write=write and (lambda folder, _: write(folder, self._dtype)),
        )
        self._proof.before()
        sent = self._send(update)
        self._stamp = PolicyVersion(str(update.version), update.version)
        self._flush()
        self._prove_fresh()
        self._proof.after(update)
        return sent

    def _cast(self, update: Update) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights in the precision that the server has them in, with the same rounding."""
        for name, tensor in update.weights():
            yield name, tensor.to(self._dtype or tensor.dtype)

    def _send(self, update: Update) -> int:
        self._wake("weights")
        sent = super()._send(update)
        self._wake("kv_cache")
        return sent

    def _wake(self, tag: str) -> None:
        if tag in self._given_up:
            self._control.manage("/resume_memory_occupation", {"tags": [tag]})
            self._given_up.remove(tag)

    def _flush(self) -> None:
        """Empty the cache, once the turns that were aborted have left it.

        Not with the update: there SGLang ends over a cache that is in use. So does it where turns
        that were paused keep theirs.

        Raises:
            EngineError: it is in use for too long.
        """
        end = time.monotonic() + CONTROL_SECONDS
        while (found := self._control.attempt("/flush_cache", {}))[0] != 200:
            if time.monotonic() > end:
                raise refusal(found[0], found[1].decode(errors="replace"), "/flush_cache")
            time.sleep(0.02)


def _sampling_params(sampling: Sampling, limit: int, seed: int | None) -> dict[str, Any]:
    params = sampling_params(sampling) | {
        "max_new_tokens": limit,
        "no_stop_trim": True,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
    }
    if sampling.top_k == 1 and sampling.temperature > 0:
        # SGLang takes it for greedy, and then the logprobs are of temperature 1 or not by what
        # else is sampled at the moment. The least top_p is the same choice.
        params |= {"top_k": -1, "top_p": MIN_TOP_P}
    return params if seed is None else params | {"sampling_seed": seed}


def read_generation(answer: Any, limit: int, stamp: PolicyVersion, where: str) -> Generation:
    """A turn from an answer of `/generate`.

    Args:
        answer: parsed.
        limit: how many tokens were asked for.
        stamp: what was published when it was sent.
        where: for messages.

    Raises:
        EngineNonsense: the answer cannot be.
        EngineError: the request was aborted, or sampled by two policies and the server does not say
            which token by which.
    """
    with reading("SGLang", where):
        meta = answer["meta_info"]
        reason = meta["finish_reason"]["type"]
        if reason == "abort":
            status = meta["finish_reason"].get("status_code") or 500
            raise refusal(int(status), meta["finish_reason"].get("message", "aborted"), where)
        ids, logprobs = _tokens(meta["output_token_logprobs"])
        check_turn(ids, reason, limit, meta["completion_tokens"])
        spans = meta.get("weight_versions")
        if not spans:
            now = meta["weight_version"]
            if not isinstance(now, str):
                raise TypeError(f"weight_version {now!r}")
            if now != stamp.weights:
                raise EngineError(
                    f"{where}: the weights were {stamp.weights!r} when this turn began and {now!r}"
                    " when it ended, and this SGLang does not say which sampled which token"
                )
        return Generation(
            token_ids=ids,
            logprobs=logprobs,
            versions=versions_of(spans, len(ids), stamp),
            finish_reason=reason,
            prompt_tokens=int(meta["prompt_tokens"]),
            cached_tokens=int(meta["cached_tokens"]),
        )


def read_scores(answer: Any, row: Sequence[int], vocabulary: int, where: str) -> array[float]:
    """Logprobs of a whole row, the first token's as 0.

    Args:
        answer: parsed.
        row: what was to be scored.
        vocabulary: the model's; SGLang repeats the last of its ids as 0, while it scores the token.
        where: for messages.

    Raises:
        EngineNonsense: the answer cannot be, or is of another row.
    """
    with reading("SGLang", where):
        (_, first, *_), *rest = answer["meta_info"]["input_token_logprobs"]
        ids, logprobs = _tokens(rest)
        repeated = [token if token < vocabulary - 1 else 0 for token in row]
        if [first, *ids] not in (repeated, list(row)):
            raise ValueError("logprobs of another row")
        return float_array([0.0, *logprobs])


def _tokens(entries: Sequence[Sequence[Any]]) -> tuple[array[int], array[float]]:
    """Ids and logprobs of `[logprob, id, text]`."""
    logprobs = float_array([entry[0] for entry in entries])
    if not all(-math.inf < logprob < ROUNDED for logprob in logprobs):
        raise ValueError("a logprob that is not finite, or of more than certainty")
    return token_array([entry[1] for entry in entries]), logprobs
