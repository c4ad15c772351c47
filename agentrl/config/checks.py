"""Notes on settings that have no effect, or probably not the intended one.

These checks read only the config. Those that need the rows or the model are in
`agentrl.preflight`.
"""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.config.sections import Config
from agentrl.config.sources import assignment
from agentrl.registry import advantage_estimators, policy_losses

LARGE_KL = 1.0
"""The coefficient of a KL penalty from which on it is probably a slip."""


def doubtful(c: Config) -> Iterator[str]:
    """Yield a note for each setting that is valid but probably not intended."""
    a, o, r, steps = c.algorithm, c.optim, c.reward, c.trainer.total_steps
    if 0 < steps <= o.lr_warmup_steps:
        yield (
            f"optim.lr_warmup_steps={o.lr_warmup_steps} of trainer.total_steps={steps}: the"
            " learning rate never reaches optim.lr"
        )
    for key in ("kl_loss_coef", "kl_reward_coef"):
        if (coefficient := getattr(a, key)) >= LARGE_KL:
            yield (
                f"algorithm.{key}={coefficient:g}: usual values are 0.001 to 0.1; with larger ones"
                " the policy stays at the reference and hardly learns"
            )
    if a.adv_estimator != "turn_rloo":
        return
    if not (r.turn_weight or r.tool_weight or a.kl_reward_coef):
        yield (
            "algorithm.adv_estimator=turn_rloo, but turns get no rewards: reward.turn_weight and"
            " reward.tool_weight are 0. The result is that of rloo, except for turns that not all"
            " rollouts of a prompt reach"
        )
    if a.loss_agg_mode not in ("seq-mean-token-sum", "seq-mean-token-sum-norm"):
        yield (
            f"algorithm.loss_agg_mode={a.loss_agg_mode} biases the gradient of"
            " algorithm.adv_estimator=turn_rloo; seq-mean-token-sum does not"
        )


SERVER_KEYS = (
    "engines", "tensor_parallel_size", "python", "launch", "gpu_memory_utilization", "sleep",
)  # fmt: skip
"""Keys of `rollout` that apply only to servers that the run starts."""
VALIDATION_KEYS = (
    "trainer.test_freq", "trainer.val_before_train", "trainer.keep_best", "trainer.patience",
)  # fmt: skip


def without_effect(c: Config) -> list[str]:
    """Return a note for each key that was set but has no effect in this run, with the reason."""
    # The algorithm's name sets some keys, which are not the user's settings.
    sections = {"algorithm": {"name": c.algorithm.name}, "teacher": c.teacher.model_dump()}
    defaults = type(c).model_validate(sections)
    reasons = _reasons_of_engines(c) | _reasons_of_algorithm(c) | _reasons_of_run(c)
    return [
        f"{assignment(path, c.stored_value(path))} has no effect: {reason}"
        for path, reason in reasons.items()
        if reason and c.value(path) != defaults.value(path)
    ]


def _reasons_of_engines(c: Config) -> dict[str, str]:
    """Return the reason why a key of agents and engines has no effect, or "", by key."""
    lora = "" if c.model.lora_rank else "model.lora_rank is 0"
    agent = "" if c.agent.command or c.agent.python else "agent.command and agent.python are empty"
    local = "" if c.rollout.name != "local" else "rollout.name is local"
    own_servers = local or ("rollout.urls names servers that run already" if c.rollout.urls else "")
    on_cpu = "trainer.device is cpu" if c.trainer.device == "cpu" else ""
    return {
        "agent.reward": agent,
        "agent.on_error": agent,
        "agent.env": "" if c.agent.command else agent or "a function has all variables",
        "agent.slots": agent,
        "rollout.urls": local,
        "rollout.sync": local
        or ("LoRA weights are sent as an adapter" if c.rollout.lora == "adapter" else ""),
        "rollout.lora": local or lora,
        **dict.fromkeys((f"rollout.{leaf}" for leaf in SERVER_KEYS), own_servers),
        # vLLM accepts seeds in requests, so the key also applies to a server that runs already.
        "rollout.deterministic": "" if c.rollout.name == "vllm" else own_servers,
        "model.lora_alpha": lora,
        "model.freeze_vision_tower": "with LoRA it is never trained" if c.model.lora_rank else "",
        "model.lora_target_modules": lora,
        "trainer.placement": own_servers or on_cpu,
    }


