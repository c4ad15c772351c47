"""Ranks as local processes, without Ray: a minimal worker group."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from torch.distributed import TCPStore

from agentrl.learner.dispatch import Dispatch, dispatched_methods

MAKE = "make"
"""The call that makes the rank of each process."""
START_SECONDS = 60.0
SECONDS = 120.0
"""The time limits of the first call and of others, in seconds. Ranks that wait for each other for
ever fail the test."""


_idle: dict[int, tuple[list, list]] = {}
"""Pipes and processes of groups that were closed, by their size. The next group takes them."""
_stores: list[TCPStore] = []
"""The stores by which the processes have met. They last as long as the tests."""


class Processes:
    """A `RankGroup` (agentrl.learner.dispatch) whose ranks are processes that use gloo.

    A group takes the processes of one that was closed before, with their torch.distributed group.
    """

    def __init__(self, size: int, make: Callable[..., Any], *args: Any, start: str = "forkserver"):
        """Start them. `make(*args)` makes the rank in each process, and must be importable.

        `start` is a start method of `multiprocessing`. The default forks a process that has the
        learner imported: half a second of each rank. With "spawn" the libraries are imported
        under the environment of the moment.
        """
        self.size, self.reusable = size, start == "forkserver"
        if self.reusable and size in _idle:
            self.pipes, self.processes = _idle.pop(size)
        else:
            self.pipes, self.processes = _start(size, start)
        try:
            self.call(MAKE, make, *args)
        except TimeoutError:
            # Rarely, a process that was forked hangs before its first answer; where, it has written
            # to stderr. A spawned one shares no lock with the process that it is forked from.
            self.close()
            self.pipes, self.processes = _start(size, "spawn")
            self.call(MAKE, make, *args)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.call(name, *args, **kwargs)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        for rank, pipe in enumerate(self.pipes):
            pipe.send((rank, name, args, kwargs))
        answers = []
        for pipe in self.pipes:
            if not pipe.poll(START_SECONDS if name == MAKE else SECONDS):
                self.reusable = False
                raise TimeoutError(f"{name}: a rank does not answer")
            how, answer, error = pipe.recv()
            if error:
                self.reusable = False
                raise AssertionError(error)
            answers.append(answer)
        return answers if how is Dispatch.SPLIT else answers[0]

    def close(self) -> None:
        if self.reusable and self.size not in _idle:
            _idle[self.size] = self.pipes, self.processes
            return
        for process in self.processes:
            process.kill()
            process.join()


def _start(size: int, method: str) -> tuple[list, list]:
    """Start the processes of `size` ranks. Returns a pipe to each, and the processes."""
    context = multiprocessing.get_context(method)
    multiprocessing.set_forkserver_preload(
        [
            "torch.distributed.fsdp",
            "transformers.models.qwen2.modeling_qwen2",
            "peft",
            "agentrl.learner.rank",
        ]
    )
    pipes, processes = [], []
    # This process hosts the store: a port that is only chosen here may be taken by others.
    store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    _stores.append(store)
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, rank, size, store.port), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    return pipes, processes


def _serve(pipe: Any, rank: int, size: int, port: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    faulthandler.dump_traceback_later(START_SECONDS - 10, file=sys.__stderr__)
    import torch

    torch.set_num_threads(1)
    thing = None
    while True:
        try:
            index, name, positional, kwargs = pipe.recv()
            if name == MAKE:
                make, *arguments = positional
                thing, how, answer = make(*arguments), None, None
                faulthandler.cancel_dump_traceback_later()
            else:
                how = dispatched_methods(type(thing)).get(name)
                if how is Dispatch.SPLIT:
                    positional = (positional[0][index], *positional[1:])
                answer = getattr(thing, name)(*positional, **kwargs)
            pipe.send((how, answer, None))
        except EOFError:  # the tests have ended
            return
        except Exception:
            pipe.send((None, None, traceback.format_exc()))
