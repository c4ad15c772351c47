"""An environment of verifiers 0.4 (v1) in 20 lines."""

import verifiers.v1 as vf

__all__ = ["WordsTaskset"]


class WordData(vf.TaskData):
    answer: str


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.endswith(self.data.answer))


class WordsConfig(vf.TasksetConfig):
    count: int = 4


class WordsTaskset(vf.Taskset[WordTask, WordsConfig]):
    def load(self):
        for i in range(1, self.config.count + 1):
            yield WordTask(WordData(prompt=f"How long is {'a' * i}?", answer=str(i)))
