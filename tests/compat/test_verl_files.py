"""verl's own files, unmodified: each line of the list in docs/verl.md, "verl's own files".

The files are not part of this project. AGENTRL_VERL names a git clone of verl.
"""

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import yaml

from agentrl import load_run, registry
from agentrl.compat.verl.config import translate
from agentrl.compat.verl.dump import dump_rollouts
from agentrl.config import load_config
from agentrl.data import load_checked
from agentrl.errors import UserError
from agentrl.registry import load_file
from agentrl.store import TrajectoryStore
from agentrl.testing import byte_tokenizer
from agentrl.trajectory import Group, Scored

from .conftest import TAG, call, played

if "AGENTRL_VERL" not in os.environ:
    reason = f"AGENTRL_VERL names no git clone of verl with the tag {TAG}"
    pytest.skip(reason, allow_module_level=True)
CONFIGS = "examples/sglang_multiturn/config"


@pytest.fixture(autouse=True)
def interactions():
    with registry.interactions.isolated():
        yield


def run(folder, *words, **environment):
    """Run `python -m agentrl.compat.verl` and return its output."""
    command = [sys.executable, "-m", "agentrl.compat.verl", *map(str, words)]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout + done.stderr


# -- interactions ---------------------------------------------------------------------------------


def test_verls_own_test_of_its_interaction_passes(verl, tmp_path):
    # Alone: in verl's folder, it would import the verl of that folder.
    shutil.copy(verl / "tests/interactions/test_gsm8k_interaction.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = strict\n")
    options = ("-q", "-p", "no:cacheprovider", "-c", tmp_path / "pytest.ini")
    assert "21 passed" in run(tmp_path, "-m", "pytest", *options)


def test_the_interaction_config_replaces_the_shipped_teacher(verl):
    load_file(str(verl / CONFIGS / "interaction_config/gsm8k_interaction_config.yaml"))
    assert list(registry.interactions.replaced()) == ["gsm8k"]
    trajectory = played(
        ["7", "#### 7"], interaction="gsm8k", interaction_kwargs={"ground_truth": "7"}
    )
    assert trajectory.messages[2].content.startswith("Your response is incorrect!")
    assert trajectory.turn_rewards("turn") == 1.0


@pytest.mark.parametrize("name", ["gsm8k", "weather"])
def test_interaction_classes_run_from_their_own_files(verl, tmp_path, name):
    """With `from .base import BaseInteraction`, and `from verl...` beside it."""
    source = verl / f"verl/interactions/{name}_interaction.py"
    (tmp_path / f"{name}_copy.py").write_text(source.read_text())
    class_name = f"{name}_copy.{name.capitalize()}Interaction"
    entry = {"name": "copy", "class_name": class_name, "config": {}}
    (tmp_path / "i.yaml").write_text(yaml.safe_dump({"interaction": [entry]}))
    load_file(str(tmp_path / "i.yaml"))
    trajectory = played(
        ["#### 7"], interaction="copy", interaction_kwargs={"ground_truth": "7", "query": ""}
    )
    assert trajectory.turn_rewards("turn") == (1.0 if name == "gsm8k" else 0.0)


# -- tools ----------------------------------------------------------------------------------------


