"""Measure the cost of encoding one tool result, depending on the length of the history.

    python benchmarks/tokens.py

First the template's delta (close of the turn, the result, the next header, with untrusted text),
compared with the tokenizer on the same text written by hand; both must return the same ids. Then
the encoder alone, per token, on text that it has seen and on new text. Then the prompts of a step:
new rows with two tools, each for a group of eight rollouts. Microseconds are CPU time: medians of
rounds in which the contestants alternate.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence

from workload import timing
from workload.conversations import Talk, narrow, passages, wide
from workload.floor import AFTER, BEFORE, Floor
from workload.timing import arguments
from workload.tokenizer import workload_tokenizer

from agentrl.chat import ChatTemplate
from agentrl.trajectory import Message

ROUNDS, CALLS = 7, 200
GROUP = 8
TURNS = (12, 52, 201, 807)
"""The numbers of tool turns in a history of 2k, 9k, 34k and 137k tokens."""
Encode = Callable[[str], Sequence[int]]


def history_of(talk: Talk, template: ChatTemplate, turns: int) -> tuple[int, list[Message]]:
    """Return a conversation up to a turn with a call: its length in tokens, and its messages."""
    messages, tokens = list(talk.prompt), 0
    for turn, result in itertools.islice(zip(talk.turns, talk.results, strict=False), turns):
        text = template.decode_turn(turn.token_ids)
        messages += Message("assistant", text), Message("tool", result)
        tokens += len(turn.token_ids) + len(template.encode(result))
    return tokens, messages[:-1]


def medians(
    contestants: dict[str, Encode],
    texts: Iterator[str],
    calls: int,
    per: Callable[[str], int] = lambda text: 1,
) -> dict[str, float]:
    """Return CPU microseconds per call or per unit of `per`, on the same texts for all."""
    took: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(ROUNDS):
        taken = list(itertools.islice(texts, calls))
        count = statistics.mean(map(per, taken))
        for name, encode in contestants.items():
            took[name].append(timing.cpu_us(encode, taken) / count)
    return {name: statistics.median(values) for name, values in took.items()}


def measure_deltas(template: ChatTemplate, floor: Floor) -> None:
    [talk] = narrow(template.tokenizer, max(TURNS), 90, talks=1)
    [longer] = narrow(template.tokenizer, 16, 390, talks=1)
    last = talk.turns[0].token_ids[-1]
    histories = dict(history_of(talk, template, turns) for turns in TURNS)

    def by_hand(text: str) -> Sequence[int]:
        return floor.encode(BEFORE + text + AFTER)

    for words, results in ((90, talk.results), (390, longer.results)):
        contestants: dict[str, Encode] = {"floor": by_hand}
        for tokens, history in histories.items():

            def delta(text: str, history: list[Message] = history) -> Sequence[int]:
                return template.delta(history, [Message("tool", text)], last)

            assert all(delta(r) == by_hand(r) for r in results[:16])
            contestants[f"agentrl_{tokens}"] = delta
        figures = medians(contestants, itertools.cycle(results), CALLS)
        context = {"result_words": words}
        for name, value in figures.items():
            timing.print_figure(f"tokens/delta/{name}", value, "us", **context)
        short, *_, long = (figures[f"agentrl_{tokens}"] for tokens in histories)
        timing.print_figure("tokens/delta/of_floor", short / figures["floor"], "ratio", **context)
        timing.print_figure("tokens/delta/long_of_short", long / short, "ratio", **context)


def measure_encoder(template: ChatTemplate, floor: Floor) -> None:
    contestants: dict[str, Encode] = {
        "agentrl": template.encode,
        "floor": floor.encode,
        "floor_cached": floor.encode_cached,
    }
    tokenizer, texts = template.tokenizer, passages()

    def new_results() -> Iterator[str]:
        while True:
            for talk in wide(tokenizer, 8, 90, 16, texts):
                yield from talk.results

    words = [r for talk in narrow(tokenizer, 8, 90) for r in talk.results]
    seen = list(itertools.islice(new_results(), len(words)))
    for kind, source in (
        ("50_words", itertools.cycle(words)),
        ("wide_seen", itertools.cycle(seen)),
        ("wide_new", new_results()),
    ):
        for text in itertools.islice(source, len(words)):
            assert len({tuple(encode(text)) for encode in contestants.values()}) == 1, text
        figures = medians(contestants, source, len(words), lambda text: len(floor.encode(text)))
        for name, value in figures.items():
            timing.print_figure(f"tokens/encode/{name}", value, "us/token", text=kind)


def measure_prompts(template: ChatTemplate) -> None:
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "Evaluate an arithmetic expression, and return its value as text.",
                "parameters": {
                    "type": "object",
                    "properties": {"expression": {"type": "string", "description": "3 * (4 + 5)"}},
                    "required": ["expression"],
                },
            },
        }
        for name in ("calculator", "estimator")
    ]
    words = itertools.count()

    def group(text: str) -> Sequence[int]:
        messages = [Message("system", "Answer in one line."), Message("user", text)]
        return [len(template.prompt(messages, tools)) for _ in range(GROUP)]

    for kind, length in (("short", 40), ("long", 4_000)):
        texts = (f"{next(words)} " + "How much is it? " * (length // 16) for _ in iter(int, 1))
        figures = medians({"agentrl": group}, texts, 100)
        timing.print_figure(
            "tokens/prompt", figures["agentrl"] / GROUP, "us/rollout", row=kind, group=GROUP
        )


def main() -> None:
    arguments(__doc__).parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    template = ChatTemplate(workload_tokenizer())
    floor = Floor(template.tokenizer, (), 0.0)
    measure_deltas(template, floor)
    measure_encoder(template, floor)
    measure_prompts(template)


if __name__ == "__main__":
    main()
