"""The command line. Commands import what they need when they run: `--help` stays quick."""

from __future__ import annotations

import sys

import typer

from agentrl.cli import evaluate, init, play, sft, tools, train

app = typer.Typer(
    name="agentrl",
    help="Reinforcement learning for language-model agents that talk over several turns and call"
    " tools.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train.train)
app.command("check")(train.check)
app.command("play")(play.play)
app.command("eval")(evaluate.eval_)
app.command("generate")(evaluate.generate)
app.command("sft")(sft.sft)
app.command("init")(init.init)
app.add_typer(tools.app, name="tools")


def main() -> None:
    """Run a command; a user's mistake is one message and exit code 1, never a traceback."""
    from agentrl.errors import AgentRLError

    try:
        app()
    except AgentRLError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
