"""Tasks about conversations. They run on the queue `control`, may be lost or run twice, and do no harm either way."""

from celery import shared_task

from sessions import services


@shared_task(ignore_result=True)
def sweep_turns() -> None:
    """Close turns that nobody will end any more."""
    services.sweep_turns()
