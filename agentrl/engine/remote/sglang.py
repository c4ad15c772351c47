"""The client for SGLang: formats of requests and answers, and updates of weights.

Ids and logprobs are read from `output_token_logprobs`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import time
import uuid
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
import orjson
import torch

from agentrl.engine.base import Sampling
from agentrl.engine.checks import image_starts
from agentrl.engine.remote.admin import ADMIN_SECONDS, AdminClient, reading, refusal
from agentrl.engine.remote.client import (
    PolicyVersion,
    RemoteEngine,
    check_turn,
    sampling_params,
    token_versions,
)
from agentrl.engine.remote.senders import Route, Sent, load_seconds
from agentrl.errors import ConfigError, EngineError
from agentrl.images import RowImage, data_url
from agentrl.trajectory import Generation, float_array, token_array

ABORT_SECONDS = 10.0
MIN_TOP_P = 1e-6
TOP_P_ROUNDING = 1e-5
"""The mass of the likelier tokens may exceed `top_p` by rounding, but not by more."""
EXPERTS_FROM = "routed_experts_start_len"
"""The field of a request with the first token whose experts are returned."""
ROUNDING_TOLERANCE = 1e-2
"""A logprob may be above 0 by rounding, but not by more."""
MEMORY_TAGS = {"none": (), "kv_cache": ("kv_cache",), "all": ("weights", "kv_cache")}
"""The memory that a server releases for each `rollout.sleep`, in the order of resuming it."""


def _sampling_params(sampling: Sampling, limit: int, seed: int | None) -> dict[str, Any]:
    params = sampling_params(sampling) | {
        "max_new_tokens": limit,
        "no_stop_trim": True,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
    }
    if sampling.top_k == 1 and sampling.temperature > 0:
        # SGLang treats top_k=1 as greedy sampling. Then the temperature of the logprobs depends on
        # the other requests of the batch. A tiny top_p selects the same token.
        params |= {"top_k": -1, "top_p": MIN_TOP_P}
    return params if seed is None else params | {"sampling_seed": seed}


def read_generation(
    answer: Any, limit: int, policy_version: PolicyVersion, where: str
) -> Generation:
    """Return the turn in an answer of `/generate`, or its part if the server was told to abort it.

    Args:
        answer: the parsed answer.
        limit: the number of tokens that was requested.
        policy_version: the version that was published at the time of the request.
        where: the request, for messages.

    Raises:
        InvalidEngineResponse: the answer is invalid.
        EngineError: the server ended the turn with an error; or two policies sampled the turn, and
            the server does not report the version of each token.
    """
    with reading("SGLang", where):
        meta = answer["meta_info"]
        reason = meta["finish_reason"]["type"]
        if reason == "abort" and (status := meta["finish_reason"].get("status_code")):
            raise refusal(int(status), meta["finish_reason"].get("message", "aborted"), where)
        # A turn that was aborted before its first token lacks most fields.
        ids, logprobs = _tokens(meta.get("output_token_logprobs") or [])
        if reason == "abort" and not ids:
            return Generation(ids, logprobs, token_array(), reason, 0)
        check_turn(ids, reason, limit, meta["completion_tokens"])
        spans = meta.get("weight_versions")
        if not spans:
            final_weights = meta["weight_version"]
            if not isinstance(final_weights, str):
                raise TypeError(f"weight_version {final_weights!r}")
            if final_weights != policy_version.weights:
                raise EngineError(
                    f"{where}: the weights were {policy_version.weights!r} when this turn began and"
                    f" {final_weights!r} when it ended, and this SGLang does not report the version"
                    " of each token"
                )
            spans = [{"version": final_weights, "start": 0, "end": len(ids)}]
        kept = meta.get("output_token_sampling_mask") or []
        if kept:
            logprobs = float_array(meta["output_token_sampling_logprobs"])
        return Generation(
            token_ids=ids,
            logprobs=logprobs,
            versions=token_versions(spans, len(ids), policy_version),
            finish_reason=reason,
            prompt_tokens=int(meta["prompt_tokens"]),
            cached_tokens=int(meta["cached_tokens"]),
            kept_ids=token_array([*chain(*kept)]),
            kept_counts=token_array([*map(len, kept)]),
            **_experts(meta),
        )


def _experts(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return `experts` and `experts_width` of a turn; nothing if the answer has none."""
    if not (text := meta.get("routed_experts")):
        return {}
    experts = np.frombuffer(base64.b64decode(text), np.int32)
    tokens = meta["prompt_tokens"] + meta["completion_tokens"] - 1 - meta[EXPERTS_FROM]
    width, rest = divmod(len(experts), tokens)
    if rest or experts.min() < 0 or experts.max() >= 2**15:
        raise ValueError(f"{len(experts)} experts for {tokens} tokens")
    return {"experts": array("h", experts.astype(np.int16).tobytes()), "experts_width": width}


