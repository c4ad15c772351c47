"""One decode step: turns join, every row samples a token, and some turns finish."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from agentrl.engine.local.decoder import Decoder
from agentrl.engine.local.sampling import sample, uniforms
from agentrl.engine.local.schedule import DecodeSchedule, EpisodeState, TurnRequest
from agentrl.errors import EngineError
from agentrl.trajectory import Generation

PACK_BELOW = 0.75
"""Rows are packed when the share of alive rows falls below this. Until then, finished rows idle."""

TurnOutcome = tuple[EpisodeState, TurnRequest, Generation | EngineError]


class Stepper:
    """Runs the decoder according to the schedule."""

    def __init__(self, decoder: Decoder, schedule: DecodeSchedule, stop_texts: StopStrings):
        """Store the parts of the engine, which the engine uses too."""
        self._decoder = decoder
        self._schedule = schedule
        self._stop_texts = stop_texts

    def step(
        self, joined: list[tuple[EpisodeState, TurnRequest]], version: int
    ) -> list[TurnOutcome]:
        """Add the turns that join, then sample one token for each turn that is decoding.

        An error in the request of one turn ends only that turn.

        Args:
            joined: the turns that the schedule has just admitted.
            version: the version of the weights.

        Returns:
            The turns that have finished. The caller must report them to the schedule.
        """
        decoder, schedule = self._decoder, self._schedule
        outcomes: list[TurnOutcome] = []
        if joined or len(schedule.decoding) < PACK_BELOW * schedule.width:
            outcomes += self._rearrange(joined)
        rows, n = decoder.rows, schedule.width
        decoder.grow(n, int(rows.length[:n].max()) + 1)
        decoder.prefill(n)
        returns_kept = rows.returns_kept[:n]
        tokens, logprobs, kept = sample(
            decoder.decode(n),
            rows.temperature[:n],
            rows.top_k[:n],
            rows.top_p[:n],
            uniforms(rows.seed[:n], rows.length[:n]),
            returns_kept if returns_kept.any() else None,
        )
        is_nan = np.isnan(logprobs)
        for row in np.flatnonzero(is_nan & ~rows.alive[:n]).tolist():
            decoder.clear(row)  # The next episode in this row would read it: 0 * NaN is NaN.
        # The next token of these rows is known: `decode` fed one of the tokens before the last.
        catches_up = rows.cached[:n] < rows.length[:n] - 1
        rows.cached[:n] += catches_up
        rows.prefilled[:n] += catches_up
        live = np.flatnonzero(rows.alive[:n] & ~catches_up)
        rows.append(
            live, tokens[live], logprobs[live], version, None if kept is None else kept[live]
        )
        stopped = (rows.stop_ids[live] == tokens[live, None]).any(1)
        for i in np.flatnonzero(rows.has_stop_text[live] & ~stopped).tolist():
            entry, turn = schedule.turn_in_row(int(live[i]))
            try:
                stopped[i] = self._stop_texts.ends(rows.turn_tokens(live[i]), turn.sampling.stop)
            except Exception as e:
                rows.alive[entry.row] = False
                outcomes.append((entry, turn, _refusal(entry, e)))
        finished = stopped | (rows.length[live] >= rows.limit[live])
        finished &= rows.alive[live]
        broken = is_nan[live] & rows.alive[live]
        for i in np.flatnonzero(finished | broken).tolist():
            entry, turn = schedule.turn_in_row(int(live[i]))
            rows.alive[entry.row] = False
            if broken[i]:
                decoder.clear(entry.row)
                error = EngineError(f"episode {entry.id!r}: the model's logits are NaN")
                outcomes.append((entry, turn, error))
            else:
                reason = "stop" if stopped[i] else "length"
                outcomes.append((entry, turn, rows.generation(entry.row, reason)))
        return outcomes

    def drop(self, entry: EpisodeState) -> None:
        """Sample no more tokens for an episode whose turn was given up."""
        if entry.decoding:
            self._decoder.rows.alive[entry.row] = False

    def _rearrange(self, joined: list[tuple[EpisodeState, TurnRequest]]) -> list[TurnOutcome]:
        """Move the decoding rows to the front, and write the joining turns into their rows.

        Returns:
            The turns that could not be written.
        """
        decoder, schedule = self._decoder, self._schedule
        reach = max(e.row for e in schedule.decoding) + 1
        decoder.grow(reach, max((len(t.prompt) + 1 for _, t in joined), default=0))
        for row, entry in enumerate(schedule.rows[:reach]):
            if entry is None or entry.fresh:  # It may contain the tokens of an earlier episode.
                decoder.rows.cached[row] = 0
        decoder.swap(*schedule.pack())
        refused: list[TurnOutcome] = []
        for entry, turn in joined:
            entry.fresh = False
            try:
                decoder.rows.begin_turn(
                    entry.row,
                    turn.prompt,
                    turn.sampling,
                    turn.seed,
                    decoder.max_length,
                    decoder.image_part(turn.prompt, turn.images),
                )
            except Exception as e:
                decoder.clear(entry.row)
                refused.append((entry, turn, _refusal(entry, e)))
        return refused


def _refusal(entry: EpisodeState, error: Exception) -> EngineError:
    refusal = EngineError(
        f"episode {entry.id!r}: cannot serve its request: {type(error).__name__}: {error}"
    )
    refusal.__cause__ = error
    return refusal


class StopStrings:
    """Decodes the end of a turn if its last token may complete a stop string.

    A stop string is completed by a token whose own text contains the last character of the string,
    so most tokens need no decoding. The texts of tokens are cached.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def ends(self, turn_tokens: np.ndarray, stop: tuple[str, ...]) -> bool:
        """Return whether the last of a turn's sampled tokens completes one of `stop`."""
        last = self._text(int(turn_tokens[-1]))
        # U+FFFD: the token may complete a character. White space: some decoders trim single tokens.
        if "\ufffd" not in last and not any(s[-1] in last or s[-1].isspace() for s in stop):
            return False
        # Every token except a few control tokens stands for at least one byte.
        reach = max(len(s.encode()) for s in stop) + 8
        text = self._decode(turn_tokens[-reach:].tolist())
        return any(s in text for s in stop)

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._decode([token])
        return self._texts[token]

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text
