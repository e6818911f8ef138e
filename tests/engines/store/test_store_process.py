"""The store as a process: its configuration, its directory and who may remove it, its copy on disk, a tmpfs that is full."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import blake3
import pytest

from engines.config import ConfigInvalid
from engines.process import ProcessRecord
from engines.store.__main__ import main
from engines.store.client import StoreClient
from engines.store.config import StoreConfig
from engines.store.disk import DiskCopy
from engines.store.home import LOCK, OWNER, Home, remove_abandoned
from engines.store.manifests import write_envelope
from engines.store.write_behind import WriteBehind
from tests.engine_process import free_port
from tests.engines.store.objects_made import config_in, content, manifest_of, new_store, save
from tests.engines.store.store_faults import TABLE
from tests.engines.store.store_process import ROOT, StoreProcess

# --- configuration --------------------------------------------------------------------------------


def test_a_configuration_survives_its_file() -> None:
    config = StoreConfig(instance="a", secret="x" * 20, capacity_bytes=1 << 30)
    assert StoreConfig.from_json(config.to_json()) == config
    assert "x" * 20 not in repr(config)
    assert str(config.folder) == "/dev/shm/hydra-a"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"capacity_bytes": 5}, "capacity_bytes is 5"),
        ({"instance": "../x"}, "instance"),
        ({"secret": "short"}, "fewer than 16"),
        ({"lease_s": 100, "max_lease_s": 50}, "max_lease_s"),
        ({"preempt_s": 700}, "reclaim_s"),
        ({"port": "9500"}, "must be of type int"),
        ({"keep": 1}, "must be of type bool"),
        ({"nonsense": 1}, "unknown keys: nonsense"),
        ([], "JSON object"),
    ],
)
def test_values_that_cannot_work_are_named(values: Any, said: str) -> None:
    with pytest.raises(ConfigInvalid, match=said):
        StoreConfig.from_json(json.dumps(values))


def test_each_way_not_to_start_has_its_code_and_one_line(
    memory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with StoreProcess(memory, tmp_path) as running:
        config = running.config
        cases = [
            ("{", 2, "not valid JSON"),
            (replace(config, host="0.0.0.0").to_json(), 2, "needs a secret"),
            (replace(config, port=free_port()).to_json(), 3, "belongs to another running store"),
            (replace(config, directory=str(memory / "hydra-two")).to_json(), 4, "cannot listen"),
        ]
        path = tmp_path / "wrong.json"
        for text, code, said in cases:
            path.write_text(text)
            caplog.clear()
            assert main(["--config", str(path)]) == code
            assert said in caplog.messages[-1]
            assert len(caplog.messages) == 1


# --- its directory --------------------------------------------------------------------------------


async def test_a_clean_stop_leaves_the_directory_that_is_to_be_kept(memory: Path, tmp_path: Path) -> None:
    with StoreProcess(memory, tmp_path, keep=True) as store:
        async with StoreClient("127.0.0.1", store.config.port) as client:
            await client.put("kv/a", b"bytes", 5)
        assert await asyncio.to_thread(store.stop) == 0
        assert store.config.folder.exists()
        await asyncio.to_thread(store.start)
        async with StoreClient("127.0.0.1", store.config.port) as client:
            assert await client.list() == ["kv/a"]


def test_only_directories_without_a_living_owner_are_removed(memory: Path) -> None:
    living = Home(config_in(memory))
    for name, age_s in (("hydra-dead", 1000), ("hydra-restarting", 10)):
        home = Home(replace(config_in(memory), directory=str(memory / name)))
        home.close(clean=False)
        past = time.time() - age_s
        os.utime(memory / name / LOCK, (past, past))
    (memory / "hydra-arena-file").write_bytes(b"an engine's")
    (memory / "hydra-no-lock").mkdir()
    (memory / "hydra-link").symlink_to(memory / "hydra-dead")
    ours = replace(config_in(memory), directory=str(memory / "hydra-new"))
    assert remove_abandoned(ours) == ["hydra-dead"]
    os.utime(memory / "hydra-one" / LOCK, (0, 0))
    assert remove_abandoned(ours) == []
    living.show_life()
    assert time.time() - (memory / "hydra-one" / LOCK).stat().st_mtime < 60
    living.close()
    assert not (memory / "hydra-one").exists()


def test_what_another_boot_left_has_no_readers(memory: Path) -> None:
    home = Home(config_in(memory))
    assert home.same_boot
    home.close(clean=False)
    record = ProcessRecord.from_file(memory / "hydra-one" / OWNER)
    assert record is not None
    replace(record, boot_id="another").to_file(memory / "hydra-one" / OWNER)
    home = Home(config_in(memory))
    assert not home.same_boot
    home.close()


def test_the_memory_is_for_its_owner_alone(memory: Path) -> None:
    (memory / "hydra-one").mkdir(mode=0o777)
    home = Home(config_in(memory))
    assert home.folder.stat().st_mode & 0o077 == 0
    store = new_store(memory)
    save(store, "kv/a", [b"x"])
    assert all(path.stat().st_mode & 0o077 == 0 for path in home.folder.iterdir())
    home.close()


# --- its copy on disk -----------------------------------------------------------------------------


async def test_after_a_reboot_the_last_manifests_come_back_from_disk(memory: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"disk_directory": str(tmp_path / "disk"), "disk_delay_s": 0.05, "disk_manifests": 3}
    chunks = {f"kv/{n}": [content(n, 200_000), content(99, 300_000)] for n in range(5)}
    with StoreProcess(memory, tmp_path, **settings) as store:
        async with StoreClient("127.0.0.1", store.config.port) as client:
            for name, data in chunks.items():
                await client.push_chunks(name, data)
                await client.put_manifest(name, manifest_of(data))
                await counted(client, "disk_written", int(name[3:]) + 1)
            await client.delete("kv/4")
            await client.push_chunks("kv/3", [b"late"])
            await client.put_manifest("kv/3", manifest_of([b"late", *chunks["kv/3"]]))
        await asyncio.to_thread(store.stop)  # what waits is written at the end
        disk = DiskCopy(Path(settings["disk_directory"]), 3, 1 << 30)
        assert [kept.envelope.name for kept in disk.newest()] == ["kv/3", "kv/2"]
        # As after a reboot: nothing is left in memory. One object is damaged on disk, one file is not ours.
        damaged = tmp_path / "disk" / "objects" / blake3.blake3(chunks["kv/2"][0]).hexdigest()
        damaged.write_bytes(b"\0" * 200_000)
        (tmp_path / "disk" / "manifests" / "strange.json").write_bytes(b"[")
        await asyncio.to_thread(store.start)
        async with StoreClient("127.0.0.1", store.config.port) as client:
            await counted(client, "disk_recovered", 1)
            await counted(client, "disk_errors", 1)
            assert await client.list() == ["kv/3"]
            async with client.get("kv/3") as incoming:
                whole = bytearray(incoming.total_bytes)
                await incoming.read_into(memoryview(whole))
            assert whole == b"late" + b"".join(chunks["kv/3"])


async def test_what_is_deleted_while_it_is_read_back_stays_away(memory: Path, tmp_path: Path) -> None:
    disk = DiskCopy(tmp_path, 10, 1 << 30)
    for number in range(3):
        data = [content(10 * number + n, 100_000) for n in range(3)]
        for part in data:
            disk.write_object(blake3.blake3(part).hexdigest(), memoryview(part))
        disk.write_manifest(f"kv/{number}", write_envelope(f"kv/{number}", manifest_of(data)))
    store = new_store(memory)
    behind = WriteBehind(store, disk)
    store.on_saved, store.on_deleted = behind.saved, behind.deleted
    reading = asyncio.ensure_future(behind.read_back())
    for _ in range(100_000):
        if store.objects.by_digest:
            break
        await asyncio.sleep(0)
    assert store.manifests.names("") == []
    for number in range(3):
        assert not store.delete(f"kv/{number}")
    await reading
    await behind.flush()
    assert store.manifests.names("") == []
    assert list(disk.newest()) == []


async def counted(client: StoreClient, name: str, least: int) -> None:
    deadline = time.monotonic() + 20
    while (await client.store_info()).counts[name] < least:
        assert time.monotonic() < deadline, (await client.store_info()).counts
        await asyncio.sleep(0.02)


def test_the_disk_keeps_within_its_bounds(tmp_path: Path) -> None:
    disk = DiskCopy(tmp_path, 10, 250_000)
    for number in range(6):
        data = content(number, 100_000)
        manifest = manifest_of([data])
        disk.write_object(manifest.chunks[0].hash, memoryview(data))
        disk.write_manifest(f"kv/{number}", write_envelope(f"kv/{number}", manifest))
        os.utime(next(iter(disk.newest())).path, (number + 1, number + 1))
        disk.prune()
        assert sum(path.stat().st_size for path in (tmp_path / "objects").iterdir()) <= 250_000
    assert len(list(disk.newest())) == 2
    disk.remove("kv/5")
    disk.remove("kv/5")
    assert len(list((tmp_path / "objects").iterdir())) == 1


# --- a tmpfs that is full -------------------------------------------------------------------------

FILL = r"""
import subprocess, sys
from pathlib import Path
from engines.store.errors import StoreFull, StoreUnusable
from engines.store.home import Home
from engines.store.store import Store
from tests.engines.store.objects_made import check, config_in, content, read, save

