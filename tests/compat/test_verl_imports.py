"""Files that import from verl, where verl is not installed."""

import asyncio
import json
import subprocess
import sys
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import pytest
from support.needs import needs_sandbox

import agentrl
from agentrl import registry
from agentrl.compat.verl import classes, stand_in
from agentrl.compat.verl.__main__ import main
from agentrl.compat.verl.config import translate
from agentrl.config import Config, RewardConfig, load_config
from agentrl.demo.arithmetic import rows as arithmetic_rows
from agentrl.errors import ConfigError, RegistryError, UserError
from agentrl.preflight import make_plan
from agentrl.registry import load_file
from agentrl.report import diagnose, load_run
from agentrl.rewards import Scorer
from agentrl.tools import LocalToolbox
from agentrl.trainer.trainer import Trainer
from agentrl.trajectory import Sample

from .conftest import played, yaml_of

# -- the user's definition of a shipped name ------------------------------------------------------

OF_VERL = """
interaction:
  - name: gsm8k
    class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction
    config: {}
"""
MINE = """
from agentrl import Interaction, Reply, interaction

@interaction("gsm8k")
class Mine(Interaction):
    def __init__(self, ground_truth, query=""):
        pass

    async def respond(self, messages):
        return Reply("mine")
"""


@pytest.fixture
def interactions():
    with registry.interactions.isolated():
        yield registry.interactions


def write(folder, name, text):
    (folder / name).write_text(text)
    return str(folder / name)


def one_row(folder):
    row = {
        "prompt": "How much is 2+3?",
        "agent_name": "tool_agent",
        "data_source": "openai/gsm8k",
        "reward_model": {"ground_truth": "5"},
        "extra_info": {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "5", "query": "?"}},
    }
    return write(folder, "rows.jsonl", json.dumps(row) + "\n")


@pytest.mark.parametrize("file", ["of_verl.yaml", "mine.py"])
def test_the_users_interaction_replaces_the_shipped_one(tmp_path, caplog, interactions, file):
    path = write(tmp_path, file, {"of_verl.yaml": OF_VERL, "mine.py": MINE}[file])
    shipped = interactions.get("gsm8k")
    plan = make_plan(Config(data={"train": one_row(tmp_path)}, files=[path]))
    assert plan.train[0].interaction == "gsm8k"
    assert interactions.get("gsm8k") is not shipped
    lines = [line for line in caplog.text.splitlines() if "the interaction 'gsm8k' is" in line]
    assert len(lines) == 1 and "not the shipped one" in lines[0]
    # The shipped one does not come back if it is registered again.
    interactions.add("gsm8k", shipped)
    assert interactions.get("gsm8k") is not shipped


def test_two_interactions_of_the_user_with_one_name_are_an_error(tmp_path, interactions):
    load_file(write(tmp_path, "of_verl.yaml", OF_VERL))
    with pytest.raises(RegistryError, match="two definitions of the interaction 'gsm8k'"):
        load_file(write(tmp_path, "mine.py", MINE))


def test_a_shipped_loop_is_not_replaced():
    with pytest.raises(RegistryError, match="two definitions of the agent loop 'react'"):

        @agentrl.agent_loop("react")
        async def react(ep):
            pass


# -- relative imports -----------------------------------------------------------------------------

WEATHER = """
from .base import BaseInteraction

class WeatherInteraction(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return True, "Sunny.", 0.5, {}
"""


def test_a_class_with_verls_relative_imports_loads(tmp_path):
    text = "interaction: [{class_name: weather.WeatherInteraction, config: {}}]\n"
    load_file(yaml_of(tmp_path, text, weather=WEATHER))
    assert played(["?"], interaction="weather").turn_rewards("turn") == 0.5


def test_relative_imports_find_the_files_beside_first(tmp_path):
    own = "class BaseInteraction:\n    mine = True\n    def __init__(self, config): pass\n"
    write(tmp_path, "base.py", own + "    async def start_interaction(self, i, **kwargs): pass\n")
    text = "interaction: [{class_name: weather2.WeatherInteraction}]\n"
    load_file(yaml_of(tmp_path, text, weather2=WEATHER))
    [module] = [m for n, m in sys.modules.items() if n.endswith(".weather2")]
    assert module.WeatherInteraction.mine


def test_a_python_file_may_have_them(tmp_path):
    text = (
        "from . import gsm8k\nfrom .base_tool import BaseTool\n"
        "def compute_score(solution_str, ground_truth):\n"
        "    return gsm8k.compute_score(solution_str, ground_truth)\n"
    )
    file = write(tmp_path, "scores.py", text)
    module = load_file(file)
    assert module.compute_score("#### 5", "5") == 1.0
    assert load_file(file) is module


