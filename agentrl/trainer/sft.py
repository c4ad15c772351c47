"""The run of supervised fine-tuning: the conversations of a dataset as tokens, and its progress."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.agent_loops import AgentLoop
from agentrl.chat import ChatTemplate
from agentrl.chat.images import images_of, require_rule
from agentrl.chat.tokenizer import hash_vocabulary
from agentrl.data import ColumnNames, open_rows
from agentrl.data.files import load_json
from agentrl.data.images import RowImages, raise_wrong
from agentrl.data.rows import Mistakes, read_message
from agentrl.errors import DataError, RegistryError, TemplateError
from agentrl.images import Image, ImageError, RowImage
from agentrl.learner.sft import Example
from agentrl.registry import agent_loops, tools, where_to_load
from agentrl.store import VOCABULARY
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Message, Sample, ToolCall

LOSS_KEYS = ("weight", "train")
"""The keys of a message that exclude it from the loss: OpenAI's `weight`, and `train`."""
JSON_COLUMN = "messages"
"""The column in which a text is a conversation in JSON. In the others, a text is an answer."""


def load_examples(
    path: str, column: str, template: ChatTemplate, max_length: int, prompt_key: str = "prompt"
) -> list[Example]:
    """Return the conversations in a column of a dataset.

    A cell is a list of `{"role", "content"}`, or a text: in the column `messages` such a list as
    JSON, in other columns one assistant message, whatever the text is. If a cell begins with an
    assistant message, it continues the row's prompt, which is shown as the row's agent loop shows
    it, and is not trained. Otherwise it is the whole conversation. The prompt shows the tools that
    the row names. Assistant messages with `weight` 0 or `train` false are not trained.

    Args:
        path: a .parquet or .jsonl file.
        column: the column with the conversations.
        template: the model's chat template.
        max_length: most tokens of a conversation.
        prompt_key: the column with the prompts.

    Raises:
        DataError: the file or rows cannot be read, or conversations are too long. The message lists
            all.
    """
    mistakes = Mistakes(path)
    rows: list[tuple[int, Example, list[Image]]] = []
    folder = Path(path).expanduser().parent
    for sample in open_rows(path, names=ColumnNames(prompt=prompt_key)):
        try:
            images = RowImages(sample.extra.get("images"), folder, raise_wrong)
            messages, trained = _parse_messages(sample.extra.get(column), column, template, images)
            opening, schemas = _build_opening(sample, messages, prompt_key)
            trained = [*[False] * len(opening), *trained]
            messages = [*opening, *messages]
            ids, mask = template.trace(messages, schemas, trained=trained)
            if len(ids) > max_length:
                raise ValueError(
                    f"is {len(ids):,} tokens long, more than the model's {max_length:,}"
                )
            found = images_of(messages)
            _check_placeholders(ids, found, template)
            rows.append((sample.row, Example(ids, mask), found))
        except RegistryError as e:
            unknown = [name for name in sample.tools if name not in tools]
            mistakes.add(sample.row, "agent_name, tools", f"{e}. {where_to_load(*unknown)}")
        except ValueError as e:
            mistakes.add(sample.row, column, str(e))
    ready = asyncio.run(_prepare(template, (image for *_, images in rows for image in images)))
    examples = []
    for row, example, images in rows:
        for error in (e for i in images if isinstance(e := ready[i.key], ImageError)):
            mistakes.add(row, column, str(error))
        examples.append(replace(example, images=tuple(ready[i.key] for i in images)))
    mistakes.raise_any()
    return examples


def _check_placeholders(ids: array[int], images: Sequence[Image], template: ChatTemplate) -> None:
    """Raise `ValueError` if a conversation with images has further placeholder tokens."""
    if images and template.images:
        placeholder = template.images.rule.token_id
        if ids.count(placeholder) != sum(map(template.images.tokens, images)):
            raise ValueError(
                f"an assistant message has {template.decode([placeholder])!r}, the placeholder of"
                " an image. Remove it"
            )


async def _prepare(
    template: ChatTemplate, images: Iterable[Image]
) -> dict[str, RowImage | BaseException]:
    """Return images as the model reads them, or why they cannot be read, by their keys."""
    distinct = {image.key: image for image in images}
    if not distinct:
        return {}
    reader = require_rule(template.images)
    tasks = map(reader.prepare, distinct.values())
    return dict(zip(distinct, await asyncio.gather(*tasks, return_exceptions=True), strict=True))


def has_tokens(path: str) -> bool:
    """Return whether a file is one of `agentrl show --sft`."""
    file = Path(path).expanduser()
    if file.suffix != ".parquet" or not file.is_file():
        return False
    with suppress(pa.ArrowInvalid, OSError):  # `load_examples` reports it.
        return VOCABULARY in (pq.read_schema(file).metadata or {})
    return False


