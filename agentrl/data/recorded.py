"""The answers that a server gave, on disk, with the scores that their users sent.

`agentrl serve --record DIR` appends JSON lines to `DIR/answers.jsonl`:

    {"policy": {"id", "model", "run", "step", "vocabulary"}}    a server was started
    {"answer": {"id", "parent", "user", "shared", "prompt", "sampled", "logprobs", ...}}
    {"score": {"id", "user", "score", "time"}}

`prompt` has the tokens of a prompt without the first `shared` ones, which are those of the answer
`parent` and its prompt. So the size of a conversation is proportional to its length.

Lines are only appended, by one server at a time. So the n-th score is the same whenever the file is
read, and a run that trains on the scores resumes where it was. A line that a kill cut short is
removed by the next server, and no reader uses it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from pathlib import Path
from secrets import token_hex
from typing import Any

import orjson

from agentrl.data.files import write_generated
from agentrl.errors import DataError, UserError
from agentrl.file_loaders import RECORDED
from agentrl.plural import plural
from agentrl.regular_files import open_lock
from agentrl.trajectory import Message, float_array, token_array

log = logging.getLogger("agentrl")

FILE = "answers.jsonl"
MAX_SCORE = 1000.0
"""The largest absolute value of a score. One user must not be able to make a batch's sum infinite.
"""
LOOP = "recorded"
"""The agent loop of rows that are recorded answers. It plays nothing."""
KEPT_ROWS = 1024
"""The number of conversations whose tokens a server keeps, so that their next line shares them."""


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """An answer as it was sampled.

    Attributes:
        id: that of the answer, as OpenAI's chat completions have it.
        parent: the id of the answer that its conversation continues; "" if there is none.
        user: a hash of the key of its request.
        step: the number of steps of the policy that sampled it, which is the version of the policy.
        prompt: the tokens that the policy saw.
        sampled: the tokens that it sampled.
        logprobs: those of these tokens, as in `Generation`.
        sampling: the parameters with which they were sampled.
        messages: the messages of the request after the answer `parent`, for people to read.
        text: the message that the policy sampled.
        finish_reason: "stop" or "length".
        time: when it was given, in seconds since 1970.
    """

    id: str
    parent: str
    user: str
    step: int
    prompt: array[int]
    sampled: array[int]
    logprobs: array[float]
    sampling: Mapping[str, Any]
    messages: Sequence[Message]
    text: str
    finish_reason: str
    time: float


@dataclass(frozen=True, slots=True)
class ScoredAnswers:
    """A score, and the answers that it belongs to.

    Attributes:
        id: the id of the answer that was scored.
        score: the score.
        answers: this answer and those before it in its conversation that no earlier score belongs
            to, oldest first; empty if an earlier score belongs to all of them.
        messages: the whole conversation.
        indices: the index of each answer's message, by its id.
    """

    id: str
    score: float
    answers: Sequence[RecordedAnswer]
    messages: Sequence[Message]
    indices: Mapping[str, int]


@dataclass(slots=True)
class Records:
    """The content of a folder of `agentrl serve --record`."""

    policies: list[dict[str, Any]] = field(default_factory=list)
    """The policies that were served, in the order of time."""
    answers: dict[str, RecordedAnswer] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    """The first score of each answer that has one, in the order of time."""
    damaged: int = 0
    """The number of lines that cannot be read, or contradict earlier ones."""
    end: int = 0
    """The bytes of the complete lines."""

    def scored(self) -> list[ScoredAnswers]:
        """Return the scores with their answers. Each answer belongs to the first score for it."""
        taken: set[str] = set()
        results = []
        for id, score in self.scores.items():
            path = [*self._path(id)][::-1]
            messages: list[Message] = []
            indices = {}
            for answer in path:
                messages += [*answer.messages, Message("assistant", answer.text)]
                indices[answer.id] = len(messages) - 1
            own = [answer for answer in path if answer.id not in taken]
            taken.update(answer.id for answer in own)
            results.append(ScoredAnswers(id, score, own, messages, indices))
        return results

    def _path(self, id: str) -> Iterator[RecordedAnswer]:
        """Yield an answer and those that its conversation continues, newest first."""
        while id:
            yield (answer := self.answers[id])
            id = answer.parent

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line.

        Raises:
            KeyError, TypeError, ValueError: the line is damaged, or contradicts earlier ones.
        """
        if policy := line.get("policy"):
            if not {"id", "model", "run", "step", "vocabulary"} <= policy.keys():
                raise ValueError("a policy without an identity")
            self.policies.append(policy)
        elif score := line.get("score"):
            id, number = score["id"], float(score["score"])
            is_own = self.answers[id].user == score["user"]
            if id in self.scores or not is_own or not abs(number) <= MAX_SCORE:
                raise ValueError("not a first score of the user that got the answer")
            self.scores[id] = number
        else:
            data = line["answer"]
            parent = self.answers[data["parent"]] if data["parent"] else None
            answer = _read_answer(data, parent.prompt + parent.sampled if parent else token_array())
            if answer.id in self.answers or (parent and parent.user != answer.user):
                raise ValueError("an id that occurs twice, or the conversation of another user")
            self.answers[answer.id] = answer


