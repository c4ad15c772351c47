"""`agentrl check template`: verify a chat template, and look for a change that repairs it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agentrl.cli.options import Files, resolve_model
from agentrl.terminal import echo

if TYPE_CHECKING:
    from agentrl.chat import ChatTemplate
    from agentrl.chat.verify_template import Verdict

_DROPS = (
    "drops thinking: the template removes a turn's thinking when further messages follow."
    " rollout.history_thinking=keep trains on one row with all thinking, as it was sampled; strip"
    " starts a new segment there, which is what a server that renders the messages again shows."
)
_UNSUPPORTED = (
    "unsupported is not an error: the template refuses these conversations, so rows must not need"
    " them. Results of several calls are then shown one after another."
)
_NOT_WITH = (
    "not with KIND: the template cannot render such turns. If the model writes one, the row keeps"
    " it as it was sampled; a server that renders the messages again would show other tokens."
)
_TEXT_TOOLS = (
    "rows with tools need the loop `react`, which shows tools and results as text; rows without"
    " tools work."
)
_NOTHING_TO_FIX = "nothing to fix: all conversations that the template accepts are append-only"
_CANNOT_BE_FIXED = (
    "no small change helps: all conversations that the template accepts are append-only, and it"
    " has no text for the others. Rows with tools need the loop `react`, or a model whose template"
    " shows tools; check template --with-tools hermes writes one for models with ChatML's tokens."
)


def check_template(
    model: str,
    file: Files = None,
    fix: Annotated[bool, typer.Option("--fix")] = False,
    with_tools: Literal["hermes"] | None = None,
    output: Path | None = None,
) -> None:
    """Verify a model's chat template with conversations of many shapes.

    Prints one result for each shape, that of the worst kind of turn (with and without text,
    thinking, calls): append-only, drops thinking, unsupported, or differs, with the first token
    that differs. Also prints the format of tool calls. Loads no weights. Exit code 1 if training
    with the template is not possible or its calls cannot be parsed, 2 if MODEL has no template.
    The change that --fix finds is printed as a diff. A file `chat_template.jinja` in the model's
    folder replaces any other template there.

    Args:
        model: A model folder or hub name, or `tiny`.
        fix: Look for the smallest change that makes it append-only.
        with_tools: Replace a template that shows no tools, or write a missing one, for models with
            the control tokens of ChatML; then verify it.
        output: The file for the changed template. Default: --fix prints it, --with-tools writes
            chat_template.jinja into the model's folder.

    Examples:
        agentrl check template Qwen/Qwen3-0.6B

        agentrl check template models/mine -f my_tools.py

        agentrl check template models/mine --fix --output models/mine/chat_template.jinja

        agentrl check template models/mine --with-tools hermes
    """
    from agentrl.chat import ChatTemplate, load_tokenizer
    from agentrl.chat.tokenizer import end_of_turn_ids
    from agentrl.chat.verify_template import verify_tokenizer
    from agentrl.errors import UserError

    if fix and with_tools:
        raise UserError(
            "--fix and --with-tools: use one of them. --fix changes the template of the model,"
            " --with-tools replaces it"
        )
    if output and not (fix or with_tools):
        raise UserError("--output needs --fix or --with-tools")
    schemas = _schemas(file or [])
    folder = Path(model).expanduser()
    try:
        # The folder needs no weights: do not check for them.
        path = str(folder) if folder.is_dir() else resolve_model(model, say=echo)
        tokenizer = load_tokenizer(path, needs_template=not with_tools)
        ends = end_of_turn_ids(path)
    except UserError as e:
        echo(f"error: {e}", err=True)
        raise typer.Exit(2) from None
    if with_tools:
        _add_tools(tokenizer, output or Path(path) / "chat_template.jinja")
    template = ChatTemplate(tokenizer, ends)
    verdicts = verify_tokenizer(tokenizer, ends, schemas)
    for line in report(verdicts):
        echo(line)
    reads_calls = _describe_format(template)
    stops = ", ".join(f"{template.decode([i])!r} ({i})" for i in template.stop_ids)
    echo(f"a turn ends with: {stops}")
    if template.encoder.cache is None:
        echo("word cache: off, because this tokenizer does not split text into words (slower)")
    if note := _compare_ids(template):
        echo(note)
    if fix:
        _fix(tokenizer, ends, schemas, verdicts, output)
    if not reads_calls or any(v.fails for v in verdicts):
        raise typer.Exit(1)


def _describe_format(template: ChatTemplate) -> bool:
    """Print the format of tool calls; return whether they can be parsed."""
    from agentrl.chat.formats.detect import detect_format, explain_unknown_format

    if tool_format := detect_format(template):
        echo(f"tool calls are parsed as: {tool_format} (rollout.tool_format)")
        return True
    reason = explain_unknown_format(template)
    echo(f"rows with tools are refused, because tool calls cannot be parsed: {reason}")
    return False


def report(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the verdicts as a table, followed by an explanation of each kind of verdict."""
    from agentrl.chat.verify_template import format_verdicts

    width = max(len(v.shape) for v in verdicts)
    lines = [f"{v.shape:{width}}  {v.status}" for v in verdicts]
    detailed = [v for v in verdicts if v.detail]
    lines += ["", *format_verdicts(detailed), ""] if detailed else [""]
    if any(v.status == "drops thinking" for v in verdicts):
        lines.append(_DROPS)
    if any(v.ok and "unsupported" in v.kinds.values() for v in verdicts):
        lines.append(_NOT_WITH)
    ok = {v.shape for v in verdicts if v.ok}
    if "one tool" in ok and any(v.status == "unsupported" and not v.fails for v in verdicts):
        lines.append(_UNSUPPORTED)
    if "one tool" not in ok and "user only" in ok:
        lines.append(_TEXT_TOOLS)
    bad = [v.shape for v in verdicts if v.fails]
    usable = "training is possible on all shapes that the template accepts"
    lines.append(f"training is not possible on: {', '.join(bad)}" if bad else usable)
    return lines