def restore_ties(meta: Mapping[str, Any], top_k: int, top_p: float) -> None:
    """Make the kept tokens of an answer those that the token was sampled from.

    SGLang sorts the tokens again to find the kept ones, and equally likely ones may come in another
    order. If the sampled token is cut off by that, SGLang appends it, which is one token too many.
    The token before it is as likely. Without that one, number and mass are the sampler's.

    Args:
        meta: the `meta_info` of the answer, which is changed.
        top_k: of the request; -1: all tokens.
        top_p: of the request.
    """
    kept = meta.get("output_token_sampling_mask") or []
    logprobs = meta.get("output_token_sampling_logprobs") or []
    tokens = meta.get("output_token_logprobs") or []
    for i, (ids, (whole, token, *_)) in enumerate(zip(kept, tokens, strict=False)):
        if ids[-1] != token or len(ids) == 1:
            continue
        mass_before = math.exp(whole - logprobs[i]) - math.exp(whole)
        if 0 < top_k < len(ids) or mass_before > top_p + TOP_P_ROUNDING:
            del ids[-2]
            logprobs[i] = min(0.0, logprobs[i] - math.log1p(-math.exp(logprobs[i])))


def read_scores(answer: Any, row: Sequence[int], vocabulary: int, where: str) -> array[float]:
    """Return the logprobs of a whole row; the first token's is 0.

    Args:
        answer: the parsed answer.
        row: the row to score.
        vocabulary: the size of the model's vocabulary. SGLang reports the last id of the vocabulary
            as 0, although it scores the right token.
        where: the request, for messages.

    Raises:
        InvalidEngineResponse: the answer is invalid, or of another row.
    """
    with reading("SGLang", where):
        (_, first, *_), *entries = answer["meta_info"]["input_token_logprobs"]
        ids, logprobs = _tokens(entries)
        expected = [token if token < vocabulary - 1 else 0 for token in row]
        if [first, *ids] not in (expected, list(row)):
            raise ValueError("logprobs of another row")
        return float_array([0.0, *logprobs])


def _tokens(entries: Sequence[Sequence[Any]]) -> tuple[array[int], array[float]]:
    """Return the ids and logprobs of a list of `[logprob, id, text]`."""
    logprobs = float_array([entry[0] for entry in entries])
    if not all(-math.inf < logprob < ROUNDING_TOLERANCE for logprob in logprobs):
        raise ValueError("a logprob is not finite, or is above 0")
    return token_array([entry[1] for entry in entries]), logprobs


