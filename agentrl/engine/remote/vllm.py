"""The client for vLLM: formats of requests and answers, and updates of weights. Experimental.

Requests are sent to `/inference/v1/generate`, which takes and returns token ids, and reports the
version of the weights for each token.
"""

from __future__ import annotations

import hashlib
import logging
import math
from array import array
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from agentrl.engine.base import Sampling
from agentrl.engine.remote.admin import ADMIN_SECONDS, AdminClient, reading, refusal
from agentrl.engine.remote.client import (
    PolicyVersion,
    RemoteEngine,
    check_turn,
    sampling_params,
    token_versions,
)
from agentrl.engine.remote.launch import raise_if_dead
from agentrl.engine.remote.senders import Route, Sent, load_seconds
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
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes in which a server may hold a tensor."""
NO_LOGPROB = -9999.0
"""The number that vLLM writes instead of NaN, minus infinity and missing logprobs."""


def read_generation(
    answer: Any, limit: int, policy_version: PolicyVersion, where: str
) -> Generation:
    """Return the turn in an answer.

    Args:
        answer: the parsed answer.
        limit: the number of tokens that was requested.
        policy_version: the version that was published at the time of the request.
        where: the request, for messages.

    Raises:
        InvalidEngineResponse: the answer is invalid.
        EngineError: the request was aborted.
    """
    with reading("vLLM", where):
        (choice,) = answer["choices"]
        if (reason := choice["finish_reason"]) in ("abort", "error"):
            raise EngineError(f"{where}: vLLM aborted the turn ({reason})")
        adapter = policy_version.request_fields.get("model")
        if adapter is not None and answer["model"] != adapter:
            raise ValueError(f"the answer is of model {answer['model']!r}, not {adapter!r}")
        entries = choice["logprobs"]["content"]
        if [entry["token_id"] for entry in entries] != choice["token_ids"]:
            raise ValueError("logprobs of other tokens")
        ids, usage = token_array(choice["token_ids"]), answer["usage"]
        check_turn(ids, reason, limit, usage["completion_tokens"])
        return Generation(
            token_ids=ids,
            logprobs=_finite([entry["logprob"] for entry in entries], len(ids)),
            versions=token_versions(choice["weight_versions"], len(ids), policy_version),
            finish_reason=reason,
            prompt_tokens=int(usage["prompt_tokens"]),
            cached_tokens=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        )


def read_scores(answer: Any, row: Sequence[int], vocabulary: int, where: str) -> array[float]:
    """Return the logprobs of a whole row; the first token's is 0.

    Raises:
        InvalidEngineResponse: the answer is invalid, or of another row.
    """
    with reading("vLLM", where):
        _, *entries = answer["prompt_logprobs"]
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


def check_norms(admin: AdminClient, version: int, sent: Sent) -> bool:
    """Compare vLLM's checksums of the model's norms with those of the tensors that were sent.

    Returns:
        Whether the server has checksums and at least one could be compared.

    Raises:
        EngineError: a checksum differs.
    """
    status, content = admin.send("/weight_checker", {"action": "checksum"})
    if status != 200:
        return False
    server_digests: dict[str, set[str]] = {}
    for name, digest in orjson.loads(content)["checksums"].items():
        server_digests.setdefault(name.rpartition(":")[2], set()).add(digest)
    has_compared = False
    for name, tensor in sent.norms.items():
        if name not in server_digests:
            continue
        if not server_digests[name] <= _digests(tensor) or len(server_digests[name]) > 1:
            raise EngineError(
                f"{admin.url}: version {version} was published, but the server holds"
                f" other values of {name}"
            )
        has_compared = True
    return has_compared


def _digests(tensor: Tensor) -> set[str]:
    """Return the SHA-256 of a tensor's bytes, in every dtype that a server may use."""
    return {
        hashlib.sha256(tensor.to(precision).view(torch.uint8).numpy().tobytes()).hexdigest()
        for precision in DTYPES
    }


class VLLMEngine(RemoteEngine):
    """Samples from one vLLM server. Experimental.

    With `top_p` or `top_k` (only validation may set them), logprobs are those of the truncated
    distribution.
    """

    name, health_path = "vLLM", "/health"
    probe_tokens = 300
    _read_turn, _read_scores = staticmethod(read_generation), staticmethod(read_scores)
    adapter_field, adapter_path = "model", "/v1/{}_lora_adapter"
    path = "/inference/v1/generate"

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
        if self.admin.send(self.path, {})[0] in MISSING_STATUSES:
            raise EngineError(
                f"{self.url} has no {self.path}. Start vLLM 0.32 or newer with --enable-scale-out"
            )
        self._policy_version = PolicyVersion(self._current_weight_version(), 0)
        self._check_logprobs()

    # -- requests and answers ----------------------------------------------------------------------

    def _check_sampling(self, sampling: Sampling, where: str) -> None:
        super()._check_sampling(sampling, where)
        lowest, highest = TEMPERATURES
        if sampling.temperature and not lowest <= sampling.temperature <= highest:
            raise UserError(
                f"{where}: vLLM supports temperature 0 and {lowest:g} to {highest:g}, not"
                f" {sampling.temperature:g}"
            )

    def _body(
        self, ids: np.ndarray, sampling: Sampling, limit: int, seed: int | None = None
    ) -> dict[str, Any]:
        params = sampling_params(sampling) | {"max_tokens": limit, "logprobs": 0}
        params["detokenize"] = bool(sampling.stop)
        if seed is not None:
            params["seed"] = seed
        return {"token_ids": ids, "sampling_params": params}

    def _score_body(self, ids: np.ndarray) -> dict[str, Any]:
        body = self._body(ids, Sampling(temperature=0.0), 1)
        body["sampling_params"]["prompt_logprobs"] = 0
        return body

    async def _ask(self, body: dict[str, Any], where: str, deadline: float, episode_id: str) -> Any:
        """Send one request. Closing the connection aborts it."""
        status, answer = await self._post(body, where, deadline)
        if status != 200:
            if status >= 500:
                await raise_if_dead(self.process)
            raise refusal(status, answer, where)
        return answer

    def _check_logprobs(self) -> None:
        """Check that logprobs include the temperature and top_k.

        If only one token can be sampled, its probability must be 1; or 1/n, if n tokens are equally
        likely.

        Raises:
            EngineError: the logprobs do not include the temperature.
        """
        body = self._body(np.zeros(1, np.int32), Sampling(temperature=1.0, top_k=1), LOGPROB_TOKENS)
        # The first request of a server may take long, because it compiles kernels.
        answer = self.admin.ask(self.path, body, seconds=LONG_SECONDS)
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
        self.admin.manage("/update_weight_version", {"new_version": str(self.version)})
        self._manage("/reset_prefix_cache")
        self._manage("/resume")

    def _current_weight_version(self) -> str:
        """Return the version of the weights that the server reports."""
        if self.admin.send("/weight_info", None)[0] != 200:
            return UNNAMED_VERSION
        return str(self.admin.ask("/weight_info")["weight_version"])

    def _manage(self, path: str, seconds: float = ADMIN_SECONDS) -> None:
        self.admin.manage(path, {}, seconds=seconds)
