"""Gymnasium's environments as conversations."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from agentrl import interaction, play
from agentrl.config import Config
from agentrl.data import check_samples
from agentrl.errors import DataError, EpisodeOver, UserCodeError
from agentrl.interactions import GymInteraction, respond
from agentrl.interactions.spaces import describe, describe_action, read_action
from agentrl.testing import Scripted, byte_tokenizer
from agentrl.trajectory import Message, Sample

TOKENIZER = byte_tokenizer()
CLOSED: list[str] = []
STEPS_IN: set[str] = set()


class Corridor(gymnasium.Env):
    """Walk from a random place to place 3; a step costs 1, the end pays 10."""

    observation_space = spaces.Discrete(7)
    action_space = spaces.Discrete(2)

    def __init__(self, length=7):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = (options or {}).get("at", int(self.np_random.integers(7)))
        return self.at, {}

    def step(self, action):
        STEPS_IN.add(threading.current_thread().name)
        self.at = max(0, min(self.length - 1, self.at + (1 if action else -1)))
        return self.at, 10.0 if self.at == 3 else -1.0, self.at == 3, False, {}

    def close(self):
        CLOSED.append("corridor")


class Echo(gymnasium.Env):
    """Says back what it is told, until that is `bye`; `boom` breaks it, `hang` hangs it."""

    observation_space = spaces.Text(100, charset="abcdefghijklmnopqrstuvwxyz .?")
    action_space = spaces.Text(20, charset="abcdefghijklmnopqrstuvwxyz ")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "what?", {}

    def step(self, action):
        if action == "boom":
            raise KeyError("fuse")
        if action == "hang":
            time.sleep(1.5)
        return f"{action}?", float(len(action)), action == "bye", False, {}

    def close(self):
        CLOSED.append("echo")


@pytest.fixture(scope="module", autouse=True)
def registered():
    gymnasium.register("agentrl_tests/Corridor-v0", Corridor, max_episode_steps=20)
    gymnasium.register("agentrl_tests/Echo-v0", Echo)
    yield
    for name in ("agentrl_tests/Corridor-v0", "agentrl_tests/Echo-v0"):
        gymnasium.registry.pop(name)


@pytest.fixture(autouse=True)
def nothing_closed():
    CLOSED.clear()


def row(env_id="agentrl_tests/Corridor-v0", **kwargs):
    return Sample(
        "r5",
        (Message("user", "Go."),),
        agent_name="tool_agent",
        interaction="gym",
        interaction_kwargs={"env_id": env_id, **kwargs},
        row=5,
    )


CONFIG = Config.model_validate(
    {
        "interaction": {
            "kwargs": {"gym": {"envs": ["agentrl_tests/Corridor-v0", "agentrl_tests/Echo-v0"]}}
        },
        "rollout": {"max_turns": 30},
    }
)


def played(sample, *answers, config=CONFIG):
    return play(sample, Scripted(list(answers), TOKENIZER), TOKENIZER, config=config)


def test_an_episode_in_a_gym_environment():
    t = played(row(reset_options={"at": 0}, actions=["left", "right"]), *["I go right."] * 3)
    assert [m.content for m in t.messages if m.role == "user"] == ["Go.", "1", "2"]
    assert [turn.rewards["turn"] for turn in t.turns] == [-1, -1, 10]
    assert t.stop_reason == "done" and CLOSED == ["corridor"]
    assert all(name.startswith("gym-") for name in STEPS_IN), "no step on the event loop"


def test_rollouts_of_a_row_begin_alike_and_rows_differ():
    def walked(sample):
        return [m.content for m in played(sample, *["0"] * 20).messages if m.role == "user"][1:]

    for number in (5, 5, 6, 7, 8, 9, 10):
        at = int(GymInteraction.first(number, envs=["agentrl_tests/Corridor-v0"]))
        path = range(at - 1, 3, -1) if at > 3 else [max(0, at - 1 - i) for i in range(19)]
        assert walked(replace(row(), row=number)) == [str(place) for place in path]
    firsts = {GymInteraction.first(n, envs=["agentrl_tests/Corridor-v0"]) for n in range(9)}
    assert len(firsts) > 3
    # A seed in the row says it, whatever the row's number.
    assert walked(replace(row(seed=1), row=1)) == walked(replace(row(seed=1), row=2))


def test_an_answer_without_an_action_gets_an_error_and_a_penalty():
    sample = row(reset_options={"at": 2}, actions=["left", "right"], invalid_penalty=0.5)
    t = played(sample, "Er, up?", "no... left... no, RIGHT!")
    assert t.messages[2].content == "Error: no valid action found. Reply with one of: left, right."
    assert [turn.rewards["turn"] for turn in t.turns] == [-0.5, 10.0]


def test_max_steps_counts_answers():
    t = played(row(reset_options={"at": 6}, max_steps=3), "what", "1", "1")
    assert len(t.turns) == 3 and t.stop_reason == "done"


def test_the_environments_own_limit():
    t = played(row(reset_options={"at": 6}), *["1"] * 20)
    assert len(t.turns) == 20 and t.stop_reason == "done"


def test_texts():
    t = played(row("agentrl_tests/Echo-v0"), "<think>hm</think>\nhi there", "Oh!", "bye")
    first, second = (m.content for m in t.messages[2::2])
    assert first == "hi there?"
    assert second.startswith(
        "Error: no valid action found. Reply with a text of 1 to 20 characters"
    )
    assert t.turn_rewards("turn") == 8 + 0 + 3


def test_an_environment_that_raises_is_named_and_closed():
    with pytest.raises(UserCodeError, match="interaction GymInteraction: respond raised KeyError"):
        played(row("agentrl_tests/Echo-v0"), "boom")
    assert CLOSED == ["echo"]


@pytest.mark.timing
async def test_a_step_that_hangs_ends_with_the_episode_and_is_closed_after_it():
    one = GymInteraction(row(), envs=["agentrl_tests/Echo-v0"])
    await respond(one, [Message("assistant", "hi")], time.monotonic() + 5)
    started = time.monotonic()
    with pytest.raises(EpisodeOver):
        await respond(one, [Message("assistant", "hang")], started + 0.1)
    assert time.monotonic() - started < 1
    assert CLOSED == []
    await one.close()
    assert CLOSED == ["echo"]


async def test_many_environments_at_once():
    """Twenty steps that sleep take as long as one: none is in another's way."""
    ones = [GymInteraction(row(), envs=["agentrl_tests/Echo-v0"]) for _ in range(20)]
    started = time.monotonic()
    tasks = [respond(o, [Message("assistant", "hang")], time.monotonic() + 20) for o in ones]
    replies = await asyncio.gather(*tasks)
    assert time.monotonic() - started < 6
    assert {r.content for r in replies if r} == {"hang?"}
    await asyncio.gather(*(o.close() for o in ones))


