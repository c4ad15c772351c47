"""One decode step: turns join, every row gets a token, some turns are over."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from agentrl.engine.local.decoder import Decoder
from agentrl.engine.local.sampling import sample, uniforms
from agentrl.engine.local.schedule import DecodeSchedule, EpisodeState, TurnRequest
from agentrl.errors import EngineError
from agentrl.trajectory import Generation

PACK_BELOW = 0.75
"""Rows that have finished decode along, idly, until fewer than this share of them is alive."""

Outcome = tuple[EpisodeState, TurnRequest, Generation | EngineError]


class Stepper:
    """Moves the decoder as the schedule says."""

    def __init__(self, decoder: Decoder, schedule: DecodeSchedule, stop_texts: StopStrings):
        """Share the engine's parts."""
        self._decoder = decoder
        self._schedule = schedule
        self._stop_texts = stop_texts

    def step(self, joined: list[tuple[EpisodeState, TurnRequest]], version: int) -> list[Outcome]:
        """Let turns join, then sample one token for each turn that is decoding.

        What goes wrong with one turn's request ends that turn alone.

        Args:
            joined: whom the schedule has just admitted.
            version: of the weights.

        Returns:
            The turns that are over. The schedule does not know yet.
        """
        decoder, schedule = self._decoder, self._schedule
        outcomes: list[Outcome] = []
        if joined or len(schedule.decoding) < PACK_BELOW * schedule.width:
            outcomes += self._rearrange(joined)
        rows, n = decoder.rows, schedule.width
        decoder.grow(n, int(rows.length[:n].max()) + 1)
        decoder.prefill(n)
        tokens, logprobs = sample(
            decoder.decode(n),
            rows.temperature[:n],
            rows.top_k[:n],
            rows.top_p[:n],
            uniforms(rows.seed[:n], rows.length[:n]),
        )
        live = np.flatnonzero(rows.alive[:n])
        rows.append(live, tokens[live], logprobs[live], version)
        stopped = (rows.stop_ids[live] == tokens[live, None]).any(1)
        for i in np.flatnonzero(rows.has_stop_text[live] & ~stopped).tolist():
            entry, turn = schedule.turn_in_row(int(live[i]))
            try:
                stopped[i] = self._stop_texts.ends(rows.sampled(live[i]), turn.sampling.stop)
            except Exception as e:
                rows.alive[entry.row] = False
                outcomes.append((entry, turn, _refusal(entry, e)))
        over = stopped | (rows.length[live] >= rows.limit[live])
        over &= rows.alive[live]
        broken = np.isnan(logprobs[live]) & rows.alive[live]
        for i in np.flatnonzero(over | broken).tolist():
            entry, turn = schedule.turn_in_row(int(live[i]))
            rows.alive[entry.row] = False
            if broken[i]:
                decoder.wipe(entry.row)
                error = EngineError(f"episode {entry.id!r}: the model's logits are NaN")
                outcomes.append((entry, turn, error))
            else:
                reason = "stop" if stopped[i] else "length"
                outcomes.append((entry, turn, rows.generation(entry.row, reason)))
        return outcomes

    def forget(self, entry: EpisodeState) -> None:
        """Sample no more for an entry whose turn was given up."""
        if entry.decoding:
            self._decoder.rows.alive[entry.row] = False

    def _rearrange(self, joined: list[tuple[EpisodeState, TurnRequest]]) -> list[Outcome]:
        """Bring the decoding rows to the front and put the joining turns into theirs.

        Returns:
            The turns that cannot be put there.
        """
        decoder, schedule = self._decoder, self._schedule
        reach = max(e.row for e in schedule.decoding) + 1
        decoder.grow(reach, max((len(t.prompt) + 1 for _, t in joined), default=0))
        for row, entry in enumerate(schedule.rows[:reach]):
            if entry is None or entry.fresh:  # what an episode before left there
                decoder.rows.cached[row] = 0
        decoder.swap(*schedule.pack())
        refused: list[Outcome] = []
        for entry, turn in joined:
            entry.fresh = False
            try:
                decoder.rows.begin_turn(
                    entry.row, turn.prompt, turn.sampling, turn.seed, decoder.max_length
                )
            except Exception as e:
                decoder.wipe(entry.row)
                refused.append((entry, turn, _refusal(entry, e)))
        return refused


def _refusal(entry: EpisodeState, error: Exception) -> EngineError:
    refusal = EngineError(
        f"episode {entry.id!r}: cannot serve its request: {type(error).__name__}: {error}"
    )
    refusal.__cause__ = error
    return refusal


class StopStrings:
    """Decodes a turn's tail where its last token may complete a stop string.

    A stop string is completed by a token whose own text holds the string's last character, so most
    tokens need no look at the text at all. What each token's text is, is learnt as tokens come.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def ends(self, sampled: np.ndarray, stop: tuple[str, ...]) -> bool:
        """Whether the last of a turn's sampled tokens completes one of `stop`."""
        last = self._text(int(sampled[-1]))
        # U+FFFD: the token may complete a character. White space: some decoders trim a lone token.
        if "\ufffd" not in last and not any(s[-1] in last or s[-1].isspace() for s in stop):
            return False
        # Every token but a few control tokens stands for a byte at least.
        reach = max(len(s.encode()) for s in stop) + 8
        text = self._decode(sampled[-reach:].tolist())
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
