"""Rows of public benchmarks, from files of the user: `data.train='benchmark:gsm8k:train.jsonl'`.

The format is the one in which a benchmark is published. Questions with an answer get the grader of
their `data_source`. Tasks with tools get an environment (`ExpectedCalls`) that executes no call: it
compares the calls with those that the benchmark expects.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import orjson

from agentrl.answers import boxed_answer, gsm8k_answer
from agentrl.data.files import load_json, read_rows
from agentrl.doors.door import Door, read_address
from agentrl.errors import DataError
from agentrl.registry import did_you_mean, tools
from agentrl.replies import Reply
from agentrl.tools.environment import Environment, environment_of_schemas
from agentrl.tools.schema import clean_schema
from agentrl.tools.validation import Validator
from agentrl.trajectory import Message, Sample, ToolCall

log = logging.getLogger("agentrl")
T = TypeVar("T")
Json = dict[str, Any]
Names = Sequence[Sequence[str]]
NAME = "benchmark"
SECONDS = 60.0
"""The time limit of a method, and of a check of arguments. None takes long."""

BFCL_DOCS = {
    "GorillaFileSystem": "gorilla_file_system", "MathAPI": "math_api", "MessageAPI": "message_api",
    "TicketAPI": "ticket_api", "TradingBot": "trading_bot", "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api", "VehicleControlAPI": "vehicle_control",
}  # fmt: skip
"""BFCL's files of function docs, by the class that a row names."""
BFCL_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
"""BFCL's names of JSON's types."""
BFCL_ADDED = "I have updated some more functions you can choose from. What about now?"
"""What BFCL's user says in a turn that adds functions."""


# -- files ----------------------------------------------------------------------------------------


class Record:
    """An object of a file, with its place for messages."""

    def __init__(self, where: str, values: Any):
        if not isinstance(values, dict):
            raise DataError(f"{where}: must be an object, not {values!r:.80}")
        self.where, self.values = where, values

    def get(self, name: str, kind: type[T]) -> T:
        """Return a field.

        Raises:
            DataError: it is missing or has another type.
        """
        value = self.values.get(name)
        if isinstance(value, kind):
            return value
        problem = f"must be of type {kind.__name__}, not {value!r:.80}"
        if name not in self.values:
            problem = f"is missing.{did_you_mean(name, self.values)} Fields: {[*self.values]}"
        raise DataError(f"{self.where}: {name} {problem}")


def read_records(path: str | Path) -> Iterator[Record]:
    """Yield the objects of a file: lines of JSON, a JSON list, one object, or Parquet.

    A folder has files of one object each, as MATH is published.

    Raises:
        DataError: the file cannot be read.
    """
    file = Path(path).expanduser()
    if file.suffix == ".parquet":
        yield from (Record(f"{path}, row {i}", row) for i, row in enumerate(read_rows(file)))
        return
    if file.is_dir():
        for inner in sorted(file.rglob("*.json")):
            yield from read_records(inner)
        return
    try:
        text = file.read_bytes()
    except OSError as e:
        raise DataError(f"{path}: cannot be read ({e.strerror})") from None
    try:
        load_json(text)
        lines = [text]
    except ValueError:
        lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            values = load_json(line) if line.strip() else None
        except ValueError as e:
            raise DataError(f"{path}, line {number}: {e}") from None
        if isinstance(values, list):
            yield from (Record(f"{path}, item {i}", v) for i, v in enumerate(values))
        elif values is not None:
            yield Record(f"{path}, line {number}", values)


# -- questions with an answer ---------------------------------------------------------------------


def _question(prompt: str, source: str, truth: Any, record: Record, *extra: str) -> Json:
    """Return a row that the grader of a data source scores, with other fields of the record."""
    if not truth:
        raise DataError(f"{record.where}: the answer is empty")
    kept = {name: record.values[name] for name in extra if name in record.values}
    row = {"prompt": prompt, "data_source": source, "ground_truth": truth}
    return {**row, "agent_name": "single_turn", **({"extra_info": kept} if kept else {})}


def _gsm8k(record: Record) -> Json:
    answer = gsm8k_answer(record.get("answer", str))
    if answer is None:
        raise DataError(f"{record.where}: answer does not end with `#### NUMBER`")
    prompt = f"{record.get('question', str)}\n\nThink step by step. End with `#### NUMBER`."
    return _question(prompt, "openai/gsm8k", answer, record)


