"""The exceptions of agentrl, sorted by who causes them.

    AgentRLError
    ├── UserError                a mistake that the user can fix: one message, no traceback
    │   ├── ConfigError          a config key or value
    │   ├── DataError            a dataset file or row
    │   ├── TemplateError        a chat template that agentrl cannot train on
    │   └── RegistryError        a name that is unknown or registered twice
    ├── ToolError                a tool rejects its input: the model reads the message
    ├── Infrastructure           the engine, tool server, grader or sandbox failed: the episode is
    │   │                        retried, then dropped; it never gets a reward of 0
    │   ├── EngineError
    │   │   ├── RequestRefused   the request is invalid for every engine: dropped, not retried
    │   │   │   └── PromptTooLong  the prompt exceeds the engine's context length
    │   │   ├── EngineOverloaded the engine's queue is full
    │   │   ├── EngineDead       the engine's process ended; includes the tail of its log
    │   │   │   └── NoEngineLeft   no engine can be used any more: dropped, not retried
    │   │   └── InvalidEngineResponse  the engine's response is invalid
    │   ├── ChatRefused          the server of a judge or a simulated user rejects a request
    │   ├── ToolServerError
    │   │   └── SessionLost      the tool server was restarted during the episode
    │   ├── SandboxError         model-written code cannot be isolated, so it is not run
    │   └── GraderCrash          a grader's process died: out of memory, a segmentation fault
    ├── UserCodeError            a loop, interaction, tool constructor or reward of the user raised
    └── RunStopped               the run cannot continue (too many dropped episodes, a dead engine)

    EpisodeOver                  not an error: a budget is exhausted, and the episode ends
    Terminated                   not an error: SIGTERM has arrived; the command ends

A model's mistakes (malformed calls, unknown tools, bad arguments) are not exceptions: they become a
`ToolResult(ok=False)` that the model reads.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

_PACKAGE = os.path.dirname(__file__) + os.sep


class AgentRLError(Exception):
    """Base of all errors that agentrl raises on purpose."""


class Terminated(SystemExit):
    """SIGTERM has arrived. A command saves the same as after Ctrl-C, and exits with code 143."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class UserError(AgentRLError, ValueError):
    """A mistake of the user. The message names the value, the choices and the fix.

    The command line prints the message without a traceback. Subclasses: `ConfigError`, `DataError`,
    `TemplateError` and `RegistryError`, all in `agentrl.errors`.
    """


class ConfigError(UserError):
    """A config key or value is wrong."""


class DataError(UserError):
    """A dataset file or row is wrong; the message names file, row and field."""


class TemplateError(UserError):
    """A chat template would change sampled tokens when later turns are added."""


class RegistryError(UserError, LookupError):
    """A name is unknown or registered twice."""


class ToolError(AgentRLError):
    """A tool rejects its input. The model reads the message as the result of the call.

        raise ToolError("write two whole numbers and one of * + - between them")

    The call counts as failed, with the class `tool_error`, and the episode goes on.
    """


class Infrastructure(AgentRLError, RuntimeError):
    """The infrastructure failed: the episode is retried, then dropped, never rewarded with 0.

        raise Infrastructure("the database does not answer")

    Tools, interactions and rewards raise it if something that they need is down. If too many
    episodes are dropped, the run stops with the message.
    """


class EngineError(Infrastructure):
    """The inference engine failed or returned an invalid answer."""


class RequestRefused(EngineError):
    """The request is invalid: no engine can serve it, so it is not sent to another one."""


class PromptTooLong(RequestRefused):
    """The prompt has more tokens than the engine's context."""


class EngineOverloaded(EngineError):
    """The engine's queue is full at the moment."""


class EngineDead(EngineError):
    """The engine's process ended; the message contains the last lines of its log."""


class NoEngineLeft(EngineDead):
    """No engine can be used, and none will be started again; the message has the error of each."""


