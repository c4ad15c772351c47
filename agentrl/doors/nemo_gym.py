"""Resources servers of NeMo Gym: `environments: {calc: "nemo-gym://HOST:PORT?rows=train.jsonl"}`.

agentrl takes the place of the package's `simple_agent`: it sends POST /seed_session with the row,
POST /NAME for each tool call, and POST /verify with the row and the conversation. The cookies of
the server identify the session.

The schemas of the tools come from rows (`rows=FILE`), as in NeMo Gym. The OpenAPI documents of the
servers have no descriptions, and that of a server with the route `/{path}` has no tools.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from glob import glob
from itertools import count, islice
from typing import Any, ClassVar

import orjson

from agentrl.data.files import read_rows
from agentrl.doors.door import Door, read_address
from agentrl.errors import DataError, Infrastructure, UserError
from agentrl.http import HttpClient, fetch_json
from agentrl.registry import tools
from agentrl.tools.environment import Environment, environment_of_schemas
from agentrl.trajectory import Message, Sample, Scores, ToolResult

NAME = "nemo-gym"
MAX_METRICS = 16
"""The most metrics of an episode. Some verifiers report a number for each of their checks."""
SCHEMAS_ADVICE = f"write {NAME}://HOST:PORT?rows=FILE in environments, with the file of the rows"
ROUTES = ("seed_session", "verify", "close_session")
"""The routes that the model must not call."""
PROMPT_FIELDS = ("previous_response_id", "conversation", "prompt")
"""The fields by which a server of OpenAI's Responses API adds to the prompt."""


class ResourcesServer(Environment):
    """One episode with a resources server."""

    _client: ClassVar[HttpClient]
    _schemas: ClassVar[Mapping[str, Any]]
    _seconds: ClassVar[float]
    _closes: ClassVar[bool]

    def __init__(self, row: dict[str, Any], sample: Sample):
        self._row, self._prompt_length = row, len(sample.prompt)
        self._cookies: dict[str, str] = {}
        for problem in self._problems({"row": row}):
            raise UserError(problem)
        self.tools = list(schemas_of(row["responses_create_params"], "the row"))

    @classmethod
    def _problems(cls, arguments: Mapping[str, Any]) -> list[str]:
        """Return which tools of a row the environment does not have."""
        offered = schemas_of(arguments["row"].get("responses_create_params", {}), "the row")
        return [
            f"no tool {name!r} of this schema: {SCHEMAS_ADVICE}"
            for name, schema in offered.items()
            if cls._schemas.get(name) != schema
        ]

    async def start(self) -> None:
        """Open the session."""
        await self._post("/seed_session", self._row)

    async def call_function(
        self, name: str, arguments: Mapping[str, Any], messages: Sequence[Message]
    ) -> ToolResult:
        """Call a tool. The model reads the whole response, also if the call failed.

        A server answers 500 if the tool raised, for example because it divided by zero.
        """
        status, text = await self._post(f"/{name}", arguments, range(200, 501))
        return ToolResult(text, ok=status < 400, error="" if status < 400 else "tool_error")

    async def reward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, messages: Sequence[Message]
    ) -> Scores:
        """Return the reward of the verifier. Other numbers of its answer become metrics."""
        response = response_of(messages[self._prompt_length :], self._row)
        _, text = await self._post("/verify", {**self._row, "response": response})
        answer: dict[str, Any]
        try:
            answer = dict(orjson.loads(text))
        except (TypeError, ValueError):
            answer = {"failure_kind": "no JSON object", "failure_reason": f"{text:.500}"}
        if answer.get("mask_sample") or not isinstance(answer.get("reward"), int | float):
            why = f"{answer.get('failure_kind')}: {answer.get('failure_reason')}"
            raise Infrastructure(f"{NAME}: {self._client.base_url}/verify: no valid reward: {why}")
        known = {*self._row, "reward", "mask_sample"}
        numbers = {k: v for k, v in answer.items() if k not in known and isinstance(v, int | float)}
        if isinstance(components := answer.get("reward_components"), dict):
            numbers |= {k: v for k, v in components.items() if isinstance(v, int | float)}
        return Scores(answer["reward"], metrics=dict(islice(numbers.items(), MAX_METRICS)))

    async def close(self) -> None:
        """Close the session, if the server can close those of cookies."""
        if self._closes:
            await self._post("/close_session")

    async def _post(
        self, path: str, body: Any = None, accepted: range = range(200, 201)
    ) -> tuple[int, str]:
        """Send a request; return the status and the response.

        Raises:
            Infrastructure: the server is unreachable, or its status is not an accepted one.
        """
        cookie = ";".join(f"{name}={value}" for name, value in self._cookies.items())
        headers = {"cookie": cookie} if cookie else {}
        request = self._client.build_request("POST", path, body, headers)
        server = f"{NAME}: the server at {self._client.base_url}"
        where, end = f"{server}: POST {path}", time.monotonic() + self._seconds
        # Not twice, even if the connection failed: the server may have made the call.
        response = await self._client.send(request, where, end, retries=0, wait_if_busy=False)
        for header in response.cookies:
            name, _, value = header.decode("latin-1").partition(";")[0].partition("=")
            self._cookies[name] = value
        text = response.body.decode("utf-8", "replace")
        if response.status not in accepted:
            raise Infrastructure(f"{server} answered {response.status} to POST {path}: {text:.500}")
        return response.status, text


