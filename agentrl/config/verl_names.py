"""What verl's config keys are called here: said to whoever types one of them."""

from __future__ import annotations

from collections.abc import Collection

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"

_RENAMED = {
    "data.train_files": "data.train",
    "data.val_files": "data.val",
    "data.train_batch_size": "data.batch_size",
    "algorithm.filter_groups.max_num_gen_batches": "algorithm.max_gen_batches",
    "trainer.critic_warmup": "algorithm.critic_warmup",
    "data.max_response_length": "rollout.max_trajectory_tokens",
    "data.seed": "trainer.seed",
    "data.apply_chat_template_kwargs": "model.template_kwargs",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.lora_rank": "model.lora_rank",
    "actor_rollout_ref.model.lora_alpha": "model.lora_alpha",
    "actor_rollout_ref.model.target_modules": "model.lora_target_modules",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "optim.micro_batch_tokens",
    f"{_ACTOR}.clip_ratio_low": "algorithm.clip_low",
    f"{_ACTOR}.clip_ratio_high": "algorithm.clip_high",
    f"{_ACTOR}.clip_ratio_c": "algorithm.dual_clip",
    f"{_ACTOR}.policy_loss.loss_mode": "algorithm.policy_loss",
    f"{_ACTOR}.entropy_coeff": "algorithm.entropy_coef",
    f"{_ACTOR}.kl_loss_coef": "algorithm.kl_loss_coef",
    f"{_ACTOR}.ppo_epochs": "algorithm.ppo_epochs",
    f"{_ACTOR}.grad_clip": "optim.max_grad_norm",
    f"{_ACTOR}.use_torch_compile": "optim.compile",
    f"{_ACTOR}.optim.lr": "optim.lr",
    f"{_ACTOR}.optim.lr_warmup_steps": "optim.lr_warmup_steps",
    f"{_ACTOR}.optim.weight_decay": "optim.weight_decay",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "optim.recompute",
    f"{_ROLLOUT}.name": "rollout.name",
    f"{_ROLLOUT}.temperature": "rollout.temperature",
    f"{_ROLLOUT}.n": "rollout.n",
    f"{_ROLLOUT}.response_length": "rollout.max_trajectory_tokens",
    f"{_ROLLOUT}.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    f"{_ROLLOUT}.tensor_model_parallel_size": "rollout.tensor_parallel_size",
    f"{_ROLLOUT}.data_parallel_size": "rollout.engines",
    f"{_ROLLOUT}.full_determinism": "rollout.deterministic",
    f"{_ROLLOUT}.seed": "trainer.seed",
    f"{_ROLLOUT}.val_kwargs.temperature": "val.temperature",
    f"{_ROLLOUT}.val_kwargs.top_p": "val.top_p",
    f"{_ROLLOUT}.val_kwargs.top_k": "val.top_k",
    f"{_ROLLOUT}.val_kwargs.n": "val.n",
    f"{_ROLLOUT}.multi_turn.max_assistant_turns": "rollout.max_turns",
    f"{_ROLLOUT}.multi_turn.tool_config_path": "files",
    f"{_ROLLOUT}.multi_turn.function_tool_path": "files",
    f"{_ROLLOUT}.multi_turn.interaction_config_path": "files",
    f"{_ROLLOUT}.agent.default_agent_loop": "data.agent_name",
    "critic.optim.lr": "optim.critic_lr",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.norm_adv_by_std",
    f"{_ACTOR}.loss_agg_mode": "algorithm.loss_agg_mode",
    f"{_ACTOR}.loss_scale_factor": "algorithm.loss_scale",
    "critic.cliprange_value": "algorithm.value_clip",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_reward_coef",
    "algorithm.kl_ctrl.target_kl": "algorithm.kl_target",
    "algorithm.kl_ctrl.horizon": "algorithm.kl_horizon",
    "algorithm.rollout_correction.rollout_is_threshold": "algorithm.tis_cap",
    f"{_ACTOR}.tis_imp_ratio_cap": "algorithm.tis_cap",
    "custom_reward_function.reward_kwargs": "reward.kwargs",
    "reward.custom_reward_function.reward_kwargs": "reward.kwargs",
    "trainer.total_training_steps": "trainer.total_steps",
    "trainer.default_local_dir": "trainer.output",
}

