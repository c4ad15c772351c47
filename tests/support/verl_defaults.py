"""Writes `agentrl/config/verl_defaults.csv`, the keys of verl's versions: `make verl-keys`.

    python -m support.verl_defaults .venv-verl

Each version's wheel has its config as one file for each training engine, which verl generates from
its Hydra files (`_generated_ppo_*trainer.yaml`). A row of the table is a key with a default, the
first and the last of the versions that have it, and the engines, if not all of a version do.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

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
            for key, value in leaves(yaml.safe_load(file.read_text())):
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


def folders_of(environment: Path) -> dict[str, Path]:
    """Return the folders of verl's versions, which `make verl` has installed, oldest first."""
    folders = [file.parents[2] for file in environment.glob("*/verl/version/version")]
    return {f.name: f for f in sorted(folders, key=lambda f: [*map(int, f.name.split("."))])}


if __name__ == "__main__":
    TABLE.write_text(table(folders_of(Path(sys.argv[1]))))
