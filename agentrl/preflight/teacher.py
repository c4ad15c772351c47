"""Check that a run's teacher fits the rows and the policy's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.chat.tokenizer import load_tokenizer
from agentrl.config import Config
from agentrl.config.teacher import TeacherConfig, is_url
from agentrl.data import draw, find_kinds, sample_rows
from agentrl.errors import ConfigError, UserError
from agentrl.trajectory import Message, Sample


def check_teacher_rows(config: Config, samples: Sequence[Sample]) -> Iterator[str]:
    """Yield the mistakes in the teachers of rows, and in the prompts that these read.

    Args:
        config: the config of the run.
        samples: the rows for training.
    """
    teacher = config.teacher
    if isinstance(teacher.model, dict):
        sources = dict.fromkeys(kind.sample.data_source for kind in find_kinds(samples))
        if missing := [repr(source) for source in sources if source not in teacher.model]:
            yield (
                f"teacher.model has no teacher for rows of data_source {', '.join(missing)}. It has"
                f" one for {', '.join(map(repr, teacher.model))}"
            )
    for sample in draw(samples, sample_rows(samples)) if teacher.prompt else ():
        try:
            teacher_messages(teacher, sample, sample.prompt)
        except UserError as e:
            yield str(e)
            return


def teacher_messages(
    teacher: TeacherConfig, sample: Sample, messages: Sequence[Message]
) -> list[Message]:
    """Return messages with the last user message as the teacher reads it (`teacher.prompt`).

    Args:
        teacher: the section `teacher`.
        sample: the row.
        messages: the first messages of its episodes.

    Raises:
        ConfigError: the row lacks a field, or no message is a user's.
    """
    users = [i for i, message in enumerate(messages) if message.role == "user"]
    if not users:
        raise ConfigError(f"teacher.prompt: row {sample.row} has no user message to replace")
    row = {"ground_truth": sample.ground_truth, "data_source": sample.data_source}
    fields: Mapping[str, Any] = {**sample.extra, **row, "prompt": messages[users[-1]].content}
    if missing := [name for name in teacher.fields if fields.get(name) is None]:
        known = ", ".join(name for name, value in fields.items() if value is not None)
        raise ConfigError(
            f"teacher.prompt={teacher.prompt!r}: row {sample.row} has no field {missing[0]!r}."
            f" Fields: {known}"
        )
    try:
        text = teacher.prompt.format_map(fields)
    except (LookupError, AttributeError, ValueError, TypeError) as e:
        raise ConfigError(f"teacher.prompt={teacher.prompt!r}: row {sample.row}: {e!r}") from None
    changed = list(messages)
    changed[users[-1]] = replace(messages[users[-1]], content=text)
    return changed


def check_tokenizers(config: Config, tokenizer: Any) -> None:
    """Check that the models of teachers have the policy's tokenizer. Servers are checked later.

    Raises:
        ConfigError: a teacher has another one; the message names the first token that differs.
    """
    for name in config.teacher.local:
        if name != config.model.path:
            check_same_tokens(tokenizer, name, config.model.path)


def check_same_tokens(tokenizer: Any, teacher: str, policy: str, where: str = "") -> None:
    """Check that a teacher's tokenizer has the policy's tokens, with the same ids.

    Args:
        tokenizer: the policy's.
        teacher: the folder or hub name of the teacher's.
        policy: `model.path`, for the message.
        where: the server of the teacher, for the message; "" if it is a model.

    Raises:
        ConfigError: they differ, or the teacher's cannot be loaded.
    """
    where = where or teacher
    try:
        theirs = load_tokenizer(teacher, needs_template=False)
    except UserError as e:
        advice = (
            ". The tokenizer of a server must be readable here: mount its folder, or copy it to the"
            " same path"
            if is_url(where)
            else ""
        )
        raise ConfigError(f"teacher.model={where}: {e}{advice}") from e
    ours, others = ({i: t for t, i in x.get_vocab().items()} for x in (tokenizer, theirs))
    for i in sorted(ours.keys() | others.keys()):
        if ours.get(i) != others.get(i):
            raise ConfigError(
                f"teacher.model={where} has another tokenizer than model.path={policy}: token {i}"
                f" is {_describe(others.get(i))}, and the policy's is {_describe(ours.get(i))}. A"
                " teacher scores the tokens of the policy, so both must have the same"
            )


def _describe(token: str | None) -> str:
    return "none" if token is None else repr(token)
