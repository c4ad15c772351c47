"""Store the first steps of a run, or recompute what is stored from its tokens and texts.

    python recipes/check.py --add RUN recipes/NAME/results/MACHINE/RUN_NAME
    python recipes/check.py            # rewards, masks and advantages
    python recipes/check.py --weights  # also the updates: minutes for each run

A stored run is the folder of a run with less in it: `agentrl replay`, `show` and `view` read it.
Of the weights, it has a fingerprint of their change (`weights.json`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from agentrl.chat import load_tokenizer
from agentrl.cli.options import resolve_model
from agentrl.comparison import Expectation
from agentrl.learner.algorithms import make_targets
from agentrl.learner.batch import collate
from agentrl.learner.sharding import full_tensor
from agentrl.learner.state import read_state, shapes_in
from agentrl.record import METRICS, read_metrics
from agentrl.replay.replay import Replayer, replay
from agentrl.report.rescore import rescore
from agentrl.report.run import Run, load_run
from agentrl.trainer.checkpoint import open_checkpoint

STEPS = 10
"""The number of steps that `add` stores."""
SMALL: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 19,
    "write_statistics": False,
    "store_schema": False,
    "use_dictionary": False,
}
"""How a parquet file with few rows is written: a third of the size."""
WEIGHTS = "weights.json"
PARAMETER = "parameter."
"""The prefix of the names of weights in checkpoints, which also hold AdamW's moments."""
TOLERANCE = 0.02
"""The largest relative difference between a replay and the record; for the change of a tensor,
relative to its norm. With AVX2 instead of AVX-512, one tensor of facts differs by 0.0003, and the
others by less."""

BASE = "smollm2"
"""The model that all recipes start from, or imitate with: the tokenizer is the same."""

EXPECTED = {
    "calculator/results/h100/seed*": "val/reward/mean@1>=0.9",
    "facts/results/*/seed*": "val/reward/mean@1>=0.6",
    "my_agent/results/h100/seed*": "val/reward/mean@1>=0.9",
    "search/results/h100/seed*": "val/reward/mean@1>=0.9",
    "teacher/results/h100/seed*": "val/reward/mean@1>=0.85",
    "*/results/h100/control": "val/reward/mean@1<=0.4",
}
"""What the last validation of stored runs must keep, with the interval of `agentrl eval
--expect`."""

Fingerprint = dict[str, list[float]]


# --- storing -------------------------------------------------------------------------------------


def add(source: Path, folder: Path) -> None:
    """Store the first steps of a run, and a fingerprint if step `STEPS` has a checkpoint."""
    config = load_run(source).config
    recipe = yaml.safe_load((folder.parents[2] / "run.yaml").read_text())
    config["model"]["path"] = model = recipe["model"]["path"]  # its name, without a folder
    config["trainer"]["output"] = f"runs/{folder.name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    with (folder / METRICS).open("w") as metrics:
        for step, data in read_metrics(source / METRICS):
            if 1 <= step <= STEPS:
                metrics.write(json.dumps({"step": step, "data": data}) + "\n")
    for step in range(1, STEPS + 1):
        for part in ("trajectories/train", "trajectories/evicted", "learned/learned"):
            file = Path(f"{part}-{step:08d}.parquet")
            if (source / file).exists():
                (folder / file).parent.mkdir(exist_ok=True)
                pq.write_table(pq.read_table(source / file), folder / file, **SMALL)
    saved = source / f"global_step_{STEPS:08d}"
    if saved.is_dir() and not config["model"]["lora_rank"]:
        change = fingerprint(base_weights(model), saved_weights(saved))
        lines = [f'  "{name}": {json.dumps(numbers)}' for name, numbers in change.items()]
        (folder / WEIGHTS).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def saved_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Return the policy's weights in a checkpoint."""
    actor = open_checkpoint(checkpoint).folder / "actor"
    shapes = {n: shape for n, shape in shapes_in(actor).items() if n.startswith(PARAMETER)}
    weights = {name: torch.empty(shape) for name, shape in shapes.items()}
    read_state(actor, weights)
    return weights


def base_weights(model: str) -> dict[str, Tensor]:
    """Return the weights that a run starts from, by their names in a checkpoint."""
    weights = load_file(Path(resolve_model(model)) / "model.safetensors")
    return {PARAMETER + name: tensor.float() for name, tensor in weights.items()}


