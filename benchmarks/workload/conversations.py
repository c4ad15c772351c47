"""The conversations of the benchmarks: fixed token streams, the same for every loop.

A conversation has some turns that call the calculator, each followed by a tool result, and a last
turn without a call. `narrow` uses 50 words, so a cache of words is warm at once; `wide` uses prose,
code and JSON from the standard library, each passage once.
"""

from __future__ import annotations

import ast
import itertools
import json
import pydoc_data.topics
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from agentrl.tools import tool
from agentrl.trajectory import Generation, Message, float_array, token_array
from workload.tokenizer import sources

SYSTEM = "You are a careful assistant. Use the tools when they help, then answer briefly"
"""Without a full stop: the template's text after it would be part of the same word, and would have
other tokens because contents are encoded separately from the template."""
TOOLS = ("calculator", "search", "python")
GENERATED, PROMPT = 50, 60
"""The number of words of a turn without its call, and of a question."""
SENTENCE = (
    "the value of this step depends on what was found before so we compute the next part carefully"
    " and then check that total cost price rate number of items per day remains consistent with"
    " question data result because each list has several entries"
)


@dataclass(frozen=True, slots=True)
class Talk:
    """One scripted conversation."""

    prompt: tuple[Message, ...]
    turns: tuple[Generation, ...]
    """Their `prompt_tokens` are 0, because the loop decides the prompt of a turn."""
    results: tuple[str, ...]
    calls: tuple[str, ...]
    """The expression of each turn's call."""


def narrow(tokenizer: Any, turns: int, tool_words: int, talks: int = 16) -> list[Talk]:
    """Return conversations of 50 words, always the same."""
    rng, vocabulary = random.Random(0), SENTENCE.split()

    def words(n: int) -> str:
        return " ".join(rng.choice(vocabulary) for _ in range(n))

    return [_talk(tokenizer, turns, tool_words, words, rng) for _ in range(talks)]


def wide(
    tokenizer: Any, turns: int, tool_words: int, talks: int, passages: Iterator[str]
) -> list[Talk]:
    """Return different conversations of real text.

    Args:
        tokenizer: the policy's tokenizer.
        turns: the number of turns with a call.
        tool_words: about the number of tokens of a tool result.
        talks: the number of conversations.
        passages: an iterator of `passages`, which continues in the next call.
    """

    def words(n: int) -> str:
        """Return a text with about as many tokens as `n` words of `narrow`."""
        text = next(passages)
        while len(offsets := tokenizer.backend_tokenizer.encode(text).offsets) <= n:
            text = f"{text}\n{next(passages)}"
        # With letters at both ends, a text has the same tokens alone and within a template.
        return re.sub(r"^[\W_]+|[\W_]+$", "", text[: offsets[n][0]]) or "nothing"

    return [_talk(tokenizer, turns, tool_words, words, random.Random(i)) for i in range(talks)]


def passages() -> Iterator[str]:
    """Yield prose, code and JSON in turn, without end; at the end of the library, start again."""
    while True:
        prose = itertools.cycle(_chunks("\n".join(pydoc_data.topics.topics.values())))
        for file in sources():
            source = file.read_text(encoding="utf-8", errors="replace")
            docs = itertools.cycle(_chunks(_as_json(file.name, source)))
            for code in _chunks(source):
                yield code
                yield next(prose)
                yield next(docs)


def _chunks(text: str) -> list[str]:
    return [text[i : i + 600] for i in range(0, len(text), 600)] or [""]


def _as_json(name: str, source: str) -> str:
    """Return a JSON text like the result of a search for functions."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # lib2to3 keeps sources of Python 2
        return "[]"
    functions = [
        {"file": name, "line": node.lineno, "name": node.name, "doc": ast.get_docstring(node)}
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    return json.dumps(functions, indent=1)


def _talk(
    tokenizer: Any,
    turns: int,
    tool_words: int,
    words: Callable[[int], str],
    rng: random.Random,
) -> Talk:
    question = words(PROMPT)
    generations, results, calls = [], [], []
    for _ in range(turns):
        calls.append(f"({rng.randint(1, 999)}+{rng.randint(1, 999)})*{rng.randint(1, 99)}")
        call = json.dumps({"name": "calculator", "arguments": {"expression": calls[-1]}})
        text = f"{words(GENERATED)}\n<tool_call>\n{call}\n</tool_call>"
        generations.append(_generation(tokenizer, text))
        results.append(words(tool_words))
    generations.append(_generation(tokenizer, f"{words(GENERATED)} So the answer is 42."))
    prompt = Message("system", SYSTEM), Message("user", question)
    return Talk(prompt, tuple(generations), tuple(results), tuple(calls))


def _generation(tokenizer: Any, text: str) -> Generation:
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    return Generation(
        token_array(ids), float_array([-0.5] * len(ids)), token_array([0] * len(ids)), "stop", 0
    )


def register_tools(answers: dict[str, str], *, threads: bool) -> None:
    """Register the tools of the conversations; the calculator returns a prepared text.

    Args:
        answers: the calculator's texts by expression; they may be added later.
        threads: whether the calculator is a plain function, which runs in a thread.
    """
    if threads:

        @tool
        def calculator(expression: str) -> str:
            """Evaluate an arithmetic expression and return its value.

            Args:
                expression: The expression, e.g. (12+3)*4
            """
            return answers[expression]

    else:

        @tool(name="calculator")
        async def calculator_(expression: str) -> str:
            """Evaluate an arithmetic expression and return its value.

            Args:
                expression: The expression, e.g. (12+3)*4
            """
            return answers[expression]

    @tool
    def search(query: str, k: int = 3) -> str:
        """Search a small corpus and return the passages nearest to the query.

        Args:
            query: What to look for
            k: How many passages
        """
        return query * k

    @tool
    def python(code: str) -> str:
        """Run a short Python program in a sandbox and return what it prints.

        Args:
            code: The program text
        """
        return code
