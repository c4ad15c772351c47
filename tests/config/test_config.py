from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.config_page import page

from agentrl.config import (
    FIELDS,
    Config,
    RewardConfig,
    RolloutConfig,
    load_config,
    without_effect,
)
from agentrl.config.checks import doubtful
from agentrl.config.load import allowed
from agentrl.config.removed import REMOVED
from agentrl.config.section import Section, refuse_url
from agentrl.config.sources import assignment, parse_value
from agentrl.config.verl_keys import VERL_KEYS
from agentrl.errors import ConfigError


def mistakes(*overrides, yaml=None, flags=None, tmp=None) -> list[str]:
    """The mistakes that `load_config` refuses."""
    path = None
    if yaml is not None:
        path = tmp / "run.yaml"
        path.write_text(yaml)
    with pytest.raises(ConfigError) as e:
        load_config(path and str(path), overrides, flags)
    head, *listed = str(e.value).split("\n  - ")
    assert head.startswith(f"{len(listed)} mistake")
    return [line.replace(str(path), "run.yaml") for line in listed]


OPD = ("algorithm.name=opd", "teacher.model=a")


# -- values -------------------------------------------------------------------------------------


def test_defaults_are_valid_and_few():
    config = load_config()
    assert config.diff() == ["trainer.output=runs/run"]
    assert config.rollout.n == 8 and config.optim.lr == 1e-6
    assert len(FIELDS) <= 156
    assert all(info.description for info in FIELDS.values())


def test_later_layers_win(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("optim: {lr: 2e-6, lr_final: 0.5}\nrollout.n: 4\ndata:\n  train: a.jsonl\n")
    preset = {"optim.lr": 3e-4, "data.batch_size": 4, "rollout.n": 2}
    config = load_config(
        str(path), ["optim.lr=1e-6", "data.train=b.jsonl"], {"data.train": "c/d.jsonl"}, preset
    )
    assert config.optim.lr == 1e-6
    assert config.optim.lr_final == 0.5
    assert config.rollout.n == 4
    assert config.data.batch_size == 4
    assert config.data.train == "c/d.jsonl"
    assert config.trainer.output == "runs/d"


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("optim.lr=1e-6", "optim.lr", 1e-6),
        ("optim.lr=1E-6", "optim.lr", 1e-6),
        ("+optim.lr=.5", "optim.lr", 0.5),
        ("rollout.n=16", "rollout.n", 16),
        ("rollout.n='16'", "rollout.n", 16),
        ("data.shuffle=no", "data.shuffle", False),
        ("data.shuffle=False", "data.shuffle", False),
        ("trainer.resume=no", "trainer.resume", "no"),
        ("trainer.output=2026-11-20", "trainer.output", "2026-11-20"),
        ("trainer.output=007", "trainer.output", "007"),
        ("data.agent_name='007'", "data.agent_name", "007"),
        ("data.train=größe=1.jsonl", "data.train", "größe=1.jsonl"),
        ("data.train=[", "data.train", "["),
        ("files=tools.py", "files", ["tools.py"]),
        ("files=[a.py, shelf:search]", "files", ["a.py", "shelf:search"]),
        ("trainer.logger=wandb", "trainer.logger", ["wandb"]),
        (
            "model.lora_target_modules=[q_proj,v_proj]",
            "model.lora_target_modules",
            ["q_proj", "v_proj"],
        ),
        (
            "rollout.budget_policy={turns: zero, time: 1}",
            "rollout.budget_policy",
            {"turns": "zero", "time": 1.0},
        ),
        ("rollout.budget_policy.turns=0.5", "rollout.budget_policy", {"turns": 0.5}),
        ("reward.kwargs.format_score=1e-1", "reward.kwargs", {"format_score": 0.1}),
        ("reward.kwargs.name=null", "reward.kwargs", {"name": None}),
        (
            "model.template_kwargs.enable_thinking=false",
            "model.template_kwargs",
            {"enable_thinking": False},
        ),
        ("rollout.tool_format=sglang:kimi_k2", "rollout.tool_format", "sglang:kimi_k2"),
        ("rollout.tool_format=llama_json", "rollout.tool_format", "llama_json"),
        ("optim={lr: 3e-4}", "optim.lr", 3e-4),
        ("tools.transport=http://127.0.0.1:8000/", "tools.transport", "http://127.0.0.1:8000"),
    ],
)
def test_overrides(override, path, value):
    assert load_config(None, [override]).value(path) == value


