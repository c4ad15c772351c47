"""Writes the table of architectures in docs/models.md: `make models`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from support.architectures import ARCHITECTURES, architecture
from support.pages import with_text_between

from agentrl.engine.local.decoder import CannotDecode, Decoder
from agentrl.trainer.modes import prove_mode

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- table of models: make models -->\n", "<!-- end of the table of models -->\n"


def rows() -> Iterator[tuple[str, ...]]:
    """Yield the cells of each architecture."""
    yield "architecture", "class in transformers", "rows (on a CPU)", "`local`"
    yield ("---",) * 4
    for name in ARCHITECTURES:
        mode, _ = prove_mode(architecture(name))
        kind = type(architecture(name)).__name__
        yield name, f"`{kind}`", mode.value.removeprefix("rows "), local_engine(name)


def local_engine(name: str) -> str:
    """Return whether the local engine decodes an architecture."""
    try:
        Decoder(architecture(name))
    except CannotDecode:
        return "refused: use `rollout.name=sglang`"
    return "runs"


def with_table(page: str) -> str:
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in rows())
    return with_text_between(page, BEGIN, END, table)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
