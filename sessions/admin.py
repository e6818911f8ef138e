"""Keys, conversations and turns in the admin. A key is shown once, when it is made; after that only its first characters."""

from functools import cached_property
from typing import Any

from asgiref.sync import async_to_sync
from django import forms
from django.contrib import admin, messages
from django.contrib.admin.actions import delete_selected
from django.core.exceptions import PermissionDenied
from django.db.models import F, QuerySet, Value
from django.db.models.functions import NullIf
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from unfold.admin import ModelAdmin
from unfold.forms import ActionForm
from unfold.views import ChangeList

from engines.errors import EngineError
from sessions import api_keys, drain_admin, kv_losses, lifecycle, snapshots, why_here
from sessions.models import ApiKey, ChatSession, Handoff, KvLoss, Snapshot, Turn

__all__ = ["drain_admin"]  # registers its pages by being imported


class NewKeyForm(forms.ModelForm):
    class Meta:
        model = ApiKey
        fields = ["name", "expires_at"]


@admin.register(ApiKey)
class ApiKeyAdmin(ModelAdmin):
    list_display = ["name", "prefix", "is_open", "created_by", "created_at", "last_used_at", "expires_at", "revoked_at"]
    list_filter = ["revoked_at", "expires_at"]
    search_fields = ["name", "prefix"]
    readonly_fields = ["prefix", "created_by", "created_at", "last_used_at", "revoked_at"]
    fields = ["name", "expires_at", *readonly_fields]
    actions = ["revoke"]

    def get_form(self, request: HttpRequest, obj: ApiKey | None = None, change: bool = False, **kwargs: Any) -> Any:
        if obj is None:
            kwargs["form"] = NewKeyForm
        return super().get_form(request, obj, change=change, **kwargs)

    def get_fields(self, request: HttpRequest, obj: ApiKey | None = None) -> Any:
        return ["name", "expires_at"] if obj is None else super().get_fields(request, obj)

    @admin.display(boolean=True, description="opens the API")
    def is_open(self, key: ApiKey) -> bool:
        return key.is_valid

    @admin.action(permissions=["change"], description="Revoke for good")
    def revoke(self, request: HttpRequest, chosen: QuerySet[ApiKey]) -> None:
        count = api_keys.revoke_keys([key.pk for key in chosen])
        self.message_user(request, f"{count} revoked; it takes effect within seconds.", messages.SUCCESS)

    def save_model(self, request: HttpRequest, obj: ApiKey, form: Any, change: bool) -> None:
        if change:
            api_keys.change_key(obj.pk, obj.name, obj.expires_at)
            return
        view, key = api_keys.create_key(obj.name, created_by_id=request.user.pk, expires_at=obj.expires_at)
        obj.pk = view.id
        self.message_user(request, f"The new API key, shown only this once: {key}", messages.WARNING)


class RecordAdmin(ModelAdmin):
    """Rows that requests write: to be looked at, and deleted when they are of no use any more."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class TargetForm(ActionForm):
    """The engine for the action `move`."""

    engine = forms.CharField(
        required=False,
        max_length=63,
        label="",
        widget=forms.TextInput(
            {
                # As unfold's own choice of an action beside it; shown only with the action that reads it.
                "class": " ".join(
                    f"group-[.changelist-actions]:{name}"
                    for name in (
                        "!bg-white/20",
                        "!text-current",
                        "font-medium",
                        "px-2",
                        "py-1",
                        "rounded-default",
                        "grow",
                    )
                )
                + " min-w-0 placeholder-white text-sm",
                "placeholder": "Name of the engine",
                "aria-label": "Name of the engine to move to",
                "x-show": "action == 'move'",
            }
        ),
    )


@admin.register(ChatSession)
class ChatSessionAdmin(RecordAdmin):
    list_display = [
        "__str__",
        "source",
        "model_name",
        "engine",
        "turn_count",
        "prompt_tokens",
        "completion_tokens",
        "last_active_at",
    ]
    list_filter = ["source", "model_name", "engine"]
    search_fields = ["title"]
    list_select_related = ["engine"]
    date_hierarchy = "last_active_at"
    actions = ["park", "resume", "move", "delete_selected"]
    action_form = TargetForm

    @admin.action(permissions=["delete"], description="Park: save to the store and free the slot")
    def park(self, request: HttpRequest, chosen: QuerySet[ChatSession]) -> None:
        self._each(request, chosen, lifecycle.park, "parked")

    @admin.action(permissions=["delete"], description="Resume anywhere: the router chooses for the next turn")
    def resume(self, request: HttpRequest, chosen: QuerySet[ChatSession]) -> None:
        self._each(request, chosen, lifecycle.resume, "will go on where it costs least")

    @admin.action(
        permissions=["delete"], description="Move to the engine named beside, also in the middle of an answer"
    )
    def move(self, request: HttpRequest, chosen: QuerySet[ChatSession]) -> None:
        name = request.POST.get("engine", "")

        async def act(scope: str | None, session: str) -> Any:
            return await lifecycle.migrate(scope, session, name)

        self._each(request, chosen, act, f"moved to {name}")

    @admin.action(permissions=["delete"], description="Delete: its slot, what stores hold, and its rows")
    def delete_selected(self, request: HttpRequest, chosen: QuerySet[ChatSession]) -> Any:
        """Django's own asks; once answered, it would say that all are gone, also those that stay since a request runs."""
        if not request.POST.get("post"):
            return delete_selected(self, request, chosen)
        if self.get_deleted_objects(chosen, request)[2]:
            raise PermissionDenied
        self.delete_queryset(request, chosen)
        return None

    def _each(self, request: HttpRequest, chosen: QuerySet[ChatSession], act: Any, done: str) -> list[ChatSession]:
        """Those that it could be done to; of each other one the page says why not."""
        acted = []
        for chat in chosen:
            try:
                async_to_sync(act)(None, chat.key_hash)
                acted.append(chat)
            except EngineError as error:
                self.message_user(request, f"{chat}: {error}", messages.ERROR)
        if acted:
            self.message_user(request, f"{len(acted)} {done}.", messages.SUCCESS)
        return acted

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        try:
            return super().delete_view(request, object_id, extra_context)
        except EngineError as error:
            self.message_user(request, f"It was not deleted: {error}", messages.ERROR)
        return HttpResponseRedirect(reverse("admin:hydra_sessions_chatsession_changelist"))

    def delete_model(self, request: HttpRequest, obj: ChatSession) -> None:
        """Raises an EngineError, as SessionBusy, which takes back what was written of the deletion."""
        async_to_sync(lifecycle.delete)(None, obj.key_hash)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[ChatSession]) -> None:
        self.log_deletions(request, self._each(request, queryset, lifecycle.delete, "deleted"))


