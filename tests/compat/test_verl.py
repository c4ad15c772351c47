"""verl's classes and files run as they are."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys

import pytest
from PIL import Image as PIL

from agentrl.compat.verl.adapters import convert_result, interaction_name
from agentrl.compat.verl.bases import ToolResponse
from agentrl.compat.verl.stand_in import _Finder
from agentrl.config import RewardConfig
from agentrl.data import load_checked
from agentrl.errors import DataError, RegistryError, UserCodeError, UserError
from agentrl.images import PLACE, Image, ImageError
from agentrl.registry import load_file, where_to_load
from agentrl.rewards import Scorer
from agentrl.rewards.base import Grader
from agentrl.tools import LocalToolbox
from agentrl.tools.payloads import to_result
from agentrl.trajectory import Sample, ToolCall, ToolResult

from .conftest import FIXTURES, call, played, yaml_of

# -- tools ----------------------------------------------------------------------------------------


def test_a_tool_lives_for_the_episode():
    load_file(str(FIXTURES / "tools.yaml"))
    events = sys.modules["till_tools"].EVENTS
    trajectory = played(
        [call("put_in", amount=3), call("put_in", amount=4), call("put_in", amount="x"), "done"],
        tools=("put_in",),
        tools_kwargs={"put_in": {"create_kwargs": {"start": 5}}},
    )
    assert [m.content for m in trajectory.messages if m.role == "tool"] == [
        "In the till: 8",
        "In the till: 12",
        "Error: invalid arguments for put_in: 'amount' must be an integer, got \"x\"."
        " Expected: put_in(amount: integer)",
    ]
    assert events == [
        ("create", 5),
        ("execute", {"amount": 3}, "assistant"),
        ("execute", {"amount": 4}, "assistant"),
        ("calc_reward", 12),
        ("release",),
    ]
    assert trajectory.tool_reward == 1.0
    assert trajectory.turn_rewards("tool") == 0.5


def test_scope_call_makes_an_instance_for_each_call(tmp_path):
    text = (FIXTURES / "tools.yaml").read_text().replace("goal: 12", "goal: 4, scope: call")
    (tmp_path / "tools.yaml").write_text(text)
    (tmp_path / "till_tools.py").write_text((FIXTURES / "till_tools.py").read_text())
    load_file(str(tmp_path / "tools.yaml"))
    trajectory = played(
        [call("put_in", amount=3), call("put_in", amount=4), "done"], tools=("put_in",)
    )
    assert [m.content for m in trajectory.messages if m.role == "tool"] == [
        "In the till: 3",
        "In the till: 4",
    ]
    events = [e[0] for e in sys.modules["till_tools"].EVENTS]
    assert events == ["create", "execute", "calc_reward", "release"] * 2
    # What an instance was worth is its call's: 0.25 for either, and 1 where the goal was met.
    assert trajectory.turn_rewards("tool") == 0.25 + 1.25


def test_release_is_called_if_the_episode_fails():
    load_file(str(FIXTURES / "tools.yaml"))
    load_file(str(FIXTURES / "interactions.yaml"))
    with pytest.raises(UserCodeError, match="riddle broken"):
        played(
            [call("put_in", amount=3), "crash"],
            tools=("put_in",),
            interaction="riddle",
            interaction_kwargs={"ground_truth": "1"},
        )
    assert sys.modules["till_tools"].EVENTS[-1] == ("release",)
    assert sys.modules["riddles"].EVENTS[-1] == ("finalize",)


def test_the_tutorials_tool_checks_answers():
    load_file(str(FIXTURES / "tools.yaml"))
    trajectory = played(
        [call("calc_gsm8k_reward", answer="4"), call("calc_gsm8k_reward", answer="#### 7"), "7"],
        tools=("calc_gsm8k_reward",),
        tools_kwargs={"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "7"}}},
    )
    first, second = [m.content for m in trajectory.messages if m.role == "tool"]
    assert first == "Current parsed answer='4' reward=0.0"
    assert second == "Current parsed answer='#### 7' reward=1.0"
    assert trajectory.turn_rewards("tool") == -0.05 and trajectory.tool_reward == 1.0


async def test_functions_are_tools():
    load_file(str(FIXTURES / "functions.py"))
    toolbox = LocalToolbox()
    names = ("shout", "twice", "bare")
    shout, twice, bare = toolbox.schemas(names)
    assert shout["function"]["parameters"]["properties"]["text"]["description"] == "what to say"
    assert twice["function"]["name"] == "twice"
    assert bare["function"]["description"] == "As it is."
    await toolbox.open("e", Sample("s", (), tools=names))
    by_name = {"shout": {"text": "hi"}, "twice": {"n": 4}, "bare": {"x": "y"}}
    calls = [ToolCall(name, arguments) for name, arguments in by_name.items()]
    results = await toolbox.run(calls, "e", 0)
    await toolbox.aclose()
    assert [r.content for r in results] == ["HI", "8", '{"got": {"x": "y"}}']
    assert [r.reward for r in results] == [None, 0.5, None]


@pytest.mark.parametrize(
    ("returned", "content", "reward"),
    [
        ("text", "text", None),
        ({"a": "é"}, '{"a": "é"}', None),
        (ToolResponse(text="x"), "x", None),
        (ToolResponse(), "", None),
        (("x",), "x", None),
        (("x", 0.0), "x", None),
        (("x", None, None), "x", None),
        ((ToolResponse(text="x"), -1, {}), "x", -1.0),
        (3, "3", None),
    ],
)
def test_what_tools_return(returned, content, reward):
    result = convert_result(returned, "here")
    assert (result.content, result.reward) == (content, reward)


def test_images_of_a_response_come_before_its_text():
    picture = PIL.new("RGB", (3, 2))
    result = to_result(convert_result((ToolResponse(text="x", image=[picture]), 0.5), "here"))
    assert result == ToolResult(f"{PLACE}x", reward=0.5, images=(Image.of(picture),))


def test_what_tools_may_not_return():
    with pytest.raises(UserError, match="returned videos"):
        convert_result(ToolResponse(video=["film"]), "here")
    with pytest.raises(ImageError, match="'picture' is not an image"):
        convert_result(ToolResponse(image=["picture"]), "here")
    with pytest.raises(TypeError, match="tuple of 4"):
        convert_result(("x", 1, {}, 2), "here")


def test_classes_that_no_yaml_file_registers_are_explained(tmp_path):
    (tmp_path / "bare.py").write_text(
        "from verl.interactions.base import BaseInteraction\n"
        "from verl.tools.base_tool import BaseTool\n"
        "class Post(BaseTool):\n    pass\n"
        "class Teacher(BaseInteraction):\n    pass\n"
    )
    assert where_to_load("post") == "Load its file with --file"
    load_file(str(tmp_path / "bare.py"))
    assert "BaseTool (bare.Post) are registered by a YAML file" in where_to_load("post")
    advice = where_to_load(verls_base="BaseInteraction")
    assert "class_name: bare.Teacher, which --file loads instead" in advice


def test_a_tool_may_have_messages_of_its_own(tmp_path):
    mine = (
        "from verl.tools.base_tool import BaseTool\n"
        "class Post(BaseTool):\n"
        "    async def execute(self, instance_id, parameters, **kwargs):\n"
        "        told = kwargs['agent_data'].messages\n"
        "        return f'{parameters} {told}', 0.0, {}\n"
    )
    text = (
        "tools:\n  - class_name: post_tool.Post\n    config: {}\n    tool_schema: {function: {name:"
        " post, parameters: {type: object, properties: {messages: {type: string}}}}}\n"
    )
    load_file(yaml_of(tmp_path, text, post_tool=mine))
    trajectory = played([call("post", messages="hello"), "done"], tools=("post",))
    assert trajectory.messages[2].content == "{'messages': 'hello'} []"


# -- interactions ---------------------------------------------------------------------------------


def test_an_interaction_is_started_called_and_finalized():
    load_file(str(FIXTURES / "interactions.yaml"))
    events = sys.modules["riddles"].EVENTS
    trajectory = played(
        ["#### 4", "#### 7"],
        interaction="riddle",
        interaction_kwargs={"ground_truth": "7", "query": "?"},
    )
    assert [m.content for m in trajectory.messages] == ["Go.", "#### 4", "Mark: 0.0", "#### 7"]
    assert events == [("start", "7", {"name": "riddle", "query": "?"}), ("finalize",)]
    assert [t.rewards.get("turn", 0.0) for t in trajectory.turns] == [0.0, 0.5]


def test_the_tutorials_interaction_says_whether_it_is_right():
    load_file(str(FIXTURES / "interactions.yaml"))
    trajectory = played(
        ["7", "It is #### 7"], interaction="gsm8k_of_verl", interaction_kwargs={"ground_truth": "7"}
    )
    assert trajectory.messages[2].content.startswith("Your response is incorrect!")
    assert trajectory.turn_rewards("turn") == 1.0 and trajectory.stop_reason == "done"


@pytest.mark.parametrize(
    ("class_name", "name"),
    [("a.b.Gsm8kInteraction", "gsm8k"), ("WeatherInteraction", "weather"), ("a.Other", "other")],
)
def test_names_are_those_of_verl(class_name, name):
    assert interaction_name(class_name) == name


# -- rows and rewards -----------------------------------------------------------------------------


def test_verls_rows_name_tools_and_interactions(tmp_path):
    load_file(str(FIXTURES / "tools.yaml"))
    load_file(str(FIXTURES / "interactions.yaml"))
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "How much?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "12"},
        "agent_name": "tool_agent",
        "extra_info": {
            "index": 3,
            "split": "train",
            "need_tools_kwargs": True,
            "tools_kwargs": {"put_in": {"create_kwargs": {"start": 2}, "execute_kwargs": {}}},
            "interaction_kwargs": {"name": "riddle", "ground_truth": "12", "query": "How much?"},
        },
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    [sample] = load_checked(str(tmp_path / "rows.jsonl"), "single_turn")
    assert sample.tools == ("put_in",) and sample.interaction == "riddle"
    assert sample.ground_truth == "12" and sample.data_source == "openai/gsm8k"


def test_a_row_without_a_required_argument_of_create(tmp_path):
    mine = (
        "from verl.tools.base_tool import BaseTool\n"
        "class Till(BaseTool):\n"
        "    async def create(self, instance_id, start: int, limit=9): return instance_id\n"
        "    async def execute(self, instance_id, parameters, **kwargs): return 'x'\n"
    )
    text = (
        "tools:\n  - class_name: strict_till.Till\n    config: {}\n    tool_schema: {function:"
        " {name: till, parameters: {type: object, properties: {}}}}\n"
    )
    load_file(yaml_of(tmp_path, text, strict_till=mine))
    rows = [{}, {"start": 1, "stop": 2}, {"start": 1, "limit": 2}]
    lines = [
        {"prompt": "a", "agent_name": "tool_agent", "tools": ["till"],
         "tools_kwargs": {"till": {"create_kwargs": kwargs}}}
        for kwargs in rows
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DataError) as refused:
        load_checked(str(tmp_path / "rows.jsonl"))
    message = str(refused.value)
    assert "row 0, tools_kwargs: tool 'till': missing argument 'start'" in message
    assert "row 1, tools_kwargs: tool 'till': unknown argument 'stop'" in message
    assert "row 2" not in message


def test_a_compute_score_with_verls_imports():
    config = RewardConfig(
        function=f"{FIXTURES / 'functions.py'}:compute_score", kwargs={"bonus": 0.5}
    )
    scorer = Scorer(config)
    scored = asyncio.run(scorer.score(played(["#### 7"], ground_truth="7")))
    assert scored.reward == 1.5


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- name: my_loop\n  _target_: a.b.Loop\n", r"'my_loop' \(a.b.Loop\).*docs/verl.md"),
        ("model: {path: tiny}\n", "not a file of verl's tools or interactions.*--config"),
        ("tools: [{config: {}}]\n", r"tools\[0\] needs a class_name"),
        ("tools: [{class_name: no_such.Tool, config: {}}]\n", "no_such.*does not load"),
        ("tools: [{class_name: bad.Missing, config: {}}]\n", "Missing"),
        ("tools: [{class_name: bad.Plain, config: {}}]\n", "not a tool of verl.*async def create"),
        ("tools: [{class_name: bad.Bare, config: {}}]\n", "has no schema"),
        ("tools: [{class_name: bad.Bare, config: {type: mcp}}]\n", r"mcp\+http"),
        ("tools: [{class_name: bad.Bare, config: {scope: run}}]\n", "scope='run'"),
        ("tools: [{class_name: bad.Bare, config: {k: '${oc.env:X}'}}]\n", "interpolations"),
        ("tools: [{class_name: bad.Bare, tool_schema: {function: 3}}]\n", "tool_schema"),
        ("tools: [{class_name: bad.Loop, config: {}}]\n", "agent loop"),
        ("tools: [{class_name: bad.Odd, config: {}}]\n", "cannot be made: KeyError"),
        ("interaction: [{class_name: bad.Plain}]\n", "not an interaction of verl's"),
        ("interaction: [{class_name: bad.I}, {class_name: bad.I}]\n", "two interactions"),
        (
            "tools: [&t {class_name: bad.Bare, tool_schema: {function: {name: x}}}, *t]\n",
            "two tools have the name 'x'",
        ),
        ("tools: {class_name: x}\n", "needs a list"),
        ("tools: [\n", "cannot be read as YAML"),
    ],
)  # fmt: skip
def test_unsupported_classes_are_refused_with_a_reason(tmp_path, text, message):
    bad = """
