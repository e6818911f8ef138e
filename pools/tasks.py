"""Tasks of the pool as a whole. They run on the queue `control`, may be lost or run twice, and do no harm either way."""

from celery import shared_task

from pools import services


@shared_task(ignore_result=True)
def sweep_hosts() -> None:
    """Mark hosts that have gone silent as lost."""
    services.mark_lost_hosts()
