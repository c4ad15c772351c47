"""`agentrl train verl.yaml`: a config of verl's is translated, and nothing is lost silently."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from support import verl_defaults
from support.forked_python import run_agentrl
from support.installed_verl import VERL, VERSIONS, InstalledVerl
from support.verl_defaults import GRPO

from agentrl import load_run
from agentrl.cli.options import read_config
from agentrl.compat.verl.config import _PARTS, Translation, _Translator, translate
from agentrl.compat.verl.hydra import read_verl_config
from agentrl.config import FIELDS, load_config
from agentrl.config.sources import Setting, read_overrides
from agentrl.config.verl_keys import (
    CHANGED,
    MACHINE,
    REFUSED,
    RENAMED,
    SAME,
    SHARED,
    UNNEEDED,
    VALUES,
    verl_versions,
)
from agentrl.errors import ConfigError

from .conftest import FIXTURES

MULTI_TURN = """
hydra:
  searchpath:
    - file://verl/trainer/config

defaults:
  - ppo_trainer
  - _self_

data:
  train_files: rows.parquet
  max_prompt_length: 1024
  max_response_length: 1024
  train_batch_size: 256
  return_raw_chat: True

actor_rollout_ref:
  hybrid_engine: True
  model:
    path: some/model
  actor:
    ppo_mini_batch_size: 64
    use_kl_loss: True
  rollout:
    name: sglang
    n: 8
    multi_turn:
      enable: True
      max_assistant_turns: 5

algorithm:
  adv_estimator: grpo

trainer:
  logger: [console, wandb]
  save_freq: -1
  total_epochs: 2
"""


def verl_yaml(folder, text=MULTI_TURN, name="verl.yaml"):
    (folder / name).write_text(text)
    return str(folder / name)


def translated(folder, text, *overrides) -> Translation:
    return translate(verl_yaml(folder, text), overrides)


def config_of(done: Translation, **more):
    return load_config(translated=done.settings, mistakes=done.mistakes, **more)


def test_a_config_is_translated_and_reported(tmp_path):
    done = translated(tmp_path, MULTI_TURN)
    config = config_of(done)
    assert (config.data.train, config.data.batch_size) == ("rows.parquet", 256)
    assert (config.rollout.name, config.rollout.n) == ("sglang", 8)
    assert (config.rollout.max_trajectory_tokens, config.rollout.max_turns) == (1024, 5)
    assert config.data.agent_name == "tool_agent"
    assert (config.algorithm.name, config.algorithm.mini_batch_size) == ("grpo", 512)
    assert (config.algorithm.kl_loss_coef, config.algorithm.kl_type) == (0.001, "k3")
    assert (config.trainer.logger, config.trainer.save_freq) == (["wandb"], 0)
    short = config_of(translated(tmp_path, "actor_rollout_ref: {rollout: {n: 2}}\n"))
    assert short.trainer.total_epochs == 30 and short.data.drop_last
    assert (
        "trainer.total_epochs"
        not in translate(str(tmp_path / "verl.yaml"), ["trainer.total_training_steps=5"]).report()
    )
    # verl's defaults where they differ from agentrl's.
    assert (config.optim.weight_decay, config.algorithm.dual_clip) == (0.01, 3.0)
    assert (config.algorithm.tis_cap, config.val.temperature) == (0.0, 0.0)
    report = done.report()
    assert "  data.batch_size=256  (data.train_batch_size=256)\n" in report
    changed = report.partition("\nchanged:\n")[2].partition("\n\n")[0]
    assert "algorithm.mini_batch_size=512" in changed and "64 times rollout.n=8" in changed
    dropped = report.partition("\nno counterpart:\n")[2].partition("\n\n")[0]
    assert "data.max_prompt_length=1024: Not supported: prompts are never truncated" in dropped
    assert "return_raw_chat" not in report  # It has verl's default.
    defaults = report.partition("verl's defaults:\n")[2]
    assert "  optim.weight_decay=0.01\n" in defaults


@pytest.mark.parametrize("key", ["", "fsdp_config."])
def test_ranks_that_share_rows(tmp_path, key):
    name = "ulysses_sequence_parallel_size"
    words = [f"actor_rollout_ref.actor.{key}{name}=4", "trainer.n_gpus_per_node=8"]
    done = translated(tmp_path, MULTI_TURN, *words, f"actor_rollout_ref.ref.{name}=4")
    assert config_of(done).trainer.context_parallel_size == 4


def test_what_the_command_line_overrides_is_not_reported_as_taken(tmp_path):
    words = ["rollout.n=4", "optim.weight_decay=0.1", "algorithm.mini_batch_size=8"]
    report = translate(verl_yaml(tmp_path), words, {"model.path": "m"}).report()
    overridden = report.partition("overridden by the command line:\n")[2].partition("\n\n")[0]
    assert overridden.splitlines() == [
        "  model.path  (actor_rollout_ref.model.path=some/model)",
        "  rollout.n  (actor_rollout_ref.rollout.n=8)",
        "  algorithm.mini_batch_size  (actor_rollout_ref.actor.ppo_mini_batch_size=64)",
    ]
    rest = report.replace(overridden, "")
    assert not any(f"  {word.partition('=')[0]}=" in rest for word in [*words, "model.path"])


def test_several_files_and_names_of_columns(tmp_path):
    done = translated(
        tmp_path,
        MULTI_TURN,
        "data.train_files=[a.parquet, b.parquet]",
        "data.val_files=c.parquet",
        "data.prompt_key=question",
        "data.reward_fn_key=topic",
    )
    data = config_of(done).data
    assert (data.train, data.val) == (["a.parquet", "b.parquet"], "c.parquet")
    assert (data.prompt_key, data.reward_fn_key) == ("question", "topic")


@pytest.mark.parametrize("value", ["7", pytest.param("false", marks=pytest.mark.slow)])
def test_every_setting_is_in_one_of_the_lists(tmp_path, value):
    """No key of a config disappears, whatever its value is, unless it is verl's default."""
    defaults = {k: v for has in verl_versions().values() for k, v in has.items()}
    file, keys = verl_yaml(tmp_path), {*RENAMED, *CHANGED, *UNNEEDED, *REFUSED, *SHARED}
    for path in sorted(keys):
        done = translate(file, [f"{path}={value}"])
        lines = "\n".join([done.report(), *done.mistakes])
        may_be_default = re.search(r"(?i)\bfalse\}?$", str(defaults.get(path)))
        if not (may_be_default and value == "false"):
            assert f"{path}=" in lines, (path, value)


def test_the_command_line_translates_it(tmp_path, capsys):
    file = verl_yaml(tmp_path)
    words = [file, "actor_rollout_ref.rollout.n=4", "trainer.seed=3", "rollout.max_turns=2"]
    config = read_config(None, words, model="other/model", output=None)
    assert (config.rollout.n, config.algorithm.mini_batch_size) == (4, 256)
    assert (config.trainer.seed, config.rollout.max_turns) == (3, 2)
    assert config.model.path == "other/model"
    out = capsys.readouterr().out
    assert out.startswith(
        f"{file} is translated to agentrl's keys. Its keys are those of verl 0.9.1 (and of 0.7.0,"
        " 0.7.1, 0.8.0, 0.9.0).\ntaken:\n"
    )


