"""`agentrl check environment`: planted faults are found, and sound environments pass."""

import asyncio
import random
import re
import tempfile
import time

import pytest

from agentrl import (
    Environment,
    Message,
    Reply,
    Sample,
    ToolCall,
    ToolError,
    environment,
    load_config,
    tool,
)
from agentrl.preflight import environment as environment_check
from agentrl.preflight.environment import EnvironmentCheck
from agentrl.rewards import Scorer
from agentrl.testing import byte_tokenizer

pytestmark = pytest.mark.usefixtures("no_tools")

WORDS = ("lynx", "otter")


class Sound(Environment):
    """A word to guess."""

    def __init__(self, word: str):
        self.word, self.found, self.answer = word, False, ""

    async def start(self):
        return [Message("user", f"The word has {len(self.word)} letters.")]

    def guess(self, word: str) -> str:
        """Guess the word."""
        self.found = self.found or word == self.word
        return "Right!" if self.found else "Wrong."

    async def reward(self):
        return float(self.found)

    @classmethod
    def gold(cls, sample):
        return [ToolCall("guess", {"word": sample.ground_truth}), "Done."]


class AlwaysPasses(Sound):
    async def reward(self):
        return 1.0


class ReadsTheAnswerAnywhere(Sound):
    async def reward(self, messages):
        said = [m.content for m in messages if m.role == "assistant"]
        return float(any(self.word in text for text in said))


seen: list[str] = []


class SharesState(Sound):
    def guess(self, word: str) -> str:
        """Guess the word."""
        seen.append(word)
        return f"{super().guess(word)} {len(seen)} guesses so far."


class AnswerInAnError(Sound):
    def guess(self, word: str) -> str:
        """Guess the word."""
        if word != self.word:
            raise ToolError(f"{word} is not {self.word}")
        return super().guess(word)


class Raises(Sound):
    def guess(self, word: str) -> str:
        """Guess the word."""
        return {self.word: super().guess(word)}[word]


class AnswerAtTheStart(Sound):
    async def start(self):
        return [Message("user", f"Do not say {self.word}.")]


class AboveTheRange(Sound):
    async def reward(self):
        return 10.0 * self.found


class ShowsTheSeed(Sound):
    async def start(self):
        return [Message("user", "World made with seed=1234.")]


class Hangs(Sound):
    def guess(self, word: str) -> str:
        """Guess the word."""
        time.sleep(0.3)
        return super().guess(word)


class LeavesFilesOpen(Sound):
    def __init__(self, word: str):
        super().__init__(word)
        files.append(tempfile.TemporaryFile())  # noqa: SIM115


files: list = []


class ClosesWithAnError(Sound):
    async def close(self):
        raise RuntimeError("already closed")


class DependsOnChance(Sound):
    async def start(self):
        return [Message("user", f"Room {random.random()}.")]


class BelievesTheAnswer(Sound):
    async def reward(self, messages):
        return float("the answer is correct" in messages[-1].content.lower() or self.found)


class PaysForSilence(Sound):
    async def reward(self, messages):
        return float(self.found or not messages[-1].content)


class UnsolvableRow(Sound):
    async def reward(self):
        return 0.5 * self.found


class Lucky(Sound):
    def guess(self, word: str) -> str:
        """Guess the word."""
        self.found = True
        return "Right!"


FAULTS = {
    AlwaysPasses: "no reward for silence",
    ReadsTheAnswerAnywhere: "no reward for denying the answer",
    SharesState: "a row that is played again starts, answers and scores the same",
    AnswerInAnError: "nothing shows the answer before the model gives it",
    Raises: "no method raises",
    AnswerAtTheStart: "nothing shows the answer before the model gives it",
    AboveTheRange: "rewards are within [0, 1]",
    ShowsTheSeed: "nothing shows the seed",
    Hangs: "nothing hangs",
    LeavesFilesOpen: "nothing stays open after an episode",
    ClosesWithAnError: "close() is called on every exit",
    DependsOnChance: "a row that is played again starts, answers and scores the same",
    BelievesTheAnswer: "no reward for a message to the judge",
    PaysForSilence: "no reward for silence",
    UnsolvableRow: "the gold solution earns the maximum",
    Lucky: "random calls earn no more than chance",
}