def _read_answer(data: Mapping[str, Any], row: array[int]) -> RecordedAnswer:
    names = ("id", "parent", "user", "text", "finish_reason")
    answer = RecordedAnswer(
        **{name: str(data[name]) for name in names},
        step=int(data["step"]),
        prompt=row[: data.get("shared", 0)] + token_array(data["prompt"]),
        sampled=token_array(data["sampled"]),
        logprobs=float_array(data["logprobs"]),
        sampling=dict(data["sampling"]),
        messages=[Message(m["role"], str(m["content"])) for m in data["messages"]],
        time=float(data["time"]),
    )
    if not answer.prompt or not answer.sampled or min(*answer.prompt, *answer.sampled) < 0:
        raise ValueError("an answer without tokens")
    if len(answer.logprobs) != len(answer.sampled) or not all(map(isfinite, answer.logprobs)):
        raise ValueError("logprobs that are not one finite number for each sampled token")
    return answer


def read_records(folder: Path, *, only_policy: bool = False) -> Records:
    """Return the records in a folder; none if it has no file.

    Args:
        folder: the folder.
        only_policy: read no further than the first policy.

    Raises:
        DataError: the file cannot be read.
    """
    records = Records()
    try:
        with (folder / FILE).open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                records.end += len(line)
                try:
                    records.add(orjson.loads(line))
                except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
                    records.damaged += 1
                if only_policy and records.policies:
                    break
    except FileNotFoundError:
        pass
    except OSError as e:
        raise DataError(f"{folder / FILE} cannot be read: {e}") from None
    return records


def _folder_of(address: str) -> Path:
    return Path(address.removeprefix(RECORDED)).expanduser()


def open_recorded(address: str) -> Records:
    """Return the records at an address `recorded:DIR`.

    Raises:
        DataError: there are none, or none has a score.
    """
    folder = _folder_of(address)
    records = read_records(folder)
    if not records.policies:
        damaged = f" ({plural(records.damaged, 'damaged line')})" if records.damaged else ""
        raise DataError(
            f"{address}: no recorded answers in {folder.resolve()}{damaged}. Make them with:"
            f" agentrl serve RUN --record {folder} --token-env NAME"
        )
    if not records.scores:
        raise DataError(
            f"{address}: no answer of {len(records.answers)} has a score. Their users send it:"
            ' POST /v1/feedback {"id": ID, "score": NUMBER}'
        )
    return records


def identify_records(address: str) -> str:
    """Return a text that is the same for the records at an address when they have grown."""
    policies = read_records(_folder_of(address), only_policy=True).policies
    return (policies or open_recorded(address).policies)[0]["id"]  # Without any, it raises.


def recorded_rows(address: str) -> str:
    """Write a row for each score at an address `recorded:DIR`, and return the file.

    Raises:
        DataError: there is no score.
    """
    rows = []
    for scored in open_recorded(address).scored():
        asked = [m.content for m in scored.messages if m.role != "assistant"]
        prompt = [{"role": "user", "content": asked[-1].strip() or "(empty)"}]
        rows.append({"id": scored.id, "prompt": prompt, "agent_name": LOOP, "data_source": LOOP})
    return write_generated(address, rows)


