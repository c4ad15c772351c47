"""No key does nothing: each is changed, and the run's trace changes or the value is refused."""

import contextlib
import hashlib
import io
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save

from agentrl.chat import load_tokenizer
from agentrl.config import FIELDS, load_config
from agentrl.errors import EngineError, UserError
from agentrl.store import load_trajectories
from agentrl.trainer import Trainer

ENV = '''
import asyncio, os
from agentrl import Interaction, Message, Reply, ToolCall, ToolResult
from agentrl import agent_loop, interaction, reward, tool

@tool
def where() -> ToolResult:
    """Say which process this is, at length."""
    here = "the same" if str(os.getpid()) == os.environ["EVERY_KEY_PID"] else "another"
    return ToolResult(f"{here} process, and so on and so forth", reward=0.25)

@agent_loop("every_key")
async def every_key(ep):
    for turn in range(3):
        await ep.generate(stop=("a", "e", " "), parse=lambda text: [ToolCall("where", {})])
        ep.reward(0.5)
        await ep.call_tools()

@agent_loop("told_every_key")
async def told(ep):
    for turn in range(3):
        await ep.generate(stop=("a", "e", " "))
        ep.observe(Message("user", "Go on."))

@agent_loop("mistaken_every_key")
async def mistaken(ep):
    for turn in range(2):
        await ep.generate(stop=("a", "e", " "), parse=lambda text: [ToolCall("nowhere", {})])
        await ep.call_tools()

@interaction("echo_every_key")
class Echo(Interaction):
    def __init__(self, word="Go on."):
        self.word = word

    async def respond(self, messages):
        return Reply(self.word)

@agent_loop("heard_every_key")
async def heard(ep):
    await ep.generate(stop=("a", "e", " "))
    await ep.interact()
    await ep.generate(stop=("a", "e", " "))

@reward("spread_of_letters")
def spread_of_letters(trajectory, scale=1.0) -> float:
    return scale * len(set(trajectory.assistant_text)) / 10

@reward("length_of_answer")
def length_of_answer(trajectory) -> float:
    return len(trajectory.final_text) / 10
'''
LATE = """
from agentrl import reward

@reward("late_every_key")
def late(trajectory) -> float:
    return 0.0
"""

# As templates of thinking models have it: earlier turns lose their thoughts, new ones may get an
# empty one to begin with.
OLD_TURN = """\
    {%- elif message.role == 'assistant' %}
        {%- set later = messages[loop.index0 + 1:] | selectattr('role', 'equalto', 'user') | list %}
        {%- set said = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' + (said if later else message.content) + '<|im_end|>\\n' }}
"""
NEW_TURN = """\
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
"""

