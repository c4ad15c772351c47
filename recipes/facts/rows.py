"""Write the rows: sums and products in the words of reasoning-gym's tasks chain_sum and products.

    python recipes/facts/rows.py

The rows are split by the two numbers, in either order: if 7 + 5 is a validation row, neither 7 + 5
nor 5 + 7 is a training row.
"""

import random
from pathlib import Path

from agentrl.data import write_rows

VALIDATION = 200
SUM = "State the final answer to the following arithmetic problem: {} + {} ="
PRODUCT = "Solve the following multiplication: {} * {}. Give only the result as your final answer."


def make_row(name, a, b):
    """Return the row of a sum or a product (`name`) of two numbers."""
    prompt, answer = (SUM, a + b) if name == "sum" else (PRODUCT, a * b)
    return {"prompt": prompt.format(a, b), "data_source": name, "ground_truth": str(answer)}


pairs = [("sum", a, b) for a in range(1, 41) for b in range(1, 10) if a >= b]
pairs += [("product", a, b) for a in range(2, 13) for b in range(2, 13) if a >= b]
random.Random(0).shuffle(pairs)
# Both orders of a pair are training rows.
train = [row for name, a, b in pairs[VALIDATION:] for row in {(name, a, b), (name, b, a)}]
folder = Path(__file__).parent
write_rows(folder / "val.jsonl", [make_row(*pair) for pair in pairs[:VALIDATION]])
write_rows(folder / "train.jsonl", [make_row(*pair) for pair in sorted(train)])
