"""Whose fault it is that an engine failed, and whether it is gone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from safetensors import SafetensorError

from agentrl.engine.pool.member import PooledEngine
from agentrl.errors import AgentRLError, EngineDead, EngineError, EngineNonsense


@contextlib.contextmanager
def laid_at(engine: PooledEngine) -> Iterator[None]:
    """Lay at an engine's door what its client raises of its own: no answer of one ends the run.

    Raises:
        EngineNonsense: an answer, or what it was sent, was not what the client took it for.
        EngineError: a file or a socket failed.
    """
    try:
        yield
    except AgentRLError:
        raise
    except (OSError, SafetensorError) as e:
        raise EngineError(f"{engine.url}: {type(e).__name__}: {e}") from e
    except (AttributeError, LookupError, TypeError, ValueError) as e:
        raise EngineNonsense(f"{engine.url}: {type(e).__name__}: {e}") from e


def died(engine: PooledEngine, error: EngineError) -> bool:
    """Whether an engine that failed is gone: connections break a moment before it is seen."""
    if isinstance(error, EngineDead) or not engine.restartable:
        return isinstance(error, EngineDead)
    time.sleep(0.2)
    try:
        with laid_at(engine):
            engine.probe()
    except EngineDead:
        return True
    except EngineError:
        pass
    return False


def line(cause: Exception | None) -> str:
    """The first line of what an error says."""
    return str(cause).partition("\n")[0]
