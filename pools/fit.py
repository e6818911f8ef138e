"""Where and how a model would fit, device by device, for people: the preview of its page in the admin.

What engines hold is told by whoever keeps their rows (`use_books`); until somebody does, what drivers read has to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pools.load_facts import DeviceFacts, LoadWish, load_wish, usable_devices
from pools.placement import Preview, Refusal, Room, fit, previews
from pools.placement_rooms import Reading, room_of

MAX_PREVIEWS = 24

Rooms = Callable[[Sequence[DeviceFacts]], list[Room]]


@dataclass(frozen=True)
class DeviceFit:
    """One device: the room on it, what the wished form would become, and other forms that fit, the cheapest first."""

    device: str
    room: Room
    answer: Preview | Refusal
    previews: tuple[Preview, ...]


def reading_of(device: DeviceFacts) -> Reading:
    """A device as the books take it."""
    return Reading(
        device.device_id,
        device.name,
        device.kind == "cuda",
        device.total_bytes,
        device.used_bytes,
        device.limit_bytes,
        device.host_total_bytes,
        device.host_available_bytes,
        device.host_limit_bytes,
    )


def _rooms_by_reading(devices: Sequence[DeviceFacts]) -> list[Room]:
    return [room_of(reading_of(device), []) for device in devices]


_books: list[Rooms] = [_rooms_by_reading]


def use_books(rooms: Rooms) -> None:
    """Have rooms told by these books from now on."""
    _books[0] = rooms


def device_fits(model_name: str) -> tuple[LoadWish, list[DeviceFit]] | None:
    """How the model would be loaded on each device as things are now; None without such a model or file."""
    wish = load_wish(model_name)
    if wish is None:
        return None
    devices = usable_devices(wish.variant_id)
    fits = [
        DeviceFit(
            device.name,
            room,
            fit(wish.facts, wish.form, room),
            tuple(previews(wish.facts, wish.form, room)[:MAX_PREVIEWS]),
        )
        for device, room in zip(devices, _books[0](devices), strict=True)
    ]
    return wish, fits
