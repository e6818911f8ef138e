"""Whose tokens a sequence holds: told by internal headers, kept with the state wherever it goes inside the engine.

The site alone sends these headers, and lets none of a client's own through. Prefixes are shared between equal tenants only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.errors import InvalidRequest

if TYPE_CHECKING:
    from engines.runtime.handoff_entry import Adopted
    from engines.runtime.http_continue import Resumption

SESSION_HEADER, TENANT_HEADER, RESUME_HEADER = "X-Hydra-Session", "X-Hydra-Tenant", "X-Hydra-Resume-From"
BUDGET_HEADER = "X-Hydra-Budget-S"
# Sent by a site that goes along when the generation moves to another engine.
FOLLOWS_HEADER = "X-Hydra-Follows"
MAX_STORES = 4
_SESSION = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_TENANT = re.compile(r"[0-9a-fA-F]{1,64}")
_STORE = re.compile(r"(\[[0-9a-fA-F:]{2,45}\]|[A-Za-z0-9.-]{1,253}):(\d{1,5})")


@dataclass(frozen=True)
class Origin:
    """`tenant` "" is the one that all share who say none; `session` "" a conversation without a name. The first `system_cut`
    tokens are the system prompt and the tools (0: there are none), which other conversations may begin with."""

    tenant: str = ""
    session: str = ""
    system_cut: int = 0


NOBODY = Origin()


@dataclass(frozen=True)
class RequestOrigin:
    """What a request's headers say: tenant, session, other hosts' stores (address, port) that may hold its prefix, and how much
    of the request's time is left where somebody spent some of it already. `follows`: whoever reads the answer goes along when
    the generation moves; `adopted` is one that moved here, and stands in for the request's own; `resumption` is how far another
    engine came with it."""

    tenant: str = ""
    session: str = ""
    stores: tuple[tuple[str, int], ...] = ()
    budget_s: float | None = None
    follows: bool = False
    adopted: Adopted | None = None
    resumption: Resumption | None = None


UNKNOWN = RequestOrigin()


def read_origin(headers: Mapping[str, str]) -> RequestOrigin:
    """Raises InvalidRequest for a header that is there and malformed."""
    return RequestOrigin(
        tenant=tenant_of(headers).lower(),
        session=plain_session(headers.get(SESSION_HEADER, ""), SESSION_HEADER),
        stores=_stores(headers.get(RESUME_HEADER, "")),
        budget_s=_budget(headers.get(BUDGET_HEADER, "")),
    )


def tenant_of(headers: Mapping[str, str]) -> str:
    """Raises as `read_origin`."""
    tenant = headers.get(TENANT_HEADER, "")
    if tenant and not _TENANT.fullmatch(tenant):
        raise InvalidRequest(f"{TENANT_HEADER} has 1 to 64 hexadecimal digits.", param=TENANT_HEADER)
    return tenant


def plain_session(session: str, param: str) -> str:
    """Raises as `read_origin`."""
    if session and not _SESSION.fullmatch(session):
        raise InvalidRequest(f"{param} has 1 to 128 letters, digits, '_', '.', ':' and '-'.", param=param)
    return session


def _budget(text: str) -> float | None:
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text):
        raise InvalidRequest(f"{BUDGET_HEADER} is a number of seconds.", param=BUDGET_HEADER)
    return float(text)


def _stores(text: str) -> tuple[tuple[str, int], ...]:
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    found = [_STORE.fullmatch(entry) for entry in entries]
    if len(found) > MAX_STORES or not all(match and 0 < int(match[2]) < 65536 for match in found):
        raise InvalidRequest(f"{RESUME_HEADER} has up to {MAX_STORES} entries address:port.", param=RESUME_HEADER)
    return tuple((match[1].strip("[]"), int(match[2])) for match in found if match)
