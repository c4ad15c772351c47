"""Texts that end a turn: looked for only after tokens that could complete one."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase


class StopTexts:
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