def test_null_and_an_empty_value_restore_the_default():
    config = load_config(None, ["rollout.n=4", "rollout.n=null", "data.val=x", "data.val=null"])
    assert config.rollout.n == 8 and config.data.val == ""
    assert load_config(None, [], {"rollout.n": None}).rollout.n == 8


def test_free_keys_of_users_are_merged(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("reward:\n  kwargs: {a.b: 1, c: {d: null}}\n")
    config = load_config(str(path), ["reward.kwargs.e=2"])
    assert config.reward.kwargs == {"a.b": 1, "c": {"d": None}, "e": 2}


def test_yaml_sections_may_be_empty_and_share_anchors(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("optim:\n  # lr: 1\nval: &v {n: 2}\nrollout:\n  <<: *v\n  temperature: .5\n")
    config = load_config(str(path))
    assert (config.val.n, config.rollout.n, config.rollout.temperature) == (2, 2, 0.5)


texts = st.text(min_size=1, max_size=20).filter(lambda s: "\x00" not in s)
a_config = st.fixed_dictionaries(
    {},
    optional={
        "data.train": texts,
        "rollout.n": st.integers(2, 99),
        "optim.lr": st.floats(1e-12, 1),
        "files": st.lists(texts, max_size=3),
        "reward.kwargs": st.dictionaries(texts, texts | st.integers() | st.none() | st.booleans()),
        "rollout.budget_policy": st.dictionaries(
            st.sampled_from(["turns", "time"]),
            st.sampled_from(["zero", "mask"]) | st.floats(0.1, 9),
        ),
        "trainer.logger": st.lists(st.sampled_from(["wandb", "tensorboard"])),
        "data.shuffle": st.booleans(),
    },
)


@given(a_config)
def test_a_resolved_config_is_read_back(tmp_path_factory, settings):
    config = load_config(flags=settings)
    path = tmp_path_factory.mktemp("run") / "config.yaml"
    path.write_text(config.resolved_yaml(), encoding="utf-8")
    assert load_config(str(path)) == config
    assert load_config(None, config.diff()) == config


@given(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text())
def test_an_assignment_is_read_back(value):
    path, _, text = assignment("a.b", value).partition("=")
    assert (path, parse_value(text)) == ("a.b", value)


@pytest.mark.parametrize(
    "text",
    [
        "####", "#", "right answer # short", "Grade: 10 if right", "a:", "- a", "? a", "-", "a\nb",
        "#### ", "&x y", "*x", "!x y", "!!str 5", "@x", "%x", "`x`", "| a", "> a", "---", "--- a",
        "no", "off", "on", "1:30", "2026-11-20", "0x1F", "1_000", "5 # five", "true # yes",
        '"a" # b', '"a" b', "[1, 2] # b", "{a: 1} # b", "[0-9]+", "{answer}",
        "[{answer}]", "{a: [{answer}]}",
        "C:\\x", "http://x:1", "=", "<<",
    ],
)  # fmt: skip
def test_a_text_on_the_command_line_is_not_cut(text):
    config = load_config(None, [f"reward.kwargs.marker={text}", f"data.prompt_key={text}"])
    assert config.reward.kwargs == {"marker": text} and config.data.prompt_key == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None), ("~", None), ("true", True), ("False", False), ("012", 12), ("1e-5", 1e-5),
        ("+1", 1), (".5", 0.5), (" 3 ", 3), ("'####'", "####"), ('"a # b"', "a # b"), ("'1'", "1"),
        ("[a, '#']", ["a", "#"]), ("{a: 1}", {"a": 1}), ("{a: {b: x}}", {"a": {"b": "x"}}),
        ("{}", {}), ("{a: {}, b: ''}", {"a": {}, "b": ""}),
    ],
)  # fmt: skip
def test_values_that_are_read_as_yaml(text, value):
    assert load_config(None, [f"reward.kwargs.x={text}"]).reward.kwargs == {"x": value}


def test_a_number_or_boolean_for_a_text_is_the_text(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: {prompt_key: 012, train: 1.10}\ntrainer:\n  tags: [1e3, 007, True]\n"
        "agent: {command: true}\n"
    )
    overrides = [
        *("data.prompt_key=012", "data.train=1.10"),
        *("trainer.tags=[1e3, 007, True]", "agent.command=true"),
    ]
    for config in (load_config(str(path)), load_config(None, overrides)):
        data, tags = config.data, config.trainer.tags
        assert (data.prompt_key, data.train, tags) == ("012", "1.10", ["1e3", "007", "True"])
        assert config.agent.command == "true"