def load_token_examples(path: str, template: ChatTemplate, max_length: int) -> list[Example]:
    """Return the rows of a file of `agentrl show --sft` as they are.

    Args:
        path: the file.
        template: the chat template of the model to train, for its tokenizer.
        max_length: most tokens of a row.

    Raises:
        DataError: the tokens are those of another tokenizer, or rows are too long.
    """
    table = pq.read_table(Path(path).expanduser())
    rows = [*map(Example, *(_arrays(table[name]) for name in ("token_ids", "token_mask")))]
    known = hash_vocabulary(template.tokenizer.backend_tokenizer.to_str()).encode()
    if (table.schema.metadata or {})[VOCABULARY] != known:
        raise DataError(f"{path}: the tokens are those of another tokenizer than the model's")
    mistakes = Mistakes(path)
    for row, example in enumerate(rows):
        if (length := len(example.ids)) > max_length:
            text = f"is {length:,} tokens long, more than the model's {max_length:,}"
            mistakes.add(row, "token_ids", text)
    mistakes.raise_any()
    return rows


def _arrays(column: pa.ChunkedArray) -> list[array[int]]:
    return [array("i", items) for items in column.to_pylist()]


def _parse_messages(
    cell: Any, column: str, template: ChatTemplate, images: RowImages
) -> tuple[list[Message], list[bool]]:
    """Return the messages of a cell, with the images of its row, and whether each is trained."""
    if cell is None:
        raise ValueError("is missing: name the column that holds the conversations with --column")
    if isinstance(cell, str) and column == JSON_COLUMN:
        cell = load_json(cell.encode(errors="surrogatepass"))
    elif isinstance(cell, str):
        cell = [{"role": "assistant", "content": cell}]
    if not isinstance(cell, list) or not cell:
        raise ValueError(f'must be a list of {{"role", "content"}}, not {cell!r:.60}')
    messages, trained = [], []
    for i, item in enumerate(cell):
        problems: list[str] = []
        calls = item.get("tool_calls") if isinstance(item, dict) else None
        if calls and item.get("content") is None:  # as OpenAI writes it
            item = {**item, "content": ""}
        keys = *LOSS_KEYS, "tool_calls"
        message = read_message(item, problems, keys, images, f"message {i}")
        if calls and not problems:
            message = _with_calls(message, calls, template, problems)
        loss = [] if problems else [item[k] for k in LOSS_KEYS if item.get(k) is not None]
        is_trained = message.role == "assistant" and all(loss)
        if any(value not in (0, is_trained) for value in loss):
            problems.append(f"weight, train: {loss} must be 0, or 1 in an assistant message")
        elif is_trained and not message.content and not problems:
            problems.append("has no content. Remove it, or add weight 0")
        if problems:
            raise ValueError(f"message {i}: {'; '.join(problems)}")
        messages.append(message)
        trained.append(is_trained)
    images.check()
    if messages[-1].role != "assistant":
        raise ValueError("must end with an assistant message")
    if not any(trained):
        raise ValueError("has no trained message: each has weight 0 or train false")
    return messages, trained


def _with_calls(
    message: Message, calls: Any, template: ChatTemplate, problems: list[str]
) -> Message:
    """Return an assistant message whose content has its structured calls in the model's format.

    Args:
        message: the message without its calls.
        calls: a list of calls as OpenAI writes them; `arguments` is an object, or its JSON.
        template: the model's chat template.
        problems: gets a text if the calls cannot be written.
    """
    try:
        if message.role != "assistant":
            raise ValueError("only assistant messages have them")
        read = []
        for call in calls:
            function = call["function"]
            arguments = function.get("arguments") or {}
            if isinstance(arguments, str):
                arguments = load_json(arguments.encode(errors="surrogatepass"))
            if not isinstance(arguments, dict) or not isinstance(function["name"], str):
                raise ValueError(f"{call!r:.80} needs a name, and arguments as an object")
            read.append(ToolCall(function["name"], arguments, id=str(call.get("id") or "")))
        text = template.decode_turn(template.foreign_turn(message.content, read))
    except (TypeError, KeyError, AttributeError):
        problems.append(f'tool_calls: {calls!r:.80} is no list of {{"function": {{"name", ...}}}}')
    except (ValueError, TemplateError) as e:
        problems.append(f"tool_calls: {e}")
    else:
        return replace(message, content=text, tool_calls=tuple(read))
    return message


def _build_opening(
    sample: Sample, messages: Sequence[Message], prompt_key: str
) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]]]:
    schemas = LocalToolbox().schemas(sample.tools)
    if messages[0].role != "assistant":
        return (), schemas
    loop: AgentLoop = agent_loops.get(sample.agent_name)
    if not any(m.content for m in sample.prompt):
        raise ValueError(f"is an answer, but the column {prompt_key!r} has no prompt")
    return loop.opening(sample, schemas)


# --- progress ------------------------------------------------------------------------------------

REPORT_SECONDS = 5.0


class ProgressPrinter:
    """A `report` for `SFTLearner.fit`: prints a line every few seconds, and one at the end."""

    def __init__(self, steps: int, print_line: Callable[[str], None]):
        self._steps = steps
        self._print = print_line
        self._started = self._last_report = time.monotonic()

    def __call__(self, step: int, loss: float) -> None:
        """Print a line if the last one is some seconds old, or after the last step."""
        now = time.monotonic()
        if now - self._last_report >= REPORT_SECONDS or step == self._steps:
            self._last_report = now
            self._print(
                f"  step {step}/{self._steps}  loss {loss:.3f}  {now - self._started:.0f} s"
            )
