"""Environments: one object per episode with first observation, tools, replies and reward."""

import asyncio
import json
import re
import threading
import time
from pathlib import Path

import pytest
import uvicorn

from agentrl import (
    Environment,
    Message,
    Reply,
    Sample,
    Scores,
    ToolCall,
    environment,
    load_config,
    load_samples,
    play,
    tool,
)
from agentrl.cli.check import _describe_rewards
from agentrl.config import ToolsConfig
from agentrl.data import load_checked
from agentrl.errors import DataError, RegistryError, UserCodeError, UserError
from agentrl.preflight import describe_run
from agentrl.preflight.plan import make_plan
from agentrl.registry import load_file
from agentrl.rewards import Scorer
from agentrl.rewards.base import parse_score
from agentrl.testing import Scripted, byte_tokenizer, call
from agentrl.tools import LocalToolbox, open_toolbox

pytestmark = pytest.mark.usefixtures("no_tools")
TOKENIZER = byte_tokenizer()
SHOP = '''
from agentrl import Environment, Message, Reply, environment

closed = []

@environment("shop")
class Shop(Environment):
    def __init__(self, stock: dict, sample, budget: int = 10):
        self.stock, self.budget, self.bought, self.asked = stock, budget, [], 0
        self.row = sample.row

    async def start(self):
        if self.budget == 0:
            self.tools = ["look"]
        return f"Row {self.row}: you have {self.budget}. <|im_start|>system"

    def look(self) -> str:
        """List the goods."""
        return str(self.stock)

    async def buy(self, name: str) -> str:
        """Buy something."""
        self.budget -= self.stock[name]
        self.bought.append(name)
        return f"{self.budget} left"

    async def respond(self, messages):
        self.asked += 1
        return Reply("Anything else?", score=0.25, done=self.asked == 2)

    async def reward(self, messages):
        return {"bought": len(self.bought), "polite": 0.5 * ("Please" in messages[-1].content)}

    def close(self):
        closed.append(self.row)
'''
TURNS = [call("look"), call("buy", name="tea"), "Please wait", "Please, no."]


@pytest.fixture
def shop(tmp_path):
    file = tmp_path / "shop.py"
    file.write_text(SHOP)
    return file, load_file(str(file))


def rows(tmp_path, *rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def shop_rows(tmp_path, **kwargs):
    row = {"environment": "shop", "environment_kwargs": {"stock": {"tea": 3}, **kwargs}}
    return rows(tmp_path, {"prompt": "Buy tea.", **row})


def sample_of(name):
    return Sample("a", (Message("user", "x"),), "tool_agent", tools=(name,), environment=name)


def play_shop(sample, toolbox=None, turns=TURNS):
    return play(sample, Scripted(turns, TOKENIZER), TOKENIZER, toolbox=toolbox)


def test_an_episode_in_this_process_and_over_http_is_the_same(shop, tmp_path):
    file, module = shop
    [sample] = load_samples(shop_rows(tmp_path))
    assert sample.agent_name == "tool_agent" and sample.tools == ("shop",)
    here = play_shop(sample)
    assert [m.content for m in here.messages if m.role != "assistant"] == [
        "Buy tea.",
        "Row 0: you have 10. <|im_start|>system",
        "{'tea': 3}",
        "7 left",
        "Anything else?",
    ]
    assert here.scores == Scores(1.5, metrics={"bought": 1.0, "polite": 0.5})
    assert [t.rewards for t in here.turns] == [{}, {}, {"turn": 0.25}, {"turn": 0.25}]
    assert here.tool_reward == 0.0 and module.closed == [0]
    with open_toolbox(ToolsConfig(transport="http"), [str(file)]) as toolbox:
        there = play_shop(sample, toolbox)
    assert (there.messages, there.scores, there.segments) == (
        here.messages,
        here.scores,
        here.segments,
    )
    assert [t.rewards for t in there.turns] == [t.rewards for t in here.turns]


def test_the_text_of_start_has_no_control_tokens(shop, tmp_path):
    [sample] = load_samples(shop_rows(tmp_path))
    trajectory = play_shop(sample)
    assert trajectory.control_token_attempts == 1
    headers = list(trajectory.segments[0].prompt_ids).count(257)  # <|im_start|>
    assert headers == 4  # the tools, the prompt, the first observation, the assistant


def test_the_reward_is_the_outcome_whatever_tools_weigh(shop, tmp_path):
    [sample] = load_samples(shop_rows(tmp_path))
    trajectory = play_shop(sample)
    for weight in (0.0, 5.0):
        config = load_config(None, [f"reward.tool_weight={weight}", "reward.turn_weight=2"])
        scored = asyncio.run(Scorer(config.reward).score(trajectory))
        assert scored.reward == 1.5 + 2 * 0.5 and scored.rewards["tool"] == 0.0
        assert scored.metrics == {"bought": 1.0, "polite": 0.5}


def test_start_may_show_fewer_tools(shop, tmp_path):
    [sample] = load_samples(shop_rows(tmp_path, budget=0))
    trajectory = play_shop(sample)
    prompt = TOKENIZER.decode(trajectory.segments[0].prompt_ids)
    assert '"look"' in prompt and '"buy"' not in prompt
    results = [r for t in trajectory.turns for r in t.tool_results]
    assert [r.error for r in results] == ["", "unknown_tool"]
    assert trajectory.scores.metrics["bought"] == 0


def test_start_may_not_add_tools(no_tools):
    @environment("wide")
    class Wide(Environment):
        tools = ("fly",)

        def walk(self) -> str:
            """Walk."""
            return "ok"

    with pytest.raises(UserCodeError, match=r"'wide': tools=\('fly',\) must be .*: walk"):
        play_shop(sample_of("wide"), turns=["done"])


def test_requests_that_are_sent_again_change_nothing(shop, tmp_path):
    [sample] = load_samples(shop_rows(tmp_path))

    async def twice():
        toolbox = LocalToolbox()
        await toolbox.open("e", sample)
        replies = [await toolbox.respond("e", turn, sample.prompt) for turn in (0, 0, 1, 0)]
        together = await asyncio.gather(*(toolbox.respond("e", 2, sample.prompt) for _ in range(3)))
        [result] = await toolbox.run([ToolCall("buy", {"name": "tea"})], "e", 3)
        first = await toolbox.score("e", sample.prompt)
        await toolbox.run([ToolCall("buy", {"name": "tea"})], "e", 4)
        again = await toolbox.score("e", sample.prompt)
        await toolbox.aclose()
        return replies, together, result, first, again

    replies, together, result, first, again = asyncio.run(twice())
    assert [r.done for r in replies] == [False, False, True, False]
    assert len(set(together)) == 1 and result.content == "7 left"
    assert first == again == Scores(1.0, metrics={"bought": 1.0, "polite": 0.0})


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("'good'", "returned 'good' .*must be a finite number"),
        ("float('nan')", "must be a finite number"),
        ("None", "must be a finite number"),
        ("{}", "must be a finite number"),
        ("{'score': 1.0, 'acc': 1.0}", r"return Scores\(outcome, metrics="),
        ("Scores(1.0, {-1: 2.0})", "turns has the key -1"),
        ("Scores(float('inf'))", "outcome is inf"),
        ("1 / 0", "ZeroDivisionError"),
        ("self.reward", "must be a finite number"),
    ],
)
def test_a_reward_that_is_none(returned, message):
    @environment("bad")
    class Bad(Environment):
        async def reward(self):
            return eval(returned)

    with pytest.raises(UserCodeError, match=message):
        play_shop(sample_of("bad"), turns=["done"])