def test_the_version_is_named_next_to_mistakes_too(tmp_path, capsys):
    switch = "trainer.v1.separate_async.hybrid_rollout.enable_switch=false"
    words = [verl_yaml(tmp_path), "actor_rollout_ref.rollout.do_sample=false", switch]
    with pytest.raises(ConfigError, match="always samples"):
        read_config(None, words, model="other/model")
    out = capsys.readouterr().out
    assert out == f"{words[0]} is translated to agentrl's keys. Its keys are those of verl 0.9.1.\n"


def test_a_key_of_agentrls_also_counts_where_a_value_is_computed_from_it(tmp_path):
    config = config_of(translated(tmp_path, MULTI_TURN, "rollout.n=2"))
    assert (config.rollout.n, config.algorithm.mini_batch_size) == (2, 128)


def test_mini_batches_larger_than_the_batch_name_verls_key(tmp_path):
    done = translated(
        tmp_path, MULTI_TURN.replace("    ppo_mini_batch_size: 64\n", ""), "rollout.n=2"
    )
    with pytest.raises(ConfigError, match=r"ppo_mini_batch_size \(256 by default\)"):
        config_of(done, overrides=["data.batch_size=8"])
    config_of(done, overrides=["data.batch_size=8", "algorithm.mini_batch_size=0"])


@pytest.mark.parametrize(
    ("words", "config", "message"),
    [
        (["run.yaml"], None, "run.yaml is not a config of verl's.*use --config run.yaml"),
        (["no.yaml"], None, "no such file: no.yaml"),
        (["verl.yaml"], "run.yaml", "give one of them"),
        ([], "verl.yaml", "this is a config of verl's.*agentrl train verl.yaml"),
    ],
)
def test_configs_in_the_wrong_place_are_refused(tmp_path, monkeypatch, words, config, message):
    monkeypatch.chdir(tmp_path)
    verl_yaml(tmp_path)
    verl_yaml(tmp_path, "data: {train: rows.parquet}\n", "run.yaml")
    with pytest.raises(ConfigError, match=message):
        read_config(config, words)


TRANSFORMER = "actor_rollout_ref.actor.megatron.override_transformer_config"


# -- what would change training silently ----------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("actor_rollout_ref.rollout.do_sample=false", "always samples"),
        ("actor_rollout_ref.actor.optim.betas=[0.9, 0.95]", "betas"),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=cosine", "lr_final.*linear"),
        (
            "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1",
            r"cannot be counted \(no such file: rows.parquet .*Set .*lr_warmup_steps",
        ),
        ("actor_rollout_ref.model.override_config.max_position_embeddings=9", "no model at"),
        ("actor_rollout_ref.model.override_config.vocab_size=9", "that of the model"),
        ("distillation.enabled=true", r"Use teacher.model.*docs/distillation.md"),
        ("async_training.staleness_threshold=0.5", "fully asynchronous.*max_staleness"),
        ("skip.rollout.enable=true", "every row is played"),
        ("actor_rollout_ref.model.override_config.attention_dropout=0.1", "without dropout"),
        ("actor_rollout_ref.actor.mindspeed.mcore_kwargs.moe_aux_loss_coeff=0.1", "other losses"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov", "cispo, sapo, dppo_tv"),
        ("actor_rollout_ref.model.custom_chat_template=x", "chat_template"),
        ("algorithm.adv_estimator=opo", "reinforce_plus_plus_baseline"),
        ("algorithm.rollout_correction.bypass_mode=true", "trainer's own"),
        ("algorithm.rollout_correction.rollout_rs=token", "tis_mode=mask"),
        ("algorithm.rollout_correction.rollout_rs=seq_mean_k1", "algorithm.reject_band"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=dppo_kl", "sapo, dppo_tv"),
        ("reward_model.enable=true", "judge"),
        ("reward_model.reward_manager=prime", "@reward"),
        ("data.train_max_samples=100", "all rows"),
        (
            "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side=left",
            "tools.truncate=head",
        ),
        ("actor_rollout_ref.actor.no_such_key=1", "neither verl's"),
        # A typo below a section whose keys are not needed, and its neighbours.
        ("critic.optmi.lr=1", r"neither verl's.*mean 'critic.optim.lr'\?"),
        ("distillation.enable=true", r"neither verl's.*mean 'distillation.enabled'\?"),
        ("actor_rollout_ref.actor.fsdp_config.qat.enable=true", "not quantized"),
        ("actor_rollout_ref.actor.optim.lr_decay_style=cosine", "linear"),
        ("actor_rollout_ref.actor.megatron.router_replay.mode=R2", "router_replay=true for verl"),
        (f"{TRANSFORMER}.moe_z_loss_coeff=0.001", "without other losses"),
        (f"{TRANSFORMER}.fp8=e4m3", "other losses and precisions"),
        ("actor_rollout_ref.actor.policy_loss.tau_neg=2", "Use algorithm.tau_neg"),
        ("reward_model.reward_kwargs.max_resp_len=512", "ends at rollout.max_trajectory_tokens"),
        ("reward.reward_kwargs.judge=x", "a reward manager that agentrl does not have"),
        ("critic.model.override_config.attention_dropout=0.1", "the policy's model"),
        ("critic.model.lora_alpha=32", "an adapter as the policy's"),
        ("critic.loss_scale_factor=2", "loss scale of the policy"),
        ("critic.optim.eps=0.001", "the policy's optimizer"),
        ("critic.model.path=another/model", "model.path"),
        ("critic.optim.betas=[0.9, 0.95]", "betas"),
        ("critic.optim.lr_warmup_steps=10", "warm-up"),
        ("critic.optim.lr_scheduler_type=cosine", "schedule"),
        ("critic.model.lora_rank=8", "adapter"),
        ("actor_rollout_ref.ref.model.path=another/model", "the reference is the model"),
        ("actor_rollout_ref.model.lora.rank=32", "model.lora_rank"),
    ],
)
def test_what_agentrl_cannot_do_is_an_error_that_names_the_fix(tmp_path, setting, message):
    base = MULTI_TURN.replace("adv_estimator: grpo", "adv_estimator: gae")
    path = setting.partition("=")[0]
    done = translated(tmp_path, base, setting)
    with pytest.raises(ConfigError, match=rf"(?s){re.escape(setting)}.*{message}") as refused:
        config_of(done)
    assert f"{path}=null leaves it out" in str(refused.value)
    assert not translated(tmp_path, base, f"{path}=null").mistakes


def test_epochs_have_no_effect_next_to_steps(tmp_path):
    both = "trainer.total_training_steps=9", "trainer.total_epochs=2"
    done = translated(tmp_path, MULTI_TURN, *both)
    (line,) = (line for line in done.dropped if "trainer.total_epochs=2" in line)
    assert "verl also ends after as many epochs" in line
    assert not any("total_epochs" in line for line in done.taken)


