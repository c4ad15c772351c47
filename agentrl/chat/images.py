"""Images in the tokens of a conversation: where a template writes them, and how many tokens.

A template writes an image of a content list as a few control tokens, one of which is the model's
placeholder. In the row, the placeholder is repeated as often as the model makes vectors of the
image. In the texts that `template.py` fills in, an image is `IMAGE_MARK`, which no other text can
contain; so the text of a tool cannot become an image, whatever it spells.

Files that others made are decoded in processes with limits of time and memory, once for all
rollouts that see an image at the same time.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

from agentrl.chat.encoding import Encoder
from agentrl.chat.render import SALT, Renderer
from agentrl.errors import ConfigError, RequestRefused, TemplateError
from agentrl.images import (
    DECODE_SECONDS,
    FAMILIES,
    PLACE,
    Image,
    ImageError,
    ImageRule,
    RowImage,
    data_url,
    describe_image,
    prepare,
    read_size,
)
from agentrl.trajectory import Message, token_array
from agentrl.workers import Processes, WorkerDied, WorkerError

IMAGE_MARK = f"zq{SALT}imageqz"
"""The place of an image in a text that a template is filled with."""
VIDEO = "<|video_pad|>"
"""The placeholder of videos, in all families."""
PROCESSES = 2
MEMORY_MB = 2048
"""The limits of decoding: the number of processes, and the MiB of each."""

NO_IMAGES = (
    "the messages have images, but the policy reads none. Use a model that agentrl trains on images"
    f" ({', '.join(FAMILIES)}), with its own tokenizer and processor, or remove the images"
)


@cache
def _processes() -> Processes:
    return Processes(PROCESSES, memory_mb=MEMORY_MB)


class TemplateImages:
    """How one model and its chat template read images.

    Attributes:
        rule: how the model turns images into tokens.
    """

    def __init__(self, rule: ImageRule, render: Renderer, encoder: Encoder):
        """Find out what the template writes for an image.

        Args:
            rule: how the model turns images into tokens.
            render: renders a conversation.
            encoder: the encoder of the tokenizer.
        """
        self.rule = rule
        self._encoder = encoder
        self._ready: WeakValueDictionary[str, RowImage] = WeakValueDictionary()
        """The images that an episode holds, by their keys."""
        self._running: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Task[RowImage]] = {}
        before, after = f"zq{SALT}beforeqz", f"zq{SALT}afterqz"
        parts: list[Any] = [{"type": "text", "text": before}, {"type": "image"}]
        parts += [{"type": "image"}, {"type": "text", "text": after}]
        text = render.attempt([{"role": "user", "content": parts}]) or ""
        written = text.partition(before)[2].partition(after)[0]
        half = len(written) // 2
        head, ids, tail = encoder.split(written[:half])
        self.ids = ids
        """The tokens of an image, with one placeholder."""
        self._problem = ""
        if head or tail or written != 2 * written[:half] or ids.count(rule.token_id) != 1:
            self._problem = (
                "the messages have images, but the chat template does not write each as control"
                f" tokens with one placeholder (id {rule.token_id}): it writes two images as"
                f" {written!r:.200}. Use the chat template of a model that reads images"
            )

    def mark(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages in whose texts each image is an `IMAGE_MARK`.

        Raises:
            TemplateError: the chat template writes no images.
        """
        if not any(m.images for m in messages):
            return messages
        if self._problem:
            raise TemplateError(self._problem)
        return [
            replace(m, content=m.content.replace(PLACE, IMAGE_MARK), images=()) if m.images else m
            for m in messages
        ]

    def show(self, text: str) -> str:
        """Return a text with what the template writes in place of each `IMAGE_MARK`."""
        return text.replace(IMAGE_MARK, self._encoder.decode(self.ids))

    def encode(self, text: str, encode: Callable[[str], array[int]]) -> array[int]:
        """Encode a text, with one placeholder for each `IMAGE_MARK`.

        Args:
            text: the text, with marks.
            encode: encodes the text between the images.
        """
        if IMAGE_MARK not in text:
            return encode(text)
        first, *others = text.split(IMAGE_MARK)
        ids = encode(first) if first else token_array()
        for part in others:
            ids = ids + self.ids + (encode(part) if part else token_array())
        return ids

    def expand(self, ids: array[int], messages: Sequence[Message]) -> array[int]:
        """Return ids with as many placeholders for each image as it has tokens.

        Args:
            ids: the tokens of the messages, with one placeholder for each image.
            messages: the messages, whose images these are.

        Raises:
            TemplateError: the ids have more or fewer placeholders than the messages have images.
        """
        images, placeholder = images_of(messages), self.rule.token_id
        if ids.count(placeholder) != len(images):
            raise TemplateError(
                f"the conversation has {len(images)} images, but its text has"
                f" {ids.count(placeholder)} of the placeholder"
                f" {self._encoder.decode([placeholder])!r}. Remove it from the assistant's messages"
                " of the row"
            )
        result, start = token_array(), 0
        for image in images:
            at = ids.index(placeholder, start)
            result.extend(ids[start:at])
            result.extend(token_array([placeholder]) * self.tokens(image))
            start = at + 1
        return result + ids[start:] if images else ids

    def spells(self, text: str) -> bool:
        """Return whether SGLang takes a part of a text for an image or a video."""
        return VIDEO in text or self._encoder.decode([self.rule.token_id]) in text

    def check_spelling(self, ids: array[int]) -> None:
        """Check that the text of a row has no more placeholders than its tokens.

        SGLang looks for them in the text. It would never answer, or take other tokens.

        Raises:
            RequestRefused: the text has more.
        """
        text, placeholder = self._encoder.decode(ids), self.rule.token_id
        most = {self._encoder.decode([placeholder]): ids.count(placeholder), VIDEO: 0}
        for name, count in most.items():
            if text.count(name) > count:
                raise RequestRefused(
                    f"a row with images has the text {name!r}, which SGLang takes for media. Remove"
                    " it from prompts and tool results, or set rollout.name=local"
                )

    def tokens(self, image: Image) -> int:
        """Return the number of tokens of an image. Of one that is not prepared, read the header.

        Raises:
            ImageError: it is no image.
        """
        ready = self._ready.get(image.key)
        return ready.tokens if ready else self.rule.tokens(*self.rule.size(*read_size(image)))

    def describe(self, text: str, messages: Sequence[Message]) -> str:
        """Return the text of a row with a description of each image in place of placeholders.

        Args:
            text: the text of the row's tokens.
            messages: the messages of the row.
        """
        for image in images_of(messages):
            placeholders = self._encoder.decode([self.rule.token_id]) * self.tokens(image)
            text = text.replace(placeholders, describe_image(image), 1)
        return text

    async def prepare(self, image: Image) -> RowImage:
        """Return an image as the model reads it, decoded in another process.

        Callers that hold the result share it.

        Raises:
            ImageError: the image cannot be read, or not within the limits.
        """
        if ready := self._ready.get(image.key):
            return ready
        key = asyncio.get_running_loop(), image.key
        if key not in self._running:
            self._running[key] = asyncio.ensure_future(self._prepare(image))
            self._running[key].add_done_callback(lambda _: self._running.pop(key, None))
        return await asyncio.shield(self._running[key])

    async def _prepare(self, image: Image) -> RowImage:
        try:
            ready = await _processes().call(prepare, image, self.rule, seconds=DECODE_SECONDS)
        except TimeoutError:
            raise ImageError(f"an image was not decoded in {DECODE_SECONDS:g} s") from None
        except (WorkerDied, WorkerError) as e:
            raise ImageError(f"an image cannot be decoded: {e}") from e
        self._ready[image.key] = ready
        return ready


