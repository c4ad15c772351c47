from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.forked_python import ForkedPython

from agentrl import load_config, play, registry
from agentrl.agent_loops.attempt import Runtime
from agentrl.agent_loops.play import play_episode
from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.data import check_samples
from agentrl.engine.base import Sampling
from agentrl.errors import (
    DataError,
    EngineError,
    EpisodeOver,
    Infrastructure,
    RegistryError,
    UserCodeError,
    UserError,
)
from agentrl.interactions import (
    Gsm8kInteraction,
    Interaction,
    Reply,
    build_interaction,
    interaction,
    respond,
)
from agentrl.preflight import describe_run, make_plan
from agentrl.rewards.gsm8k import compute_score
from agentrl.signatures import find_argument_problems
from agentrl.testing import Scripted, byte_tokenizer
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Message, Sample

PROMPT = (Message("user", "What is 3*4?"),)


def row(**fields) -> Sample:
    return Sample(**{"id": "r7", "prompt": PROMPT, "interaction": "gsm8k", **fields})


def talk(*texts: str) -> list[Message]:
    """The prompt, then assistant and user in turn."""
    roles = ["assistant", "user"] * len(texts)
    return [*PROMPT, *(Message(r, t) for r, t in zip(roles, texts, strict=False))]


async def hear(one: Interaction, *texts: str) -> Reply | None:
    return await respond(one, talk(*texts), time.monotonic() + 5)


# -- gsm8k -----------------------------------------------------------------------------------------


async def test_right_is_done_with_score_1():
    assert await hear(Gsm8kInteraction("12"), "#### 12") == Reply("Correct.", 1.0, True)


async def test_wrong_may_try_again_until_the_attempts_are_used_up():
    teacher = Gsm8kInteraction("12", max_attempts=3)
    again = Reply("7 is not correct. Check your work and try again.")
    assert await hear(teacher, "#### 7") == again
    assert (await hear(teacher, "#### 7", again.content, "hm")) == Reply(
        "I see no answer. End with '#### ' and the number, for example '#### 12'."
    )
    last = await hear(teacher, "#### 7", "", "hm", "", "#### 8")
    assert last is not None and last.done and last.score == 0


async def test_right_at_the_second_attempt():
    teacher = Gsm8kInteraction(12, query="What is 3*4?")
    first = await hear(teacher, "#### 7")
    assert first is not None and not first.done
    second = await hear(teacher, "#### 7", first.content, "#### 12")
    assert second == Reply("Correct.", 1.0, True)


async def test_only_the_last_assistant_message_is_read():
    messages = [*talk("I give up"), Message("tool", "#### 12"), Message("user", "#### 12")]
    reply = await respond(Gsm8kInteraction("12"), messages, time.monotonic() + 5)
    assert reply is not None and reply.score == 0 and not reply.done


@given(st.text("#### 12,.$-\n", max_size=40), st.sampled_from(["strict", "flexible"]))
def test_it_agrees_with_the_grader(text, method):
    teacher = Gsm8kInteraction("12", method=method)
    reply = asyncio.run(hear(teacher, text))
    assert reply is not None
    assert reply.score == compute_score(text, "12", method=method)["acc"]
    assert reply.done == bool(reply.score)


# -- building --------------------------------------------------------------------------------------


def test_one_object_per_episode_from_the_rows_kwargs():
    sample = row(interaction_kwargs={"ground_truth": "12", "max_attempts": 2})
    one, two = build_interaction(sample), build_interaction(sample)
    assert isinstance(one, Gsm8kInteraction) and isinstance(two, Gsm8kInteraction)
    assert one is not two
    assert (one.ground_truth, one.max_attempts) == ("12", 2)


def test_a_row_without_one_has_none():
    assert build_interaction(row(interaction="")) is None


def test_the_error_for_an_unknown_name_lists_the_known_ones():
    with pytest.raises(RegistryError, match=r"'gsm8'. Did you mean 'gsm8k'"):
        build_interaction(row(interaction="gsm8"))


@pytest.fixture
def registered():
    """`registered(cls)` registers a class for the length of a test, and names it in a row."""

    def register(cls, **kwargs) -> Sample:
        name = cls.__name__.lower()
        assert interaction(name)(cls) is cls
        return row(interaction=name, interaction_kwargs=kwargs)

    return register


class Silent(Interaction):
    async def respond(self, messages):
        return None


def test_the_sample_is_passed_by_name(registered):
    class Curious(Silent):
        def __init__(self, sample, depth=1):
            self.sample, self.depth = sample, depth

    sample = registered(Curious, depth=3)
    built = build_interaction(sample)
    assert isinstance(built, Curious)
    assert built.sample is sample and built.depth == 3


