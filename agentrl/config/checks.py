"""What no run can mean, and what would do nothing, though each value alone is fine.

Only the config is judged here: what needs rows or a model is checked where those are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from agentrl.config.sources import assignment
from agentrl.registry import advantage_estimators

if TYPE_CHECKING:
    from agentrl.config.sections import Config


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


def doubtful(c: Config) -> Iterator[str]:
    """What a run can mean, but its user may not."""
    a, o, r, steps = c.algorithm, c.optim, c.reward, c.trainer.total_steps
    if 0 < steps <= o.lr_warmup_steps:
        yield (
            f"optim.lr_warmup_steps={o.lr_warmup_steps} of trainer.total_steps={steps}: the"
            " learning rate never reaches optim.lr"
        )
    if a.adv_estimator != "turn_rloo":
        return
    if not (r.turn_weight or r.tool_weight or a.kl_reward_coef):
        yield (
            "algorithm.adv_estimator=turn_rloo, but turns earn nothing: reward.turn_weight and"
            " reward.tool_weight are 0. It is rloo then, but for turns that not all rollouts of a"
            " prompt reach"
        )
    if a.loss_agg_mode not in ("seq-mean-token-sum", "seq-mean-token-sum-norm"):
        yield (
            f"algorithm.loss_agg_mode={a.loss_agg_mode} biases the gradient of"
            " algorithm.adv_estimator=turn_rloo, which is exact with seq-mean-token-sum"
        )


STARTING = (
    "engines", "tensor_parallel_size", "python", "launch", "gpu_memory_utilization", "sleep",
)  # fmt: skip
"""Keys of `rollout` about servers that the run starts."""
VALIDATION = ("trainer.test_freq", "trainer.val_before_train")


def without_effect(c: Config) -> list[str]:
    """What was set but does nothing in this run, each with the reason."""
    a, o, r, t = c.algorithm, c.optim, c.reward, c.trainer
    # What the algorithm's name sets was not set by hand.
    defaults = type(c).model_validate({"algorithm": {"name": a.name}})
    lora = "" if c.model.lora_rank else "model.lora_rank is 0"
    estimator = f"algorithm.adv_estimator is {a.adv_estimator}"
    critic = "" if a.critic else estimator
    # What an estimator of the user's own reads is not known.
    own = a.adv_estimator not in advantage_estimators.shipped
    ratio_is_1 = "" if a.ppo_epochs > 1 or a.mini_batch_size else "one optimizer step a batch"
    on_cpu = "trainer.device is cpu" if t.device == "cpu" else ""
    unfiltered = "" if a.filter_groups else "algorithm.filter_groups is false"
    local = "" if c.rollout.name != "local" else "rollout.name is local"
    started = local or ("rollout.urls names servers that run already" if c.rollout.urls else "")
    reasons = {
        "rollout.urls": local,
        "rollout.sync": local or ("LoRA goes as an adapter" if c.rollout.lora == "adapter" else ""),
        "rollout.lora": local or lora,
        **dict.fromkeys((f"rollout.{leaf}" for leaf in STARTING), started),
        # vLLM takes seeds by request: they count at a server that runs already.
        "rollout.deterministic": "" if c.rollout.name == "vllm" else started,
        "model.lora_alpha": lora,
        "model.lora_target_modules": lora,
        "algorithm.gamma": ""
        if own or a.critic or a.adv_estimator == "reinforce_plus_plus"
        else estimator,
        "algorithm.lam": "" if own else critic,
        "algorithm.norm_adv_by_std": "" if own or a.adv_estimator == "grpo" else estimator,
        "algorithm.loss_scale": ""
        if a.loss_agg_mode == "seq-mean-token-sum-norm"
        else f"algorithm.loss_agg_mode is {a.loss_agg_mode}",
        "algorithm.kl_type": "" if a.kl_loss_coef or a.kl_reward_coef else "the KL weighs 0",
        "algorithm.kl_target": "" if a.kl_reward_coef else "algorithm.kl_reward_coef is 0",
        "algorithm.kl_horizon": "" if a.kl_target else "algorithm.kl_target is 0",
        "algorithm.clip_low": ratio_is_1,
        "algorithm.clip_high": ratio_is_1,
        "algorithm.dual_clip": ratio_is_1
        or ("algorithm.policy_loss is cispo" if a.policy_loss == "cispo" else ""),
        "algorithm.value_clip": critic or ratio_is_1,
        "algorithm.tis_level": "" if a.tis_cap else "algorithm.tis_cap is 0",
        "algorithm.tis_mode": "" if a.tis_cap else "algorithm.tis_cap is 0",
        "algorithm.critic_warmup": critic,
        "algorithm.max_gen_batches": unfiltered,
        "data.gen_batch_size": unfiltered,
        "optim.critic_lr": critic,
        "optim.lr_final": "no step is left after the rate has risen"
        if 0 < t.total_steps <= o.lr_warmup_steps + 1
        else "",
        "optim.compile": on_cpu,
        "optim.offload": on_cpu,
        "reward.overlong_penalty": "" if r.overlong_buffer else "reward.overlong_buffer is 0",
        "reward.overlong_buffer": "" if r.overlong_penalty else "reward.overlong_penalty is 0",
        "trainer.placement": started or on_cpu,
        "trainer.total_epochs": "trainer.total_steps is set" if t.total_steps else "",
    }
    if not c.data.val:
        paths = [f"val.{leaf}" for leaf in type(c.val).model_fields]
        reasons |= dict.fromkeys([*paths, *VALIDATION], "data.val is empty")
    return [
        f"{assignment(path, c.value(path))} has no effect: {reason}"
        for path, reason in reasons.items()
        if reason and c.value(path) != defaults.value(path)
    ]
