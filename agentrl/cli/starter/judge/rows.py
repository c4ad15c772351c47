"""Write train.jsonl and val.jsonl. Run it as `python rows.py`."""

from itertools import islice

from agentrl.data import write_rows
from agentrl.demo.arithmetic import rows

for file, seed, count in (("train.jsonl", 11, 192), ("val.jsonl", 12, 48)):
    samples = (r.sample for r in rows(seed, loops=["single_turn"]))
    write_rows(
        file,
        [
            {
                "prompt": [message.as_dict() for message in sample.prompt],
                "agent_name": "single_turn",
                "ground_truth": sample.ground_truth,
            }
            for sample in islice(samples, count)
        ],
    )
