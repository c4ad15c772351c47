"""What an SGLang server answers, as ours; or why it is no answer.

Ids and logprobs are read from `output_token_logprobs`, never from the text. Nothing is guessed: a
field that is missing or cannot be is an error.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

from agentrl.engine.server.answers import Stamp, refusal
from agentrl.errors import EngineError, EngineNonsense
from agentrl.trajectory import Generation, float_array, token_array

ROUNDED = 1e-2
"""Above 0 by rounding; more is no logprob."""


def read_generation(answer: Any, limit: int, stamp: Stamp, where: str) -> Generation:
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
    try:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]["type"]
        if reason == "abort":
            status = meta["finish_reason"].get("status_code") or 500
            raise refusal(int(status), meta["finish_reason"].get("message", "aborted"), where)
        if reason not in ("stop", "length"):
            raise ValueError(f"finish reason {reason!r}")
        ids, logprobs = _tokens(meta["output_token_logprobs"])
        if not 0 < len(ids) <= limit or len(ids) != meta["completion_tokens"]:
            raise ValueError(
                f"{len(ids)} tokens of {limit} asked for, and it counts {meta['completion_tokens']}"
            )
        return Generation(
            token_ids=ids,
            logprobs=logprobs,
            versions=_versions(meta, len(ids), stamp, where),
            finish_reason=reason,
            prompt_tokens=int(meta["prompt_tokens"]),
            cached_tokens=int(meta["cached_tokens"]),
        )
    except (LookupError, TypeError, ValueError, OverflowError) as e:
        raise EngineNonsense(f"{where}: not SGLang's answer: {type(e).__name__}: {e}") from e


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
    try:
        (_, first, *_), *rest = answer["meta_info"]["input_token_logprobs"]
        ids, logprobs = _tokens(rest)
        repeated = [token if token < vocabulary - 1 else 0 for token in row]
        if [first, *ids] not in (repeated, list(row)):
            raise ValueError("logprobs of another row")
    except (LookupError, TypeError, ValueError, OverflowError) as e:
        raise EngineNonsense(f"{where}: not SGLang's answer: {type(e).__name__}: {e}") from e
    return float_array([0.0, *logprobs])


def _tokens(entries: Sequence[Sequence[Any]]) -> tuple[array[int], array[float]]:
    """Ids and logprobs of `[logprob, id, text]`."""
    logprobs = float_array([entry[0] for entry in entries])
    if not all(-math.inf < logprob < ROUNDED for logprob in logprobs):
        raise ValueError("a logprob that is not finite, or of more than certainty")
    return token_array([entry[1] for entry in entries]), logprobs


def _versions(meta: dict[str, Any], n: int, stamp: Stamp, where: str) -> array[int]:
    """The policy version of each of n tokens."""

    def policy(weights: Any) -> int:
        return stamp.policy if str(weights) == stamp.weights else int(weights)

    if spans := meta.get("weight_versions"):
        versions = token_array()
        for span in spans:
            if span["start"] != len(versions):
                raise ValueError(f"spans of versions with gaps: {spans}")
            versions.extend([policy(span["version"])] * (span["end"] - span["start"]))
        if len(versions) != n:
            raise ValueError(f"spans of versions for {len(versions)} of {n} tokens")
        return versions
    now = meta["weight_version"]
    if not isinstance(now, str):
        raise TypeError(f"weight_version {now!r}")
    if now != stamp.weights:
        raise EngineError(
            f"{where}: the weights were {stamp.weights!r} when this turn began and {now!r} when it"
            " ended, and this SGLang does not say which sampled which token"
        )
    return token_array([stamp.policy] * n)
