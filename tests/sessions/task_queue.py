"""Tasks that were sent, done here one after the other as a worker of the site would."""

from __future__ import annotations

from celery import current_app
from django.db import connections


def do_a_task(queue: str = "control", patience_s: float = 30.0) -> str:
    """Takes the oldest task of the queue and does it; returns its name. Raises queue.Empty where none comes."""
    with current_app.connection_for_read() as connection:
        waiting = connection.SimpleQueue(queue)
        try:
            message = waiting.get(timeout=patience_s)
            message.ack()
        finally:
            waiting.close()
    current_app.loader.import_default_modules()
    args, options, _ = message.payload
    name = str(message.headers["task"])
    try:
        current_app.tasks[name](*args, **options)
    finally:
        connections.close_all()
    return name


def clear_tasks(queue: str = "control") -> None:
    """Nobody does what was sent before."""
    with current_app.connection_for_read() as connection:
        waiting = connection.SimpleQueue(queue)
        waiting.clear()
        waiting.close()
