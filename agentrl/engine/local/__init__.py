"""An engine that runs a transformers model in this process and batches all episodes in flight.

`engine` has the worker thread and the interface to other threads, `schedule` decides which turns
decode at which step, `stepper` runs one step, `decoder` runs the model, `load` loads its weights,
`windows` finds attention windows, `rows` stores tokens, keys and values, `sampling` draws tokens.
"""

from agentrl.engine.local.engine import LocalEngine

__all__ = ["LocalEngine"]
