"""How large the blocks of a state are: few enough bytes where they are kept, more where they only travel."""

from __future__ import annotations

from engines.config import EngineConfig
from engines.runtime.state_layout import StateLayout
from engines.runtime.state_order import MAX_BLOCK_TOKENS

MIN_BLOCK_TOKENS = 64
# Kept: conversations share many of them. They also stand between two steps without being felt.
CPU_BLOCK_BYTES, GPU_BLOCK_BYTES = 6 << 20, 12 << 20
# Moved, while nobody's next token waits: large enough to hide what each costs besides, a third of a millisecond on both.
CPU_MOVED_BYTES, GPU_MOVED_BYTES = 24 << 20, 48 << 20


def kept_block_tokens(config: EngineConfig, layout: StateLayout) -> int:
    return _fitting(config, layout, GPU_BLOCK_BYTES if config.gpu_layers else CPU_BLOCK_BYTES)


def moved_block_tokens(config: EngineConfig, layout: StateLayout) -> int:
    return _fitting(config, layout, GPU_MOVED_BYTES if config.gpu_layers else CPU_MOVED_BYTES)


def _fitting(config: EngineConfig, layout: StateLayout, most_bytes: int) -> int:
    """The configuration's, or the largest power of two whose block has no more than so many bytes."""
    if config.kv_block_tokens:
        return config.kv_block_tokens
    tokens = MIN_BLOCK_TOKENS
    while 2 * tokens * layout.attention.token_bytes <= most_bytes and tokens < MAX_BLOCK_TOKENS:
        tokens *= 2
    return tokens
