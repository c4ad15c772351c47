"""The command line. Commands import what they need when they run, so that `--help` is fast."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from agentrl import __version__
from agentrl.cli import (
    check,
    check_template,
    doctor,
    evaluate,
    export,
    init,
    play,
    sft,
    tools,
    train,
)

app = typer.Typer(
    name="agentrl",
    help="Reinforcement learning for language-model agents that talk over several turns and call"
    " tools.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train.train)
app.command("check")(check.check)
app.command("check-template")(check_template.check_template)
app.command("play")(play.play)
app.command("eval")(evaluate.eval_)
app.command("generate")(evaluate.generate)
app.command("sft")(sft.sft)
app.command("export")(export.export)
app.command("init")(init.init)
app.command("doctor")(doctor.doctor)
app.add_typer(tools.app, name="tools")


def _print_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"agentrl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Define the options that come before a command."""


def main(words: Sequence[str] | None = None) -> None:
    """Run a command; for a user's mistake, print one message and exit with code 1.

    Args:
        words: the command and its arguments; None: those of this process.
    """
    from agentrl.errors import AgentRLError

    words = sys.argv[1:] if words is None else words
    try:
        _refuse_dashed_keys(words)
        app(list(words), prog_name="agentrl")
    except AgentRLError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _refuse_dashed_keys(words: Sequence[str]) -> None:
    """Explain how to write `--rollout.n 4`: names of keys contain a dot, those of options never."""
    from agentrl.errors import ConfigError

    for word, following in zip(words, [*words[1:], ""], strict=True):
        if match := re.fullmatch(r"--(\w+(?:\.\w+)+)(?:=(.*))?", word, re.DOTALL):
            key, value = match.group(1), match.group(2)
            value = (following or "VALUE") if value is None else value
            raise ConfigError(f"{word}: write config keys without dashes: {key}={value}")