def test_a_share_of_warm_up_steps_is_computed_from_the_rows(tmp_path):
    """verl has `int(lr_warmup_steps_ratio * total_training_steps)` steps, of whole batches."""
    line = json.dumps({"prompt": "1+1"}) + "\n"
    for name, rows in (("a", 70), ("b", 60)):
        (tmp_path / f"{name}.jsonl").write_text(line * rows)
    words = [
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.5",
        f"data.train_files=[{tmp_path}/a.jsonl, {tmp_path}/b.jsonl]",
        "data.train_batch_size=64",  # 2 epochs of 2 whole batches
    ]
    assert config_of(translated(tmp_path, MULTI_TURN, *words)).optim.lr_warmup_steps == 2
    words.append("trainer.total_training_steps=100")
    assert config_of(translated(tmp_path, MULTI_TURN, *words)).optim.lr_warmup_steps == 50
    for odd in (
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=.inf",
        "data.train_batch_size=0",
    ):
        with pytest.raises(ConfigError, match=rf"batch_size=0|{odd}.*must be a number"):
            config_of(translated(tmp_path, MULTI_TURN, *words, odd))
    one = {"data.train": f"{tmp_path}/a.jsonl"}  # as --dataset
    done = translate(verl_yaml(tmp_path), [words[0], words[2]], one)
    assert config_of(done).optim.lr_warmup_steps == 1


PAGE = Path(__file__).parents[2] / "docs" / "verl.md"
COMMANDS = json.loads((FIXTURES / "commands.json").read_text())
"""The arguments of all `python3 -m verl.trainer.main_ppo` in the scripts of verl's examples
(1dda039) and of verl-recipe (48ea0a7) that use verl's own config files, recorded on 2026-08-23."""


def test_recorded_commands_of_verls_examples_and_recipes(tmp_path):
    """70 of 122 commands are translated, and their configs load. Each refusal names its key."""
    file = verl_yaml(tmp_path, "defaults: [ppo_trainer, _self_]\n")
    sizes = {"model_type": "qwen3", "max_position_embeddings": 32768}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    local = [f"actor_rollout_ref.model.path={tmp_path}", f"critic.model.path={tmp_path}"]
    refused = {}
    for script, numbers in COMMANDS["commands"].items():
        done = translate(file, [COMMANDS["settings"][n] for n in numbers] + local)
        try:
            config_of(done, overrides=["trainer.ray_address=auto"])  # some are for several machines
        except ConfigError as e:
            refused[script] = str(e)
    assert (len(COMMANDS["commands"]), len(refused)) == (122, 52)
    reasons = [
        "custom_cls", "loss_mode", "adv_estimator", "distillation.enabled", "trainer.device=npu",
        "reward_model.enable", "routing_replay", "router_replay", "mtp.enable", "bypass_mode",
        "agent_loop_config_path", "kl_loss_type", "lora.rank", "lora_adapter_path", "fp8_recipe",
        "exclude_modules", "tis_cap=0.5_4.0", "actor/mlite_actor.yaml", "moe_z_loss_coeff",
        "moe_router_enable_expert_bias",
        "lr_scheduler_type=cosine (verl's default)",  # of model_engine=veomni
    ]  # fmt: skip
    assert not [s for s, text in refused.items() if not any(r in text for r in reasons)]


SCRIPT = """
MODEL=some/model
LAUNCH=(uv run python3)
%s -m verl.trainer.main_ppo \\
    --config-path=config --config-name='ppo_megatron_trainer'\\
    algorithm.adv_estimator=grpo \\
    actor_rollout_ref.rollout.n=8 \\
    actor_rollout_ref.model.path=$MODEL $@
"""


