"""Measure the cost of the agent loop, compared with a minimal hand-written loop in one process.

    python benchmarks/agent_loop.py                    # all cases: two minutes
    python benchmarks/agent_loop.py narrow_2k_64       # some of them
    python benchmarks/agent_loop.py --threads          # the tool is a plain function, in a thread

The engine returns prepared arrays at once (or after some milliseconds), and the tool returns a
prepared text. Everything else is as in a training run: `play_episode` with the template, parsing,
schemas, masks and all checks. Each row must have exactly the tokens of the minimal loop ("floor").

CPU time is the time of the whole process per generation, the minimum of the rounds. The contestants
alternate in each round. The wide cases use new texts in every round, so a cache of words only helps
with words of earlier texts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import uvloop
from workload import timing
from workload.conversations import TOOLS, Talk, narrow, passages, register_tools, wide
from workload.floor import Floor, Row
from workload.prepared import Prepared
from workload.tokenizer import workload_tokenizer

from agentrl.agent_loops.attempt import Runtime
from agentrl.agent_loops.play import play_episode
from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.engine.base import Sampling
from agentrl.player import collect_rarely
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Sample, Trajectory

ROUNDS = 5
Play = Callable[[Talk], Coroutine[Any, Any, Any]]


@dataclass(frozen=True)
class Case:
    """The shape and number of the conversations that are played at once."""

    name: str
    turns: int
    tool_words: int
    at_once: int
    engine_ms: float = 0.0


CASES = (
    Case("narrow_2k_64", 8, 90, 64),
    Case("narrow_2k_512", 8, 90, 512),
    Case("narrow_16k_32", 32, 380, 32),
    Case("wide_2k_64", 8, 90, 64),
    Case("wide_16k_32", 32, 380, 32),
    Case("narrow_2k_512_engine", 8, 90, 512, 250.0),
    Case("narrow_2k_1024_engine", 8, 90, 1024, 250.0),
)


class Agentrl:
    """Plays scripted conversations as a training run plays its samples."""

    def __init__(self, template: ChatTemplate, toolbox: LocalToolbox, case: Case):
        most = {"max_turns": case.turns + 1, "max_tool_calls": case.turns + 1}
        config = Config.model_validate({"rollout": {**most, "max_trajectory_tokens": 1 << 20}})
        self._talks: dict[str, Talk] = {}
        self._sampler = Prepared(self._talks.__getitem__, case.engine_ms / 1e3)
        self._runtime = Runtime(self._sampler, template, toolbox, config)
        self._played = 0

    async def play(self, talk: Talk) -> Trajectory:
        self._played += 1
        episode_id = f"e{self._played}"
        self._talks[episode_id] = talk
        self._sampler.begin(episode_id)
        sample = Sample(episode_id, talk.prompt, agent_name="tool_agent", tools=TOOLS)
        trajectory = await play_episode(
            self._runtime, sample, episode_id=episode_id, rollout=0, sampling=Sampling(), seed=0
        )
        return trajectory


def row_of(played: Trajectory | Row) -> Row:
    if isinstance(played, Row):
        return played
    assert played.stop_reason == "done", played.stop_reason
    [segment] = played.segments
    ids = segment.prompt_ids + segment.response_ids
    return Row(ids, len(segment.prompt_ids), segment.response_mask, segment.logprobs)


async def measure(case: Case, template: ChatTemplate, answers: dict[str, str], who: str) -> None:
    tokenizer, texts = template.tokenizer, passages()
    toolbox = LocalToolbox()
    floor = Floor(tokenizer, toolbox.schemas(TOOLS), case.engine_ms / 1e3)
    ours = Agentrl(template, toolbox, case)
    contestants: dict[str, Play]
    contestants = {"floor": floor.plain, "floor_cached": floor.cached, who: ours.play}
    rounds: dict[str, list[timing.Round]] = {name: [] for name in contestants}
    talks = narrow(tokenizer, case.turns, case.tool_words)
    expected: list[Row] = []
    for _ in range(3 if case.engine_ms else ROUNDS):
        if case.name.startswith("wide"):
            talks = wide(tokenizer, case.turns, case.tool_words, case.at_once, texts)
        answers.clear()
        answers.update(pair for t in talks for pair in zip(t.calls, t.results, strict=True))
        playing = [talks[i % len(talks)] for i in range(case.at_once)]
        for name, play in contestants.items():
            took = await timing.timed(play(talk) for talk in playing)
            rows = [row_of(r) for r in took.results]
            took.results.clear()
            if name == "floor":
                expected = rows
            assert rows == expected, f"{name}: other rows than the floor's"
            rounds[name].append(took)
    await toolbox.aclose()
    report(case, rounds, statistics.mean(len(row.ids) for row in expected), who)


def report(case: Case, rounds: dict[str, list[timing.Round]], tokens: float, who: str) -> None:
    generations = case.at_once * (case.turns + 1)
    context: dict[str, object] = {
        "at_once": case.at_once,
        "turns": case.turns,
        "tokens": round(tokens),
        "engine_ms": case.engine_ms,
        "loop": type(asyncio.get_running_loop()).__module__.partition(".")[0],
    }
    cpu = {name: [1e6 * r.cpu_s / generations for r in played] for name, played in rounds.items()}
    for name, played in rounds.items():
        figure, median = f"agent_loop/{case.name}/{name}", statistics.median(cpu[name])
        timing.print_figure(
            f"{figure}/cpu", min(cpu[name]), "us", median=round(median, 1), **context
        )
        timing.print_figure(
            f"{figure}/stall_p99", min(r.stall_p99_ms for r in played), "ms", **context
        )
        if case.engine_ms:
            ideal = (case.turns + 1) * case.engine_ms / 1e3
            timing.print_figure(
                f"{figure}/wall", min(r.wall_s for r in played) / ideal, "of ideal", **context
            )
    for name in ("floor", "floor_cached"):
        ratio = statistics.median(a / b for a, b in zip(cpu[who], cpu[name], strict=True))
        timing.print_figure(f"agent_loop/{case.name}/{who}_of_{name}", ratio, "ratio", **context)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=", ".join(c.name for c in CASES))
    parser.add_argument("--threads", action="store_true", help="the tool is a plain function")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    answers: dict[str, str] = {}
    register_tools(answers, threads=args.threads)
    template = ChatTemplate(workload_tokenizer())
    collect_rarely()
    factory = uvloop.new_event_loop if args.loop == "uvloop" else asyncio.new_event_loop
    who = "agentrl_threads" if args.threads else "agentrl"
    with asyncio.Runner(loop_factory=factory) as runner:
        for case in CASES:
            if not args.cases or case.name in args.cases:
                runner.run(measure(case, template, answers, who))


if __name__ == "__main__":
    main()
