"""DQN on CartPole in plain torch (Mnih et al., 2015): replay, a target network, epsilon-greedy.

    python examples/cartpole/dqn.py --steps 40000

DQN learns the values of actions from old experience. Language models are trained with PPO and
related algorithms instead, which need no maximum over all possible texts.
"""

from __future__ import annotations

import argparse
import time
from collections import deque

import gymnasium
import numpy as np
import torch
from torch import nn

MEMORY, BATCH = 20_000, 64
WARM_UP, EVERY = 1_000, 2  # steps at random; steps between two updates
GAMMA, LR, TAU = 0.99, 5e-4, 0.005
EPSILON, EXPLORED = (1.0, 0.04), 10_000  # first and last value; the number of steps between them


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
    )


def train(steps: int, seed: int = 0, log: int = 5_000) -> list[tuple[int, float]]:
    """Train a Q-network. Return pairs of a step and the mean length of the last 20 episodes."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    chance = np.random.default_rng(seed)
    env = gymnasium.make("CartPole-v1")
    q, target = network(), network()
    target.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=LR)
    # State, action, reward, next state, whether the pole fell; the oldest entries are overwritten.
    memory = [np.zeros((MEMORY, n), np.float32) for n in (4, 1, 1, 4, 1)]
    lengths, curve = deque(maxlen=20), []
    state, _ = env.reset(seed=seed)
    length = 0
    for step in range(steps):
        share = min(1.0, step / EXPLORED)
        if step < WARM_UP or chance.random() < EPSILON[0] + share * (EPSILON[1] - EPSILON[0]):
            action = int(chance.integers(2))
        else:
            with torch.no_grad():
                action = int(q(torch.as_tensor(state)).argmax())
        after, reward, fell, out_of_time, _ = env.step(action)
        for column, value in zip(memory, (state, action, reward, after, fell), strict=True):
            column[step % MEMORY] = value
        state, length = after, length + 1
        if fell or out_of_time:
            lengths.append(length)
            state, _ = env.reset()
            length = 0
        if step >= WARM_UP and step % EVERY == 0:
            rows = chance.integers(min(step + 1, MEMORY), size=BATCH)
            s, a, r, s2, over = (torch.from_numpy(column[rows]) for column in memory)
            with torch.no_grad():  # Double DQN: one network chooses, the other evaluates.
                best = q(s2).argmax(1, keepdim=True)
                goal = r + GAMMA * (1 - over) * target(s2).gather(1, best)
            loss = nn.functional.smooth_l1_loss(q(s).gather(1, a.long()), goal)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(q.parameters(), 10.0)
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), q.parameters(), strict=True):
                    slow.lerp_(fast, TAU)
        if (step + 1) % log == 0 or step == steps - 1:
            curve.append((step + 1, float(np.mean(lengths)) if lengths else float(length)))
            print(f"{curve[-1][0]:7d} steps: {curve[-1][1]:6.1f} a game", flush=True)
    env.close()
    return curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=0)
    args, started = parser.parse_args(), time.monotonic()
    train(args.steps, args.seed)
    print(f"{time.monotonic() - started:.0f} s")
