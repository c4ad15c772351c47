"""Write train.jsonl and val.jsonl. Run it as `python rows.py`."""

import random

from agentrl.data import write_rows

for file, seed, count in (("train.jsonl", 11, 192), ("val.jsonl", 12, 48)):
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        secret = rng.randint(1, 9)
        question = "I think of a number from 1 to 9. How many?"
        rows.append(
            {
                "prompt": [
                    {"role": "system", "content": "Find the number. Answer with ####."},
                    {"role": "user", "content": question},
                ],
                "environment": "higher_lower",
                "environment_kwargs": {"secret": secret},
                "ground_truth": str(secret),
            }
        )
    write_rows(file, rows)