def check(cls, rows=WORDS, timeout=30.0, config=None, **fields):
    environment("guess", timeout=timeout)(cls)
    samples = [
        Sample(
            f"row{i}",
            (Message("user", "Find the word."),),
            agent_name="tool_agent",
            tools=("guess",),
            tools_kwargs={"guess": {"create_kwargs": {"word": word}}},
            environment="guess",
            ground_truth=word,
            row=i,
        )
        for i, word in enumerate(rows)
    ]
    config = config or load_config()
    scorer = Scorer(config.reward)
    checks = asyncio.run(EnvironmentCheck(config, scorer, samples, byte_tokenizer()).run())
    return {check.name: check for check in checks}


def failed(checks):
    return [name for name, check in checks.items() if check.status == "failed"]


def test_a_sound_environment_passes():
    checks = check(Sound)
    assert {c.status for c in checks.values()} == {"passed", "measured"}, checks
    detail = checks["time and memory"].detail
    assert re.search(r"[\d.]+ ms \(p50\), [\d.]+ ms \(p99\).* \d+ episodes/s with \d+ at", detail)


def test_a_slow_environment_shows_its_progress(monkeypatch, capsys):
    monkeypatch.setattr(environment_check, "PROGRESS_SECONDS", 600.0)
    check(Sound, WORDS[:1])
    assert not capsys.readouterr().err
    monkeypatch.setattr(environment_check, "PROGRESS_SECONDS", 0.0)
    check(Sound, WORDS[:1])
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "episode 1: gold, row 0, 0 s" and len(shown) > 30


@pytest.mark.parametrize("cls", FAULTS, ids=lambda cls: cls.__name__)
def test_a_planted_fault_is_found(cls):
    files.clear()
    # Random words are never the right ones, but two seconds of hanging calls suffice.
    checks = check(cls, rows=WORDS[:1], timeout=0.1 if cls is Hangs else 30.0)
    found = checks[FAULTS[cls]]
    assert found.status == "failed", checks
    if found.evidence:
        assert any("row 0" in line for played in found.evidence for line in played.lines())
    else:
        assert found.detail


def test_what_is_not_known_is_not_checked():
    class Unknown(Sound):
        gold = Environment.gold

    checks = check(Unknown)
    gold = checks["the gold solution earns the maximum"]
    assert gold.status == "not checked" and "gold(sample)" in gold.detail
    assert checks["no reward for a wrong answer in the right form"].status == "not checked"
    assert not failed(checks)


def test_a_column_has_the_solution():
    class Unknown(Sound):
        gold = Environment.gold

    environment("guess")(Unknown)
    solution = [{"name": "guess", "arguments": {"word": "lynx"}}, "Done."]
    sample = Sample(
        "a",
        (Message("user", "Find it."),),
        tools=("guess",),
        tools_kwargs={"guess": {"create_kwargs": {"word": "lynx"}}},
        environment="guess",
        extra={"solution": solution},
    )
    config = load_config()
    run = EnvironmentCheck(config, Scorer(config.reward), [sample], byte_tokenizer()).run()
    checks = {c.name: c for c in asyncio.run(run)}
    assert checks["the gold solution earns the maximum"].status == "passed"
    assert not failed(checks)


def test_luck_is_declared():
    class Coin(Environment):
        chance = 0.5

        def __init__(self):
            self.right = False

        def call(self, heads: bool) -> str:
            """Call heads or tails."""
            self.right = heads
            return "Called."

        async def reward(self):
            return float(self.right)

    environment("coin")(Coin)
    sample = Sample("a", (Message("user", "Call."),), tools=("coin",), environment="coin")
    config = load_config()
    run = EnvironmentCheck(config, Scorer(config.reward), [sample], byte_tokenizer()).run()
    checks = {c.name: c for c in asyncio.run(run)}
    assert checks["random calls earn no more than chance"].status == "passed"


def test_rows_with_tools_and_an_interaction_are_checked_as_well():
    @tool
    def nothing(text: str) -> str:
        """Do nothing."""
        return text

    samples = [
        Sample(
            "a",
            (Message("user", "How much is 3*4?"),),
            tools=("nothing",),
            data_source="openai/gsm8k",
            ground_truth="12",
        )
    ]
    config = load_config()
    run = EnvironmentCheck(config, Scorer(config.reward), samples, byte_tokenizer()).run()
    checks = {c.name: c for c in asyncio.run(run)}
    assert checks["the gold solution earns the maximum"].status == "passed"
    assert not failed(checks), checks


def test_a_reply_may_not_show_the_answer():
    class Tells(Sound):
        async def respond(self, messages):
            return Reply(f"The word was {self.word}.", done=False)

    assert failed(check(Tells, WORDS[:1])) == ["nothing shows the answer before the model gives it"]
