"""Tell a sound environment from a broken one, without a model: `agentrl check environment`.

Scripted policies play real episodes with the agent loop, the tools, the interaction and the reward
of the rows. A gold policy must earn the maximum. Policies that do not know the answer must earn
nothing. The same row must start, answer and score the same way each time. Nothing that the
model sees may contain the answer, and nothing may stay open after an episode.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import re
import statistics
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agentrl import registry
from agentrl.agent_loops.attempt import Runtime, make_template
from agentrl.agent_loops.play import play_episode
from agentrl.config import Config
from agentrl.engine.base import Sampling
from agentrl.errors import AgentRLError, UserCodeError, UserError
from agentrl.plural import plural
from agentrl.preflight.plan import reports_outcome
from agentrl.preflight.policies import (
    CHEATS,
    Policy,
    PolicySampler,
    Step,
    call_at_random,
    gold_steps,
    play_script,
    wrong_steps,
)
from agentrl.process_memory import find_process_bytes
from agentrl.rewards import Scorer
from agentrl.rewards.leaks import shows_answer
from agentrl.signatures import find_argument_problems
from agentrl.terminal import echo
from agentrl.tools import Environment, LocalToolbox
from agentrl.trajectory import Message, Sample, Scored

RANDOM_EPISODES = 10
"""The number of episodes with random calls for each row."""
REPEATED = 8
"""The number of episodes after which nothing may have stayed open."""
MAX_AT_ONCE = 64
"""The largest number of concurrent episodes that the measurement of the speed tries."""
SPEED_UP = 1.15
"""The measurement ends if twice as many concurrent episodes raise the speed by a lower factor."""
PROGRESS_SECONDS = 5.0
"""After this time without a line, the next episode that ends is shown."""
EPSILON = 1e-6
"""Rewards that differ by less are equal."""
SEED = re.compile(r"\bseed\b\W{0,3}\d+", re.IGNORECASE)

Status = Literal["passed", "failed", "not checked", "measured"]


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """An episode of a scripted policy.

    Attributes:
        policy: the name of the policy.
        sample: the row.
        scored: the scored trajectory; None if the episode failed.
        error: why it failed.
        is_late: whether it failed because a method exceeded its time limit.
        seconds: how long it took, with the reward.
    """

    policy: str
    sample: Sample
    scored: Scored | None
    error: str
    is_late: bool
    seconds: float

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation; () if the episode failed."""
        return self.scored.trajectory.messages if self.scored else ()

    @property
    def transcript(self) -> tuple[Any, ...]:
        """The conversation, the rewards and the error. A second episode must have the same ones."""
        rewards = dict(self.scored.rewards) if self.scored else {}
        return [m.as_dict() for m in self.messages], rewards, self.error

    @property
    def call_errors(self) -> set[str | None]:
        """The errors of the tool calls (`ToolResult.error`)."""
        turns = self.scored.trajectory.turns if self.scored else ()
        return {result.error for turn in turns for result in turn.tool_results}

    def lines(self) -> Iterator[str]:
        """Yield the episode as text, for a report."""
        reward = f"reward {self.scored.reward:g}" if self.scored else self.error
        yield f"{self.policy}, row {self.sample.row} (id {self.sample.id!r}): {reward}"
        for message in self.messages[-6:]:
            yield f"  {message.role}: {message.shown[:200]!r}"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    Attributes:
        name: what was checked.
        status: "passed", "failed", "not checked" or "measured".
        detail: the measured value, or why it failed or was not checked.
        evidence: the episodes that show it.
    """

    name: str
    status: Status
    detail: str = ""
    evidence: Sequence[PlayedEpisode] = ()


class EnvironmentCheck:
    """Plays the scripted policies on some rows. Belongs to one event loop."""

    def __init__(self, config: Config, scorer: Scorer, samples: Sequence[Sample], tokenizer: Any):
        """Prepare the rows.

        Args:
            config: the config of the run. Its budgets of tokens do not apply, because the tokens
                of the scripted policies are bytes.
            scorer: the rewards of the run.
            samples: the rows, at least one.
            tokenizer: a tokenizer of bytes, with a chat template.
        """
        self._template = make_template(tokenizer, config)
        self._config = config.with_values(
            "rollout", max_turn_tokens=2**16, max_trajectory_tokens=2**20
        )
        self._scorer, self._toolbox = scorer, LocalToolbox()
        # The policies write their calls in the form of the chat template, which tool_agent reads.
        shipped = ("single_turn", "tool_agent", "react")
        self._samples = [
            replace(s, agent_name="tool_agent") if s.agent_name in shipped else s for s in samples
        ]
        self._sampler = PolicySampler(self._template)
        self._played: list[PlayedEpisode] = []
        self._shown = time.perf_counter()

    async def run(self) -> list[Check]:
        """Return the results of all checks."""
        names = dict.fromkeys(s.environment for s in self._samples if s.environment)
        tools = [tool for name in names if "close" in (tool := registry.tools.get(name)).hooks]
        try:
            with ExitStack() as stack:
                counts = {t.label: stack.enter_context(_counted_closes(t.target)) for t in tools}
                checks = [await self._gold()]
                for name, policy in CHEATS.items():
                    played = [await self._play(name, policy, sample) for sample in self._samples]
                    checks.append(self._earns_nothing(name, played))
                checks += [await self._wrong_answer(), await self._denied_answer()]
                checks += [await self._random(), await self._repeated(), await self._at_once()]
                checks += [self._answer_shown(), await self._left_open(), *self._seen()]
                checks += [await self._speed()]
            return [*checks, *_check_closes(counts)]
        finally:
            await self._toolbox.aclose()
            await self._scorer.close()

    # -- episodes ---------------------------------------------------------------------------------

    async def _play(
        self, name: str, policy: Policy, sample: Sample, seed: int = 0, **budgets: int
    ) -> PlayedEpisode:
        """Play and score an episode.

        Args:
            name: the name of the policy.
            policy: the policy.
            sample: the row.
            seed: the seed of the policy.
            budgets: keys of the section `rollout`.
        """
        functions = [s["function"] for s in self._toolbox.schemas(sample.tools)]
        episode_id = f"check-{uuid.uuid4().hex[:12]}"
        start, scored, error, is_late = time.perf_counter(), None, "", False
        try:
            trajectory = await play_episode(
                Runtime(
                    self._sampler,
                    self._template,
                    self._toolbox,
                    self._config.with_values("rollout", **budgets),
                ),
                sample,
                episode_id=episode_id,
                rollout=0,
                sampling=Sampling(),
                seed=0,
                watch=self._sampler.add(episode_id, policy, functions, seed),
            )
            scored = await self._scorer.score(trajectory)
        except AgentRLError as e:
            error = f"{type(e).__name__}: {e}"
            is_late = isinstance(e, UserCodeError) and e.is_late
        seconds = time.perf_counter() - start
        played = PlayedEpisode(name, sample, scored, error, is_late, seconds)
        self._played.append(played)
        if time.perf_counter() - self._shown > PROGRESS_SECONDS:
            self._shown = time.perf_counter()
            echo(
                f"episode {len(self._played)}: {name}, row {sample.row}, {seconds:.0f} s", err=True
            )
        return played

    def _gold_steps(self, sample: Sample) -> list[Step] | None:
        is_graded = not reports_outcome(sample, self._config)
        grader = self._scorer.grader(sample.data_source).name if is_graded else ""
        return gold_steps(sample, grader)

    def _solved(self) -> list[tuple[Sample, list[Step]]]:
        """Return the rows with a known solution."""
        solved = [(sample, self._gold_steps(sample)) for sample in self._samples]
        return [(sample, steps) for sample, steps in solved if steps is not None]

    # -- what policies earn -----------------------------------------------------------------------

    async def _gold(self) -> Check:
        name, solved = "the gold solution earns the maximum", self._solved()
        if not solved:
            return Check(
                name,
                "not checked",
                "no solution is known: write the classmethod gold(sample), or a column `solution`"
                " (a list of texts and calls)",
            )
        played = [
            await self._play("gold", play_script(s), row, **self._budgets(len(s)))
            for row, s in solved
        ]
        wrong = [p for p in played if not p.scored or worth(p) < range_of(p.sample)[1] - EPSILON]
        return _check(name, wrong, played, f"on {plural(len(played), 'row')}")

    def _budgets(self, turns: int) -> Mapping[str, int]:
        rollout = self._config.rollout
        return {
            "max_turns": max(rollout.max_turns, turns + 2),
            "max_tool_calls": max(rollout.max_tool_calls, turns + 2),
        }

    async def _wrong_answer(self) -> Check:
        name = "a wrong answer in the right form"
        solved = self._solved()
        if not solved:
            return Check(f"no reward for {name}", "not checked", "no solution is known")
        played = []
        for row, steps in solved:
            script = play_script(wrong_steps(steps, row.ground_truth))
            played.append(await self._play(name, script, row, **self._budgets(len(steps))))
        return self._earns_nothing(name, played)

    async def _denied_answer(self) -> Check:
        name, rows = "denying the answer", [s for s in self._samples if s.ground_truth is not None]
        if not rows:
            return Check(f"no reward for {name}", "not checked", "no row has a ground_truth")
        played = []
        for row in rows:
            text = f"I do not know. The answer is certainly not {row.ground_truth}"
            played.append(await self._play(name, play_script([text]), row))
        return self._earns_nothing(name, played)

    def _earns_nothing(self, name: str, played: Sequence[PlayedEpisode]) -> Check:
        rewarded = [p for p in played if p.scored and worth(p) > range_of(p.sample)[0] + EPSILON]
        detail = f"in {plural(sum(p.scored is not None for p in played), 'episode')}"
        return _check(f"no reward for {name}", rewarded, played, detail)

    async def _random(self) -> Check:
        name = "random calls earn no more than chance"
        checks = [await self._random_calls(name, rows) for rows in self._by_environment()]
        order = ("failed", "passed", "not checked")
        return min(checks, key=lambda check: order.index(check.status))

    def _by_environment(self) -> list[list[Sample]]:
        """Return the rows of each environment."""
        names = dict.fromkeys(s.environment for s in self._samples)
        return [[s for s in self._samples if s.environment == name] for name in names]

    async def _random_calls(self, name: str, rows: Sequence[Sample]) -> Check:
        played = [
            await self._play("random calls", call_at_random, sample, seed)
            for sample in rows
            for seed in range(RANDOM_EPISODES)
        ]
        rewards = [worth(p) for p in played if p.scored]
        if not rewards:
            return Check(name, "not checked", "all episodes with random calls failed")
        mean, chance = statistics.fmean(rewards), chance_of(rows[0])
        # Three standard errors of the mean of a reward within its range.
        low, high = range_of(rows[0])
        tolerance = 3 * statistics.pstdev(rewards) / math.sqrt(len(rewards)) if chance > low else 0
        detail = f"{mean:.3g} on average in {plural(len(rewards), 'episode')}, chance={chance:g}"
        if mean <= chance + tolerance + EPSILON:
            return Check(name, "passed", detail)
        best = next(p for p in played if p.scored and worth(p) == max(rewards))
        hint = f"{detail}. If luck explains it, set the attribute `chance` (up to {high:g})"
        return Check(name, "failed", hint, [best])

    # -- whether it is the same each time ---------------------------------------------------------

    def _policies(self, sample: Sample) -> dict[str, Policy]:
        steps = self._gold_steps(sample)
        gold = {"gold": play_script(steps)} if steps else {}
        return {**gold, "random calls": call_at_random}

    async def _repeated(self) -> Check:
        different = []
        for sample in self._samples:
            for name, policy in self._policies(sample).items():
                first = await self._play(name, policy, sample)
                await self._play("between", call_at_random, sample, seed=1)
                again = await self._play(name, policy, sample)
                if first.transcript != again.transcript:
                    different += [first, again]
        name = "a row that is played again starts, answers and scores the same"
        return _check(name, different, self._played)

    async def _at_once(self) -> Check:
        different = []
        for sample in self._samples:
            for name, policy in self._policies(sample).items():
                alone = await self._play(name, policy, sample)
                same = [self._play(name, policy, sample) for _ in range(3)]
                noise = [self._play("noise", call_at_random, sample, i) for i in range(1, 5)]
                together = await asyncio.gather(*same, *noise)
                others = [p for p in together[:3] if p.transcript != alone.transcript][:1]
                different += [alone, *others] if others else []
        return _check("concurrent episodes do not affect each other", different, self._played)

    # -- what all of these episodes show ----------------------------------------------------------

    def _answer_shown(self) -> Check:
        name = "nothing shows the answer before the model gives it"
        if all(s.ground_truth is None for s in self._samples):
            return Check(name, "not checked", "no row has a ground_truth")
        blind = [p for p in self._played if p.policy in (*CHEATS, "random calls")]
        return _check(name, [p for p in blind if self._shows_answer(p)], blind)

    def _shows_answer(self, played: PlayedEpisode) -> bool:
        """Return whether the environment shows the answer to a policy that does not know it.

        A successful result of a tool may contain the answer, because a search must find it.
        """
        if played.scored is None:
            return False
        t = played.scored.trajectory
        schemas = str(self._toolbox.schemas(played.sample.tools))
        answers = {id(m) for m in t.answers}
        sent = {m.content for m in t.answers}
        shown = [m for m in t.messages[len(played.sample.prompt) :] if id(m) not in answers]
        if any(shows_answer(played.sample, m.content, alone=False) for m in t.messages[:1]):
            return True
        failed = {r.content for turn in t.turns for r in turn.tool_results if not r.ok}
        return shows_answer(played.sample, schemas) or any(
            shows_answer(played.sample, m.content, alone=m.role != "tool" or m.content in failed)
            for m in shown
            if m.content not in sent
        )

    def _seen(self) -> Iterator[Check]:
        """Yield the checks of each episode alone."""

        def is_outside(p: PlayedEpisode) -> bool:
            low, high = range_of(p.sample)
            outcome = p.scored.rewards["outcome"] if p.scored else low
            return not low - EPSILON <= outcome <= high + EPSILON

        def shows_seed(p: PlayedEpisode) -> bool:
            return any(m.role != "assistant" and SEED.search(m.content) for m in p.messages)

        def hangs(p: PlayedEpisode) -> bool:
            ended_late = bool(p.scored) and p.scored.trajectory.stop_reason == "time"
            return p.is_late or "timeout" in p.call_errors or ended_late

        def raises(p: PlayedEpisode) -> bool:
            return (bool(p.error) and not p.is_late) or "crash" in p.call_errors

        low, high = range_of(self._samples[0])
        for name, is_wrong in {
            f"rewards are within [{low:g}, {high:g}]": is_outside,
            "nothing shows the seed": shows_seed,
            "nothing hangs": hangs,
            "no method raises": raises,
        }.items():
            yield _check(name, [p for p in self._played if is_wrong(p)], self._played)

    # -- what stays open ---------------------------------------------------------------------------

    async def _left_open(self) -> Check:
        name, left = "nothing stays open after an episode", []
        for sample, *_ in self._by_environment():
            await self._play("random calls", call_at_random, sample)
            before = _count_open_resources()
            for seed in range(REPEATED):
                await self._play("random calls", call_at_random, sample, seed)
            gc.collect()
            await asyncio.sleep(0.1)
            after = _count_open_resources()
            left += [
                f"{after[kind] - count} {kind}"
                for kind, count in before.items()
                if after[kind] - count >= REPEATED
            ]
        detail = f"{', '.join(left)} after {REPEATED} episodes: free them in close()"
        return Check(name, "failed", detail) if left else Check(name, "passed")

    async def _speed(self) -> Check:
        """Measure the time and memory of an episode, and how many concurrent ones are fastest."""
        sample, at_once, best = self._samples[0], 1, 0.0
        seconds = sorted(p.seconds for p in self._played)
        memory = find_process_bytes()
        while at_once <= MAX_AT_ONCE:
            start = time.perf_counter()
            await asyncio.gather(
                *(self._play("random calls", call_at_random, sample, i) for i in range(at_once))
            )
            speed = at_once / (time.perf_counter() - start)
            if speed < best * SPEED_UP:
                break
            best, at_once = max(best, speed), at_once * 2
        used = max(find_process_bytes() - memory, 0) / at_once
        p50, p99 = (seconds[min(int(q * len(seconds)), len(seconds) - 1)] for q in (0.5, 0.99))
        limit = "more were not tried" if at_once > MAX_AT_ONCE else "more are not faster"
        detail = (
            f"{1000 * p50:.1f} ms (p50), {1000 * p99:.1f} ms (p99) and about"
            f" {used / 2**20:.1f} MiB per episode; {best:.0f} episodes/s with {at_once // 2} at"
            f" once, {limit}"
        )
        return Check("time and memory", "measured", detail)


def rows_of_code() -> list[Sample]:
    """Return a row for each environment that files define and whose constructor needs no arguments.

    Raises:
        UserError: there is none.
    """
    names = [n for n in registry.tools.user_names() if registry.tools.get(n).is_environment]
    rows, problems = [], []
    for name in names:
        tool = registry.tools.get(name)
        missing = find_argument_problems(tool.target, {}, injected=tool.constructor_injected)
        problems += [f"environment {name!r}: {problem}" for problem in missing]
        if not missing:
            rows.append(Sample(name, (Message("user", "Begin."),), tools=(name,), environment=name))
    if not rows:
        raise UserError(
            f"{'; '.join(problems) or 'the file defines no @environment'}. Give a file of rows:"
            " agentrl check environment ROWS -f FILE"
        )
    return rows


def worth(played: PlayedEpisode) -> float:
    """Return the number that `reward_range` limits: the outcome, if the environment gives it."""
    scored = played.scored
    assert scored is not None
    reports = scored.trajectory.scores is not None
    return scored.rewards["outcome"] if reports else scored.reward


def _check(
    name: str,
    wrong: Sequence[PlayedEpisode],
    played: Sequence[PlayedEpisode],
    detail: str = "",
) -> Check:
    """Return the result of a check whose failures are the episodes `wrong` among `played`."""
    if not wrong:
        if not any(p.scored for p in played):
            return Check(name, "not checked", "all episodes failed")
        return Check(name, "passed", detail)
    return Check(name, "failed", plural(len(wrong), "episode"), wrong[:2])


def _class_of(sample: Sample) -> type[Environment]:
    return registry.tools.get(sample.environment).target if sample.environment else Environment


def range_of(sample: Sample) -> tuple[float, float]:
    """Return the `reward_range` of a row's environment, or the default one."""
    return _class_of(sample).reward_range


