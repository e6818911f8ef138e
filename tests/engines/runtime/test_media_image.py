"""Images as clients send them, good ones and hostile ones."""

from __future__ import annotations

import base64
import io
import zlib

import numpy as np
import pytest
from PIL import Image

from engines.errors import InvalidRequest
from engines.runtime.media_image import MAX_IMAGE_BYTES, ImageFile, image_file, pixels


def uri(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def written(image: Image.Image, form: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def picture(width: int = 40, height: int = 24, mode: str = "RGB") -> Image.Image:
    values = np.add.outer(np.arange(height) * 3, np.arange(width) * 2)[:, :, None] + np.array([0, 40, 80])
    return Image.fromarray(values.astype(np.uint8)).convert(mode)


def read(data: bytes) -> np.ndarray:
    return pixels(image_file(uri(data), "messages.0"), "messages.0")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_every_known_form_becomes_the_same_picture(form: str) -> None:
    found = read(written(picture(), form))
    assert (found.shape, found.dtype) == ((24, 40, 3), np.uint8)
    assert np.abs(found.astype(int) - np.asarray(picture()).astype(int)).mean() < 8


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "1", "CMYK", "I;16"])
def test_every_colour_mode_becomes_rgb(mode: str) -> None:
    form = "JPEG" if mode == "CMYK" else "PNG"
    image = Image.new("I;16", (40, 24), 3000) if mode == "I;16" else picture(mode=mode)
    assert read(written(image, form)).shape == (24, 40, 3)


def test_what_is_transparent_is_white() -> None:
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    image.putpixel((1, 1), (10, 20, 30, 255))
    found = read(written(image, "PNG"))
    assert found[0, 0].tolist() == [255, 255, 255]
    assert found[1, 1].tolist() == [10, 20, 30]


def test_a_photo_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert read(written(picture(40, 24), "JPEG", exif=exif)).shape == (40, 24, 3)


def test_the_digest_is_that_of_the_file() -> None:
    data = written(picture(), "PNG")
    one, same = image_file(uri(data), "x"), image_file(uri(data, "jpeg"), "x")
    assert one.digest == same.digest
    assert one.digest != image_file(uri(written(picture(41), "PNG")), "x").digest


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("https://example.org/cat.png", "fetches no addresses"),
        ("http://127.0.0.1:8080/metrics", "fetches no addresses"),
        ("file:///etc/passwd", "fetches no addresses"),
        ("/etc/passwd", "fetches no addresses"),
        ("", "fetches no addresses"),
        ("data:text/html;base64,QUJD", "must read data:image"),
        ("data:image/png,QUJD", "must read data:image"),
        ("data:image/png;base64,", "no bytes"),
        ("data:image/png;base64,QUJ", "base64 is broken"),
        ("data:image/png;base64,QU JD", "base64 is broken"),
        ("data:image/png;base64,QÜJD", "base64 is broken"),
        ("data:image/png;base64," + "A" * (MAX_IMAGE_BYTES // 3 * 4 + 64), "20 MiB"),
    ],
)
def test_what_is_no_image_uri_is_refused(url: str, word: str) -> None:
    with pytest.raises(InvalidRequest, match=word) as refused:
        image_file(url, "messages.0.content.1")
    assert refused.value.param == "messages.0.content.1"


def bomb(width: int, height: int) -> bytes:
    """A PNG that says it is large; there are no pixels in it."""
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    chunks = b""
    for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")):
        chunks += len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"no image at all", "could not be read"),
        (written(picture(), "PNG")[:60], "could not be read"),
        (written(picture(), "JPEG")[:200], "could not be read"),
        (written(picture(), "BMP"), "could not be read"),
        (written(picture(), "TIFF"), "could not be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "could not be read"),
        (bomb(100_000, 100_000), "million are the most"),
        (bomb(1 << 30, 1 << 30), "million are the most"),
        (bomb(40, 24), "could not be read"),
        (written(Image.new("RGB", (2010, 10)), "PNG"), "times the other"),
    ],
    ids=["text", "cut png", "cut jpeg", "bmp", "tiff", "svg", "bomb", "vast bomb", "no pixels", "a line"],
)
def test_what_cannot_be_an_image_is_refused(data: bytes, word: str) -> None:
    with pytest.raises(InvalidRequest, match=word):
        pixels(ImageFile(data, b""), "messages")
