"""What our builds change in llama.cpp's source, each for a measured reason. The pinned source is the only one it fits.

Engines give the same tokens with and without them: the tests of drafts pass on both libraries.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from native.errors import BuildFailed


@dataclass(frozen=True)
class Change:
    """`old` stands once in the file `path`, relative to llama.cpp's folder, and becomes `new`."""

    path: str
    old: str
    new: str


CHANGES = (
    # A context that can take back K tokens of a recurrent model copies K + 1 states of the convolution in every layer and step,
    # also in steps of one token, which leave the others as they were. The delta net's own states are written only as far as the
    # step has tokens, so older ones could not be used anyway. On an H200, four drafts, 35B-A3B: 0.1 ms of 3.8 for one stream.
    Change(
        "src/models/delta-net-base.cpp",
        "        for (int64_t t = 1; t <= K; ++t) {\n            const int64_t s_idx  = std::max<int64_t>(0,",
        "        const int64_t n_new = conv_input->ne[0] - conv_states->ne[0];\n\n"
        "        for (int64_t t = std::max<int64_t>(1, K - n_new + 1); t <= K; ++t) {\n"
        "            const int64_t s_idx  = std::max<int64_t>(0,",
    ),
)


def apply(tree: Path, changes: tuple[Change, ...] = CHANGES) -> None:
    """Changes the source under `tree`; what is changed already stays. Raises BuildFailed for a source that they do not fit."""
    for change in changes:
        path = tree / change.path
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if change.new in text:
            continue
        if text.count(change.old) != 1:
            raise BuildFailed(f"{change.path} of this source is not the one that native/changes.py changes")
        path.write_text(text.replace(change.old, change.new), encoding="utf-8")
