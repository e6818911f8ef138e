"""Rows of snapshots and the end of sessions: the only writer of Snapshot rows, and of what hosts' stores forget.

A manifest's `session` is the `key_hash` of its ChatSession: it is known before the row is, it already holds the owner, and it
says nothing of the conversation. Manifests are the truth; rows follow them, by what a head that saved one tells (`record`) and
by a sweep over each store (`sweep`). Only manifests that a session of this pool could have made are ever deleted: what is
shared, or was saved by others, is the store's own business.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import blake3
from celery import current_app
from django.db import transaction
from django.utils import timezone
from kombu.exceptions import OperationalError as BrokerError

from engines import store_rows
from engines.store_calls import StoreCaller
from engines.wire_store import SnapshotEntry
from pools.db import database_now
from pools.events import Outage, publish_on_commit
from sessions import retention
from sessions.choices import OPEN_MOVES
from sessions.models import ChatSession, Handoff, Snapshot, Turn

# A session's row may be on its way while its first snapshot is saved; an old one without a row belonged to a deleted session.
UNKNOWN_GRACE_S = 600.0
COMMAND_EXPIRES_S = 300.0
NAMES_A_TASK = 200
SESSIONS_AN_EXPIRY = 500
TURNS_AN_EXPIRY = 2000
MOST_EXPIRIES = 20
_FINGERPRINT_DIGITS = 32
_SESSION_KEY = re.compile(r"[0-9a-f]{64}")
# What a row can hold. Manifests are written by engines of other machines: one with odd figures must not stop the sweep of all.
_MAX_NAME_CHARS = 1024
_MAX_TOKENS = (1 << 31) - 1
_MAX_BYTES = (1 << 63) - 1
_LATEST = datetime(9000, 1, 1, tzinfo=UTC).timestamp()

logger = logging.getLogger(__name__)
# A broker that does not answer is not waited for once for each host and each part of a long list.
_outage = Outage("stores were not told what to drop, their sweeps will see it")


@dataclass(frozen=True)
class SnapshotView:
    """A snapshot as the router and pages see it. `fingerprint` is the digest of what an engine must share; `ready` says
    whether its store answered at its head's last look.
    """

    id: int
    chat_id: int
    store_id: int
    host_name: str
    store_address: str
    store_port: int
    ready: bool
    name: str
    fingerprint: str
    tokens: int
    size_bytes: int
    has_checkpoint: bool
    saved_at: datetime


@dataclass(frozen=True)
class Sweep:
    """What one sweep of a store did."""

    listed: int = 0
    written: int = 0
    dropped: int = 0
    deleted: int = 0


def snapshots_of(chat_id: int) -> tuple[SnapshotView, ...]:
    """A conversation's snapshots on all hosts, the longest first."""
    return _views(Snapshot.objects.filter(chat_id=chat_id))


def snapshots_of_chats(chat_ids: Sequence[int]) -> dict[int, tuple[SnapshotView, ...]]:
    """The same for several conversations at once, by their primary key."""
    found: dict[int, tuple[SnapshotView, ...]] = {}
    for view in _views(Snapshot.objects.filter(chat_id__in=chat_ids)):
        found[view.chat_id] = (*found.get(view.chat_id, ()), view)
    return found


def _views(rows: Iterable[Snapshot]) -> tuple[SnapshotView, ...]:
    endpoints = {endpoint.store_id: endpoint for endpoint in store_rows.endpoints()}
    views = [
        SnapshotView(
            id=row.pk,
            chat_id=row.chat_id,
            store_id=row.store_id,
            host_name=endpoints[row.store_id].host_name,
            store_address=endpoints[row.store_id].address,
            store_port=endpoints[row.store_id].port,
            ready=endpoints[row.store_id].ready,
            name=row.name,
            fingerprint=row.fingerprint,
            tokens=row.tokens,
            size_bytes=row.size_bytes,
            has_checkpoint=row.has_checkpoint,
            saved_at=row.saved_at,
        )
        for row in rows
        if row.store_id in endpoints
    ]
    return tuple(sorted(views, key=lambda view: (-view.tokens, view.id)))


# --- rows follow manifests -------------------------------------------------------------------------


def record(host_name: str, entries: Sequence[SnapshotEntry]) -> int:
    """Write what a host's store is known to hold, as after a park; returns how many rows are new or changed.

    Entries of sessions that have no row are left out. An entry older than its row changes nothing.
    """
    store = store_rows.endpoint(host_name)
    return 0 if store is None else _record(store.store_id, entries)


