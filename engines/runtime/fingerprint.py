"""What two engines must share so that the state of one means the same in the other, as text that people can compare.

llama.cpp compares cache types, row sizes and layer counts only: it takes the state of another model of the same shape without
a word. Everything else that changes what a row means stands here.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from pathlib import Path

import blake3
import llama_cpp

from engines.config import EngineConfig
from engines.errors import StateIncompatible, StateInvalid
from engines.runtime.llama import Llama, Vocabulary
from engines.runtime.state_layout import StateLayout
from pools.content_digest import Progress, content_digest

_LEAD = "hydra-kv-1"
_MOST_TEXT = 8192
_SHARD = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.gguf")
_SHORT_HEX = 32


@dataclass(frozen=True)
class Fingerprint:
    """`model` is sha256:… of the file's content, or family:… where the Model declares quants that may share.

    `text` is stable: equal texts mean that state may travel.
    """

    model: str
    architecture: str
    tokenizer: str
    kv_type_k: str
    kv_type_v: str
    flash_attention: str
    rope: str
    rotation: str
    layout: str

    @property
    def text(self) -> str:
        return ";".join([_LEAD, *(f"{field.name}={getattr(self, field.name)}" for field in fields(self))])

    @property
    def digest(self) -> str:
        """32 hex digits, for keys and logs."""
        return blake3.blake3(self.text.encode()).hexdigest()[:_SHORT_HEX]

    @classmethod
    def parse(cls, text: str) -> Fingerprint:
        """Raises StateInvalid for what is no fingerprint of this version."""
        lead, *pairs = text[:_MOST_TEXT].split(";")
        values = dict(pair.partition("=")[::2] for pair in pairs)
        if lead != _LEAD or list(values) != [field.name for field in fields(cls)] or len(text) > _MOST_TEXT:
            raise StateInvalid(f"{text[:80]!r} is no fingerprint that this engine knows.")
        return cls(**values)

    def require(self, other: Fingerprint) -> None:
        """Raises StateIncompatible, naming each difference, unless state of `other` may enter here."""
        differ = [
            f"{field.name} is {getattr(other, field.name)} there and {getattr(self, field.name)} here"
            for field in fields(self)
            if getattr(other, field.name) != getattr(self, field.name)
        ]
        if differ:
            raise StateIncompatible(f"The state is another engine's kind: {'; '.join(differ)}.")


def fingerprint_of(config: EngineConfig, llama: Llama, layout: StateLayout, model_sha256: str) -> Fingerprint:
    metadata = llama.metadata()
    rope = sorted(f"{key}:{value}" for key, value in metadata.items() if ".rope." in key)
    return Fingerprint(
        model=f"family:{config.kv_family}" if config.kv_family else f"sha256:{model_sha256}",
        architecture=_plain(metadata.get("general.architecture", "unknown")),
        tokenizer=tokenizer_digest(llama.vocabulary),
        kv_type_k=config.kv_type_k,
        kv_type_v=config.kv_type_v,
        flash_attention="on",  # the only way our contexts are made
        rope=_short(" ".join(rope)),
        rotation=_rotation(config),
        layout=f"{llama_cpp.LLAMA_STATE_SEQ_VERSION}-{_short(layout.text)}",
    )


def model_sha256(config: EngineConfig, on_progress: Progress) -> str:
    """The content digest of the model's file, from the cache beside it unless the file is new; of several files, theirs together.

    Reads gigabytes the first time, so it runs beside the event loop. Raises ModelFileUnreadable.
    """
    path = Path(config.model_path).resolve()
    folder = Path(config.digest_folder) if config.digest_folder else path.parent
    shard = _SHARD.fullmatch(path.name)
    if not shard:
        return content_digest(path, folder, on_progress)
    name, _, count = shard.groups()
    digests = [
        content_digest(path.with_name(f"{name}{i:05}-of-{count}.gguf"), folder) for i in range(1, int(count) + 1)
    ]
    return blake3.blake3("".join(digests).encode()).hexdigest()


def tokenizer_digest(vocabulary: Vocabulary) -> str:
    """Of all pieces in order, and of the tokens with a role."""
    digest = blake3.blake3(f"{vocabulary.size},{vocabulary.bos},{vocabulary.eos},{vocabulary.adds_bos}".encode())
    for piece in vocabulary.pieces:
        digest.update(len(piece).to_bytes(4, "little") + piece)
    return digest.hexdigest()[:_SHORT_HEX]


def _rotation(config: EngineConfig) -> str:
    """llama.cpp rotates quantised keys and values unless told not to, and the rows look the same either way."""
    quantised = {config.kv_type_k, config.kv_type_v} - {"f16", "f32", "bf16"}
    switch = os.environ.get("LLAMA_ATTN_ROT_DISABLE", "")
    disabled = re.match(r"\s*[+-]?\d*[1-9]", switch) is not None  # what C's atoi would not read as 0
    return "none" if not quantised else "off" if disabled else "on"


def _short(text: str) -> str:
    return blake3.blake3(text.encode()).hexdigest()[:_SHORT_HEX]


def _plain(text: str) -> str:
    return re.sub(r"[^\w.-]", "_", text)[:64]