def test_a_relative_import_of_nothing_names_both_places(tmp_path):
    file = write(tmp_path, "broken.py", "from .helpers import x\n")
    with pytest.raises(UserError, match=rf"no helpers\.py in {tmp_path}.*base_tool"):
        load_file(file)


# -- graders --------------------------------------------------------------------------------------


def grade(module: str, *args, **kwargs):
    """Call `compute_score` of a module below `verl.utils.reward_score`."""
    stand_in()
    name = f"verl.utils.reward_score.{module}"
    return __import__(name, fromlist=["compute_score"]).compute_score(*args, **kwargs)


@pytest.mark.parametrize(
    ("module", "text", "truth", "score"),
    [
        ("math_verify", r"so \boxed{\frac{2}{4}}", "0.5", 1.0),
        ("math_verify", "It is 12.", "12", 1.0),
        ("math_verify", r"\boxed{13}", "12", 0.0),
        ("math_verify", "I do not know", "12", 0.0),
        ("math_verify", "", "12", 0.0),
        ("math_reward", r"\boxed{\frac{1}{2}}", r"\frac12", 1.0),
        ("math", r"\boxed{\frac{2}{4}}", r"\frac12", 0.0),
        ("prime_math", r"Step 2: \boxed{x^2+2x+1}", "(x+1)^2", (True, True, "x^2+2x+1")),
        ("prime_math", "Answer: 7", "8", (False, False, "7")),
        ("gsm8k", "#### 1,012", "1012", 1.0),
        ("search_r1_like_qa_em", "<answer>The Ann</answer>", {"target": ["ann"]}, 1.0),
    ],
)
def test_graders_have_verls_calls(module, text, truth, score):
    assert grade(module, text, truth) == score


TESTS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "9\n"]}
ADDS = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"


@needs_sandbox
def test_the_graders_of_programs_have_verls_calls():
    half, [details] = grade("prime_code", ADDS, json.dumps(TESTS), continuous=True)
    assert half == 0.5 and details["acc"] == 0.0
    assert grade("prime_code", ADDS, TESTS)[0] is False
    right = {**TESTS, "outputs": ["3\n", "7\n"]}
    assert grade("prime_code", ADDS, right)[0] is True
    score, metadata = grade("sandbox_fusion", "http://x/run_code", None, 1024, ADDS, TESTS, True)
    assert score == 0.5 and len(metadata) == 1


def test_a_reward_file_with_verls_imports_scores(tmp_path):
    text = (
        "from verl.utils.reward_score import math_verify, prime_code, prime_math, sandbox_fusion\n"
        "from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert remove_boxed(last_boxed_only_string(solution_str)) == '7'\n"
        "    return math_verify.compute_score(solution_str, ground_truth)\n"
    )
    scorer = Scorer(RewardConfig(function=write(tmp_path, "r.py", text) + ":compute_score"))
    scored = asyncio.run(scorer.score(played([r"\boxed{7}"], ground_truth="7")))
    assert scored.reward == 1.0


@pytest.mark.parametrize(
    ("source", "text", "truth", "score"),
    [
        ("openai/gsm8k", "#### 5", "5", 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{5}", "5", 1.0),
        ("numina_olympiads", r"\boxed{5}", "5", 1.0),
        ("searchR1_nq", "<answer>a</answer>", {"target": "b"}, 0.0),
    ],
)
def test_verls_default_grader_chooses_by_data_source(source, text, truth, score):
    stand_in()
    from verl.utils.reward_score import default_compute_score

    assert default_compute_score(source, text, truth, None) == score


def test_verls_default_grader_has_no_other_data_sources():
    stand_in()
    from verl.utils.reward_score import default_compute_score

    with pytest.raises(NotImplementedError, match="no grader for data_source 'mine'"):
        default_compute_score("mine", "", "")
    with pytest.raises(UserError, match="images"):
        default_compute_score("hiyouga/geometry3k", "", "")


# -- what is refused by name ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("from verl.utils.reward_score import geo3k", r"reward_score\.geo3k`: .* images"),
        ("from verl.utils.reward_score.geo3k import compute_score", "images"),
        ("from verl.tools.geo3k_tool import Geo3kTool", r"tools\.geo3k_tool`: .* images"),
        ("import verl.tools.mcp_search_tool", r"mcp\+http://HOST/PATH"),
    ],
)
def test_modules_that_cannot_be_replaced_are_refused_with_the_reason(tmp_path, line, reason):
    with pytest.raises(UserError, match=reason):
        load_file(write(tmp_path, "mine.py", line + "\n"))


