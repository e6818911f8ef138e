"""The protocol's bytes: what the page's examples say, however they are cut, and whatever a stranger sends instead."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import EngineError, InvalidRequest, ProtocolBroken
from engines.wire import (
    END_OF_FRAMES,
    MAX_FRAME_BYTES,
    MAX_META_BYTES,
    STREAMED,
    FrameDecoder,
    Opcode,
    RequestDecoder,
    RequestHead,
    ResponseDecoder,
    ResponseHead,
    SlotKey,
    Status,
    frame,
    hello_proof,
    proves,
)
from engines.wire_json import ErrorMeta, InfoAnswer, read_json, write_json
from engines.wire_store import Manifest, ManifestChunk

heads = st.builds(
    RequestHead,
    opcode=st.integers(0, 255),
    flags=st.integers(0, 255),
    key=st.binary(max_size=300),
    trace=st.binary(max_size=300),
    payload_bytes=st.integers(0, (1 << 64) - 1),
)


def fed(decoder: RequestDecoder | ResponseDecoder | FrameDecoder, data: bytes, step: int) -> bytes:
    """Feeds `data` in pieces of `step`; returns what the decoder left."""
    for start in range(0, len(data), step):
        piece = data[start : start + step]
        used = decoder.feed(piece)
        if used < len(piece):
            return data[start + used :]
    return b""


def test_a_request_is_the_bytes_that_the_page_shows() -> None:
    head = RequestHead(Opcode.INFO, trace=b"t1")
    assert head.encode().hex(" ") == "59 48 41 00 00 00 00 00 00 00 00 00 00 00 02 00 74 31"
    assert RequestHead(Opcode.STATE_META, key=b"0").encode().hex(" ") == (
        "59 48 32 00 01 00 00 00 00 00 00 00 00 00 00 00 30"
    )


def test_an_answer_is_the_bytes_that_the_page_shows() -> None:
    streamed = ResponseHead(Status.OK, b"{}", STREAMED).encode() + frame(b'{"a":1}') + END_OF_FRAMES
    assert streamed.hex(" ") == (
        "00 02 00 00 ff ff ff ff ff ff ff ff 7b 7d 07 00 00 00 7b 22 61 22 3a 31 7d 00 00 00 00"
    )


def test_proofs_are_those_that_the_page_shows() -> None:
    secret, nonce, challenge = "correct horse battery staple", bytes(range(32)), bytes(range(32, 64))
    assert hello_proof(secret, "client", nonce, challenge).hex().startswith("a98c30d8e41a2bb3")
    assert hello_proof(secret, "server", nonce, challenge).hex().startswith("831216ac67bb4004")
    assert proves(hello_proof(secret, "client", nonce, challenge), secret, "client", nonce, challenge)
    assert not proves(hello_proof(secret, "client", nonce, challenge), secret, "server", nonce, challenge)
    assert not proves(b"", secret, "client", nonce, challenge)


@given(heads, st.binary(max_size=50), st.integers(1, 400))
def test_a_request_comes_back_however_it_is_cut(head: RequestHead, payload: bytes, step: int) -> None:
    decoder = RequestDecoder()
    assert fed(decoder, head.encode() + payload, step) == payload
    assert decoder.head == head


@given(
    st.builds(
        ResponseHead,
        status=st.sampled_from(Status),
        meta=st.binary(max_size=600),
        payload_bytes=st.integers(0, (1 << 64) - 1),
    ),
    st.integers(1, 700),
)
def test_an_answer_comes_back_however_it_is_cut(head: ResponseHead, step: int) -> None:
    decoder = ResponseDecoder()
    assert fed(decoder, head.encode() + b"rest", step) == b"rest"
    assert decoder.head == head
    assert head.is_streamed == (head.payload_bytes == STREAMED)


@given(st.lists(st.binary(min_size=1, max_size=200), max_size=20), st.integers(1, 300))
def test_frames_come_back_however_they_are_cut(frames: list[bytes], step: int) -> None:
    decoder = FrameDecoder()
    assert fed(decoder, b"".join(map(frame, frames)) + END_OF_FRAMES + b"rest", step) == b"rest"
    assert decoder.take() == frames
    assert decoder.ended


@given(st.binary(max_size=2000), st.integers(1, 200))
@settings(max_examples=300)
def test_arbitrary_bytes_end_in_a_head_a_wait_or_a_refusal(data: bytes, step: int) -> None:
    for decoder in (RequestDecoder(), ResponseDecoder(4096), FrameDecoder(4096)):
        try:
            fed(decoder, data, step)
        except ProtocolBroken:
            continue


@given(st.binary(max_size=200))
def test_arbitrary_json_is_read_or_refused(raw: bytes) -> None:
    for kind in (ErrorMeta, InfoAnswer, Manifest):
        try:
            assert isinstance(read_json(kind, raw, "it"), kind)
        except InvalidRequest:
            continue


def test_announced_sizes_cost_nothing_before_their_bytes_come() -> None:
    huge_request = RequestHead(1, 0, b"k" * 65535, b"t" * 65535, STREAMED).encode()[:16]
    huge_meta = (MAX_META_BYTES << 8).to_bytes(4, "little") + bytes(8)
    tracemalloc.start()
    for decoder, data in (
        (RequestDecoder(), huge_request),
        (ResponseDecoder(), huge_meta),
        (FrameDecoder(), MAX_FRAME_BYTES.to_bytes(4, "little")),
    ):
        fed(decoder, data, 4)
    assert tracemalloc.get_traced_memory()[1] < 1 << 16
    tracemalloc.stop()


@pytest.mark.parametrize("data", [b"\x59\x49", b"HY", b"GET / HTTP/1.1\r\n\r\n", b"\x0e"])
def test_a_wrong_magic_is_refused_at_its_second_byte(data: bytes) -> None:
    decoder = RequestDecoder()
    assert decoder.feed(data[:1]) == 1
    if len(data) > 1:
        with pytest.raises(ProtocolBroken):
            decoder.feed(data[1:2])


@pytest.mark.parametrize(
    "data", [bytes([7]) + bytes(11), bytes([255]) + bytes(11), (5000 << 8).to_bytes(4, "little") + bytes(8)]
)
def test_an_answer_out_of_bounds_is_refused_by_its_header(data: bytes) -> None:
    with pytest.raises(ProtocolBroken):
        ResponseDecoder(4096).feed(data)


def test_what_cannot_be_framed_is_not_sent() -> None:
    for encode in (
        lambda: RequestHead(1, key=b"k" * 65536).encode(),
        lambda: RequestHead(1, trace=b"t" * 65536).encode(),
        lambda: ResponseHead(Status.OK, b"m" * (MAX_META_BYTES + 1)).encode(),
        lambda: frame(b""),
        lambda: frame(bytes(MAX_FRAME_BYTES + 1)),
    ):
        with pytest.raises(EngineError):
            encode()
    with pytest.raises(ProtocolBroken):
        FrameDecoder(10).feed(frame(bytes(11)))


@given(
    st.builds(
        SlotKey,
        slot_id=st.integers(0, 9999),
        form=st.none() | st.text(min_size=1, max_size=20),
        fingerprint=st.none() | st.text(min_size=1, max_size=80),
        erase_existing=st.booleans(),
    )
)
def test_a_slot_key_comes_back(key: SlotKey) -> None:
    assert SlotKey.parse(key.encode().decode()) == key


@pytest.mark.parametrize(
    "key",
    ["", "-1", "a", "٣", "00000", "1?form", "1?form=a&form=b", "1?other=1", "1?erase_existing=2", "1?form=%ff", " 1"],
)
def test_a_slot_key_that_says_something_else_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequest):
        SlotKey.parse(key)


def test_messages_skip_keys_they_do_not_know_and_name_the_one_that_is_wrong() -> None:
    manifest = Manifest(3, 4, "m", "h", "p", (ManifestChunk(0, "aa", 4),))
    assert read_json(Manifest, write_json(manifest).replace(b"{", b'{"new":[1],', 1), "it") == manifest
    with pytest.raises(InvalidRequest) as caught:
        read_json(Manifest, write_json(manifest).replace(b'"size":4', b'"size":"4"'), "it")
    assert caught.value.param == "chunks.0.size"
    with pytest.raises(InvalidRequest):
        read_json(ErrorMeta, b'{"error":' + b"[" * 100_000, "it")
