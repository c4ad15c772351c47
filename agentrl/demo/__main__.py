"""`python -m agentrl.demo [FOLDER]`: write the files of datasets/."""

from __future__ import annotations

import sys
from pathlib import Path

from agentrl.data import write_rows
from agentrl.demo.arithmetic import SPLITS, split_rows


def main() -> None:
    """Write one file for each split."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "datasets")
    for split in SPLITS:
        path = folder / f"arithmetic_{split}.parquet"
        write_rows(path, [row.as_dict(split) for row in split_rows(split)])
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