def test_a_reward_of_verls_generative_reward_model_is_refused(tmp_path):
    text = (
        "async def compute_score(data_source, solution_str, ground_truth, extra_info,"
        " reward_router_address, reward_model_tokenizer):\n    return 1.0\n"
    )
    with pytest.raises(ConfigError, match=r"reward_router_address.*genrm.*judge"):
        Scorer(RewardConfig(function=write(tmp_path, "r.py", text) + ":compute_score"))


# -- tools that use a service ---------------------------------------------------------------------

SEARCH = """
tools:
  - class_name: verl.tools.search_tool.SearchTool
    config: {{retrieval_service_url: "{url}", num_workers: 120, topk: 2, type: native}}
    tool_schema:
      type: function
      function:
        name: search
        description: Searches.
        parameters:
          type: object
          properties:
            query_list: {{type: array, item: {{type: string}}, description: queries}}
          required: [query_list]
"""
SANDBOX = """
tools:
  - class_name: verl.tools.sandbox_fusion_tools.SandboxFusionTool
    config: {sandbox_fusion_url: "https://x/run_code", default_language: python, type: native}
    tool_schema:
      type: function
      function:
        name: code_interpreter
        description: Runs code.
        parameters:
          type: object
          properties: {code: {type: string, description: the code}}
          required: [code]
"""


def results(name: str, *arguments) -> list[str]:
    """Call a tool within one episode and return its results."""

    async def run():
        toolbox = LocalToolbox()
        kwargs = {name: {"create_kwargs": {"ground_truth": "5"}}}
        await toolbox.open("e", Sample("s", (), tools=(name,), tools_kwargs=kwargs))
        calls = [agentrl.ToolCall(name, a) for a in arguments]
        done = [(await toolbox.run([c], "e", i))[0].content for i, c in enumerate(calls)]
        await toolbox.aclose()
        return done

    return asyncio.run(run())


def test_verls_search_tool_asks_its_retrieval_server(tmp_path):
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            documents = [{"document": {"contents": f"Bees\n{q} fly."}} for q in ("Big", "Small")]
            body = json.dumps({"result": [documents for _ in requests[-1]["queries"]]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    load_file(
        yaml_of(tmp_path, SEARCH.format(url=f"http://127.0.0.1:{server.server_port}/retrieve"))
    )
    one, two, none = results(
        "search", {"query_list": ["bees"]}, {"query_list": ["a", "b"]}, {"query_list": []}
    )
    server.shutdown()
    text = "Doc 1 (Title: Bees)\nBig fly.\n\nDoc 2 (Title: Bees)\nSmall fly."
    assert json.loads(one) == {"result": text}
    assert json.loads(two) == {"result": f"{text}\n---\n{text}"}
    assert "query_list' is missing" in none
    assert requests[0] == {"queries": ["bees"], "topk": 2, "return_scores": True}


@needs_sandbox
def test_verls_sandbox_tool_runs_in_the_sandbox_of_the_run(tmp_path, caplog):
    classes._note_other_sandbox.cache_clear()
    load_file(yaml_of(tmp_path, SANDBOX))
    assert results("code_interpreter", {"code": "print(6 * 7)"}) == ["42"]
    assert caplog.text.count("sandbox.backend=https://x") == 1
    load_file(yaml_of(tmp_path, SANDBOX))  # as `agentrl check` does
    assert caplog.text.count("sandbox.backend=https://x") == 1
    assert "sandbox" in registry.tools.get("code_interpreter").injected


RECIPE = """
import re
from verl.tools.base_tool import OpenAIFunctionToolSchema
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.tools.schemas import ToolResponse
from verl.utils.dataset import RLHFDataset
from verl.utils.rollout_trace import rollout_trace_op
from recipe.mine.texts import clean

class MyDataset(RLHFDataset):
    def __init__(self, files):
        super().__init__(files)

class Interpreter(SandboxFusionTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.code_pattern = re.compile("A(.*)Z")

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        code = clean(parameters["code"])
        timeout = parameters.get("timeout", self.default_timeout)
        language = parameters.get("language", self.default_language)
        result = await self.execution_pool.execute.remote(
            self.execute_code, instance_id, code, timeout, language
        )
        if isinstance(result, ToolResponse):
            return result, None, None
        return ToolResponse(text=None if result is None else str(result)), None, None
"""
WITHOUT_SANDBOX = """
    def execute_code(self, instance_id, code, timeout=30, language="python"):
        import threading
        return f"{code} {threading.current_thread().name} {timeout} {language}"
"""


def recipe(folder, monkeypatch, text: str) -> str:
    """Write a recipe as verl has them, below the current folder; return its YAML file."""
    (folder / "recipe" / "mine").mkdir(parents=True)
    write(folder / "recipe" / "mine", "texts.py", "def clean(code):\n    return code.strip()\n")
    write(folder / "recipe" / "mine", "tool.py", text)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = SANDBOX.replace(
        "verl.tools.sandbox_fusion_tools.SandboxFusionTool", "recipe.mine.tool.Interpreter"
    )
    return write(folder, "tool_config.yaml", config)


@pytest.fixture
def own_recipe():
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] == "recipe"]:
        del sys.modules[name]