def test_the_gsm8k_tool_config_loads(verl):
    load_file(str(verl / CONFIGS / "tool_config/gsm8k_tool_config.yaml"))
    trajectory = played(
        [call("calc_gsm8k_reward", answer="7"), "7"],
        tools=("calc_gsm8k_reward",),
        tools_kwargs={"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "7"}}},
    )
    assert "reward=1.0" in trajectory.messages[2].content


def test_the_gsm8k_tool_runs_from_its_own_file(verl, tmp_path):
    (tmp_path / "gsm8k_copy.py").write_text((verl / "verl/tools/gsm8k_tool.py").read_text())
    text = (verl / CONFIGS / "tool_config/gsm8k_tool_config.yaml").read_text()
    text = text.replace("verl.tools.gsm8k_tool.", "gsm8k_copy.")
    (tmp_path / "tools.yaml").write_text(text)
    load_file(str(tmp_path / "tools.yaml"))
    trajectory = played(
        [call("calc_gsm8k_reward", answer="7"), call("calc_gsm8k_reward", answer="7"), "7"],
        tools=("calc_gsm8k_reward",),
        tools_kwargs={"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "7"}}},
    )
    assert trajectory.turn_rewards("tool") == -0.05 and trajectory.tool_reward == 1.0


@pytest.mark.parametrize("name", ["search", "sandbox_fusion"])
def test_the_configs_of_services_load(verl, name):
    load_file(str(verl / CONFIGS / f"tool_config/{name}_tool_config.yaml"))
    assert {"search": "search", "sandbox_fusion": "code_interpreter"}[name] in registry.tools


@pytest.mark.parametrize(
    ("name", "reason"), [("geo3k", "images"), ("mcp", r"--file mcp\+your_tavily_expert_url")]
)
def test_the_other_tool_configs_are_refused_with_the_reason(verl, name, reason):
    with pytest.raises(UserError, match=reason):
        load_file(str(verl / CONFIGS / f"tool_config/{name}_tool_config.yaml"))


# -- preprocessing scripts ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory):
    """A folder with a data set of GSM8K's form."""
    pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("raw")
    rows = [
        {"question": f"{a} bags of {b} nuts: how many?", "answer": f"<<{a}>>\n#### {a * b:,}"}
        for a in range(2, 6)
        for b in (3, 400)
    ]
    (folder / "main").mkdir()
    files = {}
    for split in ("train", "test"):
        files[split] = f"main/{split}.jsonl"
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / files[split]).write_text(text)
    splits = [{"split": split, "path": path} for split, path in files.items()]
    card = yaml.safe_dump({"configs": [{"config_name": "main", "data_files": splits}]})
    (folder / "README.md").write_text(f"---\n{card}---\n")
    return folder


def gsm8k_rows(verl, raw, folder, script) -> str:
    """Run a script; return the path of the rows that it writes."""
    path = verl / f"examples/data_preprocess/{script}.py"
    folders = ("--local_dataset_path", raw, "--local_save_dir", folder / "out")
    run(folder, path, *folders, HF_HOME=str(folder / "hf"), HF_HUB_OFFLINE="1")
    return str(folder / "out/train.parquet")


@pytest.mark.parametrize(
    ("script", "tools", "interaction"),
    [
        ("gsm8k", (), ""),
        ("gsm8k_multiturn_w_tool", ("calc_gsm8k_reward",), ""),
        ("gsm8k_multiturn_w_interaction", (), "gsm8k"),
        ("gsm8k_tool_agent_loop", ("calc_gsm8k_reward",), ""),
    ],
)
def test_the_gsm8k_scripts_write_rows_for_agentrl(
    verl, gsm8k, tmp_path, script, tools, interaction
):
    rows = gsm8k_rows(verl, gsm8k, tmp_path, script)
    load_file(str(verl / CONFIGS / "tool_config/gsm8k_tool_config.yaml"))
    samples = load_checked(rows, "tool_agent")
    assert [s.ground_truth for s in samples[:2]] == ["6", "800"]
    assert {(s.tools, s.interaction) for s in samples} == {(tools, interaction)}


@pytest.fixture
def search_rows(verl, tmp_path):
    """The path of the rows that the search script writes."""
    pandas = pytest.importorskip("pandas")
    row = {
        "question": "who?", "data_source": "nq", "ability": "fact", "metadata": None,
        "reward_model": {"ground_truth": {"target": ["Ann"]}, "style": "rule"},
    }  # fmt: skip
    pandas.DataFrame([row]).to_parquet(tmp_path / "train.parquet")
    pandas.DataFrame([row]).to_parquet(tmp_path / "test.parquet")

    class Hub(BaseHTTPRequestHandler):
        """Serves the two files as those of any data set."""

        def do_GET(self):
            file = tmp_path / self.path.partition("?")[0].rpartition("/")[2]
            content = file.read_bytes() if file.suffix == ".parquet" else b""
            self.send_response(200 if content else 404)
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    hub = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    script = verl / "examples/data_preprocess/preprocess_search_r1_dataset.py"
    run(
        tmp_path,
        *(script, "--local_dir", tmp_path / "out"),
        HF_ENDPOINT=f"http://127.0.0.1:{hub.server_port}",
        HF_HOME=str(tmp_path / "hf"),
        HF_HUB_OFFLINE="0",
    )
    hub.shutdown()
    return str(tmp_path / "out/train.parquet")


def test_the_search_script_writes_rows_for_agentrl(verl, search_rows):
    load_file(str(verl / CONFIGS / "tool_config/search_tool_config.yaml"))
    (sample,) = load_checked(search_rows, "tool_agent")
    assert sample.tools == ("search",) and sample.data_source == "searchR1_nq"
    assert sample.ground_truth == {"target": ["Ann"]}


# -- configs of runs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "gsm8k_multiturn_grpo",
        "gsm8k_multiturn_grpo_server",
        "gsm8k_multiturn_grpo_w_interaction",
        "gsm8k_multiturn_megatron_grpo",
        "retool_multiturn_grpo",
        "search_multiturn_grpo",
        "search_multiturn_grpo_one_step_off",
    ],
)
def test_the_multi_turn_configs_are_translated(verl, name):
    done = translate(str(verl / CONFIGS / f"{name}.yaml"))
    config = load_config(translated=done.settings, mistakes=done.mistakes)
    assert config.data.agent_name == "tool_agent"
    assert (config.rollout.name, config.data.batch_size) == ("sglang", 256)
    assert config.rollout.max_trajectory_tokens == 1024
    assert config.rollout.max_turns == {"s": 2}.get(name[0], 6 if "interaction" in name else 5)


@pytest.mark.parametrize("name", ["geo3k_multiturn_grpo", "geo3k_multiturn_megatron_grpo"])
def test_the_configs_of_geo3k_are_refused(verl, name):
    (mistake,) = translate(str(verl / CONFIGS / f"{name}.yaml")).mistakes
    assert mistake.startswith("actor_rollout_ref.model.custom_chat_template=")


