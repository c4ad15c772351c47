"""Write the questions of the demo that need a calculator, as rows for an external agent."""

from __future__ import annotations

import argparse

from agentrl.data import write_rows
from agentrl.demo.arithmetic import split_rows


def rows() -> list[dict]:
    """Return the rows."""
    every = [row.as_dict("train") for row in split_rows("train")]
    return [
        {
            "prompt": row["prompt"],
            "agent_name": "external",
            "data_source": row["data_source"],
            "ground_truth": row["reward_model"]["ground_truth"],
        }
        for row in every
        if row["agent_name"] == "tool_agent"
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", help="the file, .jsonl or .parquet")
    write_rows(parser.parse_args().output, rows())
