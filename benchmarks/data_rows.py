"""Measure `agentrl check` on many rows: its time and peak memory, without and with a cache file.

One JSON object a line: name, value, unit, context. `python benchmarks/data_rows.py 10000 1000000`
measures these numbers of rows, each as JSONL and as Parquet.

The rows are generated in a temporary folder. They have the form of verl's multi-turn GSM8K rows: a
system message, a question, a tool with constructor arguments, the answer, and `extra_info`. The
first check builds the cache of the rows, the second one reads it. The cache is in the temporary
folder too (`AGENTRL_HOME`). Seconds are wall time, with the start of Python and all imports. The
memory is the maximum resident set of the process.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from workload.timing import arguments, print_figure

from agentrl.demo import tiny_model

SIZES = (1_000, 10_000, 100_000)
SYSTEM = (
    "You are a math expert. You are given a question and you need to solve it step by step. You"
    " should use the `score` tool before you give the final answer, and refine your answer if"
    " necessary. Put your final answer in the format of `#### <answer>`."
)
TOOLS = '''
from agentrl import tool

@tool
class score:
    """Scores an answer."""

    def __init__(self, ground_truth: str):
        self.ground_truth = ground_truth

    def score(self, answer: str) -> str:
        """Score an answer.

        Args:
            answer: the answer, a number
        """
        return str(float(answer == self.ground_truth))
'''


def make_row(index: int) -> dict[str, Any]:
    """Return a row in the form of verl's `gsm8k_multiturn_w_tool.py`."""
    rng = random.Random(index)
    a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 9)
    question = (
        f"Natalia sold clips to {a} of her friends in April, and {b} more clips in May to each of"
        f" {c} shops. She packed them into boxes of {c}, and every box costs ${b} to send. How many"
        f" clips did Natalia sell altogether, if she started with {index} clips?"
    )
    answer = str(index + a + b * c)
    return {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {
            "split": "train",
            "index": index,
            "answer": f"In May she sold {b} * {c} = {b * c} clips, {answer} in all. #### {answer}",
            "question": question,
            "need_tools_kwargs": True,
            "tools_kwargs": {"score": {"create_kwargs": {"ground_truth": answer}}},
            "interaction_kwargs": {"query": question, "ground_truth": answer},
        },
    }


def write_rows(file: Path, count: int) -> None:
    """Write rows a part at a time, as verl's scripts (pyarrow) and as `json` lines."""
    parts = [range(at, min(at + 20_000, count)) for at in range(0, count, 20_000)]
    if file.suffix == ".jsonl":
        with file.open("wb") as lines:
            for part in parts:
                lines.writelines(orjson.dumps(make_row(index)) + b"\n" for index in part)
        return
    writer = None
    for part in parts:
        table = pa.Table.from_pylist([make_row(index) for index in part])
        writer = writer or pq.ParquetWriter(file, table.schema)
        writer.write_table(table)
    if writer:
        writer.close()


def check(file: Path, tools: Path, home: Path) -> dict[str, tuple[float, str]]:
    """Run `agentrl check`, and return its wall time, CPU time and peak memory, with their units."""
    command = [
        *(sys.executable, "-m", "agentrl", "check", "--dataset", str(file)),
        *("--model", "tiny", "-f", str(tools)),
    ]
    log = home / "check.log"
    actions = [
        (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    began = time.perf_counter()
    environment = {**os.environ, "AGENTRL_HOME": str(home)}
    pid = os.posix_spawn(sys.executable, command, environment, file_actions=actions)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise SystemExit(log.read_text())
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return {
        "s": (time.perf_counter() - began, "s"),
        "cpu_s": (usage.ru_utime + usage.ru_stime, "s"),
        "peak": (usage.ru_maxrss / unit, "MiB"),
    }


def main() -> None:
    """Measure each size in both formats."""
    parser = arguments(__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=SIZES, help="numbers of rows")
    sizes = parser.parse_args().sizes
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        model = tiny_model()
        (home / model.name).symlink_to(model)
        tools = home / "tools.py"
        tools.write_text(TOOLS)
        for size in sizes:
            for suffix in ("jsonl", "parquet"):
                file = home / f"rows.{suffix}"
                write_rows(file, size)
                context = {"rows": size, "format": suffix, "file_mib": file.stat().st_size >> 20}
                for run in ("first", "second"):
                    for name, (value, unit) in check(file, tools, home).items():
                        print_figure(f"check_{run}_{name}", value, unit, **context)
                file.unlink()


if __name__ == "__main__":
    main()