# -- text and spaces -------------------------------------------------------------------------------

BOX = spaces.Box(-2, 2, (2,), np.float32)


@pytest.mark.parametrize(
    ("space", "value", "names", "text"),
    [
        (spaces.Discrete(4), np.int64(3), (), "3"),
        (spaces.Discrete(3, start=1), 2, ("a", "b", "c"), "b"),
        (BOX, np.array([0.12345, -1.0]), (), "[0.123, -1]"),
        (BOX, np.array([0.12345, -1.0]), ("x", "speed"), "x 0.123, speed -1"),
        (spaces.MultiBinary(3), np.array([1, 0, 1]), (), "[1, 0, 1]"),
        (
            spaces.Tuple([spaces.Discrete(32), spaces.Discrete(11)]),
            (14, 6),
            ("your sum", "dealer's card"),
            "your sum 14, dealer's card 6",
        ),
        (
            spaces.Dict({"at": spaces.Discrete(3), "wind": spaces.Box(0, 9, ())}),
            {"at": 2, "wind": np.float32(1.5)},
            (),
            "at 2, wind [1.5]",
        ),
        (
            spaces.Dict({"p": spaces.Discrete(3), "w": spaces.Discrete(9)}),
            {"p": 2, "w": 7},
            ("position", "wind"),
            "position 2, wind 7",
        ),
        (spaces.Text(9), "hello", (), "hello"),
    ],
)
def test_observations_are_described(space, value, names, text):
    assert describe(space, value, names) == text


@pytest.mark.parametrize(
    ("space", "text", "names", "action"),
    [
        (spaces.Discrete(3), "2", (), 2),
        (spaces.Discrete(3), "first 0, then I choose 1.", (), 1),
        (spaces.Discrete(3), '{"action": 2}', (), 2),
        (spaces.Discrete(3), "3", (), None),
        (spaces.Discrete(3), "1.5", (), None),
        (spaces.Discrete(3), "99999999999999999999", (), None),
        (spaces.Discrete(3, start=-1), "-1", (), -1),
        (spaces.Discrete(2), "Move up-left, not up", ("up", "up-left"), 0),
        (spaces.Discrete(2), "upwards 1", ("up", "down"), None),
        (spaces.Discrete(2, start=5), "Down", ("up", "down"), 6),
        (BOX, "from [0, 0] to [1.5, -2]", (), [1.5, -2]),
        (BOX, "[1.5, -2.5]", (), None),
        (BOX, "[1.5]", (), None),
        (BOX, "[NaN, 0]", (), None),
        (BOX, "[1, oops]", (), None),
        (BOX, "[[1], [2, -1]", (), [2, -1]),
        (BOX, "1.5", (), None),
        (spaces.Box(-2, 2, (1,), np.float32), "a torque of 0.5", (), [0.5]),
        (spaces.MultiDiscrete([3, 4]), "[2, 3]", (), [2, 3]),
        (spaces.MultiDiscrete([3, 4]), "[2, 4]", (), None),
        (spaces.MultiDiscrete([3, 4]), "[0.5, 1]", (), None),
        (spaces.MultiBinary(2), "[1, 0]", (), [1, 0]),
        (spaces.MultiBinary(2), '["a", "b"]', (), None),
        (spaces.Text(4, charset="ab"), " abba\n", (), "abba"),
        (spaces.Text(4, charset="ab"), "abc", (), None),
    ],
)
def test_actions_are_read(space, text, names, action):
    result = read_action(space, text, names)
    assert (result is None) == (action is None)
    assert action is None or np.array_equal(result, action)
    assert result is None or space.contains(result)
    assert describe_action(space, names)