def _math(record: Record) -> Json:
    if not (answer := boxed_answer(record.get("solution", str))):
        raise DataError(f"{record.where}: solution has no \\boxed{{...}}")
    prompt = f"{record.get('problem', str)}\n\nThink step by step. Put the answer into \\boxed{{}}."
    source = "DigitalLearningGmbH/MATH-lighteval"
    return _question(prompt, source, answer, record, "level", "type")


def _hotpotqa(record: Record) -> Json:
    context = record.values.get("context")
    try:
        if isinstance(context, dict):  # the columns of Hugging Face's version
            context = zip(context["title"], context["sentences"], strict=True)
        passages = [f"{title}: {''.join(sentences)}" for title, sentences in context or ()]
    except (TypeError, ValueError, KeyError):
        problem = "context must be a list of pairs: a title and a list of sentences"
        raise DataError(f"{record.where}: {problem}") from None
    question = f"{record.get('question', str)}\n\nWrite the answer in <answer> and </answer>."
    prompt, answer = "\n\n".join([*passages, question]), record.get("answer", str)
    extra = "supporting_facts", "level", "type"
    return _question(prompt, "searchR1_hotpotqa", answer, record, *extra)


# -- tasks with tools -----------------------------------------------------------------------------


class ExpectedCalls(Environment):
    """Records the calls of an episode, and compares them with the expected ones.

    Args:
        turns: the user's messages after the first one.
        functions: the functions that the row has from the beginning.
        added: the functions that each of these messages adds; empty if none does.
    """

    _defaults: ClassVar[Mapping[str, Json]]

    def __init__(self, turns: list[str], functions: list[str], sample: Sample, added: Names = ()):
        self.tools, self._expected = [*functions], sample.ground_truth
        self._turns, self._calls = [*zip(turns, added or [()] * len(turns), strict=True)], [[]]

    async def call_function(self, name: str, arguments: Json, messages: Sequence[Message]) -> str:
        """Record a call."""
        self._calls[-1].append({"name": name, "arguments": arguments})
        return "The call was recorded."

    async def respond(self, messages: Sequence[Message]) -> Reply | None:
        """Return the user's next message."""
        if not self._turns:
            return None
        self._calls.append([])
        message, added = self._turns.pop(0)
        self.tools = [*(self.tools or ()), *added]
        return Reply(message)

    async def reward(self) -> float:
        """Return 1.0 if each turn has exactly the expected calls, in order; else 0.0.

        An argument that a call leaves out has its default.
        """
        made, expected = (
            [[(c["name"], self._defaults[c["name"]] | c["arguments"]) for c in turn] for turn in of]
            for of in (self._calls, self._expected)
        )
        return float(made == expected)

    @classmethod
    def gold(cls, sample: Sample) -> list[str | ToolCall]:
        """Return the expected calls, and a text at the end of each turn."""
        turns = ([ToolCall(c["name"], c["arguments"]) for c in t] for t in sample.ground_truth)
        return [step for turn in turns for step in (*turn, "Done.")]


def _bfcl(path: str, schemas: Mapping[str, Json]) -> Iterator[Json]:
    """Yield the rows of a multi-turn file of BFCL."""
    file = Path(path).expanduser()
    answers = {
        r.get("id", str): r for r in read_records(file.parent / "possible_answer" / file.name)
    }
    classes = _bfcl_classes(path)
    for record in read_records(file):
        key, where = record.get("id", str), record.where
        if (truth := answers.get(key)) is None:
            raise DataError(f"{where}: possible_answer/{file.name} has no id {key!r}")
        excluded = record.values.get("excluded_function") or ()
        offered = chain.from_iterable(classes[c] for c in record.get("involved_classes", list))
        functions = [name for name in offered if name not in excluded]
        expected = [
            [_parse_call(text, functions, schemas, truth.where) for text in turn]
            for turn in truth.get("ground_truth", list)
        ]
        turns, added = _bfcl_turns(record, schemas)
        if len(turns) != len(expected):
            problem = f"ground_truth has {len(expected)} turns, question has {len(turns)}"
            raise DataError(f"{truth.where}: {problem}")
        calls = ((i, call["name"]) for i, turn in enumerate(expected) for call in turn)
        if early := [name for i, name in calls if name in chain.from_iterable(added[i + 1 :])]:
            log.warning("%s: %s is left out: it adds %s after its call", path, key, early[0])
            continue
        later = [*chain.from_iterable(added)]
        state = orjson.dumps(record.get("initial_config", dict)).decode()
        kwargs = {"turns": turns[1:], "functions": [f for f in functions if f not in later]}
        kwargs |= {"added": added[1:]} if later else {}
        system = f"The state at the beginning: {state}"
        yield {"id": key, **_task(system, turns[0], expected, kwargs)}


