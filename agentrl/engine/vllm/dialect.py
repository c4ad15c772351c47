"""The two ways to ask a vLLM server for tokens: how each is asked, and what it answers.

`/inference/v1/generate` says which weights sampled each token; it is asked where a server has it.
`/v1/completions` is everywhere, and does not say. Both take ids and give ids. Nothing is guessed: a
field that is missing or cannot be is an error.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

from agentrl.engine.base import Sampling
from agentrl.engine.server.answers import Stamp
from agentrl.errors import EngineError, EngineNonsense
from agentrl.trajectory import Generation, float_array, token_array

NO_LOGPROB = -9999.0
"""What vLLM writes instead of NaN, of minus infinity, and of a logprob that it does not have."""


def sampling_params(sampling: Sampling, limit: int) -> dict[str, Any]:
    """All that decides what is sampled: what is left out comes from the model's own folder."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": limit,
        "stop_token_ids": list(sampling.stop_ids),
        "stop": list(sampling.stop),
        "logprobs": 0,
        "skip_special_tokens": False,
    }


class Dialect(Protocol):
    """One endpoint."""

    path: str

    def body(self, row: Sequence[int], params: dict[str, Any]) -> dict[str, Any]:
        """What to send, for a row and vLLM's sampling parameters."""
        ...

    def tokens(self, choice: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Ids and logprobs of an answer's only choice, as they stand there."""
        ...

    def prompt_logprobs(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """One for each token of the row, as they stand there."""
        ...


class Generate:
    """`/inference/v1/generate`."""

    path = "/inference/v1/generate"

    def body(self, row: Sequence[int], params: dict[str, Any]) -> dict[str, Any]:
        """See `Dialect`. Texts are made only where one may end the turn."""
        return {
            "token_ids": list(row),
            "sampling_params": params | {"detokenize": bool(params.get("stop"))},
        }

    def tokens(self, choice: dict[str, Any]) -> tuple[list[int], list[float]]:
        """See `Dialect`."""
        entries = choice["logprobs"]["content"]
        if [entry["token_id"] for entry in entries] != choice["token_ids"]:
            raise ValueError("logprobs of other tokens")
        return choice["token_ids"], [entry["logprob"] for entry in entries]

    def prompt_logprobs(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """See `Dialect`."""
        return answer["prompt_logprobs"]


class Completions:
    """`/v1/completions`."""

    path = "/v1/completions"

    def body(self, row: Sequence[int], params: dict[str, Any]) -> dict[str, Any]:
        """See `Dialect`."""
        return {"prompt": list(row), "return_token_ids": True, **params}

    def tokens(self, choice: dict[str, Any]) -> tuple[list[int], list[float]]:
        """See `Dialect`."""
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def prompt_logprobs(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """See `Dialect`."""
        return answer["choices"][0]["prompt_logprobs"]


def read_generation(
    dialect: Dialect,
    answer: Any,
    limit: int,
    stamp: Stamp,
    where: str,
    *,
    now: Stamp | None = None,
    name: str | None = None,
) -> Generation:
    """A turn from an answer.

    Args:
        dialect: of the endpoint that gave it.
        answer: parsed.
        limit: how many tokens were asked for.
        stamp: what was published when it was sent.
        where: for messages.
        now: what is published now, if that may be something else.
        name: of the adapter that was asked for.

    Raises:
        EngineNonsense: the answer cannot be.
        EngineError: the request was aborted, or the weights changed meanwhile and it does not say
            which sampled which token.
    """
    try:
        (choice,) = answer["choices"]
        if (reason := choice["finish_reason"]) in ("abort", "error"):
            raise EngineError(f"{where}: vLLM gave the turn up ({reason})")
        if reason not in ("stop", "length"):
            raise ValueError(f"finish reason {reason!r}")
        if name is not None and answer["model"] != name:
            raise ValueError(f"{answer['model']!r} answers for {name!r}")
        said, logprobs = dialect.tokens(choice)
        ids, usage = token_array(said), answer["usage"]
        spans = choice.get("weight_versions")
        if spans is None and now is not None and now.weights != stamp.weights:
            raise EngineError(
                f"{where}: the weights were {stamp.weights!r} when this turn began and"
                f" {now.weights!r} when it ended, and {dialect.path} does not say which sampled"
                " which token"
            )
        if not 0 < len(ids) <= limit or len(ids) != usage["completion_tokens"]:
            raise ValueError(
                f"{len(ids)} tokens of {limit} asked for, and it counts"
                f" {usage['completion_tokens']}"
            )
        return Generation(
            token_ids=ids,
            logprobs=_finite(logprobs, len(ids)),
            versions=_versions(spans, len(ids), stamp),
            finish_reason=reason,
            prompt_tokens=int(usage["prompt_tokens"]),
            cached_tokens=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        )
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as e:
        raise EngineNonsense(f"{where}: not vLLM's answer: {type(e).__name__}: {e}") from e


def read_scores(dialect: Dialect, answer: Any, row: Sequence[int], where: str) -> array[float]:
    """Logprobs of a whole row, the first token's as 0.

    Raises:
        EngineNonsense: the answer cannot be, or is of another row.
    """
    try:
        _, *rest = dialect.prompt_logprobs(answer)
        found = [entry[str(token)]["logprob"] for entry, token in zip(rest, row[1:], strict=True)]
        return float_array([0.0, *_finite(found, len(row) - 1)])
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as e:
        raise EngineNonsense(f"{where}: not vLLM's answer: {type(e).__name__}: {e}") from e


def _finite(logprobs: Sequence[float], n: int) -> array[float]:
    found = float_array(logprobs)
    if len(found) != n:
        raise ValueError(f"{len(found)} logprobs of {n} tokens")
    if not all(math.isfinite(x) and x > NO_LOGPROB for x in found):
        raise ValueError("a logprob that is not finite")
    return found


def _versions(spans: list[dict[str, Any]] | None, n: int, stamp: Stamp) -> array[int]:
    """The policy version of each of n tokens; without spans, the one of when it was sent."""
    versions = token_array()
    for span in spans or [{"version": stamp.weights, "start": 0, "end": n}]:
        if span["start"] != len(versions):
            raise ValueError(f"spans of versions with gaps: {spans}")
        version = span["version"]
        policy = stamp.policy if version == stamp.weights else int(version)
        versions.extend([policy] * (span["end"] - span["start"]))
    if len(versions) != n:
        raise ValueError(f"spans of versions for {len(versions)} of {n} tokens")
    return versions