@pytest.fixture
def complete(verl):
    """The path of verl's complete config, which has all keys with their defaults."""
    return str(verl / "verl/trainer/config/_generated_ppo_trainer.yaml")


def test_a_complete_config_has_no_unknown_key(complete):
    done = translate(complete, ["actor_rollout_ref.rollout.name=sglang"])
    config = load_config(translated=done.settings, mistakes=done.mistakes)
    assert (config.algorithm.name, config.data.batch_size, config.rollout.n) == ("ppo", 1024, 1)
    assert done.version == "0.7.0"


def test_the_complete_config_for_megatron_is_translated(verl):
    file = verl / "verl/trainer/config/_generated_ppo_megatron_trainer.yaml"
    done = translate(str(file), ["actor_rollout_ref.rollout.name=sglang"])
    config = load_config(translated=done.settings, mistakes=done.mistakes)
    assert (config.algorithm.name, config.data.batch_size, config.rollout.n) == ("ppo", 1024, 1)


# -- a run ----------------------------------------------------------------------------------------


def train(verl, folder, rows, config="gsm8k_multiturn_grpo", **files) -> str:
    """Run `agentrl train` with a config of verl's, verl's keys and verl's files; return stderr."""
    multi_turn = "actor_rollout_ref.rollout.multi_turn"
    words = [
        str(verl / CONFIGS / f"{config}.yaml"),
        f"data.train_files={rows}",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.name=local",
        *(f"{multi_turn}.{key}_config_path={verl / CONFIGS / path}" for key, path in files.items()),
        "algorithm.adv_estimator=grpo",
        "trainer.total_training_steps=1",
        "trainer.logger=[console]",
        *("--model", "tiny", "--output", str(folder / "run")),
    ]
    command = [sys.executable, "-m", "agentrl", "train", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    assert len((folder / "run/metrics.jsonl").read_text().splitlines()) == 1
    return done.stderr


TOOL = {"tool": "tool_config/gsm8k_tool_config.yaml"}
INTERACTION = {"interaction": "interaction_config/gsm8k_interaction_config.yaml"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "config", "files", "line"),
    [
        ("gsm8k", "gsm8k_multiturn_grpo", {}, ""),
        ("gsm8k_multiturn_w_tool", "gsm8k_multiturn_grpo", TOOL, "without a name are ignored"),
        ("gsm8k_tool_agent_loop", "gsm8k_multiturn_grpo", TOOL, "without a name are ignored"),
        (
            "gsm8k_multiturn_w_interaction",
            "gsm8k_multiturn_grpo_w_interaction",
            INTERACTION,
            "not the shipped one",
        ),
    ],
)
def test_verls_gsm8k_rows_train(verl, gsm8k, tmp_path, script, config, files, line):
    rows = gsm8k_rows(verl, gsm8k, tmp_path, script)
    assert line in train(verl, tmp_path, rows, config, **files)


@pytest.mark.slow
def test_verls_search_rows_train(verl, search_rows, tmp_path):
    tool = "tool_config/search_tool_config.yaml"
    train(verl, tmp_path, search_rows, "search_multiturn_grpo", tool=tool)


# -- dumps ----------------------------------------------------------------------------------------


def test_rollouts_are_dumped_as_verl_dumps_them(verl, tmp_path):
    """The same bytes as verl's own function writes."""
    tree = ast.parse((verl / "verl/trainer/ppo/ray_trainer.py").read_text())
    [function] = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "_dump_generations"
    )
    names = {"os": os, "json": json}
    exec(compile(ast.Module([function], []), "ray_trainer.py", "exec"), names)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "run/tokenizer")
    rollouts = [
        Scored(played([f"Four ü {i}"], ground_truth=f"{i}"), {}, i / 3, {"acc": i / 2})
        for i in range(3)
    ]
    store = TrajectoryStore(tmp_path / "run/trajectories")
    store.write(7, [Group(rollouts[0].trajectory.sample, tuple(rollouts))])
    dump_rollouts(load_run(tmp_path / "run"), tmp_path / "ours")
    rows = [s.trajectory.segments[0] for s in rollouts]
    texts = [
        tokenizer.batch_decode([list(ids) for ids in column], skip_special_tokens=True)
        for column in ([row.prompt_ids for row in rows], [row.response_ids for row in rows])
    ]
    names["_dump_generations"](
        SimpleNamespace(global_steps=7),
        *texts,
        [s.trajectory.sample.ground_truth for s in rollouts],
        [s.reward for s in rollouts],
        {
            "acc": [s.metrics["acc"] for s in rollouts],
            "request_id": [s.trajectory.episode_id for s in rollouts],
        },
        str(tmp_path / "verls"),
    )
    ours, verls = (tmp_path / folder / "7.jsonl" for folder in ("ours", "verls"))
    assert ours.read_bytes() == verls.read_bytes()