def _record(store_id: int, entries: Sequence[SnapshotEntry]) -> int:
    # The site records what it had parked, heads what they list: one clock must tell which came later.
    now = database_now()
    entries = [entry for entry in entries if _can_be_a_row(entry)]
    chats = dict(
        ChatSession.objects.filter(key_hash__in={entry.session for entry in entries}).values_list("key_hash", "pk")
    )
    known = {entry.name: entry for entry in entries if entry.session in chats}
    with transaction.atomic():
        old = {row.name: row for row in Snapshot.objects.filter(store_id=store_id, name__in=known)}
        new = [_row(store_id, chats[entry.session], entry, now) for name, entry in known.items() if name not in old]
        # Somebody else may write the same ones now; and a session may go meanwhile, which its rows' key would refuse.
        alive = set(
            ChatSession.objects.select_for_update(no_key=True)
            .filter(pk__in={row.chat_id for row in new})
            .order_by("pk")
            .values_list("pk", flat=True)
        )
        new = [row for row in new if row.chat_id in alive]
        Snapshot.objects.bulk_create(new, ignore_conflicts=True)
        changed = 0
        for name, row in old.items():
            wanted = _row(store_id, chats[known[name].session], known[name], now)
            if not _same(row, wanted):
                changed += _update(wanted)
        Snapshot.objects.filter(store_id=store_id, name__in=known, last_seen_at__lt=now).update(last_seen_at=now)
        for chat_id in {row.chat_id for row in new}:
            publish_on_commit("chat", chat_id)
    return len(new) + changed


def _can_be_a_row(entry: SnapshotEntry) -> bool:
    return (
        0 < len(entry.name) <= _MAX_NAME_CHARS
        and "\0" not in entry.name
        and bool(_SESSION_KEY.fullmatch(entry.session))
    )


def _row(store_id: int, chat_id: int, entry: SnapshotEntry, now: datetime) -> Snapshot:
    fingerprint = blake3.blake3(entry.fingerprint.encode()).hexdigest()[:_FINGERPRINT_DIGITS]
    return Snapshot(
        chat_id=chat_id,
        store_id=store_id,
        name=entry.name,
        fingerprint=fingerprint if entry.fingerprint else "",
        tokens=min(max(0, entry.n_past), _MAX_TOKENS),
        size_bytes=min(max(0, entry.total_size), _MAX_BYTES),
        has_checkpoint=entry.checkpoint,
        # `min` of a NaN keeps it out, too.
        saved_at=datetime.fromtimestamp(min(_LATEST, max(0.0, entry.modified)), UTC),
        last_seen_at=now,
    )


_FACTS = ("chat_id", "fingerprint", "tokens", "size_bytes", "has_checkpoint", "saved_at")


def _same(one: Snapshot, other: Snapshot) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in _FACTS)


def _update(wanted: Snapshot) -> int:
    """A save that is older than the row's is late news."""
    due = Snapshot.objects.filter(store_id=wanted.store_id, name=wanted.name, saved_at__lte=wanted.saved_at)
    return due.update(**{name: getattr(wanted, name) for name in _FACTS}, last_seen_at=wanted.last_seen_at)


def sweep(host_name: str) -> Sweep:
    """Bring the rows of a host's store in line with its manifests, and delete the manifests of sessions that are gone.

    Raises an EngineError when the store does not answer; the rows then stay as they are, and so do those behind the break.
    """
    store = store_rows.endpoint(host_name)
    if store is None:
        # Without a store there is nothing to go on from.
        return Sweep(dropped=Snapshot.objects.filter(store__host__name=host_name).delete()[0])
    began = database_now()
    caller = StoreCaller(store.address, store.port, store.secret)
    listed = written = 0
    strangers: list[str] = []
    for page in caller.snapshots():
        listed += len(page)
        written += _record(store.store_id, page)
        # How old a manifest is, its store told by the clock of this very machine.
        strangers += _of_deleted_sessions(page, timezone.now())
    # Only now: a listing that broke off says nothing of what it did not reach.
    dropped, _ = Snapshot.objects.filter(store_id=store.store_id, last_seen_at__lt=began).delete()
    deleted = caller.delete(strangers) if strangers else 0
    store_rows.mark_swept(store.store_id)
    done = Sweep(listed, written, dropped, deleted)
    if written or dropped or deleted:
        logger.info("store of %s: %s", host_name, done)
    return done


def _of_deleted_sessions(page: Sequence[SnapshotEntry], now: datetime) -> list[str]:
    """Names of manifests that a session of this pool made which has no row any more, nor can be about to get one."""
    oldest = (now - timedelta(seconds=UNKNOWN_GRACE_S)).timestamp()
    ours = [entry for entry in page if _SESSION_KEY.fullmatch(entry.session) and entry.modified < oldest]
    keys = {entry.session for entry in ours}
    known = set(ChatSession.objects.filter(key_hash__in=keys).values_list("key_hash", flat=True)) if keys else set()
    return [entry.name for entry in ours if entry.session not in known]


# --- the end of sessions ---------------------------------------------------------------------------


