"""A scripted engine whose requests fail, and rows for it."""

from agentrl.engine.base import Sampling
from agentrl.engine.scripted import Scripted
from agentrl.errors import EngineError
from agentrl.testing import byte_tokenizer
from agentrl.trajectory import Message, Sample

TOKENIZER = byte_tokenizer()


SAMPLING = Sampling()


class FailingEngine(Scripted):
    """A scripted engine whose first `failures` requests of chosen episodes fail."""

    def __init__(self, answers, failures=0, only=lambda episode_id: True):
        super().__init__(answers, TOKENIZER)
        self.left, self.only, self.begun, self.ended = failures, only, [], []

    def begin(self, episode_id):
        self.begun.append(episode_id)
        super().begin(episode_id)

    def end(self, episode_id):
        self.ended.append(episode_id)
        super().end(episode_id)

    async def generate(self, prompt_ids, sampling, *, episode_id, seed, deadline):
        if self.left and self.only(episode_id):
            self.left -= 1
            raise EngineError("engine http://127.0.0.1:1 is down")
        return await super().generate(
            prompt_ids, sampling, episode_id=episode_id, seed=seed, deadline=deadline
        )


def rows(n, loop="tool_agent", **fields):
    return [
        Sample(
            f"r{i}",
            (Message("user", f"How much is 3*4+{i}?"),),
            agent_name=loop,
            data_source="openai/gsm8k",
            ground_truth=str(12 + i),
            tools=("calculator",) if loop != "single_turn" else (),
            row=i,
            **fields,
        )
        for i in range(n)
    ]
