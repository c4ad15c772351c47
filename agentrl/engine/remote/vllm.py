"""vLLM's dialect: how a server of its kind is asked for tokens, and takes weights. Experimental.

There are two ways to ask. `/inference/v1/generate` says which weights sampled each token; it is
used where a server has it. `/v1/completions` is everywhere, and does not say. Both take ids and
give ids.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

from agentrl.engine.base import Sampling, Update
from agentrl.engine.remote.client import (
    PolicyVersion,
    RemoteEngine,
    check_turn,
    sampling_params,
    versions_of,
)
from agentrl.engine.remote.control import CONTROL_SECONDS, reading, refusal
from agentrl.engine.remote.launch import raise_if_dead
from agentrl.engine.remote.senders import SEND_SECONDS
from agentrl.errors import ConfigError, EngineError, UserError
from agentrl.trajectory import Generation, float_array, token_array

LOGPROB_TOKENS = 4
UNNAMED_VERSION = "default"
"""The version of weights that nobody has named."""
TEMPERATURES = (0.01, 2.0)
"""vLLM refuses to go above, and quietly does not go below."""
ABSENT = (403, 404, 405)
"""What is answered where an endpoint is switched off or unknown."""
NO_LOGPROB = -9999.0
"""What vLLM writes instead of NaN, of minus infinity, and of a logprob that it does not have."""


class Generate:
    """`/inference/v1/generate`."""

    path = "/inference/v1/generate"

    def body(self, row: Sequence[int], params: dict[str, Any]) -> dict[str, Any]:
        """What to send, for a row and vLLM's sampling parameters.

        Texts are made only where one may end the turn.
        """
        return {
            "token_ids": list(row),
            "sampling_params": params | {"detokenize": bool(params.get("stop"))},
        }

    def tokens(self, choice: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Ids and logprobs of an answer's only choice, as they stand there."""
        entries = choice["logprobs"]["content"]
        if [entry["token_id"] for entry in entries] != choice["token_ids"]:
            raise ValueError("logprobs of other tokens")
        return choice["token_ids"], [entry["logprob"] for entry in entries]

    def prompt_logprobs(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """One for each token of the row, as they stand there."""
        return answer["prompt_logprobs"]


class Completions:
    """`/v1/completions`."""

    path = "/v1/completions"

    def body(self, row: Sequence[int], params: dict[str, Any]) -> dict[str, Any]:
        """See `Generate`."""
        return {"prompt": list(row), "return_token_ids": True, **params}

    def tokens(self, choice: dict[str, Any]) -> tuple[list[int], list[float]]:
        """See `Generate`."""
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def prompt_logprobs(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """See `Generate`."""
        return answer["choices"][0]["prompt_logprobs"]


class VLLMEngine(RemoteEngine):
    """Samples from one vLLM server: an `Engine`. Experimental.

    Where `top_p` or `top_k` narrow what is sampled (evaluation alone may), logprobs are those of
    the narrowed distribution.
    """

    name, health = "vLLM", "/health"
    probe_tokens = 300

    def __init__(self, url: str, *, seeded: bool = False, **options: Any):
        """Ask a running server what it can do, and let it sample a token.

        Args:
            url: the server's.
            seeded: whether to sample by the turns' seeds, at a cost per row.
            **options: see `RemoteEngine`.

        Raises:
            EngineError: no server answers, or one that is no vLLM with
                `--logprobs-mode processed_logprobs`.
        """
        super().__init__(url, **options)
        self._seeded = seeded

    def _connect(self) -> None:
        self.max_length = int(self._control.ask("/v1/models")["data"][0]["max_model_len"])
        there = self._control.attempt(Generate.path, {})[0] not in ABSENT
        self._endpoint = Generate() if there else Completions()
        self._stamp = PolicyVersion(self._weights_now(), 0)
        self._check_logprobs()

    # -- requests and answers ----------------------------------------------------------------------

    @property
    def _path(self) -> str:
        return self._endpoint.path

    def _check_sampling(self, sampling: Sampling, where: str) -> None:
        super()._check_sampling(sampling, where)
        least, most = TEMPERATURES
        if sampling.temperature and not least <= sampling.temperature <= most:
            raise UserError(
                f"{where}: vLLM samples at temperature 0 and {least:g} to {most:g}, not"
                f" {sampling.temperature:g}"
            )

    def _body(
        self, row: Sequence[int], sampling: Sampling, limit: int, seed: int | None = None
    ) -> dict[str, Any]:
        params = _sampling_params(sampling, limit)
        return self._endpoint.body(row, params if seed is None else params | {"seed": seed})

    def _score_body(self, row: Sequence[int]) -> dict[str, Any]:
        params = _sampling_params(Sampling(temperature=0.0), 1) | {"prompt_logprobs": 0}
        return self._endpoint.body(row, params)

    async def _ask(self, body: dict[str, Any], where: str, deadline: float, episode_id: str) -> Any:
        """See `RemoteEngine`: the connection's end aborts it."""
        status, answer = await self._post(body, where, deadline)
        if status != 200:
            if status >= 500:
                await raise_if_dead(self._process)
            raise refusal(status, answer, where)
        return answer

    def _read_turn(
        self, answer: Any, limit: int, stamp: PolicyVersion, where: str, named: dict[str, Any]
    ) -> Generation:
        return read_generation(
            self._endpoint, answer, limit, stamp, where, now=self._stamp, name=named.get("model")
        )

    def _read_scores(self, answer: Any, row: Sequence[int], where: str) -> array[float]:
        return read_scores(self._endpoint, answer, row, where)

    def _check_logprobs(self) -> None:
        """Logprobs must be of what was sampled from: where one token may be, its probability is 1.

        Or one of a whole number: those that tie with the likeliest may be, too.

        Raises:
            EngineError: they are of the model before its temperature.
        """
        body = self._body([0], Sampling(temperature=1.0, top_k=1), LOGPROB_TOKENS)
        # The first request of a server's life compiles what it needs.
        answer = self._control.ask(self._path, body, seconds=SEND_SECONDS)
        found = self._read_turn(answer, LOGPROB_TOKENS, self._stamp, f"{self.url}: a probe", {})
        ties = [math.exp(-logprob) for logprob in found.logprobs]
        if any(abs(n - round(n)) > 1e-4 * n for n in ties):
            raise EngineError(
                f"{self.url} says logprobs before the temperature. Start it with"
                " --logprobs-mode processed_logprobs"
            )

    # -- EngineControl -----------------------------------------------------------------------------

    def _replace_weights(self, update: Update) -> int:
        """See `RemoteEngine`. Weights are replaced once the turns in flight have ended.

        Where they were not taken it stays paused: nobody knows what they are.
        """
        self._manage("/pause?mode=wait", SEND_SECONDS)
        try:
            sent = self._send(update)
        except ConfigError:  # before anything was sent
            self._manage("/resume")
            raise
        weights = str(update.version)
        self._name_weights(weights)
        self._manage("/reset_prefix_cache")
        self._stamp = PolicyVersion(weights, update.version)
        self._manage("/resume")
        self._prove_fresh()
        return sent

    def _weights_now(self) -> str:
        """The version that it says its weights have."""
        if self._control.attempt("/weight_info", None)[0] != 200:
            return UNNAMED_VERSION
        return str(self._control.ask("/weight_info")["weight_version"])

    def _name_weights(self, version: str) -> None:
        """Have answers say which weights sampled their tokens, where the server can.

        Raises:
            EngineError: it does not.
        """
        path, body = "/update_weight_version", {"new_version": version}
        status, content = self._control.attempt(path, body)
        if status != 200 and status not in ABSENT:
            raise refusal(status, content.decode("utf-8", "replace"), f"{self.url}{path}")

    def _manage(self, path: str, seconds: float = CONTROL_SECONDS) -> None:
        self._control.manage(path, {}, seconds=seconds)


def _sampling_params(sampling: Sampling, limit: int) -> dict[str, Any]:
    return sampling_params(sampling) | {"max_tokens": limit, "logprobs": 0}


def read_generation(
    endpoint: Generate | Completions,
    answer: Any,
    limit: int,
    stamp: PolicyVersion,
    where: str,
    *,
    now: PolicyVersion,
    name: str | None,
) -> Generation:
    """A turn from an answer.

    Args:
        endpoint: the one that gave it.
        answer: parsed.
        limit: how many tokens were asked for.
        stamp: what was published when it was sent.
        where: for messages.
        now: what is published now.
        name: of the adapter that was asked for.

    Raises:
        EngineNonsense: the answer cannot be.
        EngineError: the request was aborted, or the weights changed meanwhile and it does not say
            which sampled which token.
    """
    with reading("vLLM", where):
        (choice,) = answer["choices"]
        if (reason := choice["finish_reason"]) in ("abort", "error"):
            raise EngineError(f"{where}: vLLM gave the turn up ({reason})")
        if name is not None and answer["model"] != name:
            raise ValueError(f"{answer['model']!r} answers for {name!r}")
        said, logprobs = endpoint.tokens(choice)
        ids, usage = token_array(said), answer["usage"]
        spans = choice.get("weight_versions")
        if spans is None and now.weights != stamp.weights:
            raise EngineError(
                f"{where}: the weights were {stamp.weights!r} when this turn began and"
                f" {now.weights!r} when it ended, and {endpoint.path} does not say which sampled"
                " which token"
            )
        check_turn(ids, reason, limit, usage["completion_tokens"])
        return Generation(
            token_ids=ids,
            logprobs=_finite(logprobs, len(ids)),
            versions=versions_of(spans, len(ids), stamp),
            finish_reason=reason,
            prompt_tokens=int(usage["prompt_tokens"]),
            cached_tokens=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        )


def read_scores(
    endpoint: Generate | Completions, answer: Any, row: Sequence[int], where: str
) -> array[float]:
    """Logprobs of a whole row, the first token's as 0.

    Raises:
        EngineNonsense: the answer cannot be, or is of another row.
    """
    with reading("vLLM", where):
        _, *rest = endpoint.prompt_logprobs(answer)
        found = [entry[str(token)]["logprob"] for entry, token in zip(rest, row[1:], strict=True)]
        return float_array([0.0, *_finite(found, len(row) - 1)])


def _finite(logprobs: Sequence[float], n: int) -> array[float]:
    found = float_array(logprobs)
    if len(found) != n:
        raise ValueError(f"{len(found)} logprobs of {n} tokens")
    if not all(math.isfinite(x) and x > NO_LOGPROB for x in found):
        raise ValueError("a logprob that is not finite")
    return found
