"""PPO on CartPole in plain torch, with 8 environments in one process.

    python examples/cartpole/ppo.py --steps 60000

`agentrl train` with `algorithm.name=ppo` uses the same algorithm. There, the states are tokens
instead of four numbers, and an action is a token of the vocabulary instead of one of two pushes.
"""

from __future__ import annotations

import argparse
import time
from collections import deque

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

ENVS, HORIZON = 8, 128  # a batch is ENVS * HORIZON steps
EPOCHS, MINIBATCH = 4, 256
GAMMA, LAM, CLIP, LR = 0.99, 0.95, 0.2, 1e-3
ENTROPY, VALUE = 0.01, 0.5


def network(out: int, gain: float) -> nn.Sequential:
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, out)]
    for i, layer in enumerate(layers):
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, gain if i == len(layers) - 1 else 2**0.5)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def advantages(rewards: Tensor, values: Tensor, ends: Tensor, last: Tensor) -> Tensor:
    """Return GAE advantages (Schulman et al., 2016). All tensors are (T, N), `last` is (N,)."""
    result, ahead, next_value = torch.zeros_like(rewards), torch.zeros_like(last), last
    for t in reversed(range(len(rewards))):
        continues = 1.0 - ends[t]
        delta = rewards[t] + GAMMA * next_value * continues - values[t]
        result[t] = ahead = delta + GAMMA * LAM * continues * ahead
        next_value = values[t]
    return result


def train(steps: int, seed: int = 0, log: int = 10) -> list[tuple[int, float]]:
    """Train the actor and the critic.

    Returns:
        Pairs of a step and the mean length of the last 100 episodes.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    envs = gymnasium.make_vec("CartPole-v1", ENVS, vectorization_mode="sync",
                              vector_kwargs={"autoreset_mode": "SameStep"})  # fmt: skip
    policy, critic = network(2, 0.01), network(1, 1.0)
    parameters = [*policy.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=LR, eps=1e-5)
    observation, _ = envs.reset(seed=seed)
    lengths, running = deque(maxlen=100), np.zeros(ENVS)
    curve: list[tuple[int, float]] = []
    batches = max(1, steps // (ENVS * HORIZON))
    for batch in range(batches):
        optimizer.param_groups[0]["lr"] = LR * (1 - batch / batches)
        rows = []
        for _ in range(HORIZON):
            states = torch.as_tensor(observation, dtype=torch.float32)
            with torch.no_grad():
                dist = torch.distributions.Categorical(logits=policy(states))
                actions, values = dist.sample(), critic(states)[:, 0]
            observation, reward, terminated, truncated, info = envs.step(actions.numpy())
            gain = torch.as_tensor(reward, dtype=torch.float32)
            running += 1
            for i in np.flatnonzero(terminated | truncated):
                lengths.append(running[i])
                running[i] = 0
                if truncated[i]:  # The time is over, but the pole is up: bootstrap.
                    final = torch.as_tensor(info["final_obs"][i], dtype=torch.float32)
                    gain[i] += GAMMA * critic(final).detach()[0]
            ends = torch.as_tensor(terminated | truncated, dtype=torch.float32)
            rows.append((states, actions, dist.log_prob(actions), values, gain, ends))
        states, actions, old, values, rewards, ends = map(torch.stack, zip(*rows, strict=True))
        with torch.no_grad():
            last = critic(torch.as_tensor(observation, dtype=torch.float32))[:, 0]
        gae = advantages(rewards, values, ends, last)
        returns = gae + values
        flat = [x.flatten(0, 1) for x in (states, actions, old, gae, returns)]
        for _ in range(EPOCHS):
            for rows_ in torch.randperm(ENVS * HORIZON).split(MINIBATCH):
                s, a, lp, adv, ret = (x[rows_] for x in flat)
                now = torch.distributions.Categorical(logits=policy(s))
                ratio = (now.log_prob(a) - lp).exp()
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                surrogate = torch.min(ratio * adv, ratio.clamp(1 - CLIP, 1 + CLIP) * adv).mean()
                error = (critic(s)[:, 0] - ret).square().mean()
                loss = -surrogate + VALUE * error - ENTROPY * now.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
        if batch % log == log - 1 or batch == batches - 1:
            curve.append(((batch + 1) * ENVS * HORIZON, float(np.mean(lengths))))
            print(f"{curve[-1][0]:7d} steps: {curve[-1][1]:6.1f} a game", flush=True)
    envs.close()
    return curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args, started = parser.parse_args(), time.monotonic()
    train(args.steps, args.seed)
    print(f"{time.monotonic() - started:.0f} s")
