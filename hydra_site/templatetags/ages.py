"""How long ago something was, in the words that the live pages use (static/js/format.js)."""

from __future__ import annotations

from datetime import datetime

from django import template
from django.utils import timezone

register = template.Library()
JUST_NOW_S = 5


@register.filter
def ago(then: datetime) -> str:
    """`just now`, then seconds, minutes, hours, and from two days on days; a time to come is now."""
    seconds = int((timezone.now() - then).total_seconds())
    if seconds < JUST_NOW_S:
        return "just now"
    if seconds < 60:
        return f"{seconds} s ago"
    if seconds < 3600:
        return f"{seconds // 60} min ago"
    return f"{seconds // 3600} h ago" if seconds < 2 * 86400 else f"{seconds // 86400} d ago"
