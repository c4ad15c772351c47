"""The command line. Commands import what they need when they run, so that `--help` is fast."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl import __version__
from agentrl.cli import (
    chat,
    check,
    check_agent,
    check_environment,
    check_template,
    compare,
    data,
    docs,
    doctor,
    doors,
    evaluate,
    export,
    generate,
    init,
    model,
    play,
    replay,
    report,
    serve,
    sft,
    show,
    sweep,
    tools,
    train,
    view,
)
from agentrl.cli.spelling import Command, Commands, command_words
from agentrl.terminal import echo

app = typer.Typer(
    name="agentrl",
    cls=Commands,
    help="Reinforcement learning for language-model agents that talk over several turns and call"
    " tools.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train.train)
app.command("check")(check.check)
app.command("check template")(check_template.check_template)
app.command("check agent")(check_agent.check_agent)
app.command("check environment")(check_environment.check_environment)
app.command("play")(play.play)
app.command("play chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("eval")(evaluate.eval_)
app.command("compare")(compare.compare)
app.command("sweep")(sweep.sweep)
app.command("replay")(replay.replay)
app.command("rescore")(replay.rescore)
app.command("report")(report.report)
app.command("show")(show.show)
app.command("view")(view.view)
app.command("generate")(generate.generate)
app.command("sft")(sft.sft)
app.command("export")(export.export)
app.command("init")(init.init)
app.command("doctor")(doctor.doctor)
app.command("docs")(docs.docs)
app.add_typer(tools.app, name="tools")
app.add_typer(data.app, name="data")
app.add_typer(model.app, name="model")
app.add_typer(doors.app, name="doors")


def _refuse_urls(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that refuses URLs for all of its arguments and options that are paths."""

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        from agentrl.config.section import refuse_url
        from agentrl.errors import ConfigError

        words = {word.partition("=")[0] for word in command_words.get(())}
        home = Path(os.environ.get("AGENTRL_HOME", ""))
        for name, value in {**arguments, "AGENTRL_HOME": home}.items():
            for path in value if isinstance(value, list) else [value]:
                try:
                    refuse_url(str(path) if isinstance(path, Path) else "")
                except ValueError as e:
                    option = f"--{name.replace('_', '-')}"
                    raise ConfigError(f"{option if option in words else name}: {e}") from None
        command(**arguments)

    return run


for _typer in (app, tools.app, data.app, model.app, doors.app):
    for _info in _typer.registered_commands:
        assert _info.callback
        _info.callback, _info.cls = _refuse_urls(_info.callback), Command


def _print_version(is_set: bool) -> None:
    if is_set:
        echo(f"agentrl {__version__}")
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
    from agentrl.torch_threads import prepare_threads

    prepare_threads()
    words = sys.argv[1:] if words is None else words
    command_words.set(tuple(words))
    try:
        with _raise_on_sigterm():
            app(words, prog_name="agentrl")
    except AgentRLError as e:
        echo(f"error: {e}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        echo("interrupted", err=True)
        sys.exit(130)


@contextlib.contextmanager
def _raise_on_sigterm() -> Iterator[None]:
    """Raise `Terminated` in the main thread if SIGTERM arrives within the block.

    Python ignores an exception in a `__del__`. If a signal arrives there, it is sent again.
    """
    from agentrl.errors import Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_sigterm(*_: object) -> None:
        raise Terminated

    def on_ignored(ignored: sys.UnraisableHookArgs) -> None:
        signals = {Terminated: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}
        if number := signals.get(ignored.exc_type):
            threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
        else:
            show(ignored)

    before, show = signal.signal(signal.SIGTERM, on_sigterm), sys.unraisablehook
    sys.unraisablehook = on_ignored
    try:
        yield
    finally:
        sys.unraisablehook = show
        signal.signal(signal.SIGTERM, before)
