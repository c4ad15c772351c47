"""The agent loop `external`: the user's own agent plays the episode, as a process or a function.

The agent gets the address of APIs whose model is the policy, in variables that clients read:

    OPENAI_BASE_URL     the gateway
    OPENAI_API_KEY      a random key that names the episode's session
    ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, ANTHROPIC_MODEL  the same for Anthropic's API
    AGENTRL_SAMPLE      the row as JSON, without its ground truth; if it is long, the file
                        AGENTRL_SAMPLE_FILE contains it instead
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
import shlex
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from agentrl.agent_loops import Episode, agent_loop
from agentrl.agent_loops.control import EpisodeControl
from agentrl.chat.images import openai_message
from agentrl.config import AgentConfig
from agentrl.config.environment import hide_secrets
from agentrl.errors import ConfigError, DataError, Infrastructure, UserCodeError
from agentrl.gateway.requests import MODEL
from agentrl.gateway.session import Session
from agentrl.http.pool import slot_held
from agentrl.plural import plural
from agentrl.registry import load_function
from agentrl.sandbox.box import INSIDE
from agentrl.signatures import find_argument_problems
from agentrl.trajectory import Sample, Scores
from agentrl.workers import LoopThread, PerLoop, Threads
from agentrl.workers.child_process import ChildProcess

if TYPE_CHECKING:
    from agentrl.gateway.serve import Gateway

OVER_SECONDS = 5.0
"""The time that an agent has to end after its episode is over. Then its process is killed."""
STOP_SECONDS = 10.0
"""The time to kill all processes of an agent."""
BASE_URLS = "OPENAI_BASE_URL or ANTHROPIC_BASE_URL"
"""The variables with the address of the gateway. An agent may use either."""
WARDEN = INSIDE / "warden.py"
ALLOWED_VARIABLES = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV", "CONDA_PREFIX",
    "LD_LIBRARY_PATH", "PYTHONPATH", "SSL_CERT_FILE",
)  # fmt: skip
"""The environment variables of this process that every agent gets; `agent.env` adds others."""
MAX_VARIABLE_BYTES = 100_000
"""The longest AGENTRL_SAMPLE. Linux starts no program with a variable of more than 128 KiB."""
MACHINE_CODES = (75, 137, 143)
"""The exit codes of an agent that failed without a mistake of the policy: EX_TEMPFAIL, which the
agent itself chooses, and those of a shell whose program was killed (SIGKILL, SIGTERM)."""
SHOWN_LINES = 8
"""The number of last lines of a failed agent's output that a message contains."""


def describe_sample(sample: Sample, keys: Collection[str] = ()) -> dict[str, Any]:
    """Return a row as its agent sees it, without its ground truth.

    Args:
        sample: the row.
        keys: the keys of its `extra` that the agent gets (`agent.extra_info`).

    Raises:
        DataError: one of them has a value that JSON cannot hold.
    """
    extra = {key: sample.extra[key] for key in keys if key in sample.extra}
    for path, value in replace(sample, extra=extra).find_non_json("extra"):
        raise DataError(
            f"row {sample.row} (id {sample.id!r}), {path}: is {value!r:.60}, which JSON cannot"
            " hold, so agents cannot get it. Write it as a text, or remove its key from"
            " agent.extra_info"
        )
    return {
        "id": sample.id,
        "row": sample.row,
        "data_source": sample.data_source,
        "prompt": [openai_message(message) for message in sample.prompt],
        "extra_info": extra,
    }


class Agent(ABC):
    """A user's agent that plays one episode."""

    @abstractmethod
    async def run(self) -> None:
        """Run the agent until it ends. If this is cancelled, the agent is stopped where possible.

        The thread of a function that is not async runs on until the function returns.

        Raises:
            UserCodeError: the agent failed.
        """

    def outcome(self) -> float | Scores | None:
        """Return the reward that the agent returned when it ended; None if it returned none."""
        return None

    def last_lines(self) -> str:
        """Return the end of the agent's output, for messages; "" if there is none."""
        return ""


