"""`agentrl check-template`: what a chat template does to conversations, and what would mend it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.options import Files, resolve_model

if TYPE_CHECKING:
    from agentrl.chat import ChatTemplate
    from agentrl.chat.verify_template import Verdict

_DROPS = (
    "drops thinking: the template drops a turn's thinking once further messages follow."
    " rollout.history_thinking=keep trains on one row with all of it, as it was sampled; strip"
    " begins a new segment there, as a deployment that renders anew would show it."
)
_REFUSED = (
    "unsupported, and no fault: the template refuses these conversations, so rows must not need"
    " them. Results of several calls are then shown one after another."
)
_NOT_WITH = (
    "not with KIND: the template cannot write such turns. If the model writes one, the row keeps it"
    " as it was sampled; a deployment would show something else from then on."
)
_TEXT_TOOLS = (
    "rows with tools need the loop `react`, which shows tools and results as text; rows without"
    " tools can be played."
)
_NOTHING_TO_FIX = "nothing to fix: whatever the template takes is append-only"
_NOT_TO_BE_FIXED = (
    "no change of conditions helps: what the template takes is append-only, and the rest it has no"
    " text for. Rows with tools need the loop `react`, or a model whose template shows tools."
)


def check_template(
    model: Annotated[str, typer.Argument(help="A model folder or hub name, or `tiny`.")],
    file: Files = None,
    fix: Annotated[
        bool,
        typer.Option("--fix", help="Look for the smallest change that makes it append-only."),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="With --fix: where to write the changed template; else it is printed."),
    ] = None,
) -> None:
    """Prove a model's chat template on conversations of many shapes.

    Per shape, for the worst kind of turns (with and without text, thought, calls): append-only,
    drops thinking, unsupported, or differs, with the first token that does; and in which format
    tool calls are read. Loads no weights. Exit code 1 if the template is
    at fault or its calls cannot be read, 2 if there is none at MODEL.
    The change that --fix finds is printed as a diff; a file `chat_template.jinja` in the model's
    folder stands instead of any other template there.

    Examples:
        agentrl check-template Qwen/Qwen3-0.6B

        agentrl check-template models/mine -f my_tools.py

        agentrl check-template models/mine --fix --output models/mine/chat_template.jinja
    """
    from agentrl.chat import ChatTemplate, load_tokenizer
    from agentrl.chat.formats.detect import detect_format, explain_unknown_format
    from agentrl.chat.tokenizer import end_of_turn_ids
    from agentrl.chat.verify_template import verify_tokenizer
    from agentrl.errors import UserError

    if output and not fix:
        raise UserError("--output is where --fix writes to: give both")
    if output:
        _make_room(output)
    schemas = _schemas(file or [])
    folder = Path(model).expanduser()
    try:
        # Of a folder no weights are asked for.
        path = str(folder) if folder.is_dir() else resolve_model(model, say=typer.echo)
        tokenizer, ends = load_tokenizer(path), end_of_turn_ids(path)
    except UserError as e:
        typer.echo(f"error: {e}", err=True)
        raise typer.Exit(2) from None
    template = ChatTemplate(tokenizer, ends)
    verdicts = verify_tokenizer(tokenizer, ends, schemas)
    for line in report(verdicts):
        typer.echo(line)
    taught = detect_format(template)
    if taught:
        typer.echo(f"tool calls are read as: {taught} (rollout.tool_format)")
    else:
        why = explain_unknown_format(template)
        typer.echo(f"rows that show tools are refused: tool calls cannot be parsed: {why}")
    stops = ", ".join(f"{template.decode([i])!r} ({i})" for i in template.stop_ids)
    typer.echo(f"a turn ends with: {stops}")
    if template.encoder._cache is None:
        typer.echo(
            "word cache: off, for this tokenizer does not cut text into words by itself (slower)"
        )
    if other := _other_ids(template):
        typer.echo(other)
    if fix:
        _fix(tokenizer, ends, schemas, verdicts, output)
    if not taught or any(v.fails for v in verdicts):
        raise typer.Exit(1)


def report(verdicts: Sequence[Verdict]) -> list[str]:
    """The verdicts as a table, then what they mean, each meaning once."""
    from agentrl.chat.verify_template import format_verdicts

    width = max(len(v.shape) for v in verdicts)
    lines = [f"{v.shape:{width}}  {v.status}" for v in verdicts]
    said = [v for v in verdicts if v.detail]
    lines += ["", *format_verdicts(said), ""] if said else [""]
    if any(v.status == "drops thinking" for v in verdicts):
        lines.append(_DROPS)
    if any(v.ok and "unsupported" in v.kinds.values() for v in verdicts):
        lines.append(_NOT_WITH)
    ok = {v.shape for v in verdicts if v.ok}
    if "one tool" in ok and any(v.status == "unsupported" and not v.fails for v in verdicts):
        lines.append(_REFUSED)
    if "one tool" not in ok and "user only" in ok:
        lines.append(_TEXT_TOOLS)
    bad = [v.shape for v in verdicts if v.fails]
    usable = "every shape that the template takes can be trained on"
    lines.append(f"cannot be trained on: {', '.join(bad)}" if bad else usable)
    return lines


def _make_room(output: Path) -> None:
    """Refuse where no file can be written, before the work that it would hold."""
    from agentrl.errors import UserError

    if output.is_dir():
        raise UserError(
            f"--output {output} is a folder: name a file, such as {output / 'chat_template.jinja'}"
        )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--output {output}: no folder can be made there ({e.strerror})") from e


def _schemas(files: list[str]) -> Sequence[Any]:
    """The schemas of the files' tools; without files, of a tool that stands for any."""
    from agentrl.chat.verify_template import PROBE_TOOL
    from agentrl.errors import UserError
    from agentrl.registry import load_file, tools

    for name in files:
        load_file(name)
    if not files:
        return (PROBE_TOOL,)
    if not tools.names():
        raise UserError(f"no @tool in {', '.join(files)}")
    return [f.schema for name in tools.names() for f in tools.get(name).functions]


