"""Engines that get empty: closed to new requests, and not stopped while their conversations are on their way elsewhere."""

from collections.abc import Collection, Iterable
from datetime import timedelta

from django.db import transaction
from django.db.models.functions import Now

from engines import services
from engines.choices import LIVE, EngineState, StopReason, Wanted
from engines.models import Engine
from pools.events import publish_on_commit


def lock(engine_ids: Collection[int]) -> None:
    """Nobody else writes these rows until the transaction ends. Whoever writes several takes them all at once, in this order:
    the drains of a host and of its cards, and loads that others make way for, meet at the same engines."""
    list(Engine.objects.filter(pk__in=engine_ids).select_for_update().order_by("pk").values_list("pk"))


def close(engine_ids: Collection[int], held_s: float) -> int:
    """Send these engines nothing new, until they are opened or started again, and keep each up for so long; returns how many
    were open. Sites remember who takes requests for a second."""
    with transaction.atomic():
        lock(engine_ids)
        found = list(Engine.objects.filter(pk__in=engine_ids).values_list("pk", "takes_new"))
        Engine.objects.filter(pk__in=engine_ids, state__in=LIVE).update(held_until=Now() + timedelta(seconds=held_s))
        closed = [pk for pk, takes_new in found if takes_new]
        count = Engine.objects.filter(pk__in=closed, takes_new=True).update(takes_new=False)
        _tell(closed)
    return count


def stop(engine_ids: Collection[int]) -> None:
    """A person asks for these to stop once they are done, in the transaction in which they were closed."""
    for engine_id in engine_ids:
        if services.drain(engine_id, StopReason.PERSON):
            continue
        # One that makes way already finishes what it has; one that is not up must not come up.
        leaving = Engine.objects.filter(pk=engine_id, state=EngineState.DRAINING)
        if not leaving.update(wanted=Wanted.STOPPED, stop_reason=StopReason.PERSON):
            services.stop(engine_id)


def let_go(engine_ids: Collection[int]) -> None:
    """Nobody moves their conversations any more: what else is wanted of them may happen."""
    Engine.objects.filter(pk__in=engine_ids).update(held_until=None)


def open_again(engine_ids: Collection[int]) -> int:
    """Have these engines take requests again; returns how many did not."""
    with transaction.atomic():
        lock(engine_ids)
        opened = list(Engine.objects.filter(pk__in=engine_ids, takes_new=False).values_list("pk", flat=True))
        count = Engine.objects.filter(pk__in=opened).update(takes_new=True, held_until=None)
        _tell(opened)
    return count


def _tell(engine_ids: Iterable[int]) -> None:
    for engine_id in engine_ids:
        publish_on_commit("engine", engine_id)