class WeightsChecker:
    """Checks the weights of one SGLang server by their checksum, if the server runs on a GPU."""

    def __init__(self, admin: AdminClient):
        """Send no request yet."""
        self._admin = admin
        self._has_checksum = True
        self._last: tuple[str, str] | None = None
        """The digest of the weights that were sent last, and the server's checksum after that."""

    def check(self, version: int, sent: Sent) -> None:
        """Check that the checksum changes if and only if the weights that are sent change.

        Raises:
            EngineError: the server holds other weights.
        """
        if not self._has_checksum:
            return
        status, content = self._admin.send("/weights_checker", {"action": "checksum"})
        if status != 200:  # No GPU.
            self._has_checksum = False
            return
        answer: dict[str, Any] = orjson.loads(content)
        checksum = str(answer.get("per_engine_checksum") or answer.get("ranks"))
        if self._last is not None:
            sent_changed, server_changed = sent.digest != self._last[0], checksum != self._last[1]
            if sent_changed != server_changed:
                raise EngineError(
                    f"{self._admin.url}: version {version} was published, and its weights"
                    + (
                        " differ from the last ones, but the server's are as they were"
                        if sent_changed
                        else " are the last ones, but the server's have changed"
                    )
                )
        self._last = sent.digest, checksum


class SGLangEngine(RemoteEngine):
    """Samples from one SGLang server.

    Seeds have an effect only if the server runs with `--enable-deterministic-inference`; otherwise
    two runs sample different tokens. `max_length` is slightly below the model's.
    """

    name, health_path = "SGLang", "/health_generate"
    path, probe_tokens = "/generate", 128
    _read_turn, _read_scores = staticmethod(read_generation), staticmethod(read_scores)
    adapter_field, adapter_path = "lora_path", "/{}_lora_adapter"

    def __init__(
        self,
        url: str,
        *,
        dtype: torch.dtype | None = None,
        sleep: Literal["none", "kv_cache", "all"] = "none",
        returns_kept: bool = False,
        returns_experts: bool = False,
        **options: Any,
    ):
        """Ask a running server for its properties, and let it sample a token.

        Args:
            url: the URL of the server.
            dtype: the dtype of the server's weights, to which updates are cast; None: do not cast.
            sleep: the memory that the server releases while the trainer works.
            returns_kept: True if turns have `Sampling.returns_kept`.
            returns_experts: True if turns have `Sampling.experts_from`.
            **options: see `RemoteEngine`. Without the admin key, SGLang aborts no request.

        Raises:
            ConfigError: it does not return the tokens that `top_p` and `top_k` keep, or the experts
                that it chooses.
            EngineError: no server answers, or it is not SGLang.
        """
        self.dtype = dtype
        self._memory, self._released = MEMORY_TAGS[sleep], set[str]()
        self._aborts: set[asyncio.Task[None]] = set()
        self._is_paused, self._returns_kept = False, returns_kept
        self._returns_experts = returns_experts
        super().__init__(url, **options)

    def _connect(self) -> None:
        self._weights_checker = WeightsChecker(self.admin)
        info, model = self.admin.ask("/server_info"), self.admin.ask("/model_info")
        self.max_length = int(info["max_req_input_len"])
        self._uses_seeds = bool(info.get("enable_deterministic_inference"))
        if self.delivery.source == "adapter":
            self.adapters.check_limit(info.get("max_loaded_loras"))
        self._policy_version = PolicyVersion(str(model["weight_version"]), 0)
        if self._returns_kept:
            self._check_kept(info)
        if self._returns_experts:
            self._check_experts(info)

    def _check_kept(self, info: Mapping[str, Any]) -> None:
        """Check that the server returns exactly the tokens that `top_p` and `top_k` keep.

        Args:
            info: the properties of the server.

        Raises:
            ConfigError: it does not.
        """
        if (backend := info.get("sampling_backend")) != "pytorch":
            raise ConfigError(
                f"{self.url}: rollout.top_p and rollout.top_k train only with SGLang's sampling"
                f" backend pytorch. With {backend}, a token as likely as the last kept one can be"
                " sampled, but is not returned. Start it with --sampling-backend pytorch"
            )
        body = self._body(np.zeros(1, np.int32), Sampling(top_k=2, returns_kept=True), 1)
        where = f"{self.url}: a probe"
        turn = self._read_turn(self.admin.ask(self.path, body), 1, self._policy_version, where)
        if not turn.kept_counts:
            raise ConfigError(
                f"{self.url}: SGLang {info.get('version', '')} does not return the tokens that"
                " rollout.top_p and rollout.top_k keep (0.5.18 does). Use a newer one, or set"
                " rollout.top_p=1 and rollout.top_k=0"
            )

    def _check_experts(self, info: Mapping[str, Any]) -> None:
        """Check that the server returns the experts that it chooses.

        Args:
            info: the properties of the server.

        Raises:
            ConfigError: it does not.
        """
        fix = "or set rollout.router_replay=false"
        if not info.get("enable_return_routed_experts"):
            raise ConfigError(
                f"{self.url}: SGLang {info.get('version', '')} does not return the experts that it"
                f" chooses. Start it with --enable-return-routed-experts (0.5.18 has it), {fix}"
            )
        row = np.arange(self.probe_tokens, dtype=np.int32) % self._vocabulary
        body = self._body(row, Sampling(experts_from=1), 1)
        answer, where = self.admin.ask(self.path, body), f"{self.url}: a probe"
        answer["meta_info"][EXPERTS_FROM] = 1
        if not any(self._read_turn(answer, 1, self._policy_version, where).experts):
            raise ConfigError(
                f"{self.url}: SGLang returns no experts with its kernels for this model. Start it"
                f" with --moe-runner-backend triton, {fix}"
            )

    # -- requests and answers ----------------------------------------------------------------------

    def _body(
        self, ids: np.ndarray, sampling: Sampling, limit: int, seed: int | None = None
    ) -> dict[str, Any]:
        body = {
            "input_ids": ids,
            "return_logprob": True,
            "sampling_params": _sampling_params(sampling, limit, seed),
        }
        if sampling.experts_from is not None:
            start = {EXPERTS_FROM: sampling.experts_from}
            body |= {"return_routed_experts": True} | start
        return body | {"return_sampling_mask": True} if sampling.returns_kept else body

    def _score_body(self, ids: np.ndarray) -> dict[str, Any]:
        return {
            "input_ids": ids,
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 0},
        }

    def _with_images(
        self, ids: np.ndarray, images: Sequence[RowImage], where: str
    ) -> tuple[np.ndarray, dict[str, Any]]:
        # SGLang takes one placeholder for each image, and expands it.
        kept = np.ones(len(ids), bool)
        for start, image in zip(image_starts(ids, images, where), images, strict=True):
            kept[start + 1 : start + image.tokens] = False
        return ids[kept], {"image_data": [data_url(image) for image in images]} if images else {}

    async def _ask(self, body: dict[str, Any], where: str, deadline: float, episode_id: str) -> Any:
        # SGLang aborts all requests whose id begins with the given text, so ids have equal lengths.
        # It refuses an id that is in use, so each request has a new id.
        rid = uuid.uuid4().hex
        has_answer = False
        try:
            # SGLang's router sends the requests of an episode to one worker.
            headers = {"x-smg-routing-key": episode_id}
            status, answer = await self._post(body | {"rid": rid}, where, deadline, headers)
            has_answer = True
        finally:
            if not has_answer:
                task = asyncio.create_task(self._abort(rid))
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)
        if status != 200:
            error = refusal(status, answer, where)
            adapter = body.get("lora_path")
            # A restarted server has lost the adapter: the request is not at fault.
            raise EngineError(str(error)) if adapter and adapter in str(error) else error
        if "return_routed_experts" in body:
            with reading(self.name, where):
                answer["meta_info"][EXPERTS_FROM] = body[EXPERTS_FROM]
        if "return_sampling_mask" in body:
            params = body["sampling_params"]
            with reading(self.name, where):
                restore_ties(answer["meta_info"], params["top_k"], params["top_p"])
        return answer

    async def _abort(self, rid: str) -> None:
        """Abort a request. If the server does not receive this, the turn ends at its limit."""
        with contextlib.suppress(EngineError):
            await self._control_http.request_json(
                "POST",
                "/abort_request",
                {"rid": rid},
                deadline=time.monotonic() + ABORT_SECONDS,
            )

    # -- updates -----------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Release the memory that the trainer needs, once no turn is in flight."""
        if self._memory and not self._released:
            self.flush_cache()
            body = {"tags": list(reversed(self._memory))}
            self.admin.manage("/release_memory_occupation", body)
            self._released = set(self._memory)

    @property
    def has_weights(self) -> bool:
        return "weights" not in self._released

    def set_version(self, version: int) -> None:
        self._resume_memory("kv_cache")
        super().set_version(version)

    def probe(self) -> Generation:
        """Let the server sample a token. It must not be asleep. End its pause, if it is paused."""
        if self._released:
            raise EngineError(
                f"{self.url} cannot sample: it has released its {', '.join(sorted(self._released))}"
                " to the trainer"
            )
        self._continue()
        return super().probe()

    def begin_update(self) -> None:
        self._resume_memory("weights")
        if self.delivery.source != "adapter":
            self._pause()

    def load(self, route: Route, sent: Sent) -> None:
        if route.adapter_folder is not None and self.delivery.source == "adapter":
            self.adapters.load(route.version, route.adapter_folder)
        elif self.delivery.source == "files":
            # Do not flush the cache with the update: SGLang crashes if the cache is in use then.
            body = {
                "model_path": str(route.folder),
                "weight_version": str(route.version),
                "flush_cache": False,
            }
            self.admin.manage("/update_weights_from_disk", body, seconds=load_seconds(sent))
        self._resume_memory("kv_cache")

    def _use_weights(self, sent: Sent) -> None:
        self.flush_cache()
        self._continue()
        self._weights_checker.check(self.version, sent)

    def _pause(self) -> None:
        """Abort the turns in flight, and hold back later ones, until the server has new weights.

        Without a pause, a server samples between two buckets of weights. With SGLang's other modes
        of a pause, turns keep the cache of the old weights.

        Raises:
            EngineError: a turn does not end.
        """
        self._gate.close()
        self._changed()
        end = time.monotonic() + ADMIN_SECONDS
        while self.turns_in_flight():
            if time.monotonic() > end:
                raise EngineError(
                    f"{self.url}: turns do not end {ADMIN_SECONDS:g} s after an abort"
                )
            # Repeat it: a request may be on its way to the scheduler. The pause itself would look
            # for turns in flight only once in a second.
            self.admin.manage("/abort_request", {"abort_all": True}, json=False)
            time.sleep(0.02)
        self._is_paused = True
        self.admin.manage("/pause_generation", {"mode": "abort"})

    def _continue(self) -> None:
        if self._is_paused:
            self.admin.manage("/continue_generation", {"torch_empty_cache": False})
            self._is_paused = False

    def _resume_memory(self, tag: str) -> None:
        if tag in self._released:
            self.admin.manage("/resume_memory_occupation", {"tags": [tag]})
            self._released.remove(tag)

    def flush_cache(self, seconds: float = ADMIN_SECONDS) -> None:
        """Empty the cache, once the aborted turns have left it.

        The cache is not flushed with the update: SGLang crashes if the cache is in use then, also
        by paused turns.

        Args:
            seconds: the time to wait for these turns.

        Raises:
            EngineError: the cache is in use for longer.
        """
        end = time.monotonic() + seconds
        while (answer := self.admin.send("/flush_cache", {}))[0] != 200:
            if time.monotonic() > end:
                text = answer[1].decode(errors="replace")
                raise refusal(answer[0], text, f"{self.url}/flush_cache")
            time.sleep(0.02)
