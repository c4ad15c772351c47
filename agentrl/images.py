"""Images in messages: read from what users have, and turned into what a model reads.

A message is text, with one `PLACE` for each of its images (`Message.of`). A row is tokens: an image
is as many placeholder tokens as the model makes vectors of it. So an image is decoded and resized
once, when it enters an episode (`prepare`): the engine and the learner get the same pixels, at a
size that neither changes again.
"""

from __future__ import annotations

import base64
import binascii
import errno
import io
import json
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, UserError
from agentrl.installation import install_command

PLACE = "\ufffc"
"""The place of an image in a text: Unicode's object replacement character."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_BYTES = 20 << 20
"""The largest file of an image, in bytes."""
MAX_PIXELS = 64 << 20
"""The most pixels of an image before it is resized: 256 MB while it is decoded."""
DECODE_SECONDS = 10.0
MOST_RESIZES = 32
"""`ImageRule.size` resizes at most so often. A very long image exceeds the model's limit after the
first resize; each further one halves the excess."""
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""The `model_type` of the models that read images here."""

_STARTS = {
    b"\x89PNG\r\n\x1a\n": "png",
    b"\xff\xd8\xff": "jpeg",
    b"RIFF": "webp",
    b"GIF8": "gif",
    b"BM": "bmp",
}


class ImageError(UserError, ValueError):
    """An image cannot be read, or is larger than the limits."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image as a row, a tool or a user gave it.

    Attributes:
        data: the file: PNG, JPEG, WebP, GIF or BMP.
        key: the SHA-256 of `data`, in hexadecimal.
    """

    data: bytes = field(repr=False)
    key: str = field(default="", compare=False)

    def __post_init__(self):
        if not self.data or len(self.data) > MAX_BYTES:
            raise ImageError(
                f"an image has {len(self.data)} bytes; it may have 1 to {MAX_BYTES}"
                f" ({MAX_BYTES >> 20} MiB)"
            )
        object.__setattr__(self, "key", sha256(self.data).hexdigest())

    @classmethod
    def of(cls, value: Any, folder: Path | None = None) -> Image:
        """Return an image from what users and datasets have.

        Args:
            value: the bytes of a file, a path, a data URL, a PIL image, or a mapping with `bytes`
                or `path` (or `image`, as in verl's rows).
            folder: the folder that relative paths begin in; None: paths are refused.

        Raises:
            ImageError: the value is none of these, or the file cannot be read.
        """
        if isinstance(value, Image):
            return value
        if isinstance(value, Mapping):
            found = [value[k] for k in ("bytes", "image", "path") if value.get(k) is not None]
            if found:
                return cls.of(found[0], folder)
        if isinstance(value, bytes | bytearray | memoryview):
            return cls(bytes(value))
        if isinstance(value, str) and value.startswith("data:"):
            return cls(_read_data_url(value))
        if isinstance(value, str | os.PathLike) and folder is not None:
            return cls(_read_file(folder / os.fspath(value).removeprefix("file://")))
        if hasattr(value, "save") and hasattr(value, "size"):
            return cls(_write_png(value))
        raise ImageError(
            f"{_shown(value)} is not an image. Use the bytes of a file, a path in a dataset, a data"
            " URL (data:image/png;base64,...) or a PIL image"
        )


@dataclass(frozen=True, slots=True, weakref_slot=True)
class RowImage:
    """An image in a row of tokens: RGB, at the size that the model reads.

    Attributes:
        data: the pixels as a PNG file.
        width: in pixels.
        height: in pixels.
        tokens: how many placeholder tokens the image has in the row.
        token_id: the id of these tokens.
        key: the SHA-256 of the file that `Image` had, in hexadecimal.
    """

    data: bytes = field(repr=False)
    width: int
    height: int
    tokens: int
    token_id: int
    key: str


