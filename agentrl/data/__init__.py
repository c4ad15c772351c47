"""Dataset rows: read .parquet and .jsonl files, check the rows, and order them for training."""

from agentrl.data.check import check_samples, load_checked
from agentrl.data.files import read_rows, write_rows
from agentrl.data.order import RowOrder
from agentrl.data.rows import load_samples

__all__ = ["RowOrder", "check_samples", "load_checked", "load_samples", "read_rows", "write_rows"]