@pytest.mark.parametrize(
    "override",
    [
        "rollout.budget_policy.turns=true",
        "tools.penalties.bad_call=true",
        "reward.functions={a: false}",
        "trainer.profile_steps=[true]",
        "trainer.save_freq=true",
        "rollout.n=true",
        "data.train=[{path: a, weight: true}]",
    ],
)
def test_a_boolean_is_no_number(tmp_path, override):
    key, _, value = override.partition("=")
    path = tmp_path / "run.yaml"
    section, _, leaf = key.partition(".")
    *names, leaf = leaf.split(".")
    path.write_text(
        f"{section}: {''.join(f'{{{n}: ' for n in names)}{{{leaf}: {value}}}{'}' * len(names)}\n"
    )
    for source in (lambda: load_config(None, [override]), lambda: load_config(str(path))):
        with pytest.raises(ConfigError, match=rf"{section}\.[^ ]*=.* must be "):
            source()


def test_a_list_that_is_not_closed_is_no_text():
    with pytest.raises(ConfigError, match=r"trainer.tags=\[a, b \(command line\): must be a list"):
        load_config(None, ["trainer.tags=[a, b"])


def test_diff_against_another_config():
    base = load_config(None, ["rollout.n=4"])
    assert load_config(None, ["optim.lr=1e-4"]).diff(base) == ["rollout.n=8", "optim.lr=0.0001"]