_OTHERWISE = {
    f"{_ROLLOUT}.agent.agent_loop_config_path": "Here: an `@agent_loop` in a file of `files`;"
    " the documentation's page on verl shows how one of verl's becomes one",
    "algorithm.use_kl_in_reward": "Here: algorithm.kl_reward_coef above 0 switches it on",
    "algorithm.kl_ctrl.type": "Here: algorithm.kl_target above 0 for verl's adaptive",
    "algorithm.kl_penalty": "Here: algorithm.kl_type, k1 (verl's kl), k2 (mse) or k3 (low_var_kl)",
    f"{_ACTOR}.use_kl_loss": "Here: algorithm.kl_loss_coef above 0 switches it on",
    f"{_ACTOR}.kl_loss_type": "Here: algorithm.kl_type, k1 (verl's kl), k2 (mse) or"
    " k3 (low_var_kl)",
    f"{_ACTOR}.clip_ratio": "Here: algorithm.clip_low and algorithm.clip_high",
    f"{_ACTOR}.ppo_mini_batch_size": "Here: algorithm.mini_batch_size, which counts rollouts:"
    " verl's number times rollout.n",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": "Here: optim.micro_batch_tokens, which counts tokens",
    "critic.ppo_micro_batch_size_per_gpu": "Here: optim.micro_batch_tokens, which counts tokens",
    f"{_ACTOR}.use_dynamic_bsz": "Not needed: optim.micro_batch_tokens always bounds by tokens",
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": "Here: optim.micro_batch_tokens, which counts"
    " tokens",
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": "Here: optim.lr_warmup_steps, in steps",
    f"{_ACTOR}.optim.lr_scheduler_type": "Here: optim.lr_final; the rate is linear in the step",
    f"{_ACTOR}.optim.warmup_style": "Here: optim.lr_final, 1 (verl's constant) or the last step's"
    " share; the rate is linear in the step",
    f"{_ACTOR}.optim.betas": "Not here: they are verl's defaults, 0.9 and 0.999",
    f"{_ACTOR}.fsdp_config.param_offload": "Here: optim.offload=all",
    f"{_ACTOR}.fsdp_config.offload_policy": "Here: optim.offload=all",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "Here: optim.offload=all",
    f"{_ACTOR}.fsdp_config.optimizer_offload": "Here: optim.offload=optimizer",
    f"{_ACTOR}.fsdp_config.reshard_after_forward": "Not needed: weights that leave room enough stay"
    " gathered",
    f"{_ACTOR}.fsdp_config.fsdp_size": "Not here: weights are spread over all GPUs that learn",
    f"{_ACTOR}.fsdp_config.model_dtype": "Not here: what learns is float32, passes are bfloat16",
    f"{_ACTOR}.fsdp_config.dtype": "Not here: what learns is float32, passes are bfloat16",
    f"{_ACTOR}.strategy": "Not here: weights are spread by FSDP2",
    f"{_ACTOR}.shuffle": "Not needed: the rows of a step come shuffled",
    "actor_rollout_ref.model.use_remove_padding": "Not needed: rows are always packed without"
    " padding",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "Here: optim.micro_batch_tokens,"
    " which counts tokens",
    "trainer.balance_batch": "Not needed: rows are always balanced over the GPUs by tokens",
    "actor_rollout_ref.model.lora.merge": "Here: rollout.lora=merge",
    "actor_rollout_ref.hybrid_engine": "Here: trainer.placement, colocated (verl's true) or"
    " separate",
    f"{_ROLLOUT}.mode": "Not needed: rollouts are always asynchronous",
    f"{_ROLLOUT}.free_cache_engine": "Here: rollout.sleep, all or kv_cache (verl's true), or none",
    f"{_ROLLOUT}.multi_stage_wake_up": "Not needed: weights come back before the cache",
    f"{_ROLLOUT}.load_format": "Not needed: a server loads the model by itself, and is sent the"
    " policy before the first step",
    f"{_ROLLOUT}.layered_summon": "Not needed: weights go in parts of 512 MiB",
    f"{_ROLLOUT}.update_weights_bucket_megabytes": "Not here: weights go in parts of 512 MiB",
    f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": "Not here: weights go in parts"
    " of 512 MiB",
    f"{_ROLLOUT}.checkpoint_engine.backend": "Here: rollout.sync, auto, disk, ipc or nccl",
    f"{_ROLLOUT}.engine_kwargs": "Here: rollout.launch, a list of the server's arguments",
    f"{_ROLLOUT}.enforce_eager": "Here: rollout.launch, with --disable-cuda-graph (SGLang) or"
    " --enforce-eager (vLLM)",
    f"{_ROLLOUT}.max_model_len": "Here: rollout.launch, with --context-length (SGLang) or"
    " --max-model-len (vLLM)",
    f"{_ROLLOUT}.max_num_seqs": "Here: rollout.launch, with --max-running-requests (SGLang) or"
    " --max-num-seqs (vLLM)",
    f"{_ROLLOUT}.max_num_batched_tokens": "Here: rollout.launch, with --chunked-prefill-size"
    " (SGLang) or --max-num-batched-tokens (vLLM)",
    f"{_ROLLOUT}.enable_prefix_caching": "Not needed: servers keep prefixes by themselves",
    f"{_ROLLOUT}.dtype": "Not here: servers compute in bfloat16, in float16 where the model is"
    " published so, and on a CPU in float32",
    f"{_ROLLOUT}.prompt_length": "Not here: prompts are never cut; the model's context is the"
    " limit",
    f"{_ROLLOUT}.agent.num_workers": "Not needed: one process plays all episodes",
    f"{_ROLLOUT}.top_p": "Not here: training samples from the whole distribution. For validation:"
    " val.top_p",
    f"{_ROLLOUT}.top_k": "Not here: training samples from the whole distribution. For validation:"
    " val.top_k",
    f"{_ROLLOUT}.val_kwargs.do_sample": "Here: val.temperature; val.greedy adds a greedy pass",
    f"{_ROLLOUT}.calculate_log_probs": "Not needed: the engine's logprobs are always kept",
    f"{_ROLLOUT}.multi_turn.enable": "Not needed: each row's agent_name says how it is played",
    f"{_ROLLOUT}.multi_turn.format": "Here: rollout.tool_format; auto follows the chat template",
    f"{_ROLLOUT}.multi_turn.max_user_turns": "Here: rollout.max_turns, turns of the assistant",
    f"{_ROLLOUT}.multi_turn.max_tool_response_length": "Here: tools.max_result_tokens, in tokens",
    f"{_ROLLOUT}.multi_turn.tool_response_truncate_side": "Here: tools.truncate, head (verl's"
    " left), tail (right) or middle",
    f"{_ROLLOUT}.multi_turn.use_inference_chat_template": "Here: rollout.history_thinking, keep or"
    " strip",
    f"{_ROLLOUT}.multi_turn.tokenization_sanity_check_mode": "Not needed: what was sampled is never"
    " encoded again, and the chat template is proven before the run",
    f"{_ROLLOUT}.multi_turn.max_parallel_calls": "Here: rollout.max_tool_calls, for the whole"
    " trajectory",
    "algorithm.rollout_correction.rollout_is": "Here: algorithm.tis_level, token or sequence;"
    " algorithm.tis_cap=0 for verl's null",
    "algorithm.rollout_correction.rollout_rs": "Here: algorithm.tis_mode=mask, at the level of"
    " algorithm.tis_level",
    "algorithm.rollout_correction.rollout_rs_threshold": "Here: algorithm.tis_cap, with"
    " algorithm.tis_mode=mask; its reciprocal is the lower one",
    "algorithm.rollout_correction.bypass_mode": "Not here: the ratio is always to the trainer's own"
    " logprobs",
    "algorithm.rollout_correction.rollout_is_batch_normalize": "Not here: weights stay as they are",
    "data.max_prompt_length": "Not here: prompts are never cut; the model's context is the limit",
    "data.filter_overlong_prompts": "Not here: prompts are never cut; the model's context is the"
    " limit",
    "data.truncation": "Not here: prompts are never cut",
    "data.prompt_key": "Not here: the column is called prompt",
    "data.reward_fn_key": "Not here: the column is called data_source",
    "data.return_raw_chat": "Not needed",
    "custom_reward_function.path": "Here: reward.function=path.py:function",
    "custom_reward_function.name": "Here: reward.function=path.py:function",
    "reward.custom_reward_function.path": "Here: reward.function=path.py:function",
    "reward.custom_reward_function.name": "Here: reward.function=path.py:function",
    "trainer.project_name": "Not here: trainer.output names the run",
    "trainer.experiment_name": "Not here: trainer.output names the run",
    "trainer.max_actor_ckpt_to_keep": "Not here: the two newest checkpoints are kept",
    "trainer.max_critic_ckpt_to_keep": "Not here: the two newest checkpoints are kept",
    "trainer.resume_mode": "Here: trainer.resume, auto, never (verl's disable) or a path",
    "trainer.resume_from_path": "Here: trainer.resume=PATH",
    "algorithm.filter_groups.enable": "Here: algorithm.filter_groups=true",
    "algorithm.filter_groups.metric": "Not needed: groups are judged by their advantages",
    "reward_model.overlong_buffer.enable": "Here: reward.overlong_buffer above 0 switches it on",
    "reward_model.overlong_buffer.len": "Here: reward.overlong_buffer",
    "reward_model.overlong_buffer.penalty_factor": "Here: reward.overlong_penalty",
}

VERL_NAMES = {
    **{old: f"Here: {new}" for old, new in _RENAMED.items()},
    **_OTHERWISE,
}
"""verl's dotted key -> the word on what it is here."""

VERL_SECTIONS = ("actor_rollout_ref.", "critic.", "custom_reward_function.", "reward_model.")
"""Sections that only verl has."""


def verl_value(path: str, value: object) -> str:
    """The word on a value of verl's under a key that is here, too; else empty."""
    if path in ("trainer.save_freq", "trainer.test_freq") and value == -1:
        return "verl's -1 is 0 here"
    if path == "trainer.logger" and "console" in (value if isinstance(value, list) else [value]):
        return "the console is always on: leave it out"
    return ""


def verl_name(path: str, mappings: Collection[str]) -> str:
    """The word on a key of verl's, or on one below it; empty if verl has none of that name.

    Args:
        path: the key.
        mappings: the keys here below which there are keys of the user's own.
    """
    above, below = path, ""
    while above and above not in VERL_NAMES:
        above, _, name = above.rpartition(".")
        below = f".{name}{below}"
    own = below if _RENAMED.get(above) in mappings else ""
    return f"{VERL_NAMES[above]}{own}" if above else ""