@pytest.mark.parametrize("program", ["python3", "python", '"${LAUNCH[@]}"'])
def test_the_page_moves_a_launch_script(tmp_path, program):
    section = PAGE.read_text().partition("### Move a launch script")[2]
    (tmp_path / "run_verl.sh").write_text(SCRIPT % program)
    (tmp_path / "agentrl").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "agentrl").chmod(0o755)
    bash = section.partition("```bash\n")[2].partition("```")[0]
    words = subprocess.run(
        ["bash", "-ec", f"{bash}\nbash run.sh trainer.device=cpu"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert words[:2] == ["check", "verl.yaml"]
    config = config_of(translate(str(tmp_path / "verl.yaml"), words[2:]))
    assert (config.model.path, config.rollout.n) == ("some/model", 8)
    assert (config.algorithm.name, config.trainer.device) == ("grpo", "cpu")


@pytest.mark.parametrize(
    ("settings", "different"),
    [
        (["actor_rollout_ref.model.lora_rank=8"], "critic.model.lora_rank=0"),
        (["actor_rollout_ref.model.lora_rank=8", "critic.model.lora_rank=0"],
         "critic.model.lora_rank=0"),
        (["actor_rollout_ref.model.lora_rank=8", "critic.model.lora_rank=8",
          "actor_rollout_ref.model.lora_alpha=32"], "critic.model.lora_alpha=16"),
        (["actor_rollout_ref.model.lora_rank=8", "critic.model.lora_rank=8"], ""),
        (["actor_rollout_ref.model.lora_alpha=32"], ""),
        (["actor_rollout_ref.actor.optim.weight_decay=0.1",
          "actor_rollout_ref.actor.optim.lr_warmup_steps=5"],
         "critic.optim.weight_decay=0.01, critic.optim.lr_warmup_steps=-1"),
        (["actor_rollout_ref.actor.ppo_epochs=2"], ""),  # verl's critic follows
    ],
)  # fmt: skip
def test_a_critic_that_verl_trains_in_another_way_is_reported(tmp_path, settings, different):
    """verl's default of such a setting is no setting of agentrl's."""
    gae = MULTI_TURN.replace("adv_estimator: grpo", "adv_estimator: gae")
    done = translated(tmp_path, gae, *settings)
    lines = [line for line in done.changed if line.startswith("the critic is trained as")]
    assert not done.mistakes and [line.partition("verl's has ")[2] for line in lines] == [
        different
    ] * bool(different)
    assert not any("the critic is" in line for line in translated(tmp_path, MULTI_TURN).changed)


NUMBERS = [
    "data.max_response_length",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.clip_ratio_low",
    "actor_rollout_ref.actor.optim.lr_warmup_steps",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns",
    "actor_rollout_ref.rollout.multi_turn.max_user_turns",
    "actor_rollout_ref.rollout.multi_turn.max_parallel_calls",
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length",
]


@pytest.mark.parametrize("value", ["[1]", "''", pytest.param("{a: 1}", marks=pytest.mark.slow)])
def test_nonsense_is_a_mistake_and_never_a_crash(tmp_path, value):
    file = verl_yaml(tmp_path)
    for path in sorted({*CHANGED, *SHARED, *RENAMED}):
        done = translate(file, [f"{path}={value}"])
        if path in NUMBERS:
            with pytest.raises(ConfigError, match="mistake"):
                config_of(done)


def test_values_that_agentrl_has_anyway_are_no_mistakes(tmp_path):
    done = translated(
        tmp_path,
        MULTI_TURN,
        "actor_rollout_ref.rollout.top_p=1.0",
        "actor_rollout_ref.rollout.top_k=-1",
        "actor_rollout_ref.actor.optim.betas=[0.9, 0.999]",
        "critic.ppo_epochs=3",  # there is no critic
        "actor_rollout_ref.rollout.do_sample=true",
        "actor_rollout_ref.actor.policy_loss.tau_neg=1.05",  # actor.tau_neg
        "reward_model.reward_kwargs.max_resp_len=1024",  # data.max_response_length
        f"{TRANSFORMER}.moe_router_load_balancing_type=none",
        f"{TRANSFORMER}.recompute_granularity=full",
        "+actor_rollout_ref.rollout.engine_kwargs.sglang.any_argument=1",
        "+actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2",
        "+actor_rollout_ref.model.override_config.attention_dropout=0.0",
        "+actor_rollout_ref.ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.actor.optim.min_lr_ratio=0.1",  # the rate is constant
        "actor_rollout_ref.actor.optim.lr_decay_steps=1000",
        "critic.optim.override_optimizer_config.optimizer_cpu_offload=false",
        "actor_rollout_ref.actor.torchtitan.param_offload=true",
        "actor_rollout_ref.actor.mindspeed.tensor_model_parallel_size=4",
        "actor_rollout_ref.rollout.disaggregation.decode_replicas=2",
        "skip.rollout.dump_dir=dumps",
        "reward_model.enable=false",  # null by default
        "reward_model.overlong_buffer.log=false",
        "actor_rollout_ref.actor.qat.mode=w4a16",
    )
    assert not done.mistakes
    assert "critic.ppo_epochs=3: no critic with algorithm.adv_estimator=grpo" in done.dropped


def test_all_mistakes_are_reported_at_once_with_their_lines(tmp_path):
    text = MULTI_TURN + "  resume_mode: 7\n  bogus: 1\nreward_model: {enable: true}\n"
    line = text[: text.index("bogus")].count("\n") + 1
    done = translated(tmp_path, text, "optim.lr=fast", "no.such=1")
    with pytest.raises(ConfigError) as refused:
        config_of(done)
    message = str(refused.value)
    parts = [
        "trainer.bogus=1 (", f"verl.yaml:{line})", "reward_model.enable=true", "optim.lr=fast",
        "no.such=1",
    ]  # fmt: skip
    for part in parts:
        assert part in message, part


# -- each part ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["algorithm.adv_estimator=gae"], {"algorithm.name": "ppo"}),
        (["algorithm.adv_estimator=mine"], {"algorithm.adv_estimator": "mine"}),
        (
            ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.02",
             "actor_rollout_ref.actor.use_kl_loss=false"],
            {"algorithm.kl_reward_coef": 0.02, "algorithm.kl_type": "k1",
             "algorithm.kl_loss_coef": 0.0},
        ),
        (
            ["algorithm.rollout_correction.rollout_is=sequence",
             "algorithm.rollout_correction.rollout_is_threshold=3"],
            {"algorithm.tis_level": "sequence", "algorithm.tis_cap": 3},
        ),
        (["actor_rollout_ref.actor.tis_imp_ratio_cap=5"], {"algorithm.tis_cap": 5.0}),
        (
            ["algorithm.rollout_correction.rollout_is=token",
             "algorithm.rollout_correction.rollout_is_threshold='0.5_5.0'"],
            {"algorithm.tis_mode": "mask", "algorithm.tis_low": 0.5, "algorithm.tis_cap": 5.0},
        ),
        (
            ["actor_rollout_ref.actor.policy_loss.loss_mode=sapo",
             "actor_rollout_ref.actor.tau_neg=1.1"],
            {"algorithm.policy_loss": "sapo", "algorithm.tau_neg": 1.1, "algorithm.dual_clip": 0.0,
             "algorithm.loss_agg_mode": "seq-mean-token-mean"},
        ),
        (
            ["actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv",
             "actor_rollout_ref.actor.clip_ratio_low=0.15"],
            {"algorithm.policy_loss": "dppo", "algorithm.clip_low": 0.15,
             "algorithm.dual_clip": 3.0},
        ),
        (["actor_rollout_ref.actor.clip_ratio_low=10"], {"algorithm.clip_low": 1.0}),
        (
            ["actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
             "actor_rollout_ref.actor.loss_agg_mode=token-mean"],
            {"algorithm.policy_loss": "gspo", "algorithm.dual_clip": 0.0,
             "algorithm.loss_agg_mode": "seq-mean-token-mean"},
        ),
        (["actor_rollout_ref.actor.clip_ratio_low=0.1"], {"algorithm.clip_low": 0.1}),
        (["actor_rollout_ref.actor.optim.clip_grad=0.5"], {"optim.max_grad_norm": 0.5}),
        (["actor_rollout_ref.actor.grad_clip=0.5"], {"optim.max_grad_norm": 0.5}),
        (["actor_rollout_ref.rollout.response_length=64"], {"rollout.max_trajectory_tokens": 64}),
        # verl keeps all checkpoints.
        ([], {"trainer.keep": 0}),
        (["trainer.max_actor_ckpt_to_keep=3"], {"trainer.keep": 3}),
        (["actor_rollout_ref.actor.fsdp_config.param_offload=true"], {"optim.offload": "all"}),
        (
            ["actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
             "actor_rollout_ref.actor.fsdp_config.param_offload=false"],
            {"optim.offload": "optimizer"},
        ),
        (["actor_rollout_ref.hybrid_engine=false"], {"trainer.placement": "separate"}),
        (["actor_rollout_ref.actor.use_torch_compile=false"], {"optim.compile": "never"}),
        (["actor_rollout_ref.rollout.free_cache_engine=true"], {"rollout.sleep": "all"}),
        (
            ["actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1",
             "trainer.total_training_steps=50"],
            {"optim.lr_warmup_steps": 5, "trainer.total_steps": 50},
        ),
        (
            ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc",
             "algorithm.filter_groups.max_num_gen_batches=10"],
            {"algorithm.filter_groups": True, "algorithm.max_gen_batches": 10},
        ),
        # The assistant answers each user turn, also the last one.
        (
            ["actor_rollout_ref.rollout.multi_turn.max_user_turns=2"],
            {"rollout.max_turns": 3, "rollout.max_tool_calls": 3},
        ),
        (
            ["actor_rollout_ref.rollout.multi_turn.max_parallel_calls=2"],
            {"rollout.max_turns": 5, "rollout.max_tool_calls": 10},
        ),
        (
            ["actor_rollout_ref.rollout.multi_turn.max_tool_response_length=2000"],
            {"tools.max_result_tokens": 500, "tools.truncate": "middle"},
        ),
        (
            ["actor_rollout_ref.rollout.multi_turn.tool_config_path=t.yaml",
             "actor_rollout_ref.rollout.multi_turn.interaction_config_path=i.yaml"],
            {"files": ["t.yaml", "i.yaml"]},
        ),
        (
            ["actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent"],
            {"data.agent_name": "single_turn"},
        ),
        (
            ["actor_rollout_ref.rollout.val_kwargs.n=4",
             "actor_rollout_ref.rollout.val_kwargs.temperature=0.7",
             "actor_rollout_ref.rollout.val_kwargs.top_k=-1"],
            {"val.n": 4, "val.temperature": 0.7, "val.top_k": 0, "val.greedy": False},
        ),
        (
            ["custom_reward_function.path=r.py", "custom_reward_function.name=score",
             "custom_reward_function.reward_kwargs.bonus=1"],
            {"reward.function": "r.py:score", "reward.kwargs": {"bonus": 1}},
        ),
        (["reward.custom_reward_function.path=r.py"], {"reward.function": "r.py:compute_score"}),
        (
            ["reward_model.reward_manager=dapo",
             "reward_model.reward_kwargs.overlong_buffer_cfg.enable=true",
             "reward_model.reward_kwargs.overlong_buffer_cfg.len=128",
             "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5"],
            {"reward.overlong_buffer": 128, "reward.overlong_penalty": 0.5},
        ),
        (
            ["reward_model.sandbox_fusion.url=http://127.0.0.1:8080/run_code"],
            {"sandbox.backend": "http://127.0.0.1:8080"},
        ),
        (["sandbox_fusion.url=http://127.0.0.1:8080/run_code"],
         {"sandbox.backend": "http://127.0.0.1:8080"}),
        # verl takes the older key, if both are set.
        (["custom_reward_function.path=old.py", "reward.custom_reward_function.path=new.py"],
         {"reward.function": "old.py:compute_score"}),
        (
            ["trainer.project_name=p", "trainer.experiment_name=e"],
            {
                "trainer.output": "checkpoints/p/e",
                "trainer.project_name": "p",
                "trainer.experiment_name": "e",
            },
        ),
        (["trainer.resume_mode=disable"], {"trainer.resume": "never"}),
        (["trainer.logger=[console, vemlp_wandb]"], {"trainer.logger": []}),
        (["actor_rollout_ref.rollout.multi_turn.format=qwen"], {"rollout.tool_format": "auto"}),
        (["actor_rollout_ref.rollout.name=hf"], {"rollout.name": "local"}),
        # verl makes n_gpus_per_node / tensor_model_parallel_size servers.
        (
            ["trainer.n_gpus_per_node=8",
             "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
             "actor_rollout_ref.rollout.data_parallel_size=1"],
            {"rollout.engines": 4, "rollout.tensor_parallel_size": 2},
        ),
        # "config.clip_ratio_low if config.clip_ratio_low is not None else clip_ratio"
        (
            ["actor_rollout_ref.actor.clip_ratio=0.3",
             "actor_rollout_ref.actor.clip_ratio_low=null",
             "actor_rollout_ref.actor.clip_ratio_high=null"],
            {"algorithm.clip_low": 0.3, "algorithm.clip_high": 0.3},
        ),
    ],
)  # fmt: skip
def test_settings_and_what_they_become(tmp_path, settings, expected):
    done = translated(tmp_path, MULTI_TURN, *settings)
    config = config_of(done, flags={"model.path": "m"})
    if expected.get("algorithm.adv_estimator") != "mine":
        assert not done.mistakes
    assert {key: config.value(key) for key in expected} == expected


