"""docs/verl.md, "What must be written again": the lines that replace what agentrl refuses."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from support.installed_verl import VERL

from agentrl import registry
from agentrl.agent_loops.play import play
from agentrl.compat.verl.__main__ import main
from agentrl.config import AgentConfig, Config
from agentrl.data import load_samples
from agentrl.engine.scripted import Scripted
from agentrl.errors import UserError
from agentrl.interactions import Interaction, Reply, interaction
from agentrl.registry import load_file
from agentrl.testing import byte_tokenizer
from agentrl.tools import tool
from agentrl.trajectory import Message, Sample

from .conftest import call

PAGE = Path(__file__).parents[2] / "docs" / "verl.md"
TOKENIZER = byte_tokenizer()


def lines_of(section: str) -> str:
    """Return the Python code of a section of the page."""
    text = re.split(r"\n##+ ", PAGE.read_text().partition(f"\n### {section}\n")[2])[0]
    (code,) = re.findall(r"```(?:python|text)\n(.*?)```", text, re.DOTALL)
    return code


def load(tmp_path, section: str) -> None:
    (tmp_path / "mine.py").write_text(lines_of(section))
    load_file(str(tmp_path / "mine.py"))


@pytest.fixture(autouse=True)
def own_names():
    loops, interactions = registry.agent_loops.isolated(), registry.interactions.isolated()
    with loops, interactions, registry.tools.isolated(keep=()):
        yield


def played(loop: str, *turns, **row):
    sample = Sample("s", (Message("user", "Go."),), loop, **row)
    return play(sample, Scripted(list(turns), TOKENIZER), TOKENIZER)


def add_tool() -> None:
    @tool
    def step(text: str) -> str:
        """Say a text."""
        return text


def test_an_agent_loop(tmp_path):
    load(tmp_path, "An agent loop")
    add_tool()
    t = played("tool_then_review", call("step", text="a"), "b", "c", tools=("step",))
    roles = ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert [m.role for m in t.messages] == roles and t.final_text == "c"


def test_a_tool_agent_loop(tmp_path):
    load(tmp_path, "A ToolAgentLoop")
    add_tool()
    t = played("until_done", call("step", text="a"), call("step", text="DONE"), tools=("step",))
    assert len(t.turns) == 2 and t.turn_rewards("turn") == pytest.approx(-0.2)

    @interaction("teacher")
    class Teacher(Interaction):
        async def respond(self, messages):
            return Reply("Again.", done=len(messages) > 3)

    t = played("until_done", "a", "b", interaction="teacher")
    assert [m.content for m in t.messages] == ["Go.", "a", "Again.", "b"]


def test_an_agent_of_a_framework(tmp_path, packages_python):
    (tmp_path / "graph.py").write_text(lines_of("An agent of a framework"))
    command = f"{packages_python} {tmp_path / 'graph.py'}"
    engine = Scripted([call("calculate", a=3, b=4, operand="@"), "1"], TOKENIZER)
    sample = Sample("s", (Message("user", "How much is 3@4?"),), agent_name="external")
    t = play(sample, engine, TOKENIZER, config=Config(agent=AgentConfig(command=command)))
    assert [m.content for m in t.messages if m.role == "tool"] == ["1"]
    assert (t.final_text, len(t.segments), t.stop_reason) == ("1", 1, "done")


def test_a_reward_manager(tmp_path):
    load(tmp_path, "A reward manager")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "ground_truth": "2"}\n')
    (sample,) = load_samples(str(tmp_path / "rows.jsonl"))
    t = play(sample, Scripted(["2"], TOKENIZER), TOKENIZER)
    short_answers = registry.rewards.get("short_answers")
    assert short_answers(t) == {"score": 1.0, "acc": True}
    assert short_answers(t, limit=0) == {"score": 0.5, "acc": True}


DATASET = """
import datasets
from verl.utils.dataset import RLHFDataset
from verl.utils.reward_score import math_dapo

class CustomRLHFDataset(RLHFDataset):
    def _read_files_and_tokenize(self):
        frames = [datasets.load_dataset(path)["train"].map(self.row) for path in self.data_files]
        self.dataframe = datasets.concatenate_datasets(frames)

    def row(self, row):
        return {"prompt": [{"role": "user", "content": row.pop("problem")}],
                "data_source": "aime_2025", "agent_name": "tool_agent",
                "reward_model": {"ground_truth": row.pop("answer")}}
