"""Combinations of values that are refused, because the keys contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from agentrl.config.teacher import POLICY, TeacherConfig, is_url
from agentrl.file_loaders import RECORDED

if TYPE_CHECKING:
    from agentrl.config.sections import Config

MAX_UNCORRECTED_MISMATCH = 0.2
"""The mean difference of logprobs, in nats, above which a run must correct its updates."""
GROUP_ESTIMATORS = ("grpo", "maxrl", "rloo", "reinforce_plus_plus_baseline", "turn_rloo")
"""Advantage estimators that compare the rollouts of a prompt with each other."""


def contradictions(c: Config) -> Iterator[str]:
    """Yield a message for each combination of values that is refused, with the fix."""
    for check in (
        _agent_contradictions,
        _kl_contradictions,
        _algorithm_contradictions,
        _trainer_contradictions,
        _engine_contradictions,
        _truncation_contradictions,
        _quantization_contradictions,
        _replay_contradictions,
        _fp8_contradictions,
        _recorded_contradictions if c.data.is_recorded else _staleness_contradictions,
        _filter_contradictions,
        _teacher_contradictions,
        _reward_contradictions,
        _sandbox_contradictions,
    ):
        yield from check(c)


def _agent_contradictions(c: Config) -> Iterator[str]:
    if c.agent.command and c.agent.python:
        yield (
            f"agent.command={c.agent.command!r} and agent.python={c.agent.python}: set one of them"
        )
    if c.agent.python and c.agent.reward == "exit":
        yield (
            f"agent.reward=exit with agent.python={c.agent.python}: a function has no exit code."
            " Set agent.reward=post and return the reward, or use agent.command"
        )


def _sandbox_contradictions(c: Config) -> Iterator[str]:
    if c.sandbox.backend in ("docker", "podman") and not c.sandbox.images:
        yield (
            f"sandbox.backend={c.sandbox.backend} needs the images that programs may run in: set"
            " sandbox.images, for example to [python:3.12-slim]"
        )


def _kl_contradictions(c: Config) -> Iterator[str]:
    a = c.algorithm
    if a.kl_loss_coef > 0 and a.kl_reward_coef > 0:
        yield (
            f"algorithm.kl_loss_coef={a.kl_loss_coef} and algorithm.kl_reward_coef="
            f"{a.kl_reward_coef} penalize the same KL twice. Set one of them to 0"
        )
    if a.kl_type != "k1" and a.kl_reward_coef > 0 and not a.kl_loss_coef:
        yield (
            f"algorithm.kl_type={a.kl_type} in the reward does not keep the policy near the"
            f" reference: only k1 works there (algorithm.kl_reward_coef={a.kl_reward_coef}). Set"
            " algorithm.kl_type=k1, or penalize the loss with algorithm.kl_loss_coef"
        )
    if a.kl_type == "k1" and a.kl_loss_coef > 0:
        yield (
            "algorithm.kl_type=k1 in the loss has an expected gradient of 0:"
            f" algorithm.kl_loss_coef={a.kl_loss_coef} would only add noise. Set"
            " algorithm.kl_type=k2 or k3, or penalize the reward with algorithm.kl_reward_coef"
        )
    rollouts = c.rollouts_of_step
    if a.kl_target and rollouts >= 5 * a.kl_horizon:
        yield (
            f"algorithm.kl_horizon={a.kl_horizon} is so small compared with the {rollouts} rollouts"
            " of a step that a single step could make the KL weight negative. Set it to"
            f" {10 * rollouts} (10 steps) or more"
        )


def _algorithm_contradictions(c: Config) -> Iterator[str]:
    a, rollouts = c.algorithm, c.rollouts_of_step
    if c.val.temperature == 0 and c.val.n > 1:
        yield f"val.temperature=0 is greedy: all val.n={c.val.n} rollouts are equal. Set val.n=1"
    is_compared = a.adv_estimator in GROUP_ESTIMATORS and not c.data.is_recorded
    if is_compared and c.rollout.n < 2 and not c.trainer.val_only:
        yield (
            f"rollout.n=1: algorithm.adv_estimator={a.adv_estimator} compares the rollouts of a"
            " prompt, so that every advantage would be 0. Set rollout.n to 2 or more"
        )
    if a.mini_batch_size > rollouts:
        yield (
            f"algorithm.mini_batch_size={a.mini_batch_size} is more than the rollouts of a batch:"
            f" data.batch_size={c.data.batch_size} times rollout.n={c.rollout.n}. Set it to 0 for"
            " one optimizer step per batch. From a config of verl's, it is rollout.n times"
            " actor_rollout_ref.actor.ppo_mini_batch_size (256 by default)"
        )
    if a.adv_estimator == "maxrl" and (a.kl_reward_coef or c.reward.overlong_buffer):
        name = "algorithm.kl_reward_coef" if a.kl_reward_coef else "reward.overlong_buffer"
        yield (
            f"{name}={c.value(name)} with algorithm.adv_estimator=maxrl: a penalty makes rewards"
            " negative, but maxrl divides by the mean reward of a group, which must be a share of"
            f" successes. Set {name}=0"
        )
    if a.tis_mode == "mask" and a.tis_cap == 1:
        yield (
            "algorithm.tis_mode=mask with algorithm.tis_cap=1 masks every token whose logprobs in"
            " engine and trainer differ at all. Set algorithm.tis_cap above 1"
        )


def _trainer_contradictions(c: Config) -> Iterator[str]:
    t = c.trainer
    if RECORDED in str(c.data.val):
        yield f"data.val={c.data.val}: recorded answers cannot be played. Name other rows"
    if t.val_only and not c.data.val:
        yield "trainer.val_only=true needs validation rows. Set data.val (--val-dataset)"
    if t.nnodes > 1 and not t.ray_address:
        yield (
            f"trainer.nnodes={t.nnodes}: a run can start a Ray cluster on this machine only. Start"
            " one on all machines (`ray start`) and set trainer.ray_address"
        )
    if t.ranks % t.context_parallel_size:
        yield (
            f"trainer.context_parallel_size={t.context_parallel_size} does not divide the number of"
            f" the learner's ranks, trainer.nnodes * trainer.n_gpus_per_node = {t.ranks}. Set"
            f" trainer.n_gpus_per_node={t.context_parallel_size}, for example"
        )
    if t.total_steps and (late := [step for step in t.profile_steps if step > t.total_steps]):
        yield (
            f"trainer.profile_steps={late}: the run ends after step {t.total_steps}"
            " (trainer.total_steps). Choose earlier steps"
        )
    if t.keep_best and t.save_freq == "never":
        yield (
            f"trainer.keep_best={t.keep_best} with trainer.save_freq=never: no checkpoint is saved."
            " Set trainer.save_freq=0"
        )
    if t.max_restarts and t.save_freq in (0, "never"):
        yield (
            f"trainer.max_restarts={t.max_restarts} with trainer.save_freq={t.save_freq}: a run"
            " that crashed would start from the beginning. Set trainer.save_freq=auto"
        )


def _reward_contradictions(c: Config) -> Iterator[str]:
    r = c.reward
    if r.overlong_buffer > c.rollout.max_trajectory_tokens:
        yield (
            f"reward.overlong_buffer={r.overlong_buffer} is more than"
            f" rollout.max_trajectory_tokens={c.rollout.max_trajectory_tokens}: every rollout would"
            " get a penalty. Set it to a part of that, such as a fifth"
        )
    if r.function and r.functions:
        yield (
            f"reward.function={r.function} and reward.functions={{{', '.join(r.functions)}}} are"
            f" both set. Move {r.function} with a weight to reward.functions"
        )
    if r.functions and not any(r.functions.values()):
        yield "reward.functions: all weights are 0, so that all rewards are 0. Set one of them"
    if not (r.outcome_weight or r.turn_weight or r.tool_weight):
        yield (
            "reward.outcome_weight, reward.turn_weight and reward.tool_weight are all 0, so that"
            " all rewards are 0. Set one of them"
        )


def _filter_contradictions(c: Config) -> Iterator[str]:
    """Yield a message for each value that `filter_groups` does not work with.

    The run must decide right after the rollouts of a group whether the group has a learning signal.
    """
    a, d = c.algorithm, c.data
    if not a.filter_groups:
        return
    reasons = {
        "gae": "the critic's values differ between tokens",
        "reinforce_plus_plus": "it compares rollouts with those of other prompts",
    }
    if reason := reasons.get(a.adv_estimator):
        yield (
            "algorithm.filter_groups=true removes groups whose rewards are all equal. With"
            f" algorithm.adv_estimator={a.adv_estimator} these have a learning signal: {reason}."
            " Set algorithm.filter_groups=false"
        )
    if a.kl_reward_coef:
        yield (
            f"algorithm.kl_reward_coef={a.kl_reward_coef} makes the rewards of a group differ, so"
            " that algorithm.filter_groups=true removes no group. Penalize the loss instead with"
            " algorithm.kl_loss_coef, or set algorithm.filter_groups=false"
        )
    max_prompts = (d.gen_batch_size or d.batch_size) * a.max_gen_batches
    if max_prompts < d.batch_size:
        yield (
            f"data.gen_batch_size={d.gen_batch_size} times algorithm.max_gen_batches="
            f"{a.max_gen_batches} is less than data.batch_size={d.batch_size}. Increase one of the"
            " first two"
        )


def _teacher_contradictions(c: Config) -> Iterator[str]:
    """Yield a message for each value that does not fit the teacher, or the lack of one."""
    a, t = c.algorithm, c.teacher
    if not t.model:
        if a.adv_estimator == "opd":
            yield (
                "algorithm.adv_estimator=opd learns from a teacher alone. Set teacher.model to a"
                " model or to the URL of a server"
            )
        for name in ("prompt", "weight", "clip"):
            if (value := getattr(t, name)) != TeacherConfig.model_fields[name].default:
                yield f"teacher.{name}={value} without a teacher. Set teacher.model, or remove it"
        return
    if a.adv_estimator == "opd" and a.kl_reward_coef:
        yield (
            f"algorithm.kl_reward_coef={a.kl_reward_coef}: algorithm.adv_estimator=opd reads no"
            " rewards. Penalize the loss instead with algorithm.kl_loss_coef"
        )
    if a.filter_groups:
        yield (
            "algorithm.filter_groups=true removes groups whose rewards are all equal, but the"
            " teacher also teaches in these. Set algorithm.filter_groups=false"
        )
    if POLICY in t.names and not t.prompt:
        yield (
            f"teacher.model={POLICY} without teacher.prompt: the policy would be its own teacher,"
            " so that all advantages are 0. Set teacher.prompt, or name another model"
        )
    if t.prompt and c.data.is_recorded:
        yield "teacher.prompt needs the rows of the prompts, which recorded answers do not have"
    if isinstance(t.model, dict) and c.data.is_recorded:
        yield "teacher.model must be one teacher: recorded answers have no data source"
    if c.rollout.temperature != 1 and (urls := [name for name in t.names if is_url(name)]):
        yield (
            f"rollout.temperature={c.rollout.temperature} with the teacher {urls[0]}: a server"
            " scores given tokens at temperature 1 only. Set rollout.temperature=1, or let the"
            " learner hold the teacher (teacher.model=FOLDER)"
        )


def _staleness_contradictions(c: Config) -> Iterator[str]:
    """Yield a message for each value that rollouts in the background do not work with."""
    r, staleness = c.rollout, f"trainer.max_staleness={c.trainer.max_staleness}"
    if not c.trainer.max_staleness:
        if r.max_in_flight:
            yield (
                f"rollout.max_in_flight={r.max_in_flight} has no effect with {staleness}: a step"
                " plays all its episodes at the same time. Remove it, or decrease data.batch_size"
            )
        return
    group = r.n + (c.algorithm.adv_estimator == "remax")
    if 0 < r.max_in_flight < group:
        yield (
            f"rollout.max_in_flight={r.max_in_flight} is less than the {group} rollouts of a row,"
            f" which are played together. Set it to {group} or more, or to 0 for no limit"
        )
    if r.name == "vllm" and not c.model.lora_rank:
        yield (
            f"{staleness} with rollout.name=vllm needs LoRA (model.lora_rank): vLLM can get all"
            " weights only while no turn is in flight. Set rollout.name=sglang or"
            " trainer.max_staleness=0"
        )
    if r.sleep != "none":
        yield (
            f"rollout.sleep={r.sleep} with {staleness}: rollouts go on while the trainer computes,"
            " so that no memory can be released. Set rollout.sleep=none"
        )
    if r.deterministic:
        yield (
            f"rollout.deterministic=true with {staleness}: rollouts depend on when new weights"
            " arrive. Set rollout.deterministic=false or trainer.max_staleness=0"
        )
    if not c.algorithm.tis_cap:
        yield (
            f"algorithm.tis_cap=0 with {staleness}: older versions of the policy sample a part of"
            " the tokens, which only importance weights correct. Set algorithm.tis_cap=2"
        )


def _recorded_contradictions(c: Config) -> Iterator[str]:
    """Yield a message for each value that recorded answers do not work with."""
    a, files = c.algorithm, c.data.train
    if not isinstance(files, str):
        yield f"data.train={files}: recorded answers ({RECORDED}DIR) must be the only rows"
        return
    if a.adv_estimator in (*GROUP_ESTIMATORS, "remax"):
        yield (
            f"algorithm.adv_estimator={a.adv_estimator} compares several answers to a prompt, but"
            f" {files} has one. Set algorithm.name=reinforce_plus_plus, which compares those of a"
            " batch"
        )
    if not a.tis_cap:
        yield (
            f"algorithm.tis_cap=0 with {files}: older versions of the policy sampled the answers,"
            " which only importance weights correct. Set algorithm.tis_cap=2"
        )
    if c.data.curriculum:
        yield (
            f"data.curriculum with {files}: recorded answers are used in their order, each once."
            " Set data.curriculum=null"
        )
    if c.rollout.n != 1:
        yield f"rollout.n={c.rollout.n}: {files} has one answer to each prompt. Set rollout.n=1"
    if a.filter_groups:
        yield (
            f"algorithm.filter_groups=true plays further rows, but {files} is not played. Set"
            " algorithm.filter_groups=false"
        )


def _engine_contradictions(c: Config) -> Iterator[str]:
    r = c.rollout
    if r.max_mismatch > MAX_UNCORRECTED_MISMATCH and not c.algorithm.tis_cap:
        yield (
            f"algorithm.tis_cap=0 with rollout.max_mismatch={r.max_mismatch:g}: above"
            f" {MAX_UNCORRECTED_MISMATCH:g} nats only importance weights correct the updates. Set"
            " algorithm.tis_cap=2"
        )
    if r.urls and r.sync in ("ipc", "nccl"):
        yield (
            f"rollout.sync={r.sync} works only with servers that the run starts. Servers of"
            " rollout.urls read weights from files (rollout.sync=disk), which they must be able to"
            " read"
        )
    if r.name == "vllm" and r.sync in ("ipc", "nccl"):
        yield (
            f"rollout.sync={r.sync} is not supported with rollout.name=vllm: set rollout.sync=disk"
        )
    if c.trainer.placement == "separate" and r.sleep != "none":
        yield (
            f"rollout.sleep={r.sleep}: with trainer.placement=separate no server shares a GPU with"
            " the learner. Set rollout.sleep=none"
        )
    if r.name == "vllm" and r.sleep != "none":
        yield f"rollout.sleep={r.sleep} is not supported with rollout.name=vllm: set it to none"


def _truncation_contradictions(c: Config) -> Iterator[str]:
    """Yield a message for each value that does not work with `rollout.top_p` or `rollout.top_k`."""
    r = c.rollout
    if not r.is_truncated:
        return
    what = f"rollout.top_p={r.top_p:g} and rollout.top_k={r.top_k}"
    off = "Set rollout.top_p=1 and rollout.top_k=0"
    if not r.top_k:
        yield (
            f"rollout.top_p={r.top_p:g} without rollout.top_k: where the policy is unsure, almost"
            " all of the vocabulary would be kept, stored and sent with each token. Set"
            " rollout.top_k too, for example to 100"
        )
    if r.top_k == 1:
        yield "rollout.top_k=1: one token is kept, so that nothing can be learned. Set 2 or more"
    if r.name == "vllm":
        yield (
            f"{what} with rollout.name=vllm: agentrl does not read from vLLM which tokens it keeps,"
            " and the trainer must learn over the same ones. Set rollout.name=sglang or local"
        )
    if c.teacher.model:
        yield (
            f"{what} with teacher.model={c.teacher.model}: a teacher scores over all tokens, the"
            f" policy over the kept ones. {off}"
        )
    if c.data.is_recorded:
        yield f"{what} with data.train={c.data.train}, whose answers are recorded. {off}"


def _replay_contradictions(c: Config) -> Iterator[str]:
    """Yield a message for each value that does not work with `rollout.router_replay`."""
    if not c.rollout.router_replay:
        return
    what, off = "rollout.router_replay=true", "Set it to false"
    if c.rollout.name == "vllm":
        yield (
            f"{what} with rollout.name=vllm: agentrl does not read from vLLM which experts it"
            f" chooses. {off}, or set rollout.name=sglang or local"
        )
    if c.data.is_recorded:
        yield (
            f"{what} with data.train={c.data.train}: answers are recorded without experts. {off}"
        )


def _fp8_contradictions(c: Config) -> Iterator[str]:
    """Yield a message for each value that servers with matrices of 8 bits do not work with."""
    r = c.rollout
    if not r.is_fp8:
        return
    what = "rollout.quantization=fp8"
    if r.name != "sglang" or r.urls:
        key = "rollout.urls" if r.urls else f"rollout.name={r.name}"
        yield f"{what} with {key}: it needs SGLang servers that the run starts. Set it to none"
    if c.model.quantization != "none":
        yield (
            f"{what} with model.quantization={c.model.quantization}: weights that are rounded twice"
            " are another policy. Set one of them to none"
        )
    if c.model.lora_rank and r.lora == "merge":
        yield (
            f"{what} with rollout.lora=merge: only weights that LoRA adapts are sent, but a server"
            " cannot quantize the others. Set rollout.lora=adapter"
        )
    if r.sync == "disk":
        yield f"{what} with rollout.sync=disk: files are loaded unquantized. Set rollout.sync=auto"
    if not c.algorithm.tis_cap:
        yield (
            f"algorithm.tis_cap=0 with {what}: the engine's probabilities differ from the"
            " trainer's, which only importance weights correct. Set algorithm.tis_cap=2"
        )


def _quantization_contradictions(c: Config) -> Iterator[str]:
    """Yield a message for each value that a quantized base does not work with."""
    if c.model.quantization == "none":
        return
    what = f"model.quantization={c.model.quantization}"
    if not c.model.lora_rank:
        yield (
            f"{what} with model.lora_rank=0: weights of 4 bits cannot learn. Set model.lora_rank,"
            " for example to 32"
        )
    if c.rollout.lora == "adapter" or c.rollout.name == "vllm":
        key = "rollout.name=vllm" if c.rollout.name == "vllm" else "rollout.lora=adapter"
        fix = "rollout.name=sglang" if c.rollout.name == "vllm" else "rollout.lora=merge"
        yield (
            f"{what} with {key}: the engine would add the adapter to the base as it is in the"
            f" files, which is another policy than the rounded base with the adapter. Set {fix}"
        )
    if c.optim.offload == "all":
        yield f"{what} with optim.offload=all: 4-bit weights stay on the GPU. Set it to optimizer"
