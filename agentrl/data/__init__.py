"""Dataset rows: read .parquet and .jsonl files, check the rows, and order them for training."""

from agentrl.data.check import check_samples, load_checked
from agentrl.data.convert import convert_rows
from agentrl.data.curriculum import POOLS, Curriculum
from agentrl.data.dataset import (
    Kind,
    Rows,
    describe_row,
    draw,
    find_kinds,
    load_samples,
    open_rows,
    parts_to_check,
    prompt_bytes,
    row_order,
    sample_rows,
)
from agentrl.data.files import read_rows, write_rows
from agentrl.data.order import RowOrder
from agentrl.data.rows import ColumnNames, Mistakes

__all__ = [
    "POOLS", "ColumnNames", "Curriculum", "Kind", "Mistakes", "RowOrder", "Rows", "check_samples",
    "convert_rows", "describe_row", "draw", "find_kinds", "load_checked", "load_samples",
    "open_rows", "parts_to_check", "prompt_bytes", "read_rows", "row_order", "sample_rows",
    "write_rows",
]  # fmt: skip