# -- Hydra ----------------------------------------------------------------------------------------


def test_interpolations_are_resolved(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_MODEL", "some/model")
    text = (
        "actor_rollout_ref:\n  model: {path: '${oc.env:MY_MODEL}'}\n"
        "  actor: {ppo_mini_batch_size: '${data.train_batch_size}',"
        " grad_clip: '${.optim.weight_decay}', optim: {weight_decay: 2}}\n"
        "  rollout: {name: '${oc.env:NO_SUCH_ENGINE,sglang}', n: '${oc.select:no.such,4}'}\n"
        "data: {train_batch_size: 32, train_files: 'rows/${algorithm.adv_estimator}.parquet'}\n"
        "algorithm: {adv_estimator: grpo}\n"
    )
    config = config_of(translated(tmp_path, text))
    assert config.model.path == "some/model"
    assert (config.rollout.name, config.rollout.n) == ("sglang", 4)
    assert config.algorithm.mini_batch_size == 32 * 4
    assert config.optim.max_grad_norm == 2
    assert config.data.train == "rows/grpo.parquet"


def test_an_unknown_key_of_the_optimizer_is_a_mistake(tmp_path):
    """verl's own keys of FSDP, Megatron and VeOmni are known."""
    known = "{lr: 1.0e-6, num_cycles: 0.5, total_training_steps: -1, lr_decay_style: constant}"
    assert not translated(tmp_path, f"actor_rollout_ref: {{actor: {{optim: {known}}}}}\n").mistakes
    done = translated(tmp_path, "actor_rollout_ref: {actor: {optim: {lr_scheduler: cosine}}}\n")
    assert "lr_scheduler_type'?" in done.mistakes[0]


def test_an_interpolation_may_have_an_empty_default(tmp_path):
    text = "actor_rollout_ref: {actor: {grad_clip: '${oc.select:no.such,2}'}, ref: {a: '%s'}}\n"
    done = translated(tmp_path, text % "${oc.select:actor_rollout_ref.actor.megatron,{}}")
    assert not done.mistakes and config_of(done).optim.max_grad_norm == 2


def test_a_missing_value_that_nothing_reads_is_no_mistake(tmp_path):
    text = "actor_rollout_ref: {rollout: {name: '%s'}}\nreward_model: {rollout: {name: '???'}}\n"
    assert not translated(tmp_path, text % "sglang").mistakes
    (mistake,) = translated(tmp_path, text % "???").mistakes
    assert mistake.startswith("actor_rollout_ref.rollout.name=???")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${oc.env:NO_SUCH_VARIABLE}", "environment variable NO_SUCH_VARIABLE is not set"),
        ("${now:%Y}", "not supported: write the value"),
        ("${no.such}", "does not set no.such"),
        ("${actor_rollout_ref.model.path}", "refers to itself"),
        ("${x", "not closed"),
        ("???", "has no value"),
    ],
)
def test_interpolations_that_cannot_be_resolved_are_mistakes(tmp_path, value, message):
    done = translated(tmp_path, f"actor_rollout_ref: {{model: {{path: '{value}'}}}}\n")
    assert re.search(message, done.mistakes[0])


def test_a_default_that_depends_on_a_mistake_is_no_second_one(tmp_path):
    settings = "actor_rollout_ref.rollout.n='${no.such}'", "actor_rollout_ref.actor.rollout_n=1"
    (mistake,) = translated(tmp_path, MULTI_TURN, *settings).mistakes
    assert "actor_rollout_ref.rollout.n=" in mistake and "does not set no.such" in mistake


def test_defaults_are_files_of_the_same_folder(tmp_path):
    verl_yaml(tmp_path, "data: {train_batch_size: 8, seed: 5}\ndefaults: [ppo_trainer]\n", "b.yaml")
    text = (
        "actor_rollout_ref: {rollout: {name: local}, actor: {ppo_mini_batch_size: 2}}\n"
        "data: {train_batch_size: 4}\n"
    )
    config = config_of(translated(tmp_path, "defaults: [b, _self_]\n" + text))
    assert (config.data.batch_size, config.trainer.seed) == (4, 5)
    # Before the others, the file's own settings are overridden by them.
    config = config_of(translated(tmp_path, "defaults: [_self_, b]\n" + text))
    assert config.data.batch_size == 8
    done = translated(tmp_path, "defaults: [no_such]\n" + text)
    assert "need no_such.yaml" in done.mistakes[0] and str(tmp_path) in done.mistakes[0]


