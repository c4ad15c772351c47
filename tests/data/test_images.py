"""Images of rows: the column `images`, and `<image>` or parts in the messages."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image as PIL

from agentrl.data import load_samples, open_rows
from agentrl.data.convert import convert_rows
from agentrl.data.files import write_rows
from agentrl.errors import DataError
from agentrl.images import PLACE, Image


def png(color):
    file = io.BytesIO()
    PIL.new("RGB", (30, 20), color).save(file, "PNG")
    return file.getvalue()


RED, BLUE = png("red"), png("blue")


def url(data):
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def messages_of(path, *rows):
    write_rows(path, rows)
    return [sample.prompt for sample in load_samples(str(path))]


@pytest.mark.parametrize(
    "image",
    [
        {"bytes": RED, "path": None},
        {"bytes": None, "path": "red.png"},
        RED,
        "red.png",
        url(RED),
        {"image": url(RED)},
    ],
)
def test_the_forms_of_an_image(tmp_path, image):
    (tmp_path / "red.png").write_bytes(RED)
    ((message,),) = messages_of(
        tmp_path / "a.parquet", {"prompt": "see <image>, then answer", "images": [image]}
    )
    assert message.content == f"see {PLACE}, then answer"
    assert message.images == (Image(RED),)


def test_images_of_several_messages_come_in_order(tmp_path):
    ((system, user, second),) = messages_of(
        tmp_path / "a.jsonl",
        {
            "prompt": [
                {"role": "system", "content": "<image>"},
                {"role": "user", "content": [{"type": "text", "text": "<image>"}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "image"},
                        {"type": "text", "text": "and"},
                        {"type": "image_url", "image_url": {"url": url(RED)}},
                        {"type": "image", "image": url(BLUE)},
                    ],
                },
            ],
            "images": [url(RED), url(BLUE)],
        },
    )
    assert system.images == (Image(RED),)
    assert (user.content, user.images) == ("<image>", ())
    assert second.content == f"{PLACE}and{PLACE}{PLACE}"
    assert second.images == (Image(BLUE), Image(RED), Image(BLUE))


def test_without_the_column_a_place_is_text(tmp_path):
    ((message,), (other,)) = messages_of(
        tmp_path / "a.jsonl", {"prompt": "<image>"}, {"prompt": "<image>", "images": None}
    )
    assert (message.content, message.images) == (other.content, other.images) == ("<image>", ())


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"prompt": "<image><image>", "images": [url(RED)]},
            "2 places .* has 1 image. Write <image>",
        ),
        ({"prompt": "none", "images": [url(RED)]}, "0 places .* has 1 image. Write"),
        ({"prompt": "<image>", "images": []}, "1 place .* has 0 images. Write"),
        ({"prompt": "<image>", "images": ["no.png"]}, r"row 1, images\[0\]: .*no.png cannot be"),
        ({"prompt": "<image>", "images": ["/dev/zero"]}, "/dev/zero cannot be read: not a regular"),
        ({"prompt": "<image>", "images": ["."]}, "cannot be read: not a regular file"),
        ({"prompt": "<image>", "images": ["a\0b"]}, "cannot be read: .*embedded null"),
        ({"prompt": "<image>", "images": [7]}, r"images\[0\]: 7 is not an image"),
        ({"prompt": "x", "videos": ["x.mp4"]}, "videos: agentrl trains on texts and images only"),
        ({"prompt": "x", "audios": ["x.wav"]}, "audios: agentrl trains on texts and images only"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video", "video": "x"}]}]},
            "a part is neither text nor an image",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "1 place .* has 0 images. Write",
        ),
        (
            {
                "prompt": [
                    {"role": "assistant", "content": [{"type": "image", "image": url(RED)}]},
                    {"role": "user", "content": "x"},
                ]
            },
            "the policy writes text alone",
        ),
    ],
)
def test_mistakes_name_the_row_and_the_column(tmp_path, row, expected):
    write_rows(tmp_path / "a.jsonl", [{"prompt": "fine"}, row])
    with pytest.raises(DataError, match=expected) as e:
        load_samples(str(tmp_path / "a.jsonl"))
    assert "row 1" in str(e.value)


def test_an_image_that_disappears_is_an_error_of_its_row(tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    write_rows(tmp_path / "a.jsonl", [{"prompt": "<image>", "images": ["red.png"]}])
    rows = open_rows(str(tmp_path / "a.jsonl"))
    assert rows[0].prompt[0].images == (Image(RED),)
    (tmp_path / "red.png").unlink()
    with pytest.raises(DataError, match=r"row 0, images\[0\]: .*red.png cannot be read"):
        rows[0]


def test_rows_with_and_without_images_are_two_kinds(tmp_path):
    write_rows(
        tmp_path / "a.jsonl",
        [{"prompt": "a"}, {"prompt": "<image>", "images": [url(RED)]}, {"prompt": "b"}],
    )
    kinds = open_rows(str(tmp_path / "a.jsonl")).kinds
    assert [kind.rows.tolist() for kind in kinds] == [[0, 2], [1]]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_convert_keeps_images(tmp_path, suffix):
    source, target = tmp_path / "a.parquet", tmp_path / f"b.{suffix}"
    write_rows(source, [{"prompt": "<image>", "images": [{"bytes": RED, "path": None}]}])
    convert_rows(source, target)
    assert load_samples(str(target))[0].prompt[0].images == (Image(RED),)


def test_convert_takes_pil_images(tmp_path):
    class Dataset(list):
        column_names, features = ["prompt", "images"], {}

    rows = Dataset([{"prompt": "<image>", "images": [PIL.new("RGB", (3, 2))]}])
    convert_rows(rows, tmp_path / "a.jsonl")
    (image,) = load_samples(str(tmp_path / "a.jsonl"))[0].prompt[0].images
    assert PIL.open(io.BytesIO(image.data)).size == (3, 2)
