"""Images as clients send them: bounded, checked and decoded to plain pixels before any native code of the model sees them.

Decoding is Pillow's: it knows sizes before it decodes, honours a photo's orientation, and reads WebP, none of which the
decoder inside libmtmd does.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from engines.errors import InvalidRequest

MAX_IMAGE_BYTES = 20 << 20
MAX_IMAGE_PIXELS = 40_000_000
# Beyond this the scaling to a projector's grid makes no sense of an image.
MAX_ASPECT_RATIO = 200
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_DATA_URI = re.compile(r"data:image/[a-z0-9.+-]+(?:;[a-z0-9-]+=[^;,]*)*;base64,", re.IGNORECASE)
# What Pillow raises for files that are cut short, damaged or no image.
_DAMAGED = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, MemoryError)

# Sizes are checked below, by our own bound and as an error; Pillow would only warn.
Image.MAX_IMAGE_PIXELS = None


@dataclass(frozen=True, eq=False)
class ImageFile:
    """An image as it was sent: the file's bytes, and their SHA-256 digest, which stands for it in prompts."""

    data: bytes
    digest: bytes


def image_file(url: str, param: str) -> ImageFile:
    """The file inside a `data:` URI. Raises InvalidRequest for anything else: an engine fetches nothing for anybody."""
    match = _DATA_URI.match(url)
    if match is None:
        if url[:5].lower() == "data:":
            raise InvalidRequest("An image's data: URI must read data:image/<type>;base64,<data>.", param=param)
        raise InvalidRequest(
            f"This engine fetches no addresses; {url[:60]!r} must be sent as a data: URI.",
            param=param,
            hint="Send data:image/png;base64,… with the image's bytes.",
        )
    written = len(url) - match.end()
    if written // 4 * 3 > MAX_IMAGE_BYTES + 2:
        raise InvalidRequest(f"An image may have {MAX_IMAGE_BYTES >> 20} MiB.", param=param)
    try:
        data = base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"An image's base64 is broken: {error}.", param=param) from error
    if not data:
        raise InvalidRequest("An image has no bytes.", param=param)
    return ImageFile(data, hashlib.sha256(data).digest())


def pixels(file: ImageFile, param: str) -> NDArray[np.uint8]:
    """The image's first frame upright, shape (height, width, 3), what is transparent as white. Raises InvalidRequest."""
    try:
        with Image.open(io.BytesIO(file.data), formats=FORMATS) as image:
            _check_size(image.width, image.height, param)
            upright = ImageOps.exif_transpose(image)
            found = np.array(_opaque(upright), dtype=np.uint8)
    except InvalidRequest:
        raise
    except _DAMAGED as error:
        formats = ", ".join(FORMATS)
        raise InvalidRequest(f"An image could not be read ({error}); known are {formats}.", param=param) from error
    return found


def _check_size(width: int, height: int, param: str) -> None:
    if width * height > MAX_IMAGE_PIXELS:
        raise InvalidRequest(
            f"An image has {width} × {height} pixels; {MAX_IMAGE_PIXELS / 1e6:.0f} million are the most.", param=param
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise InvalidRequest(
            f"An image has {width} × {height} pixels; one side may be {MAX_ASPECT_RATIO} times the other.", param=param
        )


def _opaque(image: Image.Image) -> Image.Image:
    """In RGB. Dark writing on nothing would else become dark on dark."""
    if image.has_transparency_data:
        layered = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layered.size, "white"), layered).convert("RGB")
    return image.convert("RGB")
