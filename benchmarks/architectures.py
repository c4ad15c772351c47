"""Compare the learner on different architectures, and see which of them SGLang serves.

    python benchmarks/architectures.py --case update             # a GPU; about 0.6B active weights
    python benchmarks/architectures.py --case served             # a GPU: three steps each
    python benchmarks/architectures.py --small --case served --python tests/sglang_cpu/python

update  tokens per second and MFU of `Learner.update`, each model in its own mode of rows
served  a run of three steps with a server: publishing, canary, mismatch

Every line is a JSON object: name, value, unit, context. MFU counts 6 FLOPs per active weight and
token, and no attention: 0.1 of 0.6B at 2,000 tokens per row. So it is lower than that of
learner.py, and comparable between models of different layers.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from workload import serving
from workload.models import draw_weights
from workload.rows import Rollouts, draw, long_tailed
from workload.timing import print_figure
from workload.updates import measure, memory, peak_flops, release

from agentrl import reward
from agentrl.config import Config, load_config
from agentrl.errors import AgentRLError
from agentrl.learner.algorithms import make_targets
from agentrl.learner.learner import Learner
from agentrl.record import METRICS, read_metrics
from agentrl.testing.tokenizer import byte_tokenizer
from agentrl.trainer import Trainer

Keys = dict[str, Any]
LINEAR: Keys = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "full_attention_interval": 4,
}
EXPERTS: Keys = {"num_experts_per_tok": 8}
UNTIED: Keys = {"tie_word_embeddings": False}
"""As published: SGLang ignores that the config of such a model ties its embeddings."""
MODELS: dict[str, tuple[str, Keys]] = {
    "qwen2.5": ("qwen2", {"intermediate_size": 4864}),
    "qwen3": ("qwen3", {"intermediate_size": 4096, "head_dim": 128}),
    "qwen3-moe": (
        "qwen3_moe",
        {"head_dim": 128, "num_experts": 64, "moe_intermediate_size": 512, **EXPERTS, **UNTIED},
    ),
    "qwen3.5": ("qwen3_5_text", {"intermediate_size": 3584, "head_dim": 256, **LINEAR}),
    "gpt-oss": (
        "gpt_oss",
        {
            **{"intermediate_size": 512, "head_dim": 64, "num_local_experts": 64},
            **{"swiglu_limit": 7.0, **EXPERTS, **UNTIED},
        },
    ),
    "gemma3": (
        "gemma3_text",
        {"intermediate_size": 4096, "head_dim": 128, "sliding_window": 512},
    ),
}
"""The type of each config, and its values: 3B of weights with experts, 0.6B otherwise. SGLang reads
keys that published configs have and those of transformers may lack (`swiglu_limit`)."""
SHAPE: Keys = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
SERVED: Keys = {"num_hidden_layers": 4, "vocab_size": 512}
"""Fewer layers and tokens for runs with a server."""
PROCESSORS: Keys = {
    "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessorFast"},
    "video_preprocessor_config.json": {"video_processor_type": "Qwen3VLVideoProcessor"},
}
"""Files of a model for images, without which SGLang does not load it."""
PROCESSOR: Keys = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
}
SMALL: Keys = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "num_experts": 8,
    "num_local_experts": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
"""For a CPU."""


def make_model(name: str, changes: Keys, device: str) -> PreTrainedModel:
    """Return a random model of an architecture, in bfloat16, or in float32 on a CPU."""
    kind, keys = MODELS[name]
    tokenizer: Any = byte_tokenizer()
    known = SHAPE | keys
    config = CONFIG_MAPPING[kind](
        **(known | {key: value for key, value in changes.items() if key in known}),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return draw_weights(config, device)


def save_model(name: str, changes: Keys, device: str, folder: Path) -> tuple[int, int]:
    """Save a random model, and return the number of its weights, and of those of one token."""
    model = make_model(name, changes, device)
    model.save_pretrained(folder)
    add_keys(folder, MODELS[name][1])
    byte_tokenizer().save_pretrained(folder)
    total = sum(weight.numel() for weight in model.parameters())
    text: Any = model.config
    count = getattr(text, "num_experts", 0) or getattr(text, "num_local_experts", 0)
    stacked = sum(w.numel() for w in model.parameters() if count and w.dim() == 3)
    idle = stacked * (1 - text.num_experts_per_tok / count) if count else 0
    head: Any = model.get_output_embeddings()
    lookups = 0 if text.tie_word_embeddings else head.weight.numel()
    convolutions = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Conv1d))
    return total, int(total - idle - lookups - convolutions)


def add_keys(folder: Path, keys: Keys) -> None:
    """Add keys to a saved config that transformers left out, though SGLang reads them."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    text |= keys | text
    (folder / "config.json").write_text(json.dumps(config))


