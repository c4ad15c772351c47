"""Measure rollouts per second, compared with a minimal aiohttp loop on the same SGLang server.

    python benchmarks/sglang_rollouts.py                      # a GPU: some minutes
    python benchmarks/sglang_rollouts.py --device cpu --small --launch=--sleep-on-idle

256 trajectories of 8 turns run at once. Every turn has 64 sampled tokens, then an observation
follows. The model has the shape of Qwen2.5-0.5B, and all of its turns have that length
(`workload/models.py`). The minimal loop sends the same prompts, observations and request fields,
and keeps only the ids. The two alternate, the cache is flushed before each, and a ratio compares
two consecutive runs.

Needs aiohttp (`pip install aiohttp`).
"""

from __future__ import annotations

import asyncio
import os
import random
import shlex
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import orjson
import uvloop
from workload import serving
from workload.models import random_model
from workload.timing import cpu_seconds, print_figure

from agentrl.agent_loops import agent_loop
from agentrl.agent_loops.attempt import load_template
from agentrl.chat import load_tokenizer
from agentrl.config import Config, load_config
from agentrl.engine.base import Sampling
from agentrl.engine.open import open_engine
from agentrl.engine.remote.admin import AdminClient
from agentrl.engine.remote.launch import SGLangLaunch
from agentrl.engine.remote.open import ADMIN_TOKEN, TOKEN
from agentrl.metrics import rollout_metrics
from agentrl.rewards import Scorer, reward
from agentrl.rollout import Rollouts, open_rollouts
from agentrl.trajectory import Group, Message, Sample

OBSERVED = "Nothing more is known here; please continue."
"""64 tokens, including the 20 that the template writes around it: each byte is one token."""


@dataclass(frozen=True)
class Size:
    """The size of the workload."""

    prompts: int = 32
    n: int = 8
    turns: int = 8
    turn: int = 64
    prompt: int = 512
    rounds: int = 5
    shape: str = "0.5b"

    @property
    def tokens(self) -> int:
        """Return the number of sampled tokens in a round."""
        return self.prompts * self.n * self.turns * self.turn


@dataclass(frozen=True)
class Round:
    """The cost of playing all trajectories."""

    seconds: float
    cpu: float
    later_cached: float
    """The share of prompt tokens that the server had cached, in all turns but the first."""


def register(size: Size) -> None:
    """Register the agent loop and the reward."""

    @agent_loop("fixed_turns", uses_tools=False)
    async def fixed_turns(ep: Any) -> None:
        for turn in range(size.turns):
            if turn:
                ep.observe(Message("user", OBSERVED))
            await ep.generate()

    @reward("nothing")
    def nothing(trajectory: Any) -> float:
        return 0.0


