"""Finished conversations as tokens to imitate, from the rows of a dataset."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from agentrl import registry
from agentrl.agent_loops import AgentLoop
from agentrl.chat import ChatTemplate
from agentrl.data import load_samples
from agentrl.data.mistakes import Mistakes
from agentrl.data.rows import CALLS_ARE_TEXT
from agentrl.errors import RegistryError
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Message, Role, Sample


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation as tokens; `mask` is 1 on those to imitate, never on the first.

    Example: `Example(P + A, [0] * len(P) + [1] * len(A))` for a prompt P and an answer A.
    """

    ids: array[int]
    mask: array[int]


def load_examples(path: str, column: str, template: ChatTemplate, max_length: int) -> list[Example]:
    """The conversations in a column of a dataset.

    A cell is a list of `{"role", "content"}`, or such a list as JSON. One that begins with an
    assistant message goes on from the row's prompt, which is shown as the row's agent loop shows
    it; any other is the whole conversation. Tools that the row names are shown in its prompt.

    Args:
        path: a .parquet or .jsonl file.
        column: where the conversations are.
        template: the model's.
        max_length: most tokens of a conversation.

    Raises:
        DataError: the file or rows cannot be read, or are too long; all of them at once.
    """
    mistakes = Mistakes(path)
    examples = []
    for sample in load_samples(path):
        try:
            said = _messages(sample.extra.get(column))
            opening, schemas = _opening(sample, said)
            ids, mask = template.trace([*opening, *said], schemas)
            if len(ids) > max_length:
                raise ValueError(
                    f"is {len(ids):,} tokens long, more than the model's {max_length:,}"
                )
            examples.append(Example(ids, mask))
        except RegistryError as e:
            unknown = [name for name in sample.tools if name not in registry.tools]
            mistakes.add(
                sample.row, "agent_name, tools", f"{e}. {registry.where_to_load(*unknown)}"
            )
        except ValueError as e:
            mistakes.add(sample.row, column, str(e))
    mistakes.raise_any()
    return examples


def _messages(cell: Any) -> list[Message]:
    if cell is None:
        raise ValueError("is missing: name the column that holds the conversations with --column")
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except json.JSONDecodeError as e:
            raise ValueError(f"is not JSON: {e}") from None
    for i, said in enumerate(cell if isinstance(cell, list) else ()):
        if isinstance(said, dict) and said.get("tool_calls"):
            raise ValueError(f"message {i}: {CALLS_ARE_TEXT}")
    match cell:
        case [{"role": str(), "content": str()}, *_]:
            pass
        case _:
            raise ValueError(f'must be a list of {{"role", "content"}}, not {cell!r:.60}')
    messages = []
    for i, said in enumerate(cell):
        match said:
            case {"role": role, "content": str(content)} if role in get_args(Role):
                messages.append(Message(role, content))
            case _:
                raise ValueError(f"message {i} must have a role and a text, not {said!r:.60}")
    if messages[-1].role != "assistant":
        raise ValueError("must end with an assistant message")
    return messages


def _opening(
    sample: Sample, said: Sequence[Message]
) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]]]:
    schemas = LocalToolbox().schemas(sample.tools)
    if said[0].role != "assistant":
        return (), schemas
    loop: AgentLoop = registry.agent_loops.get(sample.agent_name)
    return loop.opening(sample, schemas)