GROUPS = {
    "actor/mine.yaml": "defaults: [../optim@optim: fast, common]\ngrad_clip: 2\n",
    "actor/common.yaml": "ppo_epochs: 3\n",
    "actor/other.yaml": "ppo_epochs: 5\n",
    "optim/fast.yaml": "lr: 1e-4\n",
    "data/mine.yaml": "apply_chat_template_kwargs: {enable_thinking: false}\n",
    "data/rows.yaml": "train_batch_size: 32\n",
    "site.yaml": "# @package _global_\ntrainer: {total_epochs: 7, n_gpus_per_node: 1}\n",
    "c/a.yaml": "# @package _global_\ndefaults: [b]\n",
    "c/b.yaml": "defaults: [a]\n",
    "c/run.yaml": "defaults: [/c/a]\n",
    "run.yaml": """
defaults:
  - base
  - data: [mine, rows]
  - site
  - optional cluster: no_such
  - critic: null
  - _self_
  - override actor@actor_rollout_ref.actor: mine
actor_rollout_ref: {rollout: {n: 2}, actor: {grad_clip: 4}}
""",
    "base.yaml": "defaults: [actor@actor_rollout_ref.actor: common]\ndata: {seed: 3}\n",
}
ACTOR = "actor_rollout_ref.actor."
COMPOSED = {
    "data.seed": 3, f"{ACTOR}grad_clip": 4, f"{ACTOR}optim.lr": 1e-4, f"{ACTOR}ppo_epochs": 3,
    "data.apply_chat_template_kwargs": {"enable_thinking": False}, "data.train_batch_size": 32,
    "trainer.total_epochs": 7, "trainer.n_gpus_per_node": 1, "actor_rollout_ref.rollout.n": 2,
}  # fmt: skip


@pytest.fixture
def groups(tmp_path):
    """A folder of files for Hydra."""
    for name, text in GROUPS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def composed(folder, *overrides, name="run"):
    """Return the values of a config that is composed of files, and the mistakes."""
    mistakes: list[str] = []
    words = read_overrides(overrides, mistakes)
    settings = read_verl_config(str(folder / f"{name}.yaml"), mistakes, words)
    return {path: setting.value for path, setting in settings.items()}, mistakes


OTHER = "actor@actor_rollout_ref.actor=other"
COMPOSED_OTHER = {**COMPOSED, f"{ACTOR}ppo_epochs": 5}
del COMPOSED_OTHER[f"{ACTOR}optim.lr"]


def test_files_of_groups_are_composed(groups):
    assert composed(groups) == (COMPOSED, [])
    assert composed(groups, OTHER) == (COMPOSED_OTHER, [])


@pytest.mark.verl
@pytest.mark.parametrize("words", [[], [OTHER]])
def test_hydra_composes_the_same(groups, words):
    verl = InstalledVerl("0.9.1")
    config = yaml.safe_load(verl.call("compose", words, str(groups), "run"))
    verl.close()
    thinking = "data.apply_chat_template_kwargs"
    leaves = dict(verl_defaults.leaves(config))
    leaves[thinking] = {"enable_thinking": leaves.pop(f"{thinking}.enable_thinking")}
    assert leaves == composed(groups, *words)[0]


@pytest.mark.verl
@pytest.mark.parametrize("version", VERSIONS)
def test_verls_own_files_are_composed(version):
    """Hydra has composed verl's `_generated_ppo_trainer.yaml`, which has the same values."""
    folder = VERL / version / "verl/trainer/config"
    values, mistakes = composed(folder, name="ppo_trainer")
    generated = yaml.safe_load((folder / "_generated_ppo_trainer.yaml").read_text())
    expected = dict(verl_defaults.leaves(generated))
    values.pop("model_engine", None)
    (integer,) = (path for path in values if values[path] == "100_000")  # YAML 1.1
    values[integer] = 100_000
    assert not mistakes and values == expected


@pytest.mark.verl
def test_versions_that_read_grad_clip():
    """From 0.8.0 on, gradients are clipped at `optim.clip_grad`."""
    sources = {v: [*(VERL / v / "verl").rglob("*.py")] for v in VERSIONS}
    readers = {v: sum("config.grad_clip" in f.read_text() for f in sources[v]) for v in VERSIONS}
    assert readers == {"0.7.0": 2, "0.7.1": 2, "0.8.0": 0, "0.9.0": 0, "0.9.1": 0}


def test_files_that_are_not_found_or_include_each_other(groups):
    _, (mistake,) = composed(groups / "c")
    assert "need c/a.yaml" in mistake and str(groups / "c") in mistake
    (groups / "top.yaml").write_text("defaults: [c/a]\n")
    _, (mistake,) = composed(groups, name="top")
    assert "are a cycle: a.yaml -> b.yaml -> a.yaml" in mistake
    _, (mistake,) = composed(groups, "critic@critic=no_such")
    assert "need critic/no_such.yaml, which is neither a file of verl's" in mistake
    # A file of verl's own has verl's defaults, and its search path needs no folder.
    search = "hydra.searchpath=[pkg://verl.trainer.config]"
    assert composed(groups, "critic@critic=dp_critic", search) == (COMPOSED, [])


def test_files_of_a_search_path(groups, tmp_path):
    (tmp_path / "more" / "critic").mkdir(parents=True)
    (tmp_path / "more" / "critic" / "mine.yaml").write_text("ppo_epochs: 9\n")
    search = f"hydra.searchpath=[file://{tmp_path}/more]"
    values, mistakes = composed(groups, search, "+critic@critic=mine")
    assert not mistakes and values["critic.ppo_epochs"] == 9


def test_a_training_engine_in_the_defaults(tmp_path):
    done = translated(tmp_path, "defaults: [ppo_trainer, override model_engine: veomni]\n")
    assert "lr_scheduler_type=cosine (verl's default)" in done.mistakes[0]
    done = translated(tmp_path, MULTI_TURN, "model_engine=torchtitan")
    assert config_of(done).optim.lr_final == 0.0  # torchtitan's decay is linear
    factor = "actor_rollout_ref.actor.optim.min_lr_factor=1.0"
    done = translated(tmp_path, MULTI_TURN, "model_engine=torchtitan", factor)
    assert config_of(done).optim.lr_final == 1.0


OWN = """
bs: 64
my: {max_len: 128}
total_epochs: 3
data: {train_batch_size: '${bs}', max_response_length: '${my.max_len}'}
trainer: {total_epochs: '${total_epochs}'}
actor_rollout_ref: {rollout: {name: sglang, n: '${oc.select:samples,2}'}}
algorithm: {adv_estimator: grpo}
"""


