"""What a run can be told: one frozen section per concern, one line of documentation per key.

`docs/config.md` is written from this file by `python -m agentrl.config.page`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Literal

from pydantic import field_validator, model_validator
from pydantic.fields import FieldInfo

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.section import Section, key
from agentrl.config.sources import assignment, dump_yaml
from agentrl.registry import did_you_mean

TINY = "tiny"
"""The `model.path` of the model that is made on first use (`agentrl.demo`)."""
RENDERING = (
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "messages",
    "return_dict", "return_tensors", "tokenize", "tools",
)  # fmt: skip
"""The arguments of a rendering that are not the user's."""


class DataConfig(Section):
    """The rows."""

    train: str = key("", flag="--dataset")
    """training rows, a .parquet or .jsonl file"""
    val: str = key("", flag="--val-dataset")
    """validation rows; empty: no validation"""
    batch_size: int = key(16, ge=1)
    """prompts a step"""
    gen_batch_size: int = key(0, ge=0)
    """with algorithm.filter_groups: prompts played at a time, until batch_size of them can teach
    something; 0: batch_size"""
    shuffle: bool = True
    """a new order every epoch; false: the file's order"""
    agent_name: str = "single_turn"
    """the agent loop of rows that name none"""
    untrusted: bool = False
    """every control token in a prompt is text, also those a prompt may legitimately speak of such
    as `<think>`"""


class ModelConfig(Section):
    """The policy."""

    path: str = key("", flag="--model")
    """a folder or hub name of a model, or `tiny`: a small one, trained here on first use"""
    lora_rank: int = key(0, ge=0)
    """rank of the LoRA adapter; 0: all weights are trained"""
    lora_alpha: int = key(16, ge=1)
    """scale of the adapter, times 1/rank"""
    lora_target_modules: str | list[str] = key(
        "all-linear", allowed="all-linear, the name of a module, or a list of names"
    )
    """the modules that get an adapter"""
    template_kwargs: dict[str, Any] = key(
        {}, allowed="a mapping from names of variables to their values"
    )
    """further variables of the chat template, such as `{enable_thinking: false}`"""

    @field_validator("template_kwargs")
    @classmethod
    def _of_the_user(cls, variables: dict[str, Any]) -> dict[str, Any]:
        for name in variables:
            if name in RENDERING:
                raise ValueError(f"{name!r} is set by agentrl")
        return variables


BUDGETS = ("turn_tokens", "trajectory_tokens", "turns", "tool_calls", "time")
"""The stop reasons that are spent budgets."""
POLICIES = ("keep", "zero", "mask")
TOOL_FORMATS = (
    "auto", "hermes", "qwen3_coder", "glm", "llama_json", "llama_pythonic", "mistral", "deepseek",
    "gpt_oss", "gemma", "kimi_k2", "minimax_m1", "minimax_m2", "deepseek_v32", "deepseek_v4",
    "lfm2", "granite", "cohere_command", "phi4_mini", "seed_oss", "hunyuan", "hunyuan_a13b",
    "internlm", "gigachat3", "muse", "apertus", "functiongemma", "hf",
)  # fmt: skip
"""How models write tool calls; besides, `sglang:NAME`."""
OUR_ARGUMENTS = {
    "--admin-api-key": "", "--api-key": "", "--base-gpu-id": "", "--config": "", "--host": "",
    "--model": "", "--model-path": "", "--port": "", "--weight-version": "",
    "--enable-lora": "rollout.lora", "--max-lora-rank": "model.lora_rank",
    "--lora-target-modules": "model.lora_target_modules", "--max-loras-per-batch": "",
    "--max-loaded-loras": "", "--max-loras": "", "--enable-memory-saver": "rollout.sleep",
    "--enable-sleep-mode": "rollout.sleep", "--enable-weights-cpu-backup": "rollout.sleep",
    "--mem-fraction-static": "rollout.gpu_memory_utilization",
    "--gpu-memory-utilization": "rollout.gpu_memory_utilization",
    "--tp": "rollout.tensor_parallel_size", "--tp-size": "rollout.tensor_parallel_size",
    "--tensor-parallel-size": "rollout.tensor_parallel_size",
    "--enable-deterministic-inference": "rollout.deterministic",
    "--rl-on-policy-target": "rollout.deterministic", "--logprobs-mode": "",
    "--dist-init-addr": "", "--dtype": "", "--load-format": "", "--trust-remote-code": "",
}  # fmt: skip
"""Of a server that the run starts: what agentrl sets, and the key that tells it to."""


