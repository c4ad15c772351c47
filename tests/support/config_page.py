"""Write the page that documents all config keys, docs/config.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby

from agentrl.config.load import allowed, description, flag_of
from agentrl.config.sections import FIELDS, Config
from agentrl.config.tiny import TINY_SETTINGS

HEAD = """\
# Configuration

<!-- Written by `make docs` from agentrl/config: edit that. -->

Later sources override earlier ones: the defaults below, the settings of
[`--model tiny`](#the-preset-tiny), a YAML file (`--config run.yaml`), overrides (`optim.lr=1e-5`),
and flags (`--dataset rows.parquet`).

```yaml
# run.yaml
data:
  train: rows.parquet
rollout:
  n: 16
```

    agentrl train --config run.yaml optim.lr=1e-5 rollout.budget_policy.turns=zero

- Brackets behind a key contain its default and the other values. A default such as `1` means an
  integer, `1.0` any number; both are at least 0 if no limits follow.
- The value of an override is null (the default again), true, false, a number, or YAML in brackets
  or quotation marks: `files=[a.py,b.py]`. Anything else is a text. Quote a text such as 5 or true,
  `reward.kwargs.marker="'5'"`, unless the key wants a text.
- Paths are relative to the current folder, also in a YAML file.
- `${oc.env:NAME}` or `${oc.env:NAME,DEFAULT}` in a value or a mapping's key is an environment
  variable, whose value the run does not store. Write [keys and
  passwords](../SECURITY.md#keys-and-passwords) like this.
- One error reports all mistakes of the config, and another one all of the files and rows that it
  names, before a model is loaded. `--config` also accepts the `config.yaml` of a run's folder.
"""

PRESET = """\
## The preset tiny

`--model tiny` is a model of half a million parameters and a preset. On first use it is trained, in
1-2 minutes on two cores, and stored in the user's cache (`AGENTRL_HOME` names another folder). The
preset replaces defaults:

{rows}

All other sources have precedence: `--file` (`files`) replaces `shelf:calculator`, so name both if
rows use both. If `trainer.total_epochs` is set, the preset does not set `trainer.total_steps`.

**The preset belongs to the name `tiny`, not to the weights.** For a copy that `sft` or another run
trained, whose default learning rate is too low, take the values from a run of `tiny`:
`-c runs/demo/config.yaml`.

- The model knows the formats of `single_turn`, `tool_agent` (tool calls as in Hermes and Qwen) and
  `react`, the teacher `gsm8k`, and answers after `####`. Its context has 2,048 tokens. It sees no
  description of tools and arguments, except in `react` rows.
- It can learn word problems in the demo's words (bags, boxes, days) with one or two calls of a tool
  `calculator(expression)`, also with rows, tools and rewards of your own. If all rewards stay 0,
  [imitate first](debugging.md#imitate-first).
- Its answers to other texts are noise, which still tests rows, tools, rewards and loops.
"""


def page() -> str:
    """Return the page in Markdown."""
    return "\n".join([HEAD, _preset(), *_sections()])


def _preset() -> str:
    rows = (f"- `{path}`: `{json.dumps(value)}`" for path, value in TINY_SETTINGS.items())
    return PRESET.format(rows="\n".join(rows))


def _sections() -> Iterator[str]:
    for section, paths in groupby(FIELDS, key=lambda path: path.rpartition(".")[0]):
        yield f"## {section or 'files'}\n"
        words = section and Config.model_fields[section].annotation.__doc__
        if words and not words.startswith("Settings"):
            yield f"{words}\n"
        for path in paths:
            yield _entry(path)
        yield ""


def _entry(path: str) -> str:
    """Return a key with its flag, its default, the other values and its description."""
    info, flag = FIELDS[path], flag_of(path)
    names = f"`{path}`, `{flag}`" if flag else f"`{path}`"
    values, text = _without_type(allowed(info), info.default), description(info)
    # The descriptions of choices explain each.
    is_known = values in ("", "text", "true or false")
    is_known |= all(f"{choice}:" in text for choice in re.split(", | or ", values))
    other = "" if is_known else f"; {values}"
    return f"- {names} (`{json.dumps(info.default)}`{other}): {text}"


def _without_type(values: str, default: object) -> str:
    """Leave out what the default shows, an integer or a number, and the limit 0."""
    values = re.sub(r"^an? ", "", values)
    if type(default) in (int, float):
        values = re.sub(r"^(integer|number) ", "", values)
        values = re.sub(r"^>= 0( and |$)", "", values)
        values = re.sub(r"^number$", "also below 0", values)
    return values


if __name__ == "__main__":
    print(page(), end="")