# -- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.temprature=1", "unknown key. Did you mean rollout.temperature?"),
        ("rolout.n=1", "unknown key. Did you mean rollout.n or val.n?"),
        ("lr=1", "unknown key. Did you mean optim.lr?"),
        ("algorithm.critic_lr=1", "unknown key. Did you mean optim.critic_lr or"),
        ("sandbox.qq=1", "unknown key. Keys of sandbox: backend, slots, timeout_s"),
        ("zork=1", "unknown key. Sections: files, environments, data, model,"),
        ("reward.kwargs={a: 1, a: 2}", "reward.kwargs={a: 1, a: 2}: a is set twice"),
        ("reward.kwargs.x=[{a: {b: ':', b: 2}}]", "a.b is set twice"),
        ("optim.lr.x=1", "optim.lr is a key, not a section"),
        ("optim=3", "optim is a section. Its keys: optim.name, optim.lr, optim"),
        ("~optim.lr", "keys cannot be removed. Write optim.lr=null for the default"),
        ("optim.lr", "'optim.lr' is not of the form section.key=value"),
        ("optim..lr=1", "is not of the form section.key=value"),
        ("=1", "is not of the form section.key=value"),
        ("rollout.n=0", "rollout.n=0 (command line): must be an integer >= 1. Rollouts per"),
        ("rollout.n=2.5", "must be an integer >= 1"),
        ("rollout.n=true", "must be an integer >= 1"),
        ("rollout.n=many", "must be an integer >= 1"),
        ("rollout.n=[1]", "must be an integer >= 1"),
        ("optim.lr=.nan", "must be a number > 0"),
        ("optim.lr=inf", "must be a number > 0"),
        ("optim.lr=fast", "optim.lr=fast (command line): must be a number > 0"),
        ("val.top_p=1.5", "must be a number > 0 and <= 1"),
        ("data.shuffle=maybe", "must be true or false"),
        ("data.train={a: 1}", "must be text"),
        (
            "algorithm.name=gpro",
            "must be grpo, ppo, dr_grpo, dapo, gspo, cispo, sapo, dppo, maxrl, rloo,",
        ),
        ("algorithm.name=grop", "Did you mean 'grpo'?"),
        ("trainer.logger=[console]", "must be a list of tensorboard, wandb, mlflow, trackio,"),
        ("trainer.test_freq=-1", "must be an integer >= 0. Steps between"),
        (
            "trainer.save_freq=often",
            "must be auto, never, or an integer >= 0. Steps between",
        ),
        ("trainer.save_freq=true", "must be auto, never, or an integer >= 0"),
        ("trainer.keep_trajectories=last:0", "must be all, last:N or every:N, with N >= 1. The"),
        ("rollout.budget_policy.turn=zero", "unknown budget 'turn'. Did you mean 'turns'?"),
        ("rollout.budget_policy.turns=drop", "unknown policy turns=drop"),
        ("rollout.budget_policy.turns=-1", "unknown policy turns=-1.0"),
        ("rollout.budget_policy=zero", "must be a mapping from turn_tokens"),
        ("tools.transport=grpc", "must be http, in_process, or the URL of a tool server"),
        ("tools.transport=http://a:b@host", "a URL must not contain a password"),
        ("tools.truncate=left", "must be head, tail or middle. The part of a longer"),
        ("rollout.history_thinking=drop", "must be keep or strip"),
        ("rollout.tool_format=hermez", "unknown format. Did you mean 'hermes'?"),
        ("rollout.tool_format=hermez", "must be auto, hermes, qwen3_coder, glm, llama_json,"),
        ("rollout.tool_format=sglang:", "apertus, functiongemma, sglang:NAME or hf. The"),
        ("model.template_kwargs=on", "must be a mapping from names of variables"),
        ("model.template_kwargs.tokenize=true", "'tokenize' is set by agentrl"),
        ("algorithm.tis_cap=0.5", "must be 0, or a number >= 1"),
        ("model.lora_target_modules={a: 1}", "must be all-linear, the name of a module, or a"),
        (
            "actor_rollout_ref.actor.loss_agg_mode=token-mean",
            "this is verl's name. Use algorithm.loss_agg_mode",
        ),
        ("actor_rollout_ref.rollout.n=5", "this is verl's name. Use rollout.n"),
        (
            "actor_rollout_ref.model.no_such=true",
            "this is verl's name, and agentrl has no such setting",
        ),
        (
            "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side=left",
            "this is verl's name. Use tools.truncate=head, tail or middle, the part that is kept",
        ),
        ("data.apply_chat_template_kwargs=x", "this is verl's name. Use model.template_kwargs"),
        (
            "data.apply_chat_template_kwargs.enable_thinking=false",
            "this is verl's name. Use model.template_kwargs.enable_thinking",
        ),
        ("custom_reward_function.reward_kwargs={a: 1}", "this is verl's name. Use reward.kwargs.a"),
        ("actor_rollout_ref.rollout.n.m=5", "this is verl's name. Use rollout.n"),
        (
            "actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=triton",
            "this is verl's name. Use rollout.launch, a list of the server's arguments",
        ),
        ("data.apply_chat_template_kwarg.x=1", "unknown key. Sections: files, environments, data"),
        ("rollout.tool_format=x", "unknown format. It must be auto"),
        ("rollout.tool_format=hermez", "Did you mean 'hermes'? It must be auto"),
        ("rollout.budget_policy.turns=drop", "unknown policy turns=drop. It must be"),
        (
            "algorithm.filter_groups.enable=true",
            "this is verl's name. Use algorithm.filter_groups=true",
        ),
        ("trainer.save_freq=-1", "use 0 instead of verl's -1. It must be auto, never, or an int"),
        ("trainer.test_freq=-1", "use 0 instead of verl's -1"),
        ("trainer.logger=[console]", "the console is always on: remove it. It must be a list"),
        ("trainer.logger=console", "the console is always on: remove it"),
        (
            "actor_rollout_ref.actor.use_torch_compile=false",
            "this is verl's name. Use optim.compile",
        ),
        (
            "actor_rollout_ref.ref.fsdp_config.param_offload=true",
            "this is verl's name. Use optim.offload=all",
        ),
        (
            "actor_rollout_ref.actor.optim.warmup_style=cosine",
            "this is verl's name. Use optim.lr_final",
        ),
        (
            "critic.ppo_micro_batch_size_per_gpu=4",
            "this is verl's name. Use optim.micro_batch_tokens",
        ),
        ("trainer.max_actor_ckpt_to_keep=1", "this is verl's name. Use trainer.keep"),
        (
            "trainer.balance_batch=true",
            "this is verl's name. Not needed: rows are always balanced over",
        ),
        (
            "actor_rollout_ref.actor.fsdp_config.param_offload=true",
            "this is verl's name. Use optim.offload=all",
        ),
        (
            "actor_rollout_ref.model.enable_gradient_checkpointing=true",
            "this is verl's name. Use optim.recompute",
        ),
    ],
)
def test_an_error_lists_the_allowed_values(override, message):
    (mistake,) = mistakes(override)
    assert message in mistake


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm.kl_loss_coef=.1", "algorithm.kl_reward_coef=.2"],
            "penalize the same KL twice",
        ),
        (["trainer.nnodes=2"], "this machine only. Start one on all machines"),
        (
            ["trainer.placement=separate", "rollout.sleep=all"],
            "no server shares a GPU with the learner. Set rollout.sleep=none",
        ),
        (["algorithm.kl_type=k1", "algorithm.kl_loss_coef=.1"], "Set algorithm.kl_type=k2 or k3"),
        (["algorithm.kl_type=k3", "algorithm.kl_reward_coef=.1"], "does not keep the policy near"),
        (["val.temperature=0", "val.n=4"], "all val.n=4 rollouts are equal"),
        (["rollout.n=1"], "every advantage would be 0"),
        (["rollout.top_p=0.9"], "rollout.top_p=0.9 without rollout.top_k: where the policy"),
        (["rollout.top_k=1"], "nothing can be learned. Set 2 or more"),
        (
            ["rollout.top_p=0.9", "rollout.top_k=50", "rollout.name=vllm"],
            "rollout.top_k=50 with rollout.name=vllm: agentrl does not read from vLLM",
        ),
        ([*OPD, "rollout.top_k=5"], "a teacher scores over all tokens"),
        (
            [
                "data.train=recorded:x",
                "rollout.n=1",
                "algorithm.name=reinforce_plus_plus",
                "rollout.top_k=5",
            ],
            "whose answers are recorded. Set rollout.top_p=1 and rollout.top_k=0",
        ),
        (["algorithm.mini_batch_size=129"], "data.batch_size=16 times rollout.n=8"),
        (["algorithm.tis_mode=mask", "algorithm.tis_cap=1"], "masks every token whose"),
        (["trainer.val_only=true"], "trainer.val_only=true needs validation rows"),
        (["reward.outcome_weight=0"], "all rewards are 0"),
        (["algorithm.name=opd"], "learns from a teacher alone. Set teacher.model"),
        (["teacher.weight=2"], "teacher.weight=2.0 without a teacher. Set teacher.model"),
        (["teacher.clip=2"], "teacher.clip=2.0 without a teacher"),
        (["teacher.prompt='{prompt} a'"], "teacher.prompt={prompt} a without a teacher"),
        ([*OPD, "algorithm.filter_groups=true"], "also teaches in these"),
        ([*OPD, "algorithm.kl_reward_coef=0.1"], "reads no rewards"),
        (["algorithm.name=opd", "teacher.model=policy"], "its own teacher, so that all advantages"),
        (
            ["algorithm.name=opd", "teacher.model=http://a:1", "rollout.temperature=0.7"],
            "a server scores given tokens at temperature 1 only",
        ),
        (
            [*OPD, "data.train=recorded:x", "rollout.n=1", "teacher.prompt='{prompt} a'"],
            "which recorded answers do not have",
        ),
        (
            ["algorithm.name=opd", "data.train=recorded:x", "rollout.n=1", "teacher.model={a: b}"],
            "recorded answers have no data source",
        ),
        ([*OPD, "teacher.prompt=a"], "it has no {prompt}"),
        ([*OPD, "teacher.prompt='{prompt'"], "Write {{ and }} for braces"),
        (["algorithm.name=grpo", "teacher.model={a: ''}"], "the data source 'a' has no teacher"),
        (["algorithm.name=grpo", "teacher.model=http://a?b"], "not of the form http://HOST:PORT"),
        (["algorithm.name=grpo", "teacher.model=s3://a/b"], "only paths on this machine"),
    ],
)
def test_contradictions(overrides, message):
    (mistake,) = mistakes(*overrides)
    assert message in mistake
    with pytest.raises(ValidationError):
        Config(rollout=RolloutConfig(n=1))


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("optim: {lr: 1", "run.yaml:1: YAML syntax"),
        ("optim:\n\tlr: 1", "run.yaml:2: YAML syntax"),
        (
            "optim:\n  lr: 1\nval:\n  n: 3\noptim:\n  lr: 2",
            "run.yaml:5: optim is set twice; first in",
        ),
        ("optim:\n  lr: 1\n  lr: 2", "run.yaml:3: optim.lr is set twice; first in line 2"),
        ("reward: {kwargs: {a: 1,\n a: 2}}", "run.yaml:2: reward.kwargs.a is set twice"),
        ("- a\n- b", "run.yaml: must contain `section:` and `key: value` lines"),
        ("optim: !!python/object:os.system {}", "run.yaml:1: YAML syntax: could not determine"),
        ("optim: 1\n---\nval: 2", "run.yaml:2: YAML syntax"),
        ("a: &x [*x]", "run.yaml: YAML syntax: it has more than 100,000"),
        ("a\x00", "run.yaml: YAML syntax"),
        (f"a: {'9' * 5000}", "run.yaml: is not a YAML file"),
        ("? [a]\n: 1", "run.yaml"),
        (
            "data:\n  train: 1\n  trian: x",
            "data.trian=x (run.yaml:3): unknown key. Did you mean data.tr",
        ),
    ],
)
def test_mistakes_in_yaml_name_the_line(tmp_path, yaml, message):
    assert message in mistakes(yaml=yaml, tmp=tmp_path)[0]


