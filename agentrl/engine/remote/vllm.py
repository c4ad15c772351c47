"""The client for vLLM: formats of requests and answers, and updates of weights. Experimental.

There are two endpoints. `/inference/v1/generate` reports the version of the weights for each token;
it is used if a server has it. Every server has `/v1/completions`, which does not report versions.
Both take and return token ids.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Collection, Sequence
from typing import Any

from agentrl.engine.base import Sampling
from agentrl.engine.remote.admin import ADMIN_SECONDS, reading, refusal
from agentrl.engine.remote.client import (
    PolicyVersion,
    RemoteEngine,
    check_turn,
    sampling_params,
    token_versions,
)
from agentrl.engine.remote.launch import raise_if_dead
from agentrl.engine.remote.row_json import JsonIds, as_json_array
from agentrl.engine.remote.senders import Route, Sent, load_seconds
from agentrl.engine.remote.weights_check import check_norms
from agentrl.errors import ConfigError, EngineError, UserError
from agentrl.trajectory import Generation, float_array, token_array

log = logging.getLogger("agentrl")

LOGPROB_TOKENS = 4
UNNAMED_VERSION = "default"
"""The version of weights whose version was never set."""
TEMPERATURES = (0.01, 2.0)
"""The range of temperatures. vLLM refuses higher ones, and silently raises lower ones."""
LONG_SECONDS = 600.0
"""The time limit of the first request, which compiles kernels, and of a pause, which waits for the
turns in flight."""
MISSING_STATUSES = (403, 404, 405)
"""The statuses of an endpoint that is disabled or unknown."""
NO_LOGPROB = -9999.0
"""The number that vLLM writes instead of NaN, minus infinity and missing logprobs."""


class Generate:
    """The endpoint `/inference/v1/generate`."""

    path = "/inference/v1/generate"

    def body(self, ids: JsonIds, params: dict[str, Any]) -> dict[str, Any]:
        """Return a request, from the ids of a row and vLLM's sampling parameters.

        Tokens are decoded only if there are stop strings.
        """
        return {
            "token_ids": ids,
            "sampling_params": params | {"detokenize": bool(params.get("stop"))},
        }

    def tokens(self, choice: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Return the ids and logprobs of an answer's only choice, unchecked."""
        entries = choice["logprobs"]["content"]
        if [entry["token_id"] for entry in entries] != choice["token_ids"]:
            raise ValueError("logprobs of other tokens")
        return choice["token_ids"], [entry["logprob"] for entry in entries]

    def prompt_logprobs(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the logprob entries of an answer, one for each token of the row, unchecked."""
        return answer["prompt_logprobs"]


class Completions:
    """The endpoint `/v1/completions`."""

    path = "/v1/completions"

    def body(self, ids: JsonIds, params: dict[str, Any]) -> dict[str, Any]:
        """Return a request, from the ids of a row and vLLM's sampling parameters."""
        return {"prompt": ids, "return_token_ids": True, **params}

    def tokens(self, choice: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Return the ids and logprobs of an answer's only choice, unchecked."""
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def prompt_logprobs(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the logprob entries of an answer, one for each token of the row, unchecked."""
        return answer["choices"][0]["prompt_logprobs"]


class VLLMEngine(RemoteEngine):
    """Samples from one vLLM server. Experimental.

    With `top_p` or `top_k` (only evaluation may set them), logprobs are those of the truncated
    distribution.
    """

    name, health_path = "vLLM", "/health"
    probe_tokens = 300
    adapter_field, adapter_path = "model", "/v1/{}_lora_adapter"
    endpoint: Generate | Completions
    """The endpoint of the requests: `Completions` if the server has no `Generate`."""

    def __init__(
        self,
        url: str,
        *,
        uses_seeds: bool = False,
        names: Collection[str] = (),
        stale_head: bool = False,
        **options: Any,
    ):
        """Ask a running server for its properties, and let it sample a token.

        Args:
            url: the URL of the server.
            uses_seeds: whether to send the seeds of turns, which costs time for each row.
            names: the names of all tensors of the model in transformers.
            stale_head: whether the server runs on a CPU and ties the head to the embeddings. There,
                vLLM keeps a packed copy of the head that an update does not change.
            **options: see `RemoteEngine`.

        Raises:
            EngineError: no server answers, or it is not vLLM with `--logprobs-mode
                processed_logprobs`.
        """
        super().__init__(url, **options)
        self._uses_seeds = uses_seeds
        self._names, self.stale_head = frozenset(names), stale_head
        self._checks_norms = True
        """False if the server has no checksums of its weights."""
        # vLLM reads the folder of an unloaded adapter again.
        self.kept_folders = 2 * self.adapters.limit

    def _connect(self) -> None:
        self.max_length = int(self.admin.ask("/v1/models")["data"][0]["max_model_len"])
        has_generate = self.admin.send(Generate.path, {})[0] not in MISSING_STATUSES
        self.endpoint = Generate() if has_generate else Completions()
        self._policy_version = PolicyVersion(self._current_weight_version(), 0)
        self._check_logprobs()

    # -- requests and answers ----------------------------------------------------------------------

    @property
    def _path(self) -> str:
        return self.endpoint.path

    def _check_sampling(self, sampling: Sampling, where: str) -> None:
        super()._check_sampling(sampling, where)
        lowest, highest = TEMPERATURES
        if sampling.temperature and not lowest <= sampling.temperature <= highest:
            raise UserError(
                f"{where}: vLLM supports temperature 0 and {lowest:g} to {highest:g}, not"
                f" {sampling.temperature:g}"
            )

    def _body(
        self, ids: JsonIds, sampling: Sampling, limit: int, seed: int | None = None
    ) -> dict[str, Any]:
        params = _sampling_params(sampling, limit)
        return self.endpoint.body(ids, params if seed is None else params | {"seed": seed})

    def _score_body(self, ids: JsonIds) -> dict[str, Any]:
        params = _sampling_params(Sampling(temperature=0.0), 1) | {"prompt_logprobs": 0}
        return self.endpoint.body(ids, params)

    async def _ask(self, body: dict[str, Any], where: str, deadline: float, episode_id: str) -> Any:
        """Send one request. Closing the connection aborts it."""
        status, answer = await self._post(body, where, deadline)
        if status != 200:
            if status >= 500:
                await raise_if_dead(self.process)
            raise refusal(status, answer, where)
        return answer

    def _read_turn(
        self,
        answer: Any,
        limit: int,
        policy_version: PolicyVersion,
        where: str,
    ) -> Generation:
        return read_generation(
            self.endpoint,
            answer,
            limit,
            policy_version,
            where,
            published=self._policy_version,
            adapter=policy_version.request_fields.get("model"),
        )

    def _read_scores(self, answer: Any, row: Sequence[int], where: str) -> array[float]:
        return read_scores(self.endpoint, answer, row, where)

    def _check_logprobs(self) -> None:
        """Check that logprobs include the temperature and top_k.

        If only one token can be sampled, its probability must be 1; or 1/n, if n tokens are equally
        likely.

        Raises:
            EngineError: the logprobs do not include the temperature.
        """
        body = self._body(as_json_array([0]), Sampling(temperature=1.0, top_k=1), LOGPROB_TOKENS)
        # The first request of a server may take long, because it compiles kernels.
        answer = self.admin.ask(self._path, body, seconds=LONG_SECONDS)
        values = self._read_turn(
            answer, LOGPROB_TOKENS, self._policy_version, f"{self.url}: a probe"
        )
        ties = [math.exp(-logprob) for logprob in values.logprobs]
        if any(abs(n - round(n)) > 1e-4 * n for n in ties):
            raise EngineError(
                f"{self.url} returns logprobs without the sampling temperature. Start it with"
                " --logprobs-mode processed_logprobs"
            )

    # -- updates -----------------------------------------------------------------------------------

    def begin_update(self) -> None:
        """Wait for the end of the turns in flight, if the weights will be replaced.

        If the server does not load them, it stays paused, because its weights are unknown then.
        """
        if self.delivery.source == "adapter":
            return
        if self.stale_head:
            raise ConfigError(
                "rollout.name=vllm on a CPU cannot train all weights of this model: its head is"
                " tied to its embeddings, and vLLM would keep using the old head. Train LoRA"
                " (model.lora_rank), or set rollout.name=sglang"
            )
        self._manage("/pause?mode=wait", LONG_SECONDS)

    def load(self, route: Route, sent: Sent) -> None:
        """Load an update. All weights must be sent.

        vLLM loads whole layers (q, k and v are one layer): the parts of a layer that are not in the
        files become uninitialized memory.
        """
        if route.adapter_folder is not None:
            self.adapters.load(route.version, route.adapter_folder)
            return
        # The names in files may be others, and more: see `with_published_names`.
        if len(sent.names) < len(self._names):
            self._manage("/resume")
            missing = sorted(self._names.difference(sent.names))
            raise ConfigError(
                f"vLLM needs all weights at once, but {len(missing)} of {len(self._names)} are"
                f" not published ({missing[0]}, ...). Send LoRA as an adapter:"
                " rollout.lora=adapter"
            )
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(route.folder)}}
        self.admin.manage("/collective_rpc", body, seconds=load_seconds(sent))
        if self._checks_norms and not check_norms(self.admin, route.version, sent):
            self._checks_norms = False
            log.warning(
                "%s has no checksums of its weights, so it is not checked that it holds those that"
                " were sent",
                self.url,
            )

    def _use_weights(self, sent: Sent) -> None:
        self._set_weight_version(str(self.version))
        self._manage("/reset_prefix_cache")
        self._manage("/resume")
        self._check_cache_is_empty()

    def _current_weight_version(self) -> str:
        """Return the version of the weights that the server reports."""
        if self.admin.send("/weight_info", None)[0] != 200:
            return UNNAMED_VERSION
        return str(self.admin.ask("/weight_info")["weight_version"])

    def _set_weight_version(self, version: str) -> None:
        """Set the version that answers report, if the server supports it.

        Raises:
            EngineError: the server refuses it.
        """
        path, body = "/update_weight_version", {"new_version": version}
        status, content = self.admin.send(path, body)
        if status != 200 and status not in MISSING_STATUSES:
            raise refusal(status, content.decode("utf-8", "replace"), f"{self.url}{path}")

    def _manage(self, path: str, seconds: float = ADMIN_SECONDS) -> None:
        self.admin.manage(path, {}, seconds=seconds)


def _sampling_params(sampling: Sampling, limit: int) -> dict[str, Any]:
    return sampling_params(sampling) | {"max_tokens": limit, "logprobs": 0}


def read_generation(
    endpoint: Generate | Completions,
    answer: Any,
    limit: int,
    policy_version: PolicyVersion,
    where: str,
    *,
    published: PolicyVersion,
    adapter: str | None,
) -> Generation:
    """Return the turn in an answer.

    Args:
        endpoint: the endpoint of the request.
        answer: the parsed answer.
        limit: the number of tokens that was requested.
        policy_version: the version that was published at the time of the request.
        where: the request, for messages.
        published: the version that is published when the answer is read.
        adapter: the name of the requested adapter.

    Raises:
        InvalidEngineResponse: the answer is invalid.
        EngineError: the request was aborted; or the weights changed during the turn, and the server
            does not report the version of each token.
    """
    with reading("vLLM", where):
        (choice,) = answer["choices"]
        if (reason := choice["finish_reason"]) in ("abort", "error"):
            raise EngineError(f"{where}: vLLM aborted the turn ({reason})")
        if adapter is not None and answer["model"] != adapter:
            raise ValueError(f"the answer is of model {answer['model']!r}, not {adapter!r}")
        token_ids, logprobs = endpoint.tokens(choice)
        ids, usage = token_array(token_ids), answer["usage"]
        spans = choice.get("weight_versions")
        if spans is None and published.weights != policy_version.weights:
            raise EngineError(
                f"{where}: the weights were {policy_version.weights!r} when this turn began and"
                f" {published.weights!r} when it ended, and {endpoint.path} does not report the"
                " version of each token"
            )
        check_turn(ids, reason, limit, usage["completion_tokens"])
        return Generation(
            token_ids=ids,
            logprobs=_finite(logprobs, len(ids)),
            versions=token_versions(spans, len(ids), policy_version),
            finish_reason=reason,
            prompt_tokens=int(usage["prompt_tokens"]),
            cached_tokens=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        )


def read_scores(
    endpoint: Generate | Completions, answer: Any, row: Sequence[int], where: str
) -> array[float]:
    """Return the logprobs of a whole row; the first token's is 0.

    Raises:
        InvalidEngineResponse: the answer is invalid, or of another row.
    """
    with reading("vLLM", where):
        _, *entries = endpoint.prompt_logprobs(answer)
        values = [
            entry[str(token)]["logprob"] for entry, token in zip(entries, row[1:], strict=True)
        ]
        return float_array([0.0, *_finite(values, len(row) - 1)])


def _finite(logprobs: Sequence[float], n: int) -> array[float]:
    values = float_array(logprobs)
    if len(values) != n:
        raise ValueError(f"{len(values)} logprobs for {n} tokens")
    if not all(math.isfinite(x) and x > NO_LOGPROB for x in values):
        raise ValueError("a logprob is not finite")
    return values
