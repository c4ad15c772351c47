"""A rank class that sums its arguments over all ranks, to test how calls reach ranks."""

import os
import signal
import time

import torch
from torch import distributed

from agentrl.errors import ConfigError, UserError
from agentrl.learner.dispatch import BROADCAST, SPLIT, dispatch


class Adder:
    """A rank whose methods sum their arguments over all ranks.

    The constructor raises `ConfigError` on rank `refuses`.
    """

    def __init__(self, start=0.0, refuses=-1):
        distributed.init_process_group("gloo")
        self.rank = distributed.get_rank()
        if self.rank == refuses:
            raise ConfigError("this rank has no weights")
        self.total = torch.tensor(start, dtype=torch.float64)

    @dispatch(SPLIT)
    def add(self, share, times=1):
        total = share.double().sum() * times
        distributed.all_reduce(total)
        self.total += total
        return self.rank, share.shape[0], float(total)

    @dispatch(BROADCAST)
    def sum(self, value):
        total = torch.tensor(float(value))
        distributed.all_reduce(total)
        return float(total)

    @dispatch(BROADCAST)
    def rank_zero_total(self):
        return self.rank, float(self.total)

    @dispatch(SPLIT)
    def variables(self, names):
        return {name: os.environ.get(name) for name in names}, os.getcwd()

    @dispatch(BROADCAST)
    def raise_on(self, on):
        if self.rank == on:
            raise UserError("row 7 is broken")
        distributed.barrier()

    @dispatch(BROADCAST)
    def kill_on(self, on):
        if self.rank == on:
            os.kill(os.getpid(), signal.SIGKILL)
        distributed.barrier()

    @dispatch(BROADCAST)
    def sleep(self, seconds):
        time.sleep(seconds)
        return "slept"

    def private(self):
        raise AssertionError
