"""Tools, environments and their rows give images, in process and over HTTP alike."""

from __future__ import annotations

import io
from dataclasses import replace

import orjson
import pytest
from PIL import Image as PIL
from support.tool_server import row, serving_tools

from agentrl.errors import ToolError, UserCodeError, UserError
from agentrl.images import PLACE, Image
from agentrl.replies import Reply, check_reply
from agentrl.tools import Environment, environment, tool
from agentrl.tools.payloads import from_wire, to_opening, to_result, to_wire
from agentrl.trajectory import Message, ToolCall, ToolResult


def picture(color="red"):
    return PIL.new("RGB", (30, 20), color)


def png(color="red"):
    file = io.BytesIO()
    picture(color).save(file, "PNG")
    return file.getvalue()


RED = Image.of(picture())


@tool
def plot(kind: str):
    """Plot."""
    return {
        "pil": picture(),
        "png": png(),
        "image": RED,
        "list": ["before", picture(), "after"],
        "result": ToolResult(["a", RED], reward=0.5),
        "mixed": [picture(), {"x": 1}],
        "text": ["x", "y"],
        "bytes": b"plain",
        "empty": picture().crop((5, 5, 5, 9)),
    }[kind]


@tool
async def see(messages):
    """Report how many images each message of the conversation has."""
    return [f"{len(m.images)} in {m.content!r} " for m in messages] + [messages[0].images[0]]


@environment("gallery")
class Gallery(Environment):
    def __init__(self, sample):
        self.images = [i for m in sample.prompt for i in m.images]

    async def start(self):
        return ["The same again: ", *self.images]

    async def respond(self, messages):
        return Reply(["blue: ", picture("blue")])


@pytest.fixture(scope="module")
def url():
    with serving_tools() as url:
        yield url


async def run(toolbox, name, messages=(), **arguments):
    sample = row(name)
    await toolbox.open(sample.id, sample)
    (result,) = await toolbox.run([ToolCall(name, arguments)], sample.id, 0, messages)
    return result


@pytest.mark.parametrize(
    ("kind", "content", "n"),
    [
        ("pil", PLACE, 1),
        ("png", PLACE, 1),
        ("image", PLACE, 1),
        ("list", f"before{PLACE}after", 1),
        ("result", f"a{PLACE}", 1),
        ("text", '["x","y"]', 0),
        ("bytes", "plain", 0),
    ],
)
async def test_what_a_tool_returns(toolbox, kind, content, n):
    result = await run(toolbox, "plot", kind=kind)
    assert (result.content, result.ok, result.error) == (content, True, "")
    pixels = [PIL.open(io.BytesIO(i.data)).convert("RGB").tobytes() for i in result.images]
    assert pixels == [picture().tobytes()] * n
    assert result.reward == (0.5 if kind == "result" else None)


async def test_other_values_beside_an_image_are_a_bug_of_the_tool(toolbox):
    result = await run(toolbox, "plot", kind="mixed")
    assert (result.error, result.images) == ("crash", ())


async def test_a_picture_without_pixels_is_an_error_for_the_model(toolbox):
    result = await run(toolbox, "plot", kind="empty")
    assert result.error == "tool_error"
    assert "a PIL image of 0x4 pixels (RGB): cannot write empty image" in result.content


async def test_a_tool_reads_the_images_of_the_conversation(toolbox):
    result = await run(toolbox, "see", [Message.of("user", "look: ", RED)])
    assert result.images == (RED,)
    assert result.content.startswith("1 in ")


async def test_an_environment_gets_and_gives_images(toolbox):
    sample = row("gallery", environment="gallery")
    prompt = (Message.of("user", "This: ", RED),)
    sample = replace(sample, prompt=prompt)
    opened = await toolbox.open(sample.id, sample)
    assert opened.messages == (Message.of("user", "The same again: ", RED),)
    reply = await toolbox.respond(sample.id, 0, [*prompt, Message("assistant", "a")])
    assert reply.content == f"blue: {PLACE}"
    assert reply.images == (Image.of(picture("blue")),)


def test_an_image_that_is_too_large_is_the_text_that_the_model_reads():
    with pytest.raises(ToolError, match="20 MiB"):
        to_result(b"\x89PNG\r\n\x1a\n" + bytes(21 << 20))


def test_a_place_without_an_image_is_text():
    assert to_result(PLACE) == ToolResult(PLACE)
    assert to_result([f"x{PLACE}", RED]).content == f"x\ufffd{PLACE}"


def test_openings_and_replies():
    assert to_opening("it", [RED, "text"]) == (Message.of("user", RED, "text"),)
    assert to_opening("it", [Message.of("system", RED)]) == (Message.of("system", RED),)
    with pytest.raises(UserCodeError, match="beside an image"):
        to_opening("it", [RED, 3])
    assert check_reply("it", Reply("text")) == Reply("text")
    with pytest.raises(UserCodeError, match="beside an image"):
        check_reply("it", Reply([RED, 3]))


def test_what_goes_over_the_wire():
    for value in (Reply(f"a{PLACE}", images=(RED,)), ToolResult(PLACE, images=(RED,))):
        assert type(value)(**from_wire(orjson.loads(orjson.dumps(to_wire(value))))) == value
    with pytest.raises(UserError, match="base64"):
        from_wire({"images": [{"data": "no base64!"}]})
