"""The store's binary protocol, as a client meets it that was written from the page alone."""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.engine_process import free_port
from tests.engines.runtime.plain_rpc import PlainClient, message
from tests.engines.store.objects_made import content, hash_of
from tests.engines.store.store_process import StoreProcess

SECRET = "a secret of more than sixteen bytes"
OK, NOT_FOUND, ERROR, PARTIAL, BUSY, BAD_REQUEST, NOT_IMPLEMENTED = range(7)
PUT, GET, DEL, STAT, LIST = range(1, 6)
PUT_CHUNKED, GET_CHUNKED, SYNC_MISSING, PUSH_CHUNKS, PUT_META, PUT_MANIFEST = range(0x10, 0x16)
GET_MANIFEST, INFO = 0x33, 0x41
RESERVE, COMMIT, LEASE, RELEASE, SNAPSHOTS = range(0x71, 0x76)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    logs = tmp_path_factory.mktemp("store")
    folder = Path("/dev/shm") / f"test-store-{os.getpid()}"
    folder.mkdir()
    try:
        with StoreProcess(folder, logs, secret=SECRET, http_port=free_port()) as running:
            yield running
            log = running.log_path.read_text()
            assert SECRET not in log
            assert "Traceback" not in log, log
        assert not running.config.folder.exists()
    finally:
        folder.rmdir()


@pytest.fixture
def client(store: StoreProcess) -> Iterator[PlainClient]:
    with PlainClient(store.config.port, SECRET) as connected:
        yield connected
        for name in json.loads(connected.ask(LIST).payload):
            assert connected.ask(DEL, name).meta == {"deleted": True}


def manifest(*chunks: bytes, **values: Any) -> bytes:
    rows = [{"index": i, "hash": hash_of(c), "size": len(c), "kind": "block"} for i, c in enumerate(chunks)]
    body = {"n_past": 1, "total_size": sum(map(len, chunks)), "model_alias": "m", "model_hash": "", "model_path": ""}
    return json.dumps({**body, "chunks": rows, **values}).encode()


def pushed(*chunks: bytes) -> bytes:
    return b"".join(struct.pack("<i", len(chunk)) + chunk for chunk in chunks)


# --- named bytes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4096, 3 * (1 << 20) + 17])
def test_named_bytes_come_back_as_they_were(client: PlainClient, size: int) -> None:
    data = content(size, size)
    assert client.ask(PUT, "kv/a", data).meta == {"stored": True}
    answer = client.ask(GET, "kv/a")
    assert (answer.status, answer.meta, answer.payload) == (OK, {"size": size}, data)
    stat = client.ask(STAT, "kv/a")
    assert (stat.meta["name"], stat.meta["size"]) == ("kv/a", size)
    assert abs(stat.meta["modified"] - time.time()) < 60
    assert client.ask(DEL, "kv/a").meta == {"deleted": True}
    assert client.ask(DEL, "kv/a").meta == {"deleted": False}
    assert (client.ask(GET, "kv/a").status, client.ask(STAT, "kv/a").status) == (NOT_FOUND, NOT_FOUND)


def test_names_are_listed_by_their_beginning(client: PlainClient) -> None:
    for name in ("kv/b", "kv/a", "prefix/c"):
        client.ask(PUT, name, b"x")
    answer = client.ask(LIST, "kv/")
    assert (answer.meta, json.loads(answer.payload)) == ({"count": 2}, ["kv/a", "kv/b"])


