"""Encode token rows as JSON. Of a long row that grew since the last turn, encode the new tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import orjson

JsonIds = np.ndarray | orjson.Fragment
"""Token ids that orjson, with `OPT_SERIALIZE_NUMPY`, writes as a list of integers."""

MIN_TOKENS = 8192
"""A shorter row is encoded as a whole: that takes at most 50 microseconds."""
MAX_TOKENS = 1 << 24
"""The most tokens that one encoder (one for each engine) keeps: about 200 MB. It drops the least
recently used rows."""


def as_json_array(ids: Sequence[int]) -> np.ndarray:
    """Return ids as an array, (n,) int32, which orjson writes six times as fast as a list."""
    return np.asarray(ids, np.int32)


@dataclass(slots=True)
class _EncodedRow:
    ids: np.ndarray
    """The row, (n,) int32."""
    json: bytearray
    """Its JSON without the closing bracket."""


class RowEncoder:
    """Encodes the rows of episodes, which only grow.

    A full encoding of 131,072 tokens would block the event loop of all episodes for 0.8 ms.

    Args:
        min_tokens: shorter rows are not kept.
        max_tokens: the most tokens of all rows that are kept.
    """

    def __init__(self, min_tokens: int = MIN_TOKENS, max_tokens: int = MAX_TOKENS):
        self._min_tokens, self._max_tokens = min_tokens, max_tokens
        self._rows: dict[str, _EncodedRow] = {}
        """By episode, the least recently used first."""
        self._tokens = 0

    def encode(self, episode_id: str, row: Sequence[int]) -> JsonIds:
        """Return the ids of a row, as a value that orjson writes as a list.

        Args:
            episode_id: the episode. If the row begins with the last row of this episode, only the
                tokens after it are encoded.
            row: token ids.
        """
        if len(row) < self._min_tokens:
            return as_json_array(row)
        ids, last = np.array(row, np.int32), self._pop(episode_id)
        if last is not None and np.array_equal(ids[: len(last.ids)], last.ids):
            json, new = last.json, ids[len(last.ids) :]
        else:
            json, new = bytearray(b"["), ids
        if len(new):
            json += b"," if len(json) > 1 else b""
            json += memoryview(orjson.dumps(new, option=orjson.OPT_SERIALIZE_NUMPY))[1:-1]
        self._rows[episode_id] = _EncodedRow(ids, json)
        self._tokens += len(ids)
        while self._tokens > self._max_tokens:
            self._pop(next(iter(self._rows)))
        return orjson.Fragment(bytes(json) + b"]")

    def end(self, episode_id: str) -> None:
        """Drop the row of an episode."""
        self._pop(episode_id)

    def _pop(self, episode_id: str) -> _EncodedRow | None:
        row = self._rows.pop(episode_id, None)
        if row is not None:
            self._tokens -= len(row.ids)
        return row
