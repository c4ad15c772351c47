"""Tasks in Harbor's format, in the Python that has the package.

An episode is a `Trial` of Harbor: it starts the sandbox, checks its health, sets its network, runs
the agent, verifies, and cleans up. The Trial's agent is `Policy`, which runs the commands that
agentrl sends, or an agent of Harbor's.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import io
import re
import shlex
import shutil
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.environments.factory import EnvironmentFactory
from harbor.environments.podman import PodmanEnvironment
from harbor.models.agent.context import AgentContext
from harbor.models.agent.name import AgentName
from harbor.models.environment_type import EnvironmentType
from harbor.models.task.config import TaskOS
from harbor.models.task.task import Task
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.models.trial.result import TrialResult
from harbor.trial.hooks import TrialEvent, TrialHookEvent
from harbor.trial.trial import Trial
from serve import Refused, Unavailable, unknown

MAX_OUTPUT = 10_000
"""Characters of a command's output that the model reads: as many from the start as from the end."""
MAX_COMMAND = 100_000
"""Bytes of a command. Linux starts no program with an argument of more than 128 KiB."""
GRACE_SECONDS = 15
"""How much later than its time limit Harbor stops a command that its sandbox did not stop."""
PROBE_SECONDS = 60
START_SECONDS = 20.0
"""How long the end of an episode waits for a sandbox that still starts. A start that is cancelled
would leave its container behind."""
TIME_IS_UP = "[the task's time limit is over: no more commands are run]"


async def check(backend: str, options: dict[str, Any], folders: list[str]) -> None:
    """Raise an error if Harbor cannot use a backend here, or not for the tasks of some folders."""
    if backend not in (names := EnvironmentFactory.registered_names()):
        raise unknown("backend", backend, names)
    try:
        EnvironmentFactory.run_preflight(EnvironmentType(backend), kwargs=options)
        for folder in folders:
            # Some backends notice only here that a package is missing, or what a task asks for.
            with tempfile.TemporaryDirectory() as made:
                settings = {"task": _tasks(folder)[0], "backend": backend, "options": options}
                await Trial.create(_config(made, AgentConfig(name="nop"), **settings))
    except (Exception, SystemExit) as e:
        raise ValueError(f"the backend {backend} does not work here: {e}") from e
    if backend == "podman" and not PodmanEnvironment.runtime().supports_compose_project_directory:
        for path in (path for folder in folders for path in _tasks(folder)):
            _check_images(path)


def _check_images(task: Path) -> None:
    """Raise an error if podman-compose would remove an image of a task.

    Harbor ends a sandbox by `down --rmi local`. Docker Compose removes only images that it has
    built; podman-compose removes those whose names begin with localhost/, and the containers of
    other episodes that use them.
    """
    for file in (task / "task.toml", task / "environment/docker-compose.yaml"):
        text = file.read_text() if file.exists() else ""
        if found := re.search(r"image\s*[=:]\s*[\"']?localhost/([^\s\"']+)", text):
            raise ValueError(
                f"{file}: podman-compose removes the image localhost/{found[1]} at the end of an"
                " episode, because of its name. Use another one:"
                f" podman tag localhost/{found[1]} example.org/{found[1]}"
            )


def _config(
    folder: str,
    agent: AgentConfig,
    *,
    task: str | Path,
    backend: str,
    options: dict[str, Any],
    multiplier: float = 1.0,
) -> TrialConfig:
    """Return the settings of a Trial whose files are in a folder."""
    return TrialConfig(
        task=TaskConfig(path=Path(task)),
        trials_dir=Path(folder),
        agent=agent,
        agent_timeout_multiplier=multiplier,
        environment=EnvironmentConfig(type=EnvironmentType(backend), kwargs=options),
    )


def rows(folder: str, agent: str = "") -> list[tuple[str, str, str | None]]:
    """Return the path, the instruction and the solution of each task of a folder."""
    if agent:
        _find_agent(agent)
    found, problems = [], []
    for path in _tasks(folder):
        try:
            task = Task(path)
            problem = _problem(task, agent)
            found.append((str(path), task.instruction, _solution(task)))
        except Exception as e:
            problem = " ".join(str(e).split())
        if problem:
            problems.append(f"  {path.name}: {problem}")
    if problems:
        raise ValueError(f"tasks that cannot be played; remove them:\n{chr(10).join(problems)}")
    return found


def _tasks(folder: str) -> list[Path]:
    root = Path(folder)
    if (root / "task.toml").is_file():
        return [root]
    tasks = sorted(path.parent for path in root.glob("*/task.toml"))
    if not tasks:
        raise ValueError(f"{folder} has no task.toml, and no folder in it has one")
    return tasks


def _problem(task: Task, agent: str) -> str:
    """Return why a task cannot be played; "" if it can."""
    environment, verifier = task.config.environment, task.config.verifier.environment
    if task.has_steps:
        return "it has several steps ([[steps]])"
    if TaskOS.WINDOWS in (environment.os, verifier and verifier.os):
        return "it needs Windows"
    needs = {
        "skills": environment.skills_dir,
        "MCP servers": environment.mcp_servers,
        "the trajectory of another agent": task.paths.trajectory_path.exists(),
    }
    needed = [name for name, value in needs.items() if value and not agent]
    return f"it has {', '.join(needed)}, which only agents of Harbor's can use" if needed else ""


