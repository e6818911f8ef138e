"""Engine rows: commands, claims and what dispatch sees."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from django.utils import timezone

from engines import engine_rows, services
from engines.errors import ModelNotFound, NoEngineReady
from engines.models import Engine
from pools import services as pools
from pools.load_facts import model_form
from pools.services import VariantView
from tests.rows import add_engine, add_model, set_ready
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db


@pytest.fixture
def variant(db: None, tiny_model: Callable[..., SyntheticModel], tmp_path: Path) -> VariantView:
    return add_model(tiny_model("llama").path, tmp_path)


@pytest.fixture
def engine(variant: VariantView) -> Engine:
    return add_engine(variant)


def row(engine: Engine) -> Engine:
    return Engine.objects.get(pk=engine.pk)


def test_a_new_engine_is_wanted_and_an_existing_one_keeps_what_a_person_wants(variant: VariantView) -> None:
    engine = add_engine(variant, slots=2)
    assert (engine.wanted, engine.state) == ("running", "stopped")
    services.stop(engine.pk)
    again = add_engine(variant, slots=3)
    assert again.pk == engine.pk
    assert (again.wanted, again.slots) == ("stopped", 3)


def test_a_start_can_be_claimed_once(engine: Engine) -> None:
    services.start(engine.pk)
    epoch = row(engine).epoch
    task = engine_rows.claim_start(engine.pk, epoch)
    assert task is not None
    assert task.config.model_name == "tiny"
    assert task.config.engine_id == engine.pk
    assert row(engine).state == "starting"
    assert engine_rows.claim_start(engine.pk, epoch) is None


def test_a_command_that_was_overtaken_does_nothing(engine: Engine) -> None:
    services.start(engine.pk)
    late = row(engine).epoch
    services.stop(engine.pk)
    assert engine_rows.claim_start(engine.pk, late) is None
    services.start(engine.pk)
    assert engine_rows.claim_stop(engine.pk, late + 1) is None
    assert engine_rows.claim_start(engine.pk, row(engine).epoch) is not None


def test_a_process_that_a_stop_overtook_is_not_recorded(engine: Engine) -> None:
    services.start(engine.pk)
    engine_rows.claim_start(engine.pk, row(engine).epoch)
    services.stop(engine.pk)
    assert not engine_rows.record_process(engine.pk, 42, 1.0, 8080)
    assert engine_rows.claim_stop(engine.pk, row(engine).epoch) is not None
    assert engine_rows.mark_stopped(engine.pk)
    assert row(engine).state == "stopped"


def test_a_start_that_another_one_overtook_is_not_recorded_over_it(engine: Engine) -> None:
    services.start(engine.pk)
    slow = row(engine).epoch
    engine_rows.claim_start(engine.pk, slow)
    # It took so long that it was given up and begun anew.
    engine_rows.mark_failed(engine.pk, slow, "no process was started in time")
    services.start(engine.pk)
    engine_rows.claim_start(engine.pk, row(engine).epoch)
    assert not engine_rows.record_process(engine.pk, 41, 1.0, 8080, epoch=slow)
    assert engine_rows.record_process(engine.pk, 42, 1.0, 8081, epoch=row(engine).epoch)
    assert not engine_rows.record_process(engine.pk, 43, 1.0, 8082, epoch=row(engine).epoch)
    assert row(engine).pid == 42


def test_health_counts_only_for_the_process_that_the_row_knows(engine: Engine) -> None:
    services.start(engine.pk)
    engine_rows.claim_start(engine.pk, row(engine).epoch)
    assert engine_rows.record_process(engine.pk, 42, 1.0, 8080)
    assert not engine_rows.mark_ready(engine.pk, 41)
    assert engine_rows.mark_ready(engine.pk, 42)
    assert row(engine).ready_at is not None
    assert engine_rows.mark_unhealthy(engine.pk, 42, "silent")
    assert engine_rows.mark_ready(engine.pk, 42)
    assert row(engine).last_error == ""


def test_a_failure_forgets_the_process_and_counts(engine: Engine) -> None:
    set_ready(engine, 8080, pid=42)
    assert engine_rows.mark_failed(engine.pk, row(engine).epoch, "it died")
    failed = row(engine)
    assert (failed.state, failed.pid, failed.http_port, failed.restarts) == ("failed", None, None, 1)
    assert failed.base_url is None
    services.start(engine.pk)
    assert row(engine).restarts == 0


def test_an_old_failure_report_does_not_touch_a_newer_start(engine: Engine) -> None:
    set_ready(engine, 8080)
    old = row(engine).epoch
    services.start(engine.pk)
    assert not engine_rows.mark_failed(engine.pk, old, "late news")


def test_reconcile_brings_up_what_is_wanted_and_gives_up_what_is_stuck(engine: Engine) -> None:
    assert services.reconcile() == 1
    started = row(engine)
    assert started.epoch == 1
    assert services.reconcile() == 0, "the command is still on its way"
    engine_rows.claim_start(engine.pk, 1)
    Engine.objects.update(state_since=timezone.now() - timedelta(hours=1))
    assert services.reconcile() == 1
    assert row(engine).state == "failed"
    assert services.reconcile() == 1
    assert row(engine).epoch == 2


def test_engines_of_a_lost_host_get_no_requests(engine: Engine) -> None:
    set_ready(engine, 8080)
    assert services.ready_engines("tiny")
    pools.mark_lost_hosts(older_than_s=-1)
    services.reconcile()
    assert row(engine).state == "unhealthy"
    with pytest.raises(NoEngineReady):
        services.ready_engines("tiny")


def test_an_engine_that_a_request_did_not_reach_gets_no_more(engine: Engine) -> None:
    set_ready(engine, 8080)
    (endpoint,) = services.ready_engines("tiny")
    assert services.suspect(endpoint)
    assert not services.suspect(endpoint)
    with pytest.raises(NoEngineReady):
        services.ready_engines("tiny")


def test_an_engine_that_moved_to_another_port_meanwhile_is_not_suspected(engine: Engine) -> None:
    set_ready(engine, 8080)
    (endpoint,) = services.ready_engines("tiny")
    set_ready(engine, 8081)
    assert not services.suspect(endpoint)
    assert services.ready_engines("tiny")[0].base_url == "http://127.0.0.1:8081"


def test_dispatch_sees_ready_engines_of_the_named_or_the_default_model(engine: Engine) -> None:
    with pytest.raises(NoEngineReady):
        services.ready_engines("tiny")
    set_ready(engine, 8080)
    (endpoint,) = services.ready_engines(None)
    assert endpoint == services.ready_engines("tiny")[0]
    assert endpoint.base_url == "http://127.0.0.1:8080"
    assert (endpoint.slots, endpoint.context_tokens) == (2, 256)


def test_an_unknown_model_is_told_apart_from_one_that_is_down(engine: Engine) -> None:
    with pytest.raises(ModelNotFound) as raised:
        services.ready_engines("unknown")
    assert raised.value.http_status == 404


def test_a_pool_without_models_says_what_to_do(db: None) -> None:
    with pytest.raises(NoEngineReady, match="no model yet"):
        services.ready_engines(None)


def test_two_hosts_can_both_have_a_first_engine(variant: VariantView) -> None:
    engine = add_engine(variant, host_name="one")
    other = pools.join_host("two")
    assert services.default_engine_name(engine.host_id, "one") == "cpu-0"
    assert services.default_engine_name(other, "two") == "two-cpu-0"


def test_a_command_without_a_broker_is_written_all_the_same(
    engine: Engine, django_capture_on_commit_callbacks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from hydra_site.celery import app

    lonely = Celery("lonely", broker="redis://127.0.0.1:1/0", set_as_current=False)
    lonely.conf.task_publish_retry_policy = app.conf.task_publish_retry_policy
    lonely.set_current()
    try:
        with django_capture_on_commit_callbacks(execute=True):
            assert services.start(engine.pk)
    finally:
        app.set_current()
        lonely.close()
    assert row(engine).wanted == "running"
    assert "was not sent" in caplog.text


def test_an_engine_is_told_what_its_model_chose(engine: Engine) -> None:
    model = engine.variant.model
    assert pools.change_model(
        model.pk,
        display_name="",
        generation_defaults={},
        chat_template="{{ messages }}",
        pooling="",
        speculation="lookup",
        projector_path=" /models/mmproj.gguf ",
        draft_tokens=5,
    )
    task = engine_rows.engine_task(engine.pk)
    assert task is not None
    told = (task.config.chat_template, task.config.speculation, task.config.draft_tokens, task.config.projector_path)
    assert told == ("{{ messages }}", "lookup", 5, "/models/mmproj.gguf")
    model.refresh_from_db()
    assert model_form(engine.variant).draft_tokens == 5
