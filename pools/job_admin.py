"""Jobs in the admin: asking a host for a build or a download, looking how far it is, cancelling it."""

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from unfold.admin import ModelAdmin

from native.architectures import ArchitectureUnknown, checked
from pools import jobs
from pools.choices import JobKind
from pools.model_reference import ReferenceInvalid, parse_reference
from pools.models import Job

SUBJECT_HELP = (
    "Of a download: a name of the catalogue, hf:owner/repository/file.gguf, a URL or a path. "
    "Of a native build: cpu, or sm_86 sm_120."
)


class JobForm(forms.ModelForm):  # type: ignore[type-arg]
    """What a host is asked for; the subject must be one that this kind of job can read."""

    class Meta:
        model = Job
        fields = ["host", "kind", "subject", "name"]
        help_texts = {"subject": SUBJECT_HELP, "name": "The model's name; empty: the catalogue's, or the file's own."}

    def clean(self) -> dict[str, Any]:
        values: dict[str, Any] = super().clean() or {}
        try:
            values["subject"] = checked_subject(values.get("kind", ""), values.get("subject", ""))
        except ValueError as error:
            self.add_error("subject", str(error))
        return values


def checked_subject(kind: str, subject: str) -> str:
    """The subject in one form, so that two people who ask for the same make one job. Raises ValueError."""
    if kind == JobKind.BUILD:
        try:
            return " ".join(checked(subject.replace(",", " ").split()))
        except ArchitectureUnknown as error:
            raise ValueError(str(error)) from error
    try:
        return str(parse_reference(subject))
    except ReferenceInvalid as error:
        raise ValueError(str(error)) from error


@admin.register(Job)
class JobAdmin(ModelAdmin):
    form = JobForm
    list_display = ["__str__", "host", "state", "progress", "message", "created_at", "ended_at"]
    list_filter = ["kind", "state", "host"]
    search_fields = ["subject", "name"]
    list_select_related = ["host"]
    actions = ["cancel_jobs", "ask_again"]
    # What became of one: only a new one has a form.
    asked = ("host", "kind", "subject", "name")
    told = ("state", "progress", "message", "hint", "created_at", "started_at", "ended_at")
    readonly_fields = told

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        return self.asked if obj is None else (*self.asked, *self.told)

    @admin.display(description="progress")
    def progress(self, job: Job) -> str:
        if not job.total:
            return job.stage
        of = f"{job.total / 1e9:.2f} GB" if job.kind == JobKind.DOWNLOAD else f"{job.total} steps"
        return f"{100 * job.done / job.total:.0f} % of {of} {job.stage}".strip()

    @admin.action(description="Cancel", permissions=["add"])
    def cancel_jobs(self, request: HttpRequest, chosen: QuerySet[Job]) -> None:
        count = sum(jobs.cancel(job.pk) for job in chosen)
        self.message_user(request, f"{count} cancelled.", messages.SUCCESS)

    @admin.action(description="Ask for the same again", permissions=["add"])
    def ask_again(self, request: HttpRequest, chosen: QuerySet[Job]) -> None:
        for job in chosen:
            jobs.enqueue(job.host.name, JobKind(job.kind), job.subject, job.name)
        self.message_user(request, f"{len(chosen)} asked for.", messages.SUCCESS)

    def save_model(self, request: HttpRequest, obj: Job, form: Any, change: bool) -> None:
        obj.pk = jobs.enqueue(obj.host.name, JobKind(obj.kind), obj.subject, obj.name)
