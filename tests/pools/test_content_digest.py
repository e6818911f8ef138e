"""Digests of files, and the memory of them."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pools import content_digest as digests
from pools.content_digest import CHUNK_BYTES, content_digest, record_digest, recorded_digest
from pools.errors import ModelFileUnreadable
from tests.pools.conftest import SmallFileSystem


@pytest.fixture
def large_file(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    path.write_bytes(os.urandom(2 * CHUNK_BYTES + 17))
    return path


def test_it_is_the_sha256_of_the_content(large_file: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    digest = content_digest(large_file, tmp_path / "cache", lambda done, total: seen.append((done, total)))
    assert digest == hashlib.sha256(large_file.read_bytes()).hexdigest()
    size = 2 * CHUNK_BYTES + 17
    assert seen == [(CHUNK_BYTES, size), (2 * CHUNK_BYTES, size), (size, size)]


def test_a_file_is_hashed_once_until_it_changes(large_file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = content_digest(large_file, cache)
    hashed: list[int] = []
    assert content_digest(large_file, cache, lambda done, _total: hashed.append(done)) == first
    assert recorded_digest(large_file, cache) == first
    assert hashed == []
    with large_file.open("r+b") as stream:
        stream.write(b"changed")
    assert recorded_digest(large_file, cache) is None
    assert content_digest(large_file, cache) != first


def test_a_file_that_grows_while_it_is_read_has_no_digest(large_file: Path, tmp_path: Path) -> None:
    def grow(_done: int, _total: int) -> None:
        with large_file.open("ab") as stream:
            stream.write(b"more")

    with pytest.raises(ModelFileUnreadable, match="changed while"):
        content_digest(large_file, tmp_path / "cache", grow)
    assert recorded_digest(large_file, tmp_path / "cache") is None


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"[" * 100_000, b'{"1:2:3:4": 7}', b"\xff\xfe"])
def test_a_damaged_cache_costs_time_only(damage: bytes, large_file: Path, tmp_path: Path) -> None:
    (tmp_path / "digests.json").write_bytes(damage)
    digest = content_digest(large_file, tmp_path)
    assert digest == hashlib.sha256(large_file.read_bytes()).hexdigest()
    assert list(json.loads((tmp_path / "digests.json").read_text()).values()) == [digest]


def test_many_at_once_lose_no_entry(tmp_path: Path) -> None:
    files = [tmp_path / f"file-{number}" for number in range(24)]
    for path in files:
        path.write_text(path.name)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda path: content_digest(path, tmp_path), files))
    assert [recorded_digest(path, tmp_path) for path in files] == found
    assert {path.name for path in tmp_path.iterdir()} - {path.name for path in files} == {
        "digests.json",
        ".digests.json.lock",
    }


def test_it_remembers_a_bounded_number_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "REMEMBERED_FILES", 3)
    files = [tmp_path / f"file-{number}" for number in range(5)]
    for path in files:
        path.write_text("content")
        record_digest(path, "0" * 64, tmp_path)
    assert [recorded_digest(path, tmp_path) is not None for path in files] == [False, False, True, True, True]


def test_a_full_disk_costs_the_memory_and_not_the_digest(
    large_file: Path, small_file_system: SmallFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    cache = small_file_system(64 * 1024)
    (cache / "filler").write_bytes(bytes(os.statvfs(cache).f_bavail * os.statvfs(cache).f_bsize))
    assert content_digest(large_file, cache) == hashlib.sha256(large_file.read_bytes()).hexdigest()
    assert recorded_digest(large_file, cache) is None
    assert "cannot remember" in caplog.text


def test_no_file_has_no_digest(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ModelFileUnreadable):
            content_digest(path, tmp_path)
