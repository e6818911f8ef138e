"""Checksums that threads share are those that one thread makes, and none of two different things."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor

import blake3
import pytest
import xxhash

from engines.store.checksums import STRETCH_BYTES, checksum_of, digest_of


def by_the_book(data: bytes) -> bytes:
    """As docs/store.md says it."""
    if len(data) <= 4 << 20:
        return xxhash.xxh3_128_digest(data)
    row = b"".join(xxhash.xxh3_128_digest(data[at : at + (4 << 20)]) for at in range(0, len(data), 4 << 20))
    return xxhash.xxh3_128_digest(row)


@pytest.mark.parametrize("helpers", [0, 1, 3, 7])
def test_any_number_of_threads_makes_the_same(helpers: int) -> None:
    data = random.Random(5).randbytes(5 * STRETCH_BYTES + 1)
    for size in (0, 1, STRETCH_BYTES, STRETCH_BYTES + 1, 2 * STRETCH_BYTES, 4 * STRETCH_BYTES, len(data)):
        view = memoryview(data)[:size]
        assert checksum_of(view, helpers) == by_the_book(data[:size])
        assert digest_of(view, helpers) == blake3.blake3(data[:size]).digest()


def test_every_byte_counts() -> None:
    data = bytearray(random.Random(6).randbytes(2 * STRETCH_BYTES + 999))
    whole = checksum_of(data)
    for at in (0, STRETCH_BYTES - 1, STRETCH_BYTES, 2 * STRETCH_BYTES, len(data) - 1):
        data[at] ^= 1
        assert checksum_of(data) != whole
        data[at] ^= 1
    assert checksum_of(data) == whole
    assert checksum_of(data[:-1]) != whole


def test_many_that_share_their_threads_at_once_get_each_its_own() -> None:
    data = random.Random(7).randbytes(3 * STRETCH_BYTES)
    views = [memoryview(data)[start:] for start in range(0, 4096, 64)]
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda view: checksum_of(view, 3), views))
    assert len(set(made)) == len(views)
    assert made[::16] == [by_the_book(bytes(view)) for view in views[::16]]


def test_a_forked_process_makes_them_too() -> None:
    data = random.Random(8).randbytes(2 * STRETCH_BYTES)
    wanted = checksum_of(data, 2)
    child = os.fork()
    if not child:
        os._exit(0 if checksum_of(data, 2) == wanted else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
