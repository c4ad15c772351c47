"""`agentrl report`: what happened in a run, what went wrong, and what to try."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from agentrl.cli.options import Files
from agentrl.terminal import echo


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    markdown: Annotated[bool, typer.Option("--md")] = False,
    output: Path | None = None,
    file: Files = None,
) -> None:
    """Explain a run: what went wrong, the evidence, likely causes and what to try.

    Prints the findings, and writes one HTML page with findings, curves, times and validations. The
    run may still be training. --file loads diagnoses of your own.

    Args:
        run: The folder of a run.
        markdown: Print Markdown; write no page.
        output: The page; default: report.html in the run's folder.

    Examples:
        agentrl report runs/demo

        agentrl report runs/demo --md > report.md

        agentrl report runs/demo -f my_diagnoses.py
    """
    from agentrl.errors import UserError
    from agentrl.registry import load_file
    from agentrl.regular_files import atomic_file
    from agentrl.report import diagnose, load_run
    from agentrl.report.finding import describe
    from agentrl.report.page import make_report, to_html, to_markdown

    loaded = load_run(run)
    for name in file or ():
        load_file(name)
    _ = loaded.behaviour  # a damaged file is one error, not one of each diagnosis
    findings = diagnose(loaded)
    content = make_report(loaded, findings)
    if markdown:
        echo(to_markdown(content), nl=False)
        return
    for label, text in content.summary:
        echo(f"{label + ':':9} {text}")
    for finding in findings:
        echo("\n" + describe(finding))
        if finding.episodes:
            command = f"agentrl show {quote(str(run))} --episode {quote(finding.episodes[0])}"
            echo(f"  an episode: {command}")
    page = output or run / "report.html"
    html = to_html(content, _draw_curve(run))
    try:
        with atomic_file(page) as staging:
            staging.write_text(html, encoding="utf-8")
    except OSError as e:
        raise UserError(f"cannot write {page}: {e}. Choose another file: --output") from e
    echo(f"\nevidence, episodes and curves: {page}")


def _draw_curve(run: Path) -> str:
    """Return the learning curve as SVG, to be part of a page."""
    import tempfile

    from agentrl.observers.curve import write_curve
    from agentrl.record import METRICS

    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "curve.svg"
        write_curve(run / METRICS, picture)
        text = picture.read_text(encoding="utf-8")
    return text[text.index("<svg") :]
