"""Spans inside token lists: ids, positions, and lengths that cut none."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from engines.runtime.media_span import MediaSpan, PlacedSpan, SpanMap, span_ids


def span(tokens: int, positions: int, *, grid: bool = True) -> MediaSpan:
    offsets = np.zeros((4 if grid else 1, tokens), dtype=np.int32)
    ids = tuple(span_ids(hashlib.sha256(b"x").digest(), 0, tokens))
    return MediaSpan(ids, np.zeros((tokens, 8), np.float32), offsets, np.ones_like(offsets), positions, False)


def test_ids_are_below_zero_and_depend_on_every_bit_of_the_digest() -> None:
    digest = hashlib.sha256(b"an image").digest()
    ids = span_ids(digest, 0, 500)
    assert all(-(1 << 31) <= value < 0 for value in ids)
    assert ids == span_ids(digest, 0, 500)
    assert ids[:100] == span_ids(digest, 0, 100)
    for other in (span_ids(digest, 1, 500), span_ids(digest[:-1] + bytes([digest[-1] ^ 1]), 0, 500)):
        assert not set(ids) & set(other)


def test_positions_fall_behind_by_what_a_span_saves() -> None:
    # 5 tokens, 12 cells on 4 positions, 3 tokens, 6 cells on 6 positions, the rest
    spans = SpanMap([PlacedSpan(5, span(12, 4)), PlacedSpan(20, span(6, 6))])
    assert [spans.position(index) for index in (0, 4, 5, 17, 19, 20, 26, 30)] == [0, 4, 5, 9, 11, 12, 18, 22]
    for inside in (6, 16, 21, 25):
        with pytest.raises(ValueError, match="inside a span"):
            spans.position(inside)


def test_a_length_never_cuts_a_span() -> None:
    spans = SpanMap([PlacedSpan(5, span(12, 4)), PlacedSpan(17, span(6, 6))])
    assert [spans.whole(length) for length in (0, 5, 6, 16, 17, 18, 22, 23, 40)] == [0, 5, 5, 5, 17, 17, 17, 23, 40]
    assert len(spans.first(17)) == 1
    assert spans.first(17).position(17) == 9


def test_what_comes_next_is_told() -> None:
    spans = SpanMap([PlacedSpan(5, span(12, 4)), PlacedSpan(17, span(6, 6))])
    assert [spans.until_span(index) for index in (0, 4, 5, 17, 18, 40)] == [5, 1, 0, 0, None, None]
    assert spans.covering(4) is None
    assert [entry and entry.start for entry in map(spans.covering, (5, 16, 17, 22, 23))] == [5, 5, 17, 17, None]


def test_without_spans_index_and_position_are_one() -> None:
    spans = SpanMap()
    assert (spans.position(7), spans.whole(7), spans.until_span(7)) == (7, 7, None)


def test_overlapping_spans_are_refused() -> None:
    with pytest.raises(ValueError, match="inside the one before"):
        SpanMap([PlacedSpan(5, span(12, 4)), PlacedSpan(16, span(6, 6))])
