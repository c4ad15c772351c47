"""What a run can be told: one frozen section per concern, one line of documentation per key.

`docs/config.md` is written from this file by `python -m agentrl.config.page`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from agentrl.config.checks import contradictions
from agentrl.config.sources import assignment, dump_yaml
from agentrl.registry import did_you_mean

BUDGETS = ("turn_tokens", "trajectory_tokens", "turns", "tool_calls", "time")
"""The stop reasons that are spent budgets."""
POLICIES = ("keep", "zero", "mask")
TOOL_FORMATS = (
    "auto", "hermes", "qwen3_coder", "glm", "llama_json", "llama_pythonic", "mistral", "deepseek",
    "gpt_oss", "gemma", "hf",
)  # fmt: skip
"""How models write tool calls; besides, `sglang:NAME`."""
OUR_ARGUMENTS = (
    "--admin-api-key", "--api-key", "--config", "--host", "--model", "--model-path", "--port",
    "--weight-version",
)  # fmt: skip
"""Of an SGLang server that the run starts."""
RENDERING = (
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "messages",
    "return_dict", "return_tensors", "tokenize", "tools",
)  # fmt: skip
"""The arguments of a rendering that are not the user's."""


def key(default: Any, what: str, *, flag: str = "", allowed: str = "", **limits: float) -> Any:
    """A key: its default, its line of documentation, the `train` flag that sets it, its limits."""
    extra: dict[str, Any] = {"flag": flag, "allowed": allowed}
    return Field(default, description=what, json_schema_extra=extra, **limits)  # pyright: ignore


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values never change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true for a number; take one text for a list of texts."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and annotation in (int, float):
            raise ValueError
        return [value] if isinstance(value, str) and get_origin(annotation) is list else value


class DataConfig(Section):
    """The rows."""

    train: str = key("", "training rows, a .parquet or .jsonl file", flag="--dataset")
    val: str = key("", "validation rows; empty: no validation", flag="--val-dataset")
    batch_size: int = key(16, "prompts a step", ge=1)
    shuffle: bool = key(True, "a new order every epoch; false: the file's order")
    agent_name: str = key("single_turn", "the agent loop of rows that name none")
    untrusted: bool = key(
        False,
        "every control token in a prompt is text, also those a prompt may legitimately speak of"
        " such as `<think>`",
    )


class ModelConfig(Section):
    """The policy."""

    path: str = key(
        "",
        "a folder or hub name of a model, or `tiny`: a small one, trained here on first use",
        flag="--model",
    )
    lora_rank: int = key(0, "rank of the LoRA adapter; 0: all weights are trained", ge=0)
    lora_alpha: int = key(16, "scale of the adapter, times 1/rank", ge=1)
    lora_target_modules: str | list[str] = key(
        "all-linear",
        "the modules that get an adapter",
        allowed="all-linear, the name of a module, or a list of names",
    )
    template_kwargs: dict[str, Any] = key(
        {},
        "further variables of the chat template, such as `{enable_thinking: false}`",
        allowed="a mapping from names of variables to their values",
    )

    @field_validator("template_kwargs")
    @classmethod
    def _of_the_user(cls, variables: dict[str, Any]) -> dict[str, Any]:
        for name in variables:
            if name in RENDERING:
                raise ValueError(f"{name!r} is set by agentrl")
        return variables


