"""What a restore would take here, by what restores took of late, against what computing the same would take; and how fast
other hosts' stores were read."""

from __future__ import annotations

from engines.runtime.rates import PrefillRate, pairs_of

# A restore must take less than this share of the prefill that it saves, so that being wrong by a little costs nothing.
WORTH = 0.9
# Until something is measured; memory copies at some GB/s, the rest of it is checks and slices between steps.
FIRST_BYTES_PER_S = 1e9
FIXED_S = 0.004
WEIGHT = 0.3
# Smaller ones tell more of the fixed cost than of the rate.
MIN_BYTES = 1 << 18
# Until a link was measured: a gigabit's network.
FIRST_LINK_BYTES_PER_S = 1e8
MAX_LINKS = 64


class ParkRates:
    """A moving average. Written on the event loop, read on any thread."""

    def __init__(self) -> None:
        self.restore_bytes_per_s = FIRST_BYTES_PER_S
        self.fixed_s = FIXED_S
        self.first_link_bytes_per_s = FIRST_LINK_BYTES_PER_S
        # By the address of the store that was read from, the one read last at the end.
        self.links: dict[str, float] = {}

    def restored(self, size_bytes: int, seconds: float) -> None:
        if size_bytes >= MIN_BYTES and seconds > self.fixed_s:
            self.restore_bytes_per_s += WEIGHT * (size_bytes / (seconds - self.fixed_s) - self.restore_bytes_per_s)

    def pulled(self, address: str, size_bytes: int, seconds: float) -> None:
        """So much came from the store at `address` ("host:port")."""
        if size_bytes < MIN_BYTES or seconds <= 0:
            return
        measured = size_bytes / seconds
        before = self.links.pop(address, measured)
        self.links[address] = before + WEIGHT * (measured - before)
        if len(self.links) > MAX_LINKS:
            del self.links[next(iter(self.links))]

    def pull_s(self, address: str, size_bytes: int) -> float:
        return size_bytes / self.links.get(address, self.first_link_bytes_per_s)

    def restore_s(self, size_bytes: int) -> float:
        return self.fixed_s + size_bytes / self.restore_bytes_per_s


def prefill_s(rate: PrefillRate, tokens: int, local_tokens: int) -> float:
    """Of a prompt's first `tokens` tokens, of which the first `local_tokens` need no computing."""
    count = tokens - local_tokens
    return rate.seconds(count, pairs_of(local_tokens, count)) if count > 0 else 0.0
