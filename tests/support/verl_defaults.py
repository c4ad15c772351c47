"""Writes `agentrl/config/verl_defaults.csv`, the keys of verl's versions: `make verl-keys`.

It also writes the config of a run of verl 0.9.1, which the tests translate.

Each version's wheel has its config as one file for each training engine, which verl generates from
its Hydra files (`_generated_ppo_*trainer.yaml`). A row of the table is a key with a default, the
first and the last of the versions that have it, and the engines, if not all of a version do.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from support.installed_verl import VERL, VERSIONS, InstalledVerl

RUN = Path(__file__).parents[1] / "fixtures" / "verl" / "grpo_0.9.1.yaml"
"""What Hydra stores in `.hydra/config.yaml` of a run with `GRPO`."""
GRPO = [
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=False",
    "data.train_files=[data/gsm8k/train.parquet,data/math/train.parquet]",
    "data.val_files=[data/gsm8k/test.parquet,data/math/test.parquet]",
    "data.train_batch_size=1024",
    "data.max_prompt_length=1024",
    "data.max_response_length=2048",
    "data.filter_overlong_prompts=True",
    "data.truncation=error",
    "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_coef=0.001",
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "actor_rollout_ref.rollout.name=sglang",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
    "actor_rollout_ref.rollout.n=5",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24576",
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    "trainer.balance_batch=True",
    "trainer.logger=[console,wandb]",
    "trainer.project_name=verl_grpo_gsm8k_math",
    "trainer.experiment_name=qwen3_8b_grpo",
    "trainer.n_gpus_per_node=8",
    "trainer.save_freq=20",
    "trainer.test_freq=5",
    "trainer.total_epochs=15",
]
"""The settings of verl's example `grpo_trainer/run_qwen3_8b_fsdp.sh`."""
TABLE = Path(__file__).parents[2] / "agentrl" / "config" / "verl_defaults.csv"
ENGINES = {"": "dp", "megatron_": "megatron", "veomni_": "veomni", "torchtitan_": "torchtitan"}


def leaves(section: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a config with their values; `_target_` only names a class of verl's."""
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{name}.")
        elif name != "_target_":
            yield f"{path}{name}", value


def read_version(folder: Path) -> dict[tuple[str, str], str]:
    """Return the engines of each key and default of a version; "" if they are all its engines."""
    found: dict[tuple[str, str], list[str]] = {}
    engines = []
    for infix, engine in ENGINES.items():
        file = folder / f"verl/trainer/config/_generated_ppo_{infix}trainer.yaml"
        if file.exists():
            engines.append(engine)
            config = yaml.safe_load(file.read_text())
            if (folder / "verl/trainer/config/model_engine").exists():
                config["model_engine"] = engine  # It chooses the files, and is not in this one.
            for key, value in leaves(config):
                found.setdefault((key, json.dumps(value)), []).append(engine)
    return {row: "" if names == engines else " ".join(names) for row, names in found.items()}


def table(folders: dict[str, Path]) -> str:
    """Return the table of the versions in these folders, oldest version first."""
    versions = list(folders)
    ranges: dict[tuple[str, str, str], list[list[str]]] = {}
    for i, (version, folder) in enumerate(folders.items()):
        for (key, default), engines in read_version(folder).items():
            spans = ranges.setdefault((key, default, engines), [])
            if spans and spans[-1][1] == versions[i - 1]:
                spans[-1][1] = version
            else:
                spans.append([version, version])
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("key", "default", "first", "last", "engines"))
    for (key, default, engines), spans in ranges.items():
        writer.writerows((key, default, *span, engines) for span in spans)
    return text.getvalue()


def composed_run() -> str:
    """Return the config of a run of verl 0.9.1, as its own Hydra composes it."""
    verl = InstalledVerl("0.9.1")
    composed = verl.call("compose", GRPO, str(verl.folder / "verl/trainer/config"))
    verl.close()
    return composed


if __name__ == "__main__":
    TABLE.write_text(table({version: VERL / version for version in VERSIONS}))
    RUN.write_text(composed_run())
