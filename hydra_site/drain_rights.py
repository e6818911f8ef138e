"""Who may empty what: the staff with the right to change such rows, as the admin's actions ask."""

from __future__ import annotations

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.core.exceptions import PermissionDenied

from sessions.choices import DrainKind

_RIGHTS: dict[str, str] = {
    DrainKind.ENGINE: "engines.change_engine",
    DrainKind.CARD: "pools.change_gpu",
    DrainKind.HOST: "pools.change_host",
}
_LOOK = "hydra_sessions.view_drain"

Person = AbstractBaseUser | AnonymousUser


def may_drain(user: Person, kind: str) -> bool:
    """Whether they may empty an engine, card or host and let it serve again; False for what is none of these."""
    return _has(user, _RIGHTS.get(kind, ""))


def may_look(user: Person, kind: str) -> bool:
    """Whether they may see how far such a drain is."""
    return may_drain(user, kind) or _has(user, _LOOK)


def require(allowed: bool) -> None:
    """Raises PermissionDenied."""
    if not allowed:
        raise PermissionDenied


def _has(user: Person, right: str) -> bool:
    return bool(user.is_staff and right and user.has_perm(right))  # type: ignore[union-attr]
