"""Convert the published GSM8K (JSON lines with question and answer) to rows of agentrl.

    python examples/gsm8k/convert.py train.jsonl data/gsm8k_tool_train.parquet --variant tool

The variants: `tool` can call the calculator, `interaction` has a teacher who lets the model try
again, and `plain` has one turn.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.answers import plain_number
from agentrl.data import write_rows

ANSWER = "End with the final answer after ####, for example: #### 12"
ASK = {
    "tool": f"Think step by step. Use the calculator for every calculation. {ANSWER}",
    "interaction": f"Think step by step. {ANSWER}",
    "plain": f"Think step by step. {ANSWER}",
}


def row(question: str, answer: str, variant: str, split: str, index: int) -> dict[str, Any]:
    """Return a published problem as a row with verl's columns."""
    truth = plain_number(answer.rpartition("####")[2])
    extra: dict[str, Any] = {
        "split": split,
        "index": index,
        "question": question,
        "answer": answer,
    }
    if variant == "tool":
        extra["tool_selection"] = ["calculator"]
    if variant == "interaction":
        extra["interaction_kwargs"] = {"name": "gsm8k", "query": question, "ground_truth": truth}
    return {
        "data_source": "openai/gsm8k",
        "agent_name": "single_turn" if variant == "plain" else "tool_agent",
        "prompt": [{"role": "user", "content": f"{question}\n{ASK[variant]}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra,
    }


def problems(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the question and answer of each line. Exit with a message if a line is malformed."""
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            problem = json.loads(line)
            question, answer = problem["question"], problem["answer"]
        except (ValueError, KeyError, TypeError):
            sys.exit(f"{path}:{number}: not a JSON object with question and answer")
        if "####" not in answer:
            sys.exit(f"{path}:{number}: the answer has no #### and final number")
        yield question, answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("published", type=Path, help="train.jsonl or test.jsonl of GSM8K")
    parser.add_argument("output", type=Path, help="a .parquet or .jsonl file to write")
    parser.add_argument("--variant", choices=sorted(ASK), default="tool")
    options = parser.parse_args()
    if not options.published.is_file():
        sys.exit(f"no such file: {options.published}")
    split = options.published.stem
    rows = [
        row(question, answer, options.variant, split, index)
        for index, (question, answer) in enumerate(problems(options.published))
    ]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_rows(options.output, rows)
    print(f"{len(rows)} rows, {options.variant}: {options.output}")


if __name__ == "__main__":
    main()