def _other_ids(template: ChatTemplate) -> str:
    """Whether the tokenizer makes other ids of a rendered conversation than agentrl does."""
    said = [
        {"role": "user", "content": "How much is 3*4?"},
        {"role": "assistant", "content": "It is 12."},
        {"role": "user", "content": "Are you sure?"},
    ]
    text = template.render(said)
    theirs = template.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    ours = list(template.encoder.encode_template_text(text))
    if theirs == ours:
        return ""
    at = next(i for i, (a, b) in enumerate(zip([*theirs, -1], [*ours, -1], strict=False)) if a != b)
    shown = [template.tokenizer.convert_ids_to_tokens(ids[at : at + 3]) for ids in (ours, theirs)]
    return (
        f"note: given this conversation as text, the tokenizer makes other ids of it: at token {at}"
        f" {shown[1]} instead of {shown[0]}. Legacy SentencePiece vocabularies put a space before"
        " each text that follows a control token; agentrl never does. Sampling and training agree;"
        " a server that renders and encodes by itself would show the model other tokens."
    )


def _fix(
    tokenizer: Any,
    ends: Sequence[int],
    schemas: Sequence[Any],
    verdicts: Sequence[Verdict],
    output: Path | None,
) -> None:
    from agentrl.chat.repair_template import repair_template, template_diff
    from agentrl.errors import UserError

    if all(v.status in ("append-only", "unsupported") for v in verdicts):
        fails = any(v.fails for v in verdicts)
        typer.echo(_NOT_TO_BE_FIXED if fails else _NOTHING_TO_FIX)
        return
    if not isinstance(tokenizer.chat_template, str):
        names = ", ".join(tokenizer.chat_template)
        typer.echo(f"--fix does not support tokenizers with several chat templates ({names})")
        return
    changed = repair_template(tokenizer, ends, schemas)
    if changed is None:
        typer.echo("no small change found that makes the template append-only")
        return
    typer.echo("the smallest change found that makes every such shape append-only:\n")
    typer.echo(template_diff(tokenizer.chat_template, changed), nl=False)
    if output:
        try:
            output.write_text(changed, encoding="utf-8")
        except OSError as e:
            raise UserError(f"--output {output} cannot be written: {e.strerror}") from e
        typer.echo(f"\nthe changed template is written to {output}")
