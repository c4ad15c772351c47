"""The page that documents every key: `python -m agentrl.config.page > docs/config.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby

from agentrl.config.load import allowed, description, flag_of
from agentrl.config.sections import FIELDS, Config

HEAD = """\
# Configuration

<!-- Written by `make docs` from agentrl/config: edit that. -->

Values come from, the later ones winning: the defaults below, what a model preset recommends
(`--model tiny`), a YAML file (`--config run.yaml`), overrides (`optim.lr=1e-5`), flags
(`--dataset rows.parquet`).

```yaml
# run.yaml
data:
  train: rows.parquet
rollout:
  n: 16
```

    agentrl train --config run.yaml optim.lr=1e-5 rollout.budget_policy.turns=zero

Paths, those in a YAML file too, are relative to the folder in which the command runs.
`a.b=null` sets a default again. Lists are written `files=[a.py,b.py]`; one text alone will do for a
list of one. The resolved config of a run is in its folder, `config.yaml`; that file can be given to
`--config`. Every mistake is said at once, before anything is loaded.
"""


def page() -> str:
    """The whole page in Markdown."""
    return "\n".join([HEAD, *_tables()])


def _tables() -> Iterator[str]:
    for section, paths in groupby(FIELDS, key=lambda path: path.rpartition(".")[0]):
        yield f"## {section or 'files'}\n"
        if section:
            yield f"{Config.model_fields[section].annotation.__doc__}\n"
        yield "| key | default | takes | flag | what it is |\n|---|---|---|---|---|"
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
