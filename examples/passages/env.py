"""Passages: questions about an invented county, to be answered by searching.

    python examples/passages/env.py data/passages.jsonl --rows 256 --seed 1 --difficulty 2

The difficulty is the number of passages that a question needs: 1 asks for the maker of a thing, 3
asks for the river of the town in which the maker was born. No model knows the answers: the county
is generated from a seed. Its passages are in `corpus.jsonl` next to this file (`--corpus` writes
it).
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

from agentrl import reward
from agentrl.data import write_rows
from agentrl.registry import load_file

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus.jsonl"
PROMPT = "{question}\nUse the tools. End with only the name after ####, for example: #### Selby"
THINGS = ("clock", "loom", "lantern", "plough", "barometer", "pump", "kiln", "press", "telescope")
KINDS = ("striking", "folding", "silent", "double", "floating", "twisted", "hollow", "winged")


class Town(NamedTuple):
    """A town, its river, and facts about it."""

    name: str
    river: str
    founded: int
    trade: str


class Maker(NamedTuple):
    """A person, the town of their birth, and the thing that they made."""

    name: str
    town: Town
    thing: str
    year: int


def county() -> tuple[list[Town], list[Maker]]:
    """Return the towns and people; they are always the same."""
    rng = random.Random("passages-1")
    starts = ("Bram", "Cald", "Dorr", "Elm", "Fenn", "Garl", "Hask", "Ing", "Kel", "Lorn", "Mar")
    ends = ("wick", "stead", "holm", "ford", "by", "mere", "combe", "thorpe")
    names = rng.sample([a + b for a in starts for b in ends], 74)
    trades = ("glass", "rope", "salt", "paper", "bells", "cheese", "slate", "linen")
    towns = [
        Town(name, f"{river[:-1]}a", rng.randint(1000, 1700), rng.choice(trades))
        for name, river in zip(names[:24], names[24:48], strict=True)
    ]
    first = ("Ada", "Ivo", "Nell", "Piet", "Runa", "Sten", "Tove", "Ulf", "Vera", "Wim", "Yrsa")
    people = rng.sample([f"{a} {b}" for a in first for b in names[48:]], 60)
    things = rng.sample([f"{kind} {thing}" for kind in KINDS for thing in THINGS], 60)
    makers = [
        Maker(name, rng.choice(towns), thing, rng.randint(1750, 1900))
        for name, thing in zip(people, things, strict=True)
    ]
    return towns, makers


def corpus() -> list[dict[str, str]]:
    """Return one passage for each town, person and thing, in random order."""
    towns, makers = county()
    texts = [
        (
            town.name,
            f"{town.name} is a town on the river {town.river}. It was founded in {town.founded} and"
            f" is known for its {town.trade}. A fair is held there in spring.",
        )
        for town in towns
    ]
    for maker in makers:
        name, town, thing, year = maker
        texts.append(
            (name, f"{name} was born in {town.name} and learned a trade there, like many others.")
        )
        texts.append(
            (
                f"The {thing}",
                f"The {thing} was made by {name} in {year}. It was shown at fairs and copied soon.",
            )
        )
    random.Random("order").shuffle(texts)
    return [{"id": f"p{i}", "title": a, "text": b} for i, (a, b) in enumerate(texts)]


load_file("shelf:search").use_corpus(CORPUS)


@reward("passages")
def passages(trajectory) -> float:
    """Return 1 if the last line is #### and the right name, up to articles, case and periods."""
    lines = trajectory.final_text.strip().splitlines()
    if not lines or not lines[-1].strip().startswith("####"):
        return 0.0
    return float(plain(lines[-1].strip()[4:]) == plain(trajectory.sample.ground_truth))


def plain(name: str) -> str:
    """Return a name in lower case, without articles and words such as "river"."""
    words = re.findall(r"\w+", name.lower())
    return " ".join(w for w in words if w not in ("the", "a", "an", "river", "town"))


def rows(count: int, seed: int, difficulty: int = 2, split: str = "train") -> list[dict[str, Any]]:
    """Return rows about 45 things for "train", or about 15 others for "val"; they may repeat."""
    rng = random.Random(seed)
    _, makers = county()
    makers = makers[:45] if split == "train" else makers[45:]
    order = [m for _ in range(-(-count // len(makers))) for m in rng.sample(makers, len(makers))]
    dataset = []
    for maker in order[:count]:
        questions = {
            1: (f"Who made the {maker.thing}?", maker.name),
            2: (f"In which town was the maker of the {maker.thing} born?", maker.town.name),
            3: (
                f"On which river is the town where the maker of the {maker.thing} was born?",
                maker.town.river,
            ),
        }
        question, answer = questions[difficulty]
        dataset.append(
            {
                "prompt": [{"role": "user", "content": PROMPT.format(question=question)}],
                "agent_name": "tool_agent",
                "data_source": "examples/passages",
                "tools": ["search", "read_passage"],
                "ground_truth": answer,
                "path": [f"The {maker.thing}", maker.name, maker.town.name][:difficulty],
            }
        )
    return dataset


def gold(row: dict[str, Any]) -> list[str]:
    """Return the turns of a policy that is right."""
    return [*(_call("search", {"query": q}) for q in row["path"]), f"#### {row['ground_truth']}"]


def _call(name: str, arguments: dict[str, Any]) -> str:
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


def main() -> None:
    """Write rows to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output", help="a .jsonl or .parquet file")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", default="train", choices=("train", "val"))
    parser.add_argument("--difficulty", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--corpus", action="store_true", help="write the passages instead of rows")
    args = parser.parse_args()
    dataset = corpus() if args.corpus else rows(args.rows, args.seed, args.difficulty, args.split)
    write_rows(args.output, dataset)


if __name__ == "__main__":
    main()
