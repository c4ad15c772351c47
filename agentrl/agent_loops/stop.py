"""Turns that end with a text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from agentrl.chat import ChatTemplate
from agentrl.trajectory import Generation


def cut_at_stop(
    generation: Generation, template: ChatTemplate, stop: Sequence[str]
) -> tuple[Generation, str]:
    """A turn up to the token that completes a stop text, and its text up to the end of that.

    An engine looks for stop texts every so often, and one token may hold the end of a stop text and
    more. Whatever the policy went on to say (in ReAct, an observation it made up) is not part of
    the turn: it is neither read nor trained on.
    """
    text = template.decode_turn(generation.token_ids)
    ends = [at + len(s) for s in stop if (at := text.find(s)) >= 0]
    if not ends:
        return generation, text
    end = min(ends)
    found = text[:end]
    ids = generation.token_ids
    n = 1 + bisect_left(range(1, len(ids)), True, key=lambda k: found in template.decode(ids[:k]))
    cut = replace(
        generation,
        token_ids=ids[:n],
        logprobs=generation.logprobs[:n],
        versions=generation.versions[:n],
        finish_reason="stop",
    )
    return cut, found
