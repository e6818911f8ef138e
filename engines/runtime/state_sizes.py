"""How large the blocks of a state are: few enough bytes where they are kept, more where they only travel."""

from __future__ import annotations

from collections.abc import Iterator

from engines.config import EngineConfig
from engines.runtime.state_layout import StateLayout
from engines.runtime.state_order import MAX_BLOCK_TOKENS

MIN_BLOCK_TOKENS = 64
# Kept: conversations share many of them, on whatever device they are, so that all engines of a model must cut alike. They also
# stand between two steps without being felt. Larger ones of a small model would hold whole conversations and share nothing.
KEPT_BLOCK_BYTES, KEPT_BLOCK_TOKENS = 8 << 20, 256
# Moved, while nobody's next token waits. Off a card: large enough to hide what each costs besides, a third of a millisecond.
# In a processor's memory: small enough that a piece is still in its caches when it is proved and read.
CPU_MOVED_BYTES, GPU_MOVED_BYTES = 6 << 20, 48 << 20
# One block is proved while the next is copied; with a few large ones there would be little beside each other, and with eight of a
# small state what each costs besides is felt.
LEAST_BLOCKS, LEAST_MOVED_BYTES = 4, 8 << 20
# By a card the last block is proved when all has been copied already, so that the last ones are ever smaller, down to this.
LAST_MOVED_BYTES = 8 << 20


def kept_block_tokens(config: EngineConfig, layout: StateLayout) -> int:
    return config.kv_block_tokens or _fitting(layout, KEPT_BLOCK_BYTES, KEPT_BLOCK_TOKENS)


def moved_block_tokens(config: EngineConfig, layout: StateLayout, count: int = 0) -> int:
    """`count`: tokens of the state; 0 where blocks must do for any."""
    most_bytes = GPU_MOVED_BYTES if config.gpu_layers else CPU_MOVED_BYTES
    if count:
        most_bytes = min(most_bytes, max(LEAST_MOVED_BYTES, count * layout.attention.token_bytes // LEAST_BLOCKS))
    return config.kv_block_tokens or _fitting(layout, most_bytes, MAX_BLOCK_TOKENS)


def last_block_tokens(config: EngineConfig, layout: StateLayout) -> int:
    """How many the last of the moved blocks has at most; 0 where they need not get smaller towards the end."""
    if config.kv_block_tokens or not config.gpu_layers:
        return 0
    return _fitting(layout, LAST_MOVED_BYTES, MAX_BLOCK_TOKENS)


def block_ends(begin: int, count: int, block_tokens: int, last_tokens: int = 0) -> Iterator[int]:
    """Where the blocks of positions [begin, count) end; with `last_tokens` each of the last ones is half of what there is left,
    until no more is left than that."""
    at = begin
    while at < count:
        left, tokens = count - at, block_tokens
        while last_tokens and left <= tokens > last_tokens:
            tokens //= 2
        at += min(tokens, left)
        yield at


def blocks_bytes(layout: StateLayout, tokens: int, block_tokens: int) -> int:
    """Of so many tokens in blocks."""
    whole, rest = divmod(tokens, block_tokens)
    return whole * layout.block_bytes(block_tokens) + (layout.block_bytes(rest) if rest else 0)


def _fitting(layout: StateLayout, most_bytes: int, most_tokens: int) -> int:
    """The largest power of two whose block has no more than so many bytes and tokens."""
    tokens = MIN_BLOCK_TOKENS
    while tokens < most_tokens and 2 * tokens * layout.attention.token_bytes <= most_bytes:
        tokens *= 2
    return tokens