def test_variables_of_the_users_own(tmp_path):
    done = translated(tmp_path, OWN, "+samples=4", "bs=32", "hydra.run.dir=out/${now:%H}")
    config = config_of(done, overrides=["algorithm.mini_batch_size=0"])
    assert (config.data.batch_size, config.rollout.n, config.trainer.total_epochs) == (32, 4, 3)
    assert config.rollout.max_trajectory_tokens == 128
    assert done.version == "0.9.1 (and of 0.7.0, 0.7.1, 0.8.0, 0.9.0)"
    lines = "\n".join([done.report(), *done.mistakes])
    assert not re.search(r"\b(bs|my|samples|hydra)\b", lines)


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        ("unused: 1\n", "", "unused=1.*neither verl's"),
        ("trainr: {total_epochs: 3}\n", "data.seed='${trainr.total_epochs}'",
         "trainr.total_epochs=3.*mean 'trainer.total_epochs'"),
        ("", "+unused=1", "unused=1.*unknown key"),
        ("trainer.epochs: 3\n", "data.seed='${trainer.epochs}'", "trainer.epochs=3.*neither"),
    ],
)  # fmt: skip
def test_keys_that_are_no_variables(tmp_path, text, override, message):
    done = translated(tmp_path, OWN + text, *filter(None, [override]))
    with pytest.raises(ConfigError, match=rf"(?s){message}"):
        config_of(done)


# -- verl's versions ------------------------------------------------------------------------------

RUN = FIXTURES / "grpo_0.9.1.yaml"
"""What Hydra stores in `.hydra/config.yaml` of a run of verl 0.9.1 (`support.verl_defaults`)."""


def whole(version: str, engine: str = "dp", **changes) -> str:
    """Return a config that has all keys of a version."""
    keys = {**verl_versions(engine)[version], "actor_rollout_ref.rollout.name": "sglang", **changes}
    return json.dumps({"actor_rollout_ref.hybrid_engine": True, **keys})


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("engine", ["dp", "megatron"])
def test_all_defaults_of_a_version_are_silent(tmp_path, version, engine):
    done = translated(tmp_path, whole(version, engine))
    config = config_of(done, flags={"model.path": "m"})
    assert done.version == version
    assert (config.algorithm.name, config.data.batch_size, config.rollout.n) == ("ppo", 1024, 1)
    taken = ["rollout.name=sglang  (actor_rollout_ref.rollout.name=sglang)"]
    assert (done.taken, done.changed, done.overridden, done.dropped) == (taken, [], [], [])


def test_a_run_of_0_9_1_is_its_settings(tmp_path):
    """The whole config of a run means what its settings mean on verl's own defaults."""
    done = translate(str(RUN), ())
    assert done.version == "0.9.1" and not done.mistakes
    file = verl_yaml(tmp_path, "defaults: [ppo_trainer]\n")
    by_settings = translate(file, GRPO)
    # The run's folder is verl's default if the whole config is translated.
    folder = [line for line in by_settings.changed if line.startswith("trainer.output=")]
    assert sorted(done.taken) == sorted(by_settings.taken)
    assert sorted([*done.changed, *folder]) == sorted(by_settings.changed)
    whole, short = ({s.path: s.value for s in d.settings} for d in (done, by_settings))
    assert whole.items() >= short.items()
    machine = {f"trainer.{key}" for key in ("seed", "device", "nnodes", "placement")}
    machine |= {"optim.compile", "rollout.sleep", "rollout.tool_format", "trainer.resume"}
    assert {*whole} - {*short} <= machine


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ([], "0.9.1 (and of 0.7.0, 0.7.1, 0.8.0, 0.9.0)"),
        (["trainer.v1.trainer_mode=sync"], "0.9.1 (and of 0.9.0)"),
        (["actor_rollout_ref.rollout.multi_turn.interaction_config_path=i.yaml"],
         "0.7.1 (and of 0.7.0)"),
        (["actor_rollout_ref.rollout.multi_turn.interaction_config_path=i.yaml",
          "trainer.v1.trainer_mode=sync", "skip.rollout.enable=false"],
         "0.9.1, the nearest version (it lacks"
         " actor_rollout_ref.rollout.multi_turn.interaction_config_path)"),
        (["no.such.key=1"], "0.9.1 (and of 0.7.0, 0.7.1, 0.8.0, 0.9.0)"),
        (["critic.model=null"], "0.9.1 (and of 0.7.0, 0.7.1, 0.8.0, 0.9.0)"),
        # verl 0.6.1 has it, which agentrl does not know.
        (["actor_rollout_ref.actor.fsdp_config.strategy=fsdp",
          "actor_rollout_ref.profiler.discrete=false"],
         "0.9.1, the nearest version (it lacks actor_rollout_ref.profiler.discrete)"),
    ],
)  # fmt: skip
def test_the_version_is_recognized_by_its_keys(tmp_path, settings, text):
    assert translated(tmp_path, MULTI_TURN, *settings).version == text


def test_a_setting_without_a_value_is_a_mistake_if_verl_reads_it(tmp_path):
    text = MULTI_TURN.replace("train_batch_size: 256", "train_batch_size: ???\n  audio_key: ???")
    (mistake,) = translated(tmp_path, text).mistakes
    assert "data.train_batch_size=VALUE" in mistake


def test_a_value_of_a_key_that_only_verl_has_is_refused(tmp_path):
    key = "algorithm.use_pf_ppo"
    done = translated(tmp_path, MULTI_TURN, f"{key}=true")
    assert f"{key}=true (command line): agentrl has no such" in done.mistakes[0]
    assert f"verl's default, {key}=false." in done.mistakes[0]
    assert not translated(tmp_path, MULTI_TURN, f"{key}=false").mistakes


def test_the_training_engine_has_its_defaults(tmp_path):
    """With `model_engine=veomni`, verl's schedule is a cosine."""
    done = translated(tmp_path, MULTI_TURN, "model_engine=veomni")
    assert "lr_scheduler_type=cosine (verl's default)" in done.mistakes[0]
    constant = "actor_rollout_ref.actor.optim.lr_scheduler_type=constant"
    assert not translated(tmp_path, MULTI_TURN, "model_engine=veomni", constant).mistakes


ASYNC = "trainer.v1.trainer_mode=separate_async"


