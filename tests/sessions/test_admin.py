"""The admin: every list and form opens, keys are shown once, commands go through services."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.auth import get_user_model
from django.test import Client
from django.urls import reverse

from engines.models import Engine
from pools.models import Model
from sessions import api_keys
from sessions.models import ApiKey
from tests.rows import add_engine, add_model
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db

OWN_APPS = {"pools", "engines", "hydra_sessions"}


@pytest.fixture
def browser(db: None, settings: Any) -> Client:
    settings.ALLOWED_HOSTS = ["testserver"]
    client = Client()
    client.force_login(get_user_model().objects.create_superuser("admin", password="a password"))
    return client


@pytest.fixture
def engine(db: None, tiny_model: Callable[..., SyntheticModel], tmp_path: Path) -> Engine:
    return add_engine(add_model(tiny_model("llama").path, tmp_path))


def pages() -> list[str]:
    return sorted(model._meta.label_lower for model in admin.site._registry if model._meta.app_label in OWN_APPS)


# Written by machines for machines, or shown on another's page.
WITHOUT_A_PAGE = {
    "hydra_sessions.slotlease",
    "pools.gpuminute",
    "pools.hostaccess",
    "pools.jointoken",
    "pools.reservation",
    "pools.variantfile",
}


def test_every_row_has_a_page() -> None:
    rows = {model._meta.label_lower for model in apps.get_models() if model._meta.app_label in OWN_APPS}
    assert rows - set(pages()) <= WITHOUT_A_PAGE


@pytest.mark.parametrize("label", pages())
def test_every_list_opens_with_rows_in_it(browser: Client, engine: Engine, label: str) -> None:
    api_keys.create_key("laptop")
    answer = browser.get(reverse(f"admin:{label.replace('.', '_')}_changelist"))
    assert answer.status_code == 200


def test_a_new_key_is_shown_once_and_stored_as_a_hash(browser: Client) -> None:
    add = reverse("admin:hydra_sessions_apikey_add")
    assert browser.get(add).status_code == 200
    answer = browser.post(add, {"name": "laptop", "expires_at_0": "", "expires_at_1": ""}, follow=True)
    row = ApiKey.objects.get()
    shown = answer.content.decode().split("shown only this once: ")[1].split("<")[0].strip()
    assert row.key_hash == api_keys.hash_key(shown)
    change = browser.get(reverse("admin:hydra_sessions_apikey_change", args=[row.pk])).content.decode()
    assert shown not in change
    assert row.key_hash not in change


def test_keys_are_revoked_by_an_action(browser: Client) -> None:
    view, _ = api_keys.create_key("laptop")
    chosen = {"action": "revoke", "_selected_action": [view.id]}
    browser.post(reverse("admin:hydra_sessions_apikey_changelist"), chosen)
    assert api_keys.count_valid_keys() == 0


def test_engines_are_commanded_by_actions(browser: Client, engine: Engine) -> None:
    listing = reverse("admin:engines_engine_changelist")
    browser.post(listing, {"action": "stop_engines", "_selected_action": [engine.pk]})
    assert Engine.objects.get().wanted == "stopped"
    browser.post(listing, {"action": "start_engines", "_selected_action": [engine.pk]})
    assert (Engine.objects.get().wanted, Engine.objects.get().epoch) == ("running", 2)


def test_an_engine_can_be_edited_except_for_what_its_head_writes(browser: Client, engine: Engine) -> None:
    change = reverse("admin:engines_engine_change", args=[engine.pk])
    assert browser.get(change).status_code == 200
    fields = {
        "name": "cpu-0",
        "host": engine.host_id,
        "gpu": engine.gpu_id,
        "variant": engine.variant_id,
        "slots": 3,
        "context_tokens": 128,
        "threads": 1,
        "cpu_moe_layers": 0,
        "checkpoints": 4,
        "state": "ready",
        "epoch": 99,
    }
    assert browser.post(change, fields).status_code == 302
    changed = Engine.objects.get()
    assert (changed.slots, changed.context_tokens, changed.state, changed.epoch) == (3, 128, "stopped", 0)
    wrong = {**fields, "further_settings": '{"batch_token": 64}'}
    answer = browser.post(change, wrong)
    assert answer.status_code == 200
    assert "Batch_token is no setting of an engine; did you mean batch_tokens?" in answer.content.decode()
    right = {**fields, "further_settings": '{"batch_tokens": 64}', "whole_vocabulary_slots": "2"}
    assert browser.post(change, right).status_code == 302
    changed.refresh_from_db()
    assert (changed.further_settings, changed.whole_vocabulary_slots) == ({"batch_tokens": 64}, 2)
    emptied = {**fields, "further_settings": "", "initial-further_settings": '{"batch_tokens": 64}'}
    assert browser.post(change, emptied).status_code == 302
    changed.refresh_from_db()
    assert (changed.further_settings, changed.whole_vocabulary_slots) == ({}, None)


def test_a_models_template_and_pooling_can_be_edited_and_a_broken_template_is_refused(
    browser: Client, engine: Engine
) -> None:
    model = Model.objects.get()
    change = reverse("admin:pools_model_change", args=[model.pk])
    assert browser.get(change).status_code == 200
    fields = {"display_name": "Tiny", "generation_defaults": "{}", "chat_template": "{% for", "pooling": "mean"}
    fields["speculation"] = "auto"
    fields |= {
        "load_slots": "0",
        "load_context_tokens": "0",
        "idle_unload_s": "0",
        "kv_type_k": "f16",
        "kv_type_v": "f16",
        "run_mode": "fast",
        "draft_tokens": "4",
        "most_kv_loss": "0.05",
    }
    fields |= {f"variants-{key}_FORMS": "0" for key in ("TOTAL", "INITIAL", "MIN_NUM", "MAX_NUM")}
    answer = browser.post(change, fields)
    assert answer.status_code == 200
    assert "Line 1" in answer.content.decode()
    assert browser.post(change, {**fields, "chat_template": "{{ tools }}"}).status_code == 302
    model.refresh_from_db()
    assert (model.chat_template, model.pooling) == ("{{ tools }}", "mean")
