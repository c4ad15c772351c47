"""The games of TextArena for one player, in the Python that has the package."""

from __future__ import annotations

import platform
import random
import threading
from typing import Any

import textarena
from serve import Unavailable, unknown
from textarena.envs.registration import ENV_REGISTRY

# All games take their random numbers from one generator of the process. So each game keeps the
# state of its own, and makes its moves alone.
_generator = threading.Lock()
_games: dict[str, tuple[Any, Any]] = {}


def check(game: str) -> None:
    """Raise an error if there is no such game for one player."""
    games = {n.removesuffix("-raw") for n in ENV_REGISTRY if n.endswith("-raw")}
    if game not in games:
        raise unknown("game", game, games)
    try:
        textarena.make(f"{game}-raw").reset(num_players=1, seed=0)
    except SyntaxError as e:
        use = f"{platform.python_version()}: agentrl doors install textarena --python python3.12"
        raise ValueError(f"{game} has a SyntaxError ({e}). Use a newer Python than {use}") from e


def start(episode: str, game: str, seed: int) -> str:
    """Start a game, and return its first message."""
    env = textarena.make(f"{game}-raw")
    with _generator:
        env.reset(num_players=1, seed=seed)
        _games[episode] = env, random.getstate()
    return _seen(env)


def move(episode: str, text: str) -> dict[str, Any]:
    """Make a move: the game's answer, and its reward if it is over."""
    if episode not in _games:
        raise Unavailable("the game was lost, because its process ended")
    env, state = _games[episode]
    with _generator:
        random.setstate(state)
        done, _ = env.step(text)
        _games[episode] = env, random.getstate()
    if not done:
        return {"seen": _seen(env), "reward": None}
    rewards, info = env.close()
    # Games pay for what was reached before an invalid move, so that a policy could end one early.
    return {"seen": "", "reward": 0.0 if info[0]["invalid_move"] else float(rewards[0])}


def end(episode: str) -> None:
    """Forget a game."""
    _games.pop(episode, None)


def _seen(env: Any) -> str:
    """Return the game's messages since the last move."""
    _, observed = env.get_observation()
    return "\n".join(text for speaker, text, *_ in observed if speaker == -1)
