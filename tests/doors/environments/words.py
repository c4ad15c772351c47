"""An environment of verifiers 0.3 (v0) in 20 lines."""

import verifiers as vf

from datasets import Dataset


def length(word: str) -> int:
    """Count the letters of a word.

    Args:
        word: the word
    """
    return len(word)


def load_environment(kind: str = "single", count: int = 4) -> vf.Environment:
    rows = [{"question": f"How long is {'a' * i}?", "answer": str(i)} for i in range(1, count + 1)]

    def right(completion, answer):
        return float(completion[-1]["content"].endswith(answer))

    arguments = {"dataset": Dataset.from_list(rows), "rubric": vf.Rubric(funcs=[right])}
    if kind == "tools":
        return vf.ToolEnv(tools=[length], max_turns=3, **arguments)
    return vf.SingleTurnEnv(**arguments) if kind == "single" else Asking(max_turns=3, **arguments)


class Asking(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Are you sure?"}]
