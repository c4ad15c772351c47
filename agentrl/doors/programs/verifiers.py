"""Environments of verifiers, in the Python that has the package.

Two kinds of environments exist: v0 (a module with `load_environment`; verifiers before 0.4), and v1
(a module with a `Taskset`). Both drive the episode themselves, with the policy as the model of an
OpenAI-style API, and score it with their own rubric.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import importlib.util
import inspect
import itertools
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from serve import Unavailable, check_options

POLICY_ERRORS = (
    "EmptyModelResponseError", "InvalidModelResponseError", "OverlongPromptError", "ToolError",
    "ToolParseError", "ToolCallError",
)  # fmt: skip
"""The errors of v0 that a policy makes. The rubric scores such an episode."""


async def rows(env: str, n: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the prompt of each task, with the environment's number of it.

    This function is async so that it runs in the main thread: v0 sets handlers of signals.
    """
    loaded = _load(env, json.dumps(options))
    return [{"index": i, "prompt": p} for i, p in zip(range(n), loaded.prompts(), strict=False)]


async def play(
    env: str, options: dict[str, Any], index: int, url: str, key: str, model: str
) -> dict[str, Any]:
    """Play a task, and return the outcome and the metrics of the rubric.

    Args:
        env: the environment.
        options: its arguments.
        index: the number of the task.
        url: the API of the policy.
        key: its key.
        model: its model.
    """
    return await _load(env, json.dumps(options)).play(index, url, key, model)


async def close() -> None:
    """Stop the servers of the environments."""
    for stack in _stacks:
        await stack.aclose()


_ADVICE = (
    ". For environments with load_environment (v0), install an older verifiers:"
    " agentrl doors install verifiers 'verifiers<0.4'"
)
_stacks: list[contextlib.AsyncExitStack] = []


@functools.cache
def _load(env: str, options: str) -> Any:
    module = env
    if env.endswith(".py"):
        path = Path(env)
        if not path.is_file():
            raise ValueError(f"no such file: {path}")
        sys.path.insert(0, str(path.parent))
        module = path.stem
    name = module.rsplit("/", 1)[-1].replace("-", "_")
    spec = importlib.util.find_spec(name)
    if spec is None and importlib.util.find_spec(f"verifiers.v1.tasksets.{name}") is None:
        raise ValueError(f"no environment {env!r}: no module {name} is installed")
    try:
        found = importlib.import_module(name) if spec else None
    except (ImportError, AttributeError) as e:
        is_new = importlib.util.find_spec("verifiers.legacy") is None
        raise ValueError(f"{env} cannot be imported: {e}{_ADVICE if is_new else ''}") from e
    if hasattr(found, "load_environment"):
        return _Classic(name, found.load_environment, json.loads(options))
    return _Taskset(module, json.loads(options))


def _text(content: Any) -> str:
    """Return the text of a message's content, which may be in parts."""
    if isinstance(content, str):
        return content
    parts = [part if isinstance(part, dict) else part.model_dump() for part in content or []]
    if any(part.get("type") != "text" for part in parts):
        raise ValueError(f"the prompt has content other than text: {parts!r:.200}")
    return "".join(part["text"] for part in parts)


_failures: contextvars.ContextVar[list[str]] = contextvars.ContextVar("failures")
"""The failures of servers during the rubric of the running episode."""


class _FailureHandler(logging.Handler):
    """Keeps the errors of a judge or of another server, which v0 only logs, and counts as 0."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the error that is handled at the moment, if a server failed."""
        import httpx
        import openai

        kinds = (ConnectionError, openai.APIError, httpx.TransportError)
        text = record.getMessage()
        error = sys.exc_info()[1] if text.startswith("Error calling reward function") else None
        while error is not None:
            # Status 400 may be caused by the policy: its text is too long for the judge.
            if isinstance(error, kinds) and not isinstance(error, openai.BadRequestError):
                _failures.get([]).append(f"{text}: {type(error).__name__}")
                return
            error = error.__cause__ or error.__context__