def _reasons_of_algorithm(c: Config) -> dict[str, str]:
    """Return the reason why a key of the algorithm has no effect, or "", by key."""
    a = c.algorithm
    estimator = f"algorithm.adv_estimator is {a.adv_estimator}"
    critic = "" if a.critic else estimator
    # An estimator that the user registered may read any key.
    is_custom = a.adv_estimator not in advantage_estimators.shipped
    ratio_is_1 = (
        "" if a.ppo_epochs > 1 or a.mini_batch_size else "there is one optimizer step per batch"
    )
    loss = f"algorithm.policy_loss is {a.policy_loss}"
    unclipped = loss if a.policy_loss == "sapo" else ""
    ungated = loss if a.policy_loss in policy_losses.shipped and not unclipped else ""
    unfiltered = "" if a.filter_groups else "algorithm.filter_groups is false"
    return {
        "algorithm.gamma": ""
        if is_custom or a.critic or a.adv_estimator == "reinforce_plus_plus"
        else estimator,
        "algorithm.lam": "" if is_custom else critic,
        "algorithm.whiten_advantages": estimator if a.adv_estimator == "opd" else "",
        "algorithm.norm_adv_by_std": "" if is_custom or a.adv_estimator == "grpo" else estimator,
        "algorithm.loss_scale": ""
        if a.loss_agg_mode == "seq-mean-token-sum-norm"
        else f"algorithm.loss_agg_mode is {a.loss_agg_mode}",
        "algorithm.kl_type": "" if a.kl_loss_coef or a.kl_reward_coef else "both KL weights are 0",
        "algorithm.kl_target": "" if a.kl_reward_coef else "algorithm.kl_reward_coef is 0",
        "algorithm.kl_horizon": "" if a.kl_target else "algorithm.kl_target is 0",
        "algorithm.clip_low": ratio_is_1 or unclipped,
        "algorithm.clip_high": ratio_is_1 or unclipped,
        "algorithm.dual_clip": ratio_is_1
        or unclipped
        or (loss if a.policy_loss == "cispo" else ""),
        "algorithm.tau_pos": ratio_is_1 or ungated,
        "algorithm.tau_neg": ratio_is_1 or ungated,
        "algorithm.value_clip": critic or ratio_is_1,
        "algorithm.tis_level": "" if a.tis_cap else "algorithm.tis_cap is 0",
        "algorithm.tis_mode": "" if a.tis_cap else "algorithm.tis_cap is 0",
        "algorithm.tis_low": "" if a.tis_mode == "mask" else "algorithm.tis_mode is truncate",
        "algorithm.critic_warmup": critic,
        "algorithm.max_gen_batches": unfiltered,
        "data.gen_batch_size": unfiltered,
        "optim.critic_lr": critic,
    }


def _reasons_of_run(c: Config) -> dict[str, str]:
    """Return the reason why a key of the learner, reward and run has no effect, or "", by key."""
    o, r, t = c.optim, c.reward, c.trainer
    on_cpu = "trainer.device is cpu" if t.device == "cpu" else ""
    reasons = {
        "optim.lr_final": "no step is left after the warm-up"
        if 0 < t.total_steps <= o.lr_warmup_steps + 1
        else "",
        "optim.compile": on_cpu,
        "optim.offload": on_cpu,
        "reward.overlong_penalty": "" if r.overlong_buffer else "reward.overlong_buffer is 0",
        "reward.overlong_buffer": "" if r.overlong_penalty else "reward.overlong_penalty is 0",
        "data.drop_last": "trainer.total_steps is set" if t.total_steps else "",
        "trainer.total_epochs": "trainer.total_steps is set" if t.total_steps else "",
        "trainer.profile_steps": "trainer.val_only is true" if t.val_only else "",
        "trainer.patience": "trainer.test_freq is 0" if not t.test_freq else "",
    }
    if not c.data.val:
        paths = [f"val.{leaf}" for leaf in type(c.val).model_fields]
        reasons |= dict.fromkeys([*paths, *VALIDATION_KEYS], "data.val is empty")
    return reasons