"""


def test_a_dataset_class(tmp_path, monkeypatch):
    """A class like ReTool's, which reads a data set of the hub."""
    (tmp_path / "recipe" / "retool").mkdir(parents=True)
    (tmp_path / "recipe" / "retool" / "retool.py").write_text(DATASET)
    data = tmp_path / "data" / "yentinglin" / "aime_2025"
    data.mkdir(parents=True)
    (data / "train.jsonl").write_text(json.dumps({"problem": "1+1", "answer": "2"}) + "\n")
    (tmp_path / "write_rows.py").write_text(lines_of("A dataset class"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "argv", ["verl", "write_rows.py"])
    main()
    (sample,) = load_samples("aime_2025.parquet")
    assert (sample.prompt[0].content, sample.ground_truth) == ("1+1", "2")
    assert sample.agent_name == "tool_agent"


# -- files of other projects ----------------------------------------------------------------------

RECIPE = {
    "retool/retool.py": "",
    "retool/sandbox_fusion_tool_config.yaml": "",
    "char_count/reward_function.py": "",
    "r1/reward_score.py": "",
    "collabllm/config/collabllm_interaction_config.yaml": "",
    "langgraph_agent/example/agent.yaml": r"'math_expression' \(recipe\.langgraph_agent\.",
    "collabllm/config/agent.yaml": r"'collabllm_agent' \(recipe\.collabllm\.",
    "spo/agent_loop/spo_tool_agent_loop.py": r"@register\('spo_tool_agent'\)",
    "async_flow/agent_loop/single_turn_agent_loop.py": "async_flow_single_turn_agent",
}
"""User files of verl-recipe: "" if they load, else the name by which they are refused."""


@pytest.mark.parametrize(("path", "refused"), RECIPE.items())
@pytest.mark.verl
@pytest.mark.skipif("AGENTRL_VERL_RECIPE" not in os.environ, reason="it names a clone")
def test_files_of_verl_recipe(tmp_path, monkeypatch, path, refused):
    """AGENTRL_VERL_RECIPE names a clone of verl-recipe (tried with 48ea0a7)."""
    (tmp_path / "recipe").symlink_to(os.environ["AGENTRL_VERL_RECIPE"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    if not refused:
        load_file(f"recipe/{path}")
        return
    with pytest.raises(UserError, match=rf"{refused}.*docs/verl\.md"):
        load_file(f"recipe/{path}")


@pytest.mark.verl
def test_function_tools_of_0_9_1():
    load_file(str(VERL / "0.9.1/tests/experimental/agent_loop/function_tool_examples.py"))
    names = ("get_weather", "calculator", "fetch_url")
    calls = [
        call("get_weather", city="Tokyo"),
        call("calculator", expression="(3+4)*5"),
        call("fetch_url", url="a"),
    ]
    t = played("tool_agent", *calls, "Done.", tools=names)
    weather, number, page = (m.content for m in t.messages if m.role == "tool")
    assert json.loads(weather) == {"temperature_c": 17.3, "condition": "drizzle"}
    assert number == "35" and page and not page.startswith("Error")


TASK = """
from uni_agent.tasks.base import Task, TaskResult
from uni_agent.tasks.registry import register_task

@register_task("answer")
class AnswerTask(Task):
    async def run(self):
        async with self.build_sandbox() as sandbox:
            await self.build_agent().run(sandbox=sandbox, messages=self.config.prompt)
            said = (await sandbox.exec(["cat", self.config.metadata["file"]])).stdout
        return TaskResult(reward=float(said == "42"))
"""


@pytest.mark.verl
@pytest.mark.skipif("AGENTRL_UNI_AGENT" not in os.environ, reason="it names a clone")
def test_a_task_of_uni_agent(tmp_path, monkeypatch):
    """AGENTRL_UNI_AGENT names a clone of uni-agent (tried with 6f4a7c9); it needs aiohttp."""
    pytest.importorskip("aiohttp")
    monkeypatch.syspath_prepend(os.environ["AGENTRL_UNI_AGENT"])
    monkeypatch.chdir(tmp_path)
    Path("task_config_react.yaml").write_text(
        "- {name: answer, sandbox: {provider: local}, agent: {name: react, max_steps: 4, tools:"
        " [{name: str_replace_editor}, {name: submit}]}}\n"
    )
    Path("swe.py").write_text(TASK + lines_of("uni-agent"))
    file = str(tmp_path / "answer.txt")
    write = call("str_replace_editor", command="create", path=file, file_text="42")
    engine = Scripted([write, call("submit")], TOKENIZER)
    prompt = [{"role": "user", "content": "Write 42."}]
    task = {"name": "answer", "prompt": prompt, "metadata": {"file": file}}
    sample = Sample("s", (Message("user", "Go."),), agent_name="external", extra={"task": task})
    agent = AgentConfig(python="swe.py:run", reward="post", extra_info=["task"])
    t = play(sample, engine, TOKENIZER, config=Config(agent=agent))
    assert (len(t.turns), t.stop_reason, t.scores.outcome) == (2, "done", 1.0)
