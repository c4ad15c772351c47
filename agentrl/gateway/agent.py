"""The agent loop `external`: the user's own agent plays the episode, as a process or a function.

The agent gets the address of an OpenAI-style API whose model is the policy:

    OPENAI_BASE_URL     the gateway
    OPENAI_API_KEY      a random key that names the episode's session
    AGENTRL_SAMPLE      the row as JSON, without its ground truth
    AGENTRL_REWARD_URL  where `agent.reward=post` expects {"reward": NUMBER}

Only the address has to change in the agent: `agentrl.gateway.session` finds out which tokens the
policy sampled for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from agentrl.agent_loops import Episode, agent_loop
from agentrl.config import AgentConfig
from agentrl.errors import ConfigError, UserCodeError
from agentrl.gateway.requests import MODEL
from agentrl.gateway.session import Session
from agentrl.http.pool import paused_time_limits
from agentrl.plural import plural
from agentrl.registry import load_function
from agentrl.signatures import find_argument_problems
from agentrl.trajectory import Sample
from agentrl.workers import LoopThread, PerLoop, Threads
from agentrl.workers.child_process import ChildProcess

OVER_SECONDS = 5.0
"""The time that an agent has to end after its episode is over. Then its process is killed."""
ALLOWED_VARIABLES = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV", "CONDA_PREFIX",
    "LD_LIBRARY_PATH", "PYTHONPATH", "SSL_CERT_FILE",
)  # fmt: skip
"""The environment variables of this process that every agent gets; `agent.env` adds others."""
SHOWN_LINES = 8
"""The number of last lines of a failed agent's output that a message contains."""


def describe_sample(sample: Sample) -> dict[str, Any]:
    """Return a row as its agent sees it: without the ground truth and its copies in `extra`."""
    extra: Any = dict(sample.extra)
    if sample.ground_truth is not None:
        extra = _without(extra, str(sample.ground_truth).strip())
    return {
        "id": sample.id,
        "row": sample.row,
        "data_source": sample.data_source,
        "prompt": [message.as_dict() for message in sample.prompt],
        "extra_info": extra,
    }


SOLUTION = re.compile(r"^####\s|\\boxed\{[^}]", re.MULTILINE)
"""The final answer in a worked solution, such as `extra_info.answer` of verl's rows of GSM8K."""


def _without(value: Any, truth: str) -> Any:
    """Return a JSON value without copies of the ground truth and worked solutions, at any depth."""

    def tells(value: Any) -> bool:
        return str(value).strip() == truth or (
            isinstance(value, str) and SOLUTION.search(value) is not None
        )

    if isinstance(value, Mapping):
        return {k: _without(v, truth) for k, v in value.items() if not tells(v)}
    if isinstance(value, list | tuple):
        return [_without(v, truth) for v in value if not tells(v)]
    return value


class Agent(ABC):
    """A user's agent that plays one episode."""

    @abstractmethod
    async def run(self) -> None:
        """Run the agent until it ends. If this is cancelled, the agent is stopped where possible.

        The thread of a function that is not async runs on until the function returns.

        Raises:
            UserCodeError: the agent failed.
        """

    def outcome(self) -> float | None:
        """Return the reward that the agent returned when it ended; None if it returned none."""
        return None

    def last_lines(self) -> str:
        """Return the end of the agent's output, for messages; "" if there is none."""
        return ""


class Command(Agent):
    """An agent in a process of its own (`agent.command`)."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        self._command, self._environment = command, environment
        self._child: ChildProcess | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def on_end(child: ChildProcess) -> None:
            with contextlib.suppress(RuntimeError):  # The loop was closed.
                loop.call_soon_threadsafe(ended.set)

        try:
            self._child = child = ChildProcess(
                self._command,
                environment=self._environment,
                inherits_environment=False,
                on_end=on_end,
            )
        except OSError as e:
            raise UserCodeError(f"agent.command: {self._command[0]!r} cannot be run: {e}") from None
        try:
            child.close_input()  # An agent that reads its input must not wait for it.
            await ended.wait()
        finally:
            child.kill()
            await asyncio.shield(_host.get().threads.run(self._stop))

    def _stop(self) -> None:
        """End the process, and those that have left its process group (daemons, browsers)."""
        assert self._child
        self._child.stop()
        _kill_with_variable("OPENAI_API_KEY", self._environment["OPENAI_API_KEY"])

    @property
    def exit_code(self) -> int | None:
        """The exit code; None before the end. If a signal ended it: minus the signal's number."""
        return self._child.exit_code if self._child else None

    def last_lines(self) -> str:
        lines = [*self._child.tail][-SHOWN_LINES:] if self._child else []
        return "".join(f"\n  {line}" for line in lines)


