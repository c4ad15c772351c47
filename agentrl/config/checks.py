"""What no run can mean, and what would do nothing, though each value alone is fine.

Only the config is judged here: what needs rows or a model is checked where those are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from agentrl.config.sources import assignment

if TYPE_CHECKING:
    from agentrl.config.sections import Config


def contradictions(c: Config) -> Iterator[str]:
    """The combinations of values that are refused, each with the way out."""
    a, t, r = c.algorithm, c.trainer, c.reward
    if a.kl_loss_coef > 0 and a.kl_reward_coef > 0:
        yield (
            f"algorithm.kl_loss_coef={a.kl_loss_coef} and algorithm.kl_reward_coef="
            f"{a.kl_reward_coef} penalize the same KL twice. Set one of them to 0"
        )
    if a.kl_type == "k1" and a.kl_loss_coef > 0:
        yield (
            f"algorithm.kl_type=k1 has an expected gradient of 0 as a loss:"
            f" algorithm.kl_loss_coef={a.kl_loss_coef} would only add noise. Set"
            " algorithm.kl_type=k2 or k3, or penalize the reward: algorithm.kl_reward_coef"
        )
    if c.val.temperature == 0 and c.val.n > 1:
        yield f"val.temperature=0 is greedy: all val.n={c.val.n} rollouts are alike. Set val.n=1"
    if a.name == "grpo" and c.rollout.n < 2 and not t.val_only:
        yield (
            "rollout.n=1 leaves algorithm.name=grpo nothing to compare with: every advantage is 0."
            " Set rollout.n to 2 or more"
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
    yield from _engine_contradictions(c)
    if not (r.outcome_weight or r.turn_weight or r.tool_weight):
        yield (
            "reward.outcome_weight, reward.turn_weight and reward.tool_weight are all 0: nothing is"
            " rewarded. Set one of them"
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
    if r.name == "vllm" and r.sleep != "none":
        yield f"rollout.sleep={r.sleep} is not for rollout.name=vllm. Set rollout.sleep=none"


STARTING = (
    "engines", "tensor_parallel_size", "python", "launch", "gpu_memory_utilization", "sleep",
)  # fmt: skip
"""Keys of `rollout` about servers that the run starts."""
VALIDATION = ("trainer.test_freq", "trainer.val_before_train")


def without_effect(c: Config) -> list[str]:
    """What was set but does nothing in this run, each with the reason."""
    a, defaults = c.algorithm, type(c)()
    lora = "" if c.model.lora_rank else "model.lora_rank is 0"
    critic = "" if a.name == "ppo" else f"algorithm.name is {a.name}"
    ratio_is_1 = "" if a.ppo_epochs > 1 or a.mini_batch_size else "one optimizer step a batch"
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
        "algorithm.gamma": critic,
        "algorithm.lam": critic,
        "algorithm.norm_adv_by_std": "" if a.name == "grpo" else f"algorithm.name is {a.name}",
        "algorithm.kl_type": "" if a.kl_loss_coef or a.kl_reward_coef else "the KL weighs 0",
        "algorithm.clip_low": ratio_is_1,
        "algorithm.clip_high": ratio_is_1,
        "algorithm.tis_level": "" if a.tis_cap else "algorithm.tis_cap is 0",
        "algorithm.tis_mode": "" if a.tis_cap else "algorithm.tis_cap is 0",
        "optim.critic_lr": critic,
        "trainer.total_epochs": "trainer.total_steps is set" if c.trainer.total_steps else "",
    }
    if not c.data.val:
        paths = [f"val.{leaf}" for leaf in type(c.val).model_fields]
        reasons |= dict.fromkeys([*paths, *VALIDATION], "data.val is empty")
    return [
        f"{assignment(path, c.value(path))} has no effect: {reason}"
        for path, reason in reasons.items()
        if reason and c.value(path) != defaults.value(path)
    ]