PPO = ["algorithm.name=ppo"]
THINKER = ["model.path={thinking_model}"]
LORA = ["model.lora_rank=2"]
# A server that cannot be started says so last: what is refused before is seen.
SERVER = ["rollout.name=sglang", "rollout.python=/no/python"]
KL = ["algorithm.kl_loss_coef=0.5"]
REWARD_KL = ["algorithm.kl_reward_coef=0.5"]
MANY = ["algorithm.ppo_epochs=3", "optim.lr=0.02"]
FILTER = ["algorithm.filter_groups=true"]
OVERLONG = ["reward.overlong_buffer=15", "rollout.max_trajectory_tokens=20"]
# Key -> another value, and what it needs beside it to matter.
CHANGES = {
    "files": ("[{env}, {late}]", ["reward.function=late_every_key"]),
    "data.train": ("{other_rows}", []),
    "data.val": ("{other_rows}", []),
    "data.batch_size": ("2", []),
    "data.gen_batch_size": ("4", FILTER),
    "data.shuffle": ("false", []),
    "data.agent_name": ("react", []),
    "data.tools": ("all", ["data.train={asked_rows}"]),
    "data.drop_last": ("true", ["trainer.total_steps=0", "data.batch_size=4"]),
    "data.prompt_key": ("question", ["data.train={asked_rows}", "data.val={asked_rows}"]),
    "data.reward_fn_key": ("topic", ["data.train={asked_rows}", "data.val={asked_rows}"]),
    "data.untrusted": ("true", ["data.train={tagged_rows}"]),
    "model.path": ("{other_model}", []),
    "model.lora_rank": ("2", []),
    "model.lora_alpha": ("64", LORA),
    "model.lora_target_modules": ("q_proj", LORA),
    "model.quantization": ("nf4", LORA),
    "model.template_kwargs": ("{{enable_thinking: false}}", THINKER),
    "rollout.name": ("sglang", ["rollout.python=/no/python"]),
    "rollout.python": ("/no/python", ["rollout.name=sglang", "rollout.python=/"]),
    "rollout.urls": ("[http://127.0.0.1:1]", SERVER),
    "rollout.launch": ("[--port, 1]", []),
    "rollout.tensor_parallel_size": ("2", SERVER),
    "rollout.sync": ("ipc", SERVER),
    "rollout.lora": ("adapter", [*SERVER, *LORA, "rollout.sync=ipc"]),
    "rollout.sleep": ("all", SERVER),
    "rollout.quantization": ("fp8", [*SERVER, "algorithm.tis_cap=2"]),
    "rollout.deterministic": ("true", SERVER),
    "rollout.n": ("3", []),
    "rollout.temperature": ("0.5", []),
    "rollout.top_p": ("0.5", ["rollout.top_k=9"]),
    "rollout.top_k": ("3", []),
    "rollout.max_turn_tokens": ("3", []),
    "rollout.max_trajectory_tokens": ("20", []),
    "rollout.max_turns": ("1", []),
    "rollout.max_tool_calls": ("1", []),
    "rollout.timeout_s": ("1e-9", []),
    "rollout.budget_policy": ("{{turn_tokens: 0.125}}", []),
    "rollout.tool_format": ("sglang:no_such_parser", []),
    "rollout.history_thinking": (
        "strip",
        [*THINKER, "model.template_kwargs.enable_thinking=false", "data.agent_name=told_every_key"],
    ),
    "val.temperature": ("0.5", []),
    "val.top_p": ("0.5", []),
    "val.top_k": ("2", []),
    "val.n": ("2", []),
    "val.greedy": ("false", []),
    "val.without_tools": ("true", []),
    "tools.transport": ("http", []),
    "tools.max_result_tokens": ("2", []),
    "tools.penalties": ("{{unknown_tool: 0.5}}", ["data.agent_name=mistaken_every_key"]),
    "tools.truncate": ("head", ["tools.max_result_tokens=4"]),
    "interaction.kwargs": (
        "{{echo_every_key: {{word: No.}}}}",
        ["data.train={heard_rows}", "data.agent_name=heard_every_key"],
    ),
    "reward.function": ("length_of_answer", []),
    "reward.functions": (
        "{{spread_of_letters: 1, length_of_answer: 0.5}}",
        ["reward.function=null"],
    ),
    "reward.kwargs": ("{{scale: 3}}", []),
    "reward.outcome_weight": ("2", []),
    "reward.turn_weight": ("1", []),
    "reward.tool_weight": ("1", []),
    "reward.overlong_buffer": ("15", ["rollout.max_trajectory_tokens=20"]),
    "reward.overlong_penalty": ("2", OVERLONG),
    "algorithm.name": ("ppo", []),
    "algorithm.adv_estimator": ("rloo", []),
    "algorithm.loss_agg_mode": ("seq-mean-token-mean", []),
    "algorithm.loss_scale": ("7", ["algorithm.name=dr_grpo"]),
    "algorithm.whiten_advantages": ("true", []),
    "algorithm.gamma": ("0.5", PPO),
    "algorithm.lam": ("0.5", PPO),
    "algorithm.norm_adv_by_std": ("false", []),
    "algorithm.kl_type": ("k2", KL),
    "algorithm.kl_loss_coef": ("0.5", []),
    "algorithm.kl_reward_coef": ("0.5", []),
    "algorithm.entropy_coef": ("0.5", []),
    "algorithm.clip_low": ("0.01", MANY),
    "algorithm.clip_high": ("0.01", MANY),
    "algorithm.tau_pos": ("3", [*MANY, "algorithm.policy_loss=sapo"]),
    "algorithm.tau_neg": ("3", [*MANY, "algorithm.policy_loss=sapo"]),
    "algorithm.policy_loss": ("gspo", MANY),
    "algorithm.dual_clip": ("1.01", MANY),
    "algorithm.value_clip": ("0.001", [*PPO, *MANY, "optim.critic_lr=0.02"]),
    "algorithm.kl_target": ("0.5", REWARD_KL),
    "algorithm.kl_horizon": ("60", [*REWARD_KL, "algorithm.kl_target=0.5"]),
    "algorithm.tis_cap": ("0", []),
    "algorithm.tis_level": ("sequence", []),
    "algorithm.tis_mode": ("mask", ["algorithm.tis_cap=1.0000002"]),
    "algorithm.tis_low": ("1", ["algorithm.tis_mode=mask"]),
    "algorithm.reject_band": ("[0.99999999, 1.00000001]", []),
    "algorithm.ppo_epochs": ("2", []),
    "algorithm.mini_batch_size": ("2", []),
    "algorithm.critic_warmup": ("1", PPO),
    "algorithm.filter_groups": ("true", []),
    "algorithm.max_gen_batches": ("1", [*FILTER, "reward.kwargs={{scale: 0}}"]),
    "optim.name": ("adamw_8bit", []),
    "optim.lr": ("0.02", []),
    "optim.critic_lr": ("0.02", PPO),
    "optim.lr_warmup_steps": ("1", []),
    "optim.lr_final": ("0.1", []),
    "optim.weight_decay": ("0.5", []),
    "optim.max_grad_norm": ("0.001", []),
    "optim.micro_batch_tokens": ("1", []),
    "trainer.output": ("{folder}/elsewhere", []),
    "trainer.total_steps": ("1", []),
    "trainer.total_epochs": ("2", ["trainer.total_steps=0", "data.batch_size=6"]),
    "trainer.test_freq": ("1", []),
    "trainer.save_freq": ("1", []),
    "trainer.keep": ("1", ["trainer.save_freq=1"]),
    "trainer.keep_trajectories": ("last:1", []),
    "trainer.val_before_train": ("false", []),
    "trainer.val_only": ("true", []),
    "trainer.resume": ("never", ["again"]),
    "trainer.seed": ("1", []),
    "trainer.device": ("cuda", []),
    "trainer.nnodes": ("2", []),
    "trainer.n_gpus_per_node": ("2", []),
    "trainer.placement": ("separate", [*SERVER, "rollout.sleep=all"]),
    "trainer.ray_address": ("127.0.0.1:1", []),
    "trainer.logger": ("[tensorboard]", []),
    "trainer.max_staleness": ("1", []),
    "trainer.profile_steps": ("[2]", []),
}  # fmt: skip
# No GPU here, no SGLang, no cluster, no extras: what these do there is for tests of their own.
REFUSED = (
    "optim.name",
    "trainer.device", "rollout.tool_format", "rollout.name", "rollout.python", "rollout.urls",
    "rollout.launch", "rollout.tensor_parallel_size", "rollout.sync", "rollout.lora",
    "rollout.sleep", "rollout.deterministic", "rollout.quantization", "trainer.nnodes",
    "trainer.n_gpus_per_node", "trainer.placement", "trainer.ray_address",
)  # fmt: skip
# Only servers that start would show them, or memory and speed. Key -> the test of what is done.
SCORED = (
    "trainer/test_distillation.py::test_each_token_is_scored_in_the_context_that_the_teacher_reads"
)
ELSEWHERE = {
    "data.curriculum": (
        "trainer/test_curriculum.py"
        "::test_a_resumed_run_keeps_the_curriculum_and_a_fork_may_change_it"
    ),
    "teacher.model": SCORED,
    "teacher.prompt": SCORED,
    "teacher.weight": SCORED,
    "teacher.clip": SCORED,
    "environments": "tools/test_environment.py::test_an_environment_is_another_program",
    "agent.command": "gateway/test_external.py::test_rows_are_checked_with_their_agent",
    "agent.python": "gateway/test_external.py::test_rows_are_checked_with_their_agent",
    "agent.reward": "gateway/test_external.py::test_the_exit_code_is_the_reward",
    "agent.on_error": "gateway/test_external.py::test_an_error_after_an_answer_is_the_outcome_0",
    "agent.env": "gateway/test_external.py::test_the_environment_of_an_agent_is_an_allow_list",
    "agent.extra_info": "gateway/test_external.py::test_an_agent_sees_only_the_named_keys",
    "agent.slots": "gateway/test_external.py::test_agents_wait_for_free_slots",
    "trainer.context_parallel_size": (
        "learner/test_ranks.py::test_ranks_that_share_rows_change_nothing"
    ),
    "trainer.project_name": "observers/test_tracking.py::test_the_tracker_of_another_package",
    "trainer.experiment_name": "observers/test_tracking.py::test_the_tracker_of_another_package",
    "trainer.tags": "observers/test_tracking.py::test_the_tracker_of_another_package",
    "tools.workers": "tools/test_workers.py::test_the_config_sets_the_number_of_workers",
    "rollout.router_replay": ("trainer/test_router_replay.py::test_engine_and_trainer_differ_less"),
    "rollout.workers": "test_rollout_workers.py::test_auto_counts_cores_and_episodes",
    "trainer.max_restarts": "cli/test_restarts.py::test_a_killed_run_makes_every_step_once",
    "trainer.keep_best": "trainer/test_saving.py::test_the_best_is_kept_and_the_run_ends_early",
    "trainer.patience": "trainer/test_saving.py::test_the_best_is_kept_and_the_run_ends_early",
    "sandbox.backend": "sandbox/test_keys.py::test_each_key_changes_the_environment_of_programs",
    "sandbox.slots": "sandbox/test_keys.py::test_each_key_changes_the_environment_of_programs",
    "sandbox.timeout_s": "sandbox/test_keys.py::test_each_key_changes_the_environment_of_programs",
    "sandbox.memory_mb": "sandbox/test_keys.py::test_each_key_changes_the_environment_of_programs",
    "sandbox.images": "sandbox/test_containers.py"
    "::test_programs_and_boxes_run_in_an_image_of_the_list_only",
    "sandbox.python": "sandbox/test_keys.py::test_each_key_changes_the_environment_of_programs",
    "reward.timeout_s": "rewards/test_executor.py::test_the_key_of_the_deadline",
    "reward.workers": "rewards/test_executor.py::test_as_many_processes_as_reward_workers",
    "model.freeze_vision_tower": "learner/test_images.py::test_a_frozen_vision_tower",
    "optim.recompute": "learner/test_sharding.py::test_how_a_layer_is_sharded",
    "optim.compile": "learner/test_sharding.py::test_how_a_layer_is_sharded",
    "optim.offload": "learner/test_sharding.py::test_what_is_offloaded_to_the_cpu",
    "rollout.max_mismatch": (
        "engine/test_rounding.py::test_rounding_of_a_confident_model_needs_an_override"
    ),
    "rollout.max_in_flight": "trainer/test_stream.py::"
    "test_the_episodes_in_flight_are_limited_to_whole_groups_in_the_order_of_draws",
    "rollout.engines": "engine/test_launch.py::test_each_server_has_gpus_of_its_own",
    "rollout.gpu_memory_utilization": "engine/test_launch.py::test_memory_and_arguments",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory, random_model):
    import shutil

    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("keys")
    for name, text in (("env", ENV), ("late", LATE)):
        (folder / f"{name}.py").write_text(text)
    for name, first, tag in (
        ("rows", 0, ""),
        ("few_rows", 0, ""),
        ("other_rows", 50, ""),
        ("tagged_rows", 0, "<tool_call>"),
    ):
        rows = [
            {"prompt": f"Say {first + i}.{tag}", "tools": ["where"], "ground_truth": "1"}
            for i in range(2 if name == "few_rows" else 6)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    heard = [{"prompt": f"Say {i}.", "interaction": "echo_every_key"} for i in range(6)]
    (folder / "heard_rows.jsonl").write_text("\n".join(map(json.dumps, heard)))
    asked = [{"prompt": "Say 1.", "question": f"Say {i}.", "topic": "a"} for i in range(6)]
    (folder / "asked_rows.jsonl").write_text("\n".join(map(json.dumps, asked)))
    shutil.copytree(random_model, folder / "other_model")
    weights = load_file(folder / "other_model/model.safetensors")
    torch.manual_seed(7)
    scrambled = {k: v + 0.05 * torch.randn_like(v) for k, v in weights.items()}
    save_file(scrambled, folder / "other_model/model.safetensors", {"format": "pt"})
    shutil.copytree(random_model, folder / "thinking_model")
    tokenizer = load_tokenizer(folder / "thinking_model")
    head, other, tail = tokenizer.chat_template.partition("    {%- elif not (loop.first and asked)")
    tail = tail.replace(
        "'<|im_start|>assistant\\n' }}\n", "'<|im_start|>assistant\\n' }}\n" + NEW_TURN
    )
    tokenizer.chat_template = head + OLD_TURN + other + tail
    tokenizer.save_pretrained(folder / "thinking_model")
    return {
        "folder": folder,
        "model": random_model,
        "env": folder / "env.py",
        "late": folder / "late.py",
        "rows": folder / "rows.jsonl",
        "few_rows": folder / "few_rows.jsonl",
        "other_rows": folder / "other_rows.jsonl",
        "tagged_rows": folder / "tagged_rows.jsonl",
        "asked_rows": folder / "asked_rows.jsonl",
        "heard_rows": folder / "heard_rows.jsonl",
        "other_model": folder / "other_model",
        "thinking_model": folder / "thinking_model",
    }


def trace(world, output, overrides, again=False):
    """All that a run leaves and says, less the time; or the refusal."""
    base = [
        "tools.transport=in_process", "trainer.total_steps=2", "data.batch_size=3", "rollout.n=4",
        "rollout.max_turn_tokens=12", "reward.function=spread_of_letters", "optim.lr=0.002",
        "trainer.device=cpu",
    ]  # fmt: skip
    flags = {
        "data.train": str(world["rows"]),
        "data.val": str(world["few_rows"]),
        "model.path": str(world["model"]),
        "trainer.output": str(output),
        "files": [str(world["env"])],
        "data.agent_name": "every_key",
    }
    set_keys = {o.partition("=")[0] for o in overrides}
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            flags = {k: v for k, v in flags.items() if k not in set_keys}
            config = load_config(None, [*base, *overrides], flags)
            for _ in range(1 + again):
                Trainer(config).run()
    except (UserError, EngineError) as e:
        return {"refused": str(e)}
    effects = {}
    metrics = output / "metrics.jsonl"
    for line in metrics.read_text().splitlines() if metrics.exists() else []:
        record = json.loads(line)
        effects[f"metrics {record['step']}"] = {
            k: v for k, v in record["data"].items() if not k.startswith(("timing_s/", "perf/"))
        }
    if output.exists():
        effects["files"] = sorted(
            f.name for f in output.rglob("*") if f.is_file() and "tfevents" not in f.name
        ) + sorted(f.name for f in output.iterdir())
        effects["texts"] = [
            [m.content for m in s.trajectory.messages]
            for s in load_trajectories(output / "trajectories")
        ]
        # Of what is in them: the order within a file is not always the same.
        effects["weights"] = [
            hashlib.sha256(save(dict(sorted(load_file(f).items())))).hexdigest()
            for f in sorted(output.rglob("*.safetensors"))
        ]
    effects["watchdog"] = "watchdog:" in printed.getvalue()
    effects["validations"] = printed.getvalue().count("validation at step")
    effects["steps run"] = printed.getvalue().count("step 1/")
    return effects


@pytest.fixture(scope="module")
def base_traces():
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("key", CHANGES)
def test_the_key_changes_the_run(key, world, base_traces, tmp_path, monkeypatch):
    import os

    monkeypatch.setenv("EVERY_KEY_PID", str(os.getpid()))
    value, context = CHANGES[key]
    again = "again" in context
    context = [c.format(**world) for c in context if c != "again"]
    if key == "trainer.device":
        context = []
    name = (*context, again)
    if name not in base_traces:
        base_traces[name] = trace(world, tmp_path / "base", context, again)
    changed = trace(
        world, tmp_path / "changed", [*context, f"{key}={value.format(**world)}"], again
    )
    assert changed != base_traces[name]
    if "refused" in changed:
        assert key in REFUSED, changed


@pytest.mark.slow
def test_a_run_is_the_same_twice(world, tmp_path, monkeypatch):
    """Without this, every change above would be seen whatever it did."""
    import os

    monkeypatch.setenv("EVERY_KEY_PID", str(os.getpid()))
    assert trace(world, tmp_path / "a", []) == trace(world, tmp_path / "b", [])


def test_no_key_is_forgotten():
    assert not CHANGES.keys() & ELSEWHERE.keys()
    assert CHANGES.keys() | ELSEWHERE.keys() == FIELDS.keys() and len(FIELDS) <= 156
    for key, test in ELSEWHERE.items():
        file, _, name = test.partition("::")
        text = (Path(__file__).parents[1] / file).read_text()
        body = text.partition(f"def {name}(")[2].partition("\ndef ")[0]
        # Given as a key, to the section alone, or to a fixture.
        given = f'"{key}=', f" {key.rpartition('.')[2]}=", f" {key.replace('.', '__')}="
        assert any(text in body for text in given), test
