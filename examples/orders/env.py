"""Orders: questions to the databases of small shops, answered in SQL.

    python examples/orders/env.py data/orders.jsonl --rows 256 --seed 1 --difficulty 2

The difficulty is how much SQL a question takes: 1 looks up, 2 adds up, 3 compares with
what others did. The shops are made from a seed when this file is loaded, in `databases/` beside it;
what is right is computed from the same numbers in Python, so no answer lies in a database.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from agentrl import reward
from agentrl.data import write_rows
from agentrl.registry import load_file

HERE = Path(__file__).resolve().parent
SHOPS = ("books", "garden", "tools")
CITIES = ("Lund", "Porto", "Graz", "Bergen", "Gent", "Turku")
FIRST = ("Ada", "Bo", "Cleo", "Dan", "Ella", "Finn", "Gro", "Hal", "Ines", "Jon", "Kaja", "Liv")
GOODS = {
    "books": ("atlas", "novel", "cookbook", "poems", "diary", "comic", "guide", "reader"),
    "garden": ("rake", "seeds", "pot", "hose", "spade", "gloves", "bench", "lamp"),
    "tools": ("hammer", "saw", "drill", "file", "clamp", "level", "chisel", "pliers"),
}
PROMPT = (
    "{question}\nAsk the database with the tools. Answer with the number or the name alone, behind"
    " ####, for example: #### 12"
)


class Order(NamedTuple):
    """One line of the table `orders`, as Python knows it."""

    customer: str
    city: str
    good: str
    price: int
    pieces: int


class Shop(NamedTuple):
    """What a database holds."""

    customers: list[tuple[int, str, str]]
    goods: list[tuple[int, str, int]]
    orders: list[tuple[int, int, int, int]]

    def lines(self) -> list[Order]:
        """The orders with the names behind their numbers."""
        customers = {c: (name, city) for c, name, city in self.customers}
        goods = {g: (name, price) for g, name, price in self.goods}
        return [Order(*customers[c], *goods[g], n) for _, c, g, n in self.orders]


def shop(name: str) -> Shop:
    """The shop of that name: always the same."""
    rng = random.Random(f"orders-1-{name}")
    people = [f"{first} {letter}." for first in FIRST for letter in "KMRT"]
    customers = [(i, p, rng.choice(CITIES)) for i, p in enumerate(rng.sample(people, 30), 1)]
    prices = rng.sample(range(3, 60), len(GOODS[name]))
    priced = zip(GOODS[name], prices, strict=True)
    goods = [(i, good, price) for i, (good, price) in enumerate(priced, 1)]
    orders = [
        (i, rng.randint(1, len(customers)), rng.randint(1, len(goods)), rng.randint(1, 5))
        for i in range(1, 241)
    ]
    return Shop(customers, goods, orders)


def make_databases(folder: Path) -> Path:
    """The shops as files; those that are there already are left alone."""
    folder.mkdir(exist_ok=True)
    for name in SHOPS:
        file = folder / f"{name}.db"
        if file.exists():
            continue
        partial = folder / f".{name}.{os.getpid()}"
        customers, goods, orders = shop(name)
        with sqlite3.connect(partial) as db:
            db.executescript(
                "CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT);"
                "CREATE TABLE goods (id INTEGER PRIMARY KEY, name TEXT, price INTEGER);"
                "CREATE TABLE orders (id INTEGER PRIMARY KEY, pieces INTEGER,"
                " customer INTEGER REFERENCES customers, good INTEGER REFERENCES goods);"
            )
            db.executemany("INSERT INTO customers VALUES (?, ?, ?)", customers)
            db.executemany("INSERT INTO goods VALUES (?, ?, ?)", goods)
            db.executemany(
                "INSERT INTO orders (id, customer, good, pieces) VALUES (?, ?, ?, ?)", orders
            )
        db.close()
        os.replace(partial, file)  # another process may be making it as well: it is the same
    return folder


load_file("shelf:sql").use_databases(make_databases(HERE / "databases"))


@reward("orders")
def orders(trajectory) -> float:
    """1 where the last line of the last message is the answer behind ####, and nothing else."""
    lines = trajectory.final_text.strip().splitlines()
    return float(bool(lines) and lines[-1].strip() == f"#### {trajectory.sample.ground_truth}")


class Task(NamedTuple):
    """A question, its answer, and the SQL that finds it."""

    question: str
    answer: str
    query: str


JOINED = "FROM orders o JOIN customers c ON c.id = o.customer JOIN goods g ON g.id = o.good"


