"""DQN on CartPole with four processes that play, and one that learns: the parts of dqn.py, spread.

    python examples/cartpole/dqn_workers.py --steps 40000

Each worker plays an environment of its own with a copy of the Q-network. It returns the transitions
to the learner, which has the replay memory and sends its weights back (the actors of Nair et al.,
2015; in Ape-X, Horgan et al., 2018, each has an epsilon of its own and nobody waits). Here all wait
for each other, as in `agentrl train`: the learner calls the workers as one group, and a call
returns when the last worker is done. So a seed always gives the same curve.
"""

from __future__ import annotations

import os

import torch
from dqn import EVERY, WARM_UP, Curve, Learner, Player, Transitions, epsilon, main, network

from agentrl.cluster import open_placement
from agentrl.config import load_config
from agentrl.trainer.dispatch import BROADCAST, SPLIT, dispatch

WORKERS, STEPS = 4, 25  # a worker plays so many steps between two copies of the weights


class Worker:
    """A process that plays: a rank, in agentrl's words."""

    def __init__(self, seed: int):
        torch.set_num_threads(1)
        self.player = Player(1_000 * seed + int(os.environ["RANK"]))
        self.q = network()

    @dispatch(BROADCAST)  # all workers get the same weights
    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        self.q.load_state_dict(weights)

    @dispatch(SPLIT)  # each worker gets its own epsilon, and returns its own transitions
    def play(self, epsilon: float, steps: int) -> tuple[Transitions, list[int]]:
        return self.player.play(self.q, epsilon, steps)


def train(steps: int, seed: int = 0, log: int = 5_000) -> list[tuple[int, float]]:
    """Train with as many steps and updates, and the same epsilon, as `dqn.train`."""
    torch.set_num_threads(1)
    learner, curve = Learner(seed), Curve(steps, log)
    # With trainer.device=cpu, n_gpus_per_node counts processes. The workers load the files.
    keys = ["trainer.device=cpu", f"trainer.n_gpus_per_node={WORKERS}"]
    with open_placement(load_config(None, keys, {"files": [__file__]})) as placement:
        workers = placement.start_ranks(Worker, seed)
        for step in range(0, steps, WORKERS * STEPS):
            workers.load_weights(learner.q.state_dict())
            played = workers.play([epsilon(step)] * WORKERS, STEPS)
            for transitions, _ in played:
                learner.store(transitions)
            if step >= WARM_UP:
                for _ in range(WORKERS * STEPS // EVERY):
                    learner.update()
            curve.add(step + WORKERS * STEPS, [n for _, lengths in played for n in lengths])
    return curve.points


if __name__ == "__main__":
    main(train, __doc__ or "")