def test_a_config_file_that_is_missing_or_not_text(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.yaml: cannot be read"):
        load_config(str(tmp_path / "run.yaml"))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="not a YAML file"):
        load_config(str(tmp_path / "bytes"))


def test_dotted_arguments_of_several_rewards_are_nested():
    overrides = ["reward.functions={judge: 1, r.py:f: 2}", "reward.kwargs.judge.url=http://a/v1"]
    overrides += ["reward.kwargs.r.py:f.k=1", "reward.kwargs.judge.model=m", "reward.kwargs.x.y=2"]
    expected = {"judge": {"url": "http://a/v1", "model": "m"}, "r.py:f": {"k": 1}, "x.y": 2}
    config = load_config(overrides=overrides)
    assert config.reward.kwargs == expected
    # With one function, a name may contain a dot.
    config = load_config(overrides=["reward.function=f", "reward.kwargs.judge.url=x"])
    assert config.reward.kwargs == {"judge.url": "x"}


def test_all_mistakes_are_reported_at_once(tmp_path):
    yaml = "optim:\n  lr: fast\n  lr: faster\nactor_rollout_ref:\n  rollout: {n: 5}\n"
    overrides = ["rolout.n=1", "rollout.n=0", "foo", "val.temperature=0", "val.n=2"]
    lines = mistakes(*overrides, yaml=yaml, flags={"data.train": {}}, tmp=tmp_path)
    assert [line.partition(":" if "twice" in line else ")")[0] for line in lines] == [
        "run.yaml",
        "'foo' is not of the form section.key=value, without spaces. Files and models"
        " need an option: --dataset, --model, --file or --config",
        "actor_rollout_ref.rollout.n=5 (run.yaml:5",
        "rolout.n=1 (command line",
        "data.train={} (--dataset",
        "rollout.n=0 (command line",
        "optim.lr=faster (run.yaml:3",
        "val.temperature=0 is greedy: all val.n=2 rollouts are equal. Set val.n=1",
    ]


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=30), max_size=4))
def test_no_override_raises_another_exception(overrides):
    try:
        load_config(None, overrides)
    except ConfigError as e:
        assert str(e)