@admin.register(Snapshot)
class SnapshotAdmin(RecordAdmin):
    list_display = ["name", "chat", "store", "tokens", "size_bytes", "has_checkpoint", "saved_at", "last_seen_at"]
    list_filter = ["store", "has_checkpoint"]
    search_fields = ["name", "chat__title"]
    list_select_related = ["chat", "store__host"]
    date_hierarchy = "saved_at"

    def delete_model(self, request: HttpRequest, obj: Snapshot) -> None:
        snapshots.delete_snapshots([obj.pk])

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Snapshot]) -> None:
        snapshots.delete_snapshots(queryset.values_list("pk", flat=True))


@admin.register(Handoff)
class HandoffAdmin(RecordAdmin):
    list_display = [
        "__str__",
        "chat",
        "source",
        "target",
        "state",
        "cause",
        "kind",
        "tokens",
        "sent_bytes",
        "skipped_bytes",
        "mb_per_s",
        "pause_ms",
        "pause_steps",
        "reason",
        "hint",
        "created_at",
    ]
    list_filter = ["state", "cause", "kind", "source", "target"]
    search_fields = ["reason", "request_id"]
    list_select_related = ["chat", "source", "target"]
    date_hierarchy = "created_at"


@admin.register(KvLoss)
class KvLossAdmin(RecordAdmin):
    """What quants of a family lose to each other: measured while both are served, and anew when a person says so."""

    list_display = [
        "__str__",
        "model",
        "prefill_variant",
        "decode_variant",
        "kl_mean",
        "kl_max",
        "most",
        "same",
        "probe_tokens",
        "problem",
        "measured_at",
    ]
    list_filter = ["prefill_variant__model"]
    list_select_related = ["prefill_variant__model", "decode_variant__model"]
    actions = ["measure_again"]

    @admin.display(description="model", ordering="prefill_variant__model__name")
    def model(self, loss: KvLoss) -> str:
        return str(loss.prefill_variant.model.name)

    @admin.display(description="most that is used")
    def most(self, loss: KvLoss) -> float:
        return float(loss.prefill_variant.model.most_kv_loss)

    @admin.display(description="same likeliest token")
    def same(self, loss: KvLoss) -> str:
        return f"{loss.same_top} of {loss.places}" if loss.places else "not measured"

    @admin.action(permissions=["delete"], description="Measure again")
    def measure_again(self, request: HttpRequest, chosen: QuerySet[KvLoss]) -> None:
        count = kv_losses.measure_again(chosen.values_list("pk", flat=True))
        self.message_user(request, f"{count} are measured again once both quants are served.", messages.SUCCESS)


class TurnList(ChangeList):
    @cached_property
    def first_tokens(self) -> str:
        """How near the predictions came, of the last requests that the filters leave."""
        latest = self.queryset.order_by("-started_at").values_list("first_token_s", "predicted_first_token_s")
        return why_here.summary(latest[: why_here.MOST])


@admin.register(Turn)
class TurnAdmin(RecordAdmin):
    list_display = [
        "short_id",
        "chat",
        "state",
        "engine",
        "why",
        "predicted",
        "first_token",
        "actual_to_predicted",
        "is_background",
        "route",
        "finish_reason",
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
        "tokens_per_s",
        "started_at",
    ]
    list_filter = ["state", "route", "is_background", "model_name", "engine"]
    search_fields = ["request_id", "error_code"]
    list_select_related = ["chat", "engine"]
    list_before_template = "admin/first_tokens.html"
    date_hierarchy = "started_at"

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return TurnList

    @admin.display(description="request", ordering="request_id")
    def short_id(self, turn: Turn) -> str:
        return str(turn.request_id)[:8]

    @admin.display(description="why here")
    def why(self, turn: Turn) -> str:
        return str((turn.explanation or {}).get("why", ""))

    @admin.display(description="predicted, s", ordering="predicted_first_token_s")
    def predicted(self, turn: Turn) -> str:
        return _seconds(turn.predicted_first_token_s)

    @admin.display(description="first token, s", ordering="first_token_s")
    def first_token(self, turn: Turn) -> str:
        return _seconds(turn.first_token_s)

    @admin.display(
        description="actual / predicted",
        ordering=F("first_token_s") / NullIf(F("predicted_first_token_s"), Value(0.0)),
    )
    def actual_to_predicted(self, turn: Turn) -> str:
        times = why_here.ratio(turn.first_token_s, turn.predicted_first_token_s)
        return "" if times is None else f"{times:.2f} ×"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3f}"
