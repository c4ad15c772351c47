"""The example with pictures: answers are those of the pixels, `zoom` shows what is there."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image as PIL
from support.recorded import play
from support.vision import vision_tokenizer, write_vision_model
from typer.testing import CliRunner

from agentrl import ToolError
from agentrl import play as play_episode
from agentrl.cli import app
from agentrl.config import load_config
from agentrl.data import load_samples, read_rows, write_rows
from agentrl.images import Image, ImageRule
from agentrl.registry import load_file, tools
from agentrl.rewards import Scorer
from agentrl.store import TrajectoryStore
from agentrl.testing import Scripted
from agentrl.trajectory import Group, Message, Sample, Trajectory

ENV = Path(__file__).parents[2] / "examples/shapes/env.py"


@pytest.fixture(scope="module")
def env():
    return load_file(str(ENV))


def picture(row) -> PIL.Image:
    return PIL.open(io.BytesIO(row["images"][0]["bytes"]))


def blobs(picture: PIL.Image, color: tuple[int, int, int]) -> int:
    """The number of connected areas of a color."""
    left = {
        (x, y)
        for x in range(picture.width)
        for y in range(picture.height)
        if picture.getpixel((x, y)) == color
    }
    number = 0
    while left:
        number += 1
        edge = [left.pop()]
        while edge:
            x, y = edge.pop()
            around = {(x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)} & left
            left -= around
            edge += around
    return number


@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_the_answer_is_that_of_the_picture(env, difficulty):
    for row in env.rows(30, seed=difficulty, difficulty=difficulty):
        scene = [env.Shape(*shape) for shape in row["extra_info"]["scene"]]
        # Each shape is an area of its own: the scene is what the picture shows.
        for name, color in env.COLORS.items():
            assert blobs(picture(row), color) == sum(shape.color == name for shape in scene)
        words = row["prompt"][0]["content"].split("How many ")[1].split(" are there")[0].split()
        looks = [(k.removesuffix("s"), c) for c, k in pairwise(words) if c in env.COLORS]
        counts = [env.count(scene, *look) for look in looks]
        answer = counts[0] - counts[1] if difficulty == 3 else counts[0]
        assert len(looks) == (2 if difficulty == 3 else 1)
        assert row["ground_truth"] == str(answer)


@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_rows_are_the_seed_s_and_answers_can_hardly_be_guessed(env, difficulty):
    rows = env.rows(200, 5, difficulty)
    assert rows == env.rows(200, 5, difficulty) != env.rows(200, 6, difficulty)
    [(_, most)] = Counter(row["ground_truth"] for row in rows).most_common(1)
    assert most < 200 / 3


def test_the_command_writes_the_rows(env, tmp_path):
    file = tmp_path / "shapes.parquet"
    command = [sys.executable, ENV, file, "--rows", "9", "--seed", "3", "--difficulty", "2"]
    subprocess.run(command, check=True)
    assert read_rows(file) == env.rows(9, 3, 2)
    assert file.stat().st_size < 40_000


def zoom_of(env, row):
    prompt = (Message.of("user", Image.of(row["images"][0]), "How many?"),)
    return env.Zoom(Sample("0", prompt))


def test_zoom_shows_a_part_enlarged(env):
    shape = env.Shape("square", "blue", 42, 14, 10)
    file = io.BytesIO()
    env.draw(84, 56, [shape]).save(file, "PNG")
    zoom = zoom_of(env, {"images": [{"bytes": file.getvalue()}]})
    seen = zoom.zoom(28, 0, 28, 14)
    assert seen.size == (168, 84)
    # The square begins 4 pixels from the left and from above: 24 in the enlarged part.
    assert [seen.getpixel(at) for at in ((84, 60), (10, 60), (84, 10))] == [
        env.COLORS["blue"], (255, 255, 255), (255, 255, 255),
    ]  # fmt: skip
    assert zoom.zoom(0, 0, 84, 56).size == (168, 112)
    with pytest.raises(ToolError, match=r"ends at \(85, 56\), outside .* 84 pixels wide and 56"):
        zoom.zoom(1, 0, 84, 56)


def test_the_model_sees_the_limits_of_zoom(env):
    [schema] = [s["function"] for s in tools.get("zoom").spec.schemas]
    assert {n: p["minimum"] for n, p in schema["parameters"]["properties"].items()} == {
        "x": 0, "y": 0, "w": 4, "h": 4,
    }  # fmt: skip


def test_a_policy_that_looks_and_is_right_earns_1(env, tmp_path):
    """From the file of rows to the store: the zoomed part is in the row and in the messages."""
    tokenizer = vision_tokenizer()
    rule = ImageRule(tokenizer.convert_tokens_to_ids("<|image_pad|>"), 14, 2, 28 * 28, 64 * 28 * 28)
    config = load_config(None, ["rollout.max_turn_tokens=512", "rollout.max_trajectory_tokens=8192",
                                "reward.function=shapes"])  # fmt: skip
    rows = env.rows(2, 0, 1)
    write_rows(tmp_path / "rows.parquet", rows)
    groups = []
    for row, sample in zip(rows, load_samples(str(tmp_path / "rows.parquet")), strict=True):
        policy = Scripted(env.gold(row), tokenizer)
        trajectory = play_episode(sample, policy, tokenizer, config=config, images=rule)
        scored = asyncio.run(Scorer(config.reward).score(trajectory))
        assert scored.reward == 1.0
        [tool_message] = [m for m in trajectory.messages if m.role == "tool"]
        seen = PIL.open(io.BytesIO(tool_message.images[0].data))
        part = (
            picture(row)
            .convert("RGB")
            .crop((0, 0, 42, 28))
            .resize((168, 112), PIL.Resampling.BICUBIC)
        )
        assert seen.tobytes() == part.tobytes()
        [segment] = trajectory.segments
        assert [image.tokens for image in segment.images] == [3 * 2, 6 * 4]
        groups.append(Group(sample, (scored,)))
    store = TrajectoryStore(tmp_path / "trajectories")
    store.write(1, groups)
    assert [s.scored for s in store.read()] == [s for g in groups for s in g.scored]


def test_check_shows_the_size_of_images_and_refuses_other_engines(env, tmp_path):
    write_rows(tmp_path / "rows.parquet", env.rows(2, 0, 1))
    words = ["check", "--dataset", str(tmp_path / "rows.parquet"), "-f", str(ENV)]
    words += ["--model", str(write_vision_model(tmp_path / "model")), "reward.function=shapes"]
    checked = CliRunner().invoke(app, [*words, "trainer.device=cpu"])
    assert "<|vision_start|>[image 84x56 " in checked.output
    assert "<|image_pad|>" not in checked.output
    for value in ("name=vllm", "quantization=fp8"):
        refused = CliRunner().invoke(app, [*words, "rollout.name=sglang", f"rollout.{value}"])
        assert refused.exit_code
        assert "reads images" in str(refused.exception)


@pytest.mark.parametrize(
    ("text", "reward"),
    [("#### 3", 1), ("I see three.\n#### 3", 1), ("3", 0), ("#### 30", 0), ("#### 3\n#### 4", 0),
     ("#### 3 or 4", 0), ("", 0)],
)  # fmt: skip
def test_only_the_exact_number_earns_1(env, text, reward):
    played: Trajectory = play(1, 0, 0, text=text).trajectory
    trajectory = replace(played, sample=replace(played.sample, ground_truth="3"))
    assert env.shapes(trajectory) == reward