@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_no_yaml_raises_another_exception(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("run") / "run.yaml"
    path.write_text(text, encoding="utf-8")
    try:
        load_config(str(path))
    except ConfigError as e:
        assert str(e)


@pytest.mark.parametrize("path", FIELDS)
def test_every_key_refuses_wrong_values_and_names_its_type(path):
    (mistake,) = mistakes(flags={path: [{"no": {"such": "value"}}]})
    assert allowed(FIELDS[path]) in mistake


def test_verls_keys_are_not_agentrls_keys():
    """A word on them would never be said."""
    assert not VERL_KEYS.keys() & FIELDS.keys()


def test_the_keys_that_replace_verls_keys_exist():
    for advice in VERL_KEYS.values():
        for path in re.findall(r"\b[a-z]+\.[a-z_]+\b", advice):
            assert path in FIELDS or path.endswith((".py", ".md")), advice


# -- what does nothing --------------------------------------------------------------------------


def test_settings_without_effect_are_named():
    config = load_config(
        None, ["model.lora_alpha=32", "algorithm.lam=.9", "val.n=4", "rollout.n=4"]
    )
    assert without_effect(config) == [
        "model.lora_alpha=32 has no effect: model.lora_rank is 0",
        "algorithm.lam=0.9 has no effect: algorithm.adv_estimator is grpo",
        "val.n=4 has no effect: data.val is empty",
    ]
    more = ["model.lora_rank=4", "algorithm.name=ppo", "data.val=x"]
    assert without_effect(load_config(None, [*config.diff(), *more])) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], ["turns get no rewards"]),
        (["reward.turn_weight=1"], []),
        (["reward.tool_weight=.5"], []),
        (["algorithm.kl_reward_coef=.1"], []),  # which turns pay
        (["reward.turn_weight=1", "algorithm.loss_agg_mode=seq-mean-token-sum-norm"], []),
        (
            ["reward.turn_weight=1", "algorithm.loss_agg_mode=token-mean"],
            ["algorithm.loss_agg_mode=token-mean biases"],
        ),
        (
            ["algorithm.loss_agg_mode=seq-mean-token-mean"],
            ["turns get no rewards", "seq-mean-token-mean biases"],
        ),
        (["algorithm.adv_estimator=rloo", "algorithm.loss_agg_mode=token-mean"], []),
        (
            ["algorithm.name=grpo", "optim.lr_warmup_steps=3", "trainer.total_steps=3"],
            ["optim.lr_warmup_steps=3 of trainer.total_steps=3: the learning rate never reaches"],
        ),
        (["algorithm.name=grpo", "optim.lr_warmup_steps=2", "trainer.total_steps=3"], []),
    ],
)
def test_doubtful_settings_are_noted(overrides, words):
    notes = list(doubtful(load_config(None, ["algorithm.name=turn_rloo", *overrides])))
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


