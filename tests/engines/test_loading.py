"""Loading on demand, on rows: who is started where, who makes way, who is told to wait, and who is refused."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from django.db import connection, transaction
from django.utils import timezone

from engines import draining, emptying, engine_rows, loading, loading_exact, residents, services, tasks
from engines.choices import StopReason
from engines.errors import ModelDoesNotFit, ModelLoading, ModelNotFound, NoEngineReady
from engines.models import Engine
from engines.reconcile import COMMAND_EXPIRES_S, DRAIN_DEADLINE_S, EngineFacts, Step, decide
from pools import device_limits, reservation
from pools import services as pools
from pools.models import Gpu, Model, VariantFile
from pools.services import VariantView
from tests.row_locks import meet
from tests.rows import CPU, HOST, add_engine, add_model, set_ready
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
MIB = 1 << 20
PATIENCE_S = 60.0
Models = Callable[..., SyntheticModel]


@pytest.fixture
def first(home: Path, db: None, tiny_model: Models) -> VariantView:
    pools.record_probe("here", HOST, [CPU])
    return add_model(tiny_model("llama").path, home / "models", "first")


@pytest.fixture
def second(home: Path, first: VariantView, tiny_model: Models) -> VariantView:
    return add_model(tiny_model("qwen3").path, home / "models", "second")


def serving(variant: VariantView, name: str = "cpu-0", *, since_s: float = 60.0) -> Engine:
    """A ready engine whose process nobody looks for."""
    engine = add_engine(variant, name=name)
    set_ready(engine, 12345)
    long_ago = timezone.now() - timedelta(seconds=since_s)
    Engine.objects.filter(pk=engine.pk).update(ready_at=long_ago, state_since=long_ago)
    return Engine.objects.get(pk=engine.pk)


def row(engine_id: int) -> Engine:
    return Engine.objects.get(pk=engine_id)


def engine_of(model: str) -> Engine:
    return Engine.objects.get(variant__model__name=model)


def room_for_one(engine: Engine) -> None:
    """Caps the CPU so that what the engine takes and half of that again is all there is."""
    taken = residents.engine_ledger(engine).host.total_bytes
    assert device_limits.set_memory_limit(Gpu.objects.get().pk, taken * 3 // 2)


def test_a_model_without_an_engine_gets_one_and_who_asks_again_only_hears_how_far_it_is(first: VariantView) -> None:
    with pytest.raises(ModelLoading) as asked:
        loading.engines_for("first")
    assert asked.value.body()["loading"] == {"state": "starting", "node": "here", "device": "here/cpu0"}
    engine = engine_of("first")
    assert (engine.wanted, engine.on_demand, engine.epoch) == ("running", True, 1)
    assert engine.slots == 4
    assert loading.want("first").state == "starting"
    assert row(engine.pk).epoch == 1
    assert reservation.holder_of(loading.load_resource(engine.gpu_id)).owner == loading.load_owner(engine.pk)


def test_what_serves_is_answered_with_and_nothing_is_loaded(first: VariantView) -> None:
    engine = serving(first)
    assert [endpoint.engine_id for endpoint in loading.engines_for("first")] == [engine.pk]
    assert Engine.objects.count() == 1


def test_an_engine_that_a_person_set_up_is_started_as_it_is(first: VariantView) -> None:
    engine = add_engine(first, slots=2)
    Engine.objects.filter(pk=engine.pk).update(wanted="stopped", stop_reason=StopReason.SWAP)
    loading.want("first")
    (only,) = Engine.objects.all()
    assert (only.pk, only.slots, only.context_tokens, only.wanted, only.on_demand) == (
        engine.pk,
        2,
        256,
        "running",
        False,
    )


def test_another_model_makes_way_and_the_new_one_starts_when_it_is_gone(
    first: VariantView, second: VariantView
) -> None:
    old = serving(first)
    room_for_one(old)
    assert loading.want("second").state == "draining"
    new = engine_of("second")
    assert (row(old.pk).state, row(old.pk).wanted, row(old.pk).stop_reason) == ("draining", "stopped", "swap")
    assert (new.state, new.wanted, new.waits_for, new.epoch) == ("stopped", "running", [old.pk], 0)
    with pytest.raises(ModelLoading):
        loading.engines_for("first")
    assert services.reconcile() == 0, "neither is started while the one waits and the other drains"
    assert loading.advance() == 0
    engine_rows.claim_stop(old.pk, row(old.pk).epoch)
    engine_rows.mark_stopped(old.pk)
    assert loading.advance() == 1
    assert (row(new.pk).waits_for, row(new.pk).epoch) == ([], 1)
    assert engine_rows.claim_start(new.pk, 1) is not None
    assert loading.want("second").state == "starting"


def test_who_came_a_moment_ago_does_not_make_way_and_the_other_waits(first: VariantView, second: VariantView) -> None:
    old = serving(first, since_s=1.0)
    room_for_one(old)
    assert loading.want("second").state == "queued"
    assert row(old.pk).state == "ready"
    assert not Engine.objects.filter(variant_id=second.variant_id).exists()


def test_a_pinned_model_stays_and_the_other_is_refused_with_what_would_fit(
    first: VariantView, second: VariantView
) -> None:
    old = serving(first)
    room_for_one(old)
    Model.objects.filter(name="first").update(pinned=True)
    with pytest.raises(ModelDoesNotFit) as refused:
        loading.want("second")
    assert "does not fit: the host of here/cpu0 has " in str(refused.value)
    assert row(old.pk).state == "ready"


def test_slots_and_context_shrink_to_what_fits_unless_somebody_insists(first: VariantView) -> None:
    device = Gpu.objects.get()
    device_limits.set_memory_limit(device.pk, 1200 * MIB)
    Model.objects.filter(name="first").update(load_slots=64, load_context_tokens=8192)
    with pytest.raises(ModelDoesNotFit) as refused:
        loading.want("first")
    assert refused.value.hint is not None
    assert "It would fit as: on the CPU; " in refused.value.hint
    Model.objects.filter(name="first").update(load_slots=0, load_context_tokens=0)
    loading.want("first")
    engine = engine_of("first")
    assert residents.engine_ledger(engine).host.total_bytes <= 1200 * MIB


def test_one_load_at_a_time_on_a_device(first: VariantView) -> None:
    lease = reservation.reserve(loading.load_resource(Gpu.objects.get().pk), "load:999", 60)
    assert lease is not None
    assert loading.want("first").state == "queued"
    assert not Engine.objects.exists()
    reservation.release(lease)
    assert loading.want("first").state == "starting"


def test_the_device_is_free_for_the_next_load_once_the_engine_serves_or_failed(first: VariantView) -> None:
    loading.want("first")
    engine = engine_of("first")
    task = engine_rows.claim_start(engine.pk, 1)
    assert task is not None
    engine_rows.record_process(engine.pk, 7, 1.0, 12345)
    engine_rows.record_progress(engine.pk, 7, 0.5)
    assert loading.want("first").as_dict()["progress"] == 0.5
    engine_rows.mark_ready(engine.pk, 7)
    assert reservation.holder_of(loading.load_resource(engine.gpu_id)) is None
    assert row(engine.pk).load_s is not None


def test_what_a_person_stopped_or_took_off_demand_is_not_loaded(first: VariantView) -> None:
    engine = serving(first)
    services.stop(engine.pk)
    Engine.objects.filter(pk=engine.pk).update(state="stopped")
    with pytest.raises(NoEngineReady, match="No engine serves") as refused:
        loading.want("first")
    assert "stopped in the panel" in (refused.value.hint or "")
    Engine.objects.all().delete()
    Model.objects.update(load_on_demand=False)
    with pytest.raises(NoEngineReady):
        loading.want("first")
    with pytest.raises(ModelNotFound):
        loading.want("unknown")


def test_nothing_is_loaded_on_what_is_being_emptied(first: VariantView, second: VariantView) -> None:
    engine = serving(first)
    emptying.close([engine.pk], 60.0)
    for model in ("first", "second"):
        with pytest.raises(NoEngineReady, match="No engine serves") as refused:
            loading.engines_for(model)
        assert "let it serve again in the panel" in (refused.value.hint or "") and refused.value.retryable
    assert [(one.pk, one.takes_new) for one in Engine.objects.all()] == [(engine.pk, False)]
    # What was closed and went for want of requests is opened by a person, not by a request.
    Engine.objects.update(state="stopped", wanted="stopped", stop_reason=StopReason.IDLE)
    for on_demand in (False, True):
        Engine.objects.update(on_demand=on_demand)
        with pytest.raises(NoEngineReady, match="No engine serves"):
            loading.want("first")
    assert (row(engine.pk).wanted, row(engine.pk).takes_new) == ("stopped", False)
    assert reservation.reservations() == []
    assert emptying.open_again([engine.pk]) == 1
    assert loading.want("first").state == "starting"


def test_a_model_whose_engine_is_being_emptied_is_loaded_elsewhere(first: VariantView) -> None:
    engine = serving(first)
    emptying.close([engine.pk], 60.0)
    there = pools.record_probe("there", HOST, [CPU])
    VariantFile.objects.create(
        variant_id=first.variant_id, host_id=there, path="/there.gguf", checked_at=timezone.now()
    )
    assert loading.want("first").node == "there"
    assert not row(engine.pk).takes_new


def test_a_stop_that_comes_between_the_look_and_the_load_is_obeyed(first: VariantView) -> None:
    engine = add_engine(first)
    Engine.objects.filter(pk=engine.pk).update(wanted="stopped", commanded_at=None)
    with ThreadPoolExecutor(1) as threads:
        with transaction.atomic():
            Engine.objects.select_for_update().get(pk=engine.pk)
            load = threads.submit(wanted_in_a_thread, "first")
            wait_for_a_blocked_update()
            services.stop(engine.pk)  # what a person does in this very moment
        assert load.result(PATIENCE_S).state == "queued"
    assert (row(engine.pk).wanted, row(engine.pk).stop_reason) == ("stopped", StopReason.PERSON)
    assert reservation.reservations() == []


def wanted_in_a_thread(model: str) -> loading.LoadView:
    try:
        return loading.want(model)
    finally:
        connection.close()


def wait_for_a_blocked_update() -> None:
    """Until somebody waits for a row of this transaction."""
    deadline = time.monotonic() + PATIENCE_S
    # Not pg_stat_activity: within a transaction that stays as it was at the first look.
    blocked = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY(pg_blocking_pids(pid))"
    while time.monotonic() < deadline:
        with connection.cursor() as cursor:
            cursor.execute(blocked)
            if cursor.fetchone()[0]:
                return
        time.sleep(0.01)
    raise AssertionError("nobody came to load it")


def test_a_load_and_who_empties_the_same_engines_do_not_wait_for_each_other(
    first: VariantView, second: VariantView
) -> None:
    old = serving(first)
    room_for_one(old)
    mine = add_engine(second, name="mine")
    Engine.objects.filter(pk=mine.pk).update(wanted="stopped", stop_reason=StopReason.SWAP)
    # What makes way has the lower key, and is what a load writes last.
    held, both = Engine.objects.filter(pk=old.pk), [old.pk, mine.pk]
    closed, load = meet(held, lambda: emptying.close(both, 60.0), lambda: loading.want("second"))
    assert (closed, load.state) == (2, "queued")
    assert [row(pk).state for pk in both] == ["ready", "stopped"]


def test_idle_engines_are_unloaded_after_their_models_time_unless_pinned(first: VariantView) -> None:
    engine = serving(first)
    assert loading.idle_overdue("here") == []
    Model.objects.update(idle_unload_s=30)
    assert loading.idle_overdue("here") == [engine.pk]
    loading.touch(engine.pk)
    used_at = row(engine.pk).last_used_at
    assert loading.idle_overdue("here") == []
    loading.touch(engine.pk)
    assert row(engine.pk).last_used_at == used_at, "written at most every few seconds"
    Engine.objects.update(last_used_at=None)
    assert draining.unload_idle("here") == 1
    assert (row(engine.pk).state, row(engine.pk).stop_reason) == ("draining", "idle")
    Engine.objects.update(state="ready")
    Model.objects.update(pinned=True)
    assert loading.idle_overdue("here") == []


@pytest.mark.parametrize("said", [{"wanted": "stopped"}, {"takes_new": False}])
def test_a_load_that_somebody_stops_before_it_began_frees_its_device(
    first: VariantView, second: VariantView, said: dict[str, object]
) -> None:
    old = serving(first)
    room_for_one(old)
    loading.want("second")
    new = engine_of("second")
    Engine.objects.filter(pk=new.pk).update(**said)
    Engine.objects.filter(pk=old.pk).update(state="stopped")
    assert loading.advance() == 0
    assert (row(new.pk).waits_for, row(new.pk).wanted) == ([], "stopped")
    assert reservation.holder_of(loading.load_resource(new.gpu_id)) is None


def test_what_drains_is_asked_again_and_stopped_when_its_time_is_over() -> None:
    draining_now = EngineFacts("stopped", "draining", False, True, 1.0, COMMAND_EXPIRES_S + 1, 0)
    assert decide(draining_now) is Step.DRAIN
    assert decide(replace(draining_now, commanded_age_s=1.0)) is None
    assert decide(replace(draining_now, state_age_s=DRAIN_DEADLINE_S + 1)) is Step.STOP
    assert decide(replace(draining_now, wanted="running")) is Step.DRAIN, "what was begun is brought to its end first"


def test_who_waits_for_others_is_not_started_by_anybody_else() -> None:
    waiting = EngineFacts("running", "stopped", False, False, 60.0, None, 0, waits_for_others=True)
    assert decide(waiting) is None
    assert decide(replace(waiting, waits_for_others=False)) is Step.START


# --- on real processes --------------------------------------------------------------------------------


def test_a_form_that_llama_cpp_refused_is_replaced_by_the_nearest_that_fits(first: VariantView) -> None:
    loading.want("first")
    engine = engine_of("first")
    Engine.objects.filter(pk=engine.pk).update(
        slots=64, context_tokens=1 << 22, last_error="its process ended\nfirst does not fit: …"
    )
    task = engine_rows.claim_start(engine.pk, 1)
    assert task is not None
    refitted = loading_exact.refitted(task)
    assert refitted is not None
    assert refitted.config.cells < task.config.cells
    plan = loading_exact.exact_plan(refitted)
    assert plan is not None
    assert plan["fits"]


def test_a_draining_engine_finishes_what_it_has_and_takes_its_leave(
    home: Path, first: VariantView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "SETTLE_S", 0.2)
    engine = add_engine(first)
    services.start(engine.pk)
    tasks.start_engine(engine.pk, row(engine.pk).epoch)
    deadline = time.monotonic() + PATIENCE_S
    while row(engine.pk).state == "starting" and time.monotonic() < deadline:
        tasks.probe_host("here")
        time.sleep(0.05)
    heard: list[str] = []
    stream = threading.Thread(target=_stream, args=(row(engine.pk).base_url, heard))
    stream.start()
    while not heard:
        time.sleep(0.01)
    assert services.drain(engine.pk, StopReason.SWAP)
    epoch = row(engine.pk).epoch
    looks = [draining.may_stop(engine.pk, epoch)]
    while looks[-1] is False and time.monotonic() < deadline:
        time.sleep(0.05)
        looks.append(draining.may_stop(engine.pk, epoch))
    stream.join()
    assert looks[0] is False
    assert looks[-1] is True
    assert heard[-1] == "[DONE]"
    assert draining.may_stop(engine.pk, epoch - 1) is None
    tasks.drain_engine(engine.pk, epoch)
    assert row(engine.pk).state == "stopped"


def _stream(base_url: str, heard: list[str]) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 200, "stream": True, "ignore_eos": True}
    asked = urllib.request.Request(
        f"{base_url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                heard.append(line.decode().removeprefix("data: ").strip())