def fingerprint(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Fingerprint:
    """Return for each tensor the norm of its change, and the dot product with a random direction.

    The entries of a direction are normal, so the product is about as large as the norm. AdamW's
    first steps have nearly the same norm for every gradient: the product shows the direction.
    """
    random, result = np.random.RandomState(0), {}
    for name in sorted(after):
        change = (after[name] - before[name]).double().flatten()
        direction = torch.from_numpy(random.standard_normal(change.numel()))
        numbers = change.norm().item(), (change @ direction).item()
        result[name] = [float(f"{number:.6g}") for number in numbers]
    return result


# --- checking ------------------------------------------------------------------------------------


def wrong_rewards(run: Run) -> Iterator[str]:
    """Yield the rewards that the recipe's function does not give for the stored texts."""
    for row in rescore(run, run.config_at()):
        recorded = row["outcome"], row["reward"]
        again = row["new_outcome"], row["new_reward"]
        if recorded != again:
            yield f"outcome and reward of {row['episode_id']}: recorded {recorded}, now {again}"


def wrong_masks(run: Run, tokenizer: Any) -> Iterator[str]:
    """Yield the tokens whose mask is not that of the texts.

    The mask is 1 for the tokens of the assistant's turns, and for no others. These tokens are the
    texts of its messages, up to the token that ends a turn.
    """
    for rollout in run.rollouts("train"):
        trajectory = rollout.scored.trajectory
        where = f"of {trajectory.episode_id}"
        masks = [[0] * len(segment.response_ids) for segment in trajectory.segments]
        for turn, message in zip(trajectory.turns, trajectory.answers, strict=True):
            masks[turn.segment][turn.start : turn.end] = [1] * (turn.end - turn.start)
            tokens = trajectory.segments[turn.segment].response_ids[turn.start : turn.end]
            is_ended = tokens[-1] in tokenizer.all_special_ids
            text = tokenizer.decode(tokens[:-1] if is_ended else tokens)
            if text != message.content:
                yield f"a turn {where}: its tokens are {text!r}, its text {message.content!r}"
        for segment, mask in zip(trajectory.segments, masks, strict=True):
            is_sampled = [int(version >= 0) for version in segment.versions]
            if not list(segment.response_mask) == mask == is_sampled:
                yield f"the mask {where}: {list(segment.response_mask)}, its turns give {mask}"


def wrong_advantages(run: Run) -> Iterator[str]:
    """Yield the steps whose advantages do not follow from the stored rewards."""
    for step in run.store.steps("train"):
        config = run.config_at(step)
        batch = collate(run.read_step(step).groups, reward=config.reward)
        advantages = make_targets(batch, config, None, None, None).advantages
        is_token = torch.arange(advantages.shape[1]) < batch.response_lengths[:, None]
        stored = run.store.read_learned(step)["advantages"].combine_chunks().flatten()
        recorded = torch.tensor(stored.fill_null(0.0).to_numpy())
        again = torch.where(batch.action_mask, advantages.float(), 0.0)[is_token]
        if not again.equal(recorded):
            gap = (again - recorded).abs().max() if again.shape == recorded.shape else "all"
            yield f"advantages of step {step}: the largest difference is {gap}"


def wrong_weights(run: Run) -> Iterator[str]:
    """Repeat all updates, and yield the tensors whose change is not the stored one."""
    model = run.config["model"]["path"]
    replayer = Replayer(run, model=resolve_model(model))
    result = replay(replayer, max(run.store.steps("train")), TOLERANCE)
    for difference in result.differences:
        yield f"{difference.name}: {difference.recorded}, replayed {difference.replayed}"
    rank = replayer.learner.rank
    assert rank is not None  # a replay has one process
    tensors = rank.optimizers["actor"].tensors().items()
    weights = {n: full_tensor(t).cpu() for n, t in tensors if n.startswith(PARAMETER)}
    stored: Fingerprint = json.loads((run.folder / WEIGHTS).read_text())
    yield from wrong_changes(stored, fingerprint(base_weights(model), weights))


def wrong_changes(stored: Fingerprint, again: Fingerprint) -> Iterator[str]:
    """Yield the tensors whose change differs by more than the tolerance from the stored one."""
    if stored.keys() != again.keys():
        yield f"the tensors differ: {sorted(stored.keys() ^ again.keys())}"
        return
    for name, numbers in stored.items():
        gap = max(abs(a - b) for a, b in zip(numbers, again[name], strict=True))
        if not gap <= TOLERANCE * numbers[0]:
            yield f"the change of {name}: {numbers}, replayed {again[name]}"
    print(f"  the change of {len(stored)} tensors from the base model")


def wrong_results() -> Iterator[str]:
    """Yield the stored runs whose last validation does not keep `EXPECTED`."""
    for pattern, text in EXPECTED.items():
        files = sorted(Path("recipes").glob(f"{pattern}.jsonl"))
        if not files:
            yield f"recipes/{pattern}.jsonl: there is no such file"
        for file in files:
            validations = [data for _, data in read_metrics(file) if "val/rows" in data]
            is_kept, line = Expectation.parse(text).check(validations[-1])
            if not is_kept:
                yield f"{file}: {line}"


def check(folder: Path, *, weights: bool) -> list[str]:
    """Return what is wrong in a stored run, and print what was recomputed."""
    run = load_run(folder)
    steps, rollouts = run.store.steps("train"), len(run.episodes)
    print(f"{folder}: {len(steps)} steps, {rollouts} rollouts")
    tokenizer = load_tokenizer(resolve_model(BASE))
    algorithm = run.config_at().algorithm
    wrong = [*wrong_rewards(run), *wrong_masks(run, tokenizer)]
    if not (algorithm.critic or algorithm.kl_reward_coef):  # these need the model
        wrong += wrong_advantages(run)
    if weights and (folder / WEIGHTS).exists():
        wrong += wrong_weights(run)
    return [f"{folder}: {text}" for text in wrong]


def main() -> None:
    """Store a run, or check all that are stored; the exit code is 1 if a value is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--add", nargs=2, type=Path, metavar=("RUN", "FOLDER"))
    parser.add_argument("--weights", action="store_true", help="repeat the updates, too")
    arguments = parser.parse_args()
    if arguments.add:
        return add(*arguments.add)
    wrong = []
    with contextlib.chdir(Path(__file__).parents[1]):  # The files in a config are named from there.
        wrong += wrong_results()
        for file in sorted(Path("recipes").glob("*/results/*/*/config.yaml")):
            wrong += check(file.parent, weights=arguments.weights)
    if wrong:
        sys.exit("\n".join(["error: recomputed values differ from the stored ones:", *wrong[:20]]))


if __name__ == "__main__":
    main()
