"""A minimal loop with the same rows: a lower bound of the cost of an agent loop.

It has Qwen3's template as constants, checks nothing, and runs no tool. `cached` caches the prefix
of the prompt and the ids of each word of the pre-tokenizer (this is exact here; in general only for
texts in NFC whose added tokens are split off first).
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import regex

from agentrl.trajectory import Message, float_array, token_array
from workload.conversations import Talk
from workload.tokenizer import PIECES

BEFORE = "\n<|im_start|>user\n<tool_response>\n"
AFTER = "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
MARK = "\u2603"
ONE, ZERO, NOTHING = token_array([1]), token_array([0]), float_array([0.0])
"""Repeating an array is ten times faster than making one from a list."""


class Row(NamedTuple):
    """The row of one conversation."""

    ids: array[int]
    """The ids of prompt and response."""
    prompt: int
    """The number of ids of the prompt."""
    mask: array[int]
    logprobs: array[float]


class Floor:
    """Plays scripted conversations by hand.

    Args:
        tokenizer: a tokenizer with Qwen3's template.
        schemas: the schemas of the tools in the prompt.
        engine_s: the seconds of a generation.
    """

    def __init__(self, tokenizer: Any, schemas: Sequence[dict[str, Any]], engine_s: float):
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._schemas = list(schemas)
        self._engine_s = engine_s
        self._open = tokenizer.convert_tokens_to_ids("<tool_call>")
        self._shut = tokenizer.convert_tokens_to_ids("</tool_call>")
        self._pieces = regex.compile(PIECES)
        self._added = tokenizer.get_added_vocab()
        self._split = regex.compile("(" + "|".join(map(regex.escape, self._added)) + ")")
        self._known: dict[str, tuple[int, ...]] = {}
        self._prefixes: dict[str, tuple[array[int], array[int]]] = {}
        self._before, self._after = self.encode(BEFORE), self.encode(AFTER)

    def encode(self, text: str) -> array[int]:
        """Encode text, with its control tokens, by the tokenizer itself."""
        return token_array(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_cached(self, text: str) -> array[int]:
        """Encode text word by word, with a cache."""
        ids = token_array()
        for part in self._split.split(text) if "<" in text else (text,):
            if (control := self._added.get(part)) is not None:
                ids.append(control)
                continue
            for piece in self._pieces.findall(part):
                known = self._known.get(piece)
                if known is None:
                    known = self._known[piece] = tuple(self.encode(piece))
                ids.extend(known)
        return ids

    def prompt(self, messages: Sequence[Message]) -> array[int]:
        """Return the tokens of a prompt, rendered as a whole."""
        return self.encode(self._render(messages))

    def prompt_cached(self, messages: Sequence[Message]) -> array[int]:
        """Return the tokens of a prompt, from a prefix that is rendered once per system message."""
        system, user = messages
        known = self._prefixes.get(system.content)
        if known is None:
            before, after = self._render([system, Message("user", MARK)]).split(MARK)
            known = self._prefixes[system.content] = self.encode(before), self.encode(after)
        before, after = known
        return before + self.encode_cached(user.content) + after

    async def plain(self, talk: Talk) -> Row:
        """Play a conversation without caches."""
        prompt = self.prompt(talk.prompt)
        return await self._play(talk, prompt, lambda text: self.encode(BEFORE + text + AFTER))

    async def cached(self, talk: Talk) -> Row:
        """Play a conversation with all caches."""

        def delta(text: str) -> array[int]:
            return self._before + self.encode_cached(text) + self._after

        return await self._play(talk, self.prompt_cached(talk.prompt), delta)

    async def _play(self, talk: Talk, ids: array[int], delta: Callable[[str], array[int]]) -> Row:
        prompt, mask, logprobs = len(ids), token_array(), float_array()
        for turn, result in zip(talk.turns, (*talk.results, ""), strict=True):
            if not await self._turn(turn, ids, mask, logprobs):
                break
            await asyncio.sleep(0)
            self._observe(delta(result), ids, mask, logprobs)
        return Row(ids, prompt, mask, logprobs)

    async def _turn(
        self, turn: Any, ids: array[int], mask: array[int], logprobs: array[float]
    ) -> bool:
        """Play one turn, and return whether it calls a tool."""
        await asyncio.sleep(self._engine_s)
        out = turn.token_ids
        ids.extend(out)
        mask.extend(ONE * len(out))
        logprobs.extend(turn.logprobs)
        try:
            begin = out.index(self._open)
            end = out.index(self._shut, begin)
        except ValueError:
            return False
        json.loads(self._backend.decode(list(out[begin + 1 : end])))
        return True

    @staticmethod
    def _observe(
        delta: array[int], ids: array[int], mask: array[int], logprobs: array[float]
    ) -> None:
        ids.extend(delta)
        mask.extend(ZERO * len(delta))
        logprobs.extend(NOTHING * len(delta))

    def _render(self, messages: Sequence[Message]) -> str:
        return self._tokenizer.apply_chat_template(
            [m.as_dict() for m in messages],
            tools=self._schemas,
            add_generation_prompt=True,
            tokenize=False,
        )