def test_snapshots_are_listed_page_by_page_and_by_session(client: PlainClient) -> None:
    client.ask(PUSH_CHUNKS, "", pushed(b"one"))
    for name, session in (("s/c", "two"), ("s/a", "one"), ("s/b", "one"), ("other", "one")):
        assert client.ask(PUT_MANIFEST, name, manifest(b"one", session=session, fingerprint="f")).status == OK
    first = client.ask(SNAPSHOTS, "s/", b'{"limit": 2}')
    assert first.meta == {"count": 2, "more": True}
    entries = json.loads(first.payload)
    assert [entry["name"] for entry in entries] == ["s/a", "s/b"]
    assert abs(entries[0].pop("modified") - time.time()) < 60
    assert entries[0] == {
        "name": "s/a",
        "session": "one",
        "n_past": 1,
        "total_size": 3,
        "fingerprint": "f",
        "checkpoint": False,
        "pinned": False,
    }
    rest = client.ask(SNAPSHOTS, "s/", b'{"after": "s/b"}')
    assert (rest.meta, [e["session"] for e in json.loads(rest.payload)]) == ({"count": 1, "more": False}, ["two"])
    of_one = client.ask(SNAPSHOTS, "", b'{"session": "one"}')
    assert [entry["name"] for entry in json.loads(of_one.payload)] == ["other", "s/a", "s/b"]
    assert client.ask(SNAPSHOTS, "", b'{"limit": 0}').status == BAD_REQUEST


@pytest.mark.parametrize("key", ["", "/etc/passwd", "kv/../x", "a\nb", "x" * 1025, "objects/x"])
def test_unsafe_names_are_refused(client: PlainClient, key: str) -> None:
    for opcode, payload in ((PUT, b"x"), (DEL, b""), (PUT_CHUNKED, b"x"), (PUT_MANIFEST, manifest(b"x"))):
        assert client.ask(opcode, key, payload).status == BAD_REQUEST
    assert client.ask(GET, key).status == BAD_REQUEST


# --- chunks ---------------------------------------------------------------------------------------


def test_a_blob_that_grew_is_stored_as_its_new_chunks_alone(client: PlainClient) -> None:
    data = content(5, 3 << 20)
    first = client.ask(PUT_CHUNKED, "kv/s", data)
    assert first.meta == {"new_chunks": 3, "deduped_chunks": 0, "total_chunks": 3}
    again = client.ask(PUT_CHUNKED, "kv/s", data + b"more")
    assert again.meta == {"new_chunks": 1, "deduped_chunks": 3, "total_chunks": 4}
    assert client.ask(PUT_META, "kv/s", b'{"n_past": 77}').meta == {"stored": True}
    body = json.loads(client.ask(GET_MANIFEST, "kv/s").payload)
    assert (body["n_past"], body["total_size"]) == (77, len(data) + 4)
    has = [chunk["hash"] for chunk in body["chunks"][:2]]
    answer = client.ask(GET_CHUNKED, "kv/s", json.dumps(has).encode())
    assert answer.meta == {"missing_count": 2, "total_size": (1 << 20) + 4}
    assert answer.payload == (struct.pack("<ii", 2, 1 << 20) + data[2 << 20 :] + struct.pack("<ii", 3, 4) + b"more")
    assert client.ask(PUT_META, "kv/none", b'{"n_past": 1}').status == NOT_FOUND


def test_a_delta_is_saved_by_what_is_missing(client: PlainClient) -> None:
    one, two = content(1, 70_000), content(2, 200_000)
    hashes = json.dumps([hash_of(one), hash_of(two)]).encode()
    assert client.ask(PUSH_CHUNKS, "kv/s", pushed(one)).meta == {"stored": 1, "received": 1}
    answer = client.ask(SYNC_MISSING, "kv/s", hashes)
    assert answer.meta == {"missing_count": 1, "candidate_count": 2}
    assert json.loads(answer.payload) == {"missing_hashes": [hash_of(two)]}
    early = client.ask(PUT_MANIFEST, "kv/s", manifest(one, two))
    assert (early.status, early.meta["written"], early.meta["missing_hashes"]) == (PARTIAL, False, [hash_of(two)])
    assert client.ask(GET_MANIFEST, "kv/s").status == NOT_FOUND
    assert client.ask(PUSH_CHUNKS, "kv/s", pushed(one, two)).meta == {"stored": 1, "received": 2}
    whole = client.ask(PUT_MANIFEST, "kv/s", manifest(one, two))
    assert (whole.status, whole.meta["written"], whole.meta["chunks"]) == (OK, True, 2)
    assert client.ask(GET, "kv/s").payload == one + two
    assert client.ask(GET, f"objects/{hash_of(two)}").payload == two


