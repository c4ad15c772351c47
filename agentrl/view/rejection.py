"""Write the tokens of episodes that a query finds, for `agentrl sft`: rejection sampling.

The rows are the tokens that the engine read and sampled, so no template renders the episodes again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.chat.tokenizer import hash_vocabulary
from agentrl.errors import UserError
from agentrl.record import TOKENIZER
from agentrl.regular_files import atomic_file
from agentrl.report.run import Run
from agentrl.store import TOKEN_SCHEMA, TRAINING, VOCABULARY
from agentrl.view.query import Query, find_episodes


class Written(NamedTuple):
    """What was written."""

    episodes: int
    rows: int
    tokens: int
    sampled: int
    """The number of tokens that the policy sampled. They are trained."""


def write_tokens(run: Run, query: Query, output: Path) -> Written:
    """Write a row for each row of tokens of the episodes that a query finds.

    Without a term on `split`, the episodes of validations are left out.

    Args:
        run: the run.
        query: the result of `parse_query`.
        output: a .parquet file that does not exist.

    Raises:
        UserError: the file exists or has another ending, the run has no tokenizer, no episode with
            sampled tokens is found, or the episodes have images.
    """
    if output.suffix != ".parquet" or output.exists():
        raise UserError(f"{output}: must be a new .parquet file")
    tokenizer = run.folder / TOKENIZER / "tokenizer.json"
    if not tokenizer.is_file():
        raise UserError(f"{run.folder} has no {TOKENIZER}/tokenizer.json, so it was not trained")
    is_split_chosen = any(term.name == "split" for term in query.terms)
    rewards = {
        (e["step"], e["split"], e["episode"]): e["reward"]
        for e in find_episodes(run, query).rows.to_pylist()
        if is_split_chosen or e["split"] in TRAINING
    }
    rows = [row for row in _rows(run, rewards) if any(row["token_mask"])]
    if not rows:
        raise UserError("the query finds no episode with sampled tokens")
    metadata = {VOCABULARY: hash_vocabulary(tokenizer.read_text("utf-8"))}
    table = pa.Table.from_pylist(rows, schema=TOKEN_SCHEMA.with_metadata(metadata))
    with atomic_file(output) as file:
        pq.write_table(table, file)
    sampled = sum(sum(row["token_mask"]) for row in rows)
    episodes = len({(row["step"], row["episode"]) for row in rows})
    return Written(episodes, len(rows), sum(len(row["token_ids"]) for row in rows), sampled)


def _rows(run: Run, rewards: dict[tuple[int, str, str], float]) -> Iterator[dict[str, Any]]:
    names = ["episode_id", "prompt_ids", "response_ids", "response_mask"]
    for path, step, split in run.store.files():
        if not any(key[:2] == (step, split) for key in rewards):
            continue
        if run.store.has_images(path):
            raise UserError(
                f"{path} has episodes with images, and agentrl sft reads tokens without images. Add"
                " a term to the query that excludes its step"
            )
        for row in run.store.read_columns(path, names).to_pylist():
            reward = rewards.get((step, split, row["episode_id"]))
            streams = zip(*(row[name] for name in names[1:]), strict=True)
            for prompt, response, mask in streams if reward is not None else ():
                yield {
                    "token_ids": prompt + response,
                    "token_mask": [0] * len(prompt) + mask,
                    "episode": row["episode_id"],
                    "step": step,
                    "reward": reward,
                }