class CommandAgent(Agent):
    """An agent in a process of its own (`agent.command`)."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        row: str,
        hidden: Collection[str] = (),
    ):
        """Prepare to start the process.

        Args:
            command: the program and its arguments.
            environment: all its environment variables but that of the row.
            row: the row as JSON.
            hidden: values that no message contains.
        """
        self._command, self._environment, self._row = command, environment, row
        self._hidden = hidden
        self._child: ChildProcess | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def on_end(child: ChildProcess) -> None:
            with contextlib.suppress(RuntimeError):  # The loop was closed.
                loop.call_soon_threadsafe(ended.set)

        with contextlib.ExitStack() as stack:
            row = {"AGENTRL_SAMPLE": self._row}
            if len(self._row.encode()) > MAX_VARIABLE_BYTES:
                folder = stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True))
                file = Path(folder, "sample.json")
                file.write_text(self._row, encoding="utf-8")
                row = {"AGENTRL_SAMPLE_FILE": str(file)}
            # The warden also ends processes that have left the process group (daemons, browsers).
            self._child = child = ChildProcess(
                [sys.executable, "-I", "-S", str(WARDEN), *self._command],
                stops_at_eof=True,
                environment={**self._environment, **row},
                inherits_environment=False,
                on_end=on_end,
            )
            try:
                await ended.wait()
            finally:
                await asyncio.shield(_host.get().threads.run(partial(child.stop, STOP_SECONDS)))

    @property
    def exit_code(self) -> int | None:
        """The exit code; None before the end. If a signal ended it: minus the signal's number."""
        return self._child.exit_code if self._child else None

    def last_lines(self) -> str:
        lines = [*self._child.tail][-SHOWN_LINES:] if self._child else []
        return hide_secrets("".join(f"\n  {line}" for line in lines), self._hidden)


class FunctionAgent(Agent):
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
        except (UserCodeError, Infrastructure):
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
    """The things that all agents of an event loop share: the gateways, threads, and slots."""

    def __init__(self):
        self._gateways: dict[str, Gateway] = {}
        self.threads = Threads(1024, "agent")
        self._slots: asyncio.Semaphore | None = None
        self._loop: LoopThread | None = None

    def gateway(self, address: str) -> Gateway:
        """Return the gateway that listens at an address of this machine."""
        from agentrl.gateway.serve import Gateway  # Its server takes long to import.

        return self._gateways.setdefault(address, Gateway(address))

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
"""The function that opens the session of an episode; `agentrl check agent` replaces it."""
_host: PerLoop[_Host] = PerLoop(_Host, _Host.close)


@agent_loop("external", uses_tools=False, uses_interaction=False, awaited=False)
async def external(ep: Episode) -> None:
    """Let the user's agent (`agent.command` or `agent.python`) play the episode."""
    config = EpisodeControl(ep).attempt.runtime.config.agent
    host = _host.get()
    slots = host.slots(config.slots) if has_slots(config) else contextlib.nullcontext()
    async with slot_held(slots):
        await play_agent(ep, partial(_make_agent, config, ep.sample), config)