def _add_tools(tokenizer: Any, output: Path) -> None:
    """Set a template that shows tools in a tokenizer, and write it to a file."""
    from agentrl.chat.hermes import hermes_template
    from agentrl.errors import UserError

    has_template = bool(tokenizer.chat_template)
    try:
        tokenizer.chat_template = hermes_template(tokenizer)
    except UserError as e:
        raise UserError(f"--with-tools hermes: {e}") from None
    _write(output, tokenizer.chat_template)
    same = ": conversations without tools have the same text as before" if has_template else ""
    echo(f"wrote {output}{same}\n")
    if not has_template:
        echo("A base model must first imitate conversations in this template: agentrl sft\n")


def _write(output: Path, template: str) -> None:
    """Write a chat template."""
    from agentrl.errors import UserError

    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(template, encoding="utf-8")
    except OSError as e:
        raise UserError(f"{output} cannot be written ({e.strerror}): --output names a file") from e


def _schemas(files: list[str]) -> Sequence[Any]:
    """Return the schemas of the tools in the files; without files, that of a sample tool."""
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


def _compare_ids(template: ChatTemplate) -> str:
    """Return a note if the tokenizer encodes a rendered conversation differently from agentrl."""
    messages = [
        {"role": "user", "content": "How much is 3*4?"},
        {"role": "assistant", "content": "It is 12."},
        {"role": "user", "content": "Are you sure?"},
    ]
    text = template.render(messages)
    theirs = template.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    ours = list(template.encoder.encode_trusted(text))
    if theirs == ours:
        return ""
    at = next(i for i, (a, b) in enumerate(zip([*theirs, -1], [*ours, -1], strict=False)) if a != b)
    tokens = [template.tokenizer.convert_ids_to_tokens(ids[at : at + 3]) for ids in (ours, theirs)]
    return (
        "note: the tokenizer encodes the text of a whole conversation differently: from token"
        f" {at} on {tokens[1]} instead of {tokens[0]}. Legacy SentencePiece vocabularies add a"
        " space after each control token; agentrl never does. Sampling and training use the same"
        " tokens; a server that renders and encodes the messages itself would show the model other"
        " tokens."
    )


def _fix(
    tokenizer: Any,
    ends: Sequence[int],
    schemas: Sequence[Any],
    verdicts: Sequence[Verdict],
    output: Path | None,
) -> None:
    from agentrl.chat.repair_template import repair_template, template_diff

    if all(v.status in ("append-only", "unsupported") for v in verdicts):
        fails = any(v.fails for v in verdicts)
        echo(_CANNOT_BE_FIXED if fails else _NOTHING_TO_FIX)
        return
    if not isinstance(tokenizer.chat_template, str):
        names = ", ".join(tokenizer.chat_template)
        echo(f"--fix does not support tokenizers with several chat templates ({names})")
        return
    changed = repair_template(tokenizer, ends, schemas)
    if changed is None:
        echo("found no small change that makes the template append-only")
        return
    echo("the smallest change that makes all these shapes append-only:\n")
    echo(template_diff(tokenizer.chat_template, changed), nl=False)
    if output:
        _write(output, changed)
        echo(f"\nwrote the changed template to {output}")