@pytest.mark.parametrize(
    ("settings", "staleness", "cap"),
    [
        ([], 1, 2.0),
        (["trainer.v1.separate_async.num_warmup_batches=1.5"], 2, 2.0),
        (["trainer.v1.sampler.max_off_policy_threshold=2",
          "trainer.v1.separate_async.num_warmup_batches=4"], 1, 2.0),
        (["algorithm.rollout_correction.rollout_is=token",
          "algorithm.rollout_correction.rollout_is_threshold=3"], 1, 3.0),
    ],
)  # fmt: skip
def test_separate_async_is_a_staleness(tmp_path, settings, staleness, cap):
    machine = [
        "actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=4",
        "actor_rollout_ref.rollout.free_cache_engine=true", "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    ]  # fmt: skip
    done = translated(tmp_path, MULTI_TURN, ASYNC, *machine, *settings)
    config = config_of(done)
    assert config.trainer.max_staleness == staleness and config.algorithm.tis_cap == cap
    assert (config.trainer.placement, config.rollout.sleep) == ("separate", "none")
    assert (config.trainer.n_gpus_per_node, config.rollout.engines) == (2, 2)
    (line,) = (line for line in done.changed if line.startswith("trainer.max_staleness="))
    assert ASYNC in line and "none is dropped for its age" in line


def test_other_modes_of_the_trainer(tmp_path):
    done = translated(tmp_path, MULTI_TURN, "trainer.v1.trainer_mode=colocate_async")
    assert "Use verl's sync, or trainer.max_staleness" in done.mistakes[0]
    old = translated(tmp_path, MULTI_TURN, ASYNC, "trainer.use_v1=false")
    assert not old.mistakes and config_of(old).trainer.max_staleness == 0


def test_a_run_of_0_9_1_trains_two_steps(tmp_path):
    rows = Path(__file__).parents[2] / "datasets" / "arithmetic_train.parquet"
    words = [
        str(RUN), f"data.train_files={rows}", "data.val_files=null", "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", "data.max_response_length=64",
        "trainer.total_training_steps=2", "trainer.n_gpus_per_node=1", "trainer.device=cpu",
        "trainer.logger=[console]", "rollout.name=local",
    ]  # fmt: skip
    done = run_agentrl("train", *words, "--model", "tiny", "--output", tmp_path / "run")
    assert not done.returncode, done.stdout + done.stderr
    assert "Its keys are those of verl 0.9.1.\n" in done.stdout
    run = load_run(tmp_path / "run")
    assert run.metrics.column("step").to_pylist() == [1, 2]
    assert run.config["rollout"]["n"] == 5 and run.config["algorithm"]["kl_loss_coef"] == 0.001


@pytest.mark.verl
def test_the_table_and_the_run_are_verls_own():
    """`make verl-keys` writes both."""
    folders = {version: VERL / version for version in VERSIONS}
    assert verl_defaults.table(folders) == verl_defaults.TABLE.read_text()
    assert verl_defaults.composed_run() == RUN.read_text()


# -- the table ------------------------------------------------------------------------------------


def test_every_key_of_the_table_is_in_one_part_of_it():
    parts = [RENAMED, CHANGED, UNNEEDED, REFUSED, SHARED]
    keys = [key for part in parts for key in part]
    assert len(set(keys)) == len(keys)
    assert set(RENAMED.values()) <= FIELDS.keys() and set(SHARED) <= FIELDS.keys()
    assert {*VALUES} <= {*RENAMED, *CHANGED, *SHARED}
    assert {*SAME} <= {*REFUSED} and {*MACHINE} <= {*RENAMED, *CHANGED, *SHARED}


def test_every_changed_key_is_read_by_the_translation():
    """Otherwise a key of the table would be dropped without a word."""

    class Watched(dict):
        def __contains__(self, key):
            read.add(key)
            return super().__contains__(key)

        def get(self, key, default=None):
            read.add(key)
            return super().get(key, default)

    read: set[str] = set()
    custom = "custom_reward_function"
    given: dict[str, object] = {
        "algorithm.use_kl_in_reward": True,
        "algorithm.filter_groups.enable": True,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "trainer.resume_mode": "resume_path",
        "trainer.v1.trainer_mode": "separate_async",
        f"{custom}.path": "r.py",
        f"{custom}.name": "f",
        **{k: True for k in CHANGED if "sandbox_fusion.url" in k or "overlong" in k},
    }
    newer: dict[str, object] = {f"reward.{custom}.path": "r.py", f"reward.{custom}.name": "f"}
    newer["algorithm.use_kl_in_reward"] = True
    newer["actor_rollout_ref.actor.strategy"] = "torchtitan"
    for settings in ({}, given, newer):
        done = Translation()
        made = {k: Setting(k, v, "test") for k, v in settings.items()}
        translator = _Translator(made, done, verl_versions()["0.9.1"], {}, ())
        translator.settings = Watched(translator.settings)
        for part in _PARTS:
            part(translator)
    assert set(CHANGED) <= read


TWO_TOOLS = '''
from agentrl.compat.verl import function_tool

@function_tool
def subtract(a: int, b: int) -> str:
    """Subtract b from a."""
    return str(a - b)

@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)
'''


def test_rows_that_name_no_tools_have_all_of_the_files(tmp_path, caplog):
    from agentrl.preflight import make_plan
    from agentrl.registry import tools

    (tmp_path / "two.py").write_text(TWO_TOOLS)
    inner = [
        {},
        {"tools_kwargs": {"add": {}}},
        {"tool_selection": ["add"]},
        {"tool_selection": []},
    ]
    rows = [{"agent_name": "tool_agent", "extra_info": extra} for extra in inner]
    rows.append({"agent_name": "single_turn_agent"})
    lines = [json.dumps({"prompt": "1+1", "ground_truth": "2", **row}) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    done = translated(
        tmp_path,
        MULTI_TURN,
        f"data.train_files={tmp_path}/rows.jsonl",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={tmp_path}/two.py",
        "reward.function=gsm8k",
    )
    both = ("subtract", "add")
    with tools.isolated(keep=()):
        plan = make_plan(config_of(done))
        assert [s.tools for s in plan.train] == [both, both, ("add",), (), ()]
        kinds = [(kind.sample.tools, kind.rows.tolist()) for kind in plan.kinds]
        assert kinds == [(both, [0]), (both, [1]), (("add",), [2]), ((), [3]), ((), [4])]
        # The config.yaml of the run, which has agentrl's keys, means the same rows.
        (tmp_path / "config.yaml").write_text(plan.config.resolved_yaml())
        again = make_plan(load_config(str(tmp_path / "config.yaml")))
        assert [s.tools for s in again.train] == [s.tools for s in plan.train]
        caplog.clear()
        by_row = make_plan(config_of(done, overrides=["data.tools=row"]))
        assert [s.tools for s in by_row.train] == [(), ("add",), ("add",), (), ()]
    assert "2 rows without tools, whose agent loop uses tools" in caplog.text


def test_a_variable_of_the_environment_is_stored_as_its_reference(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "plain-words-9")
    monkeypatch.setenv("JUDGE_PIN", "90210734")
    monkeypatch.setenv("MY_DATA", str(tmp_path))
    done = translated(
        tmp_path,
        MULTI_TURN.replace("rows.parquet", "${oc.env:MY_DATA}/rows.parquet")
        + "  experiment_name: ${oc.env:JUDGE_KEY}\n"
        + "custom_reward_function:\n  path: ${oc.env:MY_DATA}/r.py\n  reward_kwargs:\n"
        + "    headers: ['Bearer ${oc.env:JUDGE_KEY}']\n    pin: ${oc.env:JUDGE_PIN}\n"
        + "    url: http://me:${trainer.experiment_name}@host\n",
    )
    config = config_of(done)
    assert config.reward.kwargs == {
        "headers": ["Bearer plain-words-9"],
        "pin": 90210734,
        "url": "http://me:plain-words-9@host",
    }
    assert config.data.train == f"{tmp_path}/rows.parquet"
    moved = config.model_copy(update={"model": config.model.model_copy(update={"path": "m"})})
    for text in (
        done.report(), config.resolved_yaml(), json.dumps(config.model_dump(mode="json")),
        "\n".join(config.diff()), moved.resolved_yaml(),
    ):  # fmt: skip
        assert "plain-words-9" not in text and "90210734" not in text
        assert "Bearer ${oc.env:JUDGE_KEY}" in text and "${oc.env:MY_DATA}/rows.parquet" in text
    (tmp_path / "config.yaml").write_text(config.resolved_yaml())
    monkeypatch.setenv("JUDGE_KEY", "another-key")
    again = load_config(str(tmp_path / "config.yaml"))
    assert again.reward.kwargs["headers"] == ["Bearer another-key"]
    assert again.model_dump() == config.model_dump()
