"""Write the passages, the rows and the conversations to imitate.

    python recipes/search/rows.py

The passages are about people who do not exist: the town of each, and the teacher. A row of `one`
asks for the town of a person, a row of `two` for that of the person's teacher. The people of
training, validation and imitation are three circles of teachers: no passage that a validation row
needs is one that a training row needs.
"""

import random
from pathlib import Path

from agentrl.data import write_rows
from agentrl.registry import load_file
from agentrl.testing import call

TRAINING, VALIDATION, CHATS = 240, 200, 40
"""The people of each circle."""
SYSTEM = "Search for what you do not know. Then write only the name of the town."
ONE = "In which town does {} live?"
TWO = "In which town does the teacher of {} live?"
FIRST = ["Ada", "Bela", "Cleo", "Dora", "Emil", "Fritz", "Gina", "Hugo", "Ivo", "Juri", "Karl"]
FIRST += ["Lena", "Mona", "Nils", "Olga", "Paul", "Rosa", "Sten", "Tina", "Vera", "Wim", "Yrsa"]
LAST = [a + b for a in ("Bram", "Cald", "Fenn", "Hask", "Lorn") for b in ("wick", "ford", "holm")]
LAST += [a + b for a in ("Gar", "Kel", "Thor", "Ost", "Win") for b in ("sen", "dal", "berg")]
TOWNS = [a + b for a in ("Mar", "Dor", "Sel", "Ash", "Rin", "Nor") for b in ("by", "ton", "mere")]
JOBS = ["baker", "clerk", "farmer", "judge", "nurse", "painter", "pilot", "singer", "tailor"]


def make_circle(rng, names):
    """Return (name, town, job, teacher's name, teacher's town) of people who teach in a circle.

    The town of the teacher is another one.
    """
    towns = [rng.choice(TOWNS) for _ in names]
    for i in range(len(names)):
        while towns[i] in (towns[i - 1], towns[(i + 1) % len(names)]):
            towns[i] = rng.choice(TOWNS)
    jobs = [rng.choice(JOBS) for _ in names]
    people = zip(names, towns, jobs, strict=True)
    return [(*person, names[i - 1], towns[i - 1]) for i, person in enumerate(people)]


def make_passage(index, person):
    """Return the passage about a person."""
    name, town, job, teacher, _ = person
    text = f"{name} is a {job} and lives in {town}. The teacher of {name} was {teacher}."
    return {"id": f"p{index}", "title": name, "text": text}


def make_row(kind, person):
    """Return a row; `kind` is one or two, the passages that the answer needs."""
    name, town, _, _, teachers_town = person
    question, answer = (ONE, town) if kind == "one" else (TWO, teachers_town)
    texts = ("system", SYSTEM), ("user", question.format(name))
    prompt = [{"role": role, "content": text} for role, text in texts]
    return {"prompt": prompt, "data_source": kind, "tools": ["search"], "ground_truth": answer}


def make_chat(kind, person, search):
    """Return the row of a person, with the messages to imitate."""
    name, _, _, teacher, _ = person
    messages, row = [], make_row(kind, person)
    for query in [name] if kind == "one" else [name, teacher]:
        messages += [
            {"role": "assistant", "content": call("search", query=query, k=1)},
            {"role": "tool", "content": search(query, 1)},
        ]
    messages.append({"role": "assistant", "content": row["ground_truth"]})
    return {**row, "messages": messages}


if __name__ == "__main__":
    folder, rng = Path(__file__).parent, random.Random(0)
    names = [f"{first} {last}" for first in FIRST for last in LAST]
    names = rng.sample(names, TRAINING + VALIDATION + CHATS)
    train, val, imitated = (
        make_circle(rng, part)
        for part in (names[:TRAINING], names[TRAINING:-CHATS], names[-CHATS:])
    )
    everyone = rng.sample([*train, *val, *imitated], len(names))
    corpus = folder / "corpus.jsonl"
    write_rows(corpus, [make_passage(i, person) for i, person in enumerate(everyone)])
    shelf = load_file("shelf:search")
    shelf.use_corpus(corpus)
    chats = [make_chat(kind, p, shelf.search) for p in imitated for kind in ("one", "two")]
    write_rows(folder / "train.jsonl", [make_row(k, p) for p in train for k in ("one", "two")])
    write_rows(folder / "val.jsonl", [make_row("two", person) for person in val])
    write_rows(folder / "chats.jsonl", chats)
