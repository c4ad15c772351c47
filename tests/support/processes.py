"""Ranks as local processes, without Ray: a minimal worker group."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

from torch.distributed import TCPStore

from agentrl.learner.dispatch import Dispatch, dispatched_methods

SECONDS = 120.0
"""The time limit of a call, in seconds. Ranks that wait for each other for ever fail the test."""


class Processes:
    """A `RankGroup` (agentrl.learner.dispatch) whose ranks are processes that use gloo."""

    def __init__(self, size: int, make: Callable[..., Any], *args: Any, start: str = "forkserver"):
        """Start them. `make(*args)` makes the rank in each process, and must be importable.

        `start` is a start method of `multiprocessing`. The default forks a process that has the
        learner imported: half a second of each rank. With "spawn" the libraries are imported
        under the environment of the moment.
        """
        context = multiprocessing.get_context(start)
        multiprocessing.set_forkserver_preload(
            [
                "torch.distributed.fsdp",
                "transformers.models.qwen2.modeling_qwen2",
                "peft",
                "agentrl.learner.rank",
            ]
        )
        self.size = size
        self.pipes, self.processes = [], []
        # This process hosts the store: a port that is only chosen here may be taken by others.
        self._store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, size, self._store.port, make, args), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.call("is_ready")

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.call(name, *args, **kwargs)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        for rank, pipe in enumerate(self.pipes):
            pipe.send((rank, name, args, kwargs))
        answers = []
        for pipe in self.pipes:
            assert pipe.poll(SECONDS), f"{name}: a rank does not answer"
            how, answer, error = pipe.recv()
            if error:
                raise AssertionError(error)
            answers.append(answer)
        return answers if how is Dispatch.SPLIT else answers[0]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(pipe: Any, rank: int, size: int, port: int, make: Callable[..., Any], args: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    import torch

    torch.set_num_threads(1)
    thing = made = None
    while True:
        index, name, positional, kwargs = pipe.recv()
        try:
            if thing is None:
                thing, made = make(*args), True
                ways = dispatched_methods(type(thing))
            how = ways.get(name)
            if name == "is_ready":
                answer = made
            else:
                if how is Dispatch.SPLIT:
                    positional = (positional[0][index], *positional[1:])
                answer = getattr(thing, name)(*positional, **kwargs)
            pipe.send((how, answer, None))
        except Exception:
            pipe.send((None, None, traceback.format_exc()))
