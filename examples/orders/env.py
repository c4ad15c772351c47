"""Orders: questions about the databases of small shops, answered with SQL.

    python examples/orders/env.py data/orders.jsonl --rows 256 --seed 1 --difficulty 2

The difficulty is the SQL that a question takes: 1 looks up, 2 sums up, 3 compares customers. The
databases are generated from a seed when this file is loaded, in `databases/` next to it. The right
answers are computed in Python from the same numbers, so no database contains an answer.
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
    "{question}\nQuery the database with the tools. End with only the number or the name after"
    " ####, for example: #### 12"
)


class Order(NamedTuple):
    """A row of the table `orders`, joined with its customer and its good."""

    customer: str
    city: str
    good: str
    price: int
    pieces: int


class Shop(NamedTuple):
    """The tables of a database."""

    customers: list[tuple[int, str, str]]
    goods: list[tuple[int, str, int]]
    orders: list[tuple[int, int, int, int]]

    def lines(self) -> list[Order]:
        """Return the orders with names instead of ids."""
        customers = {c: (name, city) for c, name, city in self.customers}
        goods = {g: (name, price) for g, name, price in self.goods}
        return [Order(*customers[c], *goods[g], n) for _, c, g, n in self.orders]


def shop(name: str) -> Shop:
    """Return the shop of that name; it is always the same."""
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
    """Write the shops to files; existing files are kept."""
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
        os.replace(partial, file)  # Another process may write the same file.
    return folder


load_file("shelf:sql").use_databases(make_databases(HERE / "databases"))


@reward("orders")
def orders(trajectory) -> float:
    """Return 1 if the last line of the last message is #### and the right answer."""
    lines = trajectory.final_text.strip().splitlines()
    return float(bool(lines) and lines[-1].strip() == f"#### {trajectory.sample.ground_truth}")


class Task(NamedTuple):
    """A question, its answer, and the SQL query that finds the answer."""

    question: str
    answer: str
    query: str


JOINED = "FROM orders o JOIN customers c ON c.id = o.customer JOIN goods g ON g.id = o.good"


def task(lines: list[Order], difficulty: int, rng: random.Random) -> Task:
    """Return a question of that difficulty with one right answer."""
    while True:
        city, good, least = rng.choice(CITIES), rng.choice(lines).good, rng.randint(2, 5)
        made = _task(lines, difficulty, rng.randrange(2), city, good, least)
        if made:
            return made


def _task(
    lines: list[Order], difficulty: int, which: int, city: str, good: str, least: int
) -> Task | None:
    match difficulty, which:
        case 1, 0:
            count = sum(o.good == good and o.pieces >= least for o in lines)
            return Task(
                f"How many orders of the good {good!r} have {least} or more pieces?",
                str(count),
                f"SELECT count(*) {JOINED} WHERE g.name = '{good}' AND o.pieces >= {least}",
            )
        case 1, _:
            price = next(o.price for o in lines if o.good == good)
            return Task(
                f"What is the total price of {least} pieces of the good {good!r}?",
                str(least * price),
                f"SELECT {least} * price FROM goods WHERE name = '{good}'",
            )
        case 2, 0:
            return Task(
                f"How much did the customers from {city} pay in total (price times pieces)?",
                str(sum(o.price * o.pieces for o in lines if o.city == city)),
                f"SELECT sum(g.price * o.pieces) {JOINED} WHERE c.city = '{city}'",
            )
        case 2, _:
            pieces = sum(o.pieces for o in lines if o.good == good and o.city == city)
            return Task(
                f"How many pieces of the good {good!r} did customers from {city} order in total?",
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
                f"Which customer ordered the most pieces of the good {good!r} in total?",
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
                f"How many customers from {city} paid more in total than the average total of a"
                " customer with orders?",
                str(len({o.customer for o in lines if o.city == city and paid[o.customer] > mean})),
                f"WITH paid AS (SELECT c.id, c.city, sum(g.price * o.pieces) AS p {JOINED}"
                f" GROUP BY c.id) SELECT count(*) FROM paid WHERE city = '{city}'"
                " AND p > (SELECT avg(p) FROM paid)",
            )


def rows(count: int, seed: int, difficulty: int = 2, split: str = "train") -> list[dict[str, Any]]:
    """Return the rows of a dataset: two shops for "train", the third one for "val"."""
    rng = random.Random(seed)
    shops = SHOPS[:2] if split == "train" else SHOPS[2:]
    lines = {name: shop(name).lines() for name in shops}
    dataset = []
    for _ in range(count):
        name = rng.choice(shops)
        question = task(lines[name], difficulty, rng)
        dataset.append(
            {
                "prompt": [{"role": "user", "content": PROMPT.format(question=question.question)}],
                "agent_name": "tool_agent",
                "data_source": "examples/orders",
                "tools": ["sql"],
                "tools_kwargs": {"sql": {"create_kwargs": {"database": name}}},
                "ground_truth": question.answer,
                "query": question.query,
            }
        )
    return dataset


def gold(row: dict[str, Any]) -> list[str]:
    """Return the turns of a policy that is right."""
    return [
        _call("sql_schema", {}),
        _call("sql", {"query": row["query"]}),
        f"#### {row['ground_truth']}",
    ]


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
    args = parser.parse_args()
    write_rows(args.output, rows(args.rows, args.seed, args.difficulty, args.split))


if __name__ == "__main__":
    main()