def test_a_list_in_the_kwargs_is_not_shared_between_episodes(registered):
    class Listing(Silent):
        def __init__(self, entries):
            self.entries = entries
            entries.append("me")

    sample = registered(Listing, entries=[])
    one, two = build_interaction(sample), build_interaction(sample)
    assert isinstance(one, Listing) and isinstance(two, Listing)
    assert one.entries == two.entries == ["me"] and sample.interaction_kwargs == {"entries": []}


def test_a_constructor_that_raises_names_the_sample_and_the_line():
    with pytest.raises(UserCodeError) as caught:
        build_interaction(row(interaction_kwargs={"ground_truth": "12", "max_attempts": 0}))
    message = str(caught.value)
    assert "interaction 'gsm8k' of sample 'r7': its constructor raised ValueError" in message
    assert "max_attempts=0" in message and "gsm8k.py:" in message


def test_argument_problems():
    assert (
        find_argument_problems(Gsm8kInteraction, {"ground_truth": "12"}, injected=("sample",)) == []
    )
    assert find_argument_problems(
        Gsm8kInteraction, {"grond_truth": "12"}, injected=("sample",)
    ) == [
        "missing argument 'ground_truth'",
        "unknown argument 'grond_truth'. Did you mean 'ground_truth'?"
        " It takes: ground_truth, query, max_attempts, method",
    ]
    assert find_argument_problems(Silent, {"x": 1}, injected=("sample",)) == [
        "unknown argument 'x'. It takes: no arguments"
    ]


def test_argument_problems_knows_sample_and_open_ends():
    class Open(Silent):
        def __init__(self, sample, **rest): ...

    assert find_argument_problems(Open, {"anything": 1}, injected=("sample",)) == []
    assert find_argument_problems(Open, {"sample": 1}, injected=("sample",)) == [
        "argument 'sample' is passed by agentrl: remove it"
    ]


# -- registering -----------------------------------------------------------------------------------


class Sync(Interaction):
    def respond(self, messages):  # type: ignore[override]
        return None


class SyncClose(Silent):
    def close(self):  # type: ignore[override]
        return None


class Lacking(Interaction):
    pass


@pytest.mark.parametrize(
    ("cls", "says"),
    [
        (Sync, r"Sync.respond \(.*test_interactions.py:\d+\) must be `async def`"),
        (SyncClose, r"SyncClose.close \(.*test_interactions.py:\d+\) must be `async def`"),
        (Lacking, r"Lacking \(.*test_interactions.py:\d+\) must define `async def respond"),
        (Reply, r"is for subclasses of Interaction, not Reply, .*replies.py:\d+"),
        (len, "is for subclasses of Interaction, not <built-in"),
    ],
)
def test_classes_that_are_no_interaction_are_refused(registered, cls, says):
    with pytest.raises(RegistryError, match=says):
        interaction("odd")(cls)
    assert "odd" not in registry.interactions


def test_a_decorator_without_a_name_says_so():
    with pytest.raises(RegistryError, match=r'"name"\) above Silent, .*interactions.py:\d+:'):
        interaction(Silent)  # type: ignore[arg-type]


# -- what respond may do ---------------------------------------------------------------------------


class Saying(Interaction):
    """Returns, or raises, what it was given."""

    def __init__(self, what):
        self.what = what

    async def respond(self, messages):
        if isinstance(self.what, Exception):
            raise self.what
        return self.what


async def test_returning_none_ends_the_conversation():
    assert await hear(Saying(None), "hello") is None


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("try again", r"returned 'try again' \(str\); it must return Reply"),
        ((True, "ok", 1.0, {}), r"returned \(True, 'ok', 1.0, {}\) \(tuple\)"),
        (Reply(content=None), r"the content of .* must be a string"),  # type: ignore[arg-type]
        (Reply("x", float("nan")), r"the score of .*nan.* must be a finite number"),
        (Reply("x", "1"), r"the score of .* must be a finite number"),  # type: ignore[arg-type]
        (KeyError("balance"), r"interaction Saying: respond raised KeyError: 'balance' \(.*:\d+\)"),
        (TimeoutError("slow judge"), r"respond raised TimeoutError: slow judge"),
    ],
)
async def test_wrong_return_values_are_user_code_errors(what, says):
    with pytest.raises(UserCodeError, match=says):
        await hear(Saying(what), "hello")