def fill(folder):
    config = config_in(folder, capacity_bytes=64 << 20, slab_bytes=4 << 20)
    try:
        Home(config)
    except StoreUnusable as error:
        return "unusable", 0, 0, 0
    store = Store(config)
    saved, refused = {}, 0
    for number in range(30):
        data = [content(number, 300_000), content(number + 1, 300_000)]
        try:
            save(store, f"kv/{number}", data)
            saved[f"kv/{number}"] = data
        except StoreFull:
            refused += 1
        check(store)
    assert not list(folder.glob("*/*.new"))
    there = [name for name in saved if store.manifests.get(name)]
    wrong = sum(read(store, name) != saved[name] for name in there)
    lost = len(set(there) ^ set(Store(config).manifests.names("")))
    return "full" if store.counts.tmpfs_full else "roomy", len(there), refused, wrong + lost

for size_kb in sys.argv[2:]:
    folder = Path(sys.argv[1]) / size_kb
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_kb}k", "none", folder], check=True)
    if size_kb == "4":
        (folder / "filler").write_bytes(bytes(4096))
    print(*fill(folder), flush=True)
"""


def test_a_full_tmpfs_makes_it_evict_or_refuse_and_never_lie(tmp_path: Path) -> None:
    """On real tmpfs mounts of every size from none to enough, in a mount namespace that ends with its process."""
    own_mounts = ["unshare", "--user", "--map-root-user", "--mount"]
    probe = subprocess.run([*own_mounts, "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {probe.stderr.decode().strip()}")
    sizes_kb = ["4", "8", "12", "64", "900", "1100", "1400", "2200", "3000", "4200", "5000", "6500", "9000", "40000"]
    ended = subprocess.run(
        [*own_mounts, sys.executable, "-c", FILL, tmp_path, *sizes_kb],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stderr
    results = [line.split() for line in ended.stdout.splitlines()]
    assert len(results) == len(sizes_kb)
    for kind, there, refused, wrong in results:
        full = kind != "roomy"
        counts = {"reads_checked": int(there), "refused": int(refused), "wrong_bytes": int(wrong)}
        TABLE.add("tmpfs full at some write", trials=1, faults=full, **counts)
    assert all(wrong == "0" for _, _, _, wrong in results), results
    kinds = [kind for kind, _, _, _ in results]
    assert (kinds[0], kinds[-1]) == ("unusable", "roomy")
    # Without room for one slab every save is refused; from the first slab on old manifests give way and nothing is refused.
    roomless = [(kind, refused) for kind, there, refused, _ in results if there == "0" and kind != "unusable"]
    assert roomless
    assert set(roomless) == {("full", "30")}
    assert all(refused == "0" for _, there, refused, _ in results if there != "0"), results