class InvalidEngineResponse(EngineError):
    """The engine's response is invalid: missing logprobs, NaN, an unknown weight version."""


class ChatRefused(Infrastructure):
    """The server of a judge or a simulated user rejects the length or content of a request."""


class ToolServerError(Infrastructure):
    """The tool server did not answer, or its answer is invalid."""


class SessionLost(ToolServerError):
    """The tool server does not know an episode (any more): it was restarted in the meantime."""


class SandboxError(Infrastructure):
    """Code cannot be run in isolation; the message says what to install or to allow."""


class GraderCrash(Infrastructure):
    """A grader's process died: the answer is not scored, and its reward is not set to 0."""


MISSING_AWAIT = "Write `await` before the call that makes the coroutine"


def missing_await(value: Any) -> str:
    """Return `. ` and `MISSING_AWAIT` if a value that user code returned is a coroutine, else "".

    The coroutine is closed, so that Python does not warn about it too.
    """
    if not isinstance(value, Coroutine):
        return ""
    value.close()
    return f". {MISSING_AWAIT}"


class UserCodeError(AgentRLError, RuntimeError):
    """A loop, interaction, tool constructor or reward of the user raised."""

    is_late: bool = False
    """True if a method of a tool or environment exceeded its time limit."""

    @classmethod
    def of(cls, what: str, error: BaseException) -> UserCodeError:
        """Return the error `WHAT raised TYPE: TEXT (FILE:LINE)`; raise it `from error`.

        FILE:LINE is the innermost frame of the traceback that is not in agentrl.
        """
        if isinstance(error.__cause__, StopIteration | StopAsyncIteration):
            error = error.__cause__  # Python raised a RuntimeError where the coroutine ended.
        frames = traceback.extract_tb(error.__traceback__)
        user_frames = [f for f in frames if not _is_ours(f)] or frames
        where = f" ({user_frames[-1].filename}:{user_frames[-1].lineno})" if user_frames else ""
        is_coroutine = isinstance(error, TypeError | AttributeError) and "'coroutine'" in str(error)
        advice = f". {MISSING_AWAIT}" if is_coroutine else ""
        return cls(f"{what} raised {type(error).__name__}: {error}{where}{advice}")


class RunStopped(AgentRLError, RuntimeError):
    """The run cannot continue; the message says why and what was saved."""


class EpisodeOver(BaseException):
    """A budget of the episode is exhausted, so the episode ends.

    Methods of `Episode` raise this exception, and `play_episode` catches it. It is not derived from
    `Exception`, so that a loop with `except Exception` does not continue the episode.
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def is_own_error(error: BaseException) -> bool:
    """Return whether agentrl raised the error on purpose, although user code called it.

    Such an error passes through user code unchanged: its message already says what to do. A
    `UserError` that the user's own code raises is not one, because only `UserCodeError` says where
    it was raised. Nor is a `ToolError`, which is a message for the model.
    """
    if isinstance(error, Infrastructure | UserCodeError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, UserError | RunStopped) and bool(frames) and _is_ours(frames[-1])


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_PACKAGE)


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Convert exceptions of the user's code in this block to `UserCodeError`.

    This includes a `SystemExit`, a `TimeoutError` and a `CancelledError` that the user's code
    raises. If the task itself is cancelled, the `CancelledError` is raised unchanged.

    Args:
        what: the name of the code, for the message.

    Raises:
        UserCodeError: the block raised anything but `EpisodeOver` or an error of agentrl's own
            (`is_own_error`).
    """
    import asyncio  # imported here because it takes a tenth of the time of `agentrl --help`

    try:
        yield
    except EpisodeOver:
        raise
    except asyncio.CancelledError as e:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise UserCodeError.of(what, e) from e
    except BaseException as e:
        if is_own_error(e):
            raise
        # contextlib raises the StopIteration again if it is the cause of a RuntimeError.
        raise UserCodeError.of(what, e) from None if isinstance(e, StopIteration) else e
