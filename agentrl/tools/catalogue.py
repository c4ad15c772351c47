"""What must be known of tools to offer them to a model: the part that travels over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import UserError


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool as those see it who do not run it."""

    name: str
    """What a dataset row lists."""
    schemas: Sequence[dict[str, Any]]
    """OpenAI function schemas: what the model may call."""
    timeout: float
    """Seconds a call may take once it runs."""
    stateful: bool
    """Whether the calls of an episode share an object, and so run one after another."""
    injected: Sequence[str] = ()
    """What of the episode it is given: of `state`, `sample`, `messages`, `sandbox`."""

    @property
    def wants_row(self) -> bool:
        """Whether anything of it looks at the row."""
        return self.stateful or "sample" in self.injected

    @property
    def functions(self) -> list[str]:
        """The names the model calls."""
        return [s["function"]["name"] for s in self.schemas]


def schemas_of(offers: Sequence[Offer]) -> list[dict[str, Any]]:
    """The schemas of several tools together.

    Raises:
        UserError: two of them offer a function of the same name.
    """
    owners: dict[str, str] = {}
    for offer in offers:
        for function in offer.functions:
            owner = owners.setdefault(function, offer.name)
            if owner != offer.name:
                raise UserError(
                    f"the tools {owner!r} and {offer.name!r} both offer a function {function!r}."
                    " Rename one, or do not give a row both."
                )
    return [schema for offer in offers for schema in offer.schemas]


def lanes_of(offers: Sequence[Offer]) -> dict[str, str]:
    """By function, what its calls share with others' in the episode: those run one after another.

    That is the object of a class tool, or the episode's `state` (""). So a turn's calls have the
    same outcome every time.
    """
    shared = {o.name: "" if "state" in o.injected else o.name for o in offers if _shares(o)}
    return {f: shared[o.name] for o in offers if _shares(o) for f in o.functions}


def _shares(offer: Offer) -> bool:
    return offer.stateful or "state" in offer.injected