def images_of(messages: Iterable[Message]) -> list[Image]:
    """Return the images of messages, in order."""
    return [image for message in messages for image in message.images]


def without_images(message: Message) -> Message:
    """Return a message with its texts alone."""
    if not message.images:
        return message
    return replace(message, content=message.content.replace(PLACE, ""), images=())


def message_dict(message: Message) -> dict[str, Any]:
    """Return a message as chat templates read it: with images, its content is a list of parts."""
    content: Any = message.content
    if message.images:
        first, *others = content.split(PLACE)
        content = [{"type": "text", "text": first}] * bool(first)
        for text in others:
            content += [{"type": "image"}, *[{"type": "text", "text": text}] * bool(text)]
    return {"role": message.role, "content": content}


def openai_message(message: Message) -> dict[str, Any]:
    """Return a message as OpenAI's chat completions have it: an image is a data URL."""
    written, urls = message_dict(message), map(data_url, message.images)
    if message.images:
        written["content"] = [
            {"type": "image_url", "image_url": {"url": next(urls)}} if p["type"] == "image" else p
            for p in written["content"]
        ]
    return written


def require_rule(images: TemplateImages | None) -> TemplateImages:
    """Return how the model reads images.

    Raises:
        ConfigError: it reads none.
    """
    if images is None:
        raise ConfigError(NO_IMAGES)
    return images
