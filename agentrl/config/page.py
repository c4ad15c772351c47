"""Write the page that documents all keys: `python -m agentrl.config.page > docs/config.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby

from agentrl.config.load import allowed, description, flag_of
from agentrl.config.sections import FIELDS, Config
from agentrl.config.tiny import TINY_SETTINGS

HEAD = """\
# Configuration

<!-- Written by `make docs` from agentrl/config: edit that. -->

Values come from five places, of which later ones override earlier ones: the defaults below, the
settings of a model preset ([`--model tiny`](#the-preset-tiny)), a YAML file (`--config run.yaml`),
overrides (`optim.lr=1e-5`), and flags (`--dataset rows.parquet`).

```yaml
# run.yaml
data:
  train: rows.parquet
rollout:
  n: 16
```

    agentrl train --config run.yaml optim.lr=1e-5 rollout.budget_policy.turns=zero

Paths are relative to the folder in which the command runs, also in a YAML file; URLs such as
`s3://bucket/run` are refused. `${oc.env:NAME}` in a value or a mapping's key is an environment
variable (`${oc.env:NAME,DEFAULT}`). The run stores this reference and not its value, and reads the
variable again when it is resumed. A value that looks like a key or a password
([run_folder.md](run_folder.md#keys-and-passwords)) is refused: write it as such a reference.
`a.b=null` sets the default again. Lists are written `files=[a.py,b.py]`; a list of one item can be
written without brackets. The value of an override is null, true, false, a number, or YAML in
brackets or quotation marks; anything else is a text, of which `#` and `: ` are part:
`reward.kwargs.marker=####`. A text such as 5 or true is quoted, `reward.kwargs.marker="'5'"`,
unless the key wants a text. The run's folder contains the resolved config, `config.yaml`, which
`--config` accepts. One error reports all mistakes, before anything is loaded.
"""

PRESET = """\
## The preset tiny

`--model tiny` is a model and a preset. The model has half a million parameters and a context of
2,048 tokens. The first command that needs it trains it, in 1-2 minutes on two cores, and stores it
in the user's cache (`AGENTRL_HOME` names another folder). The preset replaces these defaults:

| key | value | default for other models |
|---|---|---|
{rows}

`train` prints one line with the keys that the preset sets; `check` lists all keys that differ from
the defaults. A preset only replaces defaults: a YAML file, an override, a flag or a config of
verl's with verl's defaults has its own value. So `--file` (`files`) replaces `shelf:calculator`;
name both if rows use both. `a.b=null` sets the value of the preset. If `trainer.total_epochs` is
set, the preset does not set `trainer.total_steps`.

The preset belongs to the name `tiny`, not to the weights. After `--model models/mine`, a copy that
`sft` or another run trained, the defaults are those of other models, with a learning rate that is
too low for so small a model: take the values from a run of `tiny`, `-c runs/demo/config.yaml`, or
write them down.

What the model can do:

- It knows the formats of `single_turn`, `tool_agent` (tool calls as in Hermes and Qwen) and
  `react`, the teacher `gsm8k`, and answers after `####`.
- It can learn, on a laptop, word problems in the demo's words (bags, boxes, days) with one or two
  calls of a tool `calculator(expression)`, also with rows, tools and rewards of your own. With
  other words it starts lower; if all rewards stay 0, [imitate first](debugging.md#imitate-first).
- It cannot read other texts: its tokenizer has 576 tokens, and it has seen only the demo's
  problems. On another task its answers are noise, which still tests rows, tools, rewards and loops.
- Of a tool it sees the name, and the names and types of the arguments, but no description, except
  in `react` rows.

In Python, `agentrl.demo.tiny_config` applies the preset ([commands.md](commands.md#in-python)).
"""


def page() -> str:
    """Return the page in Markdown."""
    return "\n".join([HEAD, _preset(), *_tables()])


def _preset() -> str:
    rows = (
        f"| `{path}` | `{json.dumps(value)}` | `{json.dumps(FIELDS[path].default)}` |"
        for path, value in TINY_SETTINGS.items()
    )
    return PRESET.format(rows="\n".join(rows))


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