def task(lines: list[Order], difficulty: int, rng: random.Random) -> Task:
    """A question of that difficulty with one right answer."""
    while True:
        city, good, least = rng.choice(CITIES), rng.choice(lines).good, rng.randint(2, 5)
        found = _task(lines, difficulty, rng.randrange(2), city, good, least)
        if found:
            return found


def _task(
    lines: list[Order], difficulty: int, which: int, city: str, good: str, least: int
) -> Task | None:
    match difficulty, which:
        case 1, 0:
            count = sum(o.good == good and o.pieces >= least for o in lines)
            return Task(
                f"How many orders of the good {good!r} are of {least} pieces or more?",
                str(count),
                f"SELECT count(*) {JOINED} WHERE g.name = '{good}' AND o.pieces >= {least}",
            )
        case 1, _:
            price = next(o.price for o in lines if o.good == good)
            return Task(
                f"What do {least} pieces of the good {good!r} cost together?",
                str(least * price),
                f"SELECT {least} * price FROM goods WHERE name = '{good}'",
            )
        case 2, 0:
            return Task(
                f"What did the customers from {city} pay in all, price times pieces?",
                str(sum(o.price * o.pieces for o in lines if o.city == city)),
                f"SELECT sum(g.price * o.pieces) {JOINED} WHERE c.city = '{city}'",
            )
        case 2, _:
            pieces = sum(o.pieces for o in lines if o.good == good and o.city == city)
            return Task(
                f"How many pieces of the good {good!r} did customers from {city} order in all?",
                str(pieces),
                f"SELECT coalesce(sum(o.pieces), 0) {JOINED} WHERE g.name = '{good}'"
                f" AND c.city = '{city}'",
            )
        case 3, 0:
            ordered: Counter[str] = Counter()
            for o in lines:
                ordered[o.customer] += o.pieces * (o.good == good)
            (first, most), (_, second) = ordered.most_common(2)
            if most == second:
                return None
            return Task(
                f"Which customer ordered the most pieces of the good {good!r} in all?",
                first,
                f"SELECT c.name {JOINED} WHERE g.name = '{good}' GROUP BY c.id"
                " ORDER BY sum(o.pieces) DESC LIMIT 1",
            )
        case _:
            paid: Counter[str] = Counter()
            for o in lines:
                paid[o.customer] += o.price * o.pieces
            mean = sum(paid.values()) / len(paid)
            return Task(
                f"Of the customers with orders from {city}, how many paid more in all than the"
                " mean of what each customer with orders paid in all?",
                str(len({o.customer for o in lines if o.city == city and paid[o.customer] > mean})),
                f"WITH paid AS (SELECT c.id, c.city, sum(g.price * o.pieces) AS p {JOINED}"
                f" GROUP BY c.id) SELECT count(*) FROM paid WHERE city = '{city}'"
                " AND p > (SELECT avg(p) FROM paid)",
            )


def rows(count: int, seed: int, difficulty: int = 2, split: str = "train") -> list[dict[str, Any]]:
    """Rows of a dataset: of two shops for "train", of the third for "val"."""
    rng = random.Random(seed)
    shops = SHOPS[:2] if split == "train" else SHOPS[2:]
    lines = {name: shop(name).lines() for name in shops}
    made = []
    for _ in range(count):
        name = rng.choice(shops)
        asked = task(lines[name], difficulty, rng)
        made.append(
            {
                "prompt": [{"role": "user", "content": PROMPT.format(question=asked.question)}],
                "agent_name": "tool_agent",
                "data_source": "examples/orders",
                "tools": ["sql"],
                "tools_kwargs": {"sql": {"create_kwargs": {"database": name}}},
                "ground_truth": asked.answer,
                "query": asked.query,
            }
        )
    return made


def gold(row: dict[str, Any]) -> list[str]:
    """What a policy that is right says, turn by turn."""
    return [
        _call("sql_schema", {}),
        _call("sql", {"query": row["query"]}),
        f"#### {row['ground_truth']}",
    ]


def _call(name: str, arguments: dict[str, Any]) -> str:
    called = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{called}\n</tool_call>"


def main() -> None:
    """Write rows to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output", help="a .jsonl or .parquet file")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", default="train", choices=("train", "val"))
    parser.add_argument("--difficulty", type=int, default=2, choices=(1, 2, 3))
    given = parser.parse_args()
    write_rows(given.output, rows(given.rows, given.seed, given.difficulty, given.split))


if __name__ == "__main__":
    main()
