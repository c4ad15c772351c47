"""Write CartPole's rows, and conversations of somebody who pushes at random.

    python examples/cartpole/rows.py data/cartpole

A row is a start: the seed of the environment, and what is seen of it first. The conversations show
a model that has never seen the game what a game looks like, not how to play it.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from agentrl.data import write_rows
from agentrl.registry import load_file

ENVS = ("CartPole-v1",)
NAMES = ("left", "right")


def load_env() -> Any:
    return load_file(str(Path(__file__).with_name("env.py")))


def row(seed: int) -> dict[str, Any]:
    env = load_env()
    first = env.CartPole.first(seed, envs=ENVS)
    return {
        "prompt": f"{env.ASK}\n{first}",
        "agent_name": "tool_agent",
        "data_source": "cartpole",
        "interaction": "cartpole",
        "interaction_kwargs": {"seed": seed},
    }


def chat(seed: int, most: int = 50) -> dict[str, Any]:
    """A game of pushes at random, as a conversation."""
    import gymnasium

    ours, chance, env = load_env(), random.Random(seed), gymnasium.make(ENVS[0])
    observation, _ = env.reset(seed=seed)
    messages = [{"role": "user", "content": f"{ours.ASK}\n{ours.words(observation)}"}]
    for _ in range(most):
        action = chance.randrange(2)
        messages.append({"role": "assistant", "content": NAMES[action]})
        observation, _, fell, late, _ = env.step(action)
        if fell or late:
            break
        messages.append({"role": "user", "content": ours.words(observation)})
    env.close()
    return {"messages": messages[: len(messages) - (messages[-1]["role"] == "user")]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=400)
    parser.add_argument("--val", type=int, default=40)
    parser.add_argument("--chats", type=int, default=2000)
    given = parser.parse_args()
    write_rows(given.folder / "val.jsonl", [row(seed) for seed in range(given.val)])
    write_rows(given.folder / "train.jsonl", [row(1000 + i) for i in range(given.train)])
    write_rows(given.folder / "chats.jsonl", [chat(100_000 + i) for i in range(given.chats)])
    print(f"{given.train} rows, {given.val} of them to validate, {given.chats} conversations")


if __name__ == "__main__":
    main()
