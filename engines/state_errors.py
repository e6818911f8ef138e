"""Why a slot's state cannot leave or enter, and why a move does not go on; imported by way of `engines.errors`."""

from __future__ import annotations

from engines.error_base import EngineError


class StateError(EngineError):
    """Something kept a slot's state from leaving or entering; the slot is free, and empty if it was being filled."""

    code = "state_error"


class SlotNotFound(StateError):
    code = "slot_not_found"
    http_status = 404
    error_type = "not_found_error"
    hint = "GET /slots lists the slots."


class SlotEmpty(StateError):
    code = "slot_empty"
    http_status = 404
    error_type = "not_found_error"
    hint = "A slot has state once a request ran in it."


class SessionNotHeld(StateError):
    code = "session_not_held"
    http_status = 404
    error_type = "not_found_error"
    hint = "It may be in the store already, or on another engine."


class SlotBusy(StateError):
    code = "slot_busy"
    http_status = 409
    error_type = "conflict_error"
    retryable = True
    retry_after_s = 1
    hint = "Wait until GET /slots shows the slot idle, or use another slot."


class SlotFileNotFound(StateError):
    code = "slot_file_not_found"
    http_status = 404
    error_type = "not_found_error"
    hint = "A slot is saved under a name with POST /slots/{id}?action=save."


class SlotFileFailed(StateError):
    code = "slot_file_failed"
    hint = "The disk under slot_save_path is full, failing or not writable."


class SlotOccupied(StateError):
    code = "slot_occupied"
    http_status = 409
    error_type = "conflict_error"
    hint = "Take an empty slot, or allow what it holds to be replaced (erase_existing)."


class StateHasImages(StateError):
    # Not a 409, which a peer takes for "not now".
    code = "state_has_images"
    http_status = 400
    error_type = "invalid_request_error"
    hint = "Send the conversation, images included, to the other engine, which computes it again."


class StateInvalid(StateError):
    code = "state_invalid"
    http_status = 400
    error_type = "invalid_request_error"


class StateIncompatible(StateError):
    code = "state_incompatible"
    http_status = 422
    error_type = "invalid_request_error"
    hint = "Both engines must serve the same model file with the same KV types; GET /slots/{id}/state/meta shows the fingerprint."


class HandoffStale(StateError):
    code = "handoff_stale"
    http_status = 409
    error_type = "invalid_request_error"


class HandoffUnknown(StateError):
    code = "handoff_unknown"
    http_status = 404
    error_type = "not_found_error"


class TargetRefused(StateError):
    """The target of a move does not take it: `param` is its own code; its status and hint are taken over."""

    code = "target_refused"
    http_status = 409
    error_type = "conflict_error"


class GenerationStays(StateError):
    code = "generation_stays"
    http_status = 409
    error_type = "invalid_request_error"


class GenerationMoved(StateError):
    """`param` is the handoff's id: `POST /handoffs/{id}/stream` of the other engine has the rest."""

    code = "generation_moved"
    http_status = 409
    error_type = "invalid_request_error"
    retryable = True


class StateTooLarge(StateError):
    code = "state_too_large"
    http_status = 413
    error_type = "invalid_request_error"
    hint = "Serve the model with a longer context."


class ContextTooShort(StateError):
    code = "context_too_short"
    http_status = 422
    error_type = "invalid_request_error"
    hint = "Have it continued by an engine with a longer context; with X-Hydra-May-Cut: 1 it goes on here as far as it fits."


class StateSharingOff(StateError):
    code = "state_sharing_off"
    http_status = 501
    hint = "The engine's log has the reason; it serves chat all the same."
