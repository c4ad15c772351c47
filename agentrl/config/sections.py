"""All config keys: one frozen section for each concern, and a docstring for each key.

`docs/config.md` is written from this file by `make docs`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.contradictions import MAX_UNCORRECTED_MISMATCH, contradictions
from agentrl.config.environment import REFERENCE, expand, map_leaves
from agentrl.config.removed import without_removed
from agentrl.config.section import LocalPath, Section, key, refuse_url
from agentrl.config.server_arguments import check_arguments
from agentrl.config.sources import assignment, dump_yaml
from agentrl.config.teacher import TeacherConfig
from agentrl.config.trackers import TRACKERS, other_trackers
from agentrl.file_loaders import RECORDED, door_of
from agentrl.registry import did_you_mean

RENDERING = (
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "messages",
    "return_dict", "return_tensors", "tokenize", "tools",
)  # fmt: skip
"""Arguments of the chat template that agentrl sets itself."""


ROW_FILES = "text, or a list of files: texts, or mappings with path and weight > 0"


class RowFile(Section):
    """A file of rows, and how often its rows are played in an epoch."""

    path: str
    weight: float = Field(1.0, gt=0)


class CurriculumConfig(Section):
    """A band of success, and how often rows outside of it are drawn."""

    low: float = 0.1
    high: float = 0.9
    decay: float = Field(0.5, ge=0, lt=1)
    floor: float = Field(0.1, gt=0, le=1)

    @model_validator(mode="after")
    def _check_band(self) -> CurriculumConfig:
        if self.low >= self.high:
            raise ValueError
        return self


CURRICULUM = (
    "null, or a mapping: low < high (0.1 and 0.9), 0 <= decay < 1 (0.5), 0 < floor <= 1 (0.1)"
)


def row_files(value: str | Sequence[str | RowFile]) -> str | list[str | dict[str, Any]]:
    """Return a value of `data.train` in plain types, as `agentrl.data.open_rows` takes it."""
    if isinstance(value, str):
        return value
    return [item if isinstance(item, str) else item.model_dump() for item in value]


def file_names(value: str | Sequence[str | RowFile]) -> str:
    """Return the files of `data.train` or `data.val` as a text for messages."""
    return ", ".join(_file_list(value))


def _file_list(value: str | Sequence[str | RowFile]) -> list[str]:
    items = [value] if isinstance(value, str) else value
    return [item if isinstance(item, str) else item.path for item in items]


class DataConfig(Section):
    """The dataset."""

    train: str | list[str | RowFile] = key("", flag="--dataset", allowed=ROW_FILES)
    """Training rows: a .parquet or .jsonl file, a glob, `DOOR:NAME` (docs/doors.md), or a list of
    these. The rows of `{path: a.parquet, weight: 2}` are played two times per epoch.
    `recorded:DIR`: answers of `agentrl serve --record DIR`."""
    val: str | list[str | RowFile] = key("", flag="--val-dataset", allowed=ROW_FILES)
    """Validation rows, as data.train but without weights. Empty: no validation."""
    batch_size: int = key(16, ge=1)
    """Prompts per step."""
    gen_batch_size: int = key(0, ge=0)
    """With algorithm.filter_groups: prompts to play at a time. 0: batch_size."""
    shuffle: bool = True
    """Shuffle the rows in every epoch."""
    curriculum: CurriculumConfig | None = key(None, allowed=CURRICULUM)
    """Draw rows whose success is outside of [low, high] less often: with their weight times floor.
    decay is the share of the former success in the new one. null: off (docs/data.md)."""
    drop_last: bool = False
    """Round the number of steps per epoch down, as verl does. Batches still continue into the next
    epoch."""
    agent_name: str = "single_turn"
    """The agent loop of rows without an `agent_name`."""
    tools: Literal["row", "all"] = "row"
    """The tools of rows without the column `tools`. row: the keys of `tools_kwargs`. all: all
    tools that `files` define, as in verl."""
    prompt_key: str = key("prompt", min_length=1)
    """The column with the prompts."""
    reward_fn_key: str = key("data_source", min_length=1)
    """The column with the data source, which chooses the grader."""
    untrusted: bool = False
    """Encode prompts without any control tokens. Otherwise tags such as `<think>` in a prompt
    become control tokens."""

    @property
    def files(self) -> list[str]:
        """The names in `train` and `val`, without weights."""
        return [*_file_list(self.train), *_file_list(self.val)]

    @property
    def is_recorded(self) -> bool:
        """True if the training rows are recorded answers."""
        return any(name.startswith(RECORDED) for name in _file_list(self.train))

    @field_validator("train", "val", mode="before")
    @classmethod
    def _check_names(cls, value: Any) -> Any:
        items = [i for i in value if isinstance(i, dict)] if isinstance(value, list) else []
        for item in value if isinstance(value, list) else [value]:
            path = str(item.get("path") if isinstance(item, dict) else item)
            if not door_of(path) and not path.startswith(RECORDED):
                refuse_url(path)
        names = RowFile.model_fields
        if unknown := [str(name) for item in items for name in item if name not in names]:
            raise ValueError(f"unknown name {unknown[0]!r}.{did_you_mean(unknown[0], names)}")
        return value

    @field_validator("val")
    @classmethod
    def _check_weights(cls, val: str | list[str | RowFile]) -> str | list[str | RowFile]:
        weighted = [f.path for f in val if isinstance(f, RowFile) and f.weight != 1]
        if weighted:
            raise ValueError(
                f"a validation plays each row once, so {', '.join(weighted)} must have no weight."
                " val.n plays all rows more often"
            )
        return val


class ModelConfig(Section):
    """The policy."""

    path: LocalPath = key("", flag="--model")
    """A model folder, a hub name, or `tiny`, which is trained on first use."""
    lora_rank: int = key(0, ge=0)
    """Rank of the LoRA adapter. 0: train all weights."""
    lora_alpha: int = key(16, ge=1)
    """The adapter is scaled by lora_alpha / lora_rank."""
    lora_target_modules: str | list[str] = key(
        "all-linear", allowed="all-linear, the name of a module, or a list of names"
    )
    """The modules that get an adapter."""
    quantization: Literal["none", "nf4"] = "none"
    """The weights of these modules below the adapter: as published, or rounded to 4 bits."""
    freeze_vision_tower: bool = False
    """Do not train the part that reads images. With LoRA it is never trained."""
    template_kwargs: dict[str, Any] = key(
        {}, allowed="a mapping from names of variables to their values"
    )
    """Variables for the chat template, for example `{enable_thinking: false}`."""

    @field_validator("template_kwargs")
    @classmethod
    def _check_variables(cls, variables: dict[str, Any]) -> dict[str, Any]:
        for name in variables:
            if name in RENDERING:
                raise ValueError(f"the variable {name!r} is set by agentrl")
        return variables


BUDGETS = {
    "turn_tokens": "rollout.max_turn_tokens",
    "trajectory_tokens": "rollout.max_trajectory_tokens",
    "turns": "rollout.max_turns",
    "tool_calls": "rollout.max_tool_calls",
    "time": "rollout.timeout_s",
}
"""The key of each budget, by the stop reason of an episode that has used it up."""
POLICIES = ("keep", "zero", "mask")
TOOL_FORMATS = (
    "auto", "hermes", "qwen3_coder", "glm", "llama_json", "llama_pythonic", "mistral", "deepseek",
    "gpt_oss", "gemma", "kimi_k2", "minimax_m1", "minimax_m2", "deepseek_v32", "deepseek_v4",
    "lfm2", "granite", "cohere_command", "phi4_mini", "seed_oss", "hunyuan", "hunyuan_a13b",
    "internlm", "gigachat3", "muse", "apertus", "functiongemma", "hf",
)  # fmt: skip
"""The tool formats, apart from `sglang:NAME`."""


class RolloutConfig(Section):
    """Settings for playing episodes in training."""

    name: Literal["local", "sglang", "vllm"] = "local"
    """The inference engine. local: transformers in this process. sglang, vllm: servers that the run
    starts, or those of urls."""
    urls: list[str] = key([], allowed="a list of URLs (http://HOST:PORT)")
    """Servers that run already, with the API key AGENTRL_ENGINE_TOKEN. Empty: the run starts
    servers."""
    engines: int = key(1, ge=1)
    """Servers that the run starts."""
    tensor_parallel_size: int = key(1, ge=1)
    """GPUs per server."""
    python: LocalPath = ""
    """The Python of a virtual environment with the server's package. Empty: this one."""
    launch: list[str] = key([], allowed="a list of arguments, as its command line has them")
    """Command-line arguments for the server, for example `[--attention-backend, triton]`."""
    gpu_memory_utilization: float = key(0.5, gt=0, lt=1)
    """The share of a GPU's memory for a server's weights and KV cache."""
    sync: Literal["auto", "disk", "ipc", "nccl"] = "auto"
    """How weights are sent to a server. disk: through files. ipc: through the memory of a shared
    GPU. nccl: from GPU to GPU. auto: the fastest way that works."""
    lora: Literal["auto", "adapter", "merge"] = "auto"
    """How LoRA is sent to a server. adapter: as an adapter. merge: merged into the weights. auto:
    as an adapter if the server supports it (on a GPU)."""
    quantization: Literal["none", "fp8"] = "none"
    """The precision in which an SGLang server holds and multiplies the matrices of layers: as the
    model, or fp8, which needs algorithm.tis_cap."""
    sleep: Literal["none", "kv_cache", "all"] = "none"
    """The memory that a server on the trainer's GPU releases while the trainer works: nothing, its
    KV cache, or also its weights."""
    deterministic: bool = key(False, flag="--deterministic")
    """Sampling on a server depends only on the run's seeds. The local engine always does this on a
    CPU, unless trainer.max_staleness is set."""
    max_mismatch: float = key(MAX_UNCORRECTED_MISMATCH, gt=0)
    """The largest mean difference of the logprobs of engine and trainer at the start, in nats.
    Above 0.2, algorithm.tis_cap must be set."""
    n: int = key(8, ge=1)
    """Rollouts per prompt."""
    temperature: float = key(1.0, gt=0)
    """Sampling temperature, also in the trainer."""
    top_p: float = key(1.0, gt=0, le=1)
    """Sample from the most likely tokens with this total probability, and learn over them. Below 1
    it needs top_k."""
    top_k: int = key(0, ge=0, le=512)
    """Sample from the top_k most likely tokens, and learn over them. 0: all."""
    router_replay: bool = False
    """For a mixture of experts: the trainer sends each token to the experts that the engine chose
    for it."""
    max_turn_tokens: int = key(512, ge=1)
    """Sampled tokens per turn."""
    max_trajectory_tokens: int = key(4096, ge=1)
    """Tokens after the prompt: sampled tokens and observations."""
    max_turns: int = key(8, ge=1)
    """Assistant turns per episode."""
    max_tool_calls: int = key(16, ge=0)
    """Tool calls per episode."""
    timeout_s: float = key(300.0, gt=0)
    """Time limit of an episode, without waiting for a free connection or new weights."""
    max_in_flight: int = key(0, ge=0)
    """With trainer.max_staleness, the most training episodes at the same time. 0: no limit."""
    workers: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = key(
        1, allowed="a number of processes up to 1024, or auto"
    )
    """Processes that play episodes. 1: the run's own. auto: as many as cores and episodes ask
    for."""
    budget_policy: dict[str, str | float] = key(
        {}, allowed=f"a mapping from {', '.join(BUDGETS)} to {', '.join(POLICIES)} or a number > 0"
    )
    """The effect of a budget that an episode used up. keep (the default): none. zero: the reward
    becomes 0. A number is subtracted from the reward. mask: the episode does not train."""
    tool_format: str = key("auto", allowed=f"{', '.join(TOOL_FORMATS[:-1])}, sglang:NAME or hf")
    """The format in which the model writes tool calls. auto: as in the chat template."""
    history_thinking: Literal["keep", "strip"] = "keep"
    """If the chat template drops the thinking of earlier turns: keep it, or strip it and start a
    new segment."""

    @property
    def is_fp8(self) -> bool:
        """True if servers hold the matrices of layers in 8 bits."""
        return self.quantization == "fp8"

    @property
    def is_truncated(self) -> bool:
        """True if tokens are sampled from the most likely ones only."""
        return self.top_p < 1 or self.top_k > 0

    @field_validator("launch")
    @classmethod
    def _check_arguments(cls, arguments: list[str]) -> list[str]:
        check_arguments(arguments)
        return arguments

    @field_validator("urls")
    @classmethod
    def _check_urls(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if not re.fullmatch(r"https?://[^\s@?#]+", url):
                raise ValueError(
                    f"{url!r} is not of the form http://HOST:PORT (the API key is read from"
                    " AGENTRL_ENGINE_TOKEN)"
                )
        urls = [url.rstrip("/") for url in urls]
        if len(set(urls)) < len(urls):
            raise ValueError("it contains a URL twice")
        return urls

    @field_validator("budget_policy")
    @classmethod
    def _check_policy(cls, policy: dict[str, str | float]) -> dict[str, str | float]:
        wrong = [
            f"unknown budget {reason!r}.{did_you_mean(reason, BUDGETS)}"
            for reason in policy
            if reason not in BUDGETS
        ] + [
            f"unknown policy {reason}={value}"
            for reason, value in policy.items()
            if value not in POLICIES and not (isinstance(value, float) and value > 0)
        ]
        if wrong:
            raise ValueError("; ".join(wrong))
        return policy

    @field_validator("tool_format")
    @classmethod
    def _check_format(cls, name: str) -> str:
        if name not in TOOL_FORMATS and not re.fullmatch(r"sglang:\S+", name):
            raise ValueError(f"unknown format.{did_you_mean(name, TOOL_FORMATS)}")
        return name


class ValConfig(Section):
    """Settings for playing episodes in validation."""

    temperature: float = key(1.0, ge=0)
    """Sampling temperature. 0: greedy."""
    top_p: float = key(1.0, gt=0, le=1)
    """Sample from the most likely tokens with this total probability."""
    top_k: int = key(0, ge=0)
    """Sample from the top_k most likely tokens. 0: from all."""
    n: int = key(1, ge=1)
    """Rollouts per prompt."""
    greedy: bool = True
    """Also play every row once at temperature 0."""
    without_tools: bool = False
    """Also play rows with tools without them: `val/tool_dependence` is the difference."""


FAILURES = ("bad_call", "unknown_tool", "schema", "tool_error", "timeout")
"""The errors of tool calls that are the model's mistakes (`ToolResult.error`)."""


class ToolsConfig(Section):
    """Settings of tools."""

    transport: str = key(
        "http", allowed="http, in_process, or the URL of a tool server (http://HOST:PORT)"
    )
    """Where tools run. http: on a server that the run starts. in_process: in this process. A URL:
    on that server, with the token AGENTRL_TOOLS_TOKEN."""
    max_result_tokens: int = key(1024, ge=1)
    """The most tokens of a tool result that the model reads."""
    truncate: Literal["head", "tail", "middle"] = "middle"
    """The part of a longer result that is kept: head, tail, or both without the middle."""
    workers: int = key(1, ge=1)
    """Processes of the tool server that the run starts."""
    penalties: dict[str, float] = key(
        {}, allowed=f"a mapping from {', '.join(FAILURES)} to numbers above 0"
    )
    """The penalty of a failed tool call, by kind of error, subtracted from the advantages of the
    call's tokens."""

    @field_validator("penalties")
    @classmethod
    def _check_penalties(cls, penalties: dict[str, float]) -> dict[str, float]:
        for name, value in penalties.items():
            if name not in FAILURES:
                raise ValueError(f"unknown kind of error {name!r}.{did_you_mean(name, FAILURES)}")
            if not value > 0 or math.isinf(value):
                raise ValueError(f"{name}={value} must be above 0: it is subtracted")
        return penalties

    @property
    def url(self) -> str:
        """The URL of a tool server that runs already, or ""."""
        return self.transport if "://" in self.transport else ""

    @field_validator("transport")
    @classmethod
    def _check_transport(cls, transport: str) -> str:
        if re.fullmatch(r"https?://\S*@\S*", transport):
            raise ValueError(
                "a URL must not contain a password: put the token in AGENTRL_TOOLS_TOKEN"
            )
        if not re.fullmatch(r"http|in_process|https?://\S+", transport):
            raise ValueError
        return transport.rstrip("/")


class SandboxConfig(Section):
    """The sandbox in which tools and graders run code that a model wrote."""

    backend: str = key(
        "bubblewrap",
        allowed="bubblewrap, docker, podman, unsafe-subprocess, a URL (http://HOST:PORT), or"
        " harbor:NAME",
    )
    """Where programs run. bubblewrap: isolated on this machine. docker, podman: in containers of
    sandbox.images. unsafe-subprocess: not isolated, with your rights. A URL: a server with
    SandboxFusion's API. harbor:NAME: a backend of Harbor (docker, podman, e2b, ...), for tasks of
    Harbor."""
    slots: int = key(0, ge=0)
    """Programs, and local sandboxes of Harbor, that a process runs at the same time. 0: twice the
    number of CPU cores."""
    timeout_s: float = key(10.0, gt=0)
    """Time limit of a program."""
    memory_mb: int = key(2048, ge=64)
    """Memory of each process of a program, in MiB."""
    python: LocalPath = "/usr/bin/python3"
    """The Python interpreter for programs. In a container, the default is python3 on its PATH."""
    images: list[str] = key([], allowed="a list of names of images")
    """The images that programs may run in with docker and podman. The first is the default."""

    @field_validator("backend")
    @classmethod
    def _check_backend(cls, backend: str) -> str:
        if not re.fullmatch(
            r"bubblewrap|docker|podman|unsafe-subprocess|https?://[^\s@]+|harbor:[^\s]+", backend
        ):
            raise ValueError
        return backend.rstrip("/")


class AgentConfig(Section):
    """Agents of your own, which play the rows with `agent_name: external`."""

    command: str = ""
    """The command that starts an agent for an episode (docs/agents.md)."""
    python: LocalPath = key("", allowed="path.py:function")
    """Instead of a command: a function with any of the parameters sample, base_url, api_key and
    model."""
    reward: Literal["grader", "post", "exit"] = "grader"
    """The source of the outcome. grader: the reward function or grader. post: the agent sends it,
    or its function returns it. exit: 1 for exit code 0, and 0 for exit code 1."""
    on_error: Literal["zero", "drop"] = "zero"
    """The effect of an agent's error after an answer of the policy. zero: the outcome is 0. drop:
    the episode is dropped."""
    env: list[str] = key([], allowed="a list of names of environment variables")
    """Environment variables that agents get besides PATH, HOME and a few others."""
    extra_info: list[str] = key([], allowed="a list of keys of the rows' extra_info")
    """The keys of the row's extra_info that agents get. Name no key that tells the ground truth."""
    slots: int = key(16, ge=1)
    """Agents that run at the same time. Async functions are not limited."""

    @field_validator("command")
    @classmethod
    def _check_command(cls, command: str) -> str:
        shlex.split(command)  # Raises ValueError if a quotation mark is missing.
        return command

    @field_validator("python")
    @classmethod
    def _check_python(cls, python: str) -> str:
        if python and not re.fullmatch(r".+\.py:\w+", python):
            raise ValueError(f"{python!r} must name a file and its function")
        return python


class InteractionConfig(Section):
    """Settings of interactions."""

    kwargs: dict[str, dict[str, Any]] = key(
        {}, allowed="a mapping from names of interactions to their arguments"
    )
    """Arguments by name of the interaction, in addition to those in the rows."""


class RewardConfig(Section):
    """Settings for scoring rollouts."""

    function: LocalPath = key("", allowed="the name of a registered reward, or path.py:function")
    """The reward function. Empty: the grader of the row's data_source."""
    functions: dict[LocalPath, float] = key(
        {}, allowed="a mapping from reward functions to weights"
    )
    """Several reward functions with weights. `grader` is the grader of the row's data_source."""
    kwargs: dict[str, Any] = key({}, allowed="a mapping")
    """Arguments of the reward function or grader; with reward.functions, by function."""
    timeout_s: float = key(60.0, gt=0)
    """Time limit for scoring one rollout, without waiting for a free connection."""
    workers: int = key(2, ge=1)
    """Processes for graders that may have to be killed."""
    outcome_weight: float = 1.0
    """Weight of the reward for the whole trajectory."""
    turn_weight: float = 0.0
    """Weight of the rewards of turns."""
    tool_weight: float = 0.0
    """Weight of the rewards from tools."""
    overlong_buffer: int = key(0, ge=0)
    """The last tokens of rollout.max_trajectory_tokens, in which a penalty grows linearly from 0 to
    overlong_penalty (DAPO). 0: off."""
    overlong_penalty: float = key(1.0, ge=0)
    """The penalty of a rollout that fills the whole buffer."""

    @field_validator("kwargs")
    @classmethod
    def _nest(cls, kwargs: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Make `{judge: {url: ...}}` of `{judge.url: ...}`, if `judge` is one of the functions."""
        nested: dict[str, Any] = {}
        for path, value in kwargs.items():
            names = [name for name in info.data.get("functions", {}) if path.startswith(f"{name}.")]
            owner = nested.setdefault(names[0], {}) if names else nested
            if isinstance(owner, dict):  # Otherwise the reward refuses it.
                owner[path.removeprefix(f"{names[0]}.") if names else path] = value
        return nested

    @property
    def files(self) -> list[str]:
        """The files of the reward functions that are named by path."""
        paths = [name.rpartition(":")[0] for name in (self.function, *self.functions)]
        return [path for path in dict.fromkeys(paths) if path.endswith(".py")]


class OptimConfig(Section):
    """The optimizer, and the memory of a forward and backward pass."""

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW, or AdamW with 8-bit moments (extra `8bit`)."""
    lr: float = key(1e-6, gt=0)
    """Learning rate of the policy."""
    critic_lr: float = key(1e-5, gt=0)
    """Learning rate of the critic."""
    lr_warmup_steps: int = key(0, ge=0)
    """Steps in which the learning rate rises linearly from 0."""
    lr_final: float = key(1.0, ge=0)
    """Learning rate at the last step, as a fraction of the peak; linear in between."""
    weight_decay: float = key(0.0, ge=0)
    """AdamW's weight decay."""
    max_grad_norm: float = key(1.0, gt=0)
    """Gradients are clipped to this norm."""
    micro_batch_tokens: int = key(16384, ge=1)
    """The most tokens per forward pass."""
    recompute: bool = False
    """Gradient checkpointing: a third more compute, much less memory."""
    compile: Literal["auto", "never"] = "auto"
    """auto: compile layers with torch.compile on a GPU, for models from 100 million parameters on.
    """
    offload: Literal["none", "optimizer", "all"] = "none"
    """The tensors that the CPU's memory holds. optimizer: the optimizer state, between updates.
    all: also parameters and gradients."""


class TrainerConfig(Section):
    """Settings of the run as a whole."""

    output: LocalPath = key("", flag="--output")
    """The run's folder. Empty: `runs/` and the name of the dataset."""
    total_steps: int = key(0, ge=0)
    """Steps of the run. 0: total_epochs sets the number."""
    max_staleness: int = key(0, ge=0)
    """How many versions old a sampled token may be when it trains. From 1 on, rollouts go on during
    updates (docs/async.md)."""
    total_epochs: int = key(1, ge=1)
    """Passes over the dataset: rows x total_epochs / data.batch_size steps, rounded up."""
    test_freq: int = key(0, ge=0)
    """Steps between two validations. 0: only after the last step."""
    save_freq: Literal["auto", "never"] | Annotated[int, Field(ge=0)] = key(
        "auto", allowed="auto, never, or an integer >= 0"
    )
    """Steps between two checkpoints. auto: at each validation and every 30 minutes. 0: only after
    the last step. never: none, so the run cannot be resumed."""
    keep: int = key(2, ge=0)
    """The newest checkpoints to keep. 0: all."""
    keep_best: str = ""
    """A metric, for example val/reward/mean@1: the checkpoint with its highest value in a
    validation is also kept."""
    patience: int = key(0, ge=0)
    """End the run after so many validations without a new highest value of trainer.keep_best
    (empty: val/reward/mean@N). 0: never."""
    keep_trajectories: str = key("all", allowed="all, last:N or every:N, with N >= 1")
    """The training steps whose trajectories are kept. Those of validations are always kept."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate only, do not train."""
    resume: LocalPath = key(
        "auto", allowed="auto, never, or the path of a checkpoint or a run, or RUN/best"
    )
    """auto: from the newest checkpoint in the run's folder. never: delete the run in the folder
    and start over. A path: from that checkpoint; of another run, as a fork."""
    max_restarts: int = key(0, ge=0)
    """How often `agentrl train` restarts the run after a crash."""
    seed: int = key(0, ge=0)
    """The seed of all random numbers."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU if there is one, else the CPU."""
    nnodes: int = key(1, ge=1)
    """Machines of the learner."""
    n_gpus_per_node: int = key(1, ge=1)
    """GPUs of the learner per machine. With trainer.device=cpu: processes."""
    context_parallel_size: int = key(1, ge=1)
    """GPUs that share the tokens of each row."""
    placement: Literal["colocated", "separate"] = "colocated"
    """colocated: engines and learner share GPUs in turns. separate: engines have their own GPUs."""
    ray_address: str = ""
    """The Ray cluster to join. Empty: the run starts one if the learner has more than one process.
    """
    logger: list[str] = key([], allowed=f"a list of {', '.join(TRACKERS)} and installed trackers")
    """Trackers in addition to the console and metrics.jsonl."""
    project_name: str = ""
    """The project in trackers. Empty: agentrl, or the tracker's environment variable."""
    experiment_name: str = ""
    """The run's name in trackers. Empty: the name of its folder."""
    tags: list[str] = key([])
    """Tags of the run in wandb, mlflow, swanlab and clearml."""
    profile_steps: list[Annotated[int, Field(ge=1)]] = key(
        [], allowed="a list of numbers of steps, from 1 on"
    )
    """The steps of which profiles are written (docs/performance.md)."""

    @field_validator("logger")
    @classmethod
    def _check_logger(cls, names: list[str]) -> list[str]:
        if not {*names} <= {*TRACKERS} and not {*names} <= {*TRACKERS, *other_trackers()}:
            raise ValueError
        return names

    @field_validator("keep_trajectories")
    @classmethod
    def _check_keep(cls, value: str) -> str:
        if not re.fullmatch("all|(last|every):0*[1-9][0-9]*", value):
            raise ValueError
        return value

    @property
    def ranks(self) -> int:
        """The number of processes of the learner."""
        return self.nnodes * self.n_gpus_per_node

    @property
    def spread(self) -> bool:
        """True if the learner runs on a Ray cluster, False if it runs in this process."""
        return self.ranks > 1 or bool(self.ray_address)


class Config(Section):
    """The config of a run. Build it with `load_config`, which reports all mistakes at once.

        config = load_config("run.yaml", ["optim.lr=1e-5"])
        config.optim.lr

    Each section is a class whose fields are the keys, for example `agentrl.config.RolloutConfig`.
    docs/config.md lists all keys with their defaults. A config is frozen.

    Attributes:
        files: Python files that define tools, environments, interactions, rewards and loops.
        environments: the URLs of environments in other programs.
        data: the rows and their order.
        model: the policy's model, and LoRA.
        rollout: the engine, the sampling and the budgets of episodes.
        val: the sampling of validation.
        tools: where tools run.
        sandbox: where programs that a model writes run.
        agent: external agents, which play rows with agent_name external.
        interaction: arguments of interactions.
        reward: the reward functions and their weights.
        algorithm: advantages, loss and KL.
        teacher: the teacher of on-policy distillation.
        optim: the optimizer, and the memory of the learner.
        trainer: steps, output, devices.
    """

    files: list[LocalPath] = key([], flag="--file", allowed="a list of texts")
    """Python files with tools, environments, interactions, rewards and loops: paths, or
    `shelf:NAME`."""
    environments: dict[str, str] = key(
        {}, allowed="a mapping from names of environments to URLs (http://HOST:PORT)"
    )
    """Environments in other programs, by their names in rows; also `openenv://` and `nemo-gym://`
    (docs/doors.md)."""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    rollout: RolloutConfig = RolloutConfig()
    val: ValConfig = ValConfig()
    tools: ToolsConfig = ToolsConfig()
    sandbox: SandboxConfig = SandboxConfig()
    agent: AgentConfig = AgentConfig()
    interaction: InteractionConfig = InteractionConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    teacher: TeacherConfig = TeacherConfig()
    optim: OptimConfig = OptimConfig()
    trainer: TrainerConfig = TrainerConfig()

    _references: dict[str, tuple[Any, Any]] = PrivateAttr(default_factory=dict)
    """For each key with a reference to an environment variable: its value, and the reference."""

    @model_validator(mode="wrap")
    @classmethod
    def _expand(cls, tree: Any, handler: Callable[[Any], Config]) -> Config:
        """Replace references to environment variables by their values, and keep the references."""
        tree = without_removed(tree) if isinstance(tree, dict) else tree
        config = handler(map_leaves(expand, tree))
        for path in FIELDS if REFERENCE.search(str(tree)) else ():
            section, _, leaf = path.rpartition(".")
            part = tree.get(section, {}) if section else tree
            if isinstance(part, dict) and REFERENCE.search(str(part.get(leaf))):
                config._references[path] = config.value(path), part[leaf]
        return config

    @model_serializer(mode="wrap")
    def _dump(self, handler: Callable[[Config], dict[str, Any]]) -> dict[str, Any]:
        """Return all keys, with references to environment variables instead of their values."""
        tree = handler(self)
        for path in self._references:
            section, _, leaf = path.rpartition(".")
            (tree[section] if section else tree)[leaf] = self.stored_value(path)
        return tree

    @model_validator(mode="after")
    def _check_combinations(self) -> Config:
        if problems := list(contradictions(self)):
            raise ValueError("\n".join(problems))
        return self

    @property
    def all_files(self) -> list[str]:
        """`files`, and environments and doors in the form that `load_file` reads."""
        rows = [("", name) for name in self.data.files if door_of(name)]
        named = [*rows, *self.environments.items()]
        return [*self.files, *(f"environment+{address}#{name}" for name, address in named)]

    @property
    def can_send_adapter(self) -> bool:
        """True if engines may get LoRA as an adapter, over the base of the model's files."""
        m = self.model
        return m.lora_rank > 0 and m.quantization == "none" and self.rollout.lora != "merge"

    @property
    def plays_ahead(self) -> bool:
        """True if rollouts go on while the trainer computes."""
        return self.trainer.max_staleness > 0 and not self.data.is_recorded

    @property
    def rollouts_of_step(self) -> int:
        """The number of rollouts of a training step."""
        return self.data.batch_size * self.rollout.n

    @property
    def rollouts_of_update(self) -> int:
        """The number of rollouts of an optimizer step: a mini-batch."""
        return min(self.rollouts_of_step, self.algorithm.mini_batch_size or self.rollouts_of_step)

    def value(self, path: str) -> Any:
        """Return the value of a dotted key, for example "optim.lr".

        Args:
            path: the key.

        Raises:
            AttributeError: there is no such key.
        """
        return attrgetter(path)(self)

    def stored_value(self, path: str) -> Any:
        """Return the value of a key as it is stored: `${oc.env:NAME}` instead of its value.

        Args:
            path: the dotted path of the key.
        """
        value = self.value(path)
        before, reference = self._references.get(path, (None, None))
        return reference if path in self._references and before == value else value

    def with_values(self, section: str, **values: Any) -> Config:
        """Return a copy with other values of some keys of a section. The values are not checked.

        Args:
            section: the name of the section, for example "rollout".
            values: the values by the names of the keys, for example `n=4`.
        """
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

    def resolved_yaml(self) -> str:
        """Return all keys with their values as YAML, which `load_config` can read."""
        return dump_yaml(self.model_dump())

    def diff(self, base: Config | None = None) -> list[str]:
        """Return the keys whose values differ, as lines `a.b.c=1`.

        Args:
            base: the config to compare with; by default the defaults.
        """
        base = base or Config()
        return [
            assignment(path, self.stored_value(path))
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
"""All keys by their dotted paths."""
