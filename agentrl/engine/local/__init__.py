"""A transformers model in this process that batches whatever episodes are in flight.

`engine` holds the thread and the doors, `schedule` who decodes when, `decoder` the model, `rows` and
`cache` what it remembers, `sampling` the draw.
"""

from agentrl.engine.local.engine import LocalEngine

__all__ = ["LocalEngine"]