def response_of(messages: Sequence[Message], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the conversation after the prompt as a response of OpenAI's Responses API.

    It has the items that `simple_agent` records. A malformed call is a part of the text.
    """
    items: list[dict[str, Any]] = []
    numbers = count()
    waiting: list[str] = []
    """The ids of the calls whose results follow; "" for malformed calls."""
    for message in messages:
        if message.role == "assistant":
            waiting = ["" if c.error else f"call_{next(numbers)}" for c in message.tool_calls]
            items += _turn_items(message, waiting, len(items))
        elif message.role == "tool" and waiting and (call_id := waiting.pop(0)):
            result = {"call_id": call_id, "output": message.content}
            items.append({"type": "function_call_output", **result})
    head = {"id": "resp_0", "object": "response", "created_at": 0.0, "model": "agentrl"}
    defaults = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    params = row["responses_create_params"]
    chosen = {name: params[name] for name in defaults if params.get(name)}
    return {**head, **defaults, **chosen, "output": items}


def _turn_items(message: Message, call_ids: Sequence[str], index: int) -> Iterator[dict[str, Any]]:
    """Yield the items of a turn: its reasoning, its text before the calls, and its calls."""
    calls = [(c, i) for c, i in zip(message.tool_calls, call_ids, strict=True) if i]
    end = min([c.span[0] if c.span else 0 for c, _ in calls], default=len(message.content))
    thought, _, text = message.content[:end].rpartition("</think>")
    thought, text = thought.replace("<think>", "").strip(), text.strip()
    if thought:
        summary = [{"type": "summary_text", "text": thought}]
        yield {"type": "reasoning", "id": f"rs_{index}", "summary": summary}
    if text or not (thought or calls):
        item = {"type": "message", "id": f"msg_{index}", "role": "assistant", "status": "completed"}
        yield {**item, "content": [{"type": "output_text", "text": text, "annotations": []}]}
    for call, call_id in calls:
        function = {"name": call.name, "arguments": orjson.dumps(call.arguments).decode()}
        yield {"type": "function_call", "call_id": call_id, **function}


def schemas_of(params: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Return the schemas of the tools that a row offers, by their names.

    Raises:
        DataError: a tool is not one of the resources server.
    """
    schemas: dict[str, dict[str, Any]] = {}
    for tool in params.get("tools") or []:
        if tool.get("type") != "function":
            raise _unsupported(where, f"the built-in tool {tool.get('type')}")
        # The name is the path of a request.
        if not re.fullmatch(r"[A-Za-z0-9_-]+", str(tool.get("name"))) or tool["name"] in ROUTES:
            raise _unsupported(where, f"a tool with the name {tool.get('name')!r}")
        parameters = tool.get("parameters") or {"type": "object", "properties": {}}
        texts = {"name": tool["name"], "description": tool.get("description") or ""}
        schema = {"type": "function", "function": {**texts, "parameters": parameters}}
        schemas[tool["name"]] = schema
    return {} if params.get("tool_choice") == "none" else schemas


def prompt_of(params: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    """Return the prompt of a row.

    Raises:
        DataError: it has something else than texts.
    """
    others = [name for name in PROMPT_FIELDS if params.get(name)]
    others += [f"metadata.{k}" for k in params.get("metadata") or () if k.startswith("audio")]
    others += ["tool_choice"] if params.get("tool_choice") not in (None, "auto", "none") else []
    others += [] if params.get("input") else ["an empty input"]
    if others:
        raise _unsupported(where, ", ".join(others))
    items = params["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    messages = [_message(item, f"{where}: input[{i}]") for i, item in enumerate(items)]
    if instructions := params.get("instructions"):
        if messages and messages[0]["role"] == "system":  # Many models have only one.
            instructions += f"\n\n{messages.pop(0)['content']}"
        messages.insert(0, {"role": "system", "content": instructions})
    return messages


def _message(item: Mapping[str, Any], where: str) -> dict[str, str]:
    if item.get("type") not in (None, "message"):
        raise _unsupported(where, f"a prompt with a {item['type']}")
    content = item.get("content") or ""
    parts = [{"text": content}] if isinstance(content, str) else content
    if others := [part.get("type") for part in parts if "text" not in part]:
        raise _unsupported(where, f"a prompt with {others[0]}")
    role = "system" if item.get("role") == "developer" else str(item.get("role"))
    return {"role": role, "content": "".join(part["text"] for part in parts)}


def _unsupported(where: str, what: str) -> DataError:
    return DataError(f"{where} has {what}. agentrl cannot play this row: remove it")


def read_gym_rows(pattern: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of files of NeMo Gym, each with its place for messages.

    Raises:
        DataError: a file cannot be read, or it has another format.
    """
    for path in sorted(glob(pattern)) or [pattern]:
        for i, row in enumerate(read_rows(path)):
            if not isinstance(row.get("responses_create_params"), dict):
                raise DataError(f"{path}, row {i}: no row of NeMo Gym: no responses_create_params")
            yield f"{path}, row {i}", row


def rows(address: str) -> list[Mapping[str, Any]]:
    """Return the rows of `nemo-gym:FILE?environment=NAME`."""
    path, options = read_address(address, {"environment": ""}, only=True)
    if not (alias := options["environment"]):
        raise UserError(f"{address} names no server of environments: add ?environment=ALIAS")
    constant = {"data_source": f"{NAME}/{alias}", "environment": alias}
    made = []
    for where, row in read_gym_rows(path):
        schemas_of(row["responses_create_params"], where)
        prompt = prompt_of(row["responses_create_params"], where)
        made.append({"prompt": prompt, **constant, "environment_kwargs": {"row": row}})
    return made


def _read_schemas(pattern: str) -> dict[str, dict[str, Any]]:
    """Return the schemas of all tools in the rows of files."""
    schemas: dict[str, dict[str, Any]] = {}
    for where, row in read_gym_rows(pattern):
        for name, schema in schemas_of(row["responses_create_params"], where).items():
            if schemas.setdefault(name, schema) != schema:
                raise DataError(
                    f"{where}: another schema of the tool {name} than in a row before it. Split the"
                    " rows into files, with an environment for each"
                )
    return schemas


def load(alias: str, address: str) -> None:
    """Register the environment at `nemo-gym://HOST:PORT?rows=FILE&timeout=600` under its alias."""
    if "//" not in address:  # These are rows, which name a server of `environments`.
        return
    part, options = read_address(address, {"rows": "", "timeout": 600}, only=True)
    url = part if "://" in part else f"http:{part}"
    where = f"environments.{alias}: {url}"
    try:
        _, api = fetch_json(url, "/openapi.json", timeout=30.0)
    except Infrastructure as e:
        raise UserError(f"{where} does not answer ({e}). Start the resources server") from None
    paths = api.get("paths") if isinstance(api, dict) else None
    if not isinstance(paths, dict) or not {"/seed_session", "/verify"} <= {*paths}:
        raise UserError(f"{where} needs POST /seed_session and /verify. It has: {[*(paths or ())]}")
    # A required body has ids that only servers of the package have.
    closing = paths.get("/close_session", {}).get("post", {}).get("requestBody", {"required": True})
    schemas = _read_schemas(options["rows"]) if options["rows"] else {}
    attributes: dict[str, Any] = {"_client": HttpClient(url), "_schemas": schemas}
    attributes |= {"_seconds": options["timeout"], "_closes": not closing.get("required")}
    record = environment_of_schemas(
        alias,
        type(alias, (ResourcesServer,), attributes),
        [*schemas.values()],
        where,
        timeout=2 * options["timeout"],  # So long that the request's deadline ends first.
        hooks=("start", "reward", "close"),
        constructor_injected=("sample",),
    )
    tools.add(alias, record)


DOOR = Door(NAME, "resources servers of NeMo Gym, and their rows", load, rows)
