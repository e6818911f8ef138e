"""docs/rpc-protocol.md and the code say the same: opcodes, statuses, headers, limits, timeouts, every key of every message."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from engines import rpc_client, rpc_serving, wire, wire_handoff, wire_json, wire_store
from engines.config import EngineConfig
from engines.errors import EngineError
from engines.runtime import http_stream, request_defaults, rpc_operations

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rpc-protocol.md").read_text()

MESSAGES = {
    name: value
    for module in (wire_json, wire_store, wire_handoff)
    for name, value in inspect.getmembers(module, dataclasses.is_dataclass)
    if isinstance(value, type)
}


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table behind a line that begins with `heading`, without its head."""
    after = PAGE[PAGE.index(f"\n{heading}") :]
    table = re.search(r"(?:^\|.*\n)+", after, re.M)
    assert table, heading
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table[0].splitlines()[2:]]


def section(start: str, end: str) -> str:
    return PAGE[PAGE.index(start) : PAGE.index(end, PAGE.index(start) + 1)]


def test_every_opcode_stands_there_with_number_name_server_and_key() -> None:
    written = [(int(number, 16), name, served_by, key) for number, name, served_by, key in rows("## Opcodes")]
    defined = [
        (int(opcode), opcode.name, wire.OPERATIONS[opcode].served_by, wire.OPERATIONS[opcode].key)
        for opcode in sorted(wire.Opcode)
    ]
    assert written == defined
    assert len(wire.OPERATIONS) == len(wire.Opcode)


def test_every_status_stands_there() -> None:
    assert [(int(number), name) for number, name, _ in rows("### Statuses")] == [(s.value, s.name) for s in wire.Status]


def test_headers_have_the_sizes_that_the_tables_add_up_to() -> None:
    request = [(int(offset), int(size), name) for offset, size, name, _ in rows("A request is a header of 16 bytes")]
    answer = [(int(offset), int(size), name) for offset, size, name, _ in rows("An answer is a header of 12 bytes")]
    for fields, total in ((request, wire.REQUEST_HEADER_BYTES), (answer, wire.RESPONSE_HEADER_BYTES)):
        assert [offset for offset, _, _ in fields] == [sum(s for _, s, _ in fields[:i]) for i in range(len(fields))]
        assert sum(size for _, size, _ in fields) == total
    head = wire.RequestHead(0x41, 0, b"kk", b"ttt", 0x0102030405060708).encode()
    values = {name: int.from_bytes(head[offset : offset + size], "little") for offset, size, name in request}
    expected = {"magic": wire.MAGIC, "opcode": 0x41, "flags": 0, "key_len": 2, "trace_len": 3}
    assert values == {**expected, "payload_len": 0x0102030405060708}
    head = wire.ResponseHead(wire.Status.BUSY, b"meta", 9).encode()
    values = {name: int.from_bytes(head[offset : offset + size], "little") for offset, size, name in answer}
    assert values == {"status": 4, "meta_len": 4, "payload_len": 9}


def test_every_limit_is_the_one_that_is_enforced() -> None:
    written = {name: int(value) for name, value in rows("### Limits")}
    assert sorted(written.values()) == sorted(
        [
            wire.REQUEST_HEADER_BYTES,
            wire.RESPONSE_HEADER_BYTES,
            wire.MAX_KEY_BYTES,
            wire.MAX_TRACE_BYTES,
            wire.MAX_META_BYTES,
            wire.MAX_FRAME_BYTES,
            wire.MAX_HELLO_BYTES,
            wire.MAX_CONFIGURE_BYTES,
            wire.MAX_JSON_BYTES,
            wire.MAX_STATE_BYTES,
            wire.MAX_OBJECT_BYTES,
            wire.MAX_DRAINED_BYTES,
        ]
    )
    for name, value in written.items():
        for operation in wire.OPERATIONS.values():
            if re.search(rf"\b{operation.opcode.name}\b", name):
                assert operation.max_payload_bytes == value, operation
    silent = [o for o in wire.OPERATIONS.values() if not any(re.search(rf"\b{o.opcode.name}\b", n) for n in written)]
    assert {o.opcode.name for o in silent if o.max_payload_bytes} == {
        "SET_EXPERT_MODE",
        "SWAP_QUANT",
        "PIPELINE_ATTACH",
    }