@pytest.mark.parametrize("wrap", [lambda c: c, Reply, lambda c: Reply("x", c)])
async def test_a_coroutine_in_a_reply_says_await(wrap, recwarn):
    with pytest.raises(UserCodeError, match=r"Write `await` before the call"):
        await hear(Saying(wrap(Silent().close())), "hello")
    assert not recwarn  # "was never awaited" would be a second message


async def test_a_machine_that_is_down_stays_infrastructure():
    with pytest.raises(EngineError):
        await hear(Saying(EngineError("judge is down")), "hello")


async def test_the_deadline_ends_the_episode():
    class Slow(Interaction):
        async def respond(self, messages):
            await asyncio.sleep(60)

    with pytest.raises(EpisodeOver) as over:
        await respond(Slow(), talk("hello"), time.monotonic() + 0.01)
    assert over.value.reason == "time"


async def test_close_is_optional():
    await Silent().close()


# -- arguments of the config -----------------------------------------------------------------------


class Shop(Silent):
    config_only = ("url",)

    def __init__(self, url, item="tea"):
        self.url, self.item = url, item

    @classmethod
    def problems(cls, kwargs):
        if kwargs["item"] == "coffee":
            yield "there is no coffee. Sell tea"


def test_the_config_has_defaults_for_rows(registered):
    sample = registered(Shop, item="milk")
    built = build_interaction(sample, {"shop": {"url": ["u"]}, "other": {"x": 1}})
    assert isinstance(built, Shop) and (built.url, built.item) == (["u"], "milk")
    assert registry.interactions.get("shop") is Shop


@pytest.mark.parametrize(
    ("row_gives", "config_gives", "says"),
    [
        (
            {"url": "http://mine"},
            {},
            r"'url' can only be set in the config \(interaction.kwargs.shop.url\)",
        ),
        (
            {"item": "tea"},
            {"url": "u", "item": "milk"},
            "'item' is set twice: 'tea' in the row and 'milk' in interaction.kwargs.shop.item",
        ),
        ({"item": "tea"}, {}, "missing argument 'url'"),
        ({}, {"url": "u", "itme": 1}, "unknown argument 'itme'. Did you mean 'item'?"),
        ({"item": "coffee"}, {"url": "u"}, "interaction 'shop': there is no coffee. Sell tea"),
    ],
)
def test_arguments_that_do_not_go_together(registered, row_gives, config_gives, says):
    sample = registered(Shop, **row_gives)
    with pytest.raises(DataError, match=says):
        check_samples([sample], "rows.jsonl", {"shop": config_gives})
    check_samples([row(interaction="")], "rows.jsonl", {"shop": config_gives})


def test_an_unchecked_row_is_refused_as_it_is_played(registered):
    with pytest.raises(
        DataError,
        match="row 'r7', interaction_kwargs: argument 'url' can only be set in the config",
    ):
        build_interaction(registered(Shop, url="http://mine"), {})


def test_a_plan_reports_mistakes_of_the_config(tmp_path):
    rows = tmp_path / "rows.jsonl"
    line = {
        "prompt": "a",
        "agent_name": "tool_agent",
        "data_source": "openai/gsm8k",
        "ground_truth": "1",
        "interaction": "gsm8k",
        "interaction_kwargs": {"query": "a"},
    }
    rows.write_text(json.dumps(line))

    def plan(kwargs):
        flags = {"data.train": str(rows), "interaction.kwargs": kwargs}
        return make_plan(load_config(None, [], flags))

    made = plan({"gsm8k": {"ground_truth": "1"}, "gym": {"envs": ["CartPole-v1"]}})
    assert len(made.train) == 1
    lines = describe_run(made).splitlines()
    assert "interaction.kwargs.gym: no row has this interaction" in lines
    assert not any("kwargs.gsm8k" in line for line in lines)
    with pytest.raises(UserError) as caught:
        plan({"gsm9k": {}, "gsm8k": {"query": "b", "ground_truth": "1"}})
    assert "interaction.kwargs: no interaction named 'gsm9k'. Did you mean 'gsm8k'" in str(
        caught.value
    )
    assert "'query' is set twice: 'a' in the row" in str(caught.value)


# -- in an episode ---------------------------------------------------------------------------------

TOKENIZER = byte_tokenizer()
CLOSED: list[str] = []


