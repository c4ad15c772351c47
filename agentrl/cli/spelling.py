"""Find a command by its words, and say what to write instead of a word that does not exist."""

from __future__ import annotations

import re
from contextvars import ContextVar
from itertools import takewhile
from typing import Any

from typer.core import TyperCommand, TyperGroup

REMOVED = {
    "check-template": "check template",
    "gateway check": "check agent",
    "gateway": "check agent",
    "chat": "play chat",
    "train --dry-run": "check",
}
"""The present spelling of commands that have another one now."""

command_words: ContextVar[tuple[str, ...]] = ContextVar("command_words")
"""The running command and its arguments."""


class Commands(TyperGroup):
    """A group of commands whose names may have two words: `check` and `check template`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Return the name of the command, the command, and its arguments."""
        for count in (2, 1):
            name = " ".join(args[:count])
            if name in REMOVED:
                ctx.fail(f"`agentrl {name}` is now `agentrl {REMOVED[name]}`")
            if name in self.commands:
                return name, self.commands[name], args[count:]
        return super().resolve_command(ctx, args)


class Command(TyperCommand):
    """A command that names the config key to set instead of an option that it does not have.

    The help of its options is in the docstring of its function, under `Args:`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        text, _, rest = (self.help or "").partition("\n\nArgs:\n")
        section, _, examples = rest.partition("\n\n")
        helps = dict(re.findall(r"^ {4}(\w+): ((?:.|\n {8})*)", section, re.MULTILINE))
        parameters: list[Any] = self.params
        for parameter in parameters:
            if parameter.name in helps:
                parameter.help = " ".join(helps[parameter.name].split())
        self.help = f"{text}\n\n{examples}".rstrip()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words after the command.

        Raises:
            ConfigError: an option has the name of a config key.
        """
        from agentrl.config import FIELDS
        from agentrl.config.sources import keys_named
        from agentrl.errors import ConfigError

        options = {name for p in self.params for name in (*p.opts, *p.secondary_opts)}
        for word in takewhile("--".__ne__, args):  # only arguments follow `--`
            name = word.partition("=")[0]
            if not name.startswith("--") or name in options or "--config" not in options:
                continue
            if (old := f"{ctx.info_name} {name}") in REMOVED:
                ctx.fail(f"`agentrl {old}` is now `agentrl {REMOVED[old]}`")
            key = name.removeprefix("--").replace("-", "_")
            if keys := [key] if key in FIELDS else keys_named(key, FIELDS):
                texts = " or ".join(f"{key}=VALUE" for key in keys)
                raise ConfigError(f"no option {name}. Config keys have no dashes: {texts}")
        return super().parse_args(ctx, args)
