"""Count shapes in a picture, and look at parts of it with the tool `zoom`.

    python examples/shapes/env.py data/shapes.parquet --rows 256 --seed 1 --difficulty 2

The difficulty is the size of the picture: 1 has up to 6 shapes, 2 up to 25, and 3 asks how many
more there are of one shape than of another. 0 asks for the number of all shapes, without a tool.
"""

from __future__ import annotations

import argparse
import io
import json
import random
from typing import Annotated, Any, NamedTuple

from PIL import Image, ImageDraw
from pydantic import Field

from agentrl import ToolError, reward, tool
from agentrl.data import write_rows

CELL = 28
"""Shapes are in the cells of a grid, so that they never overlap. In pixels."""
GRIDS = {0: (3, 2), 1: (3, 2), 2: (5, 5), 3: (5, 5)}
KINDS = ("circle", "square", "triangle")
COLORS = {"red": (220, 30, 30), "green": (20, 150, 60), "blue": (40, 70, 220)}
ZOOMED = 168
"""The longer side of what `zoom` returns, in pixels."""
PROMPT = (
    "<image>\n{question} The picture is {width} pixels wide and {height} pixels high. You may use"
    " the tool zoom to see a part of it enlarged. End with only the number after ####, for example:"
    " #### 3"
)


class Shape(NamedTuple):
    """A shape: its kind, its color, its center and half of its width, in pixels."""

    kind: str
    color: str
    x: int
    y: int
    radius: int


@reward("shapes")
def shapes(trajectory) -> float:
    """Return 1 if the last line of the last message is #### and the right number."""
    lines = trajectory.final_text.strip().splitlines()
    return float(bool(lines) and lines[-1].strip() == f"#### {trajectory.sample.ground_truth}")


@tool
class Zoom:
    """Looks at parts of the picture."""

    def __init__(self, sample):
        [image] = sample.prompt[-1].images
        self.picture = Image.open(io.BytesIO(image.data)).convert("RGB")

    def zoom(
        self,
        x: Annotated[int, Field(ge=0)],
        y: Annotated[int, Field(ge=0)],
        w: Annotated[int, Field(ge=4)],
        h: Annotated[int, Field(ge=4)],
    ) -> Image.Image:
        """Show a part of the picture, enlarged.

        Args:
            x: the left edge of the part, in pixels
            y: the upper edge of the part, in pixels
            w: the width of the part, in pixels
            h: the height of the part, in pixels
        """
        width, height = self.picture.size
        if x + w > width or y + h > height:
            raise ToolError(
                f"the part ends at ({x + w}, {y + h}), outside of the picture, which is {width}"
                f" pixels wide and {height} pixels high"
            )
        factor = ZOOMED / max(w, h)
        size = max(1, round(w * factor)), max(1, round(h * factor))
        return self.picture.crop((x, y, x + w, y + h)).resize(size, Image.Resampling.BICUBIC)


def draw(width: int, height: int, scene: list[Shape]) -> Image.Image:
    """Return the picture of a scene."""
    picture = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(picture)
    for kind, color, x, y, r in scene:
        fill = COLORS[color]
        if kind == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill)
        elif kind == "square":
            pen.rectangle((x - r, y - r, x + r, y + r), fill)
        else:
            pen.polygon([(x - r, y + r), (x + r, y + r), (x, y - r)], fill)
    return picture


def count(scene: list[Shape], kind: str, color: str) -> int:
    """Return the number of shapes of a kind and color."""
    return sum((shape.kind, shape.color) == (kind, color) for shape in scene)


def make_row(rng: random.Random, difficulty: int) -> dict[str, Any]:
    """Return a row whose answers are about equally frequent."""
    columns, lines = GRIDS[difficulty]
    cells = [(column, line) for column in range(columns) for line in range(lines)]
    rng.shuffle(cells)
    looks = [(kind, color) for kind in KINDS for color in COLORS]
    if difficulty == 0:
        scene = place(rng, rng.choices(looks, k=rng.randint(0, 3)), cells)
        answer = str(len(scene))
        prompt = "<image>\nHow many shapes?"
        row = make_row_of(scene, columns, lines, prompt, answer)
        return row | {"agent_name": "single_turn", "answer": f"#### {answer}"}
    wanted, other, *rest = rng.sample(looks, len(looks))
    most = len(cells) // 3 + 1
    of_other = rng.randint(0, most // 2)
    answer = rng.randint(0, most - (of_other if difficulty == 3 else 0))
    drawn = [wanted] * (answer + (of_other if difficulty == 3 else 0)) + [other] * of_other
    drawn += rng.choices(rest, k=rng.randint(0, len(cells) - len(drawn)))
    scene = place(rng, drawn, cells)
    width, height = columns * CELL, lines * CELL
    question = f"How many {wanted[1]} {wanted[0]}s are there?"
    if difficulty == 3:
        question = f"How many more {wanted[1]} {wanted[0]}s than {other[1]} {other[0]}s are there?"
    text = PROMPT.format(question=question, width=width, height=height)
    row = make_row_of(scene, columns, lines, text, str(answer))
    return row | {"agent_name": "tool_agent", "tools": ["zoom"]}


def place(
    rng: random.Random, looks: list[tuple[str, str]], cells: list[tuple[int, int]]
) -> list[Shape]:
    """Return shapes of these kinds and colors, each in a cell."""
    scene = []
    for (kind, color), (column, line) in zip(looks, cells, strict=False):
        radius = rng.randint(5, 10)
        free = CELL // 2 - radius - 2
        x = column * CELL + CELL // 2 + rng.randint(-free, free)
        y = line * CELL + CELL // 2 + rng.randint(-free, free)
        scene.append(Shape(kind, color, x, y, radius))
    return scene


def make_row_of(
    scene: list[Shape], columns: int, lines: int, prompt: str, answer: str
) -> dict[str, Any]:
    """Return the fields that all rows have."""
    file = io.BytesIO()
    draw(columns * CELL, lines * CELL, scene).save(file, "PNG")
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "images": [{"bytes": file.getvalue()}],
        "data_source": "examples/shapes",
        "ground_truth": answer,
        "extra_info": {"scene": [list(shape) for shape in scene]},
    }


def rows(count: int, seed: int, difficulty: int = 1) -> list[dict[str, Any]]:
    """Return the rows of a dataset."""
    rng = random.Random(seed)
    return [make_row(rng, difficulty) for _ in range(count)]


def gold(row: dict[str, Any]) -> list[str]:
    """Return the turns of a policy that looks at the upper left quarter, and then is right."""
    with Image.open(io.BytesIO(row["images"][0]["bytes"])) as picture:
        width, height = picture.size
    arguments = {"x": 0, "y": 0, "w": width // 2, "h": height // 2}
    call = json.dumps({"name": "zoom", "arguments": arguments})
    return [f"<tool_call>\n{call}\n</tool_call>", f"#### {row['ground_truth']}"]


def main() -> None:
    """Write rows to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output", help="a .parquet file")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--difficulty", type=int, choices=sorted(GRIDS), default=1)
    arguments = parser.parse_args()
    write_rows(arguments.output, rows(arguments.rows, arguments.seed, arguments.difficulty))


if __name__ == "__main__":
    main()