def _bfcl_turns(record: Record, schemas: Mapping[str, Json]) -> tuple[list[str], Names]:
    """Return the user's messages of a row, and the functions that each adds (missed_function).

    A message that adds functions has no text in the file. As in BFCL's mode for models without an
    API of functions, it has their schemas.
    """
    missed = record.get("missed_function", dict) if "missed_function" in record.values else {}
    try:
        turns = ["\n".join(m["content"] for m in turn) for turn in record.get("question", list)]
        for turn, names in missed.items():
            assert int(turn) > 0
            docs = orjson.dumps([schemas[name] for name in names]).decode()
            turns[int(turn)] = f"{docs}\n{turns[int(turn)] or BFCL_ADDED}"
    except (TypeError, LookupError, ValueError, AssertionError):
        problem = "must be lists of messages, and map a later turn to names of functions"
        raise DataError(f"{record.where}: question and missed_function {problem}") from None
    return turns, [missed.get(str(turn), []) for turn in range(len(turns))]


def _task(system: str, user: str, expected: Sequence[Sequence[Json]], kwargs: Json) -> Json:
    """Return a row that is played with `ExpectedCalls`."""
    prompt = [{"role": "system", "content": system}] if system else []
    prompt.append({"role": "user", "content": user})
    row = {"prompt": prompt, "agent_name": "tool_agent", "ground_truth": expected}
    return {**row, "environment_kwargs": kwargs}


def _bfcl_classes(path: str) -> dict[str, dict[str, Json]]:
    """Return the schemas of the functions of each class that a row names.

    Raises:
        DataError: there is no such class, or no file with its docs.
    """
    file = Path(path).expanduser()
    names = (name for r in read_records(file) for name in r.get("involved_classes", list))
    return {name: _bfcl_functions(file, name) for name in dict.fromkeys(names)}


def _bfcl_functions(file: Path, name: str) -> dict[str, Json]:
    docs = file.parent / "multi_turn_func_doc" / f"{BFCL_DOCS.get(name, name)}.json"
    if not docs.is_file():
        raise DataError(f"{file}: involved_classes: no file {docs} with the docs of {name!r}")
    return {
        r.get("name", str): {
            "name": r.get("name", str),
            "description": r.get("description", str),
            "parameters": _json_schema(r.get("parameters", dict)),
        }
        for r in read_records(docs)
    }


