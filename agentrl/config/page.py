"""Write the page that documents all keys: `python -m agentrl.config.page > docs/config.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby

from agentrl.config.load import allowed, description, flag_of
from agentrl.config.sections import FIELDS, Config

HEAD = """\
# Configuration

<!-- Written by `make docs` from agentrl/config: edit that. -->

Values come from five places, of which later ones override earlier ones: the defaults below, the
settings of a model preset (`--model tiny`), a YAML file (`--config run.yaml`), overrides
(`optim.lr=1e-5`), and flags (`--dataset rows.parquet`).

```yaml
# run.yaml
data:
  train: rows.parquet
rollout:
  n: 16
```

    agentrl train --config run.yaml optim.lr=1e-5 rollout.budget_policy.turns=zero

Paths are relative to the folder in which the command runs, also in a YAML file. `a.b=null` sets
the default again. Lists are written `files=[a.py,b.py]`; a list of one item can be written without
brackets. The run's folder contains the resolved config, `config.yaml`, which `--config` accepts.
One error reports all mistakes, before anything is loaded.
"""


def page() -> str:
    """Return the page in Markdown."""
    return "\n".join([HEAD, *_tables()])


def _tables() -> Iterator[str]:
    for section, paths in groupby(FIELDS, key=lambda path: path.rpartition(".")[0]):
        yield f"## {section or 'files'}\n"
        if section:
            yield f"{Config.model_fields[section].annotation.__doc__}\n"
        yield "| key | default | allowed values | flag | description |\n|---|---|---|---|---|"
        for path in paths:
            info, flag = FIELDS[path], flag_of(path)
            cells = (
                f"`{path}`",
                f"`{json.dumps(info.default)}`",
                allowed(info),
                f"`{flag}`" if flag else "",
                description(info),
            )
            yield f"| {' | '.join(map(str, cells))} |"
        yield ""


if __name__ == "__main__":
    print(page(), end="")
