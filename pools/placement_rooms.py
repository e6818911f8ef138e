"""Free memory by the books: what a device and its host have left once everything that is loaded there counts.

A driver tells what is used, not by whom; and an engine that just came or went is in no reading yet. So what others use is what
was read less what our engines held then, and what is free is the whole less others less what our engines hold now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pools.placement import CARD_MARGIN_BYTES, HOST_MARGIN_BYTES, Room


@dataclass(frozen=True)
class Held:
    """What one engine takes, by its ledger. `now`: it is loaded, loads or ends; `when_read`: it was there in the last reading.

    `promised_bytes` is the part of `kept_bytes` that is reached in use only.
    """

    device_id: int
    card_bytes: int
    kept_bytes: int
    resident_bytes: int
    promised_bytes: int
    now: bool
    when_read: bool


@dataclass(frozen=True)
class Reading:
    """A device and its host as last read; a limit of 0 is none, `used_bytes` None: not told."""

    device_id: int
    name: str
    is_card: bool
    total_bytes: int
    used_bytes: int | None
    limit_bytes: int
    host_total_bytes: int
    host_available_bytes: int
    host_limit_bytes: int


def room_of(reading: Reading, held: Sequence[Held]) -> Room:
    """What a further model may take; `held` are the engines of the device's host."""
    host_bytes, resident_bytes = _host_bytes(reading, held)
    card_bytes = (
        _card_bytes(reading, [one for one in held if one.device_id == reading.device_id]) if reading.is_card else 0
    )
    whole_bytes = whole_card_bytes(reading.total_bytes) if reading.is_card else 0
    return Room(reading.device_id, reading.name, card_bytes, host_bytes, resident_bytes, reading.is_card, whole_bytes)


def whole_card_bytes(total_bytes: int) -> int:
    """What engines may have of an empty card; 0 where its size is not known."""
    return max(total_bytes - CARD_MARGIN_BYTES, 0)


def _card_bytes(reading: Reading, held: Sequence[Held]) -> int:
    ours_now = sum(one.card_bytes for one in held if one.now)
    ours_read = sum(one.card_bytes for one in held if one.when_read)
    others = max((reading.used_bytes or 0) - ours_read, 0)
    free_bytes = reading.total_bytes - others - ours_now - CARD_MARGIN_BYTES
    return _limited(free_bytes, reading.limit_bytes, ours_now)


def _host_bytes(reading: Reading, held: Sequence[Held]) -> tuple[int, int]:
    kept_now = sum(one.kept_bytes for one in held if one.now)
    kept_read = sum(one.kept_bytes - one.promised_bytes for one in held if one.when_read)
    resident_now = sum(one.resident_bytes for one in held if one.now)
    # Page cache counts as available, so mapped weights are in no reading.
    others = max(reading.host_total_bytes - reading.host_available_bytes - kept_read, 0)
    free_bytes = reading.host_total_bytes - others - HOST_MARGIN_BYTES
    return (
        _limited(free_bytes - kept_now, reading.host_limit_bytes, kept_now),
        _limited(free_bytes - resident_now, reading.host_limit_bytes, resident_now),
    )


def _limited(free_bytes: int, limit_bytes: int, ours_bytes: int) -> int:
    return min(free_bytes, limit_bytes - ours_bytes) if limit_bytes else free_bytes
