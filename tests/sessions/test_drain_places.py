"""Where something gets empty nothing comes up: neither by a request nor by a person, nor what has no engine there yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from django.test import Client
from django.utils import timezone

from engines import loading
from engines import services as engines
from engines.choices import StopReason
from engines.errors import NoEngineReady
from engines.models import Engine
from pools import reservation
from pools import services as pools
from pools.models import Gpu, VariantFile
from pools.services import VariantView
from sessions import drains
from sessions.choices import DrainKind
from sessions.drains import Subject
from tests.row_locks import meet
from tests.rows import CPU, HOST, add_engine, add_model, set_ready
from tests.sessions.drain_pair import ME
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
CARD = replace(CPU, kind="cuda", uuid="GPU-1", name="A card", arch="sm_86", memory_used_bytes=0)


@pytest.fixture
def second(tmp_path: Path, transactional_db: None, tiny_model: Callable[..., SyntheticModel]) -> VariantView:
    """A model that nobody serves; another one's engine serves on the CPU of a host that has a card, too."""
    first = add_model(tiny_model("llama").path, tmp_path, "first")
    set_ready(add_engine(first), 12345)
    pools.record_probe("here", HOST, [CPU, CARD])
    return add_model(tiny_model("qwen3").path, tmp_path, "second")


def of(kind: str) -> Subject:
    names = {"engine": "cpu-0", "card": "here/cpu0", "host": "here"}
    return drains.named(kind, names[kind])


def begun(kind: str) -> int:
    return drains.begin(of(kind), stops=False, send=False)


def another_engine(variant: VariantView) -> Engine:
    """One on the card, which a person has set up and not started."""
    card = Gpu.objects.get(kind="cuda")
    place = {"host_id": card.host_id, "gpu_id": card.pk, "variant_id": variant.variant_id}
    return Engine.objects.create(name="on-the-card", **place, slots=1, context_tokens=256, threads=1)


def test_nothing_is_loaded_on_a_card_without_engines_of_a_host_that_gets_empty(second: VariantView) -> None:
    card = Gpu.objects.get(kind="cuda")
    assert [drains.named(DrainKind.CARD, name).id for name in ("here/cuda0", "GPU-1")] == [card.pk] * 2
    begun("host")
    with pytest.raises(NoEngineReady, match="No engine serves") as refused:
        loading.want("second")
    assert "let it serve again in the panel" in (refused.value.hint or "") and refused.value.retryable
    there = pools.record_probe("there", HOST, [CPU])
    VariantFile.objects.create(
        variant_id=second.variant_id, host_id=there, path="/there.gguf", checked_at=timezone.now()
    )
    assert loading.want("second").node == "there"
    Engine.objects.filter(host_id=there).delete()
    VariantFile.objects.all().delete()
    assert drains.serve_again(of("host"))
    assert loading.want("second").device == "here/cuda0"


def test_a_place_stays_closed_when_a_person_stops_its_engine_meanwhile(second: VariantView) -> None:
    drain_id = begun(DrainKind.CARD)
    assert drains.claim(drain_id, ME)
    stopped = {"state": "stopped", "wanted": "stopped", "stop_reason": StopReason.PERSON, "http_port": None}
    Engine.objects.update(**stopped)
    pools.record_probe("here", HOST, [CPU, replace(CARD, memory_used_bytes=CARD.memory_total_bytes)])
    with pytest.raises(NoEngineReady):
        loading.want("second")
    assert drains.beat(drain_id, ME, [])
    assert drains.finish(drain_id, ME, [])
    assert reservation.reservations() == []
    assert loading.want("second").device == "here/cpu0", "nothing is there any more that gets empty"


def test_a_person_starts_nothing_there_but_lets_it_serve_again_first(second: VariantView, admin_client: Client) -> None:
    engine = another_engine(second)
    begun("host")
    form = {"action": "start_engines", "_selected_action": [engine.pk]}
    page = admin_client.post("/admin/engines/engine/", form, follow=True).content.decode()
    assert "on-the-card: not started: it, its card or its host is being emptied." in page
    engine.refresh_from_db()
    assert (engine.wanted, engine.epoch) == ("stopped", 0)
    assert drains.serve_again(of("host"))
    assert "1 asked to start" in admin_client.post("/admin/engines/engine/", form, follow=True).content.decode()


@pytest.mark.parametrize("first", ["the start", "the drain"])
def test_an_engine_that_is_started_as_its_host_begins_to_drain_takes_nothing(second: VariantView, first: str) -> None:
    engine = another_engine(second)
    row = Engine.objects.filter(pk=engine.pk)
    works = {"the start": lambda: engines.start(engine.pk), "the drain": lambda: begun("host")}
    order = [first, *(name for name in works if name != first)]
    done = dict(zip(order, meet(row, *(works[name] for name in order)), strict=True))
    assert done["the start"] is (first == "the start")
    engine.refresh_from_db()
    assert (engine.wanted, engine.takes_new) == (("running", False) if done["the start"] else ("stopped", True))


def test_who_asks_for_a_model_is_told_what_its_engines_wait_for(second: VariantView) -> None:
    engine = another_engine(second)

    def hint(**row: object) -> str:
        Engine.objects.filter(pk=engine.pk).update(wanted="running", state="failed", **row)
        with pytest.raises(NoEngineReady, match="No engine serves the model 'second'") as refused:
            loading.want("second")
        return refused.value.hint or ""

    assert "waits for what it starts with" in hint(restarts=0)
    assert "failed and is being looked after" in hint(restarts=2)
    Engine.objects.filter(name="cpu-0").update(variant_id=second.variant_id, takes_new=False)
    assert hint(restarts=0) == hint(restarts=2) == loading.EMPTIED