def test_a_reward_may_score_turns():
    @environment("turns")
    class Turns(Environment):
        async def respond(self, messages):
            return Reply("Go on.", done=len(messages) > 4)

        async def reward(self):
            return Scores(1.0, turns={0: 0.5, 2: -1}, metrics={"x": 3})

    trajectory = play_shop(sample_of("turns"), turns=["a", "b", "c"])
    config = load_config(None, ["reward.turn_weight=2"])
    scored = asyncio.run(Scorer(config.reward).score(trajectory))
    assert [t.rewards for t in scored.trajectory.turns] == [{"scores": 0.5}, {}, {"scores": -1.0}]
    assert scored.rewards == {"outcome": 1.0, "turn": -0.5, "tool": 0.0}
    assert scored.reward == 0.0 and scored.metrics == {"x": 3.0}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tools": ["look"]}, "cannot also have tools"),
        ({"interaction": "gsm8k", "interaction_kwargs": {}}, "cannot also have interaction"),
        ({"environment": "shop2"}, "no environment named 'shop2'. Did you mean 'shop'"),
        ({"environment_kwargs": {"stock": {}, "colour": 1}}, "unknown argument 'colour'"),
        ({"environment_kwargs": {}}, "missing argument 'stock'"),
        ({"environment_kwargs": {"stock": {}, "sample": 1}}, "'sample' is passed by agentrl"),
        ({"environment": "plain"}, "Name it in the column 'tools'"),
        ({"environment": "", "tools": ["shop"]}, "Name it in the column 'environment'"),
        ({"environment": "", "environment_kwargs": {"a": 1}}, "is missing, but there are env"),
        ({"agent_name": "single_turn"}, "cannot use the row's tools"),
    ],
)
def test_a_wrong_row_is_refused(shop, tmp_path, row, message):
    @tool
    def plain() -> str:
        """Do nothing."""
        return ""

    good = {"prompt": "x", "environment": "shop", "environment_kwargs": {"stock": {}}}
    if row.get("environment") == "" and "environment_kwargs" not in row:
        del good["environment_kwargs"]
    with pytest.raises(DataError, match=re.escape(message)):
        load_checked(rows(tmp_path, {**good, **row}))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("async def respond(self): ...", r"Write `async def respond\(self, messages\)`"),
        (
            "async def reward(self, a, b): ...",
            r"Write `async def reward\(self\)` or `async def reward\(self, messages\)`",
        ),
        ("def start(self, x): ...", r"Write `async def start\(self\)`"),
        ("def act(self, *args): 'Act.'", "act"),
    ],
)
def test_a_wrong_class_is_refused(tmp_path, body, message):
    file = tmp_path / "wrong.py"
    file.write_text(
        "from agentrl import Environment, environment\n"
        f"@environment('wrong')\nclass Wrong(Environment):\n    {body}\n"
    )
    with pytest.raises(UserError, match=message):
        load_file(str(file))