def delete_chat(chat_id: int, last_move_id: int | None) -> bool:
    """Delete a conversation with its turns and snapshots; once that is committed every store is told to free their bytes.

    `last_move_id` is the newest of its moves when its engines were told to forget it, None where there was none. False, with
    nothing deleted, where it is being moved or was since: who took it in was not told. A store that cannot be told now is swept
    later.
    """
    with transaction.atomic():
        # Nobody begins a move of it meanwhile: that needs the row.
        chats = list(ChatSession.objects.select_for_update().filter(pk=chat_id))
        newest = Handoff.objects.filter(chat_id=chat_id).order_by("-pk").values_list("pk", "state").first()
        if newest is not None and (newest[0] != last_move_id or newest[1] in OPEN_MOVES):
            return False
        _delete(chats)
    return True


def expire_chats() -> int:
    """Delete conversations that nobody has used for HYDRA_SESSION_RETENTION days; returns how many. Bounded a call."""
    limit = retention.kept_since()
    expired = 0
    for _ in range(MOST_EXPIRIES):
        with transaction.atomic():
            # One that a request has just taken up is locked, and skipped.
            chats = ChatSession.objects.select_for_update(skip_locked=True).filter(last_active_at__lt=limit)
            gone = _delete(list(chats.order_by("last_active_at")[:SESSIONS_AN_EXPIRY]))
        expired += gone
        if gone < SESSIONS_AN_EXPIRY:
            break
    if expired:
        logger.info("%d sessions expired", expired)
    return expired


def expire_turns() -> int:
    """Delete what is kept of requests that ended HYDRA_SESSION_RETENTION days ago; returns how many. Bounded a call.

    A conversation in daily use never expires, nor do those that gather requests without a name: their turns would only pile up.
    """
    limit = retention.kept_since()
    # Ended later than it started: the first is for the index. One that runs has no end.
    due = Turn.objects.filter(started_at__lt=limit, ended_at__lt=limit)
    expired = retention.expire(due, "started_at", TURNS_AN_EXPIRY)
    if expired:
        logger.info("%d requests' records expired", expired)
    return expired


def _delete(chats: list[ChatSession]) -> int:
    if not chats:
        return 0
    ChatSession.objects.filter(pk__in=[chat.pk for chat in chats]).delete()
    forget_on_commit([chat.key_hash for chat in chats])
    for chat in chats:
        publish_on_commit("chat", chat.pk)
    return len(chats)


def delete_snapshots(snapshot_ids: Iterable[int]) -> int:
    """Delete snapshots and keep their sessions; once that is committed their stores are told. Returns how many there were."""
    with transaction.atomic():
        rows = Snapshot.objects.filter(pk__in=list(snapshot_ids))
        names: dict[str, list[str]] = {}
        for host_name, name in rows.values_list("store__host__name", "name"):
            names.setdefault(host_name, []).append(name)
        count, _ = rows.delete()
        for host_name, of_host in names.items():
            _tell_on_commit("sessions.tasks.drop_snapshots", host_name, of_host)
    return count


def forget_on_commit(session_keys: Sequence[str]) -> None:
    """Once the transaction commits, tell every host's store to drop what it holds of these sessions."""
    for store in store_rows.endpoints():
        _tell_on_commit("sessions.tasks.forget_sessions", store.host_name, list(session_keys))


def _tell_on_commit(task: str, host_name: str, names: list[str]) -> None:
    for start in range(0, len(names), NAMES_A_TASK):
        part = names[start : start + NAMES_A_TASK]
        transaction.on_commit(lambda part=part: _tell(task, host_name, part), robust=True)


def _tell(task: str, host_name: str, names: list[str]) -> None:
    queue = f"host.{host_name}.fast"
    if _outage.lasts:
        return
    try:
        current_app.send_task(task, args=[host_name, names], queue=queue, expires=COMMAND_EXPIRES_S)
    except BrokerError as error:
        _outage.tell(error)


def forget(host_name: str, session_keys: Iterable[str]) -> int:
    """Delete all manifests of these sessions from the host's store, unless a session has come back; returns how many.

    Raises an EngineError when the store does not answer.
    """
    caller = _caller(host_name)
    if caller is None:
        return 0
    keys = [key for key in session_keys if _SESSION_KEY.fullmatch(key)]
    alive = set(ChatSession.objects.filter(key_hash__in=keys).values_list("key_hash", flat=True))
    freed = 0
    for key in keys:
        if key not in alive:
            names = [entry.name for page in caller.snapshots(session=key) for entry in page]
            freed += caller.delete(names) if names else 0
    return freed


def drop(host_name: str, names: list[str]) -> int:
    """Delete these manifests from the host's store; returns how many were there. Raises an EngineError as `forget`."""
    caller = _caller(host_name)
    return 0 if caller is None else caller.delete(names)


def _caller(host_name: str) -> StoreCaller | None:
    store = store_rows.endpoint(host_name)
    return None if store is None else StoreCaller(store.address, store.port, store.secret)
