"""The OpenAI-compatible HTTP API: who may use it, what it answers, and how its errors look."""
