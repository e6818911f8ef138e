"""Errors of the store. Their statuses on the wire follow from `http_status`, as the engine's do.

StoreError
├── ObjectNotFound      404  no manifest, object, reservation or lease has that name
├── LeaseLost           503  a reader or writer was too slow: what it read or wrote in place does not count
├── ObjectDamaged       500  the bytes in memory are not those that were stored; the object is gone now
├── DigestMismatch      400  what was written is not what the writer said
├── ObjectTooLarge      413  more bytes than one slab, or the whole store, can hold
├── StoreFull           503  everything is pinned, leased or just being written
└── ManifestInvalid     400  a manifest that contradicts itself or what is stored
StoreUnusable                the process cannot start: its folder is taken, unsafe or out of room
"""

from __future__ import annotations

from engines.errors import EngineError


class StoreError(EngineError):
    code = "store_error"


class ObjectNotFound(StoreError):
    code = "object_not_found"
    http_status = 404
    error_type = "not_found_error"


class ObjectDamaged(StoreError):
    code = "object_damaged"
    hint = (
        "It and the manifests that need it are dropped; save again from the tokens. Repeated damage means bad memory."
    )


class LeaseLost(StoreError):
    code = "lease_lost"
    http_status = 503
    error_type = "unavailable_error"
    retryable = True
    hint = "Throw away what was read or written since, and begin again; ask for a longer lease if this repeats."


class DigestMismatch(StoreError):
    code = "digest_mismatch"
    http_status = 400
    error_type = "invalid_request_error"


class ObjectTooLarge(StoreError):
    code = "object_too_large"
    http_status = 413
    error_type = "invalid_request_error"
    hint = "Raise slab_bytes or capacity_bytes of the store, or cut the object."


class StoreFull(StoreError):
    code = "store_full"
    http_status = 503
    error_type = "unavailable_error"
    retryable = True
    retry_after_s = 2
    hint = "Raise capacity_bytes, unpin manifests, or give tmpfs more room; the store's /metrics tell which of them."


class ManifestInvalid(StoreError):
    code = "manifest_invalid"
    http_status = 400
    error_type = "invalid_request_error"


class StoreUnusable(Exception):
    """The store cannot start; the message is one line for the log."""
