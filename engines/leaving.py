"""Engines of hosts that drain or retire: which of them are idle, and what becomes of their rows when the host has left.

`engines.reconcile` decides; a host's head asks its own engines, since only there the question is cheap.
"""

import http.client
import json

from django.conf import settings
from django.db import transaction
from django.db.models.functions import Now

from engines import emptying, engine_rows
from engines.choices import LIVE, SERVING, Wanted
from engines.http_secret import http_secret
from engines.models import Engine
from pools import services as pools
from pools.events import publish_on_commit

SLOTS_TIMEOUT_S = 2.0
MAX_SLOTS_BYTES = 1 << 20
# Sites remember ready engines for a second, so a request may still come after the drain was asked for.
SETTLE_S = 5.0


def idle_engines() -> frozenset[int]:
    """The engines of this host that answer and run no request; none while this host is not to be emptied."""
    age_s = pools.leaving_host_ages_s().get(settings.HYDRA_HOST_NAME)
    if age_s is None or age_s < SETTLE_S:
        return frozenset()
    here = Engine.objects.filter(host__name=settings.HYDRA_HOST_NAME, state__in=SERVING, http_port__isnull=False)
    # Whose conversations are on their way elsewhere waits for the last of them.
    serving = here.exclude(held_until__gt=Now()).values_list("pk", "host__address", "http_port", "rpc_secret")
    return frozenset(pk for pk, *where in serving if _is_idle(*where))


def is_empty(host_id: int) -> bool:
    """Whether no process of any engine of the host may exist any more."""
    return not Engine.objects.filter(host_id=host_id, state__in=LIVE).exists()


def let_go(host_id: int) -> int:
    """Write the engines of a host that has left as stopped and wanted so; returns how many were changed."""
    with transaction.atomic():
        engines = list(Engine.objects.filter(host_id=host_id).values_list("pk", flat=True))
        emptying.lock(engines)
        changed = Engine.objects.filter(pk__in=engines, wanted=Wanted.RUNNING).update(wanted=Wanted.STOPPED)
        for pk in engines:
            engine_rows.mark_stopped(pk, LIVE)
            publish_on_commit("engine", pk)
    return changed


def _is_idle(address: str, port: int, rpc_secret: str) -> bool:
    connection = http.client.HTTPConnection(address, port, timeout=SLOTS_TIMEOUT_S)
    secret = http_secret(rpc_secret, address)
    try:
        connection.request("GET", "/slots", headers={"Authorization": f"Bearer {secret}"} if secret else {})
        slots = json.loads(connection.getresponse().read(MAX_SLOTS_BYTES))
        return all(not slot["is_processing"] for slot in slots)
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return False  # Whoever does not answer is looked after by its health check.
    finally:
        connection.close()
