"""Write the page that documents all config keys, docs/config.md."""

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

Later sources override earlier ones: the defaults below, the settings of a model preset
([`--model tiny`](#the-preset-tiny)), a YAML file (`--config run.yaml`), overrides
(`optim.lr=1e-5`), and flags (`--dataset rows.parquet`).

```yaml
# run.yaml
data:
  train: rows.parquet
rollout:
  n: 16
```

    agentrl train --config run.yaml optim.lr=1e-5 rollout.budget_policy.turns=zero

- The value of an override is null (the default again), true, false, a number, or YAML in brackets
  or quotation marks: `files=[a.py,b.py]`. Anything else is a text, with `#` and `: ` as part of it:
  `reward.kwargs.marker=####`. Quote a text such as 5 or true, `reward.kwargs.marker="'5'"`, unless
  the key wants a text.
- Paths are relative to the current folder, also in a YAML file. agentrl refuses URLs such as
  `s3://bucket/run`.
- `${oc.env:NAME}` or `${oc.env:NAME,DEFAULT}` in a value or a mapping's key is an environment
  variable. The run stores this reference, not its value. Write keys and passwords as such
  references; [others are refused](run_folder.md#keys-and-passwords).
- One error reports all mistakes of the config, and another one all of the files and rows that it
  names, before a model is loaded. The run's folder contains the resolved config, `config.yaml`,
  which `--config` accepts.
"""

PRESET = """\
## The preset tiny

`--model tiny` is a model and a preset. The first command that needs the model, which has half a
million parameters, trains it in 1-2 minutes on two cores and stores it in the user's cache
(`AGENTRL_HOME` names another folder). The preset replaces these defaults:

| key | value | default for other models |
|---|---|---|
{rows}

A YAML file, an override, a flag or a config of verl's has precedence. So `--file` (`files`)
replaces `shelf:calculator`: name both if rows use both. `a.b=null` sets the value of the preset. If
`trainer.total_epochs` is set, the preset does not set `trainer.total_steps`.

The preset belongs to the name `tiny`, not to the weights. `--model models/mine`, a copy that `sft`
or another run trained, has the defaults of other models, with a learning rate that is too low for
so small a model. Take the values from a run of `tiny`: `-c runs/demo/config.yaml`.

- The model knows the formats of `single_turn`, `tool_agent` (tool calls as in Hermes and Qwen) and
  `react`, the teacher `gsm8k`, and answers after `####`. Its context has 2,048 tokens.
- It can learn word problems in the demo's words (bags, boxes, days) with one or two calls of a tool
  `calculator(expression)`, also with rows, tools and rewards of your own. If all rewards stay 0,
  [imitate first](debugging.md#imitate-first).
- It cannot read other texts, because its tokenizer has 576 tokens. On another task its answers are
  noise, which still tests rows, tools, rewards and loops.
- It sees no description of tools and arguments, except in `react` rows.

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
        yield "| key, flag | default | allowed values | description |\n|---|---|---|---|"
        for path in paths:
            info, flag = FIELDS[path], flag_of(path)
            cells = (
                f"`{path}` `{flag}`" if flag else f"`{path}`",
                f"`{json.dumps(info.default)}`",
                allowed(info).removeprefix("a ").removeprefix("an "),
                description(info),
            )
            yield f"| {' | '.join(map(str, cells))} |"
        yield ""


if __name__ == "__main__":
    print(page(), end="")
