"""The command-line arguments of inference servers: `rollout.launch`."""

from __future__ import annotations

from collections.abc import Sequence

RESERVED_ARGUMENTS = {
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
"""Server arguments that agentrl sets, and the config key for each ("" if there is none)."""


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise `ValueError` if an argument is set by agentrl, or is more than one argument."""
    for argument in arguments:
        if argument.startswith("--") and " " in argument:
            separate = ", ".join(argument.split())
            raise ValueError(f"{argument!r} is more than one argument: write [{separate}]")
        name = argument.partition("=")[0].replace("_", "-")
        # Command-line parsers accept a prefix of a name. No other argument of the servers is a
        # prefix of one of these.
        is_prefix = len(name) > len("--") and name.startswith("--")
        for reserved, config_key in RESERVED_ARGUMENTS.items():
            if name == reserved or (is_prefix and reserved.startswith(name)):
                raise ValueError(f"{argument} ({reserved}) is set by {config_key or 'agentrl'}")