@pytest.mark.parametrize(
    ("opcode", "payload"),
    [
        (SYNC_MISSING, b"{}"),
        (SYNC_MISSING, b'["xyz"]'),
        (SYNC_MISSING, b"[" * 100_000),
        (GET_CHUNKED, b"[1]"),
        (PUT_META, b"[]"),
        (PUT_META, b'{"n_past": -1}'),
        (PUSH_CHUNKS, b"\1"),
        (PUSH_CHUNKS, struct.pack("<i", 5) + b"four"),
        (PUSH_CHUNKS, struct.pack("<i", -1) + b"four"),
        (PUSH_CHUNKS, struct.pack("<i", 0)),
        (PUT_MANIFEST, b"{}"),
        (PUT_MANIFEST, manifest(b"x", total_size=2)),
        (PUT_MANIFEST, manifest(b"x", n_past=-1)),
        (PUT_MANIFEST, manifest(n_past=5)),
        (PUT_MANIFEST, manifest(b"x").replace(b'"index": 0', b'"index": 1')),
        (PUT_MANIFEST, manifest(b"x").replace(b'"block"', b'"brick"')),
        (RESERVE, b'{"size": 0}'),
        (RESERVE, b'{"size": 99999999999}'),
        (RESERVE, b'{"size": 5, "kind": "brick"}'),
        (RESERVE, b'{"size": 5, "hash": "ABC"}'),
        (LEASE, b'{"hashes": ["x"]}'),
        (LEASE, b'{"lease_s": 0}'),
        (LEASE, b'{"lease_s": -1}'),
    ],
)
def test_what_cannot_be_is_refused_and_the_connection_goes_on(client: PlainClient, opcode: int, payload: bytes) -> None:
    client.ask(PUT, "kv/s", b"there")
    assert client.ask(opcode, "kv/s", payload).status == BAD_REQUEST
    assert client.ask(GET, "kv/s").payload == b"there"


def test_engine_operations_are_not_served(client: PlainClient) -> None:
    answer = client.ask(0x30, "0")
    assert (answer.status, answer.meta["code"]) == (NOT_IMPLEMENTED, "not_served")


def test_a_client_that_leaves_in_the_middle_of_a_put_leaves_nothing(store: StoreProcess, client: PlainClient) -> None:
    free = client.ask(INFO).meta["status"]
    for cut in (0, 1000, 1 << 20, (1 << 20) + 5):
        with PlainClient(store.config.port, SECRET) as leaving:
            leaving.socket.sendall(message(PUT, "kv/cut", content(cut + 1, 2 << 20))[: 22 + cut])
    deadline = time.monotonic() + 10
    while client.ask(INFO).meta["status"]["reservations"]:
        assert time.monotonic() < deadline
    assert client.ask(GET, "kv/cut").status == NOT_FOUND
    after = client.ask(INFO).meta["status"]
    assert after["free_bytes"] >= free["free_bytes"] - 2 * (1 << 20)


# --- in place -------------------------------------------------------------------------------------


def place(path: str, offset: int, size: int) -> memoryview:
    fd = os.open(path, os.O_RDWR)
    try:
        return memoryview(mmap.mmap(fd, os.fstat(fd).st_size))[offset : offset + size]
    finally:
        os.close(fd)