def _solution(task: Task) -> str | None:
    """Return a command that solves a task as Harbor's agent `oracle` does; None if there is none.

    The oracle also sets variables of [solution.env], which a command would show to readers of rows.
    """
    script = task.paths.discovered_solve_path_for(TaskOS.LINUX)
    if script is None or task.config.solution.env:
        return None
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(task.paths.solution_dir, "solution")
    data = base64.b64encode(packed.getvalue()).decode()
    command = f"echo {data} | base64 -d | tar xz -C / && bash /solution/{script.name}"
    return command if len(command) < MAX_COMMAND else None


class _Episode:
    """A Trial that runs."""

    def __init__(self):
        self.result: TrialResult | None = None
        """What Harbor has recorded so far."""
        self.running: asyncio.Task[TrialResult]
        self.ready = asyncio.Event()
        self.is_over = False
        """Whether no command is run any more."""
        self.calls: asyncio.Queue[tuple[str, int, asyncio.Future[str]] | None] = asyncio.Queue()
        self.waiting: set[asyncio.Future[str]] = set()

    async def run(self, config: TrialConfig) -> TrialResult:
        """Run the Trial, and remove its folder."""
        try:
            trial = await Trial.create(config)
            trial.add_hook(TrialEvent.START, self._begin)
            return await trial.run()
        finally:
            shutil.rmtree(config.trials_dir, ignore_errors=True)

    async def _begin(self, event: TrialHookEvent) -> None:
        self.result = event.result

    def has_finished(self, phase: str) -> bool:
        """Return whether a phase of the Trial has ended (a name in `TrialResult`)."""
        timing = getattr(self.result, phase, None)
        return bool(timing and timing.finished_at)

    async def until(self, event: asyncio.Future[Any]) -> None:
        """Wait for an event, or the end of the Trial."""
        try:
            await asyncio.wait([event, self.running], return_when=asyncio.FIRST_COMPLETED)
        finally:
            event.cancel()  # It does nothing to a result.

    def failure(self) -> Unavailable:
        """Return why a Trial that has ended has no reward."""
        if self.running.cancelled():
            return Unavailable("the episode was closed")
        if error := self.running.exception():
            return Unavailable(f"{type(error).__name__}: {error}")
        info = self.running.result().exception_info
        text = f"{info.exception_type}: {info.exception_message}" if info else "no reward"
        return Unavailable(text if len(text) < 4000 else f"{text[:1000]} ... {text[-3000:]}")

    async def stop(self) -> None:
        """End the Trial, and wait until its sandbox is stopped."""
        if not self.has_finished("verifier"):  # Otherwise Harbor stops the sandbox already.
            deadline = time.monotonic() + START_SECONDS
            while not (self.has_finished("environment_setup") or self.running.done()):
                if time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.05)
            self.running.cancel()
        await asyncio.wait([self.running])


class Policy(BaseAgent):
    """The Trial's agent: it runs the commands that agentrl sends."""

    def __init__(self, *args: Any, episode: str, **options: Any):
        super().__init__(*args, **options)
        self._episode = _episodes[episode]

    @staticmethod
    def name() -> str:
        """Return the name in Harbor's records."""
        return "agentrl"

    def version(self) -> str:
        """Return the version in Harbor's records."""
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        """Do nothing: all commands are the policy's."""

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Run commands until agentrl asks for the reward."""
        episode = self._episode
        episode.ready.set()
        try:
            while call := await episode.calls.get():
                command, seconds, answer = call
                work = asyncio.ensure_future(_execute(environment, command, seconds))
                # If the call is cancelled, so is the command.
                answer.add_done_callback(lambda _, work=work: work.cancel())
                try:
                    await asyncio.wait([work])
                finally:
                    work.cancel()
                if not answer.done():
                    if error := work.exception():
                        answer.set_exception(error)
                    else:
                        answer.set_result(work.result())
        finally:
            episode.is_over = True
            for answer in list(episode.waiting):
                if not answer.done():
                    answer.set_result(TIME_IS_UP)


async def _execute(environment: BaseEnvironment, command: str, seconds: int) -> str:
    """Run a command; return its output and how it ended."""
    run = f"bash -c {shlex.quote(command)}"
    # Harbor's time limit ends the client of the command only.
    limited = f"command -v timeout >/dev/null || exec {run}; exec timeout -k 5 {seconds} {run}"
    start = time.monotonic()
    output, code, error = "", 0, None
    try:
        done = await environment.exec(limited, timeout_sec=seconds + GRACE_SECONDS)
        output, code = "\n".join(filter(None, (done.stdout, done.stderr))), done.return_code
        output = output.replace("\r\n", "\n")  # podman-compose gives commands a terminal.
    except Exception as e:
        error = e
    is_late = time.monotonic() - start >= seconds
    if error or code:
        await _check_alive(environment, error or output)
    if error and not is_late:
        raise Unavailable(f"{type(error).__name__}: {error}")
    note = f"exit code {code}" if code else ""
    if error or (is_late and code in (124, 137)):
        note = f"timed out after {seconds} s"
    half = MAX_OUTPUT // 2
    if len(output) > MAX_OUTPUT:
        left_out = len(output) - 2 * half
        output = f"{output[:half]}\n[... {left_out} characters ...]\n{output[-half:]}"
    return "\n".join(filter(None, (output.strip("\n"), note and f"[{note}]"))) or "(no output)"


async def _check_alive(environment: BaseEnvironment, problem: Any) -> None:
    """Raise `Unavailable` if the sandbox runs no command any more."""
    try:
        done = await environment.exec("true", timeout_sec=PROBE_SECONDS)
    except Exception as e:
        raise Unavailable(f"the sandbox does not answer: {e}") from e
    if done.return_code:
        raise Unavailable(f"the sandbox does not answer: {problem}")


_episodes: dict[str, _Episode] = {}
_ending: set[asyncio.Task[None]] = set()


async def start(episode: str, **settings: Any) -> None:
    """Start an episode's sandbox, and wait until it takes commands."""
    agent = AgentConfig(import_path=f"{__name__}:Policy", kwargs={"episode": episode})
    state = _open(episode, agent, settings)
    await state.until(asyncio.ensure_future(state.ready.wait()))
    if not state.ready.is_set():
        raise state.failure()