class Recorder:
    """Appends what a server answers to a folder, in a thread of its own.

    Args:
        folder: the folder; it is made if it does not exist.
        policy: the policy that is served: `model`, `run`, `step` and `vocabulary`.

    Attributes:
        failed: the number of answers that could not be written.

    Raises:
        UserError: another server records there, the folder cannot be written, or its tokens are
            those of another vocabulary.
    """

    def __init__(self, folder: Path, policy: Mapping[str, Any]):
        self.folder, self.step, self.failed = folder, policy["step"], 0
        with ExitStack() as undo:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._fd = open_lock(folder / FILE)
                undo.callback(os.close, self._fd)
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                records = read_records(folder)
                os.ftruncate(self._fd, records.end)
                self._end = os.lseek(self._fd, 0, os.SEEK_END)
                if {p["vocabulary"] for p in records.policies} - {policy["vocabulary"]}:
                    raise UserError(
                        f"--record {folder}: its answers have the tokens of another vocabulary,"
                        f" that of {records.policies[-1]['model']}. Use another folder"
                    )
                self._write({"policy": {"id": token_hex(8), **policy, "time": time.time()}})
            except BlockingIOError:
                raise UserError(
                    f"--record {folder}: another server records there. Use another folder"
                ) from None
            except OSError as e:
                raise UserError(f"--record {folder}: cannot be written: {e}") from None
            undo.pop_all()
        self._users = {id: answer.user for id, answer in records.answers.items()}
        self._scores = records.scores
        self._rows: OrderedDict[str, array[int]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "record")

    def add(self, answer: RecordedAnswer) -> None:
        """Append an answer. A failure is logged once, and counted."""
        self._thread.submit(self._add, answer)

    def _add(self, answer: RecordedAnswer) -> None:
        try:
            if answer.parent not in self._users:  # It could not be written.
                answer = replace(answer, parent="")
            values = {f.name: getattr(answer, f.name) for f in fields(answer)}
            values["messages"] = [message.as_dict() for message in answer.messages]
            row, prompt = self._rows.pop(answer.parent, token_array()), answer.prompt
            pairs = enumerate(zip(row, prompt, strict=False))
            shared = next((i for i, (a, b) in pairs if a != b), min(len(row), len(prompt)))
            self._write({"answer": {**values, "shared": shared, "prompt": prompt[shared:]}})
            self._users[answer.id] = answer.user
            self._rows[answer.id] = prompt + answer.sampled
            if len(self._rows) > KEPT_ROWS:
                self._rows.popitem(last=False)
        except Exception as e:  # The answer itself must not fail.
            self.failed += 1
            if self.failed == 1:
                log.error("--record %s: answers are not recorded: %s", self.folder, e)

    def score(self, id: str, user: str, score: float) -> Future[tuple[float, bool] | None]:
        """Append the score of an answer, if it is the first one.

        The result is the score that counts, and whether it is this one; None if this user got no
        such answer. It is an `OSError` if the score could not be written.
        """
        return self._thread.submit(self._score, id, user, score)

    def _score(self, id: str, user: str, score: float) -> tuple[float, bool] | None:
        if self._users.get(id) != user:
            return None
        if is_new := id not in self._scores:
            self._write({"score": {"id": id, "user": user, "score": score, "time": time.time()}})
            self._scores[id] = score
        return self._scores[id], is_new

    def _write(self, line: Mapping[str, Any]) -> None:
        """Append a line; if this fails, remove the part that was written."""
        rest = orjson.dumps(line, default=array.tolist, option=orjson.OPT_APPEND_NEWLINE)
        end = self._end + len(rest)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            os.ftruncate(self._fd, self._end)
            os.lseek(self._fd, self._end, os.SEEK_SET)
            raise
        self._end = end

    def close(self) -> None:
        """Write what is waiting, and let other servers record in the folder."""
        self._thread.shutdown()
        os.close(self._fd)