def _kill_with_variable(name: str, value: str) -> None:
    """Kill all processes that were started with an environment variable (Linux)."""
    wanted = f"{name}={value}".encode()
    killed: set[int] = set()
    count = -1
    while len(killed) > count:  # A process may have started another one in the meantime.
        count = len(killed)
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # It ended, or it belongs to another user.
                if wanted in path.read_bytes().split(b"\0"):
                    os.kill(pid := int(path.parent.name), signal.SIGKILL)
                    killed.add(pid)


class Function(Agent):
    """An agent that is a function of the user (`agent.python`).

    All async functions run on one event loop in a thread of their own. A function that blocks
    delays the other async functions, but no other part of the run. A function that is not async
    runs in a thread.
    """

    PARAMETERS: ClassVar[tuple[str, ...]] = ("sample", "base_url", "api_key", "model")

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]):
        accepted = inspect.signature(function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        self._call = partial(
            function, **{k: v for k, v in arguments.items() if takes_all or k in accepted}
        )
        self._is_async = inspect.iscoroutinefunction(function)
        self._returned: Any = None

    async def run(self) -> None:
        try:
            if self._is_async:
                work = _host.get().start(self._play())
                self._returned = await asyncio.wrap_future(work)
            else:
                self._returned = await _host.get().threads.run(self._call)
        except UserCodeError:
            raise
        except BaseException as e:
            task = asyncio.current_task()
            if isinstance(e, asyncio.CancelledError) and task and task.cancelling():
                raise
            raise UserCodeError.of("agent.python", e) from e

    async def _play(self) -> Any:
        try:
            return await self._call()
        except (SystemExit, KeyboardInterrupt) as e:
            # asyncio would end the event loop of all agents.
            raise UserCodeError.of("agent.python", e) from e

    def outcome(self) -> float | None:
        return self._returned


class _Host:
    """The things that all agents of an event loop share: the gateway, threads, and slots."""

    def __init__(self):
        from agentrl.gateway.serve import Gateway  # Its server takes long to import.

        self.gateway = Gateway()
        self.threads = Threads(1024, "agent")
        self._slots: asyncio.Semaphore | None = None
        self._loop: LoopThread | None = None

    def slots(self, number: int) -> asyncio.Semaphore:
        """Return the semaphore that limits how many agents run at the same time.

        Args:
            number: the limit (`agent.slots`); only the first call uses it.
        """
        self._slots = self._slots or asyncio.Semaphore(number)
        return self._slots

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Start an async function on an event loop that all of them share."""
        self._loop = self._loop or LoopThread("agents")
        return self._loop.submit(work)

    def close(self) -> None:
        """End the threads."""
        self.threads.close()
        if self._loop is not None:
            self._loop.stop(0.0)  # The garbage collector must not wait for agents that hang.


open_session: ContextVar[Callable[[Episode], Session]] = ContextVar("open_session", default=Session)
"""The function that opens the session of an episode; `agentrl gateway check` replaces it."""
_host: PerLoop[_Host] = PerLoop(_Host, _Host.close)


@agent_loop("external", uses_tools=False, uses_interaction=False, awaited=False)
async def external(ep: Episode) -> None:
    """Let the user's agent (`agent.command` or `agent.python`) play the episode."""
    config, host = ep.config.agent, _host.get()
    is_async = config.python and inspect.iscoroutinefunction(_function(config))
    slots = None if is_async else host.slots(config.slots)
    if slots is not None:
        with paused_time_limits():
            await slots.acquire()
    try:
        session = open_session.get()(ep)
        async with host.gateway.session(session) as (url, key):
            agent = _make_agent(config, ep.sample, url, key)
            try:
                await _run(agent, session)
            except asyncio.CancelledError:
                if ep.deadline <= time.monotonic() and not session.has_requests:
                    limit = ep.config.rollout.timeout_s
                    raise UserCodeError(
                        "the agent sent no request to OPENAI_BASE_URL within"
                        f" rollout.timeout_s={limit:g}{_last_lines(agent)}"
                    ) from None
                raise
            finally:
                await session.close()
            unknown_keys = host.gateway.unknown_keys
        _finish(ep, session, agent, config, unknown_keys)
    finally:
        if slots is not None:
            slots.release()


async def _run(agent: Agent, session: Session) -> None:
    """Run an agent until it ends, at most until `OVER_SECONDS` after its episode is over."""
    running = asyncio.create_task(agent.run())
    over = asyncio.create_task(session.over.wait())
    try:
        await asyncio.wait([running, over], return_when=asyncio.FIRST_COMPLETED)
        if not running.done() and session.failure is None:
            await asyncio.wait([running], timeout=OVER_SECONDS)
        if running.done() and not session.over.is_set():
            running.result()  # raises UserCodeError
    finally:
        over.cancel()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _last_lines(agent: Agent) -> str:
    """Return the end of the agent's output, for the end of a message."""
    return f"; its last lines:{lines}" if (lines := agent.last_lines()) else ""


def _finish(
    ep: Episode, session: Session, agent: Agent, config: AgentConfig, unknown_keys: int
) -> None:
    """Set the outcome of an episode whose agent has ended.

    Args:
        ep: the episode.
        session: its session.
        agent: its agent.
        config: the config of agents.
        unknown_keys: how many requests of all agents had no session's key.

    Raises:
        Infrastructure: the engine failed.
        UserCodeError: the agent failed, sent no request, or reported no reward.
    """
    if session.failure is not None:
        raise session.failure
    is_over = session.is_over_budget
    code = agent.exit_code if isinstance(agent, Command) else 0
    if code and not is_over and (config.reward != "exit" or code != 1):
        # Summaries show the first line alone.
        lines = agent.last_lines().splitlines()
        cause = f": {lines[-1].strip()}" if lines else ", and printed nothing"
        raise UserCodeError(
            f"the agent exited with code {code}{cause}{_refusal(session)}{_last_lines(agent)}"
        )
    if not ep.turns and not is_over:
        known = "a request" if not session.has_requests else "an answer"
        keys = plural(unknown_keys, "request")
        raise UserCodeError(
            f"the agent ended without {known} to OPENAI_BASE_URL"
            + _refusal(session)
            + (f"; {keys} had another key than OPENAI_API_KEY" if unknown_keys else "")
            + _last_lines(agent)
        )
    if config.reward == "exit":
        ep.set_outcome(float(code == 0))
    elif config.reward == "post":
        if not session.has_outcome and (outcome := agent.outcome()) is not None:
            session.set_outcome(outcome)
        if not session.has_outcome:
            raise UserCodeError(
                'the agent ended without its reward: send {"reward": NUMBER} to'
                f" AGENTRL_REWARD_URL (agent.reward=post){_refusal(session)}"
            )


def _refusal(session: Session) -> str:
    """Return the last request that was refused, for a message; "" if none was."""
    if not session.refusals:
        return ""
    last = session.refusals[-1]
    return f"; its last refused request ({last.status}): {last}"


def check_agent(config: AgentConfig) -> None:
    """Check that the agent of a config can be started.

    Raises:
        ConfigError: there is none, its program does not exist, the function does not fit, or a
            variable of `agent.env` is not set.
        UserError: its file does not load.
    """
    if not config.command and not config.python:
        raise ConfigError(
            "rows with agent_name external need an agent: set agent.command='python my_agent.py',"
            " or agent.python=my_agent.py:FUNCTION"
        )
    for name in config.env:
        if name not in os.environ:
            raise ConfigError(
                f"agent.env names {name}, but this environment variable is not set. Export it, or"
                " remove the name"
            )
    if config.command:
        program = shlex.split(config.command)[0]
        if shutil.which(program) is None:
            raise ConfigError(
                f"agent.command={config.command!r}: there is no program {program!r} (PATH is"
                f" {os.environ.get('PATH', '')})"
            )
        return
    function = _function(config)
    accepted = inspect.signature(function).parameters
    given = {name: None for name in Function.PARAMETERS if name in accepted}
    if problems := find_argument_problems(function, given):
        choices = ", ".join(Function.PARAMETERS)
        raise ConfigError(
            f"agent.python={config.python}: {problems[0]}. agentrl passes any of: {choices}"
        )


def _function(config: AgentConfig) -> Callable[..., Any]:
    path, _, name = config.python.rpartition(":")
    return load_function(path, name, "agent.python")


def _make_agent(config: AgentConfig, sample: Sample, url: str, key: str) -> Agent:
    described = describe_sample(sample)
    if config.python:
        arguments = {"sample": described, "base_url": url, "api_key": key, "model": MODEL}
        return Function(_function(config), arguments)
    passed = {
        name: os.environ[name] for name in (*ALLOWED_VARIABLES, *config.env) if name in os.environ
    }
    return Command(
        shlex.split(config.command),
        passed
        | {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,  # The name in litellm, and in versions of openai before 1.
            "OPENAI_API_KEY": key,
            "OPENAI_MODEL": MODEL,
            "AGENTRL_SAMPLE": json.dumps(described, ensure_ascii=False, default=str),
            "AGENTRL_REWARD_URL": f"{url}/reward",
        },
    )