class RolloutConfig(Section):
    """How episodes are played for training."""

    name: Literal["local", "sglang"] = key(
        "local",
        "the engine that samples: local is transformers in this process, sglang a server that the"
        " run starts and stops",
    )
    python: str = key(
        "", "the Python of the environment that has SGLang; empty: the one that runs agentrl"
    )
    launch: list[str] = key(
        [],
        "further arguments of the SGLang server, such as `[--mem-fraction-static, 0.3]`",
        allowed="a list of arguments of `sglang.launch_server`",
    )
    n: int = key(8, "rollouts of each prompt", ge=1)
    temperature: float = key(1.0, "sampling temperature; the trainer uses the same", gt=0)
    max_turn_tokens: int = key(512, "most tokens sampled in one turn", ge=1)
    max_trajectory_tokens: int = key(
        4096, "most tokens after the prompt, sampled and observed", ge=1
    )
    max_turns: int = key(8, "most turns of the assistant", ge=1)
    max_tool_calls: int = key(16, "most tool calls", ge=0)
    timeout_s: float = key(300.0, "most seconds an episode may take", gt=0)
    budget_policy: dict[str, str | float] = key(
        {},
        "what becomes of an episode that spent a budget: its reward stands (keep, the default), is"
        " 0 (zero) or less by a number, or it does not train (mask)",
        allowed=f"a mapping from {', '.join(BUDGETS)} to {', '.join(POLICIES)} or a number > 0",
    )
    tool_format: str = key(
        "auto",
        "how the model writes tool calls",
        allowed=f"{', '.join(TOOL_FORMATS[:-1])}, sglang:NAME or hf",
    )
    history_thinking: Literal["keep", "strip"] = key(
        "keep",
        "what becomes of the thinking of earlier turns where the chat template drops it: keep it as"
        " it was sampled, or strip it and begin a new segment",
    )

    @field_validator("launch")
    @classmethod
    def _not_ours(cls, arguments: list[str]) -> list[str]:
        for argument in arguments:
            if argument.partition("=")[0] in OUR_ARGUMENTS:
                raise ValueError(f"{argument} is set by agentrl")
        return arguments

    @field_validator("budget_policy")
    @classmethod
    def _known(cls, policy: dict[str, str | float]) -> dict[str, str | float]:
        wrong = [
            f"{reason!r} is no budget.{did_you_mean(reason, BUDGETS)}"
            for reason in policy
            if reason not in BUDGETS
        ] + [
            f"{reason}={value} is no policy"
            for reason, value in policy.items()
            if value not in POLICIES and not (isinstance(value, float) and value > 0)
        ]
        if wrong:
            raise ValueError("; ".join(wrong))
        return policy

    @field_validator("tool_format")
    @classmethod
    def _readable(cls, name: str) -> str:
        if name not in TOOL_FORMATS and not re.fullmatch(r"sglang:\S+", name):
            raise ValueError(f"no such format.{did_you_mean(name, TOOL_FORMATS)}")
        return name


class ValConfig(Section):
    """How episodes are played for validation."""

    temperature: float = key(1.0, "sampling temperature; 0: greedy", ge=0)
    top_p: float = key(1.0, "sample from the likeliest tokens of this probability", gt=0, le=1)
    top_k: int = key(0, "sample from this many likeliest tokens; 0: from all", ge=0)
    n: int = key(1, "rollouts of each prompt", ge=1)
    greedy: bool = key(True, "a greedy pass beside the sampled one")


class ToolsConfig(Section):
    """Where tools run."""

    transport: str = key(
        "http",
        "http: on a server that the run starts and stops; in_process: in this process; a URL: on"
        " that server, with the token in AGENTRL_TOOLS_TOKEN",
        allowed="http, in_process, or the URL of a tool server (http://HOST:PORT)",
    )
    max_result_tokens: int = key(1024, "most tokens of a result that the model is shown", ge=1)
    truncate: Literal["head", "tail", "middle"] = key(
        "middle",
        "how a longer result is cut: its head is kept, its tail, or both without the middle",
    )

    @property
    def url(self) -> str:
        """The server to use, or "" where there is none to be found already running."""
        return self.transport if "://" in self.transport else ""

    @field_validator("transport")
    @classmethod
    def _reachable(cls, transport: str) -> str:
        if re.fullmatch(r"https?://\S*@\S*", transport):
            raise ValueError("no user and password in a URL: the token is in AGENTRL_TOOLS_TOKEN")
        if not re.fullmatch(r"http|in_process|https?://\S+", transport):
            raise ValueError
        return transport.rstrip("/")


class RewardConfig(Section):
    """What a rollout is worth."""

    function: str = key(
        "",
        "the reward function; empty: the grader of the row's data_source",
        allowed="the name of a registered reward, or path.py:function",
    )
    kwargs: dict[str, Any] = key(
        {}, "further arguments of the reward function or grader", allowed="a mapping"
    )
    outcome_weight: float = key(1.0, "weight of the reward of the whole trajectory")
    turn_weight: float = key(0.0, "weight of what turns earned (interactions, loops)")
    tool_weight: float = key(0.0, "weight of what tools gave")


