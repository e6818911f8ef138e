"""The Celery application: heads (host.<name>.fast and .slow), the queue `control`, and beat's schedule."""

import os
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_ready, worker_shutting_down

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "hydra_site.settings")

app = Celery("hydra")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["pools", "engines", "sessions", "hydra_site"])


@worker_ready.connect
def begin_pulse(**_: Any) -> None:
    """The worker of a host's fast queue is what makes the host heard of."""
    from django.conf import settings

    from pools import pulse

    for speed in ("fast", "slow"):
        if f"host.{settings.HYDRA_HOST_NAME}.{speed}" in app.amqp.queues.consume_from:
            # What the supervisor of a head waits for.
            Path(settings.HYDRA_HOME, "run", f"head-{speed}.ready").touch()
            if speed == "fast":
                pulse.start(settings.HYDRA_HOST_NAME)


@worker_shutting_down.connect
def end_pulse(**_: Any) -> None:
    from pools import pulse

    pulse.stop()
