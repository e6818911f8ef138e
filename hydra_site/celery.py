"""The Celery application: heads (host.<name>.fast and .slow), the queue `control`, and beat's schedule."""

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "hydra_site.settings")

app = Celery("hydra")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["pools", "engines", "sessions"])
