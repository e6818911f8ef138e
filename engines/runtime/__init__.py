"""The engine's process: one model, one context, one thread that owns them, and an HTTP server around it.

A *generation* is one request on its way to an answer; a *slot* is a sequence of the context that holds one generation
at a time and keeps its tokens afterwards for reuse; a *step* is one call of llama_decode with the sampling behind it.
Knows nothing of Django, Celery, hosts or conversations.
"""
