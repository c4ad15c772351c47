"""DQN on CartPole in plain torch (Mnih et al., 2015): replay, a target network, epsilon-greedy.

    python examples/cartpole/dqn.py --steps 40000

One process plays and learns. In dqn_workers.py four processes play, with the same parts. DQN learns
the values of actions from old experience. Language models are trained with PPO and related
algorithms instead, which need no maximum over all possible texts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable

import gymnasium
import numpy as np
import torch
from torch import nn

MEMORY, BATCH = 20_000, 64
WARM_UP, EVERY = 1_000, 2  # steps at random; steps between two updates
GAMMA, LR, TAU = 0.99, 5e-4, 0.005
EPSILON, EXPLORED = (1.0, 0.04), 10_000  # first and last value; the number of steps between them

Transitions = list[np.ndarray]
"""States (N, 4), actions, rewards (N, 1), next states (N, 4), whether the pole fell (N, 1)."""


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
    )


def epsilon(step: int) -> float:
    """Return the share of random actions."""
    share = min(1.0, step / EXPLORED)
    return 1.0 if step < WARM_UP else EPSILON[0] + share * (EPSILON[1] - EPSILON[0])


class Player:
    """An environment, and the game that is played in it."""

    def __init__(self, seed: int):
        self.chance = np.random.default_rng(seed)
        self.env = gymnasium.make("CartPole-v1")
        self.state, _ = self.env.reset(seed=seed)
        self.length = 0

    def play(self, q: nn.Module, epsilon: float, steps: int) -> tuple[Transitions, list[int]]:
        """Play some steps. Return their transitions, and the lengths of the games that ended."""
        rows, lengths = [], []
        for _ in range(steps):
            if self.chance.random() < epsilon:
                action = int(self.chance.integers(2))
            else:
                with torch.no_grad():
                    action = int(q(torch.as_tensor(self.state)).argmax())
            after, reward, fell, out_of_time, _ = self.env.step(action)
            rows.append((self.state, [action], [reward], after, [fell]))
            self.state, self.length = after, self.length + 1
            if fell or out_of_time:
                lengths.append(self.length)
                self.state, _ = self.env.reset()
                self.length = 0
        return [np.array(column, np.float32) for column in zip(*rows, strict=True)], lengths


class Learner:
    """The Q-network, its slow copy, and the replay memory."""

    def __init__(self, seed: int):
        torch.manual_seed(seed)
        self.chance = np.random.default_rng(seed)
        self.q, self.target = network(), network()
        self.target.load_state_dict(self.q.state_dict())
        self.optimizer = torch.optim.Adam(self.q.parameters(), lr=LR)
        self.memory = [np.zeros((MEMORY, n), np.float32) for n in (4, 1, 1, 4, 1)]
        self.stored = 0

    def store(self, transitions: Transitions) -> None:
        """Add transitions to the memory; they overwrite the oldest."""
        count = len(transitions[0])
        for column, values in zip(self.memory, transitions, strict=True):
            column[np.arange(self.stored, self.stored + count) % MEMORY] = values
        self.stored += count

    def update(self) -> None:
        """Take one optimizer step on random transitions of the memory."""
        rows = self.chance.integers(min(self.stored, MEMORY), size=BATCH)
        s, a, r, s2, over = (torch.from_numpy(column[rows]) for column in self.memory)
        with torch.no_grad():  # Double DQN: one network chooses, the other evaluates.
            best = self.q(s2).argmax(1, keepdim=True)
            goal = r + GAMMA * (1 - over) * self.target(s2).gather(1, best)
        loss = nn.functional.smooth_l1_loss(self.q(s).gather(1, a.long()), goal)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.q.parameters(), 10.0)
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.q.parameters(), strict=True):
                slow.lerp_(fast, TAU)


def train(steps: int, seed: int = 0, log: int = 5_000) -> list[tuple[int, float]]:
    """Train a Q-network. Return pairs of a step and the mean length of the last 20 episodes."""
    torch.set_num_threads(1)
    learner, player = Learner(seed), Player(seed)
    curve = Curve(steps, log)
    for step in range(0, steps, EVERY):
        transitions, lengths = player.play(learner.q, epsilon(step), EVERY)
        learner.store(transitions)
        if step >= WARM_UP:
            learner.update()
        curve.add(step + EVERY, lengths)
    return curve.points


class Curve:
    """Prints the mean length of the last 20 games at every `log` steps and at the last one."""

    def __init__(self, steps: int, log: int):
        self.steps, self.log, self.next = steps, log, log
        self.lengths: deque[int] = deque(maxlen=20)
        self.points: list[tuple[int, float]] = []

    def add(self, step: int, lengths: list[int]) -> None:
        self.lengths.extend(lengths)
        if step >= min(self.next, self.steps):
            self.next = step - step % self.log + self.log
            self.points.append((step, float(np.mean(self.lengths)) if self.lengths else 0.0))
            print(f"{step:7d} steps: {self.points[-1][1]:6.1f} a game", flush=True)


def main(train: Callable[[int, int], object], about: str) -> None:
    """Run a training with the arguments of the command line; Ctrl-C ends it."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=0)
    args, started = parser.parse_args(), time.monotonic()
    try:
        train(args.steps, args.seed)
    except KeyboardInterrupt:
        sys.exit(130)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main(train, __doc__ or "")
