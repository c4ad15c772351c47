"""An environment trains as its parts did: interaction and reward, in one class."""

import json

import pytest

from agentrl import load_config
from agentrl.demo import TINY_SETTINGS
from agentrl.store import TrajectoryStore
from agentrl.trainer import Trainer

GAME = """
from agentrl import Environment, Interaction, Reply, environment, interaction, reward


class Game:
    def __init__(self, secret: int):
        self.secret, self.guesses, self.won = secret, 4, False

    async def respond(self, messages):
        self.guesses -= 1
        _, mark, text = messages[-1].content.partition("####")
        if not mark or not text.strip().isdigit():
            return Reply("Answer with #### and a number.", done=True)
        guess = int(text)
        self.won = guess == self.secret
        hint = "Higher." if guess < self.secret else "Lower."
        return Reply(hint, score=float(self.won), done=self.won or self.guesses == 0)


@interaction("parts")
class Parts(Game, Interaction):
    pass


@reward("won")
def won(trajectory):
    return float(trajectory.turns[-1].rewards.get("turn", 0.0) == 1.0)


@environment("game")
class Whole(Game, Environment):
    async def reward(self):
        return float(self.won)
"""


def rows(kind):
    kwargs = {
        "parts": lambda secret: {"interaction": "parts", "interaction_kwargs": {"secret": secret}},
        "game": lambda secret: {"environment": "game", "environment_kwargs": {"secret": secret}},
    }[kind]
    prompt = [
        {"role": "system", "content": "Find the number. Answer with ####."},
        {"role": "user", "content": "I think of a number from 1 to 9. How many?"},
    ]
    return [{"prompt": prompt, "agent_name": "tool_agent", **kwargs(s)} for s in (3, 5, 7, 9)]


@pytest.mark.slow
def test_an_environment_has_the_tokens_and_the_curve_of_its_parts(
    own_registries, tmp_path, tiny_model
):
    file = tmp_path / "game.py"
    file.write_text(GAME)
    recorded = {}
    for kind in ("parts", "game"):
        data = tmp_path / f"{kind}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows(kind)))
        output = tmp_path / kind
        flags = {
            "data.train": str(data),
            "files": [str(file)],
            "model.path": str(tiny_model),
            "trainer.output": str(output),
            "reward.function": "won" if kind == "parts" else "",
        }
        overrides = [
            "data.batch_size=4", "rollout.n=4", "trainer.total_steps=2", "trainer.device=cpu",
            "tools.transport=http", "trainer.save_freq=never",
        ]  # fmt: skip
        Trainer(load_config(None, overrides, flags, preset=TINY_SETTINGS)).run()
        store = TrajectoryStore(output / "trajectories")
        played = [r.scored for step in (1, 2) for r in store.read(step)]
        recorded[kind] = (
            [(s.trajectory.segments, s.trajectory.messages, s.reward) for s in played],
            (output / "model/model.safetensors").read_bytes(),
        )
    assert len(recorded["game"][0]) == 32
    assert any(reward for *_, reward in recorded["game"][0])
    assert recorded["game"] == recorded["parts"]
