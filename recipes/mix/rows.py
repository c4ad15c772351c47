"""Write the rows: three tasks of reasoning-gym (Apache-2.0).

    pip install reasoning-gym==0.1.25
    python recipes/mix/rows.py

Each task has a key that tells which rows are twins: the two numbers of a sum or difference, the
word whose letters are counted, the person and the verb of the sentence that is asked for. No
two rows have the same key, whether they train, validate or are imitated.
"""

import json
import random
import re
from collections import Counter
from pathlib import Path

from agentrl.data import write_rows

TRAINING, VALIDATION, IMITATION = 300, 80, 24
TOTAL = TRAINING + VALIDATION + IMITATION
TASKS = {
    "needle_haystack": {"min_num_statements": 3, "max_num_statements": 5},
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "letter_counting": {"min_words": 1, "max_words": 1},
}
HINT = {"letter_counting": " Reply only with a number."}
MAX_WORD = 8
"""The letters of the longest word."""


def find_key(task, prompt, answer):
    """Return what rows that are twins have in common."""
    if task == "needle_haystack":
        verb = prompt.splitlines()[-1].split()[1:-5]  # Who is committed to pigs? Reply only ...
        return answer, " ".join(verb)
    if task == "chain_sum":
        return tuple(sorted(re.findall(r"\d+", prompt)))
    return re.search(r'text: "(.*)"', prompt)[1].lower()


def is_wanted(task, key, answer, counts):
    """Return whether a row is used: letters of short words, as often once as twice."""
    if task != "letter_counting":
        return True
    return answer in ("1", "2") and len(key) <= MAX_WORD and counts[answer] < TOTAL // 2


def make_rows(task):
    """Return the rows of a task to train, to validate and to imitate; each has another key."""
    import reasoning_gym

    rows, counts = {}, Counter()
    for entry in reasoning_gym.create_dataset(task, size=20000, seed=0, **TASKS[task]):
        prompt = entry["question"].strip() + HINT.get(task, "")
        key, answer = find_key(task, prompt, entry["answer"]), entry["answer"]
        if key not in rows and is_wanted(task, key, answer, counts):
            rows[key] = {"prompt": prompt, "data_source": task, "ground_truth": answer}
            counts[answer] += 1
        if len(rows) == TOTAL:
            break
    every = [*rows.values()]
    random.Random(0).shuffle(every)
    imitated = [{"prompt": r["prompt"], "answer": r["ground_truth"]} for r in every[-IMITATION:]]
    return every[VALIDATION:-IMITATION], every[:VALIDATION], imitated


if __name__ == "__main__":
    folder, validation, answers = Path(__file__).parent, [], []
    for task in TASKS:
        train, val, imitated = make_rows(task)
        write_rows(folder / f"{task}.jsonl", train)
        validation += val
        answers += imitated
    write_rows(folder / "val.jsonl", validation)
    with (folder / "answers.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in answers)