class RolloutConfig(Section):
    """How episodes are played for training."""

    name: Literal["local", "sglang", "vllm"] = "local"
    """the engine that samples: local is transformers in this process; sglang and vllm are servers
    that the run starts and stops, or finds running (urls)"""
    urls: list[str] = key([], allowed="a list of URLs (http://HOST:PORT)")
    """servers that run already; their key is in AGENTRL_ENGINE_TOKEN; empty: the run starts its
    own"""
    engines: int = key(1, ge=1)
    """how many servers the run starts"""
    tensor_parallel_size: int = key(1, ge=1)
    """over how many GPUs a server spreads the model"""
    python: str = ""
    """the Python of the environment that has the server's package; empty: the one that runs
    agentrl"""
    launch: list[str] = key([], allowed="a list of arguments, as its command line has them")
    """further arguments of the server, such as `[--attention-backend, triton]`"""
    gpu_memory_utilization: float = key(0.5, gt=0, lt=1)
    """the share of a GPU's memory that a server takes for weights and cache"""
    sync: Literal["auto", "disk", "ipc", "nccl"] = "auto"
    """how weights go to a server: through files, through memory of the GPU it shares with the
    trainer (ipc), from GPU to GPU (nccl), or by what it can (auto)"""
    lora: Literal["auto", "adapter", "merge"] = "auto"
    """how LoRA goes to a server: as an adapter beside the base, merged into all weights, or as an
    adapter where it can (auto: on a GPU)"""
    sleep: Literal["none", "kv_cache", "all"] = "none"
    """what a server that shares the trainer's GPU gives up while the trainer works: nothing, its
    cache, or its weights as well"""
    deterministic: bool = key(False, flag="--deterministic")
    """have the server compute the same whatever else it is at work on, by the seeds of the run, and
    as near to the trainer as it can (the local engine always does)"""
    n: int = key(8, ge=1)
    """rollouts of each prompt"""
    temperature: float = key(1.0, gt=0)
    """sampling temperature; the trainer uses the same"""
    max_turn_tokens: int = key(512, ge=1)
    """most tokens sampled in one turn"""
    max_trajectory_tokens: int = key(4096, ge=1)
    """most tokens after the prompt, sampled and observed"""
    max_turns: int = key(8, ge=1)
    """most turns of the assistant"""
    max_tool_calls: int = key(16, ge=0)
    """most tool calls"""
    timeout_s: float = key(300.0, gt=0)
    """most seconds an episode may take; the wait for a free connection does not count"""
    budget_policy: dict[str, str | float] = key(
        {}, allowed=f"a mapping from {', '.join(BUDGETS)} to {', '.join(POLICIES)} or a number > 0"
    )
    """what becomes of an episode that spent a budget: its reward stands (keep, the default), is 0
    (zero) or less by a number, or it does not train (mask)"""
    tool_format: str = key("auto", allowed=f"{', '.join(TOOL_FORMATS[:-1])}, sglang:NAME or hf")
    """how the model writes tool calls"""
    history_thinking: Literal["keep", "strip"] = "keep"
    """what becomes of the thinking of earlier turns where the chat template drops it: keep it as it
    was sampled, or strip it and begin a new segment"""

    @field_validator("launch")
    @classmethod
    def _not_ours(cls, arguments: list[str]) -> list[str]:
        for argument in arguments:
            if argument.startswith("--") and " " in argument:
                raise ValueError(f"{argument!r} are several: [{', '.join(argument.split())}]")
            name = argument.partition("=")[0].replace("_", "-")
            # Parsers take the beginning of a name for the whole; none of theirs begins one of ours.
            cut = len(name) > len("--") and name.startswith("--")
            for ours, by in OUR_ARGUMENTS.items():
                if name == ours or (cut and ours.startswith(name)):
                    raise ValueError(f"{argument} ({ours}) is set by {by or 'agentrl'}")
        return arguments

    @field_validator("urls")
    @classmethod
    def _reachable(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if not re.fullmatch(r"https?://[^\s@?#]+", url):
                raise ValueError(f"{url!r} is not http://HOST:PORT (its key: AGENTRL_ENGINE_TOKEN)")
        urls = [url.rstrip("/") for url in urls]
        if len(set(urls)) < len(urls):
            raise ValueError("a URL stands there twice")
        return urls

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

    temperature: float = key(1.0, ge=0)
    """sampling temperature; 0: greedy"""
    top_p: float = key(1.0, gt=0, le=1)
    """sample from the likeliest tokens of this probability"""
    top_k: int = key(0, ge=0)
    """sample from this many likeliest tokens; 0: from all"""
    n: int = key(1, ge=1)
    """rollouts of each prompt"""
    greedy: bool = True
    """a greedy pass beside the sampled one"""


FAILURES = ("bad_call", "unknown_tool", "schema", "tool_error", "timeout")
"""How a tool call goes wrong by the model's doing, see `ToolResult.error`."""


class ToolsConfig(Section):
    """Where tools run."""

    transport: str = key(
        "http", allowed="http, in_process, or the URL of a tool server (http://HOST:PORT)"
    )
    """http: on a server that the run starts and stops; in_process: in this process; a URL: on that
    server, with the token in AGENTRL_TOOLS_TOKEN"""
    max_result_tokens: int = key(1024, ge=1)
    """most tokens of a result that the model is shown"""
    truncate: Literal["head", "tail", "middle"] = "middle"
    """how a longer result is cut: its head is kept, its tail, or both without the middle"""
    workers: int = key(1, ge=1)
    """processes of the server that the run starts; an episode stays with one of them"""
    penalties: dict[str, float] = key(
        {}, allowed=f"a mapping from {', '.join(FAILURES)} to numbers above 0"
    )
    """what a call that failed costs: taken off the advantages of the tokens that wrote it, by class
    of failure"""

    @field_validator("penalties")
    @classmethod
    def _known(cls, penalties: dict[str, float]) -> dict[str, float]:
        for name, value in penalties.items():
            if name not in FAILURES:
                raise ValueError(f"{name!r} is no failure.{did_you_mean(name, FAILURES)}")
            if not value > 0 or math.isinf(value):
                raise ValueError(f"{name}={value} must be above 0: it is taken off")
        return penalties

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


class SandboxConfig(Section):
    """Where code that a model wrote is run, by tools and by graders."""

    backend: str = key(
        "bubblewrap", allowed="bubblewrap, unsafe-subprocess, or a URL (http://HOST:PORT)"
    )
    """bubblewrap: without network, files or rights of this machine, or not at all;
    unsafe-subprocess: as you, where nothing else can be had; a URL: SandboxFusion's API"""
    slots: int = key(0, ge=0)
    """programs at once in a process; 0: twice the cores"""
    timeout_s: float = key(10.0, gt=0)
    """most seconds a program may run"""
    memory_mb: int = key(2048, ge=64)
    """most MiB of memory of each of its processes"""
    python: str = "/usr/bin/python3"
    """the interpreter that programs are run with"""

    @field_validator("backend")
    @classmethod
    def _known(cls, backend: str) -> str:
        if not re.fullmatch(r"bubblewrap|unsafe-subprocess|https?://[^\s@]+", backend):
            raise ValueError
        return backend.rstrip("/")


class InteractionConfig(Section):
    """What a run tells its interactions."""

    kwargs: dict[str, dict[str, Any]] = key(
        {}, allowed="a mapping from names of interactions to their arguments"
    )
    """arguments of interactions by name, beside those of the rows; where a simulated user's model
    is, say"""


class RewardConfig(Section):
    """What a rollout is worth."""

    function: str = key("", allowed="the name of a registered reward, or path.py:function")
    """the reward function; empty: the grader of the row's data_source"""
    functions: dict[str, float] = key({}, allowed="a mapping from reward functions to weights")
    """several reward functions and their weights, such as `{exact: 1.0, format: 0.1}`; `grader` is
    that of the row's data_source"""
    kwargs: dict[str, Any] = key({}, allowed="a mapping")
    """further arguments of the reward function or grader; with reward.functions, a mapping of them
    by function"""
    timeout_s: float = key(60.0, gt=0)
    """most seconds that judging one rollout may take; the wait for a free connection does not
    count"""
    workers: int = key(2, ge=1)
    """processes for graders that must be stoppable (mathematics)"""
    outcome_weight: float = 1.0
    """weight of the reward of the whole trajectory"""
    turn_weight: float = 0.0
    """weight of what turns earned (interactions, loops)"""
    tool_weight: float = 0.0
    """weight of what tools gave"""
    overlong_buffer: int = key(0, ge=0)
    """the last so many of rollout.max_trajectory_tokens cost a penalty that grows from 0 to
    overlong_penalty (DAPO); only sampled tokens count, only training pays; 0: off"""
    overlong_penalty: float = key(1.0, ge=0)
    """the penalty of a rollout that used all of them"""

    @property
    def files(self) -> list[str]:
        """The files of functions that are named by path."""
        paths = [name.rpartition(":")[0] for name in (self.function, *self.functions)]
        return [path for path in dict.fromkeys(paths) if path.endswith(".py")]


class OptimConfig(Section):
    """The optimizer, and what a pass costs in memory."""

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw, or with its moments in 8 bits (needs the extra `8bit`)"""
    lr: float = key(1e-6, gt=0)
    """learning rate of the policy"""
    critic_lr: float = key(1e-5, gt=0)
    """learning rate of the critic"""
    lr_warmup_steps: int = key(0, ge=0)
    """steps in which the learning rate rises from 0"""
    lr_final: float = key(1.0, ge=0)
    """learning rate at the last step, as a share of the first; linear between"""
    weight_decay: float = key(0.0, ge=0)
    """AdamW's weight decay"""
    max_grad_norm: float = key(1.0, gt=0)
    """gradients are clipped to this norm"""
    micro_batch_tokens: int = key(16384, ge=1)
    """most tokens of one forward pass"""
    recompute: bool = False
    """keep no activations within a layer, compute them again in the backward pass: a third more
    work, a fraction of the memory"""
    compile: Literal["auto", "never"] = "auto"
    """auto: layers are compiled (torch.compile) where they run on a GPU and the model is large
    enough for it to pay, 100 million weights"""
    offload: Literal["none", "optimizer", "all"] = "none"
    """what waits in the CPU's memory: nothing, the optimizer's moments between updates, or
    parameters, gradients and moments"""


class TrainerConfig(Section):
    """The run."""

    output: str = key("", flag="--output")
    """the run's folder; empty: `runs/` and the dataset's name"""
    total_steps: int = key(0, ge=0)
    """steps of the run; 0: total_epochs decides"""
    total_epochs: int = key(1, ge=1)
    """passes over the dataset, data.batch_size rows a step; with algorithm.filter_groups a step
    plays more of them, and the same steps make more passes"""
    test_freq: int = key(0, ge=0)
    """validate every so many steps; 0: not on the way"""
    save_freq: int = key(0, ge=0)
    """save every so many steps; 0: not on the way"""
    val_before_train: bool = True
    """validate before the first step"""
    val_only: bool = False
    """validate, and train nothing"""
    resume: str = key("auto", allowed="auto, never, or the path of a checkpoint")
    """auto: go on from the newest checkpoint in the run's folder; never: start anew; a path: go on
    from that checkpoint"""
    seed: int = key(0, ge=0)
    """the only source of randomness"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU where there is one"""
    nnodes: int = key(1, ge=1)
    """machines that the learner is spread over"""
    n_gpus_per_node: int = key(1, ge=1)
    """GPUs of each that learn; with trainer.device=cpu, processes"""
    placement: Literal["colocated", "separate"] = "colocated"
    """colocated: engines take turns on the learner's GPUs; separate: they have others"""
    ray_address: str = ""
    """the Ray cluster to join, as `ray start` prints it; empty: one is started where more than one
    process learns"""
    logger: list[Literal["tensorboard", "wandb"]] = key([])
    """trackers beside the console and metrics.jsonl, which are always on"""
    watchdog_s: float = key(300.0, gt=0)
    """say what every episode waits for after so many seconds without progress"""

    @property
    def spread(self) -> bool:
        """Whether the learner is on a cluster, and not in this process."""
        return self.nnodes * self.n_gpus_per_node > 1 or bool(self.ray_address)


class Config(Section):
    """A whole run. Build it with `load_config`."""

    files: list[str] = key([], flag="--file")
    """files that define tools, interactions, rewards and loops: paths, or `shelf:NAME` for a ready
    tool"""
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
        return attrgetter(path)(self)

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


COMPARE = ("grpo", "rloo", "reinforce_plus_plus_baseline", "turn_rloo")
"""Estimators for which a rollout is as good as it is better than others of its prompt."""


def contradictions(c: Config) -> Iterator[str]:
    """The combinations of values that are refused, each with the way out."""
    a, t, r = c.algorithm, c.trainer, c.reward
    if a.kl_loss_coef > 0 and a.kl_reward_coef > 0:
        yield (
            f"algorithm.kl_loss_coef={a.kl_loss_coef} and algorithm.kl_reward_coef="
            f"{a.kl_reward_coef} penalize the same KL twice. Set one of them to 0"
        )
    if a.kl_type != "k1" and a.kl_reward_coef > 0 and not a.kl_loss_coef:
        yield (
            f"algorithm.kl_type={a.kl_type} in the reward drives policy and reference apart:"
            f" only k1 is a KL there (algorithm.kl_reward_coef={a.kl_reward_coef}). Set"
            " algorithm.kl_type=k1, or penalize the loss: algorithm.kl_loss_coef"
        )
    if a.kl_type == "k1" and a.kl_loss_coef > 0:
        yield (
            f"algorithm.kl_type=k1 has an expected gradient of 0 as a loss:"
            f" algorithm.kl_loss_coef={a.kl_loss_coef} would only add noise. Set"
            " algorithm.kl_type=k2 or k3, or penalize the reward: algorithm.kl_reward_coef"
        )
    rollouts = c.data.batch_size * c.rollout.n
    if a.kl_target and rollouts >= 5 * a.kl_horizon:
        yield (
            f"algorithm.kl_horizon={a.kl_horizon} is so much less than a step's {rollouts} rollouts"
            " that a single step could turn the KL's weight negative. Set it to those of 10 steps,"
            f" {10 * rollouts}, or more"
        )
    if c.val.temperature == 0 and c.val.n > 1:
        yield f"val.temperature=0 is greedy: all val.n={c.val.n} rollouts are alike. Set val.n=1"
    if a.adv_estimator in COMPARE and c.rollout.n < 2 and not t.val_only:
        yield (
            f"rollout.n=1 leaves algorithm.adv_estimator={a.adv_estimator} nothing to compare with:"
            " every advantage is 0. Set rollout.n to 2 or more"
        )
    if a.mini_batch_size > c.data.batch_size * c.rollout.n:
        yield (
            f"algorithm.mini_batch_size={a.mini_batch_size} is more than a batch holds:"
            f" data.batch_size={c.data.batch_size} times rollout.n={c.rollout.n}"
        )
    if a.tis_mode == "mask" and a.tis_cap == 1:
        yield (
            "algorithm.tis_mode=mask with algorithm.tis_cap=1 drops every token but those of which"
            " engine and trainer agree to the last bit. Set algorithm.tis_cap above 1"
        )
    if t.val_only and not c.data.val:
        yield "trainer.val_only=true needs validation rows. Set data.val (--val-dataset)"
    if t.nnodes > 1 and not t.ray_address:
        yield (
            f"trainer.nnodes={t.nnodes}: the cluster that a run starts is this machine alone. Start"
            " one on all machines (`ray start`) and set trainer.ray_address"
        )
    yield from _engine_contradictions(c)
    yield from _filter_contradictions(c)
    if r.overlong_buffer > c.rollout.max_trajectory_tokens:
        yield (
            f"reward.overlong_buffer={r.overlong_buffer} is more than"
            f" rollout.max_trajectory_tokens={c.rollout.max_trajectory_tokens}: every rollout would"
            " be overlong. Set a share of it, such as a fifth"
        )
    if r.function and r.functions:
        yield (
            f"reward.function={r.function} and reward.functions={{{', '.join(r.functions)}}} both"
            f" say what judges rollouts. Put {r.function} and its weight into reward.functions"
        )
    if r.functions and not any(r.functions.values()):
        yield "reward.functions: every weight is 0: nothing is rewarded. Set one of them"
    if not (r.outcome_weight or r.turn_weight or r.tool_weight):
        yield (
            "reward.outcome_weight, reward.turn_weight and reward.tool_weight are all 0: nothing is"
            " rewarded. Set one of them"
        )


def _filter_contradictions(c: Config) -> Iterator[str]:
    """Of which groups nothing can be learned must be known as soon as they were played."""
    a, d = c.algorithm, c.data
    if not a.filter_groups:
        return
    taught_by_others = {
        "gae": "a critic's values tell every token apart",
        "reinforce_plus_plus": "it compares rollouts with those of other prompts",
    }
    if why := taught_by_others.get(a.adv_estimator):
        yield (
            "algorithm.filter_groups=true sets aside groups whose rollouts earned alike, which with"
            f" algorithm.adv_estimator={a.adv_estimator} do teach something: {why}. Set"
            " algorithm.filter_groups=false"
        )
    if a.kl_reward_coef:
        yield (
            f"algorithm.kl_reward_coef={a.kl_reward_coef} tells the rollouts of every group apart:"
            " algorithm.filter_groups=true finds none to set aside. Penalize the loss instead,"
            " with algorithm.kl_loss_coef, or set algorithm.filter_groups=false"
        )
    most = (d.gen_batch_size or d.batch_size) * a.max_gen_batches
    if most < d.batch_size:
        yield (
            f"data.gen_batch_size={d.gen_batch_size} prompts, played algorithm.max_gen_batches="
            f"{a.max_gen_batches} times, never make data.batch_size={d.batch_size}. Set one of the"
            " first two higher"
        )


def _engine_contradictions(c: Config) -> Iterator[str]:
    r = c.rollout
    if r.urls and r.sync in ("ipc", "nccl"):
        yield (
            f"rollout.sync={r.sync} is for servers that the run starts: to those of rollout.urls"
            " weights go through files (rollout.sync=disk), in a folder that they can read"
        )
    if r.name == "vllm" and r.sync in ("ipc", "nccl"):
        yield f"rollout.sync={r.sync} is not for rollout.name=vllm: its weights go through files"
    if c.trainer.placement == "separate" and r.sleep != "none":
        yield (
            f"rollout.sleep={r.sleep}: with trainer.placement=separate no server shares a GPU with"
            " the learner. Set rollout.sleep=none"
        )
    if r.name == "vllm" and r.sleep != "none":
        yield f"rollout.sleep={r.sleep} is not for rollout.name=vllm. Set rollout.sleep=none"