async def play_agent(
    ep: Episode,
    make: Callable[[str, str], Agent],
    config: AgentConfig,
    address: str = "127.0.0.1",
) -> None:
    """Let an agent play an episode.

    Args:
        ep: the episode.
        make: returns the agent, given the URL of the API whose model is the policy, and its key.
        config: where the outcome comes from (`reward`), and what an error means (`on_error`).
        address: the address of this machine at which the API listens. An agent in a container
            cannot reach the default.

    Raises:
        Infrastructure: the engine, or something that the agent needs, failed.
        UserCodeError: the agent failed and the episode must be dropped.
    """
    control, gateway = EpisodeControl(ep), _host.get().gateway(address)
    session = open_session.get()(ep)
    async with gateway.session(session) as (url, key):
        agent = make(url, key)
        error = None
        try:
            await _run(agent, session)
        except UserCodeError as e:
            error = e
        except asyncio.CancelledError:
            if control.attempt.deadline <= time.monotonic() and not session.has_requests:
                seconds = control.attempt.runtime.config.rollout.timeout_s
                raise UserCodeError(
                    f"the agent sent no request to {BASE_URLS} within"
                    f" rollout.timeout_s={seconds:g}{_last_lines(agent)}"
                ) from None
            raise
        finally:
            await session.close()
        unknown_keys = gateway.unknown_keys
    _finish(control, config, session, agent, unknown_keys, error)


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
    control: EpisodeControl,
    config: AgentConfig,
    session: Session,
    agent: Agent,
    unknown_keys: int,
    error: UserCodeError | None,
) -> None:
    """Set the outcome of an episode whose agent has ended.

    Args:
        control: the control of the episode.
        config: the settings of the agent.
        session: its session.
        agent: its agent.
        unknown_keys: how many requests of all agents had no session's key.
        error: the error that its function raised, or why it was not started.

    Raises:
        Infrastructure: the engine failed.
        UserCodeError: the agent failed and the episode must be dropped, or it sent no request, or
            reported no reward.
    """
    if session.failure is not None:
        raise session.failure
    turns = control.attempt.turns
    is_over = session.is_over_budget
    code = agent.exit_code if isinstance(agent, CommandAgent) else 0
    if code and not is_over and (config.reward != "exit" or code != 1):
        # Summaries show the first line alone.
        lines = agent.last_lines().splitlines()
        cause = f": {lines[-1].strip()}" if lines else ", and printed nothing"
        error = UserCodeError(
            f"the agent exited with code {code}{cause}{_refusal(session)}{_last_lines(agent)}"
        )
    if error is not None:
        # Only an error right after an answer can be a mistake of the policy. With agent.reward=exit
        # the exit codes are the agent's own report, and those of failures are not 1.
        is_machines = config.reward == "exit" or (code or 0) < 0 or code in MACHINE_CODES
        if config.on_error == "drop" or is_machines or not (turns and session.is_answered):
            raise error
        control.fail(str(error))
        return
    if not turns and not is_over:
        known = "a request" if not session.has_requests else "an answer"
        keys = plural(unknown_keys, "request")
        raise UserCodeError(
            f"the agent ended without {known} to {BASE_URLS}"
            + _refusal(session)
            + (f"; {keys} had another key than the agent's" if unknown_keys else "")
            + _last_lines(agent)
        )
    if config.reward == "exit":
        control.set_outcome(float(code == 0))
    elif config.reward == "post":
        if not session.has_outcome and (outcome := agent.outcome()) is not None:
            control.set_outcome(outcome)
            session.has_outcome = True
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
    given = {name: None for name in FunctionAgent.PARAMETERS if name in accepted}
    if problems := find_argument_problems(function, given):
        choices = ", ".join(FunctionAgent.PARAMETERS)
        raise ConfigError(
            f"agent.python={config.python}: {problems[0]}. agentrl passes any of: {choices}"
        )


def has_slots(config: AgentConfig) -> bool:
    """Return whether `agent.slots` limits the agents: async functions are not limited."""
    return not (config.python and inspect.iscoroutinefunction(_function(config)))


def _function(config: AgentConfig) -> Callable[..., Any]:
    path, _, name = config.python.rpartition(":")
    return load_function(path, name, "agent.python")


def _make_agent(config: AgentConfig, sample: Sample, url: str, key: str) -> Agent:
    described = describe_sample(sample, config.extra_info)
    if config.python:
        arguments = {"sample": described, "base_url": url, "api_key": key, "model": MODEL}
        return FunctionAgent(_function(config), arguments)
    passed = {
        name: os.environ[name] for name in (*ALLOWED_VARIABLES, *config.env) if name in os.environ
    }
    return CommandAgent(
        shlex.split(config.command),
        passed
        | {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,  # The name in litellm, and in versions of openai before 1.
            "OPENAI_API_KEY": key,
            "OPENAI_MODEL": MODEL,
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),  # Its clients append /v1/messages.
            # Its client warns if ANTHROPIC_AUTH_TOKEN is set, too.
            "ANTHROPIC_API_KEY": key,
            "ANTHROPIC_MODEL": MODEL,  # for Claude Code
            "AGENTRL_REWARD_URL": f"{url}/reward",
        },
        json.dumps(described, ensure_ascii=False),
        hidden=[key, *(passed[name] for name in config.env if name in passed)],
    )
