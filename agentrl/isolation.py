"""Who in a run executes what a model wrote, and whether that can be isolated on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain

from agentrl import registry, sandbox
from agentrl.config import Config
from agentrl.errors import ConfigError, DataError
from agentrl.rewards import Scorer
from agentrl.trajectory import Sample


def executors(config: Config, rows: Sequence[Sequence[Sample]], scorer: Scorer) -> list[str]:
    """The tools and rewards of these rows that run programs; a server's tools are its own."""
    return list(dict.fromkeys(_executors(config, rows, scorer)))


def check_isolation(config: Config, rows: Sequence[Sequence[Sample]], scorer: Scorer) -> None:
    """Settle where programs run, and try it once if any will be.

    Raises:
        ConfigError: they could not be run there; with what to do.
    """
    sandbox.configure(config.sandbox)
    found = executors(config, rows, scorer)
    if found and (problem := sandbox.probe(config.sandbox)):
        raise ConfigError(
            f"{', '.join(found)} of these rows run programs, which cannot be done with"
            f" sandbox.backend={config.sandbox.backend}: {problem}"
        )


def isolation(config: Config, rows: Sequence[Sequence[Sample]], scorer: Scorer) -> str:
    """Where programs run, for people; "" where none do."""
    found = executors(config, rows, scorer)
    if not found:
        return ""
    backend = config.sandbox.backend
    how = "NOT ISOLATED, as you" if backend == "unsafe-subprocess" else f"in {backend}"
    return f"programs of {', '.join(found)} run {how} (sandbox.backend={backend})"


def _executors(config: Config, rows: Sequence[Sequence[Sample]], scorer: Scorer) -> Iterator[str]:
    samples = list(chain(*rows))
    if not config.tools.url:
        for name in sorted({name for sample in samples for name in sample.tools}):
            if "sandbox" in registry.tools.get(name).injected:
                yield f"the tool {name}"
    for source in sorted({sample.data_source for sample in samples}):
        with suppress(DataError):  # rows that nobody judges are refused elsewhere
            for grader in scorer.graders(source):
                if grader.way.sandbox:
                    yield f"the reward {grader.name}"