class Guest(Interaction):
    """Answers as it was told to, and notes its end."""

    def __init__(self, does="talk", leaves="quietly"):
        self.does, self.leaves = does, leaves

    async def respond(self, messages):
        match self.does:
            case "talk":
                return Reply("And then?", score=0.5)
            case "raise":
                raise KeyError("balance")
            case "text":
                return "And then?"
            case "down":
                raise Infrastructure("the judge is down")
            case "sleep":
                await asyncio.sleep(60)
            case "exit":
                sys.exit(3)

    async def close(self):
        CLOSED.append(self.does)
        match self.leaves:
            case "raising":
                raise ValueError("stuck door")
            case "down":
                raise Infrastructure("no reply")
            case "exit":
                sys.exit(4)


def visit(registered, engine=None, config=None, **kwargs):
    CLOSED.clear()
    registered(Guest)
    sample = Sample("g", PROMPT, "tool_agent", interaction="guest", interaction_kwargs=kwargs)
    engine = engine or Scripted(lambda prompt, turn: f"Once {turn}.", TOKENIZER)
    return play(sample, engine, TOKENIZER, config=config or Config())


def test_an_interaction_that_never_ends_is_bounded(registered):
    t = visit(registered, config=Config.model_validate({"rollout": {"max_turns": 5}}))
    assert (t.stop_reason, len(t.turns), CLOSED) == ("turns", 5, ["talk"])
    assert t.turn_rewards("turn") == 2.5
    t = visit(registered, config=Config.model_validate({"rollout": {"max_trajectory_tokens": 200}}))
    assert t.stop_reason == "trajectory_tokens" and CLOSED == ["talk"]


@pytest.mark.parametrize(
    ("does", "error", "says"),
    [
        ("raise", UserCodeError, "Guest: respond raised KeyError: 'balance'"),
        ("text", UserCodeError, r"respond returned 'And then\?' \(str\); it must return Reply"),
        ("exit", UserCodeError, "respond raised SystemExit: 3"),
        ("down", Infrastructure, "the judge is down"),
    ],
)
@pytest.mark.parametrize("leaves", ["quietly", "raising", "down", "exit"])
def test_an_interaction_is_closed_after_an_error_and_closing_hides_nothing(
    registered, does, error, says, leaves, caplog
):
    with pytest.raises(error, match=says):
        visit(registered, does=does, leaves=leaves)
    assert [does] == CLOSED
    assert ("closing the interaction of row 'g'" in caplog.text) == (leaves != "quietly")


def test_an_interaction_is_closed_after_a_timeout_or_an_engine_failure(registered):
    config = Config.model_validate({"rollout": {"timeout_s": 0.1}})
    t = visit(registered, config=config, does="sleep")
    assert (t.stop_reason, CLOSED) == ("time", ["sleep"])

    class Down(Scripted):
        async def generate(self, *args, **kwargs):
            raise EngineError("it is down")

    with pytest.raises(EngineError):
        visit(registered, engine=Down([], TOKENIZER))
    assert CLOSED == ["talk"]


def test_an_exception_in_close_does_not_change_the_episode(registered, caplog):
    t = visit(registered, does="nothing", leaves="raising")
    assert t.stop_reason == "done" and "raised ValueError: stuck door" in caplog.text


async def test_an_interaction_is_closed_if_the_episode_is_cancelled(registered):
    CLOSED.clear()
    registered(Guest)
    sample = Sample(
        "g", PROMPT, "tool_agent", interaction="guest", interaction_kwargs={"does": "sleep"}
    )
    engine = Scripted(["Once."], TOKENIZER)
    runtime = Runtime(engine, ChatTemplate(TOKENIZER), LocalToolbox(), Config())
    engine.begin("e")
    playing = asyncio.create_task(
        play_episode(runtime, sample, episode_id="e", rollout=0, sampling=Sampling(), seed=0)
    )
    while not engine.requests:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert CLOSED == ["sleep"] and engine.playing == set()


CTRL_C = """
import asyncio, sys
from agentrl import Interaction, Message, Sample, interaction, play
from agentrl.testing import Scripted, byte_tokenizer

@interaction("patient")
class Patient(Interaction):
    async def respond(self, messages):
        print("waiting", flush=True)
        await asyncio.sleep(60)

    async def close(self):
        print("closed", flush=True)

row = Sample("r", (Message("user", "Hi"),), "tool_agent", interaction="patient")
play(row, Scripted(["Hm."], byte_tokenizer()), byte_tokenizer())
"""


@pytest.mark.slow
def test_an_interaction_is_closed_at_ctrl_c():
    with ForkedPython(["-c", CTRL_C]) as p:
        assert p.read_line() == "waiting\n"
        os.kill(p.pid, signal.SIGINT)
        output, _ = p.communicate(timeout=20)
    assert output == "waiting\nclosed\n" and p.returncode != 0
