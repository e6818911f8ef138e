"""What people let engines take of a device: the one field of a device that nobody reads from it."""

from django.db import transaction

from pools.events import publish_on_commit
from pools.models import Gpu


def set_memory_limit(device_id: int, limit_bytes: int) -> bool:
    """Let engines that are started on demand take at most so much of a device together (0: all that is free).

    What is loaded already stays; False when there is no such device. Raises ValueError for less than 0.
    """
    if limit_bytes < 0:
        raise ValueError(f"a limit of {limit_bytes} bytes")
    with transaction.atomic():
        host_id = Gpu.objects.filter(pk=device_id).values_list("host_id", flat=True).first()
        changed = Gpu.objects.filter(pk=device_id).update(memory_limit_bytes=limit_bytes)
        if host_id is not None:
            publish_on_commit("host", host_id)
    return bool(changed)
