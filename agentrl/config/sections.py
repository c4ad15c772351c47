"""What a run can be told: one frozen section per concern, one line of documentation per key.

`docs/config.md` is written from this file by `python -m agentrl.config.page`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import field_validator, model_validator
from pydantic.fields import FieldInfo

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.checks import contradictions
from agentrl.config.rollout import RolloutConfig, ValConfig
from agentrl.config.section import Section, key
from agentrl.config.sources import assignment, dump_yaml
from agentrl.config.world import InteractionConfig, RewardConfig, SandboxConfig, ToolsConfig

RENDERING = (
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "messages",
    "return_dict", "return_tensors", "tokenize", "tools",
)  # fmt: skip
"""The arguments of a rendering that are not the user's."""


class DataConfig(Section):
    """The rows."""

    train: str = key("", "training rows, a .parquet or .jsonl file", flag="--dataset")
    val: str = key("", "validation rows; empty: no validation", flag="--val-dataset")
    batch_size: int = key(16, "prompts a step", ge=1)
    gen_batch_size: int = key(
        0,
        "with algorithm.filter_groups: prompts played at a time, until batch_size of them can teach"
        " something; 0: batch_size",
        ge=0,
    )
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


class OptimConfig(Section):
    """The optimizer, and what a pass costs in memory."""

    name: Literal["adamw", "adamw_8bit"] = key(
        "adamw", "adamw, or with its moments in 8 bits (needs the extra `8bit`)"
    )
    lr: float = key(1e-6, "learning rate of the policy", gt=0)
    critic_lr: float = key(1e-5, "learning rate of the critic", gt=0)
    lr_warmup_steps: int = key(0, "steps in which the learning rate rises from 0", ge=0)
    lr_final: float = key(
        1.0, "learning rate at the last step, as a share of the first; linear between", ge=0
    )
    weight_decay: float = key(0.0, "AdamW's weight decay", ge=0)
    max_grad_norm: float = key(1.0, "gradients are clipped to this norm", gt=0)
    micro_batch_tokens: int = key(16384, "most tokens of one forward pass", ge=1)
    recompute: bool = key(
        False,
        "keep no activations within a layer, compute them again in the backward pass: a third more"
        " work, a fraction of the memory",
    )
    compile: Literal["auto", "never"] = key(
        "auto",
        "auto: layers are compiled (torch.compile) where they run on a GPU and the model is large"
        " enough for it to pay, 100 million weights",
    )
    offload: Literal["none", "optimizer", "all"] = key(
        "none",
        "what waits in the CPU's memory: nothing, the optimizer's moments between updates, or"
        " parameters, gradients and moments",
    )


class TrainerConfig(Section):
    """The run."""

    output: str = key(
        "", "the run's folder; empty: `runs/` and the dataset's name", flag="--output"
    )
    total_steps: int = key(0, "steps of the run; 0: total_epochs decides", ge=0)
    total_epochs: int = key(
        1,
        "passes over the dataset, data.batch_size rows a step; with algorithm.filter_groups a step"
        " plays more of them, and the same steps make more passes",
        ge=1,
    )
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
    nnodes: int = key(1, "machines that the learner is spread over", ge=1)
    n_gpus_per_node: int = key(
        1, "GPUs of each that learn; with trainer.device=cpu, processes", ge=1
    )
    placement: Literal["colocated", "separate"] = key(
        "colocated",
        "colocated: engines take turns on the learner's GPUs; separate: they have others",
    )
    ray_address: str = key(
        "",
        "the Ray cluster to join, as `ray start` prints it; empty: one is started where more than"
        " one process learns",
    )
    logger: list[Literal["tensorboard", "wandb"]] = key(
        [], "trackers beside the console and metrics.jsonl, which are always on"
    )
    watchdog_s: float = key(
        300.0, "say what every episode waits for after so many seconds without progress", gt=0
    )

    @property
    def spread(self) -> bool:
        """Whether the learner is on a cluster, and not in this process."""
        return self.nnodes * self.n_gpus_per_node > 1 or bool(self.ray_address)


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
    sandbox: SandboxConfig = SandboxConfig()
    interaction: InteractionConfig = InteractionConfig()
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