def add_part_for_images(folder: Path) -> None:
    """Turn a saved Qwen3.5 into a model for text and images, as it is published."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    vision = {"depth": 1, "hidden_size": 128, "intermediate_size": 128, "num_heads": 2}
    vision |= {"out_hidden_size": model.config.hidden_size, "num_position_embeddings": 16}
    config = CONFIG_MAPPING["qwen3_5"](
        text_config=model.config.to_dict(),
        vision_config=vision,
        tie_word_embeddings=model.config.tie_word_embeddings,
    )
    whole = AutoModelForImageTextToText.from_config(config, dtype=model.dtype)
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.save_pretrained(folder)
    add_keys(folder, MODELS["qwen3.5"][1])
    for name, own in PROCESSORS.items():
        (folder / name).write_text(json.dumps(PROCESSOR | own))


def update(args: argparse.Namespace, folder: Path) -> None:
    """Report the tokens per second of each architecture, one after the other."""
    peak, reached = peak_flops(args.peak), {}
    for name in args.only:
        try:
            total, active = save_model(name, args.changes, args.device, folder / name)
            release()
            vocabulary = (SHAPE | args.changes)["vocab_size"]
            lengths = long_tailed(args.mean)
            rollouts = draw(args.trajs, 8, args.prompt, lengths, vocabulary, 0)
            figures = time_update(folder / name, rollouts, vocabulary, args)
            tokens = figures.pop("tokens_per_s")
            reached[name] = 6 * active * tokens / peak
            print_figure(
                f"architectures/{name}",
                tokens,
                "tokens/s",
                weights=total,
                active_weights=active,
                mfu=round(reached[name], 4),
                of_qwen2_5=round(reached[name] / reached.get("qwen2.5", torch.nan), 3),
                real_tokens=rollouts.tokens,
                recompute=args.recompute,
                **figures,
                **memory(),
            )
        except Exception as e:
            print_figure(f"architectures/{name}", None, "tokens/s", why=f"{e!r}"[:400])
        release()


def time_update(
    folder: Path, rollouts: Rollouts, vocabulary: int, args: argparse.Namespace
) -> dict[str, Any]:
    batch = rollouts.batch(vocabulary)
    config = Config.model_validate(
        {
            "optim": {"micro_batch_tokens": args.tokens, "recompute": args.recompute},
            "trainer": {"device": args.device},
        }
    )
    learner = Learner(folder, config, total_steps=1000)

    def step() -> None:
        targets = make_targets(batch, config, learner.old_logprobs(batch), None, None)
        learner.update(batch, targets, 1)

    took = measure({"update": step}, args.steps)["update"]
    mode, reason = learner.ranks.mode()
    return {
        "tokens_per_s": rollouts.tokens / took.seconds,
        "mode": mode.value,
        "why_not_packed": reason,
        "step_s": round(took.seconds, 4),
        "warmup_s": round(took.warmup_s, 2),
    }


def served(args: argparse.Namespace, folder: Path) -> None:
    """Train each architecture for three steps with a server, and report what happened."""
    reward("checksum")(checksum)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Say {k}."}) + "\n" for k in range(16)))
    for name in args.only:
        save_model(name, SERVED | args.changes, args.device, folder / name)
        if name == "qwen3.5":
            add_part_for_images(folder / name)
        release()
        output, why = folder / "runs" / name, ""
        try:
            Trainer(load_config(flags=keys_of(args, folder / name, rows, output))).run()
        except AgentRLError as e:
            why = str(e)
        steps = dict(read_metrics(output / METRICS))
        last: Keys = steps[max(steps)] if steps else {}
        print_figure(
            f"served/{name}",
            len(steps),
            "steps of 3",
            nats=last.get("rollout_corr/logprob_diff_mean"),
            canary_nats=last.get("canary/mismatch"),
            publish_s=last.get("timing_s/update_weights"),
            why=why[-600:],
        )
        gc.collect()


def keys_of(args: argparse.Namespace, model: Path, rows: Path, output: Path) -> Keys:
    return serving.engine_keys(args) | {
        "data.train": str(rows),
        "data.batch_size": 4,
        "model.path": str(model),
        "optim.lr": 1e-3,
        "reward.function": "checksum",
        "rollout.n": 4,
        "rollout.max_turn_tokens": 64,
        "rollout.max_trajectory_tokens": 128,
        "trainer.output": str(output),
        "trainer.total_steps": 3,
    }


def checksum(trajectory: Any) -> float:
    """Return a number that depends on the text, so that rewards differ."""
    return zlib.crc32(trajectory.final_text.encode()) % 100 / 100


def main() -> None:
    parser = serving.parser(__doc__)
    add = parser.add_argument
    add("--case", choices=("update", "served"), default="update")
    add("--only", nargs="+", choices=MODELS, default=list(MODELS), help="qwen2.5 is compared with")
    add("--trajs", type=int, default=64)
    add("--prompt", type=int, default=400, help="tokens of a prompt")
    add("--mean", type=float, default=1500, help="response tokens")
    add("--tokens", type=int, default=32768, help="tokens of a micro-batch")
    add("--recompute", action="store_true")
    add("--steps", type=int, default=3)
    add("--peak", type=float, default=0.0, help="FLOP/s; 0: an H200's, or this CPU's")
    args = serving.parse(parser)
    args.changes = SMALL if args.small else {}
    if args.small:
        args.trajs, args.prompt, args.mean, args.steps = 8, 20, 40, 1
    with tempfile.TemporaryDirectory() as folder:
        {"update": update, "served": served}[args.case](args, Path(folder))


if __name__ == "__main__":
    main()