def samples(size: Size) -> list[Sample]:
    """Return rows whose prompts share only their first tokens."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz "
    texts = ("".join(rng.choices(letters, k=size.prompt)) for _ in range(size.prompts))
    return [
        Sample(f"p{i}", (Message("user", text),), agent_name="fixed_turns", row=i)
        for i, text in enumerate(texts)
    ]


class AgentrlLoop:
    """Plays the rollouts as a run does."""

    def __init__(self, rollouts: Rollouts, size: Size):
        self._rollouts, self._size = rollouts, size
        self._samples = samples(size)
        self._played = 0

    def play(self) -> tuple[Round, list[Group]]:
        """Play all trajectories once."""
        size = self._size
        self._played += 1
        began, cpu = time.perf_counter(), cpu_seconds()
        groups = self._rollouts.collect(
            self._samples, n=size.n, sampling=Sampling(), step=self._played
        )
        took, cpu = time.perf_counter() - began, cpu_seconds() - cpu
        turns = [t for g in groups for s in g.scored for t in s.trajectory.turns]
        assert len(turns) == size.prompts * size.n * size.turns, f"{len(turns)} turns"
        lengths = {t.end - t.start for t in turns}
        assert lengths == {size.turn}, f"turns of {sorted(lengths)} tokens"
        cached = rollout_metrics(groups)["rollout/cached_token_ratio/later_turns"]
        return Round(took, cpu, cached), groups


class BareLoop:
    """A minimal loop on the same server, which keeps only the ids."""

    def __init__(self, url: str, key: str, groups: Sequence[Group], size: Size):
        """Take prompts and observation from trajectories that were played."""
        self._url, self._key, self._turns = url, key, size.turns
        trajectories = [s.trajectory for g in groups for s in g.scored]
        self._prompts = [list(t.segments[0].prompt_ids) for t in trajectories]
        turns, row = trajectories[0].turns, trajectories[0].segments[0].response_ids
        [gap] = {tuple(row[a.end : b.start]) for a, b in pairwise(turns)}
        self._observed = list(gap)
        self._eos = row[turns[0].end - 1]
        self._turn = size.turn
        self._limit = size.turn + 8

    @property
    def observed(self) -> int:
        """Return the number of tokens between two turns."""
        return len(self._observed)

    @property
    def cacheable(self) -> float:
        """Return the share of each prompt after the first that the server can have cached.

        This is the previous turn without the last sampled token, which the model has not read yet.
        """
        added = self._turn + self.observed
        prompt_tokens = [len(p) + k * added for p in self._prompts for k in range(1, self._turns)]
        return 1 - len(prompt_tokens) * (self.observed + 1) / sum(prompt_tokens)

    async def play(self) -> Round:
        """Play all trajectories once."""
        import aiohttp  # pyright: ignore[reportMissingImports]

        began, cpu = time.perf_counter(), cpu_seconds()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"},
        ) as session:
            counts = await asyncio.gather(*(self._trajectory(session, p) for p in self._prompts))
        took, cpu = time.perf_counter() - began, cpu_seconds() - cpu
        cached, prompt_tokens = (sum(column) for column in zip(*counts, strict=True))
        return Round(took, cpu, cached / prompt_tokens)

    async def _trajectory(self, session: Any, prompt: list[int]) -> tuple[int, int]:
        ids, cached, prompt_tokens = list(prompt), 0, 0
        for turn in range(self._turns):
            if turn:
                ids += self._observed
            body = {
                "input_ids": ids,
                "return_logprob": True,
                "sampling_params": {
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "top_k": -1,
                    "max_new_tokens": self._limit,
                    "stop_token_ids": [self._eos],
                    "stop": [],
                    "no_stop_trim": True,
                    "skip_special_tokens": False,
                },
            }
            async with session.post(f"{self._url}/generate", data=orjson.dumps(body)) as answer:
                meta = orjson.loads(await answer.read())["meta_info"]
            if turn:
                cached, prompt_tokens = (
                    cached + meta["cached_tokens"],
                    prompt_tokens + meta["prompt_tokens"],
                )
            sampled = [token for _, token, _ in meta["output_token_logprobs"]]
            assert len(sampled) == self._turn
            ids += sampled
        return cached, prompt_tokens


def flush(admin: AdminClient) -> None:
    """Flush the cache; the server refuses while turns are running."""
    end = time.monotonic() + 60
    while admin.send("/flush_cache", {})[0] != 200:
        assert time.monotonic() < end, "the server did not flush its cache"
        time.sleep(0.05)


def measure(ours: AgentrlLoop, admin: AdminClient, size: Size, runner: asyncio.Runner) -> None:
    _, groups = ours.play()  # warm-up
    bare = BareLoop(admin.url, admin.key, groups, size)
    del groups
    runner.run(bare.play())
    rounds: dict[str, list[Round]] = {"agentrl": [], "aiohttp": []}
    for _ in range(size.rounds):
        flush(admin)
        rounds["agentrl"].append(ours.play()[0])
        flush(admin)
        rounds["aiohttp"].append(runner.run(bare.play()))
    report(rounds, size, bare)


def report(rounds: dict[str, list[Round]], size: Size, bare: BareLoop) -> None:
    say = partial(
        print_figure,
        shape=size.shape,
        trajectories=size.prompts * size.n,
        turns=size.turns,
        turn_tokens=size.turn,
        observed_tokens=bare.observed,
        prompt_tokens=size.prompt,
        rounds=size.rounds,
    )
    for name, played in rounds.items():
        speeds = [size.tokens / r.seconds for r in played]
        say(
            f"sglang_rollouts/{name}",
            round(statistics.median(speeds)),
            "tokens/s",
            all=[round(s) for s in speeds],
        )
        turns = size.prompts * size.n * size.turns
        cpu = statistics.median(1e6 * r.cpu / turns for r in played)
        say(f"sglang_rollouts/{name}/cpu", round(cpu), "us a turn")
        cached = statistics.median(r.later_cached for r in played)
        say(
            f"sglang_rollouts/{name}/cached_later_turns",
            round(cached, 4),
            "of prompt tokens",
            possible=round(bare.cacheable, 4),
        )
    pairs = zip(rounds["agentrl"], rounds["aiohttp"], strict=True)
    ratios = [b.seconds / a.seconds for a, b in pairs]
    say(
        "sglang_rollouts/agentrl_of_aiohttp",
        round(statistics.median(ratios), 3),
        "ratio",
        all=[round(r, 3) for r in ratios],
    )


def config_of(folder: str, url: str, size: Size, device: str) -> Config:
    return load_config(
        None,
        [],
        {
            "model.path": folder,
            "rollout.name": "sglang",
            "rollout.urls": [url],
            "rollout.max_turns": size.turns,
            "rollout.max_turn_tokens": size.turn + 8,
            "rollout.max_trajectory_tokens": 16384,
            "rollout.timeout_s": 1800.0,
            "reward.function": "nothing",
            "tools.transport": "in_process",
            "trainer.device": device,
        },
    )


def main() -> None:
    made = serving.parser(__doc__)
    made.add_argument("--shape", default="0.5b")
    made.add_argument("--rounds", type=int, default=5)
    args = serving.parse(made)
    size = Size(shape=args.shape, rounds=args.rounds)
    if args.small:
        size = Size(4, 4, turns=4, turn=16, prompt=64, rounds=args.rounds, shape="small")
    register(size)
    folder = str(random_model(args.models, size.shape, device=args.device, turn=size.turn))
    server = SGLangLaunch(
        folder,
        python=args.python,
        gpus=[0] if args.device == "cuda" else [],
        memory=args.memory,
        arguments=shlex.split(args.launch),
    ).start()
    os.environ |= {TOKEN: server.token, ADMIN_TOKEN: server.admin_token}
    try:
        config = config_of(folder, server.url, size, args.device)
        admin = AdminClient(server.url, key=server.token, admin_key=server.admin_token)
        engine = open_engine(config, load_tokenizer(folder))
        scorer = Scorer(config.reward)
        with (
            open_rollouts(config, engine, load_template(config), scorer) as rollouts,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            measure(AgentrlLoop(rollouts, size), admin, size, runner)
        engine.close()
    finally:
        server.stop()


if __name__ == "__main__":
    main()