@dataclass(frozen=True)
class ImageRule:
    """How a model turns images into tokens.

    Attributes:
        token_id: the placeholder token.
        patch: the width of a patch, in pixels.
        merge: how many patches, in each direction, become one token.
        min_pixels: a smaller image is enlarged.
        max_pixels: a larger image is reduced.
    """

    token_id: int
    patch: int
    merge: int
    min_pixels: int
    max_pixels: int

    @classmethod
    def load(cls, path: str | Path) -> ImageRule | None:
        """Return the rule of a model or of the model below an adapter: a folder or a hub name.

        None: the model reads no images here.

        Raises:
            ConfigError: the model's processor is missing or cannot be loaded.
        """
        # Here, so that a run without images imports neither PIL nor transformers' processors.
        from transformers import AutoConfig
        from transformers.utils.peft_utils import find_adapter_config_file

        try:
            bases = [str(path)]
            while file := find_adapter_config_file(bases[-1]):
                bases.append(json.loads(Path(file).read_bytes())["base_model_name_or_path"])
                if bases[-1] in bases[:-1]:  # `load_causal_lm` says what is wrong
                    return None
            path = bases[-1]
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError):  # a folder with a tokenizer alone
            return None
        if config.model_type not in FAMILIES:
            return None
        processor = load_processor(path)
        return cls(
            token_id=config.image_token_id,
            patch=processor.patch_size,
            merge=processor.merge_size,
            min_pixels=processor.size["shortest_edge"],
            max_pixels=processor.size["longest_edge"],
        )

    @cached_property
    def unit(self) -> int:
        """The width of the square that becomes one token, in pixels."""
        return self.patch * self.merge

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and the height at which the model reads an image.

        Engines and the learner resize the result again, so it is a size that this does not change.

        Raises:
            ImageError: the image is too narrow for the model: over 200 times as long as wide; or
                there is no such size.
        """
        before, after = (0, 0), (width, height)
        for _ in range(MOST_RESIZES):
            before, after = after, self._resize(*after)
            if before == after:
                return after
        raise ImageError(
            f"an image has {width}x{height} pixels, and no size near that stays between the"
            f" {self.min_pixels} and {self.max_pixels} pixels that the model allows. Allow more in"
            " `size` of the model's preprocessor_config.json"
        )

    def _resize(self, width: int, height: int) -> tuple[int, int]:
        # transformers' `smart_resize`. A process that decodes one image should not import torch.
        unit, pixels = self.unit, width * height
        if max(width, height) > 200 * min(width, height):
            raise ImageError(
                f"an image has {width}x{height} pixels; it may be 200 times as long as wide"
            )
        sides = [round(side / unit) * unit for side in (width, height)]
        if math.prod(sides) > self.max_pixels:
            by = math.sqrt(pixels / self.max_pixels)
            sides = [max(unit, math.floor(side / by / unit) * unit) for side in (width, height)]
        elif math.prod(sides) < self.min_pixels:
            by = math.sqrt(self.min_pixels / pixels)
            sides = [math.ceil(side * by / unit) * unit for side in (width, height)]
        return sides[0], sides[1]

    def tokens(self, width: int, height: int) -> int:
        """Return the number of tokens of an image at the size that the model reads."""
        return (width // self.unit) * (height // self.unit)


def load_processor(path: str | Path) -> Any:
    """Return transformers' image processor of a model, which needs no torchvision.

    Raises:
        ConfigError: PIL is not installed, or the folder has no processor.
    """
    try:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        return Qwen2VLImageProcessorPil.from_pretrained(path)
    except ImportError as e:
        raise ConfigError(
            f"{str(path)!r} reads images, for which Pillow is needed: {install_command('vision')}"
        ) from e
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"{str(path)!r} reads images, but its image processor cannot be loaded:"
            f" {str(e).splitlines()[0]}. It needs preprocessor_config.json"
        ) from e


def prepare(image: Image, rule: ImageRule) -> RowImage:
    """Decode an image, and resize it as the model does.

    It runs in a process with limits (`agentrl.workers.Processes`), because decoders of files that
    others made may need much time or memory.

    Raises:
        ImageError: the file is no image, is cut off, has several frames, or has too many pixels.
    """
    from PIL import Image as PIL
    from PIL import ImageOps, UnidentifiedImageError

    try:
        with PIL.open(io.BytesIO(image.data), formats=FORMATS) as file:
            width, height = file.size
            if width * height > MAX_PIXELS:
                raise ImageError(
                    f"an image has {width}x{height} pixels; it may have {MAX_PIXELS >> 20} million"
                )
            if (frames := getattr(file, "n_frames", 1)) > 1:
                raise ImageError(f"a {file.format} file has {frames} frames. Use one frame of it")
            ImageOps.exif_transpose(file, in_place=True)  # as transformers' `load_image`
            pixels = _to_rgb(file)
    except UnidentifiedImageError as e:
        raise ImageError(
            f"{len(image.data)} bytes that begin with {image.data[:12]!r} are no image that Pillow"
            f" reads. Formats: {', '.join(FORMATS)}"
        ) from e
    except (OSError, SyntaxError, ValueError, EOFError, PIL.DecompressionBombError) as e:
        if isinstance(e, ImageError):
            raise
        raise ImageError(f"an image cannot be decoded: {e}. Is its file complete?") from e
    size = rule.size(*pixels.size)
    if size != pixels.size:
        pixels = pixels.resize(size, PIL.Resampling.BICUBIC)
    return RowImage(_write_png(pixels), *size, rule.tokens(*size), rule.token_id, image.key)


def describe_image(image: Image | RowImage) -> str:
    """Return what stands for an image in texts for people, such as `[image 84x56 3fa9c04e]`."""
    size = ""
    if isinstance(image, RowImage):
        size = f"{image.width}x{image.height} "
    else:
        with suppress(Exception):  # Without Pillow, or of a damaged file, the size is unknown.
            size = "{}x{} ".format(*read_size(image))
    return f"[image {size}{image.key[:8]}]"


def media_type(image: Image) -> str:
    """Return the media type of an image, from the first bytes of its file.

    Raises:
        ImageError: it has none of `FORMATS`.
    """
    for start, kind in _STARTS.items():
        if image.data.startswith(start) and (kind != "webp" or image.data[8:12] == b"WEBP"):
            return f"image/{kind}"
    raise ImageError(f"a file that begins with {image.data[:12]!r} is none of {', '.join(FORMATS)}")


def show_row(
    token_ids: Sequence[int],
    images: deque[RowImage],
    decode: Callable[[Sequence[int]], str],
    show: Callable[[RowImage], str] = describe_image,
) -> str:
    """Return the text of a part of a row, with a text for each image in place of its tokens.

    Args:
        token_ids: the tokens of the part.
        images: the images of the row from this part on; those of this part are removed.
        decode: returns the text of tokens.
        show: returns the text of an image.
    """
    ids, text, start = list(token_ids), "", 0
    while images and images[0].token_id in ids[start:]:
        image = images.popleft()
        at = ids.index(image.token_id, start)
        text += decode(ids[start:at]) + show(image)
        start = at + image.tokens
    return text + decode(ids[start:])


def data_url(image: Image | RowImage) -> str:
    """Return an image as a data URL.

    Raises:
        ImageError: its file has none of `FORMATS`.
    """
    kind = "image/png" if isinstance(image, RowImage) else media_type(image)
    return f"data:{kind};base64,{base64.b64encode(image.data).decode()}"


def read_pixels(processor: Any, images: Sequence[RowImage]) -> dict[str, Any]:
    """Return images as arguments of a model: the tensors `pixel_values` and `image_grid_thw`.

    Args:
        processor: the model's image processor (`load_processor`).
        images: the images.
    """
    from PIL import Image as PIL

    pictures = [PIL.open(io.BytesIO(image.data)) for image in images]
    return dict(processor(images=pictures, return_tensors="pt"))


def read_parts(value: Any) -> list[str | Image] | None:
    """Return the texts and images of what a tool or an interaction returned.

    Args:
        value: an image (`Image`, a PIL image, the bytes of a PNG or JPEG file), a list or tuple of
            texts and images, or anything else.

    Returns:
        None if there is no image.

    Raises:
        TypeError: there is something else beside an image.
        ImageError: an image is larger than the limits.
    """
    items = value if isinstance(value, list | tuple) else [value]
    if not any(map(is_image, items)):
        return None
    for item in items:
        if not (isinstance(item, str) or is_image(item)):
            raise TypeError(f"beside an image, only texts and images are read, not {_shown(item)}")
    return [item if isinstance(item, str) else Image.of(item) for item in items]


def is_image(value: Any) -> bool:
    """Return whether a value is an image that `read_parts` reads."""
    if isinstance(value, bytes):
        return value.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"))
    return isinstance(value, Image) or type(value).__module__.startswith("PIL.")


def read_size(image: Image) -> tuple[int, int]:
    """Return the width and the height of an image from the header of its file, in pixels.

    Raises:
        ImageError: it is no image.
    """
    from PIL import Image as PIL

    try:
        with PIL.open(io.BytesIO(image.data), formats=FORMATS) as file:
            return file.size
    except (OSError, SyntaxError, ValueError, EOFError, PIL.DecompressionBombError) as e:
        raise ImageError(f"an image cannot be read: {e}") from e


def _to_rgb(picture: Any) -> Any:
    from PIL import Image as PIL

    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        layer = picture.convert("RGBA")
        picture = PIL.new("RGB", layer.size, "white")
        picture.paste(layer, mask=layer.getchannel("A"))
    elif picture.mode.startswith("I;16"):  # `convert` would cut all values off at 255.
        picture = picture.point(lambda value: value / 256).convert("L")
    return picture.convert("RGB")


def _write_png(picture: Any) -> bytes:
    file = io.BytesIO()
    try:
        if picture.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
            picture = picture.convert("RGB")
        picture.save(file, "PNG", compress_level=1)
    except ValueError as e:
        width, height = picture.size
        raise ImageError(f"a PIL image of {width}x{height} pixels ({picture.mode}): {e}") from e
    return file.getvalue()


def _read_data_url(url: str) -> bytes:
    head, comma, data = url.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("it has no ';base64,'")
        return base64.b64decode(data, validate=True)
    except (ValueError, binascii.Error) as e:
        raise ImageError(f"a data URL that begins with {url[:40]!r} cannot be read: {e}") from e


def _read_file(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ImageError(f"the image {path} has more than {MAX_BYTES >> 20} MiB")
        if not path.is_file():  # A pipe or a device may never end.
            raise OSError(errno.EINVAL, "not a regular file")
        return path.read_bytes()
    except (OSError, ValueError) as e:  # ValueError: a NUL in the path
        if isinstance(e, ImageError):
            raise
        reason = getattr(e, "strerror", None) or e
        raise ImageError(f"the image {path} cannot be read: {reason}") from e


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
