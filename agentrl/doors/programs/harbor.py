"""Tasks in Harbor's format, in the Python that has the package.

An episode is a `Trial` of Harbor: it starts the sandbox, checks its health, sets its network, runs
the agent, verifies, and cleans up. The Trial's agent is `Policy`, which runs the commands that
agentrl sends, or an agent of Harbor's.
"""

from __future__ import annotations

import asyncio
import base64
import io
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
from harbor.models.agent.context import AgentContext
from harbor.models.agent.name import AgentName
from harbor.models.environment_type import EnvironmentType
from harbor.models.task.config import TaskOS
from harbor.models.task.task import Task
from harbor.models.trial.config import (
    AgentConfig,
    EnvironmentConfig,
    TaskConfig,
    TrialConfig,
)
from harbor.models.trial.result import TrialResult
from harbor.trial.hooks import TrialEvent, TrialHookEvent
from harbor.trial.trial import Trial

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


class Unavailable(Exception):
    """Something failed that is no mistake of the policy."""

    kind = "infrastructure"


class Refused(Exception):
    """The model's call cannot be run."""

    kind = "refused"


async def check(backend: str, options: dict[str, Any], folders: list[str]) -> None:
    """Raise an error if Harbor cannot use a backend here, or not for the tasks of some folders."""
    if backend not in EnvironmentFactory.registered_names():
        names = ", ".join(EnvironmentFactory.registered_names())
        raise ValueError(f"no backend {backend!r}. Harbor's backends: {names}")
    try:
        EnvironmentFactory.run_preflight(EnvironmentType(backend), kwargs=options)
        for folder in folders:
            # Some backends notice only here that a package is missing, or what a task asks for.
            with tempfile.TemporaryDirectory() as made:
                agent = AgentConfig(name=AgentName.NOP.value)
                await Trial.create(_config(made, _tasks(folder)[0], backend, options, agent))
    except (Exception, SystemExit) as e:
        raise ValueError(f"the backend {backend} does not work here: {e}") from e
    if backend == EnvironmentType.PODMAN.value:
        _check_images(folders)


def _config(
    folder: str,
    task: Path | str,
    backend: str,
    options: dict[str, Any],
    agent: AgentConfig,
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


def rows(folder: str, agent: str = "") -> list[dict[str, Any]]:
    """Return the path, the instruction and the solution of each task of a folder."""
    found, problems = [], []
    for path in _tasks(folder):
        try:
            task = Task(path)
            problem = _problem(task, agent)
        except Exception as e:
            problem = " ".join(str(e).split())
        if problem:
            problems.append(f"  {path.name}: {problem}")
            continue
        row = {"path": str(path), "prompt": task.instruction, "solution": _solution(task)}
        found.append(row)
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
    if TaskOS.WINDOWS in (environment.os, verifier.os if verifier else None):
        return "it needs Windows"
    if agent:
        return ""
    if task.paths.trajectory_path.exists():
        return "it continues the trajectory of another agent (trajectory.json)"
    if environment.mcp_servers:
        return "it has MCP servers, which only agents of Harbor's can use"
    if environment.skills_dir:
        return "it has skills, which only agents of Harbor's can use"
    return ""


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


def _check_images(folders: list[str]) -> None:
    """Raise an error if podman-compose would remove the image of a task.

    Harbor ends a sandbox by `down --rmi local`. Docker Compose removes only images that it has
    built; podman-compose removes those whose names begin with localhost/, and the containers of
    other episodes that use them.
    """
    from harbor.environments.podman import PodmanEnvironment

    if PodmanEnvironment.runtime().supports_compose_project_directory:
        return
    for path in (path for folder in folders for path in _tasks(folder)):
        file = path / "environment" / "docker-compose.yaml"
        compose = file.read_text() if file.exists() else ""
        for text in ((path / "task.toml").read_text(), compose):
            for line in text.splitlines():
                key, _, image = line.replace("=", ":", 1).partition(":")
                image = image.strip(" \"'")
                if key.strip() in ("docker_image", "image") and image.startswith("localhost/"):
                    name = image.removeprefix("localhost/")
                    raise ValueError(
                        f"{path}: podman-compose removes the image {image} at the end of an"
                        " episode, because its name begins with localhost/. Use another name:"
                        f" podman tag {image} example.org/{name}"
                    )


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

    async def until(self, *events: asyncio.Future[Any]) -> None:
        """Wait for the first event, or the end of the Trial."""
        await asyncio.wait([*events, self.running], return_when=asyncio.FIRST_COMPLETED)

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
        episode, answer = self._episode, None
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
            waiting = [answer, *(call[2] for call in _drain(episode.calls) if call)]
            for future in waiting:
                if future is not None and not future.done():
                    future.set_result(TIME_IS_UP)


def _drain(queue: asyncio.Queue[Any]) -> list[Any]:
    return [queue.get_nowait() for _ in range(queue.qsize())]


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


async def start(
    episode: str, task: str, backend: str, options: dict[str, Any], multiplier: float
) -> None:
    """Start an episode's sandbox, and wait until it takes commands."""
    agent = AgentConfig(import_path=f"{__name__}:Policy", kwargs={"episode": episode})
    state = _open(episode, task, backend, options, agent, multiplier)
    started = asyncio.ensure_future(state.ready.wait())
    try:
        await state.until(started)
    finally:
        started.cancel()
    if not state.ready.is_set():
        raise state.failure()


def _open(episode: str, *settings: Any) -> _Episode:
    state = _episodes[episode] = _Episode()
    config = _config(tempfile.mkdtemp(prefix="agentrl-harbor-"), *settings)
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
    state.calls.put_nowait((command, timeout_s, answer))
    try:
        await state.until(answer)
    finally:
        answer.cancel()  # It does nothing if there is a result.
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
    return {"reward": outcome, "metrics": rewards}


async def agent(
    episode: str,
    task: str,
    backend: str,
    options: dict[str, Any],
    multiplier: float,
    agent: str,
    url: str,
    key: str,
    model: str,
) -> dict[str, Any]:
    """Let an agent of Harbor's play a task, and return the rewards of the verifier.

    Args:
        episode: the episode.
        task: the folder of the task.
        backend: where its sandbox runs.
        options: the options of the backend.
        multiplier: of the agent's time limit.
        agent: an agent's name, or `file.py:Class` or `module:Class` of one.
        url: the API of the policy.
        key: its key.
        model: its model.
    """
    file, _, name = agent.rpartition(":")
    if file.endswith(".py"):
        sys.path[:0] = [folder for folder in [str(Path(file).parent)] if folder not in sys.path]
        agent = f"{Path(file).stem}:{name}"
    variables = {"OPENAI_BASE_URL": url, "OPENAI_API_BASE": url, "OPENAI_API_KEY": key}
    config = AgentConfig(name=agent, model_name=f"openai/{model}", env=variables)
    state = _open(episode, task, backend, options, config, multiplier)
    try:
        return await _rewards(state)
    finally:
        _end(episode)


def _find(episode: str) -> _Episode:
    if episode not in _episodes:
        raise Unavailable("the sandbox was lost, because the process of the door ended")
    return _episodes[episode]


async def end(episode: str) -> None:
    """End an episode. Its sandbox stops in the background."""
    _end(episode)


def _end(episode: str) -> None:
    if state := _episodes.pop(episode, None):
        task = asyncio.create_task(state.stop())
        _ending.add(task)
        task.add_done_callback(_ending.discard)


async def close() -> None:
    """Stop all sandboxes."""
    for episode in list(_episodes):
        _end(episode)
    while _ending:
        await asyncio.wait([*_ending])
