"""Buffers on tmpfs: found by another process, waited for in order, and not left behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engines.runtime.arena import ALIGNMENT_BYTES, FOLDER, PREFIX, Arena, ArenaFull, remove_abandoned

PAGE = ALIGNMENT_BYTES


async def test_buffers_do_not_overlap_and_come_back(tmp_path: Path) -> None:
    arena = Arena(10 * PAGE, tmp_path)
    try:
        buffers = [await arena.take(size) for size in (PAGE, 1, 3 * PAGE + 5)]
        for number, buffer in enumerate(buffers, start=1):
            buffer.data[:] = number
        assert [set(buffer.data.tolist()) for buffer in buffers] == [{1}, {2}, {3}]
        assert arena.free_bytes == 4 * PAGE
        for buffer in (buffers[1], buffers[0], buffers[2]):
            buffer.free()
            buffer.free()
        assert (await arena.take(10 * PAGE)).data.nbytes == 10 * PAGE
        with pytest.raises(ArenaFull):
            await arena.take(10 * PAGE + 1)
    finally:
        arena.close()


async def test_who_waits_is_served_in_order_and_a_cancel_loses_nothing(tmp_path: Path) -> None:
    arena = Arena(4 * PAGE, tmp_path)
    try:
        first = await arena.take(4 * PAGE)
        large, small, late = (asyncio.ensure_future(arena.take(size * PAGE)) for size in (3, 1, 2))
        await asyncio.sleep(0)
        late.cancel()
        first.free()
        with await large, await small:
            assert arena.free_bytes == 0
        with pytest.raises(asyncio.CancelledError):
            await late
        holder = await arena.take(4 * PAGE)
        waiting, behind = (asyncio.ensure_future(arena.take(4 * PAGE)) for _ in range(2))
        await asyncio.sleep(0)
        holder.free()
        waiting.cancel()  # its buffer was put aside already
        (await behind).free()
        assert arena.free_bytes == 4 * PAGE
    finally:
        arena.close()


async def test_another_process_reads_the_buffer_by_its_place() -> None:
    arena = Arena(4 * PAGE)
    try:
        assert arena.path is not None
        await arena.take(PAGE)
        buffer = await arena.take(11)
        buffer.data[:] = list(b"hello there")
        code = f"f = open({str(arena.path)!r}, 'rb'); f.seek({buffer.offset}); print(f.read(11).decode())"
        seen = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
        assert seen.stdout == "hello there\n"
    finally:
        arena.close()
    assert not arena.path.exists()


def test_files_of_ended_processes_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    code = (
        "import os, pathlib; from engines.runtime.arena import Arena; "
        f"Arena(4096, pathlib.Path({str(tmp_path)!r})); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    left = list(tmp_path.glob(f"{PREFIX}*"))
    assert len(left) == 1
    arena = Arena(PAGE, tmp_path)  # looks for such files first
    try:
        assert list(tmp_path.iterdir()) == [arena.path]
        assert remove_abandoned(tmp_path) == 0
    finally:
        arena.close()
        arena.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_tmpfs_is_an_error_and_leaves_no_file() -> None:
    free = os.statvfs(FOLDER)
    with pytest.raises(ArenaFull):
        Arena(free.f_blocks * free.f_frsize * 2)
    assert not list(FOLDER.glob(f"{PREFIX}{os.getpid()}-*"))


FAKE_DRIVER = r"""
#include <stddef.h>
#include <stdio.h>
static int tries;
int cuInit(unsigned f) { return 0; }
int cuDeviceGet(int *d, int n) { *d = n; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = &tries; return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { return 0; }
int cuCtxPushCurrent_v2(void *c) { return 0; }
int cuCtxPopCurrent_v2(void **c) { return 0; }
int cuMemHostRegister_v2(void *p, size_t n, unsigned f) { printf("%p\n", p); fflush(stdout); return tries++ < REFUSED ? 712 : 0; }
int cuMemHostUnregister(void *p) { return 0; }
"""
PINNED = """
from pathlib import Path
import sys
from engines.runtime.arena import Arena, ArenaFull
try:
    arena = Arena(1 << 20, Path(sys.argv[1]), 0)
    print(arena.pinned, hex(arena.memory.ctypes.data), flush=True)
    arena.close()
except ArenaFull as error:
    print("full", flush=True)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")
@pytest.mark.parametrize("refused", [1, 100])
def test_an_arena_never_lies_where_cuda_counts_a_part_as_pinned(tmp_path: Path, refused: int) -> None:
    """Its driver then refuses copies across the end of that part, and llama.cpp ends the process."""
    source = tmp_path / "driver.c"
    source.write_text(FAKE_DRIVER)
    library = ["cc", "-shared", "-fPIC", f"-DREFUSED={refused}", "-o", str(tmp_path / "libcuda.so.1"), str(source)]
    subprocess.run(library, check=True, timeout=60)
    found = subprocess.run(
        [sys.executable, "-c", PINNED, str(tmp_path)],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout.split()  # fmt: skip
    if refused == 1:
        first, second, pinned, at = found
        assert (pinned, at) == ("True", second) != ("True", first)
    else:
        assert found[-1] == "full"
    assert not list(tmp_path.glob(f"{PREFIX}*"))


async def test_memory_of_ones_own_where_there_is_no_tmpfs() -> None:
    arena = Arena(2 * PAGE, None)
    with await arena.take(PAGE) as buffer:
        buffer.data[:] = 7
    arena.close()