def _open(episode: str, agent: AgentConfig, settings: dict[str, Any]) -> _Episode:
    state = _episodes[episode] = _Episode()
    config = _config(tempfile.mkdtemp(prefix="agentrl-harbor-"), agent, **settings)
    state.running = asyncio.create_task(state.run(config))
    return state


async def bash(episode: str, command: str, timeout_s: int) -> str:
    """Run a command in an episode's sandbox; return its output and how it ended."""
    state = _find(episode)
    try:
        size = len(command.encode())
    except UnicodeEncodeError:
        raise Refused("the command is no valid text") from None
    if size > MAX_COMMAND or "\0" in command:
        raise Refused(f"a command has at most {MAX_COMMAND} bytes, and no null character")
    if state.is_over:
        return TIME_IS_UP
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    state.waiting.add(answer)
    answer.add_done_callback(state.waiting.discard)
    state.calls.put_nowait((command, timeout_s, answer))
    await state.until(answer)
    if answer.cancelled():
        raise state.failure()
    return answer.result()


async def reward(episode: str) -> dict[str, Any]:
    """End the commands, and return the rewards of the verifier."""
    state = _find(episode)
    state.calls.put_nowait(None)
    return await _rewards(state)


async def _rewards(state: _Episode) -> dict[str, Any]:
    while not (state.has_finished("verifier") or state.running.done()):
        await asyncio.sleep(0.05)
    if state.result is None or not state.result.reward_valid:
        await asyncio.wait([state.running])  # Harbor records an error of the verifier late.
        raise state.failure()
    assert state.result.verifier_result
    rewards = {k: float(v) for k, v in (state.result.verifier_result.rewards or {}).items()}
    outcome = rewards.pop("reward" if "reward" in rewards else next(iter(rewards)))
    return {"outcome": outcome, "metrics": rewards}


async def agent(agent: str, url: str, key: str, model: str, **settings: Any) -> dict[str, Any]:
    """Let an agent of Harbor's play a task, and return the rewards of the verifier.

    Args:
        agent: an agent's name, or `file.py:Class` or `module:Class` of one.
        url: the API of the policy.
        key: its key, which only this episode has.
        model: its model.
        settings: those of `_config`.
    """
    variables = {
        **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), url),
        **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), key),
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
    }
    config = AgentConfig(name=_find_agent(agent), model_name=f"openai/{model}", env=variables)
    try:
        return await _rewards(_open(key, config, settings))
    finally:
        await end(key)


def _find_agent(agent: str) -> str:
    """Return the name or the import path of an agent. Raise an error if it does not exist."""
    file, colon, name = agent.rpartition(":")
    if not colon and agent not in AgentName.values():
        raise unknown("agent", agent, AgentName.values())
    if file.endswith(".py"):
        sys.path[:] = dict.fromkeys([str(Path(file).parent), *sys.path])
        getattr(importlib.import_module(Path(file).stem), name)
        agent = f"{Path(file).stem}:{name}"
    return agent


def _find(episode: str) -> _Episode:
    if episode not in _episodes:
        raise Unavailable("the sandbox was lost, because the process of the door ended")
    return _episodes[episode]


async def end(episode: str) -> None:
    """End an episode, and wait for its sandbox, which stops also if the wait is cancelled."""
    if state := _episodes.pop(episode, None):
        task = asyncio.create_task(state.stop())
        _ending.add(task)
        task.add_done_callback(_ending.discard)
        await asyncio.shield(task)


async def close() -> None:
    """Stop all sandboxes."""
    await asyncio.gather(*map(end, list(_episodes)), return_exceptions=True)
    while _ending:
        await asyncio.wait([*_ending])