def test_timeouts_are_those_of_the_code() -> None:
    config, patience = EngineConfig("m", "m"), rpc_client.Patience()
    defaults = " ".join(row[-1] for row in rows("### Timeouts"))
    for seconds in (
        config.rpc_idle_s,
        config.rpc_stall_s,
        config.request_deadline_s,
        http_stream.PING_S,
        rpc_operations.LOOK_DEADLINE_S,
        patience.connect_s,
        patience.hello_s,
        patience.look_s,
        patience.stall_s,
        patience.silence_s,
        patience.prefill_s,
    ):
        assert re.search(rf"\b{seconds:g} s", defaults), seconds


@pytest.mark.parametrize(
    ("messages", "start", "end"),
    [
        (["ErrorMeta"], "The meta of an answer that is neither", "### Limits"),
        (["HelloRequest", "HelloChallenge", "HelloAnswer", "HelloDone"], "## HELLO", "## State operations"),
        (["StateMetaAnswer"], "**STATE_META", "**STATE_GET"),
        (["StatePutAnswer"], "**STATE_PUT", "## Handoffs"),
        (["HandoffBody", "HandoffAnswer"], "**HANDOFF", "**ADOPT (0x35)"),
        (["AdoptBody", "AdoptAnswer", "ShelfOffer", "PrefixMark"], "**ADOPT (0x35)", "**ADOPT_BLOCK"),
        (["BlockHead"], "**ADOPT_BLOCK", "**ADOPT_REST"),
        (["AskBody", "AdoptedAnswer"], "**ADOPT_ASK", "A target that hears"),
        (["InfoAnswer"], "**INFO", "**CONFIGURE"),
        (["ConfigureAnswer"], "**CONFIGURE", "**PREFILL"),
        (["PrefillAnswer"], "**PREFILL", "**DECODE"),
        (["DecodeAnswer"], "**DECODE", "**SET_EXPERT_MODE"),
        (
            [
                "StoredAnswer",
                "GetAnswer",
                "DelAnswer",
                "StatAnswer",
                "ListAnswer",
                "PutChunkedAnswer",
                "GetChunkedAnswer",
                "SyncMissingAnswer",
                "MissingHashes",
                "PushChunksAnswer",
                "PutMetaBody",
                "ManifestChunk",
                "Manifest",
                "PutManifestAnswer",
                "ReserveBody",
                "ReserveAnswer",
                "CommitBody",
                "CommitAnswer",
                "LeaseBody",
                "Place",
                "LeaseAnswer",
                "ReleaseAnswer",
                "SnapshotsBody",
                "SnapshotEntry",
                "SnapshotsAnswer",
                "StoreInfoAnswer",
                "Empty",
            ],
            "## Store operations",
            "## Examples",
        ),
    ],
)
def test_every_key_of_every_message_is_explained(messages: list[str], start: str, end: str) -> None:
    text = section(start, end)
    for message in messages:
        for field in dataclasses.fields(MESSAGES[message]):
            assert re.search(rf"[`\"]{field.name}[`\"]", text), f"{message}.{field.name}"


def test_no_message_is_left_out_of_the_comparison() -> None:
    (mark,) = test_every_key_of_every_message_is_explained.pytestmark
    assert set(MESSAGES) == {name for names, _, _ in mark.args[1] for name in names}


def test_every_key_that_configure_knows_is_named() -> None:
    text = section("**CONFIGURE", "**PREFILL")
    known = [*request_defaults.FIELD_OF, *request_defaults.STARTED_WITH, *request_defaults.FIXED]
    missing = [key for key in known if f"`{key}`" not in text and not key.startswith("rope_")]
    assert missing == []


def test_every_error_code_that_the_page_names_exists() -> None:
    def codes(kind: type[EngineError]) -> set[str]:
        return {kind.code, *(code for child in kind.__subclasses__() for code in codes(child))}

    named = set(re.findall(r"`((?:slot|state|engine|not|body|context|no|too)_[a-z_]+)`", PAGE))
    others = {"state_size", "not_known", "context_tokens", "state_transfer", "state_form", "state_chunk_size"}
    others |= {"state_chunk_size_applied", "slot_id"}
    assert len(named - others) >= 8
    assert named - others - codes(EngineError) == {rpc_serving.TOO_MANY_CONNECTIONS}
