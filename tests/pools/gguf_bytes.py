"""Builds GGUF files byte by byte, also ones that no honest writer would make."""

import struct
from collections.abc import Sequence

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10
_FORMATS = {U8: "<B", U32: "<I", F32: "<f", BOOL: "<?", U64: "<Q"}


def number(value: int, value_type: int = U32) -> bytes:
    return struct.pack("<I", value_type) + struct.pack(_FORMATS[value_type], value)


def string(text: str | bytes) -> bytes:
    content = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(content)) + content


def text(value: str | bytes) -> bytes:
    return struct.pack("<I", STRING) + string(value)


def array(item_type: int, items: Sequence[int | str], count: int | None = None) -> bytes:
    """An array value; `count` is what it claims to hold."""
    head = struct.pack("<IIQ", ARRAY, item_type, len(items) if count is None else count)
    if item_type == STRING:
        return head + b"".join(string(str(item)) for item in items)
    return head + b"".join(struct.pack(_FORMATS[item_type], item) for item in items)


def tensor(name: str, shape: Sequence[int], type_id: int = 0, offset: int = 0, dimensions: int | None = None) -> bytes:
    head = string(name) + struct.pack("<I", len(shape) if dimensions is None else dimensions)
    return head + struct.pack(f"<{len(shape)}QIQ", *shape, type_id, offset)


def gguf_file(
    values: Sequence[tuple[str, bytes]] = (),
    tensors: Sequence[bytes] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
    data_bytes: int = 0,
) -> bytes:
    """A whole file; the counts are what it claims."""
    keys = len(values) if key_count is None else key_count
    infos = len(tensors) if tensor_count is None else tensor_count
    front = magic + struct.pack("<IQQ", version, infos, keys)
    front += b"".join(string(key) + value for key, value in values) + b"".join(tensors)
    return front + bytes(-len(front) % 32) + bytes(data_bytes)


LLAMA: list[tuple[str, bytes]] = [
    ("general.architecture", text("llama")),
    ("llama.block_count", number(4)),
    ("llama.embedding_length", number(512)),
    ("llama.attention.head_count", number(8)),
]
