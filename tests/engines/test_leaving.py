"""Engines of hosts that drain or retire."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines import leaving, services
from engines.errors import NoEngineReady
from engines.http_secret import http_secret
from engines.models import Engine
from engines.reconcile import LEAVING_DEADLINE_S, EngineFacts, Step, decide
from pools import host_services
from pools.choices import HostDuty
from tests.rows import add_engine, add_model, set_ready
from tests.synthetic_gguf import SyntheticModel

SECRET = "0123456789abcdef" * 4


def facts(state: str, **other: Any) -> EngineFacts:
    values: dict[str, Any] = {"wanted": "running", "leaving_age_s": 30.0, "commanded_age_s": None, "restarts": 0}
    return EngineFacts(state=state, host_lost=False, has_process=True, state_age_s=10.0, **{**values, **other})


@pytest.mark.parametrize(
    ("given", "step"),
    [
        (facts("ready"), None),
        (facts("ready", is_idle=True), Step.STOP),
        (facts("ready", is_idle=True, commanded_age_s=1.0), None),
        (facts("ready", leaving_age_s=LEAVING_DEADLINE_S + 1), Step.STOP),
        (facts("unhealthy"), Step.STOP),
        (facts("stopped"), None),
        (facts("failed"), None),
        (facts("ready", wanted="stopped"), Step.STOP),
        (facts("stopped", leaving_age_s=None), Step.START),
        (facts("ready", leaving_age_s=None, is_idle=True), None),
    ],
)
def test_an_engine_of_a_host_that_leaves_ends_once_it_is_idle_and_is_not_started_again(
    given: EngineFacts, step: Step | None
) -> None:
    assert decide(given) == step


@pytest.mark.django_db
def test_a_host_that_drains_gets_no_new_requests(tiny_model: Callable[..., SyntheticModel], tmp_path: Path) -> None:
    engine = add_engine(add_model(tiny_model("llama").path, tmp_path))
    set_ready(engine, 1)
    assert services.ready_engines("tiny")
    assert host_services.change_duty(engine.host_id, HostDuty.DRAINING)
    with pytest.raises(NoEngineReady):
        services.ready_engines("tiny")
    assert not leaving.is_empty(engine.host_id)
    assert leaving.let_go(engine.host_id) == 1
    engine.refresh_from_db()
    assert (engine.state, engine.wanted) == ("stopped", "stopped")
    assert leaving.is_empty(engine.host_id)


@pytest.mark.django_db
def test_beyond_loopback_an_engine_is_reached_at_its_hosts_address_with_its_secret(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    engine = add_engine(add_model(tiny_model("llama").path, tmp_path))
    set_ready(engine, 8080)
    Engine.objects.update(rpc_secret=SECRET)
    (near,) = services.ready_engines("tiny")
    assert (near.base_url, near.secret) == ("http://127.0.0.1:8080", "")
    host_services.join_host("here", "fd00::7")
    (far,) = services.ready_engines("tiny")
    assert far.base_url == "http://[fd00::7]:8080"
    assert far.secret == http_secret(SECRET, "fd00::7") != SECRET
    assert far.secret not in repr(far)
    assert SECRET not in far.secret