@pytest.mark.parametrize(
    ("device", "steps", "idle"),
    [
        ("cpu", 2, ["optim.lr_final=0.1", "optim.compile=never", "optim.offload=all"]),
        ("cpu", 3, ["optim.compile=never", "optim.offload=all"]),
        ("cuda", 3, []),
        ("auto", 0, []),
    ],
)
def test_optimizer_settings_without_effect_are_noted(device, steps, idle):
    keys = ["optim.lr_warmup_steps=1", "optim.lr_final=.1", "optim.compile=never"]
    run = ["optim.offload=all", f"trainer.device={device}", f"trainer.total_steps={steps}"]
    notes = without_effect(load_config(None, [*keys, *run]))
    assert [line.partition(" has no effect: ")[0] for line in notes] == idle


@pytest.mark.parametrize(
    "name, where, reason",
    [
        ("local", "[]", "rollout.name is local"),
        ("sglang", "[]", ""),
        ("sglang", "[http://a:1]", "rollout.urls names servers that run already"),
        ("vllm", "[]", ""),
        ("vllm", "[http://a:1]", ""),  # which takes a seed with each request
    ],
)
def test_deterministic_without_effect_is_noted(name, where, reason):
    config = load_config(
        None, [f"rollout.name={name}", f"rollout.urls={where}", "rollout.deterministic=true"]
    )
    notes = [note for note in without_effect(config) if "deterministic" in note]
    assert notes == ([f"rollout.deterministic=true has no effect: {reason}"] if reason else [])


# -- documentation ------------------------------------------------------------------------------


def test_docs_are_up_to_date():
    written = Path(__file__).parents[2] / "docs" / "config.md"
    assert written.read_text() == page(), "run `make docs`"


def test_the_import_is_light():
    heavy = "('torch', 'ray', 'fastapi', 'transformers')"
    script = f"import sys, agentrl.config; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_kl_in_the_reward_is_k1_unless_another_is_named():
    assert load_config(None, ["algorithm.kl_reward_coef=.1"]).algorithm.kl_type == "k1"
    assert load_config(None, ["algorithm.kl_loss_coef=.1"]).algorithm.kl_type == "k3"


def test_another_algorithm_after_a_runs_own_config(tmp_path):
    """That file names every key: what its algorithm set gives way, what the user had set stays."""
    had = ["algorithm.gamma=.5", "algorithm.clip_low=.1"]
    saved = load_config(None, ["algorithm.name=dapo", *had])
    file = tmp_path / "config.yaml"
    file.write_text(saved.resolved_yaml())
    assert load_config(str(file)).algorithm == saved.algorithm
    algorithm = load_config(str(file), ["algorithm.name=ppo", "algorithm.lam=.9"]).algorithm
    direct = ["algorithm.name=ppo", *had, "algorithm.lam=.9"]
    assert algorithm == load_config(None, direct).algorithm
    assert algorithm.critic and algorithm.whiten_advantages and not algorithm.filter_groups


def test_the_files_of_rewards_are_known():
    assert RewardConfig(function="a/b.py:f").files == ["a/b.py"]
    named = {"a.py:f": 1.0, "a.py:g": 1.0, "exact": 0.5}
    assert RewardConfig(functions=named).files == ["a.py"]
    assert RewardConfig(function="exact").files == []


def test_arguments_of_interactions_by_dotted_keys():
    overrides = [
        "interaction.kwargs.simulated_user.url=http://x",
        "interaction.kwargs.gym={envs: [a]}",
    ]
    more = "interaction.kwargs.simulated_user.model=m"
    kwargs = load_config(None, [*overrides, more]).interaction.kwargs
    assert kwargs == {"simulated_user": {"url": "http://x", "model": "m"}, "gym": {"envs": ["a"]}}


def test_dotted_keys_change_the_arguments_of_one_of_several_rewards():
    """The mapping is in the file; a name may contain dots."""
    kwargs = {"judge": {"url": "http://x", "model": "m"}, "a.py:f": {"x": 1, "y": 2}}
    overrides = ["reward.kwargs.judge.url=http://y", "reward.kwargs.a.py:f.x=3"]
    preset = {"reward.functions": {"judge": 1.0, "a.py:f": 0.5}}
    config = load_config(None, [f"reward.kwargs={json.dumps(kwargs)}", *overrides], preset=preset)
    assert config.reward.kwargs == {
        "judge": {"url": "http://y", "model": "m"},
        "a.py:f": {"x": 3, "y": 2},
    }


