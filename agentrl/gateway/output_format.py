"""The JSON schemas that clients want the text of an answer to match ("structured outputs").

Constrained sampling would train the policy on tokens of another distribution. So the prompt states
the schema, and an answer that does not match it is returned as it is, and counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import orjson

from agentrl.images import PLACE
from agentrl.tools.validation import BASE_SECONDS, SlowCheck, Validator

STATEMENT = (
    "\n\nThe text of your final answer must be one JSON value and nothing else. It must match this"
    " JSON schema:\n"
)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The form of the text of an answer.

    Args:
        schema: a JSON schema as JSON.

    Raises:
        ValueError: it is not a valid JSON schema, or the cost of validation cannot be bounded.
    """

    schema: str

    def __post_init__(self):
        _validator(self.schema)

    @property
    def statement(self) -> str:
        """The text that the prompt ends with."""
        # In a message with images, this character is the place of one.
        return STATEMENT + self.schema.replace(PLACE, r"\ufffc")

    def accepts(self, text: str) -> bool:
        """Return whether a text has this form. If that takes too long to find out, it has."""
        try:
            return not _validator(self.schema).errors(orjson.loads(text), BASE_SECONDS)
        except SlowCheck:
            return True
        except (orjson.JSONDecodeError, RecursionError):
            return False


@lru_cache(256)
def _validator(schema: str) -> Validator:
    return Validator(orjson.loads(schema))
