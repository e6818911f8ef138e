"""Keys of prefixes: equal for equal prefixes of one tenant and kind, different for everything else."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engines.runtime.store_keys import KeyChain, SnapshotName
from engines.store.records import MAX_LOGICAL_KEY_BYTES

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=60)


def chain(tokens: list[int], tenant: str = "", fingerprint: str = "f", block_tokens: int = 8) -> KeyChain:
    return KeyChain(fingerprint, tenant, block_tokens, tokens)


@settings(max_examples=40)
@given(TOKENS, TOKENS, st.data())
def test_a_key_tells_a_prefix_from_every_other_one(tokens: list[int], more: list[int], data: st.DataObject) -> None:
    length = data.draw(st.integers(1, len(tokens)))
    short, long = chain(tokens[:length]), chain([*tokens, *more])
    assert long.name(length) == short.name(length)
    assert [long.block_key(i) for i in range(len(short))] == [short.block_key(i) for i in range(len(short))]
    changed = [*tokens[: length - 1], tokens[length - 1] ^ 1]
    assert chain(changed).point(length) != short.point(length)
    others = (chain(tokens, "ab"), chain(tokens, fingerprint="g"), chain(tokens, block_tokens=16))
    assert all(other.point(length) != short.point(length) for other in others)


@settings(max_examples=40)
@given(TOKENS, st.text(max_size=20))
def test_a_name_is_read_as_it_was_written(tokens: list[int], session: str) -> None:
    name = chain(tokens).name(len(tokens), session)
    assert SnapshotName.parse(name.text) == name
    assert name.text.startswith(SnapshotName.behind(name.chain))
    assert bool(name.session) == bool(session)
    assert SnapshotName.parse(name.text + "0") is None
    assert len(chain(tokens).piece_key("tail", len(tokens))) + 17 <= MAX_LOGICAL_KEY_BYTES