def _json_schema(schema: Any) -> Any:
    """Return a schema of BFCL's as a JSON schema."""
    if isinstance(schema, list):
        return [_json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    schema = {k: _json_schema(v) for k, v in schema.items() if (k, v) != ("type", "any")}
    return schema | (
        {"type": BFCL_TYPES[kind]} if isinstance(kind, str) and kind in BFCL_TYPES else {}
    )


def _parse_call(
    text: str, functions: Sequence[str], schemas: Mapping[str, Json], where: str
) -> Json:
    """Return a call such as `cd(folder='a')`; arguments may have no names."""
    try:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        assert call.func.id in functions
        names = list(schemas[call.func.id]["parameters"]["properties"])
        assert len(call.args) <= len(names)
        pairs = [*zip(names, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
        arguments = {name: ast.literal_eval(value) for name, value in pairs}
        assert {*arguments} <= {*names}
    except (SyntaxError, ValueError, AssertionError):
        raise DataError(f"{where}: ground_truth: {text!r} is no call of {functions}") from None
    return {"name": call.func.id, "arguments": orjson.loads(orjson.dumps(arguments))}


def _tau2(path: str, schemas: Mapping[str, Json]) -> Iterator[Json]:
    """Yield the rows of a `tasks.json` of tau2. Its `policy.md` becomes the system message."""
    policy = Path(path).expanduser().with_name("policy.md")
    if not policy.is_file():
        problem = "no policy.md next to it. Telecom has none: use tau2's package through a door"
        raise DataError(f"{path}: {problem}")
    system = policy.read_text(encoding="utf-8")
    left_out: list[str] = []
    for record in read_records(path):
        actions = record.get("evaluation_criteria", dict).get("actions") or []
        expected = [
            {k: Record(record.where, a).get(k, t) for k, t in (("name", str), ("arguments", dict))}
            for a in actions
        ]
        problems = [f"no tool {c['name']}" for c in expected if c["name"] not in schemas]
        problems += ["actions of the user" for a in actions if a.get("requestor") == "user"]
        problems += ["compare_args" for a in actions if a.get("compare_args") is not None]
        if problems or not actions:
            left_out.append(f"{record.values.get('id')} ({[*problems, 'no actions'][0]})")
            continue
        scenario = record.get("user_scenario", dict).get("instructions")
        if isinstance(scenario, dict):
            scenario = "\n\n".join(f"{k}: {v}" for k, v in scenario.items() if v)
        if not isinstance(scenario, str):
            raise DataError(f"{record.where}: user_scenario has no instructions")
        user = f"Solve the case of this customer.\n\n{scenario}"
        row = _task(system, user, [expected], {"turns": [], "functions": [*schemas]})
        yield {"id": str(record.values.get("id")), **row}
    if left_out:
        log.warning("%s: %d tasks are left out: %s", path, len(left_out), ", ".join(left_out))


# -- the door -------------------------------------------------------------------------------------

QUESTIONS = {"gsm8k": _gsm8k, "math": _math, "hotpotqa": _hotpotqa}
TASKS = {"bfcl": _bfcl, "tau2": _tau2}


def _read(address: str) -> tuple[str, str, dict[str, Json]]:
    """Return the benchmark and the file of an address, and the schemas of functions by name.

    Raises:
        DataError: there is no such benchmark, or no file.
    """
    part, options = read_address(address, {"tools": ""}, only=True)
    name, _, path = part.partition(":")
    names = [*QUESTIONS, *TASKS]
    if name not in names or not path:
        hint = did_you_mean(name, names)
        raise DataError(f"{address}: write {NAME}:NAME:FILE.{hint} Names: {', '.join(names)}")
    if (name == "tau2") != bool(options["tools"]):
        raise DataError(f"{address}: tau2 needs ?tools=FILE, the schemas of its tools; others none")
    schemas: dict[str, Json] = {}
    for record in read_records(options["tools"]) if name == "tau2" else ():
        function = Record(record.where, record.get("function", dict))
        schema = function.get("parameters", dict)
        parameters = clean_schema(schema, schema.get("$defs", {}), (), record.where)
        schemas[function.get("name", str)] = {**function.values, "parameters": parameters}
    for functions in _bfcl_classes(path).values() if name == "bfcl" else ():
        schemas |= functions
    return name, path, schemas


def _environment(name: str, path: str) -> str:
    return f"{name}_" + re.sub(r"\W+", "_", path)


def rows(address: str) -> list[Json]:
    """Return the rows of `benchmark:NAME:FILE`."""
    name, path, schemas = _read(address)
    is_task = name in TASKS
    made = [*(_tasks(name, path, schemas) if is_task else map(QUESTIONS[name], read_records(path)))]
    if not made:
        raise DataError(f"{path}: has no {'tasks to play' if is_task else 'rows'}")
    return made


def _tasks(name: str, path: str, schemas: Mapping[str, Json]) -> Iterator[Json]:
    """Yield the rows of tasks whose expected calls the schemas of their tools accept."""
    names = {"data_source": f"{NAME}/{name}", "environment": _environment(name, path)}
    checks = {n: Validator(schema["parameters"]) for n, schema in schemas.items()}
    for row in TASKS[name](path, schemas):
        calls = [call for turn in row["ground_truth"] for call in turn]
        if unfit := [c for c in calls if checks[c["name"]].errors(c["arguments"], SECONDS)]:
            log.warning("%s: %s is left out: its tool refuses %s", path, row["id"], unfit[0])
        else:
            yield {**row, **names}


def load(alias: str, address: str) -> None:
    """Register the environment of a file of tasks."""
    name, path, schemas = _read(address)
    if name not in TASKS:
        return
    defaults = {
        name: {
            key: schema["default"]
            for key, schema in function["parameters"].get("properties", {}).items()
            if "default" in schema
        }
        for name, function in schemas.items()
    }
    environment = _environment(name, path)
    record = environment_of_schemas(
        environment,
        type(environment, (ExpectedCalls,), {"_defaults": defaults}),
        [{"type": "function", "function": schema} for schema in schemas.values()],
        address,
        timeout=SECONDS,
        hooks=("respond", "reward"),
        constructor_injected=("sample",),
    )
    tools.add(environment, record)


DOOR = Door(NAME, "rows of GSM8K, MATH, HotpotQA, BFCL and tau2, from files", load, rows)