def test_an_object_is_written_and_read_in_place(client: PlainClient) -> None:
    data = content(9, 123_456)
    room = client.ask(RESERVE, "logical/9", json.dumps({"size": len(data), "kind": "block"}).encode()).meta
    assert (room["present"], room["size"]) == (False, len(data))
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert now < room["expires"] <= now + 30
    place(room["path"], room["offset"], room["size"])[:] = data
    done = client.ask(COMMIT, room["ticket"], b"{}")
    assert done.meta == {"stored": True, "hash": hash_of(data)}
    assert client.ask(COMMIT, room["ticket"], b"{}").status == NOT_FOUND
    again = client.ask(RESERVE, "logical/9", json.dumps({"size": len(data)}).encode()).meta
    assert again == {"present": True, "size": len(data), "hash": hash_of(data)}
    client.ask(PUT_MANIFEST, "kv/in-place", manifest(data))
    lease = client.ask(LEASE, "", json.dumps({"logical_keys": ["logical/9", "logical/10"]}).encode())
    assert (lease.status, lease.meta["missing"]) == (PARTIAL, ["logical/10"])
    (found,) = lease.meta["places"]
    assert (found["hash"], found["kind"], found["logical_key"]) == (hash_of(data), "block", "logical/9")
    view = place(found["path"], found["offset"], found["size"])
    assert bytes(view) == data
    assert xxhash.xxh3_128_hexdigest(view) == found["checksum"]
    longer = client.ask(LEASE, "", json.dumps({"ticket": lease.meta["ticket"], "lease_s": 100}).encode()).meta
    assert longer["expires"] > lease.meta["expires"] + 60
    assert client.ask(RELEASE, lease.meta["ticket"]).meta == {"released": True}
    assert client.ask(RELEASE, lease.meta["ticket"]).meta == {"released": False}
    assert client.ask(LEASE, "", json.dumps({"ticket": lease.meta["ticket"]}).encode()).status == NOT_FOUND
    whole = client.ask(LEASE, "kv/in-place").meta
    assert [item["hash"] for item in whole["places"]] == [hash_of(data)]
    client.ask(RELEASE, whole["ticket"])


def test_what_was_written_must_be_what_the_writer_says(client: PlainClient) -> None:
    room = client.ask(RESERVE, "", b'{"size": 5000}').meta
    place(room["path"], room["offset"], room["size"])[:] = content(3, 5000)
    answer = client.ask(COMMIT, room["ticket"], json.dumps({"hash": hash_of(b"else")}).encode())
    assert (answer.status, answer.meta["code"]) == (BAD_REQUEST, "digest_mismatch")
    assert client.ask(GET, f"objects/{hash_of(content(3, 5000))}").status == NOT_FOUND
    assert client.ask(COMMIT, room["ticket"], b"{}").status == NOT_FOUND


def test_of_two_writers_of_one_logical_key_the_first_wins(client: PlainClient) -> None:
    ours, theirs = content(31, 4000), content(32, 5000)
    rooms = [client.ask(RESERVE, "logical/x", json.dumps({"size": len(d)}).encode()).meta for d in (ours, theirs)]
    for room, data in zip(rooms, (ours, theirs), strict=True):
        place(room["path"], room["offset"], room["size"])[:] = data
    assert client.ask(COMMIT, rooms[1]["ticket"], b"{}").meta == {"stored": True, "hash": hash_of(theirs)}
    assert client.ask(COMMIT, rooms[0]["ticket"], b"{}").meta == {"stored": False, "hash": hash_of(theirs)}
    assert client.ask(GET, f"objects/{hash_of(ours)}").status == NOT_FOUND


def test_room_that_is_given_back_is_free_again(client: PlainClient) -> None:
    before = client.ask(INFO).meta["status"]["free_bytes"]
    room = client.ask(RESERVE, "", b'{"size": 100000}').meta
    assert client.ask(INFO).meta["status"]["free_bytes"] < before
    assert client.ask(RELEASE, room["ticket"]).meta == {"released": True}
    assert client.ask(INFO).meta["status"]["free_bytes"] == before


# --- about itself ---------------------------------------------------------------------------------


def test_its_pages_tell_what_it_holds(store: StoreProcess, client: PlainClient) -> None:
    client.ask(PUT, "kv/shown", b"shown bytes")

    def page(path: str, **headers: str) -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{store.config.http_port}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            body: bytes = answer.read()
            return body

    assert json.loads(page("/health")) == {"status": "ok"}
    series = page("/metrics").decode()
    info = client.ask(INFO).meta
    for name in info["status"]:
        assert f"\nhydra_store_{name} " in series
    for name in info["counts"]:
        assert f"\nhydra_store_{name}_total " in series
    shown = json.loads(page("/debug"))["manifests"]
    assert [row["name"] for row in shown] == ["kv/shown"]
    with pytest.raises(urllib.error.HTTPError, match="403"):
        page("/debug", Origin="http://evil.example")
