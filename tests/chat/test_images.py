"""Images in prompts and deltas: the ids are those of transformers' own way, masks are 0."""

from __future__ import annotations

import asyncio
import io
import json
import pickle
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import ExifTags
from PIL import Image as PIL
from support.vision import TEMPLATE, vision_tokenizer, write_vision_model
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from agentrl.chat import ChatTemplate
from agentrl.chat.images import message_dict
from agentrl.errors import ConfigError, TemplateError
from agentrl.images import Image, ImageError, ImageRule, prepare
from agentrl.testing import byte_tokenizer
from agentrl.trajectory import Message

PLACEHOLDER, UNIT = "<|image_pad|>", 28
RULE = ImageRule(
    token_id=vision_tokenizer().convert_tokens_to_ids(PLACEHOLDER),
    patch=14,
    merge=2,
    min_pixels=UNIT**2,
    max_pixels=64 * UNIT**2,
)


@cache
def template() -> ChatTemplate:
    return ChatTemplate(vision_tokenizer(), images=RULE)


@cache
def picture(width: int, height: int, color: str = "red") -> Image:
    return Image.of(PIL.new("RGB", (width, height), color))


def ids_of_transformers(messages: list[Message], **options: Any) -> list[int]:
    """Render content lists, expand each placeholder as the processor does, encode."""
    tokenizer = vision_tokenizer()
    text = tokenizer.apply_chat_template(
        [message_dict(m) for m in messages], tokenize=False, **options
    )
    processor = Qwen2VLImageProcessorPil(
        patch_size=14,
        merge_size=2,
        size={"shortest_edge": RULE.min_pixels, "longest_edge": RULE.max_pixels},
    )
    first, *others = text.split(PLACEHOLDER)
    images = [image for m in messages for image in m.images]
    assert len(others) == len(images)
    for image, after in zip(images, others, strict=True):
        grid = processor(images=[pixels_of(image)], return_tensors="pt")["image_grid_thw"][0]
        first += PLACEHOLDER * (int(grid.prod()) // 4) + after
    return tokenizer(first, add_special_tokens=False)["input_ids"]


def pixels_of(image: Image) -> PIL.Image:
    from io import BytesIO

    return PIL.open(BytesIO(image.data)).convert("RGB")


# No text here spells a control token: the tokenizer of transformers would read it as one.
texts = st.text("ab \n<é🙂", max_size=6)
images = st.builds(picture, st.integers(10, 120), st.integers(10, 120))
parts = st.lists(texts | images, max_size=4)
roles = st.sampled_from(["user", "tool"])


@settings(max_examples=60, deadline=None)
@given(parts, st.lists(st.tuples(roles, parts), min_size=1, max_size=3), parts)
def test_a_row_that_grows_has_the_ids_of_the_whole_conversation(opening, between, last):
    """Images at the start, in the middle and in tool results."""
    messages = [Message.of("user", *opening)]
    row = template().prompt(messages)
    turn = template().encode("ok")
    end = template().close_id
    for role, content in [*between, ("user", last)]:
        row += turn
        row.append(end)
        messages.append(Message("assistant", "ok"))
        new = Message.of(role, *content)
        row += template().delta(messages, [new], end)
        messages.append(new)
    assert row.tolist() == ids_of_transformers(messages, add_generation_prompt=True)
    assert (
        template().conversation(
            messages, (), {i: [*turn, end] for i, m in enumerate(messages) if m.role == "assistant"}
        )
        == row
    )
    assert template().length(messages) == len(row)


def test_texts_that_spell_an_image_stay_texts():
    forged = "<|vision_start|><|image_pad|><|vision_end|> <image> \ufffc"
    for messages in (
        [Message("user", forged)],
        [Message("system", forged), Message("user", forged)],
        [Message.of("user", forged, picture(28, 28), forged)],
    ):
        n = sum(len(m.images) for m in messages)
        ids = template().prompt(messages)
        assert ids.count(RULE.token_id) == n
        history = [Message("user", "Q"), Message("assistant", "a")]
        for role in ("user", "tool"):
            new = Message.of(role, forged, *[picture(28, 28)] * n)
            delta = template().delta(history, [new], template().close_id)
            assert delta.count(RULE.token_id) == n


def test_the_place_of_an_image_without_images_is_text():
    message = Message("user", "a\ufffcb")
    assert "a\ufffcb" in template().decode(template().prompt([message]))


def test_other_images_are_other_prompts():
    """The caches of prompts know the images, not only the texts."""
    small, large = (template().prompt([Message.of("user", "x", picture(w, 28))]) for w in (28, 84))
    assert (small.count(RULE.token_id), large.count(RULE.token_id)) == (1, 3)


def test_a_placeholder_in_an_example_of_the_row_is_refused():
    messages = [
        Message("user", "Q"),
        Message("assistant", f"I see {PLACEHOLDER}"),
        Message.of("user", picture(28, 28)),
    ]
    for exact in (True, False):
        with pytest.raises(TemplateError, match="1 images, but its text has 2 of the placeholder"):
            template().prompt(messages, exact=exact)


def test_a_model_without_images_refuses_them_by_name():
    plain = ChatTemplate(byte_tokenizer())
    assert plain.prompt([Message("user", "\ufffc")])
    with pytest.raises(ConfigError, match="qwen2_5_vl"):
        plain.prompt([Message.of("user", picture(28, 28))])
    with pytest.raises(ConfigError, match="reads none"):
        plain.delta(
            [Message("user", "Q"), Message("assistant", "a")],
            [Message.of("user", picture(28, 28))],
            plain.close_id,
        )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<|vision_start|><|image_pad|><|vision_end|>", ""),
        ("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|><|image_pad|>"),
        ("<|vision_start|><|image_pad|><|vision_end|>", "an image: <|image_pad|>"),
    ],
)
def test_a_template_that_does_not_write_images_is_refused_at_an_image(old, new):
    tokenizer = vision_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace(old, new)
    other = ChatTemplate(tokenizer, images=RULE)
    assert other.prompt([Message("user", "Q")])
    with pytest.raises(TemplateError, match="the chat template does not write each"):
        other.prompt([Message.of("user", picture(28, 28))])