from verl.tools.base_tool import BaseTool
from verl.interactions.base import BaseInteraction

class Plain:
    def __init__(self, *args):
        pass

class Bare(BaseTool):
    pass

class AgentLoopBase:
    pass

class Loop(AgentLoopBase):
    pass

class Odd(BaseTool):
    def __init__(self, config, schema):
        config["no_such_key"]

class I(BaseInteraction):
    pass
"""
    name = f"bad_{abs(hash(text))}"
    text = text.replace("bad.", f"{name}.")
    if "Bare" in text and "tool_schema" not in text and "scope" in text:
        text = text.replace("}}]", "}, tool_schema: {function: {name: x}}}]")
    with pytest.raises((UserError, RegistryError), match=message):
        load_file(yaml_of(tmp_path, text, **{name: bad}))


def test_names_of_other_verl_modules_are_refused_where_they_are_used(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from verl.tools.base_tool import BaseTool\nimport verl.trainer.ppo.ray_trainer as ray\n"
        "class Mine(ray.RayPPOTrainer): pass\n"
    )
    with pytest.raises(UserError, match=r"verl\.trainer\.ppo\.ray_trainer import .*docs/verl\.md"):
        load_file(str(file)).Mine()
    file = tmp_path / "yours.py"
    file.write_text("from verl.tools.schemas import NoSuch\nNoSuch()\n")
    with pytest.raises(UserError, match=r"NoSuch.*ToolResponse"):
        load_file(str(file))


REGISTERED = [
    ("experimental.agent_loop.agent_loop", "AgentLoopBase", "register", "@agent_loop"),
    ("experimental.reward_loop.reward_manager", "RewardManagerBase", "register", "@reward"),
    ("workers.reward_manager", "AbstractRewardManager", "register", "@reward"),
    ("trainer.ppo.core_algos", "AdvantageEstimator", "register_adv_est", "@advantage_estimator"),
    ("trainer.ppo.core_algos", "agg_loss", "register_policy_loss", "@policy_loss"),
]


@pytest.mark.parametrize(("module", "base", "decorator", "ours"), REGISTERED)
def test_what_verls_decorators_register_is_refused_by_its_name(
    tmp_path, module, base, decorator, ours
):
    text = f"from verl.{module} import {base}, {decorator}\n"
    file = tmp_path / "mine.py"
    file.write_text(text)
    load_file(str(file))  # It registers nothing.
    file = tmp_path / "yours.py"
    file.write_text(text + f"@{decorator}('my_name')\nclass Mine({base}):\n    pass\n")
    with pytest.raises(UserError, match=rf"@{decorator}\('my_name'\): .*docs/.*\.md.*{ours}"):
        load_file(str(file))


def test_an_installed_verl_is_used(tmp_path, monkeypatch):
    """A package of that name that Python finds: its own classes, by what they can do."""
    base = tmp_path / "site" / "verl" / "tools"
    base.mkdir(parents=True)
    for folder in (base, base.parent):
        (folder / "__init__.py").write_text("")
    (base / "base_tool.py").write_text(
        "class BaseTool:\n"
        "    def __init__(self, config, tool_schema):\n"
        "        self.config, self.tool_schema = config, tool_schema\n"
        "    def get_openai_tool_schema(self): return self.tool_schema\n"
        "    async def create(self, instance_id=None, **kwargs): return instance_id\n"
        "    async def release(self, instance_id, **kwargs): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    text = (FIXTURES / "tools.yaml").read_text().partition("  - class_name: verl")[0]
    text = text.replace("till_tools.TillTool", "own_tool.Echo")
    own = (
        "from verl.tools.base_tool import BaseTool\n"
        "class Echo(BaseTool):\n"
        "    async def execute(self, instance_id, parameters, **kwargs):\n"
        "        return f'got {parameters}', 0.0, {}\n"
    )
    load_file(yaml_of(tmp_path, text, own_tool=own))
    assert not any(isinstance(f, _Finder) for f in sys.meta_path)
    trajectory = played([call("put_in", amount=1), "done"], tools=("put_in",))
    assert trajectory.messages[2].content == "got {'amount': 1}"


def test_verl_is_not_importable_without_a_file_that_needs_it():
    assert importlib.util.find_spec("verl") is None
    assert not any(isinstance(f, _Finder) for f in sys.meta_path)
    assert Grader  # imported above without it
