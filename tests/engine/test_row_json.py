"""The JSON of rows that grow turn by turn is that of the whole row."""

import json
from array import array

import numpy as np
import orjson
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.remote.row_json import MIN_TOKENS, RowEncoder

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6)


def text_of(ids):
    return orjson.dumps({"ids": ids, "n": 1}, option=orjson.OPT_SERIALIZE_NUMPY)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), IDS, st.booleans()), max_size=30),
    st.integers(0, 40),
)
def test_any_order_of_rows_gives_what_json_gives(steps, max_tokens):
    """Rows that continue the last one, other rows, rows of several episodes, few kept rows."""
    encoder, rows = RowEncoder(min_tokens=2, max_tokens=max_tokens), {}
    for episode_id, continues, new, ends in steps:
        row = array("i", [*(rows.get(episode_id, []) if continues else []), *new])
        rows[episode_id] = row
        assert json.loads(text_of(encoder.encode(episode_id, row))) == {"ids": [*row], "n": 1}
        row.append(7)  # The caller may change its row afterwards.
        assert encoder._tokens == sum(len(r.ids) for r in encoder._rows.values()) <= max_tokens
        if ends:
            encoder.end(episode_id)
            assert episode_id not in encoder._rows


def test_the_bytes_are_those_of_a_list():
    encoder, row = RowEncoder(), array("i", range(MIN_TOKENS))
    for _ in range(3):
        row += array("i", [5, 60, 700])
        assert text_of(encoder.encode("e", row)) == text_of([*row])
    assert text_of(encoder.encode("e", row)) == text_of([*row])  # No new token.
    assert text_of(encoder.encode("e", row[:-4])) == text_of([*row[:-4]])  # A shorter row.


def test_only_new_tokens_are_encoded(monkeypatch):
    encoder, row, sizes = RowEncoder(min_tokens=1), array("i", range(1000)), []
    dumps = orjson.dumps
    monkeypatch.setattr(
        "agentrl.engine.remote.row_json.orjson.dumps",
        lambda ids, option: sizes.append(len(ids)) or dumps(ids, option=option),
    )
    for _ in range(3):
        encoder.encode("e", row)
        row = row + array("i", [1, 2])
    assert sizes == [1000, 2, 2]


def test_short_rows_are_not_kept():
    encoder = RowEncoder()
    ids = encoder.encode("e", array("i", [1, 2, 3]))
    assert isinstance(ids, np.ndarray) and not encoder._rows