@given(st.text('0123456789-.,[]eE {}"naif\n', max_size=60))
def test_any_text_is_an_action_or_none(text):
    for space in (spaces.Discrete(4), BOX, spaces.MultiDiscrete([3, 4]), spaces.Box(-1, 1, ())):
        result = read_action(space, text)
        assert result is None or space.contains(result)


# -- what may be played ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row_kwargs", "config", "says"),
    [
        ({"env_id": "os:system"}, {"envs": ["CartPole-v1"]}, "env_id='os:system' is not one of"),
        ({"env_id": "CartPole-v1"}, {}, "missing argument 'envs'"),
        ({"envs": ["CartPole-v1"]}, {}, "'envs' can only be set in the config"),
        (
            {"env_kwargs": {}},
            {"envs": ["CartPole-v1"]},
            "'env_kwargs' can only be set in the config",
        ),
        ({}, {"envs": ["CartPole-v1", "Taxi-v4"]}, "env_id must name one"),
        ({}, {"envs": "CartPole-v1"}, "envs='CartPole-v1' must be a list"),
        ({}, {"envs": ["CartPoll-v1"]}, "make.'CartPoll-v1'. raised .*CartPole"),
        (
            {"actions": ["left"]},
            {"envs": ["CartPole-v1"]},
            r"must have one name for each of Discrete\(2\)",
        ),
        (
            {"observations": ["x"]},
            {"envs": ["CartPole-v1"]},
            "must have one name for each part of Box",
        ),
        (
            {"observations": ["x", "y", "z"]},
            {"envs": ["agentrl_tests/Pair-v0"]},
            r"must have one name for each part of Dict\(.*\), which has 2",
        ),
        ({}, {"envs": ["agentrl_tests/Picture-v0"]}, "cannot be described: override `describe`"),
        ({"seed": 1, "sead": 2}, {"envs": ["CartPole-v1"]}, "unknown argument 'sead'"),
    ],
)
def test_unsupported_environments_are_refused_before_the_run(row_kwargs, config, says):
    class Picture(Corridor):
        observation_space = spaces.Box(0, 255, (84, 84, 3), np.uint8)

    class Pair(Corridor):
        observation_space = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Discrete(3)})

    gymnasium.register("agentrl_tests/Picture-v0", Picture)
    gymnasium.register("agentrl_tests/Pair-v0", Pair)
    sample = replace(row(), interaction_kwargs=row_kwargs)
    try:
        with pytest.raises(DataError, match=says):
            check_samples([sample], "rows.jsonl", {"gym": config})
    finally:
        gymnasium.registry.pop("agentrl_tests/Picture-v0")
        gymnasium.registry.pop("agentrl_tests/Pair-v0")


def test_an_unchecked_row_cannot_name_another_environment_either():
    with pytest.raises(UserCodeError, match="env_id='CartPole-v1' is not one of them"):
        played(row("CartPole-v1"), "0")


def test_custom_texts():
    @interaction("corridor")
    class InWords(GymInteraction):
        def describe(self, observation):
            return "left of it" if observation < 3 else "right of it"

        def read(self, text):
            return np.int64("east" in text)

    config = Config.model_validate(
        {"interaction": {"kwargs": {"corridor": {"envs": ["agentrl_tests/Corridor-v0"]}}}}
    )
    sample = replace(row(), interaction="corridor", interaction_kwargs={"reset_options": {"at": 1}})
    check_samples([sample], "rows.jsonl", config.interaction.kwargs)
    t = played(sample, "east", "to the east", config=config)
    assert t.messages[2].content == "left of it" and t.turns[-1].rewards["turn"] == 10
    assert InWords.first(0, envs=["agentrl_tests/Corridor-v0"]).endswith("of it")


def test_the_games_of_gymnasium_that_fit():
    for env_id, answer in (("CartPole-v1", "0"), ("Taxi-v4", "1"), ("Blackjack-v1", "0"),
                           ("Pendulum-v1", "[0.5]"), ("FrozenLake-v1", "2")):  # fmt: skip
        config = {"envs": [env_id]}
        sample = replace(row(), interaction_kwargs={"max_steps": 1})
        check_samples([sample], "rows.jsonl", {"gym": config})
        t = played(
            sample, answer,
            config=Config.model_validate({"interaction": {"kwargs": {"gym": config}}}),
        )  # fmt: skip
        assert t.stop_reason == "done" and len(t.turns) == 1
