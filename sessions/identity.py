"""Which conversation a request belongs to: a pure function of its headers, its body and who sent it.

There is no standard for this, so every known client's way is understood, in one order: explicit headers first, then the
body's hints: `prompt_cache_key` and `user`, then a hash of how the conversation begins.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from sessions.engine_call import BodyHints

SESSION_HEADERS = (
    "x-hydra-session-id",
    "x-session-id",
    "x-conversation-id",
    "x-openwebui-chat-id",
    "x-litellm-session-id",
    "x-claude-code-session-id",
    "session-id",
    "x-dynamo-session-id",
    "x-smg-routing-key",
)
# Agents of one client session hold conversations of their own; of equally named ones the second header says whose they are.
# Whether a session ends (x-dynamo-session-final, see `sessions.api.route_headers`) is no part of its name.
_AGENT_HEADERS = {
    "x-claude-code-session-id": ("x-claude-code-agent-id", "x-claude-code-parent-agent-id"),
    "x-dynamo-session-id": ("", "x-dynamo-parent-session-id"),
}
MAX_KEY_CHARS = 256
TENANT_DIGITS = 32


@dataclass(frozen=True)
class Owner:
    """Who sent a request: an API key, a panel user, or (both None) a program of this machine."""

    api_key_id: int | None = None
    user_id: int | None = None

    @property
    def scope(self) -> str:
        if self.api_key_id is not None:
            return f"key:{self.api_key_id}"
        return "open" if self.user_id is None else f"user:{self.user_id}"

    @property
    def tenant(self) -> str:
        """Who KV may be shared with, as engines and stores are told: equal for equal owners on all replicas, and no more."""
        return hashlib.sha256(f"hydra tenant {self.scope}".encode()).hexdigest()[:TENANT_DIGITS]


@dataclass(frozen=True)
class Identity:
    """The conversation a request belongs to. `key_hash` names it within its owner and cannot be made up by another."""

    owner: Owner
    key_hash: str

    @classmethod
    def of(cls, owner: Owner, headers: Mapping[str, str], hints: BodyHints) -> Identity:
        """The identity of a request; `headers` has names in lower case."""
        return cls(owner, _hash(owner.scope, *_session_key(headers, hints)))

    @classmethod
    def for_user(cls, user_id: int, session_key: str) -> Identity:
        """The identity of a playground conversation that the page named `session_key`."""
        owner = Owner(user_id=user_id)
        return cls(owner, _hash(owner.scope, "playground", session_key))


def _session_key(headers: Mapping[str, str], hints: BodyHints) -> tuple[str, ...]:
    for name in SESSION_HEADERS:
        if value := headers.get(name, "").strip():
            agent_header, parent_header = _AGENT_HEADERS.get(name, ("", ""))
            agent, parent = (
                headers.get(header, "").strip()[:MAX_KEY_CHARS] for header in (agent_header, parent_header)
            )
            has_parent = parent and (agent or not agent_header)
            return "named", value[:MAX_KEY_CHARS], agent, *([parent] if has_parent else [])
    if cache_key := hints.cache_key.strip():
        return "cache key", cache_key[:MAX_KEY_CHARS]
    if hints.background:
        # A program's own questions are no conversations of anybody's: all of them together are one.
        return "background", hints.opener[0] if hints.opener else ""
    # One user holds many conversations, so the opener still tells them apart.
    return "opener", hints.user.strip()[:MAX_KEY_CHARS], *hints.opener


def _hash(*parts: str) -> str:
    # JSON keeps the parts apart: no two different lists of them give the same bytes.
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