def chance_of(sample: Sample) -> float:
    """Return the average reward that random valid calls may earn."""
    chance = _class_of(sample).chance
    return range_of(sample)[0] if chance is None else chance


def _check_closes(counts: Mapping[str, Mapping[str, int]]) -> Iterator[Check]:
    """Yield whether all objects of environments with a method `close` were closed by it."""
    wrong = [
        f"{label}: {plural(n['created'], 'object')} created, {n['closed']} closed,"
        f" {plural(n['raised'], 'error')} of close()"
        for label, n in counts.items()
        if n["created"] != n["closed"] or n["raised"]
    ]
    if counts:
        status: Status = "failed" if wrong else "passed"
        yield Check("close() is called on every exit", status, "; ".join(wrong))


@contextmanager
def _counted_closes(cls: type) -> Iterator[dict[str, int]]:
    """Count the objects of a class that are created and closed, and the errors of `close`."""
    counts = {"created": 0, "closed": 0, "raised": 0}
    init, close = cls.__init__, cls.close

    def counted_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        counts["created"] += 1

    async def counted_close(self: Any) -> None:
        counts["closed"] += 1
        try:
            returned = close(self)
            if asyncio.iscoroutine(returned):
                await returned
        except Exception:
            counts["raised"] += 1
            raise

    cls.__init__, cls.close = counted_init, counted_close
    try:
        yield counts
    finally:
        cls.__init__, cls.close = init, close


def _count_open_resources() -> dict[str, int]:
    """Return the numbers of open files, threads and child processes of this process.

    On systems without /proc, files and processes are 0.
    """
    files, tasks = Path("/proc/self/fd"), Path("/proc/self/task")
    children = [t / "children" for t in tasks.iterdir()] if tasks.is_dir() else []
    return {
        "open files": len(os.listdir(files)) if files.is_dir() else 0,
        "threads": threading.active_count(),
        "processes": sum(len(c.read_text().split()) for c in children if c.is_file()),
    }
