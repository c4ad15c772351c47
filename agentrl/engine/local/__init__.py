"""A transformers model in this process that batches whatever episodes are in flight.

`engine` holds the thread and its doors, `turn` a request, `schedule` who decodes when, `patience`
how long it waits for an episode, `stepper` one step of it, `decoder` the model, `load` its weights,
`rows` and `cache` what it remembers, `attention`, `sampling` and `stops` the hot paths.
"""

from agentrl.engine.local.engine import LocalEngine

__all__ = ["LocalEngine"]
