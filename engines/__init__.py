"""Engines: processes that serve models.

An *engine* is one process that serves one Variant on one Gpu; a *slot* is one of its places for a running request;
the *head* is a host's Celery worker, which starts, adopts, probes and stops the engines of its host.
This package knows hardware and models (pools) and nothing of conversations (sessions).
"""
