"""The whole stack, as `manage.py up` starts it."""
