"""The real vocabulary of Qwen 3.5 (151,936 tokens) and its chat template, out of llama.cpp's own source tree."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from bench.errors import BenchError

ROOT = Path(__file__).resolve().parent.parent
SOURCE_GLOB = "build/peer/source/*/vendor/llama.cpp"
VOCABULARY_FILE = "models/ggml-vocab-qwen35.gguf"
TEMPLATE_FILE = "models/templates/Qwen3.5-4B.jinja"
NORMAL = 1

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Vocabulary:
    """Tokens as a GGUF stores them (byte-level BPE), their types, merges, and the chat template."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    pre: str
    end_token: int
    template: str

    @cached_property
    def plain(self) -> list[bool]:
        """Which tokens are text on their own: normal ones whose bytes are whole UTF-8 characters."""
        return [kind == NORMAL and _is_text(token) for token, kind in zip(self.tokens, self.types, strict=True)]


def llama_source() -> Path:
    """The llama.cpp tree that `make peer` unpacked. Raises BenchError if there is none."""
    trees = sorted(ROOT.glob(SOURCE_GLOB))
    if not trees:
        raise BenchError(f"{ROOT / SOURCE_GLOB} does not exist; run: make peer")
    return trees[-1]


def qwen35() -> Vocabulary:
    """Reads vocabulary and template; about half a second."""
    source = llama_source()
    with (source / VOCABULARY_FILE).open("rb") as file:
        values = _read_metadata(file)
    return Vocabulary(
        tokens=values["tokenizer.ggml.tokens"],
        types=values["tokenizer.ggml.token_type"],
        merges=values["tokenizer.ggml.merges"],
        pre=values["tokenizer.ggml.pre"],
        end_token=values["tokenizer.ggml.tokens"].index("<|im_end|>"),
        template=(source / TEMPLATE_FILE).read_text(),
    )


def _read_metadata(file: BinaryIO) -> dict[str, Any]:
    # gguf.GGUFReader makes several numpy views per string: eight seconds for this file.
    magic, _version, _tensors, keys = struct.unpack("<4sIQQ", file.read(24))
    if magic != b"GGUF":
        raise BenchError("the vocabulary is no GGUF")
    return {_string(file): _value(file, _number(file, "<I")) for _ in range(keys)}


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _number(file, _SCALARS[kind])
    item, count = _number(file, "<I"), _number(file, "<Q")
    if item == _STRING:
        return [_string(file) for _ in range(count)]
    layout = struct.Struct(f"<{count}{_SCALARS[item][1]}")
    return list(layout.unpack(file.read(layout.size)))


def _number(file: BinaryIO, layout: str) -> Any:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))[0]


def _string(file: BinaryIO) -> str:
    return file.read(_number(file, "<Q")).decode()


def _byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in a byte-level BPE: itself if printable Latin-1, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_LETTERS = _byte_letters()


def _is_text(token: str) -> bool:
    try:
        text = bytes(_LETTERS[letter] for letter in token).decode()
    except (KeyError, UnicodeDecodeError):
        return False
    return bool(text)