@needs_sandbox
def test_a_recipes_sandbox_tool_runs_in_the_sandbox(tmp_path, monkeypatch, own_recipe):
    with registry.tools.isolated(keep=()):
        load_file(recipe(tmp_path, monkeypatch, RECIPE))
        assert results("code_interpreter", {"code": " print(6 * 7) "}) == ["42"]


def test_a_recipes_own_way_to_run_code_runs_in_a_thread(tmp_path, monkeypatch, own_recipe):
    with registry.tools.isolated(keep=()):
        load_file(recipe(tmp_path, monkeypatch, RECIPE + WITHOUT_SANDBOX))
        assert results("code_interpreter", {"code": "x"}) == [
            "x agentrl-code_interpreter-1 30 python"
        ]


SCORE = """
from verl.utils.reward_score import math_dapo

def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    result = math_dapo.compute_score(solution_str, ground_truth, strict_box_verify=True)
    return {**result, "score": result["score"] + 0.05 * extra_info["num_turns"]}
"""


@pytest.mark.slow
@needs_sandbox
@pytest.mark.parametrize("is_broken", [False, True])
def test_a_recipe_trains_three_steps(
    tmp_path, monkeypatch, own_recipe, tiny_model, caplog, is_broken
):
    """The files are like ReTool's: rows with `agent_name` alone, a YAML, a tool class, a reward.

    A tool that crashes in every call is an error, while the run trains and in the report.
    """
    # The tool has the name and the argument that the tiny model writes; the broken one has not.
    text = RECIPE.replace('clean(parameters["code"])', "f\"print({parameters['expression']})\"")
    tools = recipe(tmp_path, monkeypatch, (RECIPE if is_broken else text) + SCORE)
    yaml = Path(tools).read_text().replace("code_interpreter", "calculator")
    Path(tools).write_text(yaml.replace("{code:", "{expression:").replace("[code]", "[expression]"))
    rows = [
        {
            "data_source": "aime_2025",
            "prompt": [m.as_dict() for m in row.sample.prompt],
            "reward_model": {"ground_truth": row.sample.ground_truth},
            "agent_name": "tool_agent",
        }
        for row in islice(arithmetic_rows(1, loops=("tool_agent",)), 8)
    ]
    write(tmp_path, "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    rollout = "actor_rollout_ref.rollout"
    words = [
        "algorithm.adv_estimator=grpo", "data.train_files=['rows.jsonl']",
        "data.train_batch_size=2", "data.max_response_length=100",
        "custom_reward_function.path=recipe/mine/tool.py",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", f"{rollout}.n=2", f"{rollout}.name=hf",
        f"{rollout}.multi_turn.enable=True", f"{rollout}.multi_turn.max_user_turns=3",
        f"{rollout}.multi_turn.format=hermes", f"{rollout}.multi_turn.tool_config_path={tools}",
        f"actor_rollout_ref.model.path={tiny_model}", "trainer.logger=['console']",
        "trainer.total_training_steps=3", "trainer.default_local_dir=run",
        "trainer.device=cpu", "tools.transport=in_process",
    ]  # fmt: skip
    done = translate(write(tmp_path, "verl.yaml", "defaults: [ppo_trainer]\n"), words)
    with registry.tools.isolated(keep=()):
        Trainer(load_config(translated=done.settings, mistakes=done.mistakes)).run()
    run = load_run(tmp_path / "run")
    assert run.metrics.column("step").to_pylist() == [1, 2, 3]
    first = diagnose(run)[0]
    error = "error: every valid call of the tool 'calculator' crashes or times out"
    assert (first.subject == "calculator") == (error in caplog.text) == is_broken
    working = run.behaviour.column("working_tools").to_pylist()
    assert any(working) != is_broken


def test_a_python_file_finds_a_recipe_in_the_current_folder(tmp_path, monkeypatch, own_recipe):
    recipe(tmp_path, monkeypatch, RECIPE)
    (tmp_path / "mine").mkdir()
    module = load_file(write(tmp_path / "mine", "r.py", "from recipe.mine.texts import clean\n"))
    assert module.clean(" x ") == "x"


def test_a_name_of_verls_that_is_not_replaced_is_an_error_only_if_it_is_used(tmp_path):
    text = (
        "from abc import ABC\nfrom verl import DataProto\n"
        "from verl.utils.dataset import RLHFDataset\n"
        "class Mine(RLHFDataset, ABC):\n    def f(self, data: DataProto | None): pass\n"
    )
    module = load_file(write(tmp_path, "mine.py", text))
    with pytest.raises(
        UserError, match=r"from verl\.utils\.dataset import RLHFDataset`, which Mine"
    ):
        module.Mine()
    with pytest.raises(UserError, match="from verl import DataProto"):
        module.DataProto.from_dict({})
    assert not hasattr(module.Mine, "anything")


def test_an_mcp_server_of_verls_is_named_as_an_option(tmp_path):
    servers = {"mcpServers": {"Expert": {"url": "http://127.0.0.1:9/mcp", "auth_token": "t"}}}
    write(tmp_path, "servers.json", json.dumps(servers))
    text = (
        "tools: [{class_name: verl.tools.mcp_search_tool.MCPSearchTool, config: {type: mcp},"
        " mcp: {mcp_servers_config_path: ./servers.json}}]\n"
    )
    with pytest.raises(UserError, match=r"--file mcp\+http://127\.0\.0\.1:9/mcp "):
        load_file(yaml_of(tmp_path, text))


# -- scripts --------------------------------------------------------------------------------------


def run(folder, *arguments):
    command = [sys.executable, "-m", "agentrl.compat.verl", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_scripts_that_import_verl_run_without_it(tmp_path):
    script = (
        "import sys\nfrom verl.utils.hdfs_io import copy, exists, makedirs\n"
        "if __name__ == '__main__':\n"
        "    makedirs('a/b')\n    copy('script.py', 'a/b')\n    copy('a', 'c')\n"
        "    print(sys.argv, exists('c/b/script.py'))\n    copy('a', 'hdfs://host/a')\n"
    )
    write(tmp_path, "script.py", script)
    done = run(tmp_path, "script.py", "--local_save_dir", "data")
    assert done.stdout == "['script.py', '--local_save_dir', 'data'] True\n"
    assert done.stderr == (
        "error: hdfs://host/a: agentrl does not read or write HDFS. Use a path of this machine\n"
    )
    assert done.returncode == 1


def test_scripts_that_cannot_run_say_why(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "needs.py", "import no_such_package\n")
    for words, message in [
        (["no.py"], "error: no such file: no.py"),
        (["needs.py"], "error: needs.py imports no_such_package, which is not installed"),
        (["-m"], "usage: "),
        ([], "usage: "),
    ]:
        monkeypatch.setattr(sys, "argv", ["agentrl.compat.verl", *words])
        with pytest.raises(SystemExit, match=message):
            main()


# -- the tutorial's interaction -------------------------------------------------------------------


def test_the_tutorials_interaction_has_verls_state():
    """As verl's own test of it uses it, which runs if AGENTRL_VERL names a clone."""
    stand_in()
    from verl.interactions.gsm8k_interaction import Gsm8kInteraction

    teacher = Gsm8kInteraction({"name": "gsm8k"})
    assert teacher._instance_dict == {}

    async def say(*messages, score=None):
        name = "verl.utils.reward_score.gsm8k.compute_score"
        with nullcontext() if score is None else patch(name, return_value=score) as grader:
            return grader, await teacher.generate_response("e", list(messages))

    async def talk():
        assert await teacher.start_interaction("e", ground_truth="42") == "e"
        assert teacher._instance_dict["e"] == {"response": "", "ground_truth": "42", "reward": 0.0}
        _, (done, text, score, more) = await say({"role": "assistant"})
        assert (done, score, more) == (False, 0.0, {}) and text.startswith("Your response is inc")
        assert teacher._instance_dict["e"]["response"] is None
        _, (done, *_) = await say({"role": "assistant", "content": "42"})
        assert not done
        _, (done, text, score, _) = await say({"role": "assistant", "content": "#### 42"})
        assert (done, text, score) == (True, "Your response is correct!", 1.0)
        grader, (done, *_) = await say({"role": "assistant", "content": "x"}, score=1.0)
        assert done
        grader.assert_called_once_with("x", "42", method="strict", format_score=0.0, score=1.0)
        await teacher.finalize_interaction("e", more=1)
        assert teacher._instance_dict == {}
        with pytest.raises(KeyError):
            await teacher.finalize_interaction("e")

    asyncio.run(talk())