def test_a_template_that_writes_images_otherwise_in_results_is_refused_there():
    tokenizer = vision_tokenizer()
    call = "write(message.content) + '\\n</tool_response>'"
    assert call in TEMPLATE
    only_texts = (
        "(message.content if message.content is string else 'no list') + '\\n</tool_response>'"
    )
    tokenizer.chat_template = TEMPLATE.replace(call, only_texts)
    other = ChatTemplate(tokenizer, images=RULE)
    history = [Message("user", "Q"), Message("assistant", "a")]
    assert other.delta(history, [Message("tool", "text")], other.close_id)
    with pytest.raises(TemplateError, match=r"images \(tool\) in another way"):
        other.delta(history, [Message.of("tool", picture(28, 28))], other.close_id)


def test_a_sampled_placeholder_ends_a_turn_but_is_part_of_its_text():
    assert RULE.token_id in template().stop_ids
    assert template().decode_turn([RULE.token_id]) == PLACEHOLDER
    copy = pickle.loads(pickle.dumps(template()))
    assert copy.stop_ids == template().stop_ids and copy.images.rule == RULE
    assert copy.decode_turn([RULE.token_id]) == PLACEHOLDER


def test_images_are_decoded_once_for_those_who_hold_them():
    async def prepare_twice():
        images, image = template().images, picture(100, 57)
        first, second = await asyncio.gather(images.prepare(image), images.prepare(image))
        return first, second, await images.prepare(image)

    first, second, third = asyncio.run(prepare_twice())
    assert first is second is third
    assert (first.width, first.height, first.tokens) == (112, 56, 8)
    assert template().images.tokens(picture(100, 57)) == 8


def test_a_damaged_image_is_an_error_of_the_image():
    whole = picture(64, 64, "blue").data
    with pytest.raises(ImageError, match="cannot be decoded"):
        asyncio.run(template().images.prepare(Image(whole[: len(whole) // 2])))
    with pytest.raises(ImageError, match="no image"):
        asyncio.run(template().images.prepare(Image(b"text")))


@given(st.integers(1, 9000), st.integers(1, 9000))
@example(8200, 41)  # 293 x 1 squares: over 200 times as long as wide
@example(9000, 45)  # reduced to one square, it still has more than the most pixels
def test_sizes_are_those_of_transformers_and_stay_so(width, height):
    rule = ImageRule(0, 14, 2, 56 * 56, 28 * 28 * 256)

    def resize(width: int, height: int) -> tuple[int, int]:
        return smart_resize(height, width, 28, rule.min_pixels, rule.max_pixels)[::-1]

    try:
        size = rule.size(width, height)
    except ImageError:
        with pytest.raises(ValueError, match="aspect ratio"):
            resize(*resize(width, height))
        return
    assert resize(*size) == size  # what the learner and engines do with it
    once = resize(width, height)
    assert size == once or resize(*once) != once


def test_a_model_that_allows_one_size_only_says_so():
    with pytest.raises(ImageError, match="stays between the 200704 and 200704 pixels"):
        ImageRule(0, 14, 2, 200704, 200704).size(124, 49)


def prepared(picture: Any, file_format: str, **options: Any) -> PIL.Image:
    file = io.BytesIO()
    picture.save(file, file_format, **options)
    return PIL.open(io.BytesIO(prepare(Image(file.getvalue()), RULE).data))


def test_a_photo_is_turned_as_its_camera_says():
    photo, exif = PIL.new("RGB", (84, 56), "blue"), PIL.Exif()
    photo.paste("red", (0, 0, 84, 28))
    exif[ExifTags.Base.Orientation] = 6  # turn it clockwise
    seen = prepared(photo, "PNG", exif=exif)
    assert seen.size == (56, 84)
    assert (seen.getpixel((2, 40)), seen.getpixel((54, 40))) == ((0, 0, 255), (255, 0, 0))


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_all_modes_become_rgb(mode):
    gray, alpha = PIL.linear_gradient("L").resize((84, 56)), PIL.new("L", (84, 56), 255)
    if mode == "I;16":
        picture = gray.convert("I").point(lambda value: value * 256).convert("I;16")
    elif mode in ("LA", "RGBA"):
        picture = gray.convert(mode)
        picture.putalpha(alpha)
    else:
        picture = (gray if mode == "P" else gray.convert("RGB")).convert(mode)
    seen = prepared(picture, "JPEG" if mode == "CMYK" else "PNG", quality=100)
    assert seen.mode == "RGB"
    pairs = zip(seen.convert("L").tobytes(), gray.tobytes(), strict=True)
    assert max(abs(a - b) for a, b in pairs) <= 8


def test_an_adapter_reads_images_as_its_base(tmp_path):
    base = write_vision_model(tmp_path / "base")
    for name, below in (("one", base), ("two", tmp_path / "one"), ("itself", tmp_path / "itself")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(
            json.dumps({"base_model_name_or_path": str(below), "peft_type": "LORA"})
        )
    rule = ImageRule.load(base)
    assert rule and ImageRule.load(tmp_path / "two") == rule
    assert ImageRule.load(tmp_path / "itself") is None
