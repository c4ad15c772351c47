"""Write train.jsonl and val.jsonl. Run it as `python rows.py`."""

from itertools import islice

from agentrl.data import write_rows
from agentrl.demo.arithmetic import TOOL, rows


def row(number, sample):
    """Return a row of the dataset; every fourth one has the coach."""
    arguments = {"ground_truth": sample.ground_truth}
    coach = {"interaction": "coach", "interaction_kwargs": arguments} if number % 4 == 3 else {}
    return {
        "prompt": [message.as_dict() for message in sample.prompt],
        "agent_name": "tool_agent",
        "tools": [TOOL],
        "ground_truth": sample.ground_truth,
        **coach,
    }


for file, seed, count in (("train.jsonl", 11, 192), ("val.jsonl", 12, 48)):
    samples = (r.sample for r in rows(seed, loops=["tool_agent"]))
    write_rows(file, [row(i, sample) for i, sample in enumerate(islice(samples, count))])