class AlgorithmConfig(Section):
    """How rewards become a loss."""

    name: Literal["grpo", "ppo"] = key(
        "grpo", "grpo: the group's mean is the baseline; ppo: a critic and GAE"
    )
    gamma: float = key(1.0, "discount of later rewards", ge=0, le=1)
    lam: float = key(1.0, "GAE's lambda", ge=0, le=1)
    norm_adv_by_std: bool = key(True, "divide a group's advantages by their standard deviation")
    kl_type: Literal["k1", "k2", "k3"] = key("k3", "estimator of the KL to the reference")
    kl_loss_coef: float = key(0.0, "weight of that KL in the loss; 0: off", ge=0)
    kl_reward_coef: float = key(0.0, "weight of that KL in the reward; 0: off", ge=0)
    entropy_coef: float = key(0.0, "weight of the entropy bonus; 0: off", ge=0)
    clip_low: float = key(0.2, "the ratio is clipped at 1 - clip_low", gt=0, le=1)
    clip_high: float = key(0.2, "the ratio is clipped at 1 + clip_high", gt=0)
    tis_cap: float = key(
        2.0,
        "cap of the weights that make up for engine and trainer computing different"
        " probabilities; 0: no weights",
        allowed="0, or a number >= 1",
        ge=0,
    )
    ppo_epochs: int = key(1, "passes over a batch", ge=1)
    mini_batch_size: int = key(0, "rollouts an optimizer step; 0: the whole batch", ge=0)

    @field_validator("tis_cap")
    @classmethod
    def _no_shrinking(cls, cap: float) -> float:
        if 0 < cap < 1:
            raise ValueError
        return cap


class OptimConfig(Section):
    """The optimizer, AdamW."""

    lr: float = key(1e-6, "learning rate of the policy", gt=0)
    critic_lr: float = key(1e-5, "learning rate of the critic", gt=0)
    lr_final: float = key(
        1.0, "learning rate at the last step, as a share of the first; linear between", ge=0
    )
    max_grad_norm: float = key(1.0, "gradients are clipped to this norm", gt=0)
    micro_batch_tokens: int = key(16384, "most tokens of one forward pass", ge=1)


class TrainerConfig(Section):
    """The run."""

    output: str = key(
        "", "the run's folder; empty: `runs/` and the dataset's name", flag="--output"
    )
    total_steps: int = key(0, "steps of the run; 0: total_epochs decides", ge=0)
    total_epochs: int = key(1, "passes over the dataset", ge=1)
    test_freq: int = key(0, "validate every so many steps; 0: not on the way", ge=0)
    save_freq: int = key(0, "save every so many steps; 0: not on the way", ge=0)
    val_before_train: bool = key(True, "validate before the first step")
    val_only: bool = key(False, "validate, and train nothing")
    resume: str = key(
        "auto",
        "auto: go on from the newest checkpoint in the run's folder; never: start anew; a path: go"
        " on from that checkpoint",
        allowed="auto, never, or the path of a checkpoint",
    )
    seed: int = key(0, "the only source of randomness", ge=0)
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto: the GPU where there is one")
    logger: list[Literal["tensorboard", "wandb"]] = key(
        [], "trackers beside the console and metrics.jsonl, which are always on"
    )
    watchdog_s: float = key(
        300.0, "say what every episode waits for after so many seconds without progress", gt=0
    )


class Config(Section):
    """A whole run. Build it with `load_config`."""

    files: list[str] = key(
        [],
        "files that define tools, interactions, rewards and loops: paths, or `shelf:NAME` for a"
        " ready tool",
        flag="--file",
    )
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    rollout: RolloutConfig = RolloutConfig()
    val: ValConfig = ValConfig()
    tools: ToolsConfig = ToolsConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optim: OptimConfig = OptimConfig()
    trainer: TrainerConfig = TrainerConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if said := list(contradictions(self)):
            raise ValueError("\n".join(said))
        return self

    def value(self, path: str) -> Any:
        """The value of a dotted key."""
        value: Any = self.model_dump()
        for part in path.split("."):
            value = value[part]
        return value

    def resolved_yaml(self) -> str:
        """Every key with its value; `load_config` reads the same config back."""
        return dump_yaml(self.model_dump())

    def diff(self, base: Config | None = None) -> list[str]:
        """What differs from the defaults (or from `base`), as lines `a.b.c=1`."""
        base = base or Config()
        return [
            assignment(path, self.value(path))
            for path in FIELDS
            if self.value(path) != base.value(path)
        ]


def _fields() -> Iterator[tuple[str, FieldInfo]]:
    for name, info in Config.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            for leaf, inner in info.annotation.model_fields.items():
                yield f"{name}.{leaf}", inner
        else:
            yield name, info


FIELDS: dict[str, FieldInfo] = dict(_fields())
"""Every key by its dotted path."""
