r"""Searches passages of a local file by their words (BM25).

The environment variable AGENTRL_SEARCH_CORPUS names the file, or your own file calls `use_corpus`.
A dataset row cannot name it.

    from agentrl.registry import load_file

    load_file("shelf:search").use_corpus("data/passages.jsonl")

Each line of the file is a passage: `{"id": "7", "title": "Bees", "text": "Bees are ..."}`. The
title is optional. Rows list the tools `search` and `read_passage`. The first search of a process
builds the index in memory. Results are deterministic.

    $ AGENTRL_SEARCH_CORPUS=examples/passages/corpus.jsonl \
        agentrl tools call search '{"query": "silent clock", "k": 1}' --file shelf:search
    [p2] The silent clock
    The silent clock was made by Wim Lornstead in 1835. It was shown at fairs and copied soon.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import Field

from agentrl import Infrastructure, ToolError, tool
from agentrl.errors import DataError, UserError
from agentrl.installation import install_command
from agentrl.registry import did_you_mean

# bm25s imports JAX if it is installed, which would reserve three quarters of the GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
try:
    import bm25s
except ImportError:
    raise UserError(f"shelf:search needs bm25s: {install_command('search')}") from None

CORPUS = "AGENTRL_SEARCH_CORPUS"
MAX_RESULTS = 10
MAX_QUERY = 500
SNIPPET = 400
"""How many characters of a passage a search shows. `read_passage` shows the whole passage."""
WORD = r"(?u)\b\w+\b"


@dataclass(frozen=True, slots=True)
class Passage:
    """One line of the corpus."""

    id: str
    title: str
    text: str


class Index:
    """The passages of a file and their BM25 index."""

    def __init__(self, file: Path):
        """Read and index a file.

        Raises:
            DataError: the file cannot be read, or a line is not a passage.
        """
        self.passages = list(read_passages(file))
        self.by_id = {p.id: p for p in self.passages}
        self._bm25 = bm25s.BM25()
        self._bm25.index(
            _tokenize([f"{p.title}\n{p.text}" for p in self.passages]), show_progress=False
        )

    def best(self, query: str, k: int) -> list[Passage]:
        """Return the k best passages, best first. Ties keep the order of the file."""
        words = [w for w in _tokenize([query])[0] if w in self._bm25.vocab_dict]
        if not words:
            return []
        scores = self._bm25.get_scores(words)
        ranked = (-scores).argsort(kind="stable")[:k]
        return [self.passages[i] for i in ranked if scores[i] > 0]


_lock = threading.Lock()
_file: Path | None = None
_index: Index | None = None


def use_corpus(file: str | Path) -> None:
    """Search this file from now on, in this process.

    Raises:
        UserError: the file does not exist, or its first line is not a passage.
    """
    global _file, _index
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise UserError(f"no corpus at {file} (looked at {path}): give a .jsonl file of passages")
    next(read_passages(path))
    with _lock:
        _file, _index = path, None


def read_passages(file: Path) -> Iterator[Passage]:
    """Yield the passages of a file in order.

    Raises:
        DataError: the file cannot be read, or a line is not a passage. The message names the line.
    """
    ids = set()
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    passage = _passage(line, f"{file}:{number}")
                    if passage.id in ids:
                        raise DataError(f"{file}:{number}: the id {passage.id!r} comes twice")
                    ids.add(passage.id)
                    yield passage
    except OSError as e:
        raise DataError(f"{file}: {e.strerror}") from e
    if not ids:
        raise DataError(f"{file}: holds no passages")


def _passage(line: bytes, where: str) -> Passage:
    try:
        row: Any = orjson.loads(line)
        return Passage(str(row["id"]), str(row.get("title") or ""), _text(row["text"]))
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError):
        example = '{"id": "7", "title": "Bees", "text": "Bees are ..."}'
        raise DataError(f"{where}: {line[:80]!r} is no passage, such as {example}") from None


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value


@tool(timeout=300, idempotent=True)  # the first call builds the index, and others wait for it
def search(query: str, k: Annotated[int, Field(ge=1, le=MAX_RESULTS)] = 3) -> str:
    """Search for passages that contain the words of a query.

    Args:
        query: the words to search for, for example "bees winter food"
        k: the number of passages to return
    """
    if len(query) > MAX_QUERY:
        raise ToolError(f"the query has {len(query)} characters, maximum {MAX_QUERY}")
    ranked = _open_index().best(query, k)
    return "\n\n".join(_format(p, SNIPPET) for p in ranked) or "No passages found. Try other words."


@tool(timeout=300, idempotent=True)
def read_passage(id: str) -> str:
    """Read the full text of a passage.

    Args:
        id: the id that a search result shows in brackets, for example "7"
    """
    index = _open_index()
    passage = index.by_id.get(id.strip().strip("[]"))
    if passage is None:
        # Comparing with all ids would take too long, and few of them would help.
        close = did_you_mean(id, [i for i in index.by_id if i[:1] == id[:1]][:1000])
        raise ToolError(f"no passage with id {id!r}.{close} Search results show ids in brackets.")
    return _format(passage, len(passage.text))


def _open_index() -> Index:
    """Return the index of the corpus; the first call builds it."""
    global _index
    with _lock:
        if _index is None:
            if _file is None:
                raise Infrastructure(
                    f"shelf:search has no corpus: set {CORPUS} to a .jsonl file of passages before"
                    " the run or the tool server starts, or call its use_corpus(FILE)"
                )
            try:
                _index = Index(_file)
            except DataError as e:
                raise Infrastructure(str(e)) from e  # not the model's mistake
        return _index


def _tokenize(texts: list[str]) -> Any:
    return bm25s.tokenize(
        texts, token_pattern=WORD, return_ids=False, stopwords="en", show_progress=False
    )


def _format(passage: Passage, length: int) -> str:
    text = passage.text
    if len(text) > length:
        text = f"{text[:length].rsplit(None, 1)[0]} ..."
    return f"[{passage.id}] {passage.title}\n{text}" if passage.title else f"[{passage.id}] {text}"


if os.environ.get(CORPUS):
    use_corpus(os.environ[CORPUS])