class _Classic:
    """An environment of v0."""

    def __init__(self, name: str, function: Any, options: dict[str, Any]):
        try:
            from verifiers.legacy.utils.env_utils import load_environment
        except ImportError:
            raise ValueError(f"{name} has load_environment{_ADVICE}") from None
        spec = inspect.getfullargspec(function)
        if not spec.varkw:
            check_options(options, dict.fromkeys([*spec.args, *spec.kwonlyargs]))
        self._env = load_environment(name, **options)
        logger, handler = logging.getLogger("verifiers"), _FailureHandler()
        if not any(isinstance(old, _FailureHandler) for old in logger.handlers):
            logger.addHandler(handler)
        self._dataset = self._env.get_dataset()

    def prompts(self) -> Any:
        """Yield the prompt of each task."""
        for row in self._dataset:
            yield [{"role": m["role"], "content": _text(m["content"])} for m in row["prompt"]]

    async def play(self, index: int, url: str, key: str, model: str) -> dict[str, Any]:
        """Play a task."""
        from openai import AsyncOpenAI
        from verifiers.legacy.clients import OpenAIChatCompletionsClient

        failures: list[str] = []
        _failures.set(failures)

        # The gateway answers when the policy has; a repeated request would be another turn.
        async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=None) as client:
            output = await self._env.run_rollout(
                self._dataset[index], OpenAIChatCompletionsClient(client), model, {}
            )
        error = output.get("error")
        if error and error["error"] not in POLICY_ERRORS:
            raise Unavailable(json.dumps(error, default=str)[:2000])
        if failures:
            raise Unavailable("; ".join(failures)[:2000])
        return {"outcome": output["reward"], "metrics": output["metrics"]}


class _Taskset:
    """An environment of v1. It has one agent, whose harness is a process for each episode."""

    def __init__(self, name: str, options: dict[str, Any]):
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.configs.env import default_agent_harness
        from verifiers.v1.runtimes import SubprocessConfig
        from verifiers.v1.utils import loaders

        harness, runtime = options.pop("harness", ""), options.pop("runtime", "subprocess")
        settings = loaders.taskset_config_type(name)
        known = {k: field.default for k, field in settings.model_fields.items() if k != "id"}
        if settings.model_config.get("extra") == "forbid":
            check_options(options, {**known, "harness": "", "runtime": ""})
        config = loaders.resolve_env_config({"taskset": {**options, "id": name}})
        agents = agent_config_fields(config)
        if len(agents) != 1:
            raise ValueError(f"{name} has the agents {', '.join(agents)}; one is supported")
        [role] = agents
        # The default harness `bash` runs the commands of the policy on this machine.
        own = default_agent_harness(name).id if agents[role].harness is None else ""
        chosen = {"id": harness or ("null" if own == "bash" else own)}
        fields = config.model_dump(exclude_unset=True)
        agent = {**fields.get(role, {}), "runtime": {"type": runtime}}
        if harness or own:
            agent["harness"] = chosen
        self._env = loaders.load_environment(loaders.resolve_env_config({**fields, role: agent}))
        [used] = self._env._harnesses.values()
        if used.EXECUTES_CODE and runtime == SubprocessConfig().type:
            raise ValueError(
                f"{name}: the harness {used.config.id} runs commands of the policy, and the runtime"
                " subprocess runs them on this machine. Choose runtime=docker, or harness=null"
            )
        self._tasks: list[Any] = []
        self._iterator = iter(self._env.taskset)
        self._serving: asyncio.Task[None] | None = None

    def prompts(self) -> Any:
        """Yield the prompt of each task."""
        for index in itertools.count():
            task = self._task(index)
            if task is None:
                return
            data, messages = task.data, []
            if data.system_prompt:
                messages.append({"role": "system", "content": data.system_prompt})
            if isinstance(data.prompt, str):
                messages.append({"role": "user", "content": data.prompt})
            else:
                messages += [
                    {"role": m.role, "content": _text(m.content)} for m in data.prompt or []
                ]
            yield messages

    def _task(self, index: int) -> Any:
        while len(self._tasks) <= index:
            task = next(self._iterator, None)
            if task is None:
                return None
            self._tasks.append(task)
        return self._tasks[index]

    async def play(self, index: int, url: str, key: str, model: str) -> dict[str, Any]:
        """Play a task."""
        from verifiers.v1.clients import EvalClientConfig, ModelContext
        from verifiers.v1.types import SamplingConfig

        self._serving = self._serving or asyncio.create_task(self._serve())
        await self._serving
        variable = f"AGENTRL_KEY_{key[-16:]}".replace("-", "_")
        os.environ[variable] = key
        try:
            client = EvalClientConfig(base_url=url, api_key_var=variable)
            context = ModelContext(client=client, model=model, sampling=SamplingConfig())
            episode = await self._env.run_episode(self._task(index), context)
        finally:
            del os.environ[variable]
        if not episode.ok:
            errors = [*episode.errors, *(e for t in episode.traces for e in t.errors)]
            raise Unavailable("; ".join(f"{e.type}: {e.message}" for e in errors)[:2000])
        [trace] = episode.traces
        return {"outcome": trace.reward, "metrics": {}}

    async def _serve(self) -> None:
        stack = contextlib.AsyncExitStack()
        _stacks.append(stack)
        await stack.enter_async_context(self._env.serving())