@pytest.mark.parametrize(
    "setting",
    [
        "reward.kwargs.header=Bearer sk-abcdefghijklmnopqrst",
        "reward.kwargs.api_key=abc",
        "reward.kwargs.judge={client: {auth_token: abc}}",
        "interaction.kwargs.gsm8k.url=http://user:word@host:1",
        "agent.command=python a.py --key hf_abcdefghijklmnopqrstuvwx",
        "model.template_kwargs.secret='${oc.env:NO,sk-abcdefghijklmnopqrst}'",
    ],
)
def test_a_key_of_a_service_is_not_stored(setting):
    with pytest.raises(
        ConfigError, match=r"looks like a key or a password.*\$\{oc.env:NAME\}"
    ) as e:
        load_config(None, [setting])
    assert "abc" not in str(e.value) and "word@" not in str(e.value)


def test_what_is_no_key_may_be_stored(monkeypatch):
    monkeypatch.setenv("ENGINES", "3")
    names = [
        "reward.kwargs.token_env=JUDGE_KEY",
        "data.prompt_key=question_2",
        "model.path=a/task-b",
    ]
    config = load_config(
        None,
        [
            *names,
            "reward.kwargs.api_key='${oc.env:NO_SUCH_KEY}'",
            "rollout.engines='${oc.env:ENGINES}'",
            "model.template_kwargs={'n${oc.env:ENGINES}': 1}",
        ],
    )
    assert config.model.template_kwargs == {"n3": 1}
    assert "${oc.env:ENGINES}: 1" in config.resolved_yaml()
    assert config.rollout.engines == 3 and "engines: ${oc.env:ENGINES}" in config.resolved_yaml()
    assert config.reward.kwargs["api_key"] == "${oc.env:NO_SUCH_KEY}"
    from agentrl.preflight import make_plan
    from agentrl.rewards import Scorer

    for use in (make_plan, lambda config: Scorer(config.reward)):
        with pytest.raises(ConfigError, match="environment variable NO_SUCH_KEY is not set"):
            use(config)


PATHS = {
    "agent.python": "s3://bucket/a.py:run",
    "data.train": "[{path: s3://bucket/a.jsonl, weight: 2}, b.jsonl]",
    "data.val": "hf://datasets/a.parquet",
    "files": "[a.py, gs://bucket/b.py]",
    "model.path": "s3://bucket/model",
    "reward.function": "s3://bucket/a.py:f",
    "reward.functions": "{s3://bucket/a.py:f: 1.0}",
    "rollout.python": "file:///usr/bin/python3",
    "sandbox.python": "file:/usr/bin/python3",
    "trainer.output": "s3://bucket/run",
    "trainer.resume": "hdfs://host/run",
}


@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_no_url(path):
    (mistake,) = mistakes(f"{path}={PATHS[path]}")
    assert "is a URL, but only paths on this machine are supported" in mistake


def test_every_key_of_a_path_is_tested():
    sections = {f"{name}.": type(getattr(Config(), name)) for name in Config.model_fields}
    sections = {name: cls for name, cls in sections.items() if issubclass(cls, Section)}
    declared = {
        prefix + name
        for prefix, cls in [("", Config), *sections.items()]
        for name, hint in get_type_hints(cls, include_extras=True).items()
        if refuse_url.__name__ in str(hint)
    }
    assert declared | {"data.train", "data.val"} == PATHS.keys()
    for text in ("mcp+http://h/mcp", "shelf:calculator", "C:/a.py"):
        assert load_config(None, [f"files={text}"]).files == [text]


@pytest.mark.parametrize(("path", "constant"), [(p, value) for p, (value, _) in REMOVED.items()])
def test_a_stored_config_may_have_the_constant_of_a_removed_key(path, constant):
    section, _, leaf = path.partition(".")
    assert path not in FIELDS
    assert load_config(None, [f"{path}={json.dumps(constant)}"]) == load_config()
    assert Config.model_validate({section: {leaf: constant}}) == Config()
    with pytest.raises(ConfigError, match=rf"{path}=7 .*this key was removed: "):
        load_config(None, [f"{path}=7"])
    with pytest.raises(ValidationError):
        Config.model_validate({section: {leaf: 7}})