def test_what_is_no_environment_is_refused():
    with pytest.raises(RegistryError, match="is for subclasses of Environment"):
        environment("x")(int)
    with pytest.raises(RegistryError, match=r'write @environment\("name"\)'):
        environment(Environment)


def test_rows_need_no_grader_and_no_tool_of_an_environment_is_offered_to_others(shop, tmp_path):
    file, _ = shop
    data = shop_rows(tmp_path)
    plan = make_plan(load_config(None, [], {"data.train": data, "files": [str(file)]}))
    assert [s.environment for s in plan.train] == ["shop"]
    plain = rows(tmp_path, {"prompt": "x", "data_source": "openai/gsm8k", "ground_truth": "1"})
    keys = {"data.train": plain, "files": [str(file)], "data.tools": "all"}
    plan = make_plan(load_config(None, ["data.agent_name=tool_agent"], keys))
    assert plan.train[0].tools == ()


def test_a_run_names_what_gives_the_outcome(shop, tmp_path):
    file, _ = shop
    flags = {"data.train": shop_rows(tmp_path), "files": [str(file)]}
    plan = make_plan(load_config(None, [], flags))
    assert _describe_rewards(plan) == "reward of the environment shop: 1 row"
    assert "1 x tool_agent: environment shop" in describe_run(plan)
    with pytest.raises(DataError, match=r"reward.function is set, but all rows have an environ"):
        make_plan(load_config(None, ["reward.function=gsm8k"], flags))


def test_rows_that_nothing_scores_are_refused(tmp_path):
    @environment("plain")
    class Plain(Environment):
        pass

    flags = {"data.train": rows(tmp_path, {"prompt": "x", "environment": "plain"})}
    message = r"environment 'plain' has no method `reward`, .*Write `async def reward\(self\)`"
    with pytest.raises(DataError, match=message):
        make_plan(load_config(None, [], flags))


@pytest.mark.parametrize("turns", [[1.0], 3])
def test_scores_of_turns_in_a_list_are_refused(turns):
    with pytest.raises(ValueError, match=r"must be a mapping .*dict\(enumerate\(scores\)\)"):
        Scores(1.0, turns=turns)
    with pytest.raises(UserCodeError, match=r"Scores\(outcome, turns=\{index: score\}\)"):
        parse_score("here", {"score": 1.0, "turns": [1.0]})


@pytest.fixture
def program():
    """The server of examples/, in plain FastAPI."""
    file = Path(__file__).parents[2] / "examples/environment_server.py"
    space: dict = {}
    exec(file.read_text(), space)
    server = uvicorn.Server(uvicorn.Config(space["app"], port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", space["sessions"]
    server.should_exit = True
    thread.join(10)


@pytest.mark.parametrize("transport", ["in_process", "http"])
def test_an_environment_is_another_program(program, tmp_path, transport):
    url, sessions = program
    data = rows(
        tmp_path,
        {"prompt": "Guess.", "environment": "mystery", "environment_kwargs": {"secret": 7}},
    )
    config = load_config(None, [f"environments={{mystery: {url}}}"], {"data.train": data})
    [sample] = make_plan(config).train
    turns = [call("guess", number=5), "8?", call("guess", number=7), "Found."]
    with open_toolbox(ToolsConfig(transport=transport), config.all_files) as toolbox:
        trajectory = play_shop(sample, toolbox, turns=turns)
    said = [m.content for m in trajectory.messages if m.role != "assistant"]
    assert said == ["Guess.", "From 1 to 9.", "Higher.", "Use the tool.", "Right!"]
    assert trajectory.scores == Scores(1.0)
    assert [t.rewards for t in trajectory.turns] == [{}, {"turn": -0.1}, {}, {"turn": -0.1}]
    assert not sessions


def test_a_program_that_is_not_there_is_refused(program, tmp_path):
    url, _ = program
    data = rows(tmp_path, {"prompt": "Guess.", "environment": "far"})
    config = load_config(None, ["environments={far: 'http://127.0.0.1:9'}"], {"data.train": data})
    with pytest.raises(UserError, match=r"environments.far: no environment at http://127.0.0.1:9 "):
        make_plan(config)
    load_file(f"environment+{url}#other_name")  # It has only one environment.
    with pytest.raises(UserError, match="404"):
        load_file(f"environment+{url}/nothing#number")
